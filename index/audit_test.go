package index

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestAuditStories: when predictions are believed no more, and again. A line is
//
//	COUNT every DURATION: PREDICTED ACTUAL [of COUNT: PREDICTED ACTUAL]... [loaded]
//
// so many responses, of which the later ones are the last of each so many.
func TestAuditStories(t *testing.T) {
	datadriven.RunTest(t, "testdata/audit.txt", func(t *testing.T, d *datadriven.TestData) string {
		a, now := audit{}, time.Unix(1000, 0)
		var out strings.Builder
		for line := range strings.Lines(d.Input) {
			line = strings.TrimSpace(line)
			if line == "forget" {
				a.forget()
				fmt.Fprintf(&out, "forget: %q\n", a.Why)
				continue
			}
			var n, predicted, actual, of, p2, a2 int
			var every string
			if k, _ := fmt.Sscanf(line, "%d every %s %d %d of %d: %d %d", &n, &every, &predicted, &actual, &of, &p2, &a2); k < 4 {
				d.Fatalf(t, "cannot read %q", line)
			}
			pause, err := time.ParseDuration(strings.TrimSuffix(every, ":"))
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			was := a.Why
			for i := range n {
				now = now.Add(pause)
				p, c := predicted, actual
				if of > 0 && (i+1)%of == 0 {
					p, c = p2, a2
				}
				a.add(p, c, 16, strings.HasSuffix(line, "loaded"), now)
				if a.Why != was {
					fmt.Fprintf(&out, "response %d: %q\n", i+1, a.Why)
					was = a.Why
				}
			}
		}
		fmt.Fprintf(&out, "%d responses, %d over, %d under, %d tokens off\n", a.Responses, a.Over, a.Under, a.Error)
		return out.String()
	})
}

// TestAuditOfUnreported: what an engine does not tell is nothing, where it omits
// zeros and has told others; else it is not known.
func TestAuditOfUnreported(t *testing.T) {
	for _, omits := range []bool{true, false} {
		x := New(Config{})
		x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 100, AfterPrefill: omits})
		now := time.Unix(1000, 0)
		audit := func(actual int, reported bool) (string, bool) {
			now = now.Add(time.Second)
			return x.Audit(0, 160, actual, reported, now)
		}
		for range 100 {
			if why, _ := audit(0, false); why != "" {
				t.Fatalf("nothing was ever told: %s", why)
			}
		}
		audit(160, true)
		changes, last := 0, ""
		for range 100 {
			why, changed := audit(0, false)
			if last = why; changed {
				changes++
			}
		}
		if (last != "") != omits || (changes == 1) != omits {
			t.Errorf("omits zeros %v: %q, changed %d times", omits, last, changes)
		}
		if got := x.Stats(nil)[0].Audited; (got.Responses == 101) != omits || got.Why != last {
			t.Errorf("omits zeros %v: %+v", omits, got)
		}
	}
	if why, changed := New(Config{}).Audit(7, 1, 2, true, time.Time{}); why != "" || changed {
		t.Error("a slot that is not there is audited")
	}
}

// TestAuditUnderLoad: requests that wait at the engine for memory prove nothing.
func TestAuditUnderLoad(t *testing.T) {
	for _, state := range []State{Approximate, Exact} {
		x := New(Config{})
		x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 10})
		x.SetState(0, state, "")
		now := time.Unix(1000, 0)
		r := rand.New(rand.NewPCG(1, 1))
		var claims []Claim
		for range 3 {
			p := Prompt{IDs: randomIDs(r, 100), Block: 16}
			p.Chain = AppendTokens(nil, Hash{}, p.IDs, 16)
			var c Claim
			x.Claim(&c, 0, &p, now)
			claims = append(claims, c)
		}
		for range 18 {
			now = now.Add(loadedFor / 20)
			_, _ = x.Audit(0, 160, 0, true, now)
			if why, _ := x.Audit(0, 160, 0, true, now); why != "" {
				t.Fatalf("under load: %s", why)
			}
		}
		for i := range claims {
			x.Release(&claims[i], 1, now)
		}
		now = now.Add(2 * loadedFor)
		why := ""
		for range 40 {
			now = now.Add(time.Second)
			why, _ = x.Audit(0, 160, 0, true, now)
		}
		if why == "" {
			t.Error("without load it proves nothing either")
		}
	}
}
