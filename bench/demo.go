package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// Demo is `inferrail demo`: agents' sessions, whose prompts grow with every turn, over a
// few simulated engines of which one becomes slow in the middle. Every policy has a
// gateway and engines of its own, and all serve the same load at the same time. Who
// makes it starts the gateways and engines, calls Run once, and stops them afterwards.
type Demo struct {
	Sessions int           `default:"8" help:"Sessions, of agents that each wait for an answer before they go on."`
	Turns    int           `default:"12" help:"Requests of each session."`
	Pace     time.Duration `default:"1500ms" help:"Time from one turn of a session to the next, if the answer does not take longer."`
	Slow     float64       `default:"8" help:"How many times slower one engine becomes."`
	Seed     uint64        `default:"1" help:"Seed of the load."`
	JSON     string        `name:"json" placeholder:"FILE" help:"Write the results as JSON, which bench plot draws too; - is the standard output."`

	// Fleets are the policies' gateways, all with as many engines.
	Fleets []DemoFleet `kong:"-"`
	// Stdout receives tables and words. On a terminal the table is drawn anew.
	Stdout   io.Writer `kong:"-"`
	Terminal bool      `kong:"-"`
}

// DemoFleet is one policy's gateway, and the simulated engines behind it, whose names
// there are e0, e1 and so on.
type DemoFleet struct {
	Policy, URL string
	Engines     []string // URLs
}

// DemoReport is what a demo writes as JSON. Its comparison is of the whole run.
type DemoReport struct {
	workload.Comparison
	// Seconds is after how many one engine of each policy becomes slow.
	Seconds float64 `json:"throttled_after_seconds"`
	// Policies are in the order in which they were given.
	Policies []DemoResult `json:"policies"`
}

// DemoResult is what came of one policy. Times are means in milliseconds, from when a
// turn was to be sent; Before and After are of turns sent before and after the engine
// became slow.
type DemoResult struct {
	Policy string `json:"policy"`
	// Throttled is the number of the engine that becomes slow: that on which most
	// sessions are at the time, so that each policy is hit where it hurts most.
	Throttled int       `json:"throttled"`
	Before    DemoTimes `json:"before"`
	After     DemoTimes `json:"after"`
	// Switches is how often a session's next turn went to another engine, for one
	// session, and OnSlow what part of the turns after the throttle the slow engine
	// has served.
	Switches float64 `json:"switches"`
	OnSlow   float64 `json:"on_slow"`
	HitRate  float64 `json:"hit_rate"`
	Failed   int     `json:"failed"`
}

// DemoTimes are means over so many turns.
type DemoTimes struct {
	Turns int     `json:"turns"`
	TTFT  float64 `json:"ttft"`
	E2E   float64 `json:"e2e"`
}

const (
	// demoLimit is when a demo gives up on answers, whatever they wait for.
	demoLimit = 55 * time.Second

	demoSystem, demoResult, demoAnswer = 1200, 900, 32 // tokens
)

// demoRace is a demo while it runs.
type demoRace struct {
	*Demo
	workload *workload.Workload
	began    time.Time
	throttle time.Duration
	runners  []*demoRunner
}

// demoRunner is one policy of it.
type demoRunner struct {
	fleet *DemoFleet
	load  *load

	// mu guards what follows, which sessions write and the table reads.
	mu       sync.Mutex
	records  []workload.Record // that are over
	on       []string          // each session's last engine, "" for none
	flying   int
	switches int
	slow     int    // the engine that is, -1 while none is
	why      string // an example of a failure
}

// Run runs it. It fails when something does not answer that has to.
func (d *Demo) Run(ctx context.Context) error {
	switch {
	case d.Sessions < 1 || d.Sessions > 64:
		return fmt.Errorf("--sessions %d: want 1 to 64", d.Sessions)
	case d.Turns < 2 || d.Turns > 24:
		return fmt.Errorf("--turns %d: want 2 to 24", d.Turns)
	case d.Pace < 0 || d.Pace*time.Duration(d.Turns) > demoLimit/2:
		return fmt.Errorf("--pace %v: want at least 0, and with %d turns at most %v", d.Pace, d.Turns, demoLimit/2/time.Duration(d.Turns))
	case !(d.Slow >= 1 && d.Slow <= 1000):
		return fmt.Errorf("--slow %v: want 1 to 1000", d.Slow)
	}
	if err := CanWrite(d.JSON); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	r := &demoRace{Demo: d, workload: d.workload(), throttle: d.Pace * time.Duration(d.Turns) * 2 / 5}
	for i := range d.Fleets {
		endpoint, err := newEndpoint(EndpointOptions{URL: d.Fleets[i].URL}, demoLimit)
		if err != nil {
			return err
		}
		defer endpoint.close()
		runner := &demoRunner{fleet: &d.Fleets[i], on: make([]string, d.Sessions), slow: -1}
		runner.load = &load{endpoint: endpoint, workload: r.workload, most: d.Sessions, body: func(dst []byte, i int) (string, []byte, error) {
			q := &r.workload.Requests[i]
			return q.Path(), workload.AppendBody(dst, q, workload.BodyOptions{Model: "sim", Index: i, Stream: true, Exact: true, Say: true}), nil
		}}
		r.runners = append(r.runners, runner)
	}
	if err := r.run(ctx); err != nil {
		return err
	}
	report := r.report()
	for i := range report.Runs {
		if s := &report.Runs[i]; s.Failed+s.Refused == s.Requests {
			return fmt.Errorf("demo: no turn of %s has an answer: %s", s.Policy, or(r.runners[i].why, "none came in time"))
		}
	}
	r.conclude(report)
	if d.JSON == "" {
		return nil
	}
	b, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if d.JSON == "-" {
		_, err = d.Stdout.Write(b)
		return err
	}
	if err := os.WriteFile(d.JSON, b, 0o644); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return nil
}

// workload is each session's turns after another. A turn's prompt is the system prompt,
// which all share, and all that was said before in its session.
func (d *Demo) workload() *workload.Workload {
	random := rand.New(rand.NewPCG(d.Seed, 0))
	id := func() uint64 { return random.Uint64()>>1 | 1 }
	w := &workload.Workload{Name: "demo"}
	system := workload.Part{ID: id(), Tokens: demoSystem, Role: "system"}
	for s := range d.Sessions {
		parts := []workload.Part{system}
		begin := time.Duration(float64(d.Pace) * (float64(s) + random.Float64()) / float64(d.Sessions))
		for k := range d.Turns {
			// From half to one and a half times as much.
			parts = append(parts, workload.Part{ID: id(), Tokens: demoResult/2 + random.IntN(demoResult), Role: "user"})
			r := workload.Request{At: begin + time.Duration(k)*d.Pace, Session: s + 1, Turn: k, Parts: slices.Clone(parts), Output: demoAnswer, Answer: id()}
			w.Requests = append(w.Requests, r)
			parts = append(parts, workload.Part{ID: r.Answer, Tokens: r.Output, Role: "assistant"})
		}
	}
	return w
}

// run returns when all sessions are over, or nothing more is waited for.
func (r *demoRace) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, demoLimit)
	defer cancel()
	fmt.Fprintf(r.Stdout, "%d sessions of agents, %d turns each, over %d simulated engines. Each policy has engines of its own, and all\n"+
		"serve the same load at the same time. In %v the engine on which most sessions are becomes %gx slower.\n\n",
		r.Sessions, r.Turns, len(r.Fleets[0].Engines), r.throttle, r.Slow)
	r.began = time.Now()
	var running sync.WaitGroup
	for _, runner := range r.runners {
		runner.load.began = r.began
		for s := range r.Sessions {
			running.Go(func() { r.session(ctx, runner, s) })
		}
	}
	broken := make(chan error, 1)
	running.Go(func() {
		if err := r.slowDown(ctx); err != nil {
			broken <- err
			cancel()
		}
	})
	over, drawn := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(drawn)
		r.draw(over)
	}()
	running.Wait()
	close(over)
	<-drawn
	select {
	case err := <-broken:
		return err
	default:
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return errors.New("demo: interrupted")
	}
	return nil
}

// session asks one turn after the other, each when it is due and the one before it has
// its answer: an agent cannot go on earlier, so a turn's time counts from then.
func (r *demoRace) session(ctx context.Context, runner *demoRunner, s int) {
	for k := range r.Turns {
		x, err := runner.load.prepare(s*r.Turns + k)
		if err != nil {
			runner.note(s, &exchange{record: workload.Record{Failure: "not sent"}, detail: err.Error()})
			return
		}
		if wait := x.record.Scheduled - runner.load.now(); wait > 0 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
		x.record.Scheduled = runner.load.now()
		runner.mu.Lock()
		runner.flying++
		runner.mu.Unlock()
		x.run(ctx)
		runner.note(s, x)
		if ctx.Err() != nil {
			return
		}
	}
}

// note takes a turn that is over.
func (r *demoRunner) note(session int, x *exchange) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flying--
	if n := len(x.replica); n > 0 {
		if r.on[session] != "" && r.on[session] != x.replica {
			r.switches++
		}
		r.on[session] = x.replica
		x.record.Replica = engineNumber(x.replica)
	}
	if x.record.Failure != "" {
		r.why = x.record.Failure + ": " + x.detail
	}
	r.records = append(r.records, x.record)
}

// slowDown makes one engine of each fleet slow when it is time.
func (r *demoRace) slowDown(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(time.Until(r.began.Add(r.throttle))):
	}
	for _, runner := range r.runners {
		if err := runner.slowDown(ctx, r.Slow); err != nil {
			return fmt.Errorf("demo: an engine of %s cannot be made slow: %w", runner.fleet.Policy, err)
		}
	}
	return nil
}

func (r *demoRunner) slowDown(ctx context.Context, factor float64) error {
	r.mu.Lock()
	sessions := make([]int, len(r.fleet.Engines))
	for _, name := range r.on {
		if n := engineNumber(name); n >= 0 && n < len(sessions) {
			sessions[n]++
		}
	}
	slow := slices.Index(sessions, slices.Max(sessions))
	r.slow = slow
	r.mu.Unlock()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.fleet.Engines[slow]+"/sim/faults", strings.NewReader(fmt.Sprintf(`{"slow":%g}`, factor)))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(io.LimitReader(resp.Body, 300)); resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, body)
	}
	return nil
}

// engineNumber is the number in an engine's name, -1 where there is none.
func engineNumber(name string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(name, "e"))
	if err != nil {
		return -1
	}
	return n
}

// draw shows the table until the race is over: redrawn on a terminal, else a few times.
func (r *demoRace) draw(over <-chan struct{}) {
	every := 5 * time.Second
	if r.Terminal {
		every = 200 * time.Millisecond
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	lines := 0
	for last := false; ; {
		table := r.table()
		if r.Terminal {
			if lines > 0 {
				fmt.Fprintf(r.Stdout, "\x1b[%dA", lines)
			}
			table = strings.ReplaceAll(table, "\n", "\x1b[K\n")
		} else if lines > 0 {
			table = "\n" + table
		}
		io.WriteString(r.Stdout, table) // a demo that nobody can read goes on
		lines = strings.Count(table, "\n")
		if last {
			return
		}
		select {
		case <-ticker.C:
		case <-over:
			last = true
		}
	}
}

// table is how it stands.
func (r *demoRace) table() string {
	now := time.Since(r.began)
	state := fmt.Sprintf("the engine with most sessions becomes slow in %.0f s", (r.throttle - now).Seconds())
	if now >= r.throttle {
		state = fmt.Sprintf("the engine in brackets is %gx slower since %.0f s", r.Slow, (now - r.throttle).Seconds())
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%4.0f s  %s\n", now.Seconds(), state)
	fmt.Fprintf(&b, "  %-14s %9s %8s %12s %12s %10s   %s\n", "policy", "turns", "waiting", "mean before", "mean after", "switches", "where sessions are")
	for _, runner := range r.runners {
		runner.mu.Lock()
		before, after := demoTimes(runner.records, 0, r.throttle), demoTimes(runner.records, r.throttle, time.Hour)
		fmt.Fprintf(&b, "  %-14s %5d/%-3d %8d %12s %12s %10.1f   %s\n", runner.fleet.Policy, len(runner.records), len(r.workload.Requests),
			runner.flying, before, after, float64(runner.switches)/float64(r.Sessions), runner.placesLocked())
		runner.mu.Unlock()
	}
	return b.String()
}

// placesLocked are the engines of all sessions in a few signs: the number of each, and
// what was slowed down in brackets.
func (r *demoRunner) placesLocked() string {
	var b strings.Builder
	for _, name := range r.on {
		switch n := engineNumber(name); {
		case n < 0:
			b.WriteString(" . ")
		case n == r.slow:
			fmt.Fprintf(&b, "[%d]", n)
		default:
			fmt.Fprintf(&b, " %d ", n)
		}
	}
	return strings.TrimRight(b.String(), " ")
}

// demoTimes are the means of the turns that were sent in a time.
func demoTimes(records []workload.Record, from, until time.Duration) (t DemoTimes) {
	for i := range records {
		if r := &records[i]; r.Failure == "" && r.Scheduled >= from && r.Scheduled < until {
			t.Turns++
			t.TTFT += float64(r.First-r.Scheduled) / 1e6
			t.E2E += float64(r.End-r.Scheduled) / 1e6
		}
	}
	if t.Turns > 0 {
		t.TTFT /= float64(t.Turns)
		t.E2E /= float64(t.Turns)
	}
	return t
}

// String is the mean time of an answer.
func (t DemoTimes) String() string {
	if t.Turns == 0 {
		return "-"
	}
	return inMS.write(t.E2E)
}

// report is what came of it.
func (r *demoRace) report() *DemoReport {
	report := &DemoReport{Seconds: r.throttle.Seconds(), Comparison: workload.Comparison{
		Workload: r.workload.Name, Face: "http", Replicas: len(r.Fleets[0].Engines), Engine: "vllm", Speed: 1, Seeds: []uint64{r.Seed},
		Marks: []workload.Mark{{Seconds: r.throttle.Seconds(), What: fmt.Sprintf("one engine is %gx slower", r.Slow)}}}}
	for _, runner := range r.runners {
		s := workload.Summarize(runner.records, r.workload, workload.SummaryOptions{Policy: runner.fleet.Policy, Replicas: report.Replicas})
		s.Curves = workload.NewCurves(runner.records, 0)
		report.Runs = append(report.Runs, s)
		result := DemoResult{Policy: runner.fleet.Policy, Throttled: runner.slow, Before: demoTimes(runner.records, 0, r.throttle), After: demoTimes(runner.records, r.throttle, time.Hour),
			Switches: float64(runner.switches) / float64(r.Sessions), HitRate: s.HitRate, Failed: len(r.workload.Requests) - len(runner.records)}
		for i := range runner.records {
			switch c := &runner.records[i]; {
			case c.Failure != "":
				result.Failed++
			case c.Scheduled >= r.throttle && c.Replica == runner.slow:
				result.OnSlow += 1 / float64(result.After.Turns)
			}
		}
		report.Policies = append(report.Policies, result)
	}
	return report
}

// conclude says it in words.
func (r *demoRace) conclude(report *DemoReport) {
	w := r.Stdout
	fmt.Fprintf(w, "\nAfter an engine became %gx slower (means):\n\n", r.Slow)
	fmt.Fprintf(w, "  %-14s %12s %12s %12s %14s %10s\n", "policy", "first token", "whole answer", "on slow one", "switches", "hit rate")
	for i := range report.Policies {
		p := &report.Policies[i]
		fmt.Fprintf(w, "  %-14s %12s %12s %12s %14.1f %10s", p.Policy, inMS.write(p.After.TTFT), inMS.write(p.After.E2E),
			inPercent.write(p.OnSlow), p.Switches, inPercent.write(p.HitRate))
		if p.Failed > 0 {
			fmt.Fprintf(w, "  %d turns without an answer, such as %s", p.Failed, or(r.runners[i].why, "those that were not reached in time"))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	ours := slices.IndexFunc(report.Policies, func(p DemoResult) bool { return p.Policy == defaultPolicy })
	if ours < 0 || report.Policies[ours].After.Turns == 0 {
		return
	}
	best := true
	for i := range report.Policies {
		p := &report.Policies[i]
		if i == ours || p.After.Turns == 0 {
			continue
		}
		change := 1 - report.Policies[ours].After.E2E/p.After.E2E
		verdict := fmt.Sprintf("%s less than", inPercent.write(change))
		if change < 0 {
			best = false
			verdict = fmt.Sprintf("%s more than", inPercent.write(-change))
		}
		fmt.Fprintf(w, "With %s an answer took %s with %s.\n", defaultPolicy, verdict, p.Policy)
	}
	if best {
		fmt.Fprintf(w, "%s sends a session where its prompt is cached, notices that an engine has become slow, and moves away from it.\n", defaultPolicy)
	}
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
