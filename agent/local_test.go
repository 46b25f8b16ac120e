package agent

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestReadListeningSuccess(t *testing.T) {
	const heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	f := func(in, want string) {
		t.Helper()
		list, err := readListening(strings.NewReader(in))
		var got []string
		for _, l := range list {
			got = append(got, fmt.Sprintf("%v#%d", l.addr, l.inode))
		}
		if s := strings.Join(got, " "); err != nil || s != want {
			t.Errorf("got %q, %v; want %q", s, err, want)
		}
	}
	f("", "")
	f(heading, "")
	listen := "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000000000000000 100 0 0 10 0\n"
	f(heading+listen, "127.0.0.1:8080#4711")
	f(heading+"   0: 00000000:0050 00000000:0000 0A 0:0 0:0 0 0 0 12 1\n", "0.0.0.0:80#12")
	f(heading+"   0: 00000000000000000000000001000000:1F40 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 13 1\n", "[::1]:8000#13")
	f(heading+"   0: 0000000000000000FFFF00000100000A:1F40 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 14 1\n", "10.0.0.1:8000#14")
	// What is not listening comes after all that is, and is not read.
	f(heading+listen+"   1: 0100007F:1F90 0100007F:A000 01 0:0 0:0 0 0 0 4712 1\n rubbish\n", "127.0.0.1:8080#4711")
}

func TestReadListeningFailure(t *testing.T) {
	f := func(line, want string) {
		t.Helper()
		list, err := readListening(strings.NewReader("heading\n" + line + "\n"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, %v; want %q", line, list, err, want)
		}
	}
	f("0: 0100007F:1F90 0 0A", "too short")
	f("0: 0100007F1F90 0 0A 0 0 0 0 0 1", "not one")
	f("0: 01007F:1F90 0 0A 0 0 0 0 0 1", "not one")
	f("0: 0100007G:1F90 0 0A 0 0 0 0 0 1", "not one")
	f("0: 0100007F:1F90F 0 0A 0 0 0 0 0 1", "not one")
	f("0: 0100007F:1F90 0 0A 0 0 0 0 0 x", "inode")
}

func FuzzReadListening(f *testing.F) {
	f.Add("heading\n0: 0100007F:1F90 0 0A 0 0 0 0 0 1\n")
	f.Add("heading\n0: 0000000000000000FFFF00000100000A:1F40 0 0A 0 0 0 0 0 1\n")
	f.Fuzz(func(t *testing.T, in string) {
		list, err := readListening(strings.NewReader(in))
		if err != nil {
			return
		}
		for _, l := range list {
			if !l.addr.IsValid() || l.addr.Addr().Is4In6() {
				t.Errorf("%q: %v", in, l.addr)
			}
		}
	})
}

// The kernel's own table: a socket of this process is found in it, and known as
// its own.
func TestOwnSocketsAreKnown(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Logf("without %s: %v", address, err)
			continue
		}
		defer l.Close()
		want := netip.MustParseAddrPort(l.Addr().String())
		system := systemSockets()
		list, err := system.list()
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, l := range list {
			if l.addr == want {
				found = true
				if !system.own()[l.inode] {
					t.Errorf("inode %d of %v is not known as the process's own", l.inode, want)
				}
			}
		}
		if !found {
			t.Errorf("%v is not in %v", want, list)
		}
	}
}

// pagesOf are what each kind of engine answers, and those that are none.
var pagesOf = map[string]map[string]string{
	"vllm": {
		"/v1/models": `{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","root":"m"}]}`,
		"/version":   `{"version":"0.31.0"}`,
	},
	"sglang": {
		"/v1/models":      `{"object":"list","data":[{"id":"m","object":"model","owned_by":"sglang","root":"m"}]}`,
		"/get_model_info": `{"model_path":"org/m","tokenizer_path":"org/m","is_generation":true}`,
		// It speaks Ollama's API too.
		"/": "Ollama is running", "/api/version": `{"version":"0.5"}`,
	},
	"tgi": {
		"/v1/models": `{"object":"list","data":[{"id":"org/m","object":"model","created":0,"owned_by":"org/m"}]}`,
		"/info":      `{"model_id":"org/m","max_total_tokens":4096,"router":"text-generation-router","version":"3.3.4"}`,
	},
	"llamacpp": {
		"/v1/models": `{"object":"list","data":[{"id":"m","owned_by":"llamacpp","meta":{}}]}`,
		"/props":     `{"default_generation_settings":{},"total_slots":4,"model_path":"m.gguf"}`,
	},
	"ollama": {
		"/v1/models":   `{"object":"list","data":[{"id":"m:latest","object":"model","owned_by":"library"}]}`,
		"/":            "Ollama is running",
		"/api/version": `{"version":"0.33.0"}`,
	},
}

var noEngines = map[string]map[string]string{
	"a web page":          {"/": "<html>hello</html>"},
	"a router":            {"/v1/models": `{"data":[{"id":"m","owned_by":"vllm"}]}`},
	"an embedding server": {"/info": `{"model_id":"org/e","model_type":{"embedding":{}},"version":"1.8"}`},
	"a chat page":         {"/": "<html>", "/api/version": `{"version":"0.6.5"}`, "/version": `{"version":"1"}`},
	"an empty list":       {"/v1/models": `{"data":[]}`, "/version": `{"version":"1"}`},
	"nothing":             {},
}

func TestRecognise(t *testing.T) {
	f := func(name string, pages map[string]string, status int, server, want string) {
		t.Helper()
		answers := map[string]reply{}
		for path, body := range pages {
			answers[path] = reply{status, server, []byte(body)}
		}
		if got := recognise(answers); got != want {
			t.Errorf("%s: taken for %q, want %q", name, got, want)
		}
	}
	for engine, pages := range pagesOf {
		f(engine, pages, 200, "uvicorn", engine)
		f(engine+" that is loading", pages, 503, "", "")
		f(engine+" behind an agent", pages, 200, "inferrail", "")
	}
	for name, pages := range noEngines {
		f(name, pages, 200, "", "")
	}
	f("llama.cpp that hides its settings", map[string]string{"/v1/models": pagesOf["llamacpp"]["/v1/models"]}, 200, "llama.cpp", "llamacpp")
	cut := `{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","root":"m"},{"id":"adap`
	f("a list that was cut off", map[string]string{"/v1/models": cut, "/version": `{"version":"1"}`}, 200, "", "vllm")
}

// imitation serves the pages of a kind of engine, once it is ready.
type imitation struct {
	pages map[string]string
	ready atomic.Bool
	asked atomic.Int64
}

func (i *imitation) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i.asked.Add(1)
	body, ok := i.pages[r.URL.Path]
	switch {
	case !i.ready.Load():
		http.Error(w, "loading", http.StatusServiceUnavailable)
	case r.URL.Path == "/health" && i.pages["/"] == "":
	case !ok:
		http.NotFound(w, r)
	default:
		fmt.Fprint(w, body)
	}
}

// only makes a look at the sockets see those at some addresses.
type only struct {
	mu    sync.Mutex // guards addrs
	addrs map[string]bool
}

func (o *only) add(addr string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.addrs == nil {
		o.addrs = map[string]bool{}
	}
	o.addrs[addr] = true
}

func (o *only) has(l listening) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.addrs[l.addr.String()]
}

// sockets looks at those addresses, as if another process listened there.
func (o *only) sockets() sockets {
	s := systemSockets()
	s.mine, s.every, s.keep = o.has, 20*time.Millisecond, 0
	s.own = func() map[uint64]bool { return nil }
	return s
}

func TestLocalEnginesAreRecognised(t *testing.T) {
	var see only
	want := map[string]string{}
	start := func(engine string, pages map[string]string) {
		i := &imitation{pages: pages}
		i.ready.Store(true)
		server := httptest.NewServer(i)
		t.Cleanup(server.Close)
		see.add(server.Listener.Addr().String())
		if engine != "" {
			want[server.URL] = engine
		}
	}
	for engine, pages := range pagesOf {
		start(engine, pages)
	}
	for _, pages := range noEngines {
		start("", pages)
	}
	// One that never answers, and one that speaks something else.
	for _, say := range []string{"", "220 mail\r\n"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var served sync.WaitGroup
		served.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				fmt.Fprint(c, say)
				served.Go(func() {
					_, _ = c.Read(make([]byte, 1<<20))
					_, _ = c.Read(make([]byte, 1)) // until it is closed
					c.Close()
				})
			}
		})
		t.Cleanup(func() { l.Close(); served.Wait() })
		see.add(l.Addr().String())
	}
	s := see.sockets()
	doors := map[netip.AddrPort]*door{}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var found []finding
	// On a busy machine a page may not come in time.
	eventually(t, func() bool {
		for _, d := range doors {
			d.next = time.Time{} // as if the pause were over
		}
		var err error
		if found, err = s.look(t.Context(), client, localConfig{}, doors); err != nil {
			t.Fatal(err)
		}
		return len(found) >= len(want)
	}, func() string { return fmt.Sprintf("found %v of %v", found, want) })
	for _, f := range found {
		if want[f.URL] != f.Engine || f.ID != "local/"+strings.TrimPrefix(f.URL, "http://") {
			t.Errorf("found %+v, want %q", f, want[f.URL])
		}
	}
	if len(doors) != len(see.addrs) {
		t.Errorf("%d doors of %d", len(doors), len(see.addrs))
	}
}

// An engine that listens before it is ready is asked again, with pauses that
// grow; what is known is not asked any more.
func TestLoadingEngineIsAskedAgain(t *testing.T) {
	i := &imitation{pages: pagesOf["vllm"]}
	server := httptest.NewServer(i)
	defer server.Close()
	var see only
	see.add(server.Listener.Addr().String())
	s := see.sockets()
	doors := map[netip.AddrPort]*door{}
	look := func() int {
		t.Helper()
		found, err := s.look(t.Context(), http.DefaultClient, localConfig{}, doors)
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	d := func() *door { return doors[netip.MustParseAddrPort(server.Listener.Addr().String())] }
	for n := range 7 {
		if look() != 0 {
			t.Fatal("found before it is ready")
		}
		if want := min(firstPause<<n, lastPause); d().pause != want {
			t.Errorf("pause %v after %d times, want %v", d().pause, n+1, want)
		}
		asked := i.asked.Load()
		if look(); i.asked.Load() != asked {
			t.Error("asked again before the pause is over")
		}
		d().next = time.Time{} // as if the pause were over
	}
	i.ready.Store(true)
	eventually(t, func() bool { d().next = time.Time{}; return look() == 1 }, func() string { return "not found when it is ready" })
	asked := i.asked.Load()
	if look() != 1 || i.asked.Load() != asked {
		t.Error("asked again though it is known")
	}
	// The agent's own ports are not looked at, whoever listens there.
	_, port, _ := net.SplitHostPort(server.Listener.Addr().String())
	if found, err := s.look(t.Context(), http.DefaultClient, localConfig{listen: ":" + port}, map[netip.AddrPort]*door{}); err != nil || len(found) > 0 {
		t.Errorf("%v, %v", found, err)
	}
	server.Close()
	if look() != 0 || len(doors) != 0 {
		t.Errorf("gone, and still known: %v", doors)
	}
}

// One socket for everything is one engine, reached by loopback, and known by
// the node's other addresses.
func TestReachedAt(t *testing.T) {
	f := func(addr, want string) {
		t.Helper()
		if got := fmt.Sprint(reachedAt(netip.MustParseAddrPort(addr))); got != want {
			t.Errorf("%s is reached at %s, want %s", addr, got, want)
		}
	}
	f("0.0.0.0:80", "[127.0.0.1:80]")
	f("[::]:80", "[127.0.0.1:80 [::1]:80]")
	f("[::1]:80", "[[::1]:80]")
	f("10.0.0.1:80", "[10.0.0.1:80]")
	if also := alsoAt(netip.MustParseAddrPort("0.0.0.0:80")); !strings.Contains(strings.Join(also, " "), "127.0.0.1:80") {
		t.Errorf("everywhere is %v", also)
	}
	if also := alsoAt(netip.MustParseAddrPort("10.0.0.1:80")); also != nil {
		t.Errorf("one address is also %v", also)
	}
}

// Two engines that listen are found, one of them though it is configured too,
// and the one that ends is dropped.
func TestLocalDiscoveryFindsAndDrops(t *testing.T) {
	one, two := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	var see only
	see.add(one.Addr())
	see.add(two.Addr())
	c := quick(ReplicaConfig{ID: "mine", URL: strings.Replace(one.URL(), "127.0.0.1", "localhost", 1)})
	c.Discovery.Local = true
	s := newStageOf(t, c, func(f *fleet) { f.discovery.sockets = see.sockets() })
	s.expect("m=mine,local/" + two.Addr())
	s.expectPage(`"engine": "vllm"`, `"source": "static"`, `"source": "local"`)
	two.Close()
	s.expect("m=mine")
	eventually(t, func() bool { _, of := s.fleet.upCount(); return of == 1 }, func() string { return "the closed engine is still a member" })

	// Local discovery is turned off: what it had found leaves.
	startEngine(t, portOf(t, two.Addr()), "m")
	s.expect("m=mine,local/" + two.Addr())
	off := *c
	off.Discovery.Local = false
	if err := s.fleet.reconfigure(&off); err != nil {
		t.Fatal(err)
	}
	if got := s.models(); got != "m=mine" {
		t.Errorf("the fleet is %q", got)
	}
}

func TestLocalDiscoveryWithoutTables(t *testing.T) {
	s := systemSockets()
	s.tables = []string{t.TempDir() + "/tcp"}
	reported := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.watch(ctx, localConfig{}, func(found []finding, err error) {
			if found != nil {
				t.Errorf("found %v", found)
			}
			select {
			case reported <- err:
			default:
			}
		})
	}()
	if err := <-reported; err == nil || !strings.Contains(err.Error(), "none of ") {
		t.Errorf("reported %v", err)
	}
	cancel()
	<-done
}

// TestLocalEngineIsStartedAnew: while nobody listens its model is served by
// nobody, which is not the same as unknown; the engine that comes back is the
// same member.
func TestLocalEngineIsStartedAnew(t *testing.T) {
	one := startEngine(t, 0, "m")
	var see only
	see.add(one.Addr())
	c := quick()
	c.Discovery.Local = true
	s := newStageOf(t, c, func(f *fleet) {
		f.discovery.sockets = see.sockets()
		f.discovery.sockets.keep = time.Hour
	})
	s.expect("m=local/" + one.Addr())
	one.Close()
	s.expect("m=")
	time.Sleep(100 * time.Millisecond) // several looks
	if _, of := s.fleet.upCount(); of != 1 || s.models() != "m=" {
		t.Fatalf("%d members, the fleet is %q", of, s.models())
	}
	startEngine(t, portOf(t, one.Addr()), "m")
	s.expect("m=local/" + one.Addr())
}
