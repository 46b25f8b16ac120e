package agent

import (
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// Each story in testdata/trust is what the comparisons with two engines, a and
// b, have found, and why the model is not believed after it. Regenerate with
// -rewrite and read the difference.
func TestTrustStories(t *testing.T) {
	datadriven.Walk(t, filepath.Join("testdata", "trust"), func(t *testing.T, path string) {
		var tr trust
		places := map[string]uint64{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "model":
				tr, places = trust{}, map[string]uint64{}
			case "do":
			default:
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			var out strings.Builder
			before := tr.verdict()
			for line := range strings.Lines(d.Input) {
				words := strings.Fields(line)
				slot := strings.Index("ab", words[0])
				times := 1
				if len(words) > 3 { // a count differs 8
					n, err := strconv.Atoi(words[3])
					if err != nil {
						d.Fatalf(t, "%v", err)
					}
					times = n
				}
				for i := range times {
					switch event := strings.Join(words[1:min(len(words), 3)], " "); event {
					case "count agrees", "sample agrees":
						places[words[0]+words[1]]++
					case "count differs":
						places[words[0]+words[1]]++
						tr.counted(slot, places[words[0]+words[1]], words[0]+" counts otherwise")
					case "sample differs":
						places[words[0]+words[1]]++
						tr.sampled(slot, places[words[0]+words[1]], words[0]+" has other tokens")
					case "probe agrees":
						tr.probed(slot, agrees, "")
					case "probe differs":
						tr.probed(slot, differs, words[0]+" differs in a probe")
					case "probe unable":
						tr.probed(slot, unable, "")
					case "probe failed":
						tr.probed(slot, failed, "")
					case "leaves":
						tr.left(slot)
					default:
						d.Fatalf(t, "what is %q?", line)
					}
					if now := tr.verdict(); now != before {
						fmt.Fprintf(&out, "%s %d: ", strings.Join(words[:min(len(words), 3)], " "), i+1)
						if before = now; now == "" {
							now = "believed again"
						}
						out.WriteString(now + "\n")
					}
				}
			}
			if out.Len() == 0 {
				if before == "" {
					return "believed\n"
				}
				return "still not believed\n"
			}
			return out.String()
		})
	})
}

// A window answers as one that remembers everything.
func TestWindowAgainstAll(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 1))
		share := random.Float64()
		most, of := 1+random.IntN(8), 8+random.IntN(60)
		var w window
		var all []uint64
		for place := uint64(1); place < 1000; place++ {
			if random.Float64() >= share {
				continue
			}
			all = append(all, place)
			recent := 0
			for _, p := range all {
				if place-p < uint64(of) {
					recent++
				}
			}
			if got, _ := w.add(place, most, of); got != (recent >= most) {
				t.Fatalf("seed %d: at %d %d of the last %d differ, want %d: reports %v", seed, place, recent, of, most, got)
			}
		}
	}
}

// Requests that end at the same time tell so in any order, and the order makes
// no difference to what is found in the end.
func TestWindowOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		places := random.Perm(20)[:8]
		var w window
		var enough bool
		low, high := math.MaxInt, 0
		for _, p := range places {
			enough, _ = w.add(uint64(p+1), 8, 16)
			low, high = min(low, p), max(high, p)
		}
		if want := high-low < 16; enough != want {
			t.Errorf("%v: reports %v, want %v", places, enough, want)
		}
	}
}

// What trust's comment says of chance: at one wrong count in a hundred the model
// is not demoted within a hundred thousand responses, at one in ten soon.
func TestTrustOdds(t *testing.T) {
	f := func(share float64, demoted bool) {
		t.Helper()
		random := rand.New(rand.NewPCG(7, 7))
		var tr trust
		for place := uint64(1); place <= 100_000; place++ {
			if random.Float64() < share {
				tr.counted(0, place, "x")
			}
			if tr.verdict() != "" {
				if !demoted || place > 1000 {
					t.Errorf("at %v demoted by response %d", share, place)
				}
				return
			}
		}
		if demoted {
			t.Errorf("at %v never demoted", share)
		}
	}
	f(0.001, false)
	f(0.01, false)
	f(0.1, true)
	f(1, true)
}
