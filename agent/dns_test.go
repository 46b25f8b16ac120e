package agent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/miekg/dns"

	"github.com/inferrail/inferrail/simulator"
)

// nameServer answers from a zone, over UDP and TCP on one port of loopback.
type nameServer struct {
	port string

	mu    sync.Mutex // guards the rest
	zone  map[string][]dns.RR
	rcode map[string]int  // answers of another kind, by name or "name type"
	trunc bool            // over UDP nothing fits
	plain bool            // EDNS is not known
	asked map[string]bool // "name type net"
}

func startNameServer(t *testing.T) *nameServer {
	t.Helper()
	n := &nameServer{asked: map[string]bool{}}
	// A port that is free for UDP may not be for TCP.
	var udp net.PacketConn
	var tcp net.Listener
	for tries := 0; ; tries++ {
		var err error
		if udp, err = net.ListenPacket("udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if tcp, err = net.Listen("tcp", udp.LocalAddr().String()); err == nil {
			break
		}
		udp.Close()
		if tries == 20 {
			t.Fatal(err)
		}
	}
	_, n.port, _ = net.SplitHostPort(udp.LocalAddr().String())
	var running sync.WaitGroup
	t.Cleanup(running.Wait) // runs after the servers' own
	for _, server := range []*dns.Server{{PacketConn: udp, Handler: n}, {Listener: tcp, Handler: n}} {
		ready := make(chan struct{})
		server.NotifyStartedFunc = func() { close(ready) }
		running.Go(func() { _ = server.ActivateAndServe() })
		<-ready
		t.Cleanup(func() { _ = server.Shutdown() })
	}
	return n
}

// set replaces the zone with records in the form of zone files, one a line.
// "name rcode SERVFAIL" answers for the name, "name rcode AAAA SERVFAIL" for
// one type of it, with an error.
func (n *nameServer) set(t *testing.T, zone string) {
	t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.zone, n.rcode = map[string][]dns.RR{}, map[string]int{}
	n.trunc, n.plain = false, false
	for line := range strings.Lines(zone) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
		case words[0] == "truncated":
			n.trunc = true
		case words[0] == "without-edns":
			n.plain = true
		case words[1] == "rcode" && len(words) == 3:
			n.rcode[words[0]] = dns.StringToRcode[words[2]]
		case words[1] == "rcode":
			n.rcode[words[0]+" "+words[2]] = dns.StringToRcode[words[3]]
		default:
			rr, err := dns.NewRR(line)
			if err != nil || rr == nil {
				t.Fatalf("%q: %v", line, err)
			}
			name := rr.Header().Name
			n.zone[name] = append(n.zone[name], rr)
		}
	}
}

func (n *nameServer) ServeDNS(w dns.ResponseWriter, m *dns.Msg) {
	n.mu.Lock()
	defer n.mu.Unlock()
	q := m.Question[0]
	network := w.RemoteAddr().Network()
	n.asked[q.Name+" "+dns.TypeToString[q.Qtype]+" "+network] = true
	reply := new(dns.Msg)
	reply.SetReply(m)
	defer func() { _ = w.WriteMsg(reply) }()
	if n.plain && m.IsEdns0() != nil {
		reply.Rcode = dns.RcodeFormatError
		return
	}
	for _, key := range []string{q.Name, q.Name + " " + dns.TypeToString[q.Qtype]} {
		if rcode, ok := n.rcode[key]; ok {
			reply.Rcode = rcode
			return
		}
	}
	name := q.Name
	for range 8 {
		if n.zone[name] == nil {
			reply.Rcode = dns.RcodeNameError
			break
		}
		next := ""
		for _, rr := range n.zone[name] {
			switch rr := rr.(type) {
			case *dns.CNAME:
				reply.Answer = append(reply.Answer, rr)
				next = rr.Target
			default:
				if rr.Header().Rrtype == q.Qtype {
					reply.Answer = append(reply.Answer, rr)
				}
			}
		}
		if next == "" {
			break
		}
		name = next
	}
	if n.trunc && network == "udp" {
		reply.Answer, reply.Truncated = nil, true
	}
}

// conf points at the server as a resolv.conf would.
func (n *nameServer) conf(search ...string) func() (*dns.ClientConfig, error) {
	return func() (*dns.ClientConfig, error) {
		return &dns.ClientConfig{Servers: []string{"127.0.0.1"}, Port: n.port, Search: search, Ndots: 1, Timeout: 5, Attempts: 2}, nil
	}
}

// Each story in testdata/dns sets up zones and looks names up.
func TestDNSStories(t *testing.T) {
	datadriven.Walk(t, filepath.Join("testdata", "dns"), func(t *testing.T, path string) {
		server := startNameServer(t)
		last := map[uint16][]netip.AddrPort{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "zone":
				server.set(t, d.Input)
				return ""
			case "find":
				c := DNSConfig{Port: 8000, Type: "auto"}
				d.ScanArgs(t, "name", &c.Name)
				if d.HasArg("type") {
					d.ScanArgs(t, "type", &c.Type)
				}
				var search []string
				for _, arg := range d.CmdArgs {
					if arg.Key == "search" {
						search = arg.Vals
					}
				}
				r := resolver{config: server.conf(search...)}
				found, ttl, err := r.find(t.Context(), c, last)
				var out strings.Builder
				for _, f := range found {
					fmt.Fprintln(&out, f.ID, f.URL)
				}
				if found == nil {
					fmt.Fprintln(&out, "as before")
				} else {
					fmt.Fprintln(&out, "for", ttl)
				}
				if err != nil {
					fmt.Fprintln(&out, "error:", err)
				}
				return out.String()
			default:
				d.Fatalf(t, "unknown command %q", d.Cmd)
				return ""
			}
		})
	})
}

func TestDNSAsksOverTCPWhenTruncated(t *testing.T) {
	server := startNameServer(t)
	server.set(t, "truncated\ne.test. 9 IN A 10.0.0.1")
	r := resolver{config: server.conf()}
	found, _, err := r.find(t.Context(), DNSConfig{Name: "e.test", Type: "a", Port: 1}, map[uint16][]netip.AddrPort{})
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if !server.asked["e.test. A udp"] || !server.asked["e.test. A tcp"] {
		t.Errorf("asked: %v", server.asked)
	}
}

// The first server of two is dead: the second is asked.
func TestDNSAsksTheNextServer(t *testing.T) {
	server := startNameServer(t)
	server.set(t, "e.test. 9 IN A 10.0.0.1")
	r := resolver{config: func() (*dns.ClientConfig, error) {
		c, err := server.conf()()
		c.Servers = []string{"127.0.0.99", "127.0.0.1"} // nobody listens at the first: refused
		return c, err
	}}
	found, _, err := r.find(t.Context(), DNSConfig{Name: "e.test", Type: "a", Port: 1}, map[uint16][]netip.AddrPort{})
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
}

func TestDNSWithoutConfiguration(t *testing.T) {
	r := resolver{config: func() (*dns.ClientConfig, error) { return nil, errors.New("open resolv.conf: gone") }}
	if _, _, err := r.find(t.Context(), DNSConfig{Name: "e.test", Port: 1}, nil); err == nil || !strings.Contains(err.Error(), "no name server is known: open") {
		t.Error(err)
	}
}

// A source that hangs does not hold up the end of the agent, nor a start for
// longer than firstFindings.
func TestSilentNameServer(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	_, port, _ := net.SplitHostPort(silent.LocalAddr().String())
	a := startEngine(t, 0, "m")
	c := quick(ReplicaConfig{ID: "a", URL: a.URL()})
	c.Discovery.DNS = []DNSConfig{{Name: "e.test", Type: "a", Port: 8000}}
	began := time.Now()
	s := newStageOf(t, c, func(f *fleet) {
		f.discovery.resolver.config = func() (*dns.ClientConfig, error) {
			return &dns.ClientConfig{Servers: []string{"127.0.0.1"}, Port: port, Timeout: 3600, Attempts: 1}, nil
		}
	})
	s.expect("m=a")
	s.fleet.discovery.close()
	if d := time.Since(began); d > firstFindings+10*time.Second {
		t.Errorf("start and end took %v", d)
	}
}

// Engines come and go in a name while streams run: those that leave finish
// what they stream, and their slot is given away only then.
func TestDNSMembersComeAndGo(t *testing.T) {
	start := func() *simulator.Server {
		server, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, TimePerOutputToken: 20 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { server.Close() })
		return server
	}
	one, two, three := start(), start(), start()
	server := startNameServer(t)
	zone := func(engines ...*simulator.Server) {
		text := "local.test. 1 IN A 127.0.0.1\n"
		for _, e := range engines {
			text += fmt.Sprintf("_http._tcp.e.test. 1 IN SRV 0 0 %d local.test.\n", portOf(t, e.Addr()))
		}
		server.set(t, text)
	}
	zone(one)
	static := startEngine(t, 0, "other")
	c := testConfig(static)
	a := startAgent(t, c)
	defer stopped(t, a)
	a.fleet.discovery.resolver.config = server.conf()
	next := c
	next.Discovery.DNS = []DNSConfig{{Name: "_http._tcp.e.test", Type: "srv", Refresh: 20 * time.Millisecond}}
	if err := a.fleet.reconfigure(&next); err != nil {
		t.Fatal(err)
	}
	ids := func() string {
		var out []string
		for _, m := range a.fleet.current().Listed {
			if m.Name == "m" {
				for _, r := range m.Replicas {
					out = append(out, r.ID)
				}
			}
		}
		slices.Sort(out)
		return strings.Join(out, " ")
	}
	id := func(e *simulator.Server) string { return "_http._tcp.e.test/" + e.Addr() }
	expect := func(want ...string) {
		t.Helper()
		slices.Sort(want)
		eventually(t, func() bool { return ids() == strings.Join(want, " ") }, func() string { return fmt.Sprintf("m is served by %q, want %q", ids(), want) })
	}
	expect(id(one))
	resp := ask(t, a, 200) // four seconds
	in := bufio.NewReader(resp.Body)
	if line, err := in.ReadString('\n'); err != nil || resp.StatusCode != 200 {
		t.Fatalf("status %d, %q, %v", resp.StatusCode, line, err)
	}
	if got := resp.Header.Get("x-inferrail-replica"); got != id(one) {
		t.Fatalf("answered by %q", got)
	}
	slot := func(id string) int {
		a.fleet.mu.Lock()
		defer a.fleet.mu.Unlock()
		for _, m := range slices.Concat(a.fleet.members, a.fleet.leaving) {
			if m.id == id {
				return m.replica.Slot
			}
		}
		return -1
	}
	first := slot(id(one))

	zone(two)
	expect(id(two))
	if got := slot(id(two)); got == first || first < 0 {
		t.Errorf("the slot of a replica that streams, %d, was given to another, %d", first, got)
	}
	if _, body := page(t, a, "/debug/fleet"); !strings.Contains(body, `"state": "leaving"`) || !strings.Contains(body, `"source": "dns:_http._tcp.e.test"`) {
		t.Errorf("the page shows no replica that is leaving, or not where it came from: %s", body)
	}
	if _, body := page(t, a, "/metrics"); strings.Contains(body, `inferrail_replica_up{replica="`+id(one)) || !strings.Contains(body, `inferrail_replica_up{replica="`+id(two)+`"} 1`) {
		t.Error("the series of a replica that has left are still there, or a new one's are not")
	}

	// A look-up that fails takes nothing away.
	server.set(t, "_http._tcp.e.test. rcode SERVFAIL")
	eventually(t, func() bool {
		status, body := page(t, a, "/readyz")
		return status == http.StatusOK && strings.HasPrefix(body, "degraded: ") &&
			strings.Contains(body, "discovery dns:_http._tcp.e.test fails (SRV _http._tcp.e.test: the name server says SERVFAIL)")
	}, func() string { _, body := page(t, a, "/readyz"); return "the failure is not named: " + body })
	if ids() != id(two) {
		t.Errorf("m is served by %q", ids())
	}
	if _, body := page(t, a, "/metrics"); !strings.Contains(body, `inferrail_discovery_up{source="dns:_http._tcp.e.test"} 0`) {
		t.Error("the metrics do not tell that discovery fails")
	}

	rest, err := io.ReadAll(in)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Fatalf("the stream was cut: %v", err)
	}
	eventually(t, func() bool { return slot(id(one)) < 0 }, func() string { return "the replica that has left is not released" })
	zone(two, three)
	expect(id(two), id(three))
	if got := slot(id(three)); got != first {
		t.Errorf("slot %d, want the one that is free again, %d", got, first)
	}
	if status, body := page(t, a, "/readyz"); status != 200 || body != "ok\n" {
		t.Errorf("%d %s", status, body)
	}
}

// A reload that changes what is said of a name's engines, while the name cannot
// be looked up, keeps the engines, their health and their counters.
func TestDNSSettingsChangeWhileTheServerFails(t *testing.T) {
	engine := startEngine(t, 0, "m")
	server := startNameServer(t)
	server.set(t, "e.test. 9 IN A 127.0.0.1")
	c := quick()
	c.Discovery.DNS = []DNSConfig{{Name: "e.test", Type: "a", Port: portOf(t, engine.Addr())}}
	s := newStageOf(t, c, func(f *fleet) { f.discovery.resolver.config = server.conf() })
	id := "e.test/" + engine.Addr()
	s.expect("m=" + id)
	r := s.replica("m")
	m := s.member(id)

	server.set(t, "e.test. rcode SERVFAIL")
	next := *c
	next.Discovery.DNS = []DNSConfig{c.Discovery.DNS[0]}
	next.Discovery.DNS[0].Models, next.Discovery.DNS[0].MaxConcurrency = []string{"m"}, 7
	if err := s.fleet.reconfigure(&next); err != nil {
		t.Fatal(err)
	}
	if got := s.models(); got != "m="+id || s.replica("m") != r || s.standing(id) != up {
		t.Errorf("the fleet is %q, and the replica is another or not up", got)
	}
	s.fleet.mu.Lock()
	if got := m.cfg.MaxConcurrency; got != 7 {
		t.Errorf("max_concurrency is %d", got)
	}
	s.fleet.mu.Unlock()

	// At another port are other engines.
	other := startEngine(t, 0, "m")
	last := next
	last.Discovery.DNS = []DNSConfig{next.Discovery.DNS[0]}
	last.Discovery.DNS[0].Port = portOf(t, other.Addr())
	if err := s.fleet.reconfigure(&last); err != nil {
		t.Fatal(err)
	}
	s.expect("m=e.test/" + other.Addr())
}

// Answers from random bytes never bring down the reader of answers.
func FuzzReadAnswer(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("e.test.", dns.TypeA)
	rr, err := dns.NewRR("e.test. 9 IN A 10.0.0.1")
	if err != nil {
		f.Fatal(err)
	}
	m.Answer = []dns.RR{rr}
	packed, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(packed, uint16(dns.TypeA))
	f.Fuzz(func(t *testing.T, packet []byte, qtype uint16) {
		reply := new(dns.Msg)
		if reply.Unpack(packet) != nil {
			return
		}
		a := readAnswer(reply, qtype)
		for _, rr := range a.records {
			if rr.Header().Rrtype != qtype {
				t.Errorf("asked for %d, got %v", qtype, rr)
			}
		}
		for _, addr := range a.addrs(80) {
			if !addr.IsValid() {
				t.Errorf("not an address: %v in %v", addr, a.records)
			}
		}
	})
}
