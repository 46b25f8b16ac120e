package index

import (
	"encoding/json"
	"fmt"
	"io"
	"math/bits"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"
)

// TestIndexTiming measures looking up and changing: of the table beside plainer
// ways to keep the same, and of the whole index with both of its sources. It is
// run by make bench-index, which names the results' file in
// INFERRAIL_BENCH_INDEX.
//
// A prompt has 512 blocks. Each look-up is timed by itself, with the clock's own
// time in it, so percentiles are of single look-ups. With writers, 12 goroutines
// make changes without a pause all the while: each lets conversations that
// nobody asks for come and go and, in tables, the ends of prompts that are asked
// for go and come again. They share the machine's cores with the look-ups. A
// look-up from which the kernel took its core, for a writer or for another
// process, says nothing of the index and is left out; one that waits for a lock
// is not.
//
// What changes take is the time that a core has worked for them, so that other
// load of the machine is not in it; nor is the garbage collector.
func TestIndexTiming(t *testing.T) {
	results := os.Getenv("INFERRAIL_BENCH_INDEX")
	if results == "" {
		t.Skip("a benchmark; make bench-index runs it")
	}
	b := indexTiming{only: os.Getenv("INFERRAIL_BENCH_INDEX_ONLY")}
	b.Date, b.Machine = time.Now().UTC().Format(time.RFC3339), timedMachine()
	b.clock()
	b.measureTables()
	b.measureIndexes()
	b.print(os.Stdout)
	if b.only != "" {
		return
	}
	out, err := json.MarshalIndent(&b.indexReport, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(results, append(out, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

const (
	timedBlocks  = 512
	timedSystem  = 64 // blocks of the system prompt that conversations share
	timedWriters = 12
	timedPairs   = 1_000_000 // of block and slot, where a table is large
)

// indexReport is bench/results/index.json.
type indexReport struct {
	Date    string            `json:"date"`
	Machine map[string]string `json:"machine"`
	ClockNs float64           `json:"clock_ns"` // is in each look-up's time
	Looks   []lookRow         `json:"look_ups"`
	Changes []changeRow       `json:"changes"`
}

// lookRow is the times of many look-ups of one kind.
type lookRow struct {
	Contestant string  `json:"contestant"`
	Slots      int     `json:"slots"`
	Shape      string  `json:"shape"`
	Writers    int     `json:"writers"`
	Median     float64 `json:"p50_ns"`
	P99        float64 `json:"p99_ns"`
	P999       float64 `json:"p999_ns"`
	// Lost is the share of look-ups that are left out: the kernel had taken
	// the core from their thread.
	Lost float64 `json:"lost"`
}

// changeRow is what a change takes, on one core, and what is held after many.
type changeRow struct {
	Contestant string  `json:"contestant"`
	What       string  `json:"what"`
	Ns         float64 `json:"ns"`
	PairBytes  float64 `json:"bytes_per_pair"`
}

// timedTable is what is compared.
type timedTable interface {
	enter(h Hash, l lane)
	leave(h Hash, l lane)
	match(depth []int32, chain []Hash)
	bytes() int64
}

var timedTables = []struct {
	name string
	make func() timedTable
}{
	{"table", func() timedTable { return newTable() }},
	{"map, jumps", func() timedTable { return newLockedTable(true) }},
	{"map, walk", func() timedTable { return newLockedTable(false) }},
}

// lockedTable is a map in shards with a lock each, of bitmaps of lanes, up to 4,096
// of these. With jumps, match goes on by 32 blocks while the number of lanes stays, as Dynamo
// does, and block by block where it does not.
type lockedTable struct {
	jumps  bool
	shards [64]struct {
		sync.RWMutex
		lanes map[Hash][]uint64
	}
}

func newLockedTable(jumps bool) *lockedTable {
	t := &lockedTable{jumps: jumps}
	for i := range t.shards {
		t.shards[i].lanes = map[Hash][]uint64{}
	}
	return t
}

func (t *lockedTable) enter(h Hash, l lane) {
	s := &t.shards[h.Lo%64]
	s.Lock()
	defer s.Unlock()
	set := s.lanes[h]
	if n := int(l/64) + 1; n > len(set) {
		set = append(set, make([]uint64, n-len(set))...)
		s.lanes[h] = set
	}
	set[l/64] |= 1 << (l % 64)
}

func (t *lockedTable) leave(h Hash, l lane) {
	s := &t.shards[h.Lo%64]
	s.Lock()
	defer s.Unlock()
	set := s.lanes[h]
	set[l/64] &^= 1 << (l % 64)
	for _, word := range set {
		if word != 0 {
			return
		}
	}
	delete(s.lanes, h)
}

func (t *lockedTable) match(depth []int32, chain []Hash) {
	var sets [2][64]uint64
	words := (len(depth) + 63) / 64
	now, next := sets[0][:words], sets[1][:words]
	read := func(i int) (n int) {
		h := chain[i]
		s := &t.shards[h.Lo%64]
		s.RLock()
		defer s.RUnlock()
		clear(next[copy(next, s.lanes[h]):])
		for _, word := range next {
			n += bits.OnesCount64(word)
		}
		return n
	}
	end := func(i int) {
		for w := range now {
			for gone := now[w] &^ next[w]; gone != 0; gone &= gone - 1 {
				if l := 64*w + bits.TrailingZeros64(gone); l < len(depth) {
					depth[l] = int32(i)
				}
			}
		}
		copy(now, next)
	}
	n := read(0)
	copy(now, next)
	i := 0
	for n > 0 {
		if far := i + 32; t.jumps && far < len(chain) && read(far) == n {
			i = far
			continue
		}
		for stop := min(i+32, len(chain)); i < stop; i++ {
			if m := 0; i+1 < len(chain) {
				if m = read(i + 1); m != n {
					end(i + 1)
					n = m
				}
			} else {
				clear(next)
				end(i + 1)
				return
			}
			if n == 0 {
				return
			}
		}
	}
}

func (t *lockedTable) bytes() int64 { return 0 }

// indexTiming is one run of the benchmark.
type indexTiming struct {
	indexReport
	only string // a contestant, for a quick look
}

func timedChain(r *rand.Rand, n int) []Hash {
	chain := make([]Hash, n)
	for i := range chain {
		chain[i] = Hash{r.Uint64(), r.Uint64()}
	}
	return chain
}

// timedShapes fill a table, and return the prompts to ask for.
var timedShapes = []struct {
	name string
	fill func(r *rand.Rand, t timedTable, slots int) [][]Hash
}{
	{"all hold all", func(r *rand.Rand, t timedTable, slots int) [][]Hash {
		return timedDepths(t, slots, timedChain(r, timedBlocks), func() int { return timedBlocks })
	}},
	{"each to a random depth", func(r *rand.Rand, t timedTable, slots int) [][]Hash {
		return timedDepths(t, slots, timedChain(r, timedBlocks), func() int { return r.IntN(timedBlocks + 1) })
	}},
	{"conversations, few", func(r *rand.Rand, t timedTable, slots int) [][]Hash {
		return timedConversations(r, t, slots, 20*timedBlocks)
	}},
	{"conversations, 1M pairs", func(r *rand.Rand, t timedTable, slots int) [][]Hash {
		return timedConversations(r, t, slots, timedPairs)
	}},
	{"nothing known, 1M pairs", func(r *rand.Rand, t timedTable, slots int) (prompts [][]Hash) {
		timedConversations(r, t, slots, timedPairs)
		for range 2000 {
			prompts = append(prompts, timedChain(r, timedBlocks))
		}
		return prompts
	}},
}

func timedDepths(t timedTable, slots int, chain []Hash, depth func() int) [][]Hash {
	for l := range slots {
		for _, h := range chain[:depth()] {
			t.enter(h, lane(l))
		}
	}
	return [][]Hash{chain}
}

// timedConversations is prompts that begin with a system prompt that all slots
// hold. One to three slots hold more of each.
func timedConversations(r *rand.Rand, t timedTable, slots, pairs int) (prompts [][]Hash) {
	system := timedChain(r, timedSystem)
	timedDepths(t, slots, system, func() int { return timedSystem })
	for pairs > 0 {
		chain := append(system[:timedSystem:timedSystem], timedChain(r, timedBlocks-timedSystem)...)
		for range 1 + r.IntN(3) {
			held := chain[timedSystem : timedSystem+1+r.IntN(timedBlocks-timedSystem)]
			l := lane(r.IntN(slots))
			for _, h := range held {
				t.enter(h, l)
			}
			pairs -= len(held)
		}
		prompts = append(prompts, chain)
	}
	return prompts
}

func (b *indexTiming) measureTables() {
	for _, c := range timedTables {
		if b.only != "" && b.only != c.name {
			continue
		}
		for _, slots := range []int{64, 1000} {
			for _, shape := range timedShapes {
				r := rand.New(rand.NewPCG(1, uint64(slots)))
				t := c.make()
				prompts := shape.fill(r, t, slots)
				for _, writers := range []int{0, timedWriters} {
					b.lookTable(lookRow{Contestant: c.name, Slots: slots, Shape: shape.name, Writers: writers}, t, prompts)
				}
			}
		}
		b.changeTable(c.name, c.make())
	}
}

func (b *indexTiming) clock() {
	var took []int64
	for range 10000 {
		began := time.Now()
		took = append(took, int64(time.Since(began)))
	}
	slices.Sort(took)
	b.ClockNs = float64(took[len(took)/2])
}

// lookTable times look-ups in a table.
func (b *indexTiming) lookTable(row lookRow, t timedTable, prompts [][]Hash) {
	depth := make([]int32, row.Slots)
	b.look(row, len(prompts), func(i int) {
		clear(depth)
		t.match(depth, prompts[i])
	}, func(w int, done *atomic.Bool) {
		timedWrite(rand.New(rand.NewPCG(3, uint64(w))), t, lane(w), prompts[w%len(prompts)], done)
	})
}

// look times look-ups of n prompts for a second, and 20,000 of them at least.
func (b *indexTiming) look(row lookRow, n int, look func(i int), write func(w int, done *atomic.Bool)) {
	runtime.GC()
	r := rand.New(rand.NewPCG(2, 2))
	var done atomic.Bool
	var writers sync.WaitGroup
	for w := range row.Writers {
		writers.Go(func() { write(w, &done) })
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	took := make([]float64, 0, 1<<20)
	lost, all := 0, 0
	switches := threadUse().Nivcsw
	for began := time.Now(); len(took) < 20000 || time.Since(began) < time.Second; {
		i := r.IntN(n)
		start := time.Now()
		look(i)
		ns := float64(time.Since(start))
		all++
		if now := threadUse().Nivcsw; now != switches {
			switches = now
			lost++
			continue
		}
		took = append(took, ns)
	}
	row.Lost = float64(lost) / float64(all)
	done.Store(true)
	writers.Wait()
	slices.Sort(took)
	at := func(p float64) float64 { return took[int(p*float64(len(took)-1))] }
	row.Median, row.P99, row.P999 = at(0.5), at(0.99), at(0.999)
	b.Looks = append(b.Looks, row)
}

// timedWrite changes a table until it is done, and leaves as it was what others
// ask for.
func timedWrite(r *rand.Rand, t timedTable, l lane, prompt []Hash, done *atomic.Bool) {
	depth := make([]int32, l+1)
	t.match(depth, prompt)
	var held [][]Hash
	for !done.Load() {
		chain := timedChain(r, timedBlocks)
		for _, h := range chain {
			t.enter(h, l)
		}
		end := prompt[max(0, depth[l]-8):depth[l]]
		for i := range end {
			t.leave(end[len(end)-1-i], l)
		}
		for _, h := range end {
			t.enter(h, l)
		}
		if held = append(held, chain); len(held) > 8 {
			for i := range held[0] {
				t.leave(held[0][len(held[0])-1-i], l)
			}
			held = held[1:]
		}
	}
	for _, chain := range held {
		for i := range chain {
			t.leave(chain[len(chain)-1-i], l)
		}
	}
}

// threadUse is what the thread has used.
func threadUse() (use syscall.Rusage) {
	const thread = 1
	if err := syscall.Getrusage(thread, &use); err != nil {
		panic(err)
	}
	return use
}

// threadTime is what the thread has had of a core.
func threadTime() time.Duration {
	use := threadUse()
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// change times n changes, and notes the bytes of what is held then. Where they
// are not counted, they are what the heap has grown.
func (b *indexTiming) change(contestant, what string, n int, f func(), size func() (bytes int64, pairs int)) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := threadTime()
	f()
	row := changeRow{Contestant: contestant, What: what, Ns: float64(threadTime()-began) / float64(n)}
	bytes, pairs := size()
	if bytes == 0 {
		runtime.GC()
		runtime.ReadMemStats(&after)
		bytes = max(0, int64(after.HeapAlloc)-int64(before.HeapAlloc))
	}
	if pairs > 0 {
		row.PairBytes = float64(bytes) / float64(pairs)
	}
	b.Changes = append(b.Changes, row)
}

// changeTable times changes in a table of a million pairs: what it takes to get
// there, and blocks that come and go.
func (b *indexTiming) changeTable(name string, t timedTable) {
	r := rand.New(rand.NewPCG(4, 4))
	chain, other := timedChain(r, timedPairs), timedChain(r, timedPairs)
	row := func(what string, n, pairs int, f func()) {
		b.change(name, what, n, f, func() (int64, int) { return t.bytes(), pairs })
	}
	row("1M blocks enter an empty table", timedPairs, timedPairs, func() {
		for _, h := range chain {
			t.enter(h, 1)
		}
	})
	row("and at another slot", timedPairs, 2*timedPairs, func() {
		for _, h := range chain {
			t.enter(h, 2)
		}
	})
	row("and leave there", timedPairs, timedPairs, func() {
		for _, h := range chain {
			t.leave(h, 2)
		}
	})
	row("one leaves for another that enters", 2*timedPairs, timedPairs, func() {
		for i, h := range chain {
			t.leave(h, 1)
			t.enter(other[i], 1)
		}
	})
}

func (b *indexTiming) print(w io.Writer) {
	fmt.Fprintf(w, "\n%v\n\nlooking up %d blocks, us; the clock takes %.0f ns of it\n\n", b.Machine, timedBlocks, b.ClockNs)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "contestant\tslots\tshape\twriters\tp50\tp99\tp99.9")
	for _, r := range b.Looks {
		fmt.Fprintf(table, "%s\t%d\t%s\t%d\t%.2f\t%.2f\t%.2f\n", r.Contestant, r.Slots, r.Shape, r.Writers, r.Median/1e3, r.P99/1e3, r.P999/1e3)
	}
	fmt.Fprintln(table, "\ncontestant\tchange\tns\tbytes a pair")
	for _, r := range b.Changes {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", r.Contestant, r.What, orDash(r.Ns), orDash(r.PairBytes))
	}
	table.Flush()
}

func orDash(value float64) string {
	if value == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", value)
}

// timedMachine is where the figures were measured.
func timedMachine() map[string]string {
	m := map[string]string{"arch": runtime.GOARCH, "cpus": fmt.Sprint(runtime.NumCPU()), "go": runtime.Version()}
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if found := regexp.MustCompile(`model name\s*: (.*)`).FindSubmatch(info); found != nil {
			m["cpu"] = string(found[1])
		}
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		m["load before"] = strings.Fields(string(load))[0]
	}
	if commit, err := exec.Command("git", "rev-parse", "HEAD").Output(); err == nil {
		m["commit"] = strings.TrimSpace(string(commit))
	}
	return m
}
