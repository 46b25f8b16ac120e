package simulator

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"

	"github.com/inferrail/inferrail/index/kvevent"
)

// heard is what one who follows the events knows: how often it was told of a
// block, by medium and hash, and the tokens up to its end.
type heard map[string]map[uint64]*heardBlock

type heardBlock struct {
	times int
	text  string
}

// apply follows one batch. What is told must follow from what is known.
func (h heard) apply(t testing.TB, b *kvevent.Batch, size int) {
	t.Helper()
	for i := range b.Events {
		e := &b.Events[i]
		on := h[e.Medium]
		if on == nil {
			on = map[uint64]*heardBlock{}
			h[e.Medium] = on
		}
		switch e.Kind {
		case kvevent.Stored:
			if len(e.Tokens) != len(e.Hashes)*size || e.BlockSize != size {
				t.Fatalf("%d hashes of blocks of %d tokens have %d", len(e.Hashes), e.BlockSize, len(e.Tokens))
			}
			text := "|" + e.Adapter + "|" + e.Salt + "|"
			if e.HasParent {
				if on[e.Parent] == nil {
					t.Fatalf("%s: parent %x is not known", e.Medium, e.Parent)
				}
				text = on[e.Parent].text
			}
			for k, hash := range e.Hashes {
				text += fmt.Sprint(e.Tokens[k*size:(k+1)*size], " ")
				if on[hash] == nil {
					on[hash] = &heardBlock{text: text}
				}
				if on[hash].text != text {
					t.Fatalf("%x is %s and %s", hash, on[hash].text, text)
				}
				on[hash].times++
			}
		case kvevent.Removed:
			for _, hash := range e.Hashes {
				if on[hash] == nil {
					t.Fatalf("%s: %x is removed and not known", e.Medium, hash)
				}
				if on[hash].times--; on[hash].times == 0 {
					delete(on, hash)
				}
			}
		case kvevent.Cleared:
			clear(h["gpu"])
			clear(h[""])
		default:
			t.Fatalf("an event of kind %v", e.Kind)
		}
	}
}

// holds returns how often a rank's cache has each block, by medium and hash.
func (s *Server) holds(rank int) map[string]map[uint64]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]map[uint64]int{"gpu": {}}
	p := &publisher{sglang: s.cfg.sglang()}
	switch c := s.process.ranks[rank].engine.cache.(type) {
	case *blockPool:
		for _, b := range c.blocks {
			if b.named {
				out["gpu"][p.number(&b.name)]++
			}
		}
	case *radixCache:
		if s.cfg.HostBlocks > 0 {
			out["cpu_pinned"] = map[uint64]int{}
		}
		var walk func(n *radixNode)
		walk = func(n *radixNode) {
			for i := range n.names {
				if n.gpu {
					out["gpu"][p.number(&n.names[i])]++
				}
				if n.host {
					out["cpu_pinned"][p.number(&n.names[i])]++
				}
			}
			for _, child := range n.children {
				walk(child)
			}
		}
		for _, root := range c.roots {
			walk(root)
		}
	}
	return out
}

func (h heard) counts() map[string]map[uint64]int {
	out := map[string]map[uint64]int{"gpu": {}}
	for medium, on := range h {
		if medium == "" {
			continue
		}
		if out[medium] == nil {
			out[medium] = map[uint64]int{}
		}
		for hash, b := range on {
			out[medium][hash] = b.times
		}
	}
	return out
}

func sameHolds(a, b map[string]map[uint64]int) bool {
	return maps.EqualFunc(a, b, func(x, y map[uint64]int) bool { return maps.Equal(x, y) })
}

// dial connects a socket to an endpoint that was told, and closes it with the
// test.
func dial(t testing.TB, s zmq4.Socket, endpoint string) zmq4.Socket {
	t.Helper()
	t.Cleanup(func() { s.Close() })
	if err := s.Dial(endpoint); err != nil {
		t.Fatal(err)
	}
	return s
}

// testContext ends with the test, and well before its time is up.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// subscribed connects a SUB to a rank, and waits until it is heard.
func subscribed(t testing.TB, s *Server, rank int, topic string) zmq4.Socket {
	t.Helper()
	p := s.current().ranks[rank].publisher
	sub := dial(t, zmq4.NewSub(testContext(t)), p.source().Endpoint)
	count := func() int {
		p.events.mu.Lock()
		defer p.events.mu.Unlock()
		n := 0
		for peer := range p.events.peers {
			n += peer.topics[topic]
		}
		return n
	}
	before := count()
	if err := sub.SetOption(zmq4.OptionSubscribe, topic); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "a subscription", func() bool { return count() > before })
	return sub
}

// next returns the next message of a SUB.
func next(t testing.TB, sub zmq4.Socket, topic string) kvevent.Message {
	t.Helper()
	m, err := sub.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if string(m.Frames[0]) != topic {
		t.Fatalf("topic %q, want %q", m.Frames[0], topic)
	}
	got, err := kvevent.ParseMessage(m.Frames)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// replay asks for all batches from one on, and returns them and the number of
// frames of a reply.
func replay(t testing.TB, s *Server, rank int, from uint64) (messages []kvevent.Message, frames int) {
	t.Helper()
	d := dial(t, zmq4.NewDealer(testContext(t)), *s.current().ranks[rank].publisher.source().Replay)
	if err := d.Send(zmq4.NewMsgFrom(kvevent.ReplayRequest(from)...)); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := d.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got, end, err := kvevent.ParseReplay(m.Frames)
		if err != nil {
			t.Fatal(err)
		}
		if end {
			return messages, len(m.Frames)
		}
		messages = append(messages, got)
	}
}

// burden sends requests one after the other that share and evict blocks.
func burden(t testing.TB, c *http.Client, s *Server, seed uint64, n int) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 2))
	for range n {
		prompt := ""
		for k := range 1 + r.IntN(12) {
			prompt += fmt.Sprintf("w%d ", r.IntN(2)+10*k)
		}
		body := fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"model":%q`, prompt, 1+r.IntN(8), [...]string{"sim", "l"}[r.IntN(5)/4])
		if r.IntN(5) == 0 {
			body += `,"cache_salt":"s"`
		}
		req, _ := http.NewRequest("POST", s.URL()+"/v1/completions", strings.NewReader(body+"}"))
		req.Header.Set(rankHeader, strconv.Itoa(r.IntN(s.cfg.DataParallelSize)))
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, res)
		res.Body.Close()
	}
}

const anyPort = "tcp://127.0.0.1:0"

// TestEvents: who has heard all events knows what the cache holds, in every form
// that engines write, live, by replay from the first batch, and by snapshot.
func TestEvents(t *testing.T) {
	f := func(cfg Config, frames int) {
		t.Helper()
		cfg.ZeroLatency, cfg.NumGPUBlocks, cfg.LoRAModules = true, 40, []string{"l"}
		cfg.KVEvents.Endpoint, cfg.KVEvents.ReplayEndpoint, cfg.KVEvents.Topic = anyPort, anyPort, "kv"
		s, c := start(t, cfg), client(t)
		name := fmt.Sprintf("%s %+v", cfg.Engine, cfg.KVEvents)
		for rank := range s.cfg.DataParallelSize {
			sub := subscribed(t, s, rank, "k")
			var d kvevent.Decoder
			know := heard{}
			decode := func(into heard, m kvevent.Message) {
				t.Helper()
				var b kvevent.Batch
				if err := d.Batch(&b, m.Payload); err != nil {
					t.Fatal(name, err)
				}
				if b.Rank != rank || time.Since(time.UnixMicro(int64(b.Time*1e6))) > time.Minute {
					t.Fatalf("%s: batch of rank %d at %v", name, b.Rank, b.Time)
				}
				into.apply(t, &b, s.cfg.BlockSize)
			}
			burden(t, c, s, 1, 150)
			p := s.current().ranks[rank].publisher
			told := uint64(0)
			eventually(t, 20*time.Second, "all is published", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				told = p.next
				return told >= s.Published(rank)
			})
			messages, got := replay(t, s, rank, 0)
			if got != frames {
				t.Errorf("%s: a reply of %d frames, want %d", name, got, frames)
			}
			for i, m := range messages {
				if m.Seq != uint64(i) {
					t.Fatalf("%s: batch %d is the reply %d", name, m.Seq, i)
				}
				decode(know, m)
			}
			if want := s.holds(rank); !sameHolds(know.counts(), want) {
				t.Errorf("%s: by replay\n%v, the cache holds\n%v", name, know.counts(), want)
			}
			if later, _ := replay(t, s, rank, told-3); len(later) != 3 || later[0].Seq != told-3 {
				t.Errorf("%s: the last 3 of %d batches by replay are %d", name, told, len(later))
			}

			// Live it is the same, batch for batch.
			for m := next(t, sub, "kv"); ; m = next(t, sub, "kv") {
				if !slices.ContainsFunc(messages, func(r kvevent.Message) bool { return r.Seq == m.Seq && slices.Equal(r.Payload, m.Payload) }) {
					t.Fatalf("%s: batch %d is not among those replayed", name, m.Seq)
				}
				if m.Seq == told-1 {
					break
				}
			}
			if cfg.KVEvents.SnapshotEndpoint != "" {
				all, snapshot := heard{}, askSnapshot(t, s, rank)
				if snapshot.Seq < int64(told)-1 || snapshot.Publisher != p.id {
					t.Errorf("%s: a snapshot of batch %d by %x, want %d by %x", name, snapshot.Seq, snapshot.Publisher, told-1, p.id)
				}
				for _, chunk := range snapshot.Chunks {
					decode(all, kvevent.Message{Payload: chunk})
				}
				if want := s.holds(rank); !sameHolds(all.counts(), want) {
					t.Errorf("%s: by snapshot\n%v, the cache holds\n%v", name, all.counts(), want)
				}
			}
		}
	}
	f(Config{}, 4)
	f(Config{BlockSize: 4, DataParallelSize: 2}, 4)
	f(Config{BlockSize: 4, KVEvents: KVEvents{Arrays: true}}, 3)
	f(Config{BlockSize: 4, KVEvents: KVEvents{ByteHashes: true}}, 4)
	f(Config{BlockSize: 2, KVEvents: KVEvents{SnapshotEndpoint: anyPort}}, 4)
	f(Config{BlockSize: 1, Engine: "sglang"}, 3)
	f(Config{BlockSize: 2, Engine: "sglang", HostBlocks: 60}, 3)
	f(Config{BlockSize: 4, Engine: "sglang", KVEvents: KVEvents{Arrays: true}}, 3)
}

func askSnapshot(t testing.TB, s *Server, rank int) kvevent.Snapshot {
	t.Helper()
	req := dial(t, zmq4.NewReq(testContext(t)), *s.current().ranks[rank].publisher.source().Snapshot)
	if err := req.Send(zmq4.NewMsgFrom(kvevent.SnapshotRequest()...)); err != nil {
		t.Fatal(err)
	}
	m, err := req.Recv()
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err := kvevent.ParseSnapshot(m.Frames)
	if err != nil {
		t.Fatal(err)
	}
	return snapshot
}

// TestEventFaults: what the faults take from those who listen is in the replay,
// unless that is lost too.
func TestEventFaults(t *testing.T) {
	s := start(t, Config{ZeroLatency: true, BlockSize: 1, KVEvents: KVEvents{Endpoint: anyPort, ReplayEndpoint: anyPort, BufferSteps: 5}})
	c, sub := client(t), subscribed(t, s, 0, "")
	step := 0
	// say makes one batch.
	say := func() {
		t.Helper()
		step++
		readAll(t, post(t, c, s, "/v1/completions", fmt.Sprintf(`{"prompt":[%d],"max_tokens":1}`, step)))
	}
	faults := func(body string) {
		t.Helper()
		if res := post(t, c, s, "/sim/faults", body); res.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", body, readAll(t, res))
		}
	}
	hear := func(want ...uint64) {
		t.Helper()
		for _, seq := range want {
			if m := next(t, sub, ""); m.Seq != seq {
				t.Fatalf("heard batch %d, want %d", m.Seq, seq)
			}
		}
	}
	kept := func(want ...uint64) {
		t.Helper()
		messages, _ := replay(t, s, 0, 0)
		var got []uint64
		for _, m := range messages {
			got = append(got, m.Seq)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("batches %v are kept, want %v", got, want)
		}
	}
	say()
	hear(0)
	faults(`{"events_drop":2}`)
	say()
	say()
	say()
	hear(3)
	kept(0, 1, 2, 3)
	faults(`{"events_twice":true}`)
	say()
	hear(4, 4)
	faults(`{"events_stop":true}`)
	say()
	say()
	eventually(t, 20*time.Second, "two more are kept", func() bool { m, _ := replay(t, s, 0, 6); return len(m) == 1 })
	kept(2, 3, 4, 5, 6)
	faults(`{"replay_lost":true}`)
	kept()
	say()
	hear(7)
	kept(7)

	// Gone, the endpoint is not connected to; it comes back where it was.
	endpoint := *s.current().ranks[0].publisher.source().Replay
	faults(`{"replay_gone":true}`)
	if conn, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://")); err == nil {
		conn.Close()
		t.Error("the replay endpoint can be connected to")
	}
	faults(`{}`)
	kept(7)

	began := time.Now()
	faults(`{"events_delay_us":50000}`)
	say()
	hear(8)
	if d := time.Since(began); d < 50*time.Millisecond {
		t.Errorf("a slow publisher took %v", d)
	}

	// A restart numbers anew, and is heard by who connects anew.
	faults(`{}`)
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	kept()
	sub = subscribed(t, s, 0, "")
	say()
	hear(0)
	kept(0)

	for _, body := range []string{`{"events_drop":-1}`, `{"events_delay_us":-1}`, `{"events_delay_us":100000000}`} {
		if res := post(t, c, s, "/sim/faults", body); res.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %s", body, res.Status)
		}
	}
	if res := post(t, c, s, "/v1/completions", `{"prompt":"x","vllm_xargs":{"sim":{"events_stop":true}}}`); res.StatusCode != http.StatusBadRequest {
		t.Errorf("the fault of one request: %s", res.Status)
	}
}

// TestSlowSubscriber: one who does not read loses messages, nobody waits for it,
// and it hears again when it reads.
func TestSlowSubscriber(t *testing.T) {
	s, err := listenSocket(zmq4.Pub, anyPort, 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	sub := dial(t, zmq4.NewSub(testContext(t)), withPort(anyPort, s.port()))
	if err := sub.SetOption(zmq4.OptionSubscribe, ""); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "a subscription", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for p := range s.peers {
			return len(p.topics) == 1
		}
		return false
	})
	const sent = 100
	large := make([]byte, 1<<20)
	for range sent {
		s.publish([][]byte{nil, large})
	}
	received, over := 0, make(chan struct{})
	go func() {
		defer close(over)
		for {
			m, err := sub.Recv()
			if err != nil || len(m.Frames) != 2 || len(m.Frames[1]) == 0 {
				return
			}
			received++
		}
	}()
	for heard := false; !heard; {
		s.publish([][]byte{nil, nil})
		select {
		case <-over:
			heard = true
		case <-time.After(time.Millisecond):
		}
	}
	if received == 0 || received == sent {
		t.Errorf("%d of %d messages received by one who did not read", received, sent)
	}
}

// TestHeartbeat: a publisher with snapshots says each second that nothing
// happens, under a number of its own.
func TestHeartbeat(t *testing.T) {
	s := start(t, Config{KVEvents: KVEvents{Endpoint: anyPort, SnapshotEndpoint: anyPort}})
	sub := subscribed(t, s, 0, "")
	first := next(t, sub, "")
	second := next(t, sub, "")
	var d kvevent.Decoder
	var b kvevent.Batch
	if err := d.Batch(&b, second.Payload); err != nil || len(b.Events) != 0 || second.Seq != first.Seq+1 || b.Publisher == [16]byte{} {
		t.Errorf("%+v after %d: %+v, %v", second.Seq, first.Seq, b, err)
	}
}

// TestEventSources: each engine tells where it publishes.
func TestEventSources(t *testing.T) {
	c := client(t)
	s := start(t, Config{DataParallelSize: 2, KVEvents: KVEvents{Endpoint: anyPort, Topic: "kv"}})
	port := func(rank int) int { return s.current().ranks[rank].publisher.events.port() }
	want := fmt.Sprintf(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:%d","replay_endpoint":null,`+
		`"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"},"1":{"enable_kv_cache_events":true,"publisher":"zmq",`+
		`"endpoint":"tcp://127.0.0.1:%d","replay_endpoint":null,"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"}}`, port(0), port(1))
	if got := get(t, c, s, "/kv_event_sources"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := get(t, c, start(t, Config{}), "/kv_event_sources"); got != "{}" {
		t.Errorf("without events: %s", got)
	}
	s = start(t, Config{Engine: "sglang", KVEvents: KVEvents{Endpoint: anyPort, ReplayEndpoint: anyPort}})
	p := s.current().ranks[0].publisher
	want = fmt.Sprintf(`"kv_events":{"publisher":"zmq","endpoint_host":"127.0.0.1","endpoint_port_base":%d,"replay_endpoint_port_base":%d,"topic":"","block_size":16,"dp_size":1}}`,
		p.events.port(), p.port)
	if got := get(t, c, s, "/server_info"); !strings.HasSuffix(got, want) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := get(t, c, start(t, Config{Engine: "sglang"}), "/server_info"); !strings.HasSuffix(got, `"kv_events":null}`) {
		t.Errorf("without events: %s", got)
	}
}

// TestSocketFailure: what is no ZeroMQ, or asks for what there is not, is
// dropped, and others are served.
func TestSocketFailure(t *testing.T) {
	s := start(t, Config{ZeroLatency: true, KVEvents: KVEvents{Endpoint: anyPort, ReplayEndpoint: anyPort, SnapshotEndpoint: anyPort}})
	src := s.current().ranks[0].publisher.source()
	for _, endpoint := range []string{src.Endpoint, *src.Replay, *src.Snapshot} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"+strings.Repeat("x", 200))
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		buf := make([]byte, 1000)
		for {
			if _, err = conn.Read(buf); err != nil {
				break
			}
		}
		if ne, ok := err.(net.Error); ok && ne.Timeout() {
			t.Errorf("%s does not hang up", endpoint)
		}
		conn.Close()
	}
	d := dial(t, zmq4.NewDealer(testContext(t)), *src.Replay)
	for _, frames := range [][][]byte{{{}}, {{}, {1}}, {{1}, {2}, {3}}, {{}, binary.BigEndian.AppendUint64(nil, 1<<63)}} {
		if err := d.Send(zmq4.NewMsgFrom(frames...)); err != nil {
			t.Fatal(err)
		}
	}
	// Only the last one is answered.
	m, err := d.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if _, end, err := kvevent.ParseReplay(m.Frames); err != nil || !end {
		t.Errorf("%q: %v", m.Frames, err)
	}
}

func TestKVEventsFailure(t *testing.T) {
	f := func(cfg Config, want string) {
		t.Helper()
		s, err := Start(cfg)
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", cfg.KVEvents, err, want)
		}
	}
	f(Config{KVEvents: KVEvents{Endpoint: "127.0.0.1:1"}}, `kv-events: endpoint must be like tcp://127.0.0.1:5557, with ports for all ranks, not "127.0.0.1:1"`)
	f(Config{KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1"}}, "endpoint must be like")
	f(Config{KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:65535"}, DataParallelSize: 2}, "endpoint must be like")
	f(Config{KVEvents: KVEvents{ReplayEndpoint: anyPort}}, "replay-endpoint is set without endpoint")
	f(Config{KVEvents: KVEvents{Endpoint: anyPort, BufferSteps: -1}}, "buffer-steps and hwm must be at least 1")
	f(Config{KVEvents: KVEvents{Endpoint: anyPort}, DataParallelSize: 2, Engine: "sglang"}, "endpoint must have a port")
	f(Config{Engine: "x"}, `engine must be one of vllm, sglang, tgi, llamacpp, ollama, not "x"`)
	f(Config{MaxModelLen: 1000, NumGPUBlocks: 10}, "max-model-len 1000 needs a KV cache of 64 blocks, num-gpu-blocks-override is 10")
	f(Config{Engine: "llamacpp", MaxNumSeqs: 4, MaxModelLen: 161, NumGPUBlocks: 40}, "max-model-len 161 needs a KV cache of 41 blocks for max-num-seqs 4 slots, num-gpu-blocks-override is 40")
	f(Config{HostBlocks: 1, Engine: "tgi"}, "host-blocks and hicache-ratio are for the engines vllm and sglang")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f(Config{KVEvents: KVEvents{Endpoint: "tcp://" + l.Addr().String()}}, "address already in use")
}
