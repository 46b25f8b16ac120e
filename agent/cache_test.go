package agent

import (
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
)

// cacheNames renders the names that models have in the index: name>cache name,
// of an adapter name>cache name+adapter.
func (s *stage) cacheNames() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, m := range s.published.Listed {
		text := m.Name + ">" + m.CacheName
		if m.Adapter != "" {
			text += "+" + m.Adapter
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}

// slotModels renders the models of the members' slots in the index.
func (s *stage) slotModels() string {
	s.fleet.mu.Lock()
	defer s.fleet.mu.Unlock()
	var out []string
	for _, m := range s.fleet.members {
		out = append(out, m.id+"="+m.cache.slot.Model)
	}
	return strings.Join(out, " ")
}

// lists makes a page of /v1/models: id:root, or id:root:parent.
func lists(cards ...string) string {
	var out []string
	for _, c := range cards {
		p := strings.Split(c+"::", ":")
		out = append(out, fmt.Sprintf(`{"id":%q,"root":%q,"parent":%q}`, p[0], p[1], p[2]))
	}
	return `{"data":[` + strings.Join(out, ",") + `]}`
}

// Names of one model at one engine are one in the index, since they share what
// is in its cache; and it stays the same while others come and go.
func TestCacheNames(t *testing.T) {
	a, b := startPaged(t), startPaged(t)
	a.set("/v1/models", lists("x:r", "y:r", "lora:/l:y", "z:other"))
	b.set("/v1/models", lists("y:r", "w:r2"))
	c := quick(ReplicaConfig{ID: "b", URL: b.URL})
	s := newStageOf(t, c)
	if got, want := s.cacheNames(), "w>w y>y"; got != want {
		t.Errorf("alone: %s, want %s", got, want)
	}
	// x comes, and is y for the index.
	configure := func(replicas ...ReplicaConfig) {
		t.Helper()
		n := *s.fleet.cfg.Load()
		n.Replicas = replicas
		if err := s.fleet.reconfigure(&n); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(names, slots string) {
		t.Helper()
		eventually(t, func() bool { return s.cacheNames() == names && s.slotModels() == slots }, func() string {
			return fmt.Sprintf("they are %s and %s, want %s and %s", s.cacheNames(), s.slotModels(), names, slots)
		})
	}
	configure(ReplicaConfig{ID: "a", URL: a.URL}, ReplicaConfig{ID: "b", URL: b.URL})
	expect("lora>y+lora w>w x>y y>y z>z", "a=y b=y")
	// y leaves; its name stays with x.
	a.set("/v1/models", lists("x:r", "lora:/l:x"))
	configure(ReplicaConfig{ID: "a", URL: a.URL})
	expect("lora>y+lora x>y", "a=y")
	// Another model of that name comes.
	a.set("/v1/models", lists("x:r", "y:q"))
	expect("x>x y>y", "a=x")
}

// The names of before a restart of the agent are there until somebody is served
// by them.
func TestCacheNamesOfBefore(t *testing.T) {
	cfg := DefaultConfig()
	f := &fleet{warm: &warmth{}, cacheNames: map[string]string{"x": "y", "w": "v", "u": "s"}}
	f.nameCachesLocked(&cfg) // as at the start, when nobody has been found
	f.members = []*member{{models: []card{{ID: "x", Root: "r"}, {ID: "a", Root: "r"}, {ID: "v"}}}}
	f.nameCachesLocked(&cfg)
	if got, want := fmt.Sprint(f.cacheNames), "map[a:y u:s v:v x:y]"; got != want {
		t.Errorf("they are %s, want %s", got, want)
	}
	f.warm = nil
	f.nameCachesLocked(&cfg)
	if got, want := fmt.Sprint(f.cacheNames), "map[a:y v:v x:y]"; got != want {
		t.Errorf("later they are %s, want %s", got, want)
	}
}

// Of several names of which none had one before, it is the one that the
// configuration names first.
func TestConfiguredCacheName(t *testing.T) {
	a := startPaged(t)
	a.set("/v1/models", lists("x:r", "y:r", "z:r"))
	c := quick(ReplicaConfig{ID: "a", URL: a.URL})
	c.Models = []ModelConfig{{Name: "z"}, {Name: "y"}}
	s := newStageOf(t, c)
	if got, want := s.cacheNames(), "x>z y>z z>z"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// The size that most replicas' blocks have comes first.
func TestBlocksOfAModel(t *testing.T) {
	var replicas []ReplicaConfig
	for i, block := range []int{16, 64, 64} {
		e := startPaged(t)
		e.set("/metrics", vllmPage(1000, block, 100, "True", 0))
		replicas = append(replicas, ReplicaConfig{ID: fmt.Sprint(i), URL: e.URL})
	}
	s := newStage(t, nil, replicas...)
	eventually(t, func() bool { return slices.Equal(s.blocks("m"), []int{64, 16}) }, func() string { return fmt.Sprint(s.blocks("m")) })
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.published.Models["m"]; m.BlockSize != 64 {
		t.Errorf("the block size is %d", m.BlockSize)
	}
}

// An engine that does not find in its cache what was predicted is not believed
// to have it, whatever its events say, until it has started anew.
func TestMismatch(t *testing.T) {
	e := startPaged(t)
	e.set("/metrics", vllmPage(1000, 16, 500, "True", 100))
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL, KVEvents: KVEventsConfig{Mode: kvEventsOff}})
	r := s.replica("m")
	// From then on it has nothing more to say, and the test speaks for it.
	off := func() bool {
		return s.fleet.members[0].subscriber.standing().why == "kv_events is off in the configuration"
	}
	eventually(t, off, func() string { return "events are followed" })
	now := time.Now()
	answers := func(n, predicted, actual int, reported bool) {
		for range n {
			now = now.Add(time.Second)
			s.fleet.audit(r, predicted, actual, reported, now)
		}
	}
	state := func() string {
		st := s.fleet.index.Stats(nil)
		return fmt.Sprint(len(st), st[0].State, st[0].Why)
	}
	s.fleet.states.follow(r.Slot, index.Exact, "its events are whole")
	answers(100, 160, 0, false) // it does not tell
	answers(100, 160, 160, true)
	if got, want := state(), fmt.Sprint(1, index.Exact, "its events are whole"); got != want {
		t.Fatalf("the slot is %s, want %s", got, want)
	}
	answers(40, 160, 0, true)
	s.fleet.states.follow(r.Slot, index.Exact, "its events are whole again")
	if got := state(); !strings.HasPrefix(got, fmt.Sprint(1, index.Mismatched)) || !strings.Contains(got, "its prefix cache is off") {
		t.Errorf("the slot is %s", got)
	}
	if got := fmt.Sprint(s.fleet.ailments()); !strings.Contains(got, "what replica a has in its cache is not known (") {
		t.Errorf("it is told %s", got)
	}
	text, err := json.Marshal(s.fleet.status(""))
	if err != nil || !strings.Contains(string(text), `"state":"mismatched"`) {
		t.Errorf("%s (%v)", text, err)
	}
	e.set("/metrics", vllmPage(1100, 16, 500, "True", 0))
	eventually(t, func() bool { return state() == fmt.Sprint(1, index.Exact, "its events are whole again") }, state)
	if got := fmt.Sprint(s.fleet.ailments()); strings.Contains(got, "cache") {
		t.Errorf("it is told %s", got)
	}
	// One that is found to reuse nothing is in the index no more.
	e.set("/metrics", vllmPage(1100, 16, 500, "False", 0))
	eventually(t, func() bool { return len(s.fleet.index.Stats(nil)) == 0 }, func() string { return "it is still in the index" })
	e.set("/metrics", vllmPage(1100, 16, 500, "True", 0))
	eventually(t, func() bool { return len(s.fleet.index.Stats(nil)) == 1 }, func() string { return "it is not in the index" })
	if got := state(); got != fmt.Sprint(1, index.Exact, "its events are whole again") {
		t.Errorf("the slot is %s", got)
	}
}

// What is configured of a cache and is not what the engine tells is used, and
// told once.
func TestDoubtfulCaches(t *testing.T) {
	engine := startEngine(t, 0, "m")
	c := DefaultConfig()
	c.Models = []ModelConfig{{Name: "m", BlockSize: 4}}
	c.Replicas = []ReplicaConfig{{ID: "r", URL: engine.URL(), KVBlocks: 100}}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	log := &lines{}
	s := newStageOf(t, &c, func(f *fleet) { f.log = log.logger() })
	for _, want := range []string{
		`"models[].block_size is not what the engine tells; what is configured is used, and predicts wrongly if the engine is right" replica=r configured=4 told=16`,
		`"kv_blocks is not what the engine tells; what is configured is used, and predicts wrongly if the engine is right" replica=r configured=100 told=16384`,
	} {
		eventually(t, func() bool { return strings.Contains(log.String(), want) }, func() string { return "the log lacks " + want + ":\n" + log.String() })
		s.fleet.mu.Lock()
		s.fleet.publishLocked()
		s.fleet.mu.Unlock()
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("it is told %d times:\n%s", n, log)
		}
	}
}

// Replicas that come and go leave nothing behind: no goroutine, no connection, no
// slot and nothing that is said of it.
func TestCachesOfThoseThatComeAndGo(t *testing.T) {
	const replicas, rounds = 12, 2
	p := newGoPublisher(t, kvevent.VLLM)
	p.do("send 50")
	e := startPaged(t)
	e.set("/metrics", vllmPage(1000, 4, 500, "True", 100))
	s := newStageOf(t, quick())
	f := s.fleet
	// ours are the goroutines that work for members.
	ours := func() (n int, text string) {
		stacks := make([]byte, 4<<20)
		for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(g, "agent.(*fleet)") && !strings.Contains(g, "agent.(*fleet).expire(") || strings.Contains(g, "agent.(*zmtpConn)") {
				n, text = n+1, text+g+"\n\n"
			}
		}
		return n, text
	}
	for round := range rounds {
		var list []finding
		for i := range replicas {
			list = append(list, finding{ReplicaConfig: ReplicaConfig{ID: fmt.Sprint(round, "-", i), URL: e.URL,
				KVEvents: KVEventsConfig{Endpoint: "tcp://" + p.events, ReplayEndpoint: "tcp://" + p.replay}}, source: "test"})
		}
		if err := f.apply(list); err != nil {
			t.Fatal(err)
		}
		exact := func() (n int) {
			for _, st := range f.index.Stats(nil) {
				if st.State == index.Exact && st.Blocks[index.GPU] == 50 {
					n++
				}
			}
			return n
		}
		eventually(t, func() bool { return exact() == replicas }, func() string { return fmt.Sprintf("%d of %d are exact", exact(), replicas) })
		if err := f.apply(nil); err != nil {
			t.Fatal(err)
		}
		left := func() string {
			f.mu.Lock()
			leaving, servers := len(f.leaving), len(f.servers)
			f.mu.Unlock()
			f.states.mu.Lock()
			said := len(f.states.slots)
			f.states.mu.Unlock()
			n, stacks := ours()
			if leaving+servers+said+f.index.Totals().Slots+n == 0 {
				return ""
			}
			return fmt.Sprintf("round %d: %d replicas, %d servers, %d of the index, %d of whom something is said, %d goroutines\n%s",
				round, leaving, servers, f.index.Totals().Slots, said, n, stacks)
		}
		eventually(t, func() bool { return left() == "" }, left)
	}
}
