package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// medianSpeed is the median of each coefficient, DefaultSpeed of none.
func medianSpeed(speeds []Speed) Speed {
	var of [3][]float64
	for _, s := range speeds {
		of[0], of[1], of[2] = append(of[0], s.A), append(of[1], s.B), append(of[2], s.D)
	}
	n := len(speeds)
	if n == 0 {
		return DefaultSpeed
	}
	for _, cs := range of {
		slices.Sort(cs)
	}
	median := func(cs []float64) float64 { return cs[(n-1)/2]/2 + cs[n/2]/2 }
	return Speed{A: median(of[0]), B: median(of[1]), D: median(of[2])}
}

// Stories of how replicas go by one another's speeds: prompts are sent, their first tokens
// come, and speeds are shared.
func TestPeerStories(t *testing.T) {
	datadriven.Walk(t, "testdata/peer", func(t *testing.T, path string) {
		var peers []*Peer
		names := map[*Peer]string{}
		byName := map[string]*Peer{}
		sent := map[string]*Sending{}
		since := func(s string) time.Time {
			d, err := time.ParseDuration(s)
			if err != nil {
				t.Fatal(err)
			}
			return time.Unix(1, 0).Add(d)
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "peers" {
				for line := range strings.Lines(d.Input) {
					fields := strings.Fields(line)
					p := &Peer{Standing: new(Standing), Models: fields[1:]}
					peers, names[p], byName[fields[0]] = append(peers, p), fields[0], p
				}
				return ""
			}
			for line := range strings.Lines(d.Input) {
				switch f := strings.Fields(line); f[0] {
				case "send":
					tokens, err := strconv.Atoi(f[2])
					if err != nil {
						t.Fatal(err)
					}
					p := &Sending{Tokens: tokens}
					p.Expect(byName[f[1]].Standing, true, true, since(f[3]))
					sent[f[1]] = p
				case "first":
					sent[f[1]].First(1, 0, false, since(f[2]))
				default:
					t.Fatalf("what is %s?", line)
				}
			}
			var at string
			d.ScanArgs(t, "at", &at)
			ShareSpeeds(peers, since(at))
			typical, out := Prefill(1000, 0), new(strings.Builder)
			for _, p := range peers {
				speed := p.Standing.Calibration.Speed()
				fmt.Fprintf(out, "%s %.2f, %d seen\n", names[p], speed.Time(typical)/DefaultSpeed.Time(typical), p.Estimate.Samples)
			}
			return out.String()
		})
	})
}

// The median of all but one is that of a list from which it was taken.
func TestPaceWithoutOne(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var p pace
		list := make([]Estimate, rng.IntN(7))
		for i := range list {
			// Few values, so that many are equal; some are no speeds.
			draw := func() float64 {
				if rng.IntN(16) == 0 {
					return []float64{math.NaN(), math.Inf(1), -1}[rng.IntN(3)]
				}
				return float64(rng.IntN(4))
			}
			list[i] = Estimate{Speed: Speed{draw(), draw(), draw()}, Determined: rng.IntN(3) == 0}
			p.add(&list[i])
		}
		for skip := -1; skip < len(list); skip++ {
			var all, sure []Speed
			for i := range list {
				if i == skip || !list[i].Speed.sound() {
					continue
				}
				all = append(all, list[i].Speed)
				if list[i].Determined {
					sure = append(sure, list[i].Speed)
				}
			}
			want := medianSpeed(all)
			if len(sure) > 0 {
				want = medianSpeed(sure)
			}
			var without *Estimate
			if skip >= 0 {
				without = &list[skip]
			}
			if got, ok := p.median(without); got != want || ok != (len(all) > 0) {
				t.Fatalf("%+v without %d: %v, %v, want %v", list, skip, got, ok, want)
			}
		}
	}
}

// BenchmarkShareSpeeds1000 is what sharing takes each time in a large fleet, of which
// most have told nothing since.
func BenchmarkShareSpeeds1000(b *testing.B) {
	peers := make([]*Peer, 1000)
	now := time.Unix(1, 0)
	for i := range peers {
		peers[i] = &Peer{Standing: new(Standing), Models: []string{"m"}}
		for k := range 30 {
			w := Prefill(500+100*k, 0)
			peers[i].Standing.Calibration.Observe(Observation{Work: w, Seconds: float64(50+i%7) * 1e-6 * w.Tokens})
		}
	}
	for b.Loop() {
		ShareSpeeds(peers, now)
	}
}
