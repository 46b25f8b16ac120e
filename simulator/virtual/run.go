package virtual

import (
	"container/heap"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

const (
	// reports is the time between two of an engine's reports of its load, and
	// reportsAge how long one is used: as an agent is configured by default.
	reports    = 100 * time.Millisecond
	reportsAge = 250 * time.Millisecond
	// expires is how often the index is told to expire.
	expires = time.Second
)

// Options are what a run has beside its workload and its fleet. The zero value is a
// run of seed 0 that nobody watches.
type Options struct {
	Seed uint64
	// Served, if not nil, counts the requests that are over, for who waits.
	Served *atomic.Int64
	// Warm leaves the requests that come before out of the Gaps, and what is computed
	// before out of Ahead.
	Warm time.Duration
	// stored is how many tokens of each prompt every engine finds, which then have no caches
	// of their own; nil where they have.
	stored []int
}

// Outcome is what came of a run. It is the caller's.
type Outcome struct {
	// Records are those of the requests, in their order.
	Records []workload.Record
	// Counts are what each engine has counted.
	Counts []simulator.Counts
	// Gaps are the times between the tokens of all answers.
	Gaps *simulator.Gaps
	// Ahead is how many tokens each engine has computed ahead of any request.
	Ahead []int
}

// Serve lets f serve w under a policy, and returns when all requests are over. The same
// arguments give the same outcome, whatever else the machine does. It ends early, with
// an error, when ctx does. Several may run at a time.
func (f *Fleet) Serve(ctx context.Context, w *workload.Workload, p policy.Policy, o Options) (*Outcome, error) {
	r, err := newRun(f, w, p, o)
	if err != nil {
		return nil, err
	}
	if err := r.serve(ctx); err != nil {
		return nil, err
	}
	return r.outcome(), nil
}

// run is one run: a loop over what happens, in the order of time. What happens at one
// time goes by kind, so that a run is the same each time: engines first, then what is
// under way, then reports, then who comes. It is used on one goroutine.
type run struct {
	fleet    *Fleet
	workload *workload.Workload
	served   *atomic.Int64
	warm     time.Duration
	gaps     simulator.Gaps
	records  []workload.Record
	stored   []int // as Options.stored
	ahead    []int // as Outcome.Ahead
	agents   []*agent

	now     time.Duration
	engines []*simulator.Engine
	configs []simulator.Config // of the engines
	// due are the engines that have something to do, the next first, and asked those
	// with requests, or with some at the last report, or of which an agent thinks so.
	due   dueEngines
	asked []bool
	// sizes are the sizes of blocks, and sizeOf which of them each engine has; keys
	// are the hashes of their names.
	sizes  []int
	sizeOf []int
	keys   []uint64

	visits  map[*simulator.Sequence]*visit
	changed []*simulator.Sequence
	notes   notes
	serial  uint64
	left    int // requests that are not over
	next    int // of them that comes next
}

// visit is a request on its way. It lives until it is over.
type visit struct {
	seq     simulator.Sequence
	request *workload.Request
	record  *workload.Record
	agent   *agent
	asked   policy.Request
	turned  bool // asked has its turn
	sending policy.Sending
	claim   index.Claim
	ticket  policy.Ticket[*visit]

	// While it is held it has a place among those that are, prompts are its chains by
	// size of blocks, and prefill is how many seconds it takes where it takes least.
	heldAs  policy.Ticket[*visit]
	prompts []index.Prompt
	prefill float64
	holds   int // how often it was

	course

	came, taken time.Time
	choice      int
	expected    float64
	engine      int
	first       bool // its first token is told of
	// stored is how much of its prompt every engine finds, where they have no caches.
	stored int
	// ahead is the prefix of which this one is a piece that is computed ahead; nil for
	// all others.
	ahead *policy.Prefix
}

// note is something that is under way and happens at its time.
type note struct {
	at     time.Duration
	serial uint64
	kind   noteKind
	visit  *visit
	agent  *agent
	engine int
	events []kvevent.Event
	by     float64
}

type noteKind uint8

const (
	noteArrival  noteKind = iota // visit comes to its engine
	noteFirst                    // its agent has its first token
	noteEnd                      // and the end of its answer
	noteEvents                   // all agents have events of engine
	notePatience                 // visit has waited for long enough
	noteTick                     // agent lets who waits try again
	noteHeld                     // visit was held for as long as it may be
	noteRelease                  // agent sends who is held and can go
	noteParked                   // agent looks at who is parked
	noteThrottle                 // engine takes so many times as long
)

func newRun(f *Fleet, w *workload.Workload, p policy.Policy, o Options) (*run, error) {
	r := &run{
		fleet: f, workload: w, served: o.Served, warm: o.Warm, stored: o.stored,
		records: make([]workload.Record, len(w.Requests)), visits: map[*simulator.Sequence]*visit{}, left: len(w.Requests),
	}
	var err error
	if r.configs, err = f.configs(); err != nil {
		return nil, err
	}
	for i := range r.configs {
		e, err := r.configs[i].NewEngine()
		if err != nil {
			return nil, fmt.Errorf("replica %d: %w", i, err)
		}
		e.Measure(&r.gaps)
		if r.stored != nil {
			e.DropCache()
		}
		r.engines = append(r.engines, e)
	}
	r.asked, r.ahead = make([]bool, len(r.engines)), make([]int, len(r.engines))
	r.due.init(len(r.engines))
	for i := range r.configs {
		size := r.configs[i].BlockSize
		if !slices.Contains(r.sizes, size) {
			r.sizes = append(r.sizes, size)
		}
		r.sizeOf = append(r.sizeOf, slices.Index(r.sizes, size))
		r.keys = append(r.keys, mix(uint64(i)))
	}
	for i := range f.agents() {
		a, err := newAgent(r, i, p, o.Seed)
		if err != nil {
			return nil, err
		}
		r.agents = append(r.agents, a)
	}
	throttles := slices.Concat(f.Throttles, w.Throttles)
	for _, t := range throttles {
		for _, at := range []time.Duration{t.At, t.Until} {
			if t.Engine >= 0 && t.Engine < len(r.engines) {
				r.after(at, note{kind: noteThrottle, engine: t.Engine, by: workload.FactorAt(throttles, t.Engine, at)})
			}
		}
	}
	for i := range r.engines {
		r.settle(i)
	}
	return r, nil
}

// outcome is what came of it.
func (r *run) outcome() *Outcome {
	out := &Outcome{Records: r.records, Counts: make([]simulator.Counts, len(r.engines)), Gaps: &r.gaps, Ahead: r.ahead}
	for i, e := range r.engines {
		out.Counts[i] = e.Counts()
	}
	return out
}

// start is when a run begins as the agent's code has it.
var start = time.Unix(1_700_000_000, 0)

// clock is now as the agent's code has it.
func (r *run) clock() time.Time { return start.Add(r.now) }

// after lets n happen in a while.
func (r *run) after(d time.Duration, n note) {
	r.serial++
	n.at, n.serial = r.now+d, r.serial
	heap.Push(&r.notes, n)
}

// never is later than any time.
const never = time.Duration(1<<63 - 1)

func (r *run) serve(ctx context.Context) error {
	report, expire := reports, expires
	for turn := 0; r.left > 0; turn++ {
		if turn%4096 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		comes := never
		if r.next < len(r.workload.Requests) {
			comes = r.workload.Requests[r.next].At
		}
		engine, at := r.due.first()
		noted := never
		if len(r.notes) > 0 {
			noted = r.notes[0].at
		}
		next := min(at, noted, comes)
		if next == never {
			return fmt.Errorf("BUG: at %v %d requests are not over, and nothing happens any more", r.now, r.left)
		}
		switch next = min(next, report, expire); {
		case at == next:
			r.now = at
			r.engines[engine].Advance(at)
			r.settle(engine)
		case noted == next:
			r.now = noted
			n := heap.Pop(&r.notes).(note)
			r.happen(&n)
		case report == next:
			r.now = report
			r.report()
			report += reports
			if min(at, noted, comes) > report+time.Minute && !slices.Contains(r.asked, true) {
				// Nothing is told while nothing happens.
				report = min(at, noted, comes) / reports * reports
			}
		case expire == next:
			r.now = expire
			for _, a := range r.agents {
				a.expire(r.clock())
			}
			expire += expires
		default:
			r.now = comes
			r.come()
		}
	}
	return nil
}

// come lets the next request come to its agent.
func (r *run) come() {
	k := r.next
	r.next++
	q := &r.workload.Requests[k]
	v := &visit{request: q, record: &r.records[k], came: r.clock(), engine: -1}
	*v.record = workload.Record{Index: k, Scheduled: q.At, Sent: q.At, Replica: -1}
	v.seq.Prompt = q.AppendPrompt(make([]uint32, 0, q.Input()))
	v.seq.Output, v.seq.Timed = max(q.Output, 1), q.At >= r.warm
	v.seq.Said = q.AppendAnswer(make([]uint32, 0, v.seq.Output), k)
	v.record.Input = len(v.seq.Prompt)
	if r.stored != nil {
		v.stored = r.stored[k]
	}
	if v.record.Input == 0 {
		v.record.Failure = "its prompt is empty"
		r.over(v)
		return
	}
	r.agents[k%len(r.agents)].ask(v)
}

// over counts a request that is over, however.
func (r *run) over(v *visit) {
	r.left--
	if r.served != nil {
		r.served.Add(1)
	}
}

// happen does what has been under way.
func (r *run) happen(n *note) {
	switch n.kind {
	case noteArrival:
		r.arrive(n.visit)
	case noteFirst:
		n.visit.agent.first(n.visit)
	case noteEnd:
		v := n.visit
		v.agent.end(v)
		if v.of == nil && v.ahead == nil {
			r.over(v)
		}
	case noteEvents:
		for _, a := range r.agents {
			a.index.Apply(n.engine, n.events, r.clock())
		}
	case notePatience:
		n.visit.agent.leave(n.visit)
	case noteTick:
		if n.agent.room.Len() > 0 {
			n.agent.news()
			n.agent.tick()
		}
	case noteHeld:
		if n.visit.heldAs.Queued() && n.visit.holds == n.engine {
			n.visit.agent.let(n.visit)
		}
	case noteRelease:
		n.agent.release()
	case noteParked:
		n.agent.unpark()
	case noteThrottle:
		r.engines[n.engine].Slow(n.by, r.now)
		r.settle(n.engine)
	}
}

// arrive enters a request into its engine.
func (r *run) arrive(v *visit) {
	e := r.engines[v.engine]
	if !e.Fits(len(v.seq.Prompt) + v.seq.Output) {
		v.agent.lose(v)
		if v.ahead != nil {
			v.agent.unwarmed(v)
			return
		}
		if v.of != nil {
			v = v.of
			v.rest.End()
		}
		v.record.Failure = "longer than an engine has room for"
		r.over(v)
		return
	}
	if r.stored != nil {
		v.seq.Cached = v.stored
	}
	r.visits[&v.seq] = v
	r.asked[v.engine] = true
	e.Arrive(&v.seq, r.now)
	r.settle(v.engine)
}

// tells reports that an engine tells of its cache.
func (r *run) tells(i int) bool { return r.configs[i].KVEvents.Endpoint != "" }

// settle looks at what an engine has done: who has a first token or has ended, what it
// tells of its cache, and when it goes on.
func (r *run) settle(i int) {
	e := r.engines[i]
	r.changed = e.Changed(r.changed[:0])
	for _, s := range r.changed {
		v := r.visits[s]
		if v == nil {
			continue // it has ended, and is told of again
		}
		state := s.State()
		if !v.first && (state == simulator.Decoding || state == simulator.Ended) {
			v.first = true
			v.record.Cached = s.Cached
			v.record.Computed += s.First - s.Start
			r.after(r.fleet.Lag, note{kind: noteFirst, visit: v})
		}
		if state == simulator.Ended {
			delete(r.visits, s)
			r.after(r.fleet.Lag, note{kind: noteEnd, visit: v})
		}
	}
	if r.tells(i) {
		if told := e.Told(); len(told) > 0 {
			r.after(r.fleet.EventLag, note{kind: noteEvents, engine: i, events: eventsOf(told, r.configs[i].BlockSize)})
		}
	}
	next, ok := e.Next()
	if !ok {
		next = never
	}
	r.due.set(i, next)
}

// report lets the engines that have something to do tell of it, and those that had
// until now. Speeds are shared then, as often as an agent does.
func (r *run) report() {
	now := r.clock()
	for i, asked := range r.asked {
		if !asked {
			continue
		}
		e := r.engines[i]
		for _, a := range r.agents {
			a.report(i, e, now)
		}
		l := e.Load(r.now)
		r.asked[i] = l.Running+l.Waiting > 0
		for _, a := range r.agents {
			// What others had there fades from report to report, and must not stay.
			others, _ := a.slots[i].standing.Load().Foreign()
			r.asked[i] = r.asked[i] || others > 0
		}
		r.settle(i)
	}
	for _, a := range r.agents {
		policy.ShareSpeeds(a.peers, now)
		a.prewarm()
	}
}

// eventsOf are the changes of an engine's cache as an agent has decoded them.
func eventsOf(changes []simulator.Change, block int) []kvevent.Event {
	name := func(n *simulator.BlockName) uint64 { return binary.BigEndian.Uint64(n[24:]) }
	events := make([]kvevent.Event, 0, len(changes))
	for i := range changes {
		c := &changes[i]
		e := kvevent.Event{Kind: c.Kind, Parent: name(&c.Parent), HasParent: c.HasParent, AdapterID: -1, Group: -1}
		if c.Medium != "GPU" {
			e.Medium = strings.ToLower(c.Medium)
		}
		e.Hashes = make([]uint64, len(c.Names))
		for k := range c.Names {
			e.Hashes[k] = name(&c.Names[k])
		}
		if c.Kind == kvevent.Stored {
			e.Tokens, e.BlockSize = c.Tokens, block
		}
		events = append(events, e)
	}
	return events
}

// notes is a heap by time, and of those at one time by when they were made.
type notes []note

func (h notes) Len() int { return len(h) }
func (h notes) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].serial < h[j].serial
}
func (h notes) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *notes) Push(x any)   { *h = append(*h, x.(note)) }
func (h *notes) Pop() any {
	old := *h
	n := old[len(old)-1]
	old[len(old)-1] = note{}
	*h = old[:len(old)-1]
	return n
}

// dueEngines is a heap of engines by when they have something to do.
type dueEngines struct {
	at    []time.Duration // by engine; never
	heap  []int32
	place []int32 // in heap, by engine; -1 is none
}

func (d *dueEngines) init(n int) {
	d.at, d.place = make([]time.Duration, n), make([]int32, n)
	for i := range n {
		d.at[i], d.place[i] = never, -1
	}
}

// first is who is due first, and when; never when nobody is.
func (d *dueEngines) first() (engine int, at time.Duration) {
	if len(d.heap) == 0 {
		return -1, never
	}
	return int(d.heap[0]), d.at[d.heap[0]]
}

// set says when an engine is due.
func (d *dueEngines) set(engine int, at time.Duration) {
	if d.at[engine] == at {
		return
	}
	d.at[engine] = at
	switch place := int(d.place[engine]); {
	case place < 0:
		heap.Push(d, int32(engine))
	case at == never:
		heap.Remove(d, place)
	default:
		heap.Fix(d, place)
	}
}

func (d *dueEngines) Len() int { return len(d.heap) }
func (d *dueEngines) Less(i, j int) bool {
	a, b := d.heap[i], d.heap[j]
	return d.at[a] < d.at[b] || d.at[a] == d.at[b] && a < b
}
func (d *dueEngines) Swap(i, j int) {
	d.heap[i], d.heap[j] = d.heap[j], d.heap[i]
	d.place[d.heap[i]], d.place[d.heap[j]] = int32(i), int32(j)
}
func (d *dueEngines) Push(x any) {
	engine := x.(int32)
	d.place[engine] = int32(len(d.heap))
	d.heap = append(d.heap, engine)
}
func (d *dueEngines) Pop() any {
	last := len(d.heap) - 1
	engine := d.heap[last]
	d.heap = d.heap[:last]
	d.place[engine] = -1
	return engine
}

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
