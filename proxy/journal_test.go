package proxy

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
)

// The journal against a plain list of all that was entered.
func TestJournal(t *testing.T) {
	var j journal
	if rows := j.append(nil); len(rows) != 0 {
		t.Errorf("an empty journal has %d rows", len(rows))
	}
	var all []Prediction
	for i := range 2*journalRows + 7 {
		p := Prediction{Model: "m", Replica: "r", Tokens: i}
		id := fmt.Sprint("request-", i)
		j.enter(p, []byte(id))
		p.RequestID = id
		all = append(all, p)
		if i%500 != 0 && i < 2*journalRows {
			continue
		}
		want := slices.Clone(all[max(len(all)-journalRows, 0):])
		slices.Reverse(want)
		if got := j.append(nil); !slices.Equal(got, want) {
			t.Fatalf("after %d: %d rows, the first %+v; want %d, the first %+v", len(all), len(got), got[0], len(want), want[0])
		}
	}
	// A client's id may be long, or cut within a rune.
	id := strings.Repeat("x", maxJournalID-1) + "ü"
	j.enter(Prediction{}, []byte(id))
	if got := j.append(nil)[0].RequestID; got != id[:maxJournalID-1] {
		t.Errorf("a long id is kept as %q", got)
	}
	// What was there before does not show through a shorter one.
	for range journalRows {
		j.enter(Prediction{}, []byte("a"))
	}
	for _, p := range j.append(nil) {
		if p.RequestID != "a" {
			t.Fatalf("the id is %q", p.RequestID)
		}
	}
}

func TestJournalFromManyGoroutines(t *testing.T) {
	var j journal
	var writers, reader sync.WaitGroup
	stop := make(chan struct{})
	for w := range 4 {
		writers.Go(func() {
			id := []byte(strings.Repeat(string(rune('a'+w)), 32))
			for range 3000 {
				j.enter(Prediction{Tokens: w}, id)
			}
		})
	}
	reader.Go(func() {
		for {
			for _, p := range j.append(nil) {
				if p.RequestID != strings.Repeat(string(rune('a'+p.Tokens)), 32) {
					t.Errorf("a row of %d has the id %q", p.Tokens, p.RequestID)
					return
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
	if n := len(j.append(nil)); n != journalRows {
		t.Errorf("%d rows", n)
	}
}

func TestJournalAllocatesNothing(t *testing.T) {
	var j journal
	id := []byte("0123456789abcdef0123456789abcdef")
	p := Prediction{Model: "m", Replica: "r"}
	if n := testing.AllocsPerRun(1000, func() { j.enter(p, id) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkJournal enters decisions from all processors.
// go test -bench Journal ./proxy
func BenchmarkJournal(b *testing.B) {
	var j journal
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		id := []byte("0123456789abcdef0123456789abcdef")
		p := Prediction{Model: "m", Replica: "r"}
		for pb.Next() {
			j.enter(p, id)
		}
	})
}
