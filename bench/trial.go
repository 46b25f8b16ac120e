package bench

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// Trial asks a gateway or an engine for what a workload asks, in an open loop, and says
// how it was served: inferrail bench run. Its fields are command line flags (see
// cmd/inferrail). Run is called once.
type Trial struct {
	EndpointOptions `embed:""`
	Traffic         `embed:""`
	Asking          `embed:""`

	Model string `short:"m" placeholder:"NAME" help:"The model to ask; by default the only one there is."`
	Seed  uint64 `default:"1" help:"The same seed asks the same at the same times."`
	Say   bool   `help:"Tell simulated engines what to say, so that later turns go on with their answers."`

	JSON    string `name:"json" placeholder:"FILE" type:"path" help:"Write the summary here."`
	Records string `placeholder:"FILE" type:"path" help:"Write what became of each request here, a line of JSON each."`

	// Stdout receives the table, Stderr the progress. Nil is the process's own.
	Stdout io.Writer `kong:"-"`
	Stderr io.Writer `kong:"-"`
}

// Asking is how a load asks, whoever is asked.
type Asking struct {
	Stream    bool          `default:"true" negatable:"" help:"Ask for streams; without, first tokens come with the last."`
	Exact     bool          `default:"true" negatable:"" help:"Ask for exactly as many tokens as the workload says, with min_tokens and ignore_eos; OpenAI knows neither."`
	Timeout   time.Duration `default:"10m" help:"A request that takes longer than this, from sending to the last byte, has failed."`
	MaxAtOnce int           `default:"10000" help:"Requests on their way at one time. One more is not sent, has failed, and makes the run doubtful."`
	MaxLag    time.Duration `default:"10ms" help:"A run is doubtful of which more than one in a hundred requests was sent later than this after it was due."`
	MaxBusy   float64       `default:"0.95" help:"A run is doubtful during which this machine's CPUs were busier than this, or a hypervisor took 5 % of them; 1 is never."`
}

// TrialReport is what a Trial writes as JSON.
type TrialReport struct {
	workload.Summary
	Workload string          `json:"workload"`
	URL      string          `json:"url"`
	Model    string          `json:"model"`
	Seed     uint64          `json:"seed"`
	Limits   workload.Limits `json:"limits"`
	// Names are those of Replicas.
	Names []string `json:"replica_names,omitempty"`
	// Why has an example for each way to fail.
	Why map[string]string `json:"why,omitempty"`
	// Untold: no answer says how much of its prompt was cached, and HitRate is 0.
	Untold bool `json:"cached_untold,omitempty"`
	// AtOnce is how many requests were on their way at one time.
	AtOnce int     `json:"most_at_once"`
	Busy   float64 `json:"machine_busy"`
	// Interrupted: not all requests were sent.
	Interrupted bool `json:"interrupted,omitempty"`
}

// errDoubtful is the error of a run whose figures should not be relied on.
var errDoubtful = errors.New("the figures should not be relied on")

// Run asks, prints a table and writes the results. It fails when nothing was served,
// and, after the table and the results, when they are doubtful.
func (t *Trial) Run(ctx context.Context) error {
	if t.Stdout == nil {
		t.Stdout = os.Stdout
	}
	if t.Stderr == nil {
		t.Stderr = os.Stderr
	}
	if err := t.Asking.check(); err != nil {
		return err
	}
	// A long run must not end in a file that cannot be written.
	for _, file := range []string{t.JSON, t.Records} {
		if err := CanWrite(file); err != nil {
			return err
		}
	}
	e, err := newEndpoint(t.EndpointOptions, t.Timeout)
	if err != nil {
		return err
	}
	defer e.close()
	w, err := t.Traffic.load(t.Seed)
	if err != nil {
		return err
	}
	if t.Model == "" {
		if t.Model, err = e.onlyModel(ctx); err != nil {
			return err
		}
	}
	l := t.Asking.newLoad(e, w, workload.BodyOptions{Model: t.Model, Say: t.Say})
	fmt.Fprintf(t.Stderr, "bench run: %d requests of %s within %v\n", len(w.Requests), w.Name, w.Requests[len(w.Requests)-1].At.Round(time.Millisecond))
	if len(w.Throttles) > 0 {
		fmt.Fprintf(t.Stderr, "bench run: %s makes engines slow for a while; that is up to you here, compare does it by itself\n", w.Name)
	}
	result, err := l.runShown(ctx, t.Stderr, "bench run")
	if err != nil {
		return err
	}
	warm := t.Warm.of(w.Requests)
	report := TrialReport{
		Summary:  workload.Summarize(result.records, w, workload.SummaryOptions{Limits: t.limits(), Warm: warm}),
		Workload: w.Name, URL: t.URL, Model: t.Model, Seed: t.Seed, Limits: t.limits(),
		Names: result.replicas, Why: result.why, AtOnce: result.mostAtOnce, Untold: !result.told, Busy: result.busy, Interrupted: result.interrupted,
	}
	report.Doubts, report.Curves = t.doubts(result), workload.NewCurves(result.records, warm)
	if err := report.writeTable(t.Stdout); err != nil {
		return err
	}
	if t.JSON != "" {
		if err := writeJSON(t.JSON, &report); err != nil {
			return err
		}
	}
	if t.Records != "" {
		if err := writeRecords(t.Records, result); err != nil {
			return err
		}
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted after %d of %d requests", len(result.records), len(w.Requests))
	case report.Requests > 0 && report.Failed+report.Refused == report.Requests:
		return errors.New("no request was served")
	case len(report.Doubts) > 0:
		return errDoubtful
	}
	return nil
}

func (a *Asking) check() error {
	switch {
	case a.Timeout <= 0:
		return fmt.Errorf("--timeout %v: want a time above 0", a.Timeout)
	case a.MaxAtOnce < 1:
		return fmt.Errorf("--max-at-once %d: want at least 1", a.MaxAtOnce)
	case a.MaxLag <= 0:
		return fmt.Errorf("--max-lag %v: want a time above 0", a.MaxLag)
	case !(a.MaxBusy > 0):
		return fmt.Errorf("--max-busy %v: want a part above 0, 1 for all of the CPUs", a.MaxBusy)
	}
	return nil
}

// newLoad makes a load of w, whose bodies are as b says.
func (a *Asking) newLoad(e *endpoint, w *workload.Workload, b workload.BodyOptions) *load {
	b.Stream, b.Exact = a.Stream, a.Exact
	return &load{endpoint: e, workload: w, most: a.MaxAtOnce, body: func(dst []byte, i int) (string, []byte, error) {
		one, r := b, &w.Requests[i]
		one.Index = i
		return r.Path(), workload.AppendBody(dst, r, one), nil
	}}
}

// runShown runs the load and shows its progress.
func (l *load) runShown(ctx context.Context, w io.Writer, name string) (*loaded, error) {
	// Much of what a load makes is garbage soon, and its collection takes time from the
	// schedule.
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	p := startProgress(w, name, func() (done, of int64, note string) {
		over, failed := l.over.Load(), l.failed.Load()
		note = fmt.Sprintf("%d on their way", l.sent.Load()-over)
		if failed > 0 {
			note += fmt.Sprintf(", %d not served", failed)
		}
		return over, int64(len(l.workload.Requests)), note
	})
	defer p.stop()
	return l.run(ctx, time.Now())
}

// doubts are why a run is doubtful.
func (a *Asking) doubts(l *loaded) (doubts []string) {
	var lags []float64
	many := 0
	for i := range l.records {
		r := &l.records[i]
		lags = append(lags, ms(r.Sent-r.Scheduled))
		if r.Failure == tooMany {
			many++
		}
	}
	if q := workload.QuantilesOf(lags); q.P99 > ms(a.MaxLag) {
		doubts = append(doubts, fmt.Sprintf("this machine sent too late: one in a hundred requests over %.1f ms after it was due, the limit is %v", q.P99, a.MaxLag))
	}
	if many > 0 {
		doubts = append(doubts, fmt.Sprintf("%d requests were not sent, because %d were on their way already", many, a.MaxAtOnce))
	}
	if l.busy > a.MaxBusy {
		doubts = append(doubts, fmt.Sprintf("this machine's CPUs were %.0f %% busy, the limit is %.0f %%: what was measured is the wait for them, too", 100*l.busy, 100*a.MaxBusy))
	}
	if l.stolen > 0.05 && a.MaxBusy < 1 {
		doubts = append(doubts, fmt.Sprintf("the hypervisor took %.0f %% of this machine's CPUs", 100*l.stolen))
	}
	return doubts
}

// recordLine is a Record as it is written: times in milliseconds from the workload's
// beginning, and the replica's name.
type recordLine struct {
	Index           int       `json:"index"`
	Scheduled       float64   `json:"scheduled_ms"`
	Sent            float64   `json:"sent_ms"`
	First           float64   `json:"first_ms,omitzero"`
	End             float64   `json:"end_ms,omitzero"`
	Input           int       `json:"input"`
	Cached          int       `json:"cached"`
	Output          int       `json:"output"`
	Predicted       float64   `json:"predicted_ms,omitzero"`
	PredictedCached int       `json:"predicted_cached,omitzero"`
	Replica         string    `json:"replica,omitzero"`
	Failure         string    `json:"failure,omitzero"`
	Gaps            []float64 `json:"gaps_ms,omitempty"`
}

func writeRecords(path string, l *loaded) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b := bufio.NewWriterSize(f, 1<<16)
	out := json.NewEncoder(b)
	for i := range l.records {
		r := &l.records[i]
		line := recordLine{Index: r.Index, Scheduled: ms(r.Scheduled), Sent: ms(r.Sent), First: ms(r.First), End: ms(r.End),
			Input: r.Input, Cached: r.Cached, Output: r.Output, Predicted: ms(r.Predicted), PredictedCached: r.PredictedCached, Failure: r.Failure}
		if r.Replica >= 0 {
			line.Replica = l.replicas[r.Replica]
		}
		for _, g := range r.Gaps {
			line.Gaps = append(line.Gaps, ms(g))
		}
		if err := out.Encode(&line); err != nil {
			return err
		}
	}
	return b.Flush()
}

// CanWrite tells why a file cannot be written, without changing what is in it. "" and
// the standard output, -, can.
func CanWrite(file string) error {
	if file == "" || file == "-" {
		return nil
	}
	_, absent := os.Stat(file)
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	if absent != nil {
		defer os.Remove(file)
	}
	return f.Close()
}

func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// writeTable prints the report for people.
func (r *TrialReport) writeTable(to io.Writer) error {
	w := bufio.NewWriter(to)
	fmt.Fprintf(w, "%s at %s, model %s\n", r.Workload, r.URL, r.Model)
	fmt.Fprintf(w, "%d requests in %.1f s, %.2f/s: %d served, %d refused, %d failed; %d on their way at most\n\n",
		r.Requests, r.Seconds, r.Rate, r.Requests-r.Refused-r.Failed, r.Refused, r.Failed, r.AtOnce)
	fmt.Fprintf(w, "%-22s %9s %9s %9s %9s %9s\n", "milliseconds", "mean", "p50", "p90", "p99", "max")
	for _, row := range []struct {
		name string
		q    workload.Quantiles
	}{{"to the first token", r.TTFT}, {"per further token", r.TPOT}, {"between two tokens", r.ITL}, {"to the last token", r.E2E}, {"sent after it was due", r.Lag}} {
		if row.q != (workload.Quantiles{}) {
			fmt.Fprintf(w, "%-22s %9.2f %9.2f %9.2f %9.2f %9.2f\n", row.name, row.q.Mean, row.q.P50, row.q.P90, row.q.P99, row.q.Max)
		}
	}
	switch {
	case r.Requests == r.Refused+r.Failed:
		fmt.Fprintln(w)
	case r.Untold:
		fmt.Fprint(w, "\nno answer says how much of its prompt was cached; vLLM does with --enable-prompt-tokens-details, SGLang with --enable-cache-report\n")
	default:
		fmt.Fprintf(w, "\n%.1f %% of the prompts' tokens were cached\n", 100*r.HitRate)
	}
	fmt.Fprintf(w, "%.1f %% were good, %.2f/s: first token within %v, %v for each further one\n", 100*r.Good, r.Goodput,
		milliseconds(r.Limits.TTFT), milliseconds(r.Limits.TPOT))
	if r.Prediction > 0 {
		fmt.Fprintf(w, "first tokens were predicted %.2f times as late as they came, and %.0f %% off (medians)\n", r.Prediction, 100*r.PredictionError)
	}
	if len(r.Names) > 0 {
		fmt.Fprintf(w, "served by")
		for i, name := range r.Names {
			n := 0
			if i < len(r.Replicas) {
				n = r.Replicas[i]
			}
			fmt.Fprintf(w, "  %s %d", name, n)
		}
		fmt.Fprintf(w, "; the busiest computed %.2f times the mean\n", r.Hotspot)
	}
	for _, why := range failuresOf(r.Failures) {
		fmt.Fprintf(w, "%5d  %s, such as: %.200s\n", r.Failures[why], why, r.Why[why])
	}
	for _, doubt := range r.Doubts {
		fmt.Fprintf(w, "DOUBTFUL: %s\n", doubt)
	}
	return w.Flush()
}

func milliseconds(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }

// failuresOf are the ways to fail, the most frequent first.
func failuresOf(failures map[string]int) []string {
	var names []string
	for name := range failures {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(failures[b], failures[a]), cmp.Compare(a, b))
	})
	return names
}
