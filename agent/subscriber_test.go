package agent

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
	"github.com/inferrail/inferrail/simulator"
)

// eventPublisher obeys the commands that testdata/publisher.py explains.
type eventPublisher interface {
	do(command string) (next uint64)
	addresses() (events, replay string)
}

func (p *zmqPublisher) addresses() (events, replay string) { return p.events, p.replay }

// goPublisher is the same on another implementation of ZeroMQ, so that it needs
// no Python. It obeys clear, too: it publishes that the cache was cleared; and
// speaks as SGLang, whose replies have no topic.
type goPublisher struct {
	t              *testing.T
	form           kvevent.Form
	pub, router    zmq4.Socket
	events, replay string
	answering      sync.WaitGroup

	mu    sync.Mutex // guards what follows
	mute  bool
	next  uint64
	chain uint32
	kept  []kvevent.Message
}

func newGoPublisher(t *testing.T, form kvevent.Form) *goPublisher {
	p := &goPublisher{t: t, form: form, events: "127.0.0.1:0", replay: "127.0.0.1:0"}
	p.bind()
	t.Cleanup(p.close)
	return p
}

func (p *goPublisher) addresses() (events, replay string) { return p.events, p.replay }

func (p *goPublisher) bind() {
	p.t.Helper()
	p.pub, p.router = zmq4.NewPub(context.Background()), zmq4.NewRouter(context.Background())
	for _, s := range []struct {
		socket  zmq4.Socket
		address *string
	}{{p.pub, &p.events}, {p.router, &p.replay}} {
		if err := s.socket.Listen("tcp://" + *s.address); err != nil {
			p.t.Fatal(err)
		}
		*s.address = s.socket.Addr().String()
	}
	router := p.router
	p.answering.Go(func() {
		for {
			request, err := router.Recv()
			if err != nil {
				return
			}
			p.answer(router, request.Frames)
		}
	})
}

func (p *goPublisher) close() {
	p.pub.Close()
	p.router.Close()
	p.answering.Wait()
}

func (p *goPublisher) answer(router zmq4.Socket, request [][]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	who, from, err := kvevent.ParseReplayRequest(request)
	if err != nil || p.mute {
		return
	}
	topic := p.form != kvevent.SGLang
	for _, m := range p.kept {
		if m.Seq >= from {
			_ = router.SendMulti(zmq4.NewMsgFrom(kvevent.AppendReplay([][]byte{who}, "kv", topic, m)...))
		}
	}
	_ = router.SendMulti(zmq4.NewMsgFrom(kvevent.AppendReplayEnd([][]byte{who}, topic)...))
}

// make makes the next batch, of one event.
func (p *goPublisher) make(e kvevent.Event) kvevent.Message {
	b := kvevent.Batch{Time: float64(time.Now().UnixNano()) / 1e9, Events: []kvevent.Event{e}, Rank: 0}
	m := kvevent.Message{Seq: p.next, Payload: kvevent.AppendBatch(nil, p.form, 0, &b)}
	p.kept = append(p.kept, m)
	p.next++
	return m
}

// block is the next one of one chain.
func (p *goPublisher) block() kvevent.Event {
	n := p.chain
	p.chain++
	return kvevent.Event{
		Kind: kvevent.Stored, Hashes: []uint64{1000 + uint64(n)}, Parent: 999 + uint64(n), HasParent: n > 0,
		Tokens: []uint32{4 * n, 4*n + 1, 4*n + 2, 4*n + 3}, BlockSize: 4, Medium: "gpu", AdapterID: -1, Group: -1,
	}
}

func (p *goPublisher) send(m kvevent.Message) {
	if err := p.pub.SendMulti(zmq4.NewMsgFrom(kvevent.AppendMessage(nil, "kv", m)...)); err != nil {
		p.t.Error(err)
	}
}

func (p *goPublisher) do(command string) uint64 {
	p.t.Helper()
	word, number, _ := strings.Cut(command, " ")
	n, _ := strconv.Atoi(number)
	switch word {
	case "stop", "restart":
		p.close()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch word {
	case "send":
		for range n {
			p.send(p.make(p.block()))
		}
	case "lose":
		for range n {
			p.make(p.block())
		}
	case "clear":
		p.send(p.make(kvevent.Event{Kind: kvevent.Cleared, AdapterID: -1, Group: -1}))
	case "forget":
		p.kept = p.kept[min(n, len(p.kept)):]
	case "garbage":
		_ = p.pub.SendMulti(zmq4.NewMsgFrom([]byte("kv")))
		_ = p.pub.SendMulti(zmq4.NewMsgFrom([]byte("kv"), []byte("123"), []byte("x")))
		m := kvevent.Message{Seq: p.next, Payload: []byte("\xc1garbage")}
		p.kept = append(p.kept, m)
		p.next++
		p.send(m)
	case "storm":
		for range n {
			p.next, p.chain, p.kept = 0, p.chain+1, nil
			p.send(p.make(p.block()))
		}
	case "mute", "speak":
		p.mute = word == "mute"
	case "stop":
	case "start":
		p.bind()
	case "restart":
		p.next, p.chain, p.kept = 0, 0, nil
		p.bind()
	default:
		p.t.Fatalf("unknown command %s", command)
	}
	return p.next
}

// watcher is a fleet of one engine, whose KV events come from elsewhere.
type watcher struct {
	*stage
	p eventPublisher
}

func watch(t *testing.T, p eventPublisher, change func(*KVEventsConfig)) *watcher {
	t.Helper()
	engine := startEngine(t, 0, "m")
	events, replay := p.addresses()
	k := KVEventsConfig{Endpoint: "tcp://" + events, ReplayEndpoint: "tcp://" + replay, Topic: "kv"}
	if change != nil {
		change(&k)
	}
	return &watcher{newStage(t, []ModelConfig{{Name: "m", BlockSize: 4}}, ReplicaConfig{ID: "r", URL: engine.URL(), KVEvents: k}), p}
}

func (w *watcher) slot() slotReport {
	w.Helper()
	r := w.fleet.indexReport()
	if len(r.Slots) != 1 {
		w.Fatalf("%d slots", len(r.Slots))
	}
	return r.Slots[0]
}

// expect waits until the engine's cache is known in such a way, with so many
// blocks, told or guessed.
func (w *watcher) expect(after, state, why string, blocks int) {
	w.Helper()
	var got slotReport
	ok := func() bool {
		got = w.slot()
		return got.State == state && strings.Contains(got.Why, why) && got.BlocksByTier["gpu"]+got.Guessed == blocks
	}
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("%s: want %s (%s), %d blocks; it is\n%+v\n%+v", after, state, why, blocks, got, got.Events)
		}
	}
}

// do has the publisher obey, and expects that it is followed.
func (w *watcher) do(command, state, why string, blocks int) {
	w.Helper()
	w.p.do(command)
	w.expect(command, state, why, blocks)
}

// eventStory is what can befall a publisher, and how it is followed.
func eventStory(t *testing.T, p eventPublisher) {
	// The agent comes late.
	p.do("send 5")
	w := watch(t, p, nil)
	w.expect("late", "exact", "", 5)
	w.do("send 3", "exact", "", 8)
	// Two are lost on their way; the one behind them tells.
	p.do("lose 2")
	w.do("send 1", "exact", "", 11)
	if e := w.slot().Events; e.Gaps != 1 || e.Lost != 0 || e.Next != 11 || e.Stored != 11 || !e.Connected {
		t.Errorf("after a gap: %+v", e)
	}
	// Bad messages harm nobody; one of them had a batch in it that is lost.
	w.do("garbage", "approximate", "cannot be read", 11)
	if e := w.slot().Events; e.Malformed < 2 || e.Lost != 1 {
		t.Errorf("after garbage: %+v", e)
	}
	// The engine starts anew.
	p.do("restart")
	p.do("send 2")
	w.expect("restart", "exact", "", 2)
	if got := w.slot(); got.Resets < 1 || got.Events.Resets < 1 {
		t.Errorf("after a restart: %+v, %+v", got, got.Events)
	}
	// The connection breaks, and something is published meanwhile.
	w.do("stop", "repairing", "", 2)
	p.do("lose 3")
	w.do("start", "exact", "", 5)
	// It breaks, and what is published meanwhile is gone when it is back.
	w.do("stop", "repairing", "", 5)
	p.do("lose 3")
	p.do("forget 7")
	p.do("start")
	// The block behind those that are lost has no known place.
	w.expect("late again", "approximate", "cannot be replayed any more", 5)
	if e := w.slot().Events; e.Lost == 0 {
		t.Errorf("after a loss: %+v", e)
	}
}

func TestEventsAreFollowed(t *testing.T) {
	t.Run("vllm", func(t *testing.T) { eventStory(t, newGoPublisher(t, kvevent.VLLM)) })
	t.Run("sglang", func(t *testing.T) { eventStory(t, newGoPublisher(t, kvevent.SGLang)) })
}

func TestVLLMEventsOfPyzmq(t *testing.T) { eventStory(t, startPublisher(t)) }

// A cache that is cleared is known exactly again, whatever was lost before.
func TestEventsAfterClearing(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	p.do("send 5")
	p.do("forget 2")
	w := watch(t, p, nil)
	w.expect("late", "approximate", "cannot be replayed any more", 0)
	w.do("clear", "exact", "", 0)
	p.chain = 0
	w.do("send 2", "exact", "", 2)
}

// Whoever seems to restart with each message is left alone for a while, and is
// followed again when it has come to rest.
func TestEventsOfOneThatRestartsAlways(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	p.do("send 5")
	w := watch(t, p, nil)
	w.expect("start", "exact", "", 5)
	restless := func() bool { return strings.Contains(w.slot().Why, "restart again and again") }
	sent := 0
	for end := time.Now().Add(patience); !restless(); sent += 100 {
		if p.do("storm 100"); time.Now().After(end) {
			t.Fatalf("it is %+v", w.slot())
		}
	}
	if n := w.slot().Resets; n > max(sent/4, mostRestarts+1) {
		t.Errorf("it was forgotten %d times by %d messages", n, sent)
	}
	p.do("restart")
	p.do("send 2")
	w.expect("restart", "exact", "", 2)
}

// Without an endpoint for replays, what was before the agent is unknown.
func TestEventsWithoutReplay(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	w := watch(t, p, func(k *KVEventsConfig) { k.ReplayEndpoint = "" })
	w.expect("nothing", "approximate", "there is no replay endpoint", 0)
	// The subscription may not have arrived yet.
	for end := time.Now().Add(patience); w.slot().Events.Batches == 0 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		p.do("send 1")
	}
	if got := w.slot(); got.State == "repairing" {
		t.Errorf("%+v", got)
	}
}

// A replay endpoint that does not answer leaves the events that come.
func TestEventsOfNobody(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	p.do("stop")
	w := watch(t, p, nil)
	w.expect("nobody", "approximate", "refused", 0)
	p.do("start")
	w.do("send 2", "exact", "", 2)
}

// What is configured may change while the agent runs, and the replica leave.
func TestEventsAreConfiguredAnew(t *testing.T) {
	p, other := newGoPublisher(t, kvevent.VLLM), newGoPublisher(t, kvevent.VLLM)
	p.do("send 5")
	other.do("send 7")
	w := watch(t, p, nil)
	w.expect("start", "exact", "", 5)
	c := *w.fleet.cfg.Load()
	replica := c.Replicas[0]
	set := func(k KVEventsConfig) {
		replica.KVEvents = k
		c := c
		c.Replicas = []ReplicaConfig{replica}
		if err := w.fleet.reconfigure(&c); err != nil {
			t.Fatal(err)
		}
	}
	set(KVEventsConfig{Mode: "off"})
	w.expect("off", "approximate", "off in the configuration", 5) // what is known stays as a guess
	set(KVEventsConfig{Endpoint: "tcp://" + other.events, ReplayEndpoint: "tcp://" + other.replay, Topic: "kv"})
	w.expect("another", "exact", "", 7)
	// What the engine has told is forgotten, and it tells it again.
	w.fleet.mu.Lock()
	w.fleet.restartedLocked(w.fleet.members[0], "to try it")
	w.fleet.mu.Unlock()
	w.expect("forgotten", "exact", "", 7)

	slot := w.slot().Slot
	if err := w.fleet.apply(nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return len(w.fleet.index.Stats(nil)) == 0 }, func() string { return "the slot stays" })
	other.do("send 1")
	if len(w.fleet.index.Stats(nil)) != 0 {
		t.Errorf("slot %d is told of after it was given back", slot)
	}
}

// SGLang's events do not say which adapter a block is of: of an engine that has
// some, they would tell what is wrong.
func TestEventsOfAdapters(t *testing.T) {
	known := func(engine string, adapters ...string) (string, string) {
		sim, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, Engine: engine, LoRAModules: adapters,
			KVEvents: simulator.KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sim.Close() })
		w := &watcher{stage: newStage(t, []ModelConfig{{Name: "m"}}, ReplicaConfig{ID: "r", URL: sim.URL(), Engine: engine})}
		eventually(t, func() bool { s := w.slot(); return s.State == "exact" || strings.Contains(s.Why, "adapter") },
			func() string { return fmt.Sprintf("%+v", w.slot()) })
		return w.slot().State, w.slot().Why
	}
	f := func(want, engine string, adapters ...string) {
		t.Helper()
		if state, why := known(engine, adapters...); state != want {
			t.Errorf("%s with the adapters %v: %s, %s", engine, adapters, state, why)
		}
	}
	f("exact", "vllm", "l")
	f("exact", "sglang")
	f("approximate", "sglang", "l")
}

// The block size is what the engine's events have, whatever is configured.
func TestEventsTellTheBlockSize(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	p.do("send 5")
	engine := startEngine(t, 0, "m")
	w := &watcher{newStage(t, []ModelConfig{{Name: "m", BlockSize: 32}}, ReplicaConfig{ID: "r", URL: engine.URL(),
		KVEvents: KVEventsConfig{Endpoint: "tcp://" + p.events, ReplayEndpoint: "tcp://" + p.replay}}), p}
	w.expect("late", "exact", "", 5)
	if got := w.slot(); got.BlockSize != 4 {
		t.Errorf("the block size is %d", got.BlockSize)
	}
	w.do("send 1", "exact", "", 6)
}

// Everything that people see of it.
func TestIndexReport(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	p.do("send 5")
	engine, quiet := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	c := testConfig(engine, quiet)
	c.Models = []ModelConfig{{Name: "m", BlockSize: 4}}
	c.Replicas[0].KVEvents = KVEventsConfig{Endpoint: "tcp://" + p.events, ReplayEndpoint: "tcp://" + p.replay}
	c.Replicas[1].KVEvents = KVEventsConfig{Mode: "off"}
	a := startAgent(t, c)
	defer stopped(t, a)
	has := func(path string, want ...string) {
		t.Helper()
		var body, missing string
		eventually(t, func() bool {
			_, body = page(t, a, path)
			missing = ""
			for _, w := range want {
				if !strings.Contains(body, w) {
					missing = w
				}
			}
			return missing == ""
		}, func() string { return fmt.Sprintf("%s lacks %s:\n%s", path, missing, body) })
	}
	has("/debug/index", `"state": "exact"`, `"why": "kv_events is off in the configuration"`, `"endpoint": "tcp://`+p.events+`"`,
		`"gpu": 5`, `"next_sequence": 5`, `"block_size": 4`, `"max_bytes": 1073741824`, `"connected": true`, `"events": null`)
	has("/debug/index?state=exact", `"replica": "r0"`, `"approximate": 1`)
	for _, path := range []string{"/debug/index?state=exact", "/debug/index?replica=r0"} {
		if _, body := page(t, a, path); strings.Contains(body, `"replica": "r1"`) {
			t.Errorf("%s shows another replica:\n%s", path, body)
		}
	}
	if status, body := page(t, a, "/debug/index?state=good"); status != 400 || !strings.Contains(body, "exact, repairing") {
		t.Errorf("an unknown state: %d %s", status, body)
	}
	has("/debug/fleet", `"state": "exact"`, `"state": "approximate"`, `"state_why": "kv_events is off in the configuration"`)
	has("/metrics", `inferrail_index_entries{tier="gpu"} 5`, `inferrail_index_slots{state="exact"} 1`, `inferrail_index_state{replica="r0",state="exact"} 1`,
		`inferrail_index_slots{state="approximate"} 1`, `inferrail_kv_events_total{kind="stored",replica="r0"} 5`,
		`inferrail_kv_events_gaps_total{replica="r0"} 0`, `inferrail_kv_events_replays_total{replica="r0"}`, "inferrail_index_bytes ",
		`inferrail_index_resets_total{replica="r1"} 0`, `inferrail_kv_events_lag_seconds{replica="r0"}`)
	if _, body := page(t, a, "/metrics"); strings.Contains(body, `kv_events_total{kind="stored",replica="r1"}`) {
		t.Error("there are metrics of events that are not followed")
	}
	if _, body := page(t, a, "/readyz"); !strings.HasPrefix(body, "ok") {
		t.Errorf("/readyz says %s", body)
	}
}

// Whom /readyz tells of: a publisher that is known and not followed for long.
func TestEventAilments(t *testing.T) {
	now := time.Now()
	f := func(is eventStanding, want string) {
		t.Helper()
		s := &subscriber{is: is}
		if got := s.ailment(now); got != want {
			t.Errorf("%+v: got %q", is, got)
		}
	}
	from := publisher{events: endpoint{"tcp", "gpu-0:5557"}}
	long := now.Add(-time.Minute)
	f(eventStanding{state: index.Exact, from: from, since: long}, "")
	f(eventStanding{state: index.Repairing, why: "lost", from: from, since: now}, "")
	f(eventStanding{state: index.Approximate, why: "publishes none", since: long}, "")
	f(eventStanding{state: index.Repairing, why: "refused", from: from, since: long}, "its KV events are not followed exactly (refused)")
	f(eventStanding{state: index.Approximate, why: "lost", from: from, since: long}, "its KV events are not followed exactly (lost)")
}

// storyteller is a fleet of one engine whose log is read, and that asks soon
// whether something was missed.
func storyteller(t *testing.T, p eventPublisher, topic string) (*watcher, *lines) {
	t.Helper()
	engine := startEngine(t, 0, "m")
	events, replay := p.addresses()
	c := DefaultConfig()
	c.Models = []ModelConfig{{Name: "m", BlockSize: 4}}
	c.Replicas = []ReplicaConfig{{ID: "r", URL: engine.URL(), KVEvents: KVEventsConfig{
		Endpoint: "tcp://" + events, ReplayEndpoint: "tcp://" + replay, Topic: topic}}}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	log := &lines{}
	return &watcher{newStageOf(t, &c, func(f *fleet) {
		f.log, f.eventsIdle = log.logger(), 50*time.Millisecond
	}), p}, log
}

// told waits until the log has so many lines about events, and returns them.
func (w *watcher) told(log *lines, n int) (list []string) {
	w.Helper()
	for end := time.Now().Add(patience); len(list) < n; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("want %d lines about events:\n%s", n, log)
		}
		list = nil
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, "KV events") || strings.Contains(line, "known exactly") {
				list = append(list, line)
			}
		}
	}
	return list
}

// Each change that lasts is one line of the log: not the gap that is closed at
// once, nor each of the attempts that fail.
func TestEventsInTheLog(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	p.do("send 1")
	w, log := storyteller(t, p, "kv")
	w.expect("start", "exact", "", 1)
	for range 5 {
		p.do("lose 1")
		w.do("send 1", "exact", "", int(p.next)+1)
	}
	w.do("stop", "repairing", "refused", 11)
	w.told(log, 2)
	w.do("start", "exact", "", 11)
	got := w.told(log, 3)
	for i, want := range []string{"is known exactly", "is not known exactly any more", "is known exactly"} {
		if len(got) != 3 || !strings.Contains(got[i], want) {
			t.Fatalf("line %d is not that it %s:\n%s", i, want, log)
		}
	}
}

// A topic that the engine does not publish with is no silence.
func TestEventsOfAnotherTopic(t *testing.T) {
	p := newGoPublisher(t, kvevent.VLLM)
	w, _ := storyteller(t, p, "other")
	ended := make(chan struct{})
	var sending sync.WaitGroup
	defer sending.Wait()
	defer close(ended)
	sending.Go(func() {
		for {
			select {
			case <-ended:
				return
			case <-time.After(20 * time.Millisecond):
				p.do("send 1")
			}
		}
	})
	for end := time.Now().Add(patience); !strings.Contains(w.slot().Why, `is "other" the topic`); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%+v", w.slot())
		}
	}
	if got := w.slot(); got.State != "repairing" {
		t.Errorf("%+v", got)
	}
}
