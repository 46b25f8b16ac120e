package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

const (
	// defaultRefresh is DNSConfig.Refresh when it is not set.
	defaultRefresh = 30 * time.Second
	// leastTTL keeps an answer that may not be kept from being asked for all
	// the time.
	leastTTL = time.Second
	// afterFailure is the pause after a look-up that failed.
	afterFailure = 5 * time.Second
)

// resolver looks names up with the servers and the search list of a
// resolv.conf. It has no state; its methods may be called from any goroutine.
type resolver struct {
	// config is asked before each look-up: the file may change.
	config func() (*dns.ClientConfig, error)
}

func systemResolver() (*dns.ClientConfig, error) {
	return dns.ClientConfigFromFile("/etc/resolv.conf")
}

// watch looks c's name up again and again, until ctx is done.
//
// A look-up that fails or comes back empty, however often, takes nothing away:
// an authority that has lost its records is as likely as a deployment that has
// no engine any more, and engines that are gone are found down by their checks.
func (r *resolver) watch(ctx context.Context, c DNSConfig, report func([]finding, error)) {
	refresh := c.Refresh
	if refresh <= 0 {
		refresh = defaultRefresh
	}
	last := map[uint16][]netip.AddrPort{}
	for {
		found, ttl, err := r.find(ctx, c, last)
		if ctx.Err() != nil {
			return
		}
		report(found, err)
		pause := min(refresh, max(ttl, leastTTL))
		if err != nil {
			pause = min(refresh, afterFailure)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// find looks the name up once. last is what each record type gave the last time
// that it gave anything or was known to have nothing, while others had; it is
// updated. nil stands for the findings of the last time.
func (r *resolver) find(ctx context.Context, c DNSConfig, last map[uint16][]netip.AddrPort) ([]finding, time.Duration, error) {
	conf, err := r.config()
	if err != nil {
		return nil, 0, fmt.Errorf("no name server is known: %w", err)
	}
	if c.Type == "srv" {
		addrs, ttl, err := r.services(ctx, conf, c.Name)
		if err != nil {
			return nil, 0, err
		}
		return c.findings(addrs), ttl, nil
	}
	if c.Port < 1 || c.Port > 65535 {
		return nil, 0, fmt.Errorf("%s: port %d is not one; give the port of the engines", c.Name, c.Port)
	}
	types := []uint16{dns.TypeA, dns.TypeAAAA}
	switch c.Type {
	case "a":
		types = types[:1]
	case "aaaa":
		types = types[1:]
	}
	answers := r.search(ctx, conf, c.Name, types...)
	var all []netip.AddrPort
	var errs []error
	var ttl time.Duration
	some := false
	for i, a := range answers {
		some = some || len(a.records) > 0
		if len(a.records) > 0 && (ttl == 0 || a.ttl < ttl) {
			ttl = a.ttl
		}
		if a.err != nil {
			errs = append(errs, fmt.Errorf("%s %s: %w", dns.TypeToString[types[i]], c.Name, a.err))
		}
	}
	if !some {
		if len(errs) == 0 {
			errs = append(errs, fmt.Errorf("%s: %s", c.Name, answers[0].nothing()))
		}
		return nil, 0, errors.Join(errs...)
	}
	for i, a := range answers {
		if a.err == nil {
			last[types[i]] = a.addrs(uint16(c.Port))
		}
		// One type that fails keeps its last addresses beside the other's.
		all = append(all, last[types[i]]...)
	}
	return c.findings(all), ttl, errors.Join(errs...)
}

// findings makes a replica of each address.
func (c *DNSConfig) findings(addrs []netip.AddrPort) []finding {
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	out := []finding{}
	for _, a := range slices.Compact(addrs) {
		out = append(out, finding{ReplicaConfig: ReplicaConfig{
			ID:  strings.TrimSuffix(c.Name, ".") + "/" + a.String(),
			URL: "http://" + a.String(), Engine: c.Engine, Models: c.Models,
			APIKey: c.APIKey, APIKeyFile: c.APIKeyFile,
			MaxConcurrency: c.MaxConcurrency, MaxPending: c.MaxPending, KVEvents: c.KVEvents,
		}})
	}
	return out
}

// addrs is where the engines of findings are, with another port unless that is
// 0 or the records bring their own.
func (c *DNSConfig) addrs(found []finding, port int) []netip.AddrPort {
	var out []netip.AddrPort
	for _, f := range found {
		addr, err := netip.ParseAddrPort(strings.TrimPrefix(f.URL, "http://"))
		if err != nil {
			continue
		}
		if c.Type != "srv" && port != 0 {
			addr = netip.AddrPortFrom(addr.Addr(), uint16(port))
		}
		out = append(out, addr)
	}
	return out
}

// services returns the addresses of those targets of an SRV name that are to be
// preferred: the group of the lowest priority number. The proxy's policies
// share the load, not the weights.
func (r *resolver) services(ctx context.Context, conf *dns.ClientConfig, name string) ([]netip.AddrPort, time.Duration, error) {
	a := r.search(ctx, conf, name, dns.TypeSRV)[0]
	if a.err != nil {
		return nil, 0, fmt.Errorf("SRV %s: %w", name, a.err)
	}
	var targets []*dns.SRV
	for _, rr := range a.records {
		if srv := rr.(*dns.SRV); srv.Target != "." && srv.Port != 0 {
			targets = append(targets, srv)
		}
	}
	if len(targets) == 0 {
		return nil, 0, fmt.Errorf("SRV %s: %s", name, a.nothing())
	}
	lowest := slices.MinFunc(targets, func(a, b *dns.SRV) int { return cmp.Compare(a.Priority, b.Priority) }).Priority
	ttl := a.ttl
	var addrs []netip.AddrPort
	for _, srv := range targets {
		if srv.Priority != lowest {
			continue
		}
		// A target is one engine, whichever way it is reached: IPv4 is enough.
		var found answer
		for _, t := range []uint16{dns.TypeA, dns.TypeAAAA} {
			found = r.ask(ctx, conf, dns.Fqdn(srv.Target), t)
			if found.err != nil {
				return nil, 0, fmt.Errorf("%s %s: %w", dns.TypeToString[t], srv.Target, found.err)
			}
			if len(found.records) > 0 {
				addrs = append(addrs, found.addrs(srv.Port)...)
				ttl = min(ttl, found.ttl)
				break
			}
		}
	}
	if len(addrs) == 0 {
		return nil, 0, fmt.Errorf("SRV %s: no target has an address", name)
	}
	return addrs, ttl, nil
}

// answer is what servers say to one question.
type answer struct {
	records []dns.RR // of the type that was asked for; all aliases followed
	ttl     time.Duration
	rcode   int
	err     error // no server gave an answer
}

func (a *answer) nothing() string {
	if a.rcode == dns.RcodeNameError {
		return "the name does not exist"
	}
	return "no address is known"
}

func (a *answer) addrs(port uint16) []netip.AddrPort {
	out := []netip.AddrPort{}
	for _, rr := range a.records {
		var ip net.IP
		switch rr := rr.(type) {
		case *dns.A:
			ip = rr.A
		case *dns.AAAA:
			ip = rr.AAAA
		}
		if addr, ok := netip.AddrFromSlice(ip); ok {
			out = append(out, netip.AddrPortFrom(addr.Unmap(), port))
		}
	}
	return out
}

// search asks for records of all types under the names that the search list
// makes of name, until one has any. It returns an answer for each type.
func (r *resolver) search(ctx context.Context, conf *dns.ClientConfig, name string, types ...uint16) []answer {
	out := make([]answer, len(types))
	for i, full := range conf.NameList(name) {
		some := false
		for j, t := range types {
			a := r.ask(ctx, conf, full, t)
			some = some || len(a.records) > 0
			// A failure is remembered: the name may exist where nobody answered.
			if i == 0 || len(a.records) > 0 || out[j].err == nil {
				out[j] = a
			}
		}
		if some {
			break
		}
	}
	return out
}

// ask puts one question to the servers in turn, until one answers it.
func (r *resolver) ask(ctx context.Context, conf *dns.ClientConfig, full string, t uint16) answer {
	err := errors.New("no name server is known")
	for range max(conf.Attempts, 1) {
		for _, server := range conf.Servers {
			var reply *dns.Msg
			if reply, err = exchange(ctx, conf, net.JoinHostPort(server, conf.Port), full, t); err != nil {
				if ctx.Err() != nil {
					return answer{err: ctx.Err()}
				}
				err = plainError(err)
				continue
			}
			if reply.Rcode != dns.RcodeSuccess && reply.Rcode != dns.RcodeNameError {
				err = fmt.Errorf("the name server says %s", dns.RcodeToString[reply.Rcode])
				continue
			}
			return readAnswer(reply, t)
		}
	}
	return answer{err: err}
}

// readAnswer takes the records of one type out of a reply. Their time to live
// is the shortest of theirs and of the aliases that lead to them.
func readAnswer(reply *dns.Msg, t uint16) answer {
	a := answer{rcode: reply.Rcode}
	for i, rr := range reply.Answer {
		h := rr.Header()
		if ttl := time.Duration(h.Ttl) * time.Second; i == 0 || ttl < a.ttl {
			a.ttl = ttl
		}
		if h.Rrtype == t && h.Class == dns.ClassINET {
			a.records = append(a.records, rr)
		}
	}
	return a
}

// exchange asks one server, over TCP when the answer does not fit a datagram.
func exchange(ctx context.Context, conf *dns.ClientConfig, server, full string, t uint16) (*dns.Msg, error) {
	question := new(dns.Msg)
	question.SetQuestion(dns.Fqdn(full), t)
	question.SetEdns0(1232, false)
	client := &dns.Client{Timeout: time.Duration(max(conf.Timeout, 1)) * time.Second}
	reply, err := roundTrip(ctx, client, question, server)
	if err == nil && (reply.Rcode == dns.RcodeFormatError || reply.Rcode == dns.RcodeNotImplemented) {
		// An old server does not know EDNS.
		question.Extra = nil
		reply, err = roundTrip(ctx, client, question, server)
	}
	if err == nil && reply.Truncated {
		client.Net = "tcp"
		reply, err = roundTrip(ctx, client, question, server)
	}
	return reply, err
}

// roundTrip ends when ctx does. The client alone knows deadlines only.
func roundTrip(ctx context.Context, client *dns.Client, question *dns.Msg, server string) (*dns.Msg, error) {
	conn, err := client.DialContext(ctx, server)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	unhook := context.AfterFunc(ctx, func() { conn.Close() })
	defer unhook()
	reply, _, err := client.ExchangeWithConnContext(ctx, question, conn)
	return reply, err
}
