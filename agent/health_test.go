package agent

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// Each story in testdata/health is what happens to the members of a fleet and
// where they stand after it. Time starts at 0s and passes by "wait" only.
// Regenerate with -rewrite and read the difference.
func TestHealthStories(t *testing.T) {
	datadriven.Walk(t, filepath.Join("testdata", "health"), func(t *testing.T, path string) {
		var h health
		var began, now time.Time
		byName := map[string]*vitals{}
		var order []string
		show := func() string {
			var out strings.Builder
			for _, name := range order {
				v := byName[name]
				h.forgive(v, now)
				fmt.Fprintf(&out, "%s %v", name, v.standing)
				if v.standing == ejected {
					fmt.Fprintf(&out, " until %v", v.until.Sub(began))
				}
				if v.refused {
					out.WriteString(", one too many to eject")
				}
				if v.doublings > 0 {
					fmt.Fprintf(&out, ", next time for %v", h.backoff(v.doublings))
				}
				out.WriteString("\n")
			}
			return out.String()
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "fleet":
				began = time.Unix(0, 0)
				now = began
				h = health{HealthConfig: HealthConfig{
					UnhealthyThreshold: 3, EjectionFailures: 3, EjectionBackoff: 5 * time.Second, MaxEjectionPercent: 50}}
				if d.HasArg("percent") {
					d.ScanArgs(t, "percent", &h.MaxEjectionPercent)
				}
				byName, order = map[string]*vitals{}, nil
				for line := range strings.Lines(d.Input) {
					words := strings.Fields(line)
					v := &vitals{models: words[1:]}
					byName[words[0]], order = v, append(order, words[0])
					h.joined(v)
					h.checked(v, now, now, true)
				}
			case "do":
				for line := range strings.Lines(d.Input) {
					words := strings.Fields(line)
					if words[0] == "wait" {
						step, err := time.ParseDuration(words[1])
						if err != nil {
							d.Fatalf(t, "%v", err)
						}
						now = now.Add(step)
						for _, name := range order {
							h.passed(byName[name], now)
						}
						continue
					}
					v := byName[words[0]]
					switch words[1] {
					case "check-ok", "check-fails":
						began := now
						if len(words) > 2 { // "early": it began before all else
							began = time.Time{}
						}
						h.checked(v, began, now, words[1] == "check-ok")
					case "fails":
						n, err := strconv.Atoi(words[2])
						if err != nil {
							d.Fatalf(t, "%v", err)
						}
						for range n {
							h.requests(v, v.failedRequests+1, now)
						}
					case "answers":
						h.requests(v, 0, now)
					case "leaves":
						h.left(v, now)
						order = slices.DeleteFunc(order, func(name string) bool { return name == words[0] })
					case "joins":
						h.joined(v)
						order = append(order, words[0])
					default:
						d.Fatalf(t, "what is %q?", line)
					}
				}
			default:
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			return show()
		})
	})
}

// naive is the health of a fleet told again from what has happened: it keeps
// the whole history of each member and works everything out from it.
type naive struct {
	cfg     HealthConfig
	members []*naiveMember
}

type naiveMember struct {
	models []string
	past   []naiveEvent
}

type naiveEvent struct {
	at   time.Time
	what string // "check", "failures", "ejected", "down", "up"
	ok   bool
	n    int
	long time.Duration // an ejection's length
}

func (m *naiveMember) last(whats ...string) *naiveEvent {
	for i := len(m.past) - 1; i >= 0; i-- {
		if slices.Contains(whats, m.past[i].what) {
			return &m.past[i]
		}
	}
	return nil
}

func (m *naiveMember) standing() standing {
	switch e := m.last("ejected", "down", "up"); {
	case e == nil:
		return joining
	case e.what == "ejected":
		return ejected
	case e.what == "down":
		return down
	}
	return up
}

// failing returns since when enough requests in a row have failed: until now,
// or until it was ejected for it.
func (m *naiveMember) failing(enough int) (since time.Time, yes bool) {
	last := len(m.past) - 1
	if m.standing() == ejected {
		for ; m.past[last].what != "ejected"; last-- {
		}
	}
	for i := last; i >= 0; i-- {
		e := m.past[i]
		if e.what == "up" || e.what == "failures" && e.n < enough {
			break
		}
		if e.what == "failures" {
			since, yes = e.at, true
		}
	}
	return since, yes
}

// length is how long the next ejection would last at a time: walk through all
// ups and ejections, doubling and halving.
func (n *naive) length(m *naiveMember, now time.Time) time.Duration {
	d := n.cfg.EjectionBackoff
	calm := time.Time{}
	good := func(until time.Time) {
		if calm.IsZero() {
			return
		}
		for d > n.cfg.EjectionBackoff {
			stretch := d / 2
			if d == maxBackoff { // the doubling before it was cut
				stretch = n.cfg.EjectionBackoff
				for stretch*2 < maxBackoff {
					stretch *= 2
				}
			}
			if until.Sub(calm) < stretch {
				break
			}
			calm = calm.Add(stretch)
			d = stretch
		}
		calm = time.Time{}
	}
	for _, e := range m.past {
		switch e.what {
		case "up":
			calm = e.at
		case "down":
			good(e.at)
		case "ejected":
			good(e.at)
			d = min(2*d, maxBackoff)
		}
	}
	good(now)
	return d
}

func (n *naive) spare(m *naiveMember) bool {
	for _, model := range m.models {
		all, gone := 0.0, 0.0
		for _, other := range n.members {
			if slices.Contains(other.models, model) {
				all++
				if other.standing() != up {
					gone++
				}
			}
		}
		if all == 1 || gone+1 > all*float64(n.cfg.MaxEjectionPercent)/100 {
			return false
		}
	}
	return true
}

// think applies the rules until none applies any more.
func (n *naive) think(now time.Time) {
	for again := true; again; {
		again = false
		for _, m := range n.members {
			_, failing := m.failing(n.cfg.EjectionFailures)
			if m.standing() == up && failing && n.spare(m) {
				long := n.length(m, now)
				m.past = append(m.past, naiveEvent{at: now, what: "ejected", long: long})
				again = true
			}
		}
	}
}

func (n *naive) check(m *naiveMember, from, now time.Time, ok bool) {
	since, failing := m.failing(n.cfg.EjectionFailures)
	m.past = append(m.past, naiveEvent{at: now, what: "check", ok: ok})
	bad := 0
	for i := len(m.past) - 1; i >= 0; i-- {
		if m.past[i].what == "check" {
			if m.past[i].ok {
				break
			}
			bad++
		}
	}
	s := m.standing()
	switch {
	case ok && (s == joining || s == down):
		m.past = append(m.past, naiveEvent{at: now, what: "up"})
	case !ok && (s == up || s == ejected) && (bad >= n.cfg.UnhealthyThreshold || failing && !from.Before(since)):
		m.past = append(m.past, naiveEvent{at: now, what: "down"})
	}
	n.think(now)
}

func (n *naive) fail(m *naiveMember, count int, now time.Time) {
	m.past = append(m.past, naiveEvent{at: now, what: "failures", n: count})
	// Only the one that has failed is looked at now; others when one returns.
	if _, failing := m.failing(n.cfg.EjectionFailures); m.standing() == up && failing && n.spare(m) {
		m.past = append(m.past, naiveEvent{at: now, what: "ejected", long: n.length(m, now)})
	}
}

func (n *naive) pass(m *naiveMember, now time.Time) {
	if e := m.last("ejected", "down", "up"); e != nil && e.what == "ejected" && !now.Before(e.at.Add(e.long)) {
		m.past = append(m.past, naiveEvent{at: now, what: "up"})
		n.think(now)
	}
}

// A random history of checks, requests and time, told to health and to the
// naive model: they agree on every member after every step, and what must
// never happen does not.
func TestHealthAgainstNaiveModel(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			cfg := HealthConfig{
				UnhealthyThreshold: 1 + rng.IntN(4), EjectionFailures: 1 + rng.IntN(4),
				EjectionBackoff: time.Duration(1+rng.IntN(90)) * time.Second, MaxEjectionPercent: rng.IntN(101)}
			if rng.IntN(4) == 0 {
				cfg.MaxEjectionPercent = 100
			}
			h := health{HealthConfig: cfg}
			n := naive{cfg: cfg}
			models := []string{"a", "b", "c"}
			for range 1 + rng.IntN(6) {
				var serves []string
				for _, m := range models {
					if rng.IntN(2) == 0 {
						serves = append(serves, m)
					}
				}
				if len(serves) == 0 {
					serves = models[:1]
				}
				h.joined(&vitals{models: serves})
				n.members = append(n.members, &naiveMember{models: serves})
			}
			now := time.Unix(1e9, 0)
			counts := map[standing]int{}
			for step := range 400 {
				i := rng.IntN(len(h.members))
				v, m := h.members[i], n.members[i]
				now = now.Add(time.Duration(rng.IntN(2000)) * time.Millisecond)
				if rng.IntN(40) == 0 {
					now = now.Add(time.Duration(rng.IntN(400)) * time.Second)
				}
				var before []standing
				for _, v := range h.members {
					before = append(before, v.standing)
				}
				did := ""
				switch rng.IntN(5) {
				case 0:
					// A bad check may have begun before the requests failed.
					from := now.Add(-time.Duration(rng.IntN(3000)) * time.Millisecond)
					did = "bad check"
					h.checked(v, from, now, false)
					n.check(m, from, now, false)
				case 1:
					did = "good check"
					h.checked(v, now, now, true)
					n.check(m, now, now, true)
				case 2, 3:
					// As replicas count: from 0 after a return or an answer.
					count := v.failedRequests + 1
					did = fmt.Sprint(count, " failures")
					h.requests(v, count, now)
					n.fail(m, count, now)
				case 4:
					if rng.IntN(2) == 0 {
						did = "an answer"
						h.requests(v, 0, now)
						n.fail(m, 0, now)
					}
				}
				for j, v := range h.members {
					h.passed(v, now)
					n.pass(n.members[j], now)
				}
				for j, v := range h.members {
					counts[v.standing]++
					m := n.members[j]
					if v.standing != m.standing() {
						t.Fatalf("step %d, %s of %d: member %d is %v, want %v; %+v; %+v", step, did, i, j, v.standing, m.standing(), *v, cfg)
					}
					if got, want := h.backoff(v.doublings), n.length(m, now); v.standing == up && got != want {
						t.Fatalf("step %d, %s of %d: the next ejection of %d lasts %v, want %v; %+v", step, did, i, j, got, want, *v)
					}
					if v.standing == ejected {
						e := m.last("ejected")
						if got, want := v.until, e.at.Add(e.long); !got.Equal(want) {
							t.Fatalf("step %d: member %d is ejected until %v, want %v", step, j, got, want)
						}
						if left := v.until.Sub(now); left <= 0 || left > maxBackoff {
							t.Fatalf("step %d: an ejection lasts %v from now", step, left)
						}
					}
					if v.standing == ejected && before[j] != ejected {
						capHolds(t, &h, v)
					}
				}
			}
			if counts[up] == 0 || counts[down] == 0 {
				t.Errorf("too little happened: %v", counts)
			}
		})
	}
}

// capHolds: no model of a member just ejected misses more than it may, or all.
func capHolds(t *testing.T, h *health, v *vitals) {
	t.Helper()
	for _, model := range v.models {
		all, out := 0, 0
		for _, other := range h.members {
			if slices.Contains(other.models, model) {
				all++
				if other.standing != up {
					out++
				}
			}
		}
		if all == 1 || out > all*h.MaxEjectionPercent/100 {
			t.Fatalf("after an ejection %d of the %d replicas of %s are out, at most %d %% may", out, all, model, h.MaxEjectionPercent)
		}
	}
}

func TestBackoffLength(t *testing.T) {
	f := func(base time.Duration, doublings int, want time.Duration) {
		t.Helper()
		h := health{HealthConfig: HealthConfig{EjectionBackoff: base}}
		if got := h.backoff(doublings); got != want {
			t.Errorf("%v doubled %d times: got %v, want %v", base, doublings, got, want)
		}
	}
	f(5*time.Second, 0, 5*time.Second)
	f(5*time.Second, 3, 40*time.Second)
	f(5*time.Second, 6, maxBackoff)
	f(5*time.Second, 1000, maxBackoff)
	f(10*time.Minute, 4, 10*time.Minute)
	f(0, 1000, 0)
}
