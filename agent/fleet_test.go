package agent

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
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
	s := &stage{T: t}
	var err error
	s.fleet, err = startFleet(&c, testLog(t), func(f *proxy.Fleet) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.published = f
	}, func(engines []netip.AddrPort) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.engines = engines
	})
	if err != nil {
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
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(otherwise())
		}
	}
}

func testLog(t *testing.T) *slog.Logger {
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
