package simulator

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"

	"github.com/inferrail/inferrail/index/kvevent"
)

// KVEvents is how an engine tells what comes into its cache and leaves it, over
// ZeroMQ. The port of each endpoint is that of rank 0, those of other ranks
// follow it; port 0 is any free one for each, which /kv_event_sources tells.
type KVEvents struct {
	// Endpoint is where batches are published; empty is nowhere.
	Endpoint string `yaml:"endpoint" name:"endpoint" help:"Publish KV cache events at this address, such as tcp://127.0.0.1:5557; port 0 is any. Ranks have the ports behind it. It and the next five are members of --kv-events-config of vLLM."`
	// ReplayEndpoint answers with the last batches, SnapshotEndpoint with all
	// that is held; with that there is a heartbeat each second, too.
	ReplayEndpoint   string `yaml:"replay_endpoint" name:"replay-endpoint" help:"Send the last batches of KV cache events again to whoever asks at this address."`
	SnapshotEndpoint string `yaml:"snapshot_endpoint" name:"snapshot-endpoint" help:"Tell all that is in the KV cache to whoever asks at this address."`
	BufferSteps      int    `yaml:"buffer_steps" name:"buffer-steps" default:"10000" help:"Batches of KV cache events that are kept for replay."`
	HWM              int    `yaml:"hwm" name:"hwm" default:"100000" help:"Batches that wait for one subscriber before more are dropped."`
	Topic            string `yaml:"topic" name:"topic" help:"Topic of the KV cache events."`
	// Arrays: events are arrays, as in older releases of both engines, and
	// replies to replays are without the topic.
	Arrays bool `yaml:"arrays" name:"arrays" help:"Write KV cache events as arrays, as vLLM did until 0.23 and SGLang until 0.5.19."`
	// ByteHashes: hashes are bytes, which vLLM can have.
	ByteHashes bool `yaml:"byte_hashes" name:"byte-hashes" help:"Write the hashes of vLLM's KV cache events as bytes, as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."`
}

func (c *KVEvents) check(ranks int, sglang bool) error {
	for _, e := range []struct{ name, endpoint string }{
		{"endpoint", c.Endpoint}, {"replay-endpoint", c.ReplayEndpoint}, {"snapshot-endpoint", c.SnapshotEndpoint},
	} {
		if e.endpoint == "" {
			continue
		}
		if c.Endpoint == "" {
			return fmt.Errorf("%s is set without endpoint", e.name)
		}
		address, ok := strings.CutPrefix(e.endpoint, "tcp://")
		_, port, err := net.SplitHostPort(address)
		n, perr := strconv.Atoi(port)
		if n == 0 && sglang && ranks > 1 {
			return fmt.Errorf("%s must have a port: those of SGLang's ranks follow it", e.name)
		}
		if !ok || err != nil || perr != nil || n < 0 || n+ranks-1 > 65535 {
			return fmt.Errorf("%s must be like tcp://127.0.0.1:5557, with ports for all ranks, not %q", e.name, e.endpoint)
		}
	}
	if c.BufferSteps < 1 || c.HWM < 1 {
		return fmt.Errorf("buffer-steps and hwm must be at least 1, got %d and %d", c.BufferSteps, c.HWM)
	}
	return nil
}

// atRank returns an endpoint of a rank.
func atRank(endpoint string, rank int) string {
	base, port, _ := cutLast(endpoint, ":")
	n, _ := strconv.Atoi(port)
	if n == 0 || endpoint == "" {
		return endpoint
	}
	return base + ":" + strconv.Itoa(n+rank)
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// publisher tells of the changes of one rank's cache, in batches numbered from
// 0 on. newPublisher makes it, close ends it; the other methods may be called
// from any goroutine.
type publisher struct {
	cfg  *KVEvents
	form kvevent.Form
	rank int
	// size is how many tokens a block has.
	size   int
	sglang bool
	// id is 0 without snapshots.
	id [16]byte

	events, snapshots *socket

	// queueMu guards queue, the batches that are to be published, taken and
	// whether there will be more.
	queueMu sync.Mutex
	queue   []toldBatch
	taken   uint64 // batches of the cache so far
	over    bool
	// more holds a token when queue has grown, or is over.
	more chan struct{}
	ran  sync.WaitGroup

	// mu guards the following.
	mu     sync.Mutex
	replay *socket // nil while it is gone
	port   int     // that it has or had
	faults *faultSet
	// next is the number of the next batch, kept the last ones.
	next uint64
	kept []kvevent.Message
	held held
}

type toldBatch struct {
	changes []Change
	at      time.Time
}

// newPublisher listens at the endpoints of a rank, and publishes from then on.
func newPublisher(cfg *Config, rank int, faults *faultSet) (*publisher, error) {
	p := &publisher{cfg: &cfg.KVEvents, rank: rank, size: cfg.BlockSize, sglang: cfg.sglang(), faults: faults, more: make(chan struct{}, 1)}
	switch {
	case p.sglang && p.cfg.Arrays:
		p.form = kvevent.SGLangArrays
	case p.sglang:
		p.form = kvevent.SGLang
	case p.cfg.Arrays:
		p.form = kvevent.VLLMArrays
	}
	var err error
	if p.events, err = listenSocket(zmq4.Pub, atRank(p.cfg.Endpoint, rank), p.cfg.HWM, nil); err != nil {
		return nil, err
	}
	if p.cfg.ReplayEndpoint != "" {
		if p.replay, err = listenSocket(zmq4.Router, atRank(p.cfg.ReplayEndpoint, rank), 1, p.answerReplay); err != nil {
			p.close()
			return nil, err
		}
		p.port = p.replay.port()
	}
	if p.cfg.SnapshotEndpoint != "" {
		binary.LittleEndian.PutUint64(p.id[:], rand.Uint64())
		binary.LittleEndian.PutUint64(p.id[8:], rand.Uint64()|1)
		p.held = held{}
		if p.snapshots, err = listenSocket(zmq4.Rep, atRank(p.cfg.SnapshotEndpoint, rank), 1, p.answerSnapshot); err != nil {
			p.close()
			return nil, err
		}
	}
	p.setFaults(faults)
	p.ran.Go(p.run)
	return p, nil
}

// close ends the sockets and the goroutine, and waits for it. It may be called
// again.
func (p *publisher) close() {
	p.queueMu.Lock()
	p.over = true
	p.queueMu.Unlock()
	p.wake()
	p.ran.Wait()
	p.mu.Lock()
	replay := p.replay
	p.replay, p.port = nil, 0
	p.mu.Unlock()
	for _, s := range []*socket{p.events, replay, p.snapshots} {
		if s != nil {
			s.close()
		}
	}
}

func (p *publisher) wake() {
	select {
	case p.more <- struct{}{}:
	default:
	}
}

// publish takes the changes of one step. It waits for nobody.
func (p *publisher) publish(changes []Change, at time.Time) {
	p.queueMu.Lock()
	p.queue = append(p.queue, toldBatch{changes, at})
	p.taken++
	p.queueMu.Unlock()
	p.wake()
}

// Published returns how many batches of events a rank has made until now, those
// that faults keep back included; 0 without events. Heartbeats are not counted.
func (s *Server) Published(rank int) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.process.ranks[rank]
	if r.publisher == nil {
		return 0
	}
	r.engine.Advance(s.now())
	s.process.settle(r, s.now())
	r.publisher.queueMu.Lock()
	defer r.publisher.queueMu.Unlock()
	return r.publisher.taken
}

// heartbeat is how often a publisher with snapshots says that nothing happens.
const heartbeat = time.Second

// run publishes what is queued.
func (p *publisher) run() {
	beat := time.NewTimer(time.Hour)
	defer beat.Stop()
	for {
		beat.Reset(time.Hour)
		if p.snapshots != nil {
			beat.Reset(heartbeat)
		}
		beaten := false
		select {
		case <-p.more:
		case <-beat.C:
			beaten = true
		}
		p.queueMu.Lock()
		batches, over := p.queue, p.over
		p.queue = nil
		p.queueMu.Unlock()
		if over {
			return
		}
		if beaten && len(batches) == 0 {
			batches = []toldBatch{{at: time.Now()}}
		}
		for _, b := range batches {
			p.send(b)
		}
	}
}

// send numbers, keeps and sends one batch, as the faults have it.
func (p *publisher) send(b toldBatch) {
	p.mu.Lock()
	delay := time.Duration(p.faults.EventsDelayUS) * time.Microsecond
	p.mu.Unlock()
	if delay > 0 {
		// close waits that long at most.
		time.Sleep(delay)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.snapshots != nil {
		for i := range b.changes {
			p.held.apply(&b.changes[i])
		}
	}
	m := kvevent.Message{Seq: p.next, Payload: p.encode(b.changes, b.at)}
	p.next++
	if len(p.kept) == p.cfg.BufferSteps {
		p.kept = p.kept[1:]
	}
	p.kept = append(p.kept, m)
	if p.faults.dropped(p.rank) {
		return
	}
	p.events.publish(kvevent.AppendMessage(nil, p.cfg.Topic, m))
	if p.faults.EventsTwice {
		p.events.publish(kvevent.AppendMessage(nil, p.cfg.Topic, m))
	}
}

// encode returns the payload of a batch.
func (p *publisher) encode(changes []Change, at time.Time) []byte {
	b := kvevent.Batch{Time: float64(at.UnixMicro()) / 1e6, Rank: p.rank, Publisher: p.id, Events: make([]kvevent.Event, 0, len(changes))}
	for i := range changes {
		c := &changes[i]
		e := kvevent.Event{Kind: c.Kind, Parent: p.number(&c.Parent), HasParent: c.HasParent, Medium: strings.ToLower(c.Medium), AdapterID: -1, Group: -1}
		for k := range c.Names {
			e.Hashes = append(e.Hashes, p.number(&c.Names[k]))
		}
		if c.Kind == kvevent.Stored {
			e.Tokens, e.BlockSize, e.Salt = c.Tokens, p.size, c.Salt
		}
		if !p.sglang && c.Kind != kvevent.Cleared {
			e.Group = 0
			if c.Kind == kvevent.Stored {
				e.Spec, e.Adapter = "full_attention", c.Adapter
				if c.Adapter != "" {
					e.AdapterID = 1
				}
			}
		}
		b.Events = append(b.Events, e)
	}
	hashBytes := 0
	if p.cfg.ByteHashes {
		hashBytes = len(BlockName{})
	}
	return kvevent.AppendBatch(nil, p.form, hashBytes, &b)
}

// number returns a block's name as events have it: vLLM tells the end of its
// digest, SGLang the beginning.
func (p *publisher) number(n *BlockName) uint64 {
	if p.sglang {
		return binary.BigEndian.Uint64(n[:])
	}
	return binary.BigEndian.Uint64(n[len(n)-8:])
}

// answerReplay answers a request to the ROUTER, whose first frame is the empty
// one that a REQ sends.
func (p *publisher) answerReplay(frames [][]byte) [][][]byte {
	_, from, err := kvevent.ParseReplayRequest(append([][]byte{nil}, frames...))
	if err != nil {
		return nil
	}
	withTopic := !p.sglang && !p.cfg.Arrays
	p.mu.Lock()
	defer p.mu.Unlock()
	var replies [][][]byte
	for _, m := range p.kept {
		if m.Seq >= from {
			replies = append(replies, kvevent.AppendReplay(nil, p.cfg.Topic, withTopic, m))
		}
	}
	return append(replies, kvevent.AppendReplayEnd(nil, withTopic))
}

// chunkEvents is how many events one chunk of a snapshot has at most.
const chunkEvents = 256

// answerSnapshot answers a request to the REP, behind an empty frame.
func (p *publisher) answerSnapshot(frames [][]byte) [][][]byte {
	if len(frames) != 2 || !kvevent.IsSnapshotRequest(frames[1:]) {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s := kvevent.Snapshot{Seq: int64(p.next) - 1, Publisher: p.id}
	for part := range slices.Chunk(p.held.changes(), chunkEvents) {
		s.Chunks = append(s.Chunks, p.encode(part, time.Now()))
	}
	return [][][]byte{kvevent.AppendSnapshot([][]byte{{}}, &s)}
}

// setFaults replaces the faults.
func (p *publisher) setFaults(f *faultSet) {
	p.mu.Lock()
	p.faults = f
	if f.ReplayLost {
		p.kept = nil
	}
	var gone *socket
	switch {
	case f.ReplayGone:
		gone, p.replay = p.replay, nil
	case p.replay == nil && p.port != 0:
		// It comes back where it was, if nobody has taken the port.
		host, _, _ := cutLast(p.cfg.ReplayEndpoint, ":")
		p.replay, _ = listenSocket(zmq4.Router, host+":"+strconv.Itoa(p.port), 1, p.answerReplay)
	}
	p.mu.Unlock()
	if gone != nil {
		gone.close()
	}
}

// held is what a publisher has told, by medium and name. The zero value is
// nothing.
type held map[heldKey]*heldBlock

type heldKey struct {
	medium string
	name   BlockName
}

// heldBlock is one block: the change that told it, alone, and how often.
type heldBlock struct {
	Change
	times int
}

func (h held) apply(c *Change) {
	switch c.Kind {
	case kvevent.Cleared:
		for key := range h {
			if key.medium == mediumGPU {
				delete(h, key)
			}
		}
	case kvevent.Removed:
		for _, name := range c.Names {
			key := heldKey{c.Medium, name}
			if b := h[key]; b != nil {
				if b.times--; b.times == 0 {
					delete(h, key)
				}
			}
		}
	case kvevent.Stored:
		block := len(c.Tokens) / len(c.Names)
		for i, name := range c.Names {
			key := heldKey{c.Medium, name}
			b := h[key]
			if b == nil {
				b = &heldBlock{Change: *c}
				b.Names, b.Tokens = c.Names[i:i+1], c.Tokens[i*block:(i+1)*block]
				if i > 0 {
					b.Parent, b.HasParent = c.Names[i-1], true
				}
				h[key] = b
			}
			b.times++
		}
	}
}

// changes returns what tells all of it to one who knows nothing, parents first.
func (h held) changes() []Change {
	var out []Change
	told := map[heldKey]bool{}
	for key := range h {
		var chain []*heldBlock
		for b := h[key]; b != nil && !told[key]; b = h[key] {
			chain = append(chain, b)
			told[key] = true
			if !b.HasParent {
				break
			}
			key.name = b.Parent
		}
		for _, b := range slices.Backward(chain) {
			for range b.times {
				out = append(out, b.Change)
			}
		}
	}
	return out
}

// withPort returns an endpoint with the port that a socket listens on.
func withPort(endpoint string, port int) string {
	base, _, _ := cutLast(endpoint, ":")
	return base + ":" + strconv.Itoa(port)
}

// source is what /kv_event_sources tells of one publisher. The order of its
// members is vLLM's.
type source struct {
	Enabled   bool    `json:"enable_kv_cache_events"`
	Publisher string  `json:"publisher"`
	Endpoint  string  `json:"endpoint"`
	Replay    *string `json:"replay_endpoint"`
	Steps     int     `json:"buffer_steps"`
	HWM       int     `json:"hwm"`
	Queue     int     `json:"max_queue_size"`
	Topic     string  `json:"topic"`
	Snapshot  *string `json:"snapshot_endpoint,omitzero"`
}

func (p *publisher) source() source {
	s := source{Enabled: true, Publisher: "zmq", Endpoint: withPort(p.cfg.Endpoint, p.events.port()), Steps: p.cfg.BufferSteps,
		HWM: p.cfg.HWM, Queue: 100000, Topic: p.cfg.Topic}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.port != 0 {
		e := withPort(p.cfg.ReplayEndpoint, p.port)
		s.Replay = &e
	}
	if p.snapshots != nil {
		e := withPort(p.cfg.SnapshotEndpoint, p.snapshots.port())
		s.Snapshot = &e
	}
	return s
}

// eventSources serves GET /kv_event_sources.
func (s *Server) eventSources(w http.ResponseWriter, _ *http.Request) {
	sources := map[string]source{}
	for _, r := range s.current().ranks {
		if r.publisher != nil {
			sources[strconv.Itoa(r.number)] = r.publisher.source()
		}
	}
	writeJSON(w, http.StatusOK, appendJSON(nil, sources))
}
