package prompt

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// heldPool is a Pool whose prompts are not followed before they are let.
type heldPool struct {
	*Pool
	begun chan struct{} // one for each prompt that is begun
	let   chan struct{} // one for each that may go on
}

// holdUp makes p's prompts wait. Each has one id, the length of its body.
func holdUp(t *testing.T, p *Pool) *heldPool {
	t.Helper()
	h := &heldPool{p, make(chan struct{}, 1000), make(chan struct{}, 1000)}
	p.follow = func(m *Model, prompt *Prompt, kind Kind, body []byte, now time.Time) {
		prompt.reset()
		h.begun <- struct{}{}
		<-h.let
		prompt.IDs = append(prompt.IDs, uint32(len(body)))
	}
	p.brief = p.follow
	return h
}

// large returns a body that is not followed on the caller's goroutine.
func large(n int) []byte { return []byte(strings.Repeat(" ", inlineBytes+n)) }

func TestPoolSmallNeedsNoWorker(t *testing.T) {
	p := holdUp(t, NewPool(1, time.Minute))
	defer p.Close()
	var callers sync.WaitGroup
	for n := range 10 {
		callers.Go(func() {
			prompt, late := p.Read(new(Model), Chat, make([]byte, n), time.Time{})
			if late || !slices.Equal(prompt.IDs, []uint32{uint32(n)}) {
				t.Errorf("got %+v, %v", prompt, late)
			}
			p.Put(prompt)
		})
	}
	// All ten at the same time, with one worker.
	for range 10 {
		<-p.begun
	}
	if s := p.Stats(); s != (PoolStats{Workers: 1}) {
		t.Errorf("%+v", s)
	}
	for range 10 {
		p.let <- struct{}{}
	}
	callers.Wait()
}

// TestPoolApproximateNeedsNoWorker: nothing is rendered for it.
func TestPoolApproximateNeedsNoWorker(t *testing.T) {
	p := NewPool(1, 0)
	defer p.Close()
	for range 100 {
		if prompt, late := p.Read(nil, Chat, large(1), time.Time{}); prompt.Reason == Late || prompt.Reason == Exact || late {
			t.Fatalf("without a model: %v, late %v", prompt.Reason, late)
		}
		if prompt, late := p.Read(new(Model), Other, large(1), time.Time{}); prompt.Reason == Late || prompt.Reason == Exact || late {
			t.Fatalf("of another route: %v, late %v", prompt.Reason, late)
		}
	}
}

// TestPoolSlowTemplate: a small body for which the template takes long is the
// workers'.
func TestPoolSlowTemplate(t *testing.T) {
	source := filepath.Join(t.TempDir(), "template")
	const square = "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}"
	if err := os.WriteFile(source, []byte(square), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := Load(Source{Tokenizer: "builtin:sim", Template: source})
	if err != nil {
		t.Fatal(err)
	}
	p := NewPool(1, time.Minute)
	defer p.Close()
	var worked atomic.Int64
	p.follow = func(m *Model, prompt *Prompt, kind Kind, body []byte, now time.Time) {
		worked.Add(1)
		m.Follow(prompt, kind, body, now)
	}
	for n, byWorker := range map[int]int64{10: 0, 300: 1} {
		worked.Store(0)
		body := `{"messages":[` + strings.Repeat(`{"role":"user","content":"x"},`, n-1) + `{"role":"user","content":"x"}]}`
		if len(body) > inlineBytes {
			t.Fatal("the body is not small")
		}
		prompt, late := p.Read(m, Chat, []byte(body), time.Time{})
		if late || prompt.Reason != Exact || len(prompt.IDs) != (n*n+5)/6 || worked.Load() != byWorker {
			t.Errorf("%d messages: %v, %d ids, %d by a worker", n, prompt.Reason, len(prompt.IDs), worked.Load())
		}
		p.Put(prompt)
	}
}

func TestPoolLargeByWorkers(t *testing.T) {
	p := holdUp(t, NewPool(2, time.Minute))
	defer p.Close()
	var callers sync.WaitGroup
	for n := range 5 {
		callers.Go(func() {
			prompt, late := p.Read(new(Model), Chat, large(1+n), time.Time{})
			if late || prompt.Reason != Exact || !slices.Equal(prompt.IDs, []uint32{uint32(inlineBytes + 1 + n)}) {
				t.Errorf("got %+v, %v", prompt, late)
			}
			p.Put(prompt)
		})
	}
	<-p.begun
	<-p.begun
	for p.Stats().Queued < 3 {
		runtime.Gosched()
	}
	if s := p.Stats(); s != (PoolStats{Workers: 2, Busy: 2, Queued: 3}) {
		t.Errorf("%+v", s)
	}
	for range 5 {
		p.let <- struct{}{}
	}
	callers.Wait()
}

// TestPoolLate: whoever waits too long has an approximate prompt; the worker
// that has begun goes on, on a Prompt of its own, and what had not begun is
// left out.
func TestPoolLate(t *testing.T) {
	p := holdUp(t, NewPool(1, 10*time.Millisecond))
	var first *Prompt
	for late := false; !late; {
		// On a busy machine the worker may not have come to it in time.
		first, late = p.Read(new(Model), Chat, large(1), time.Time{})
		if first.Reason != Late || len(first.IDs) > 0 {
			t.Fatalf("got %+v", first)
		}
	}
	<-p.begun
	second, late := p.Read(new(Model), Chat, large(2), time.Time{})
	if second.Reason != Late || late {
		t.Errorf("behind another: got %+v, late %v", second, late)
	}
	if j := <-p.jobs; j.body != nil || j.prompt != nil || j.model != nil {
		t.Error("what nobody waits for any more keeps its memory")
	} else {
		p.jobs <- j
	}
	p.let <- struct{}{}
	p.Close()
	select {
	case <-p.begun:
		t.Error("a prompt was followed that nobody waits for")
	default:
	}
	if first == second || len(first.IDs) > 0 || len(second.IDs) > 0 {
		t.Errorf("the worker wrote into a caller's prompt: %+v, %+v", first, second)
	}
}

func TestPoolFull(t *testing.T) {
	p := holdUp(t, NewPool(1, time.Minute))
	var callers sync.WaitGroup
	var exact atomic.Int64
	for range 1 + queuedPerWorker {
		callers.Go(func() {
			if prompt, _ := p.Read(new(Model), Chat, large(1), time.Time{}); prompt.Reason == Exact {
				exact.Add(1)
			}
		})
	}
	<-p.begun
	for p.Stats().Queued < queuedPerWorker {
		runtime.Gosched()
	}
	prompt, late := p.Read(new(Model), Chat, large(1), time.Time{})
	if prompt.Reason != QueueFull || late {
		t.Errorf("got %+v, %v", prompt, late)
	}
	for range 1 + queuedPerWorker {
		p.let <- struct{}{}
	}
	callers.Wait()
	p.Close()
	if exact.Load() != 1+queuedPerWorker {
		t.Errorf("%d of %d were followed", exact.Load(), 1+queuedPerWorker)
	}
}

func TestPoolPanic(t *testing.T) {
	p := NewPool(1, time.Minute)
	defer p.Close()
	p.follow = func(*Model, *Prompt, Kind, []byte, time.Time) { panic("a defect") }
	p.brief = p.follow
	for _, body := range [][]byte{nil, large(1), large(1)} {
		if prompt, late := p.Read(new(Model), Chat, body, time.Time{}); prompt.Reason != Failed || late {
			t.Errorf("got %+v, %v", prompt, late)
		}
	}
	// The worker has lived through it.
	p.follow = func(_ *Model, prompt *Prompt, _ Kind, _ []byte, _ time.Time) { prompt.reset() }
	if prompt, _ := p.Read(new(Model), Chat, large(1), time.Time{}); prompt.Reason != Exact {
		t.Errorf("got %+v", prompt)
	}
}

// TestPoolCloseUnderLoad: whoever reads while the pool is closed gets an
// answer, and no goroutine is left.
func TestPoolCloseUnderLoad(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 20 {
		p := NewPool(3, 20*time.Millisecond)
		p.follow = func(_ *Model, prompt *Prompt, _ Kind, body []byte, _ time.Time) {
			prompt.reset()
			prompt.IDs = append(prompt.IDs, uint32(len(body)))
		}
		var callers sync.WaitGroup
		started := make(chan struct{}, 8)
		for c := range 8 {
			callers.Go(func() {
				for i := range 50 {
					body := large(1 + c*50 + i)
					prompt, _ := p.Read(new(Model), Chat, body, time.Time{})
					switch prompt.Reason {
					case Exact:
						if !slices.Equal(prompt.IDs, []uint32{uint32(len(body))}) {
							t.Errorf("%d bytes have the ids %v", len(body), prompt.IDs)
						}
					case Late, QueueFull:
						// Once the pool is closed each waits for its time.
						return
					default:
						t.Errorf("got %+v", prompt)
					}
					p.Put(prompt)
					if i == 0 {
						started <- struct{}{}
					}
				}
			})
		}
		<-started
		p.Close()
		callers.Wait()
		if s := p.Stats(); s.Busy != 0 {
			t.Errorf("%+v", s)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
		runtime.Gosched()
	}
}

// TestPoolRecalls: a large prompt that the model remembers waits for no worker.
func TestPoolRecalls(t *testing.T) {
	m, err := Load(Source{Tokenizer: "builtin:sim", Cache: tokenizer.NewCache(4 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	body := []byte(chatBody(2 * inlineBytes))
	var want Prompt
	for range 2 {
		m.Follow(&want, Chat, body, time.Time{})
	}
	if want.Reason != Exact || len(want.IDs) < 1000 {
		t.Fatalf("%v, %d ids", want.Reason, len(want.IDs))
	}
	p := holdUp(t, NewPool(1, time.Minute))
	defer p.Close()
	for range 3 {
		prompt, late := p.Read(m, Chat, body, time.Time{})
		if late || prompt.Reason != Exact || !slices.Equal(prompt.IDs, want.IDs) {
			t.Errorf("got %v, %d ids, late %v", prompt.Reason, len(prompt.IDs), late)
		}
		p.Put(prompt)
	}
}

// TestPoolKeepsLittle: a Prompt that has grown large is not kept.
func TestPoolKeepsLittle(t *testing.T) {
	p := NewPool(1, time.Minute)
	defer p.Close()
	for range 10 {
		prompt, _ := p.Read(new(Model), Chat, nil, time.Time{})
		if prompt.memory() > keptMemory {
			t.Fatal("a large one came back")
		}
		prompt.IDs = make([]uint32, keptMemory/4+1)
		p.Put(prompt)
	}
}

// BenchmarkPool is what a worker costs beside following at once.
func BenchmarkPool(b *testing.B) {
	p := NewPool(2, time.Minute)
	defer p.Close()
	p.follow = func(_ *Model, prompt *Prompt, _ Kind, _ []byte, _ time.Time) { prompt.reset() }
	p.brief = p.follow
	for name, body := range map[string][]byte{"inline": large(0), "worker": large(1)} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				prompt, _ := p.Read(new(Model), Chat, body, time.Time{})
				p.Put(prompt)
			}
		})
	}
}
