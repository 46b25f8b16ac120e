package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/simulator"
)

// stage is a fleet under test and what it published.
type stage struct {
	*testing.T
	fleet *fleet

	mu        sync.Mutex // guards what follows
	published *proxy.Fleet
	engines   []netip.AddrPort
}

func newStage(t *testing.T, models []ModelConfig, replicas ...ReplicaConfig) *stage {
	t.Helper()
	c := DefaultConfig()
	c.Health.Interval, c.Health.Timeout, c.Health.UnhealthyThreshold = 10*time.Millisecond, 200*time.Millisecond, 2
	c.Models, c.Replicas = models, replicas
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return newStageOf(t, &c)
}

// newStageOf is a fleet with a whole configuration. What prepare does is done
// before the fleet starts.
func newStageOf(t *testing.T, c *Config, prepare ...func(*fleet)) *stage {
	t.Helper()
	s := &stage{T: t}
	s.fleet = newFleet(c, testLog(t), func(f *proxy.Fleet) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.published = f
	}, func(engines []netip.AddrPort) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.engines = engines
	})
	for _, p := range prepare {
		p(s.fleet)
	}
	if err := s.fleet.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.fleet.close)
	return s
}

// models renders the snapshot: model(aliases)=replicas.
func (s *stage) models() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, m := range s.published.Listed {
		var ids []string
		for _, r := range m.Replicas {
			ids = append(ids, r.ID)
		}
		aliases := ""
		for _, a := range m.Aliases {
			aliases += "(" + a + ")"
			if s.published.Models[a] != m {
				s.Errorf("alias %s does not lead to %s", a, m.Name)
			}
		}
		if s.published.Models[m.Name] != m {
			s.Errorf("%s is listed but cannot be found", m.Name)
		}
		out = append(out, m.Name+aliases+"="+strings.Join(ids, ","))
	}
	return strings.Join(out, " ")
}

func (s *stage) replica(model string) *proxy.Replica {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.published.Models[model].Replicas[0]
}

// expect waits until the snapshot is as wanted.
func (s *stage) expect(want string) {
	s.Helper()
	var got string
	eventually(s.T, func() bool { got = s.models(); return got == want }, func() string {
		return fmt.Sprintf("the fleet is %q, want %q", got, want)
	})
}

func eventually(t *testing.T, ok func() bool, otherwise func() string) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(otherwise())
		}
	}
}

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// startEngine starts a simulated engine, on a free port when port is 0.
func startEngine(t *testing.T, port int, models ...string) *simulator.Server {
	t.Helper()
	server, err := simulator.Start(simulator.Config{Port: port, ServedModelName: models, ZeroLatency: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return server
}

func portOf(t *testing.T, addr string) int {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestFleetLearnsModels(t *testing.T) {
	a, b := startEngine(t, 0, "llama", "adapter"), startEngine(t, 0, "llama")
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()})
	// Known without waiting: the start checks each replica once.
	if got, want := s.models(), "adapter=a llama=a,b"; got != want {
		t.Fatalf("the fleet is %q, want %q", got, want)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.published.Models["llama"]; m.OwnedBy != "vllm" || m.MaxModelLen != 32768 || m.Created == 0 || m.Policy == nil {
		t.Errorf("what the engine said of its model is lost: %+v", m)
	}
	want := []netip.AddrPort{netip.MustParseAddrPort(a.Addr()), netip.MustParseAddrPort(b.Addr())}
	slices.SortFunc(want, netip.AddrPort.Compare)
	if !slices.Equal(s.engines, want) {
		t.Errorf("the datapath was told of %v, want %v", s.engines, want)
	}
}

func TestFleetAppliesModelConfig(t *testing.T) {
	a := startEngine(t, 0, "llama", "gpt-4o")
	s := newStage(t,
		[]ModelConfig{{Name: "llama", Aliases: []string{"l", "gpt-4o"}}, {Name: "absent", Aliases: []string{"x"}}},
		ReplicaConfig{ID: "a", URL: a.URL()})
	// An alias named like a model that an engine serves gives way. A model
	// that no engine serves is known, but not shown.
	s.expect("gpt-4o=a llama(l)=a")
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range []string{"absent", "x"} {
		if m := s.published.Models[name]; m == nil || m.Name != "absent" || len(m.Replicas) > 0 {
			t.Errorf("%s leads to %+v", name, m)
		}
	}
}

func TestFleetTakesModelsFromConfig(t *testing.T) {
	a := startEngine(t, 0, "llama", "adapter")
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: a.URL(), Models: []string{"llama"}})
	s.expect("llama=a")
}

func TestEngineThatAnswersLaterJoins(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := portOf(t, l.Addr().String())
	l.Close()
	s := newStage(t, nil, ReplicaConfig{ID: "late", URL: fmt.Sprintf("http://127.0.0.1:%d", port)})
	s.expect("")
	if up, of := s.fleet.upCount(); up != 0 || of != 1 {
		t.Fatalf("%d of %d up", up, of)
	}
	startEngine(t, port, "m")
	s.expect("m=late")
	<-s.fleet.serving
}

func TestEngineRestartedBehindTheSameAddress(t *testing.T) {
	engine := startEngine(t, 0, "old")
	port := portOf(t, engine.Addr())
	s := newStage(t, nil, ReplicaConfig{ID: "r", URL: engine.URL()})
	s.expect("old=r")
	replica := s.replica("old")

	engine.Close()
	// Its model stays known: a request is told to come back, not that it erred.
	s.expect("old=")
	startEngine(t, port, "new")
	s.expect("new=r")
	if s.replica("new") != replica {
		t.Error("the replica's counters and connections were thrown away")
	}
}

// A restart between two checks is never seen as a failure; the new process is
// asked for its models all the same.
func TestQuickRestartIsNoticed(t *testing.T) {
	engine := startEngine(t, 0, "old")
	port := portOf(t, engine.Addr())
	s := newStage(t, nil, ReplicaConfig{ID: "r", URL: engine.URL()})
	s.expect("old=r")
	engine.Close()
	startEngine(t, port, "new")
	s.expect("new=r")
}

func TestSilentEngineDelaysNobody(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // connects, and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	good := startEngine(t, 0, "m")
	began := time.Now()
	s := newStage(t, nil,
		ReplicaConfig{ID: "silent", URL: "http://" + silent.Addr().String()},
		ReplicaConfig{ID: "good", URL: good.URL()})
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("the start took %v", d)
	}
	s.expect("m=good")
}

// Checks that get no answer may mean a dead engine or a busy one. It is left
// alone while others serve its model, and tried when none does.
func TestSilentEngineIsTheLastResort(t *testing.T) {
	first, second := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	s := newStage(t, nil, ReplicaConfig{ID: "first", URL: first.URL()}, ReplicaConfig{ID: "second", URL: second.URL()})
	s.expect("m=first,second")

	// Behind first's address connections are accepted and nothing is said.
	first.Close()
	silent, err := net.Listen("tcp", first.Addr())
	if err != nil {
		t.Fatal(err)
	}
	s.expect("m=second")
	second.Close()
	s.expect("m=first")
	if up, _ := s.fleet.upCount(); up != 0 || !s.fleet.routes() {
		t.Errorf("%d up, routes %v", up, s.fleet.routes())
	}
	silent.Close()
	s.expect("m=")
	if s.fleet.routes() {
		t.Error("a fleet of dead engines takes requests")
	}
}

// quick is a configuration whose health checks come every 10 ms.
func quick(replicas ...ReplicaConfig) *Config {
	c := DefaultConfig()
	c.Health.Interval = 10 * time.Millisecond
	c.Replicas = replicas
	return &c
}

// fail tells the fleet of the third request in a row that has failed at r.
func fail(r *proxy.Replica) { r.OnFailure(3, errors.New("it was closed before an answer")) }

// An engine that answers its checks while requests fail is ejected for a time
// and then takes less than its share.
func TestFailingRequestsEject(t *testing.T) {
	a, b := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	c := quick(ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()})
	c.Health.EjectionBackoff, c.Health.SlowStart = 2*time.Second, time.Hour
	s := newStageOf(t, c)
	s.expect("m=a,b")
	first := s.replica("m")
	if share := first.Share(time.Now()); share != 1 {
		t.Errorf("a fleet that starts gives the first replica %v of its share", share)
	}
	first.OnFailure(2, errors.New("refused"))
	if got := s.models(); got != "m=a,b" {
		t.Fatalf("two failures of three eject: %q", got)
	}
	began := time.Now()
	fail(first)
	if got := s.models(); got != "m=b" {
		t.Fatalf("the third failure is over and the fleet is %q", got)
	}
	t.Logf("ejected after %v", time.Since(began))
	s.expectPage(`"state": "ejected"`, `"why": "it was closed before an answer"`, `"ejections": 1`, `"ejected_until": "`)
	if got := strings.Join(s.fleet.ailments(), "; "); !strings.Contains(got, "replica a is ejected for ") ||
		!strings.Contains(got, "(it was closed before an answer)") {
		t.Errorf("what is wrong: %q", got)
	}
	// More than half of the model: b stays, whatever happens there.
	other := s.replica("m")
	fail(other)
	if got := s.models(); got != "m=b" {
		t.Fatalf("both replicas are ejected, or one came back: %q", got)
	}
	s.expect("m=a,b")
	if d := time.Since(began); d < c.Health.EjectionBackoff {
		t.Errorf("it was back after %v, before its time; good checks must not call it back", d)
	}
	if share := first.Share(time.Now()); share > 0.5 {
		t.Errorf("it is back with %v of its share", share)
	}
}

func (s *stage) expectPage(contains ...string) {
	s.Helper()
	text, err := json.MarshalIndent(s.fleet.status(""), "", "  ")
	if err != nil {
		s.Fatal(err)
	}
	for _, want := range contains {
		if !strings.Contains(string(text), want) {
			s.Errorf("the page lacks %s:\n%s", want, text)
		}
	}
}

// A crashed engine under load: requests that fail there eject it, and ask for
// the check that finds it down; the next one in turn is an hour away. No client
// hears of it.
func TestCrashUnderLoadIsFoundAtOnce(t *testing.T) {
	first, second := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	c := testConfig(first, second)
	c.Health.Interval, c.Health.SlowStart = time.Hour, time.Hour
	a := startAgent(t, c)
	s := &stage{T: t, fleet: a.fleet}
	m := s.member("r0")
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait() // whatever happens
	defer cancel()
	var answered atomic.Int64
	for range 4 {
		clients.Go(func() {
			client := &http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			for ctx.Err() == nil {
				resp, err := client.Post("http://"+a.Addr().String()+"/v1/completions", "application/json",
					strings.NewReader(`{"model":"m","prompt":"hi","max_tokens":1}`))
				if err != nil {
					t.Error(err)
					return
				}
				if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
					t.Errorf("status %d, %v: %s", resp.StatusCode, err, body)
				}
				resp.Body.Close()
				answered.Add(1)
			}
		})
	}
	atWork := func(n int64) {
		t.Helper()
		at := answered.Load()
		eventually(t, func() bool { return t.Failed() || answered.Load() >= at+n }, func() string { return "no request is answered" })
	}
	atWork(50)
	began := time.Now()
	first.Close()
	closed := time.Since(began)
	var out time.Duration
	eventually(t, func() bool {
		out = time.Since(began)
		return !slices.Contains(a.fleet.current().Models["m"].Replicas, m.replica)
	}, func() string { return "requests are still sent to a dead engine" })
	eventually(t, func() bool { return s.standing("r0") == down }, func() string { return "it is not down" })
	t.Logf("closed after %v, out after %v, down after %v", closed, out, time.Since(began))
	if out > 2*time.Second {
		t.Errorf("it took %v to take out a dead engine", out)
	}
	atWork(50)
	if _, body := page(t, a, "/metrics"); !strings.Contains(body, `inferrail_replica_state{replica="r0",state="down"} 1`) ||
		!strings.Contains(body, `inferrail_replica_state{replica="r0",state="up"} 0`) ||
		!strings.Contains(body, `inferrail_replica_ejections_total{replica="r1"} 0`) ||
		strings.Contains(body, `inferrail_replica_ejections_total{replica="r0"} 0`) {
		t.Errorf("the metrics do not tell of it: %s", body)
	}
	if status, body := page(t, a, "/readyz"); status != 200 || !strings.HasPrefix(body, "degraded: replica r0 is down (GET ") {
		t.Errorf("readyz: %d %s", status, body)
	}

	// It is started again; the check that would find that out is an hour away.
	startEngine(t, portOf(t, first.Addr()), "m")
	m.poke()
	eventually(t, func() bool { return s.standing("r0") == up }, func() string { return "it does not come back" })
	if share := m.replica.Share(time.Now()); share > 0.5 {
		t.Errorf("it is back with %v of its share", share)
	}
	atWork(50)
	cancel()
	clients.Wait()
	stopped(t, a)
}

func (s *stage) member(id string) *member {
	s.Helper()
	s.fleet.mu.Lock()
	defer s.fleet.mu.Unlock()
	for _, m := range s.fleet.members {
		if m.id == id {
			return m
		}
	}
	s.Fatalf("%s is no member", id)
	return nil
}

// standing is how a member stands now.
func (s *stage) standing(id string) standing {
	m := s.member(id)
	s.fleet.mu.Lock()
	defer s.fleet.mu.Unlock()
	return m.vitals.standing
}

// A flapping engine: each of its returns is followed by failures.
func TestFlappingEngineIsEjectedEachTime(t *testing.T) {
	a, b := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	c := quick(ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()})
	c.Health.EjectionBackoff = 40 * time.Millisecond
	s := newStageOf(t, c)
	s.expect("m=a,b")
	r := s.replica("m")
	for range 4 {
		began := time.Now()
		fail(r)
		s.expect("m=a,b")
		if d := time.Since(began); d < c.Health.EjectionBackoff {
			t.Errorf("it was out for %v only", d)
		}
	}
	s.expectPage(`"ejections": 4`)
}

// When all else is down, those that are ejected are tried after all.
func TestEjectedReplicaIsTheLastResort(t *testing.T) {
	a, b := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	c := quick(ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()})
	c.Health.EjectionBackoff = time.Hour
	s := newStageOf(t, c)
	s.expect("m=a,b")
	fail(s.replica("m"))
	s.expect("m=b")
	if !s.fleet.current().Models["m"].Prewarming.On() {
		t.Error("b is to compute nothing ahead")
	}
	b.Close()
	s.expect("m=a")
	if got := s.standing("a"); got != ejected {
		t.Errorf("a is %v", got)
	}
	if s.fleet.current().Models["m"].Prewarming.On() {
		t.Error("and is to compute something ahead")
	}
}

// What joins a fleet at work warms up first.
func TestLateMemberStartsSlowly(t *testing.T) {
	a, b := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	c := quick(ReplicaConfig{ID: "a", URL: a.URL()})
	c.Health.SlowStart = time.Hour
	s := newStageOf(t, c)
	s.expect("m=a")
	more := *c
	more.Replicas = []ReplicaConfig{{ID: "b", URL: b.URL()}, c.Replicas[0]}
	if err := s.fleet.reconfigure(&more); err != nil {
		t.Fatal(err)
	}
	s.expect("m=b,a")
	if share := s.replica("m").Share(time.Now()); share > 0.5 {
		t.Errorf("b begins with %v of its share", share)
	}
}

func TestReconfigureKeepsMembers(t *testing.T) {
	a, b := startEngine(t, 0, "m", "x"), startEngine(t, 0, "m")
	c := quick(ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()})
	s := newStageOf(t, c)
	s.expect("m=a,b x=a")
	r := s.replica("m")

	// Other numbers, an alias, and models of its own for a.
	next := *c
	next.Health.Interval = time.Hour
	next.Models = []ModelConfig{{Name: "m", Aliases: []string{"y"}}}
	next.Replicas = []ReplicaConfig{{ID: "a", URL: a.URL(), Models: []string{"m"}, MaxConcurrency: 7}}
	if err := s.fleet.reconfigure(&next); err != nil {
		t.Fatal(err)
	}
	if got := s.models(); got != "m(y)=a" {
		t.Errorf("b is not gone at once, or something else is wrong: %q", got)
	}
	if s.replica("m") != r {
		t.Error("a is another replica now")
	}
	// And back: its models are asked for again, though no check was due.
	if err := s.fleet.reconfigure(c); err != nil {
		t.Fatal(err)
	}
	s.expect("m=a,b x=a")
	if s.replica("m") != r {
		t.Error("a is another replica now")
	}
}

func TestKeyFile(t *testing.T) {
	engine, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, APIKey: "secret-1", ZeroLatency: true})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	file := filepath.Join(t.TempDir(), "key")
	rc := ReplicaConfig{ID: "a", URL: engine.URL(), APIKeyFile: file}
	s := newStageOf(t, quick(rc))
	s.expectPage("api_key_file: open ", "no such file or directory")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	why := func(want string) {
		t.Helper()
		eventually(t, func() bool { return strings.Contains(strings.Join(s.fleet.ailments(), ""), want) },
			func() string { return fmt.Sprintf("%q does not say %q", s.fleet.ailments(), want) })
	}
	write("\n")
	why("is empty")
	write("secret-2\n")
	why("status 401; give its api_key")
	write("secret-1\n")
	s.expect("m=a")
	// The same key, now in the configuration, and then a wrong one.
	c := quick(ReplicaConfig{ID: "a", URL: engine.URL(), APIKey: "secret-1"})
	if err := s.fleet.reconfigure(c); err != nil {
		t.Fatal(err)
	}
	s.expect("m=a")
	if err := s.fleet.reconfigure(quick(ReplicaConfig{ID: "a", URL: engine.URL(), APIKey: "secret-3"})); err != nil {
		t.Fatal(err)
	}
	s.expect("m=")
	text, err := json.Marshal(s.fleet.status(""))
	if err != nil || strings.Contains(string(text), "secret") {
		t.Errorf("%v, or a key is shown: %s", err, text)
	}
}

func TestAdapterKnowsItsModel(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data":[{"id":"base","root":"org/base","parent":null},{"id":"tuned","root":"/adapters/tuned","parent":"base"}]}`)
		}
	}))
	defer engine.Close()
	s := newStageOf(t, quick(ReplicaConfig{ID: "a", URL: engine.URL}))
	s.expect("base=a tuned=a")
	s.mu.Lock()
	defer s.mu.Unlock()
	base, tuned := s.published.Models["base"], s.published.Models["tuned"]
	if base.Root != "org/base" || base.Parent != "" || tuned.Root != "/adapters/tuned" || tuned.Parent != "base" {
		t.Errorf("%+v, %+v", base, tuned)
	}
}

// Members that come and go at random, against a model that knows only which
// are wanted: who is wanted is a member in that order, one that stayed is the
// same replica, and no two replicas that are not released share a slot.
func TestApplyAgainstNaiveModel(t *testing.T) {
	c := quick()
	c.Health.Interval = time.Hour
	s := newStageOf(t, c)
	f := s.fleet
	rng := rand.New(rand.NewPCG(3, 4))
	replicas := map[string]*proxy.Replica{} // of those that are not released
	for step := range 300 {
		// Port 1 of loopback addresses refuses at once.
		var wanted []finding
		for _, i := range rng.Perm(8)[:rng.IntN(9)] {
			wanted = append(wanted, finding{source: "test", ReplicaConfig: ReplicaConfig{
				ID: fmt.Sprint("r", i), URL: fmt.Sprintf("http://127.0.0.%d:1", 1+i+rng.IntN(2)*100)}})
		}
		if err := f.apply(wanted); err != nil {
			t.Fatal(err)
		}
		f.mu.Lock()
		if len(f.members) != len(wanted) {
			t.Fatalf("step %d: %d members, want %d", step, len(f.members), len(wanted))
		}
		alive := map[string]*proxy.Replica{}
		taken := map[int]string{}
		for i, m := range slices.Concat(f.members, f.leaving) {
			name := m.id + " " + m.url
			if i < len(wanted) && name != wanted[i].ID+" "+wanted[i].URL {
				t.Errorf("step %d: member %d is %s, want %s", step, i, name, wanted[i].URL)
			}
			if (i < len(wanted)) != m.gone.IsZero() {
				t.Errorf("step %d: %s has left at %v", step, name, m.gone)
			}
			if r := replicas[name]; r != nil && r != m.replica && alive[name] == nil {
				t.Errorf("step %d: %s was not released and is another replica", step, name)
			}
			if other, ok := taken[m.replica.Slot]; ok {
				t.Errorf("step %d: %s and %s share slot %d", step, name, other, m.replica.Slot)
			}
			if !f.slots.taken[m.replica.Slot] {
				t.Errorf("step %d: the slot of %s is not taken", step, name)
			}
			alive[name], taken[m.replica.Slot] = m.replica, name
		}
		count := 0
		for _, t := range f.slots.taken {
			if t {
				count++
			}
		}
		if count != len(taken) {
			t.Errorf("step %d: %d slots are taken by %d", step, count, len(taken))
		}
		if len(f.health.members) != len(f.members) {
			t.Errorf("step %d: health knows %d of %d members", step, len(f.health.members), len(f.members))
		}
		replicas = alive
		f.mu.Unlock()
		if t.Failed() {
			t.FailNow()
		}
	}
	if err := f.apply(nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.leaving) == 0 && !slices.Contains(f.slots.taken, true)
	}, func() string { return "those that have left are not released" })
}

func TestParseModelsSuccess(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		models, err := parseModels(strings.NewReader(in))
		if got := strings.Join(names(models), " "); err != nil || got != want {
			t.Errorf("%s: got %q, %v; want %q", in, got, err, want)
		}
	}
	f(`{"object":"list","data":[{"id":"a"},{"id":"b"}]}`, "a b")
	f(`{"data":[{"id":"a","created":1.5e9,"max_model_len":null,"owned_by":null,"permission":[{}]}]}`, "a")
	f(`{"data":[{"id":"a","created":"yesterday"},{"id":"b"}]}`, "a b")
	f(`{"data":[{"id":"a"},{"id":"a"},{"id":""},{}]}`, "a")
}

func TestParseModelsFailure(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		models, err := parseModels(strings.NewReader(in))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, %v; want %q", in, models, err, want)
		}
	}
	f(``, "not JSON")
	f(`<html>`, "not JSON")
	f(`{"data":[{"id":"a"}`, "not JSON")
	f(`{}`, "lists no model")
	f(`[]`, "lists no model")
	f(`{"data":null}`, "lists no model")
	f(`{"data":"none"}`, "lists no model")
	f(`{"data":[{"id":7}]}`, "lists no model")
}

// A number that is out is never given again before it came back, and the
// lowest free one is given, against a plain set.
func TestSlots(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var s slots
	out := map[int]bool{}
	for range 10000 {
		if len(out) > 0 && rng.IntN(2) == 0 {
			for slot := range out {
				s.release(slot)
				delete(out, slot)
				break
			}
			continue
		}
		want := 0
		for out[want] {
			want++
		}
		if got := s.take(); got != want {
			t.Fatalf("got slot %d, want %d of %v", got, want, out)
		}
		out[want] = true
	}
	defer func() {
		if recover() == nil {
			t.Error("releasing a slot twice went unnoticed")
		}
	}()
	slot := s.take()
	s.release(slot)
	s.release(slot)
}

// hangable is an engine that answers requests after it was told to, and checks
// until it is told to hang.
type hangable struct {
	*httptest.Server
	asked  atomic.Int64  // requests that came in
	hung   chan struct{} // closed: checks hang as well
	answer chan struct{} // lets one request be answered
}

func startHangable(t *testing.T) *hangable {
	h := &hangable{hung: make(chan struct{}), answer: make(chan struct{})}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			_, _ = io.Copy(io.Discard, r.Body)
			h.asked.Add(1)
			select {
			case <-h.answer:
				fmt.Fprint(w, "answered late")
			case <-r.Context().Done():
			}
			return
		}
		select {
		case <-h.hung:
			<-r.Context().Done()
		default:
			fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
		}
	}))
	t.Cleanup(h.Close)
	return h
}

// answered waits for one that a goroutine fetches.
func answered(t *testing.T, answers <-chan *http.Response) (status int, by string) {
	t.Helper()
	select {
	case resp := <-answers:
		return resp.StatusCode, resp.Header.Get("x-inferrail-replica")
	case <-time.After(20 * time.Second):
		t.Fatal("a request is not answered")
		return 0, ""
	}
}

// A request waits at a replica that hangs while no other is up. It moves when
// another comes up, be that after the replica was found down.
func TestRequestAtAHungReplicaMovesWhenAnotherReturns(t *testing.T) {
	hung, other := startHangable(t), startEngine(t, 0, "m")
	c := testConfig(other)
	c.Replicas = append(c.Replicas, ReplicaConfig{ID: "hung", URL: hung.URL})
	c.Health.Timeout = 100 * time.Millisecond
	other.Close()
	a := startAgent(t, c)
	defer stopped(t, a)
	s := &stage{T: t, fleet: a.fleet}
	answers := make(chan *http.Response, 1)
	go func() { answers <- ask(t, a, 3) }()
	eventually(t, func() bool { return hung.asked.Load() == 1 }, func() string { return "the request does not arrive" })
	close(hung.hung)
	eventually(t, func() bool { return s.standing("hung") == down }, func() string { return "it is not down" })
	if _, body := page(t, a, "/metrics"); !strings.Contains(body, `inferrail_replica_requests_running{replica="hung"} 1`) ||
		!strings.Contains(body, `inferrail_replica_requests_running{replica="r0"} 0`) {
		t.Errorf("the metrics forget the request at a replica that is down: %s", body)
	}
	select {
	case resp := <-answers:
		t.Fatalf("answered by nobody: %v", resp.Status)
	default:
	}
	startEngine(t, portOf(t, other.Addr()), "m")
	if status, by := answered(t, answers); status != 200 || by != "r0" {
		t.Errorf("status %d by %s", status, by)
	}
}

// While every replica is merely silent, as a fleet under full load is, the
// requests that wait there stay: to move them around would use up their
// attempts and lose the places that they have at their engines.
func TestSilentFleetKeepsItsRequests(t *testing.T) {
	a, b := startHangable(t), startHangable(t)
	c := testConfig()
	c.Replicas = []ReplicaConfig{{ID: "a", URL: a.URL}, {ID: "b", URL: b.URL}}
	c.Health.Timeout = 50 * time.Millisecond
	ag := startAgent(t, c)
	defer stopped(t, ag)
	s := &stage{T: t, fleet: ag.fleet}
	answers := make(chan *http.Response, 2)
	// One after the other: two that are chosen for at the same moment may both
	// find the same replica idle.
	for n := range int64(2) {
		go func() { answers <- ask(t, ag, 3) }()
		eventually(t, func() bool { return int64(a.asked.Load()+b.asked.Load()) == n+1 }, func() string { return "a request does not arrive" })
	}
	if a.asked.Load() != 1 || b.asked.Load() != 1 {
		t.Fatalf("%d requests at one, %d at the other", a.asked.Load(), b.asked.Load())
	}
	close(a.hung)
	close(b.hung)
	eventually(t, func() bool { return s.standing("a") == down && s.standing("b") == down }, func() string { return "they are not down" })
	close(a.answer)
	close(b.answer)
	for range 2 {
		if status, _ := answered(t, answers); status != 200 {
			t.Errorf("status %d", status)
		}
	}
	if n := a.asked.Load() + b.asked.Load(); n > 3 {
		t.Errorf("two requests were sent %d times", n)
	}
}

// Who has left finishes what it has; the line that waited there goes elsewhere.
func TestLineOfALeavingReplicaGoesElsewhere(t *testing.T) {
	old, next := startHangable(t), startEngine(t, 0, "m")
	c := testConfig()
	c.Replicas = []ReplicaConfig{{ID: "old", URL: old.URL, MaxConcurrency: 1, MaxPending: 5}}
	a := startAgent(t, c)
	defer stopped(t, a)
	m := (&stage{T: t, fleet: a.fleet}).member("old")
	answers := make(chan *http.Response, 3)
	for range 3 {
		go func() { answers <- ask(t, a, 3) }()
	}
	eventually(t, func() bool { return m.replica.InFlight() == 1 && m.replica.Pending() == 2 }, func() string { return "they do not wait" })
	after := testConfig(next)
	after.Replicas[0].ID = "old" // at another place
	if err := a.Reload(after); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if status, by := answered(t, answers); status != 200 || by != "old" {
			t.Errorf("one in line: status %d by %s", status, by)
		}
	}
	if n := old.asked.Load(); n != 1 {
		t.Errorf("%d requests reached the one that leaves", n)
	}
	var said string
	eventually(t, func() bool {
		_, said = page(t, a, "/metrics")
		return strings.Contains(said, `inferrail_replica_requests_running{replica="old"} 1`)
	}, func() string { return "two replicas of a name have the series " + said })
	close(old.answer)
	if status, by := answered(t, answers); status != 200 || by != "old" {
		t.Errorf("the one inside: status %d by %s", status, by)
	}
}

// A member that has left and hangs does not keep the requests that wait there
// for a first byte: a name server may drop a dead engine before its checks do.
func TestRequestAtAHungReplicaThatLeftMoves(t *testing.T) {
	hung, next := startHangable(t), startEngine(t, 0, "m")
	c := testConfig()
	c.Replicas = []ReplicaConfig{{ID: "hung", URL: hung.URL}}
	c.Health.Timeout = 100 * time.Millisecond
	a := startAgent(t, c)
	defer stopped(t, a)
	answers := make(chan *http.Response, 1)
	go func() { answers <- ask(t, a, 3) }()
	eventually(t, func() bool { return hung.asked.Load() == 1 }, func() string { return "the request does not arrive" })
	close(hung.hung)
	after := testConfig(next)
	after.Health = c.Health
	if err := a.Reload(after); err != nil {
		t.Fatal(err)
	}
	if status, by := answered(t, answers); status != 200 || by != "r0" {
		t.Errorf("status %d by %s", status, by)
	}
}

// The only replica of a model is replaced by another, whose first check takes
// its time: in no moment is the model unknown or without a replica.
func TestReplacementLosesNoRequest(t *testing.T) {
	old, next := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	ready := make(chan struct{})
	target, err := url.Parse(next.URL())
	if err != nil {
		t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(target)
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-ready
		pass.ServeHTTP(w, r)
	}))
	defer slow.Close()
	c := testConfig()
	c.Replicas = []ReplicaConfig{{ID: "old", URL: old.URL()}}
	c.Health.Timeout = time.Minute
	a := startAgent(t, c)
	defer stopped(t, a)
	m := (&stage{T: t, fleet: a.fleet}).member("old")
	after := c
	after.Replicas = []ReplicaConfig{{ID: "next", URL: slow.URL}}
	if err := a.Reload(after); err != nil {
		t.Fatal(err)
	}
	if resp := ask(t, a, 1); resp.StatusCode != 200 || resp.Header.Get("x-inferrail-replica") != "old" {
		t.Errorf("status %d by %s", resp.StatusCode, resp.Header.Get("x-inferrail-replica"))
	}
	close(ready)
	eventually(t, func() bool {
		resp := ask(t, a, 1)
		if resp.StatusCode != 200 {
			t.Errorf("status %d", resp.StatusCode)
		}
		return resp.Header.Get("x-inferrail-replica") == "next"
	}, func() string { return "the new replica gets no requests" })
	eventually(t, func() bool {
		a.fleet.mu.Lock()
		defer a.fleet.mu.Unlock()
		return len(a.fleet.leaving) == 0 && !a.fleet.slots.taken[m.replica.Slot]
	}, func() string { return "the old one is not released" })

	// Without a replacement the model goes, a little later.
	after.Replicas, after.Discovery.DNS = nil, []DNSConfig{{Name: "nowhere.invalid.", Type: "a", Port: 1}}
	if err := a.Reload(after); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return ask(t, a, 1).StatusCode == 404 }, func() string { return "a model that nobody serves stays" })
}

// A reload reads the keys in files again, however long the next check is away.
func TestReloadReadsKeyFiles(t *testing.T) {
	var key atomic.Value
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key.Store(r.Header.Get("Authorization"))
		fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
	}))
	defer engine.Close()
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, []byte("sk-one"))
	c := quick(ReplicaConfig{ID: "a", URL: engine.URL, APIKeyFile: file})
	c.Health.Interval = time.Hour
	s := newStageOf(t, c)
	if got := key.Load(); got != "Bearer sk-one" {
		t.Fatalf("asked with %q", got)
	}
	write(t, file, []byte("sk-two"))
	if err := s.fleet.reconfigure(c); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return key.Load() == "Bearer sk-two" }, func() string { return "the new key is not used" })
}

// An engine that says that it is well, but cannot list its models for a while,
// keeps those that it had. One that says that the key is wrong, or that there is
// no such page, is not the engine that it was.
func TestModelsThatCannotBeListed(t *testing.T) {
	f := func(name string, health, models int, stays bool) {
		t.Run(name, func(t *testing.T) {
			var broken atomic.Bool
			var asked atomic.Int64
			engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == "/health":
					w.WriteHeader(health)
				case broken.Load():
					asked.Add(1)
					if models == 0 {
						<-r.Context().Done()
						return
					}
					w.WriteHeader(models)
				default:
					fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
				}
			}))
			defer engine.Close()
			s := newStageOf(t, quick(ReplicaConfig{ID: "a", URL: engine.URL}))
			s.expect("m=a")
			broken.Store(true)
			if !stays {
				eventually(t, func() bool { return s.standing("a") == down }, func() string { return "it stays up" })
				return
			}
			n := int64(5) // more than the checks that may fail
			if models == 0 {
				n = 1 // each takes two seconds
			}
			eventually(t, func() bool { return asked.Load() > n }, func() string { return "it is not asked" })
			if got := s.models(); got != "m=a" {
				t.Errorf("the fleet is %q", got)
			}
			broken.Store(false)
			s.expect("m=a")
		})
	}
	f("an error", 200, 500, true)
	f("too many requests", 200, 429, true)
	f("silence", 200, 0, true)
	f("a wrong key", 200, 401, false)
	f("no such page", 200, 404, false)
	f("an engine without a health page", 404, 500, false)
}

// A selector or a name that finds agents, this one among them, sends no request round
// in circles; an agent that is configured as a replica is one.
func TestAgentsAreNoEngines(t *testing.T) {
	inner := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, inner)
	outer := startAgent(t, testConfig(startEngine(t, 0, "other")))
	defer stopped(t, outer)
	replica := func(id string, a *Agent, source string) finding {
		return finding{ReplicaConfig: ReplicaConfig{ID: id, URL: "http://" + a.Addr().String()}, source: source}
	}
	f := func(r finding, state, why string) {
		t.Helper()
		outer.fleet.mu.Lock()
		static := outer.fleet.wanted[0]
		outer.fleet.mu.Unlock()
		if err := outer.fleet.apply([]finding{static, r}); err != nil {
			t.Fatal(err)
		}
		var last overviewReplica
		eventually(t, func() bool {
			for _, s := range outer.overview(true).Replicas {
				if s.ID == r.ID {
					last = s
				}
			}
			return last.State == state && strings.Contains(last.Why, why)
		}, func() string { return fmt.Sprintf("%s is %s, %q, want %s, %q", r.ID, last.State, last.Why, state, why) })
	}
	f(replica("itself", outer, "static"), "joining", "the agent itself")
	f(replica("itself-found", outer, "kubernetes:inferrail"), "joining", "the agent itself")
	f(replica("another-found", inner, "kubernetes:inferrail"), "joining", "another agent")
	f(replica("another", inner, "static"), "up", "")
}
