package proxy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// What is kept against a plain list of all changes, for a poller that comes now and
// then: of what is still there it gets every change.
func TestRecentForPollers(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	s := &Server{recent: recent{began: time.Now()}}
	r := &s.recent
	var running []*recentEntry
	known := map[uint64]RecentDecision{}
	seq := uint64(0)
	for i := range 4000 {
		if len(running) > 0 && random.IntN(2) == 0 {
			k := random.IntN(len(running))
			r.end(running[k], &DecisionOutcome{Outcome: fmt.Sprint(i)})
			running = slices.Delete(running, k, k+1)
		} else {
			d := &Decision{RequestID: fmt.Sprint("r", i), Reason: fmt.Sprint(i), candidates: make([]policy.Candidate, random.IntN(400))}
			running = append(running, r.enter(d, 1, 0, nil, ""))
		}
		if len(r.list) > recentDecisions || r.weight > recentRows {
			t.Fatalf("%d decisions of %d rows are kept", len(r.list), r.weight)
		}
		if random.IntN(50) != 0 {
			continue
		}
		got := s.RecentDecisions(seq)
		seq = got.Seq
		for _, row := range got.Decisions {
			known[row.ID] = row
		}
		for _, e := range r.list {
			row := known[e.number]
			if row.Seq != e.seq || row.Reason != e.decision.Reason || row.Outcome != e.outcome {
				t.Fatalf("after %d the poller has %+v of decision %d", i, row, e.number)
			}
		}
		if len(s.RecentDecisions(seq).Decisions) != 0 {
			t.Fatal("there is something new when nothing has changed")
		}
	}
	if got := s.RecentDecisions(1 << 60); len(got.Decisions) != len(r.list) {
		t.Errorf("who has polled another process gets %d of %d", len(got.Decisions), len(r.list))
	}
}

// How many are kept, by how many come and whether somebody looks.
func TestRecentIsBounded(t *testing.T) {
	began := time.Now()
	kept := func(r *recent, from time.Duration, candidates, perSecond int) (n int) {
		for i := range perSecond * 60 {
			if r.takes(began.Add(from+time.Minute*time.Duration(i)/time.Duration(perSecond*60)), candidates) {
				n++
			}
		}
		return n
	}
	for _, c := range []struct{ candidates, perSecond, idle, watched int }{
		{4, 10, 600, 600},             // all
		{4, 5000, 15*60 + 240, 14456}, // a burst, and 1,024 rows a second
		{1000, 5000, 57 + 15, 923 + 15},
		{100_000, 5000, 4, 60}, // one is more than a burst
	} {
		r := &recent{began: began}
		idle := kept(r, time.Hour, c.candidates, c.perSecond)
		r = &recent{began: began}
		watched := 0
		for i := range 6 { // a page that is open polls
			from := began.Add(time.Hour + time.Duration(i)*10*time.Second)
			r.watch(from)
			for k := range c.perSecond * 10 {
				if r.takes(from.Add(time.Duration(k)*time.Second/time.Duration(c.perSecond)), c.candidates) {
					watched++
				}
			}
		}
		near := func(got, want int) bool {
			return got*10 >= want*8 && got*8 <= want*10 || got-want <= 2 && want-got <= 2
		}
		if !near(idle, c.idle) || !near(watched, c.watched) {
			t.Errorf("of %d a second with %d candidates, in a minute %d are kept, and %d while somebody looks; want about %d and %d",
				c.perSecond, c.candidates, idle, watched, c.idle, c.watched)
		}
	}
	// Who looks is not kept waiting by what was kept before.
	r := &recent{began: began}
	kept(r, time.Hour, 1000, 5000)
	r.watch(began.Add(time.Hour + time.Minute))
	if !r.takes(began.Add(time.Hour+time.Minute), 1000) {
		t.Error("who looks sees nothing at once")
	}
}

// What a decision that is not kept costs. Nothing is allocated.
func TestRecentNotKept(t *testing.T) {
	r := &recent{began: time.Now()}
	now := r.began.Add(time.Second)
	for r.takes(now, 1000) {
	}
	if n := testing.AllocsPerRun(100, func() { r.takes(now, 1000) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A request is among the last decisions from when it is sent, its outcome when it is
// over, and it is told whole as /explain would.
func TestRecentDecisions(t *testing.T) {
	c := quietly(t, 3)
	c.change(func(m *Model) {
		m.Shadows = []*policy.Shadow{{Policy: &policy.RoundRobin{}}}
	})
	c.ask(completion(words(60), `"max_tokens":1`))
	c.ask(completion(words(60), `"max_tokens":1`))
	eventuallyRecent := func() RecentDecisions {
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			got := c.s.RecentDecisions(0)
			if len(got.Decisions) == 2 && got.Decisions[1].Outcome != nil || time.Now().After(deadline) {
				return got
			}
		}
	}
	got := eventuallyRecent()
	if len(got.Decisions) != 2 || got.Made != 2 || got.Kept != 2 {
		t.Fatalf("%+v", got)
	}
	first, second := got.Decisions[0], got.Decisions[1]
	if first.ID != 1 || first.Attempt != 1 || first.Candidates != 3 || first.Winner == "" || first.Outcome.Status != 200 || first.Outcome.Outcome != "ok" ||
		first.CachedTokens != 0 || second.CachedTokens != 56 || second.Winner != first.Winner || second.PromptTokens != 60 {
		t.Errorf("%+v\n%+v", first, second)
	}
	whole := c.s.RecentDecision(2, "")
	if whole == nil || whole.Winner != second.Winner || len(whole.Replicas) != 3 || len(whole.Replicas[0].Terms) == 0 || whole.Outcome == nil || len(whole.Shadows) != 1 {
		t.Fatalf("%+v", whole)
	}
	// It can be looked at again and again, by request too.
	again := c.s.RecentDecision(0, second.RequestID)
	a, _ := json.Marshal(whole)
	b, _ := json.Marshal(again)
	if string(a) != string(b) || strings.Contains(string(a), "word") {
		t.Errorf("%s\n%s", a, b)
	}
	if c.s.RecentDecision(3, "") != nil || c.s.RecentDecision(0, "nobody") != nil {
		t.Error("what is not kept is found")
	}
}

func TestRecentFromManyGoroutines(t *testing.T) {
	s := &Server{recent: recent{began: time.Now()}}
	var writers, reader sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		writers.Go(func() {
			var last *recentEntry
			for i := range 2000 {
				s.recent.takes(time.Now(), 8)
				d := &Decision{policy: policy.LeastRequest{}, candidates: make([]policy.Candidate, 8), Replicas: make([]Considered, 8)}
				last = s.recent.enter(d, i+1, 0, last, "engine_died")
			}
			s.recent.end(last, &DecisionOutcome{})
		})
	}
	reader.Go(func() {
		for {
			for _, row := range s.RecentDecisions(0).Decisions {
				if d := s.RecentDecision(row.ID, ""); d != nil && len(d.Replicas) != 8 {
					t.Errorf("%+v", d)
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	writers.Wait()
	close(stop)
	reader.Wait()
	for _, row := range s.RecentDecisions(0).Decisions {
		if row.Outcome == nil {
			t.Fatalf("decision %d has no outcome", row.ID)
		}
	}
}

// BenchmarkRecentNotKept is what a decision costs that is not kept.
func BenchmarkRecentNotKept(b *testing.B) {
	r := &recent{began: time.Now()}
	now := r.began.Add(time.Second)
	for r.takes(now, 1000) {
	}
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			r.takes(now, 1000)
		}
	})
}
