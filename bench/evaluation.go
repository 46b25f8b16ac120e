package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// Evaluation is `inferrail bench report`: it runs the commands of plan, keeps what they
// find in results/evaluation, draws it, and writes REPORT.md about it. Whatever the
// report says comes from these files, so that it can be written anew without a run.
type Evaluation struct {
	Only    []string `placeholder:"NAME" help:"Experiments or sections to run; of the others the report has what was found before."`
	Missing bool     `help:"Run only what there are no results of, or results of another command: to go on after an interruption."`
	Virtual bool     `help:"Run only what runs in virtual time."`
	Write   bool     `help:"Run nothing; write the report about what there is."`
	Tiny    bool     `help:"A few requests of everything, to see that it runs. Such numbers say nothing."`
	Traces  string   `placeholder:"DIR" env:"INFERRAIL_TRACES" help:"Folder of the traces, under the names that they were published with."`
	Out     string   `short:"o" placeholder:"DIR" default:"bench" help:"Folder for REPORT.md and results/evaluation."`

	// Command starts this program; nil is the process's own file.
	Command []string `kong:"-"`
	// Stderr receives the progress, Stdout the names of what was written.
	Stdout io.Writer `kong:"-"`
	Stderr io.Writer `kong:"-"`
}

// evaluated is results/evaluation/evaluation.json: how the others came about.
type evaluated struct {
	Machine Machine     `json:"machine"`
	Tiny    bool        `json:"tiny,omitempty"`
	Runs    []evaluatee `json:"runs"` // by plan's order
}

// evaluatee is how one experiment came about.
type evaluatee struct {
	Name    string  `json:"name"`
	Command string  `json:"command"`
	Date    string  `json:"date"`
	Commit  string  `json:"commit"`
	Seconds float64 `json:"seconds"`
}

// Run runs what is asked for. When one experiment fails the others run nevertheless,
// and the report is of those.
func (e *Evaluation) Run(ctx context.Context) error {
	results := filepath.Join(e.Out, "results", "evaluation")
	if err := os.MkdirAll(results, 0o755); err != nil {
		return fmt.Errorf("folder for results: %w", err)
	}
	meta, err := readEvaluated(results)
	if err != nil {
		return err
	}
	chosen, err := e.chosen(meta)
	if err != nil {
		return err
	}
	if !e.Write && len(chosen) > 0 {
		if meta.Machine, err = describeMachine(ctx); err != nil {
			return err
		}
		meta.Tiny = e.Tiny
	}
	var failed []error
	for i, x := range chosen {
		if e.Write {
			break
		}
		began := time.Now()
		fmt.Fprintf(e.Stderr, "%3d/%d  %-22s ", i+1, len(chosen), x.name)
		if err := e.run(ctx, x, results); err != nil {
			if ctx.Err() != nil {
				fmt.Fprintln(e.Stderr, "interrupted")
				return errors.New("report: interrupted; what was found until then is kept")
			}
			fmt.Fprintf(e.Stderr, "failed: %v\n", err)
			failed = append(failed, fmt.Errorf("%s: %w", x.name, err))
			continue
		}
		seconds := time.Since(began).Seconds()
		fmt.Fprintf(e.Stderr, "%6.1f s\n", seconds)
		meta.note(evaluatee{Name: x.name, Command: x.shown(), Date: began.UTC().Format(time.RFC3339), Commit: meta.Machine.Commit, Seconds: float64(int(seconds*10)) / 10})
		if err := meta.write(results); err != nil {
			return err
		}
	}
	report, charts, err := renderEvaluation(results)
	if err != nil {
		return err
	}
	if err := WriteCharts(results, charts); err != nil {
		return err
	}
	file := filepath.Join(e.Out, "REPORT.md")
	if err := os.WriteFile(file, report, 0o644); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	fmt.Fprintln(e.Stdout, file)
	if failed != nil {
		return fmt.Errorf("%d of %d experiments have failed, and the report lacks them or has what was found before: %w", len(failed), len(chosen), errors.Join(failed...))
	}
	return nil
}

// chosen are the experiments to run, when there are the results of meta.
func (e *Evaluation) chosen(meta *evaluated) (chosen []*experiment, err error) {
	known := map[string]bool{}
	needs := false
	for g := range plan {
		known[plan[g].id] = true
		for i := range plan[g].experiments {
			x := &plan[g].experiments[i]
			known[x.name] = true
			if e.Virtual && x.slow || len(e.Only) > 0 && !slices.Contains(e.Only, x.name) && !slices.Contains(e.Only, plan[g].id) {
				continue
			}
			if e.Missing && slices.ContainsFunc(meta.Runs, func(r evaluatee) bool { return r.Name == x.name && r.Command == x.shown() }) {
				continue
			}
			chosen = append(chosen, x)
			needs = needs || strings.Contains(x.args, "TRACES/")
		}
	}
	for _, name := range e.Only {
		if !known[name] {
			var names []string
			for g := range plan {
				names = append(names, plan[g].id)
				for i := range plan[g].experiments {
					names = append(names, plan[g].experiments[i].name)
				}
			}
			return nil, fmt.Errorf("there is no experiment and no section %q; there are %s", name, strings.Join(names, ", "))
		}
	}
	if needs && !e.Write && e.Traces == "" {
		return nil, errors.New("--traces: name the folder of the traces: mooncake_conversation_trace.jsonl and mooncake_synthetic_trace.jsonl of " +
			"github.com/kvcache-ai/Mooncake (FAST25-release/traces), azure2023_code.csv and azure2023_conv.csv of github.com/Azure/AzurePublicDataset")
	}
	return chosen, nil
}

// run makes one comparison and puts it into dir when it is whole.
func (e *Evaluation) run(ctx context.Context, x *experiment, dir string) error {
	command := e.Command
	if command == nil {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		command = []string{self}
	}
	part := x.file(dir) + ".part"
	defer os.Remove(part)
	args := append(slices.Clone(command[1:]), x.command(e.Traces, e.Tiny)...)
	cmd := exec.CommandContext(ctx, command[0], append(args, "--json", part)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	var said bytes.Buffer
	cmd.Stderr = &said
	failed := cmd.Run()
	if failed != nil {
		failed = fmt.Errorf("%w: %s", failed, bytes.TrimSpace(said.Bytes()))
	}
	c, err := ReadComparison(part)
	switch {
	case failed != nil && (err != nil || !doubtful(c)):
		return failed
	case err != nil:
		return err
	}
	x.thin(c)
	b, err := json.MarshalIndent(c, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(x.file(dir), append(flatten(b), '\n'), 0o644)
}

// doubtful reports that figures should not be relied on. What makes it fails then, but
// the report tells it beside them.
func doubtful(c *workload.Comparison) bool {
	return slices.ContainsFunc(c.Runs, func(s workload.Summary) bool { return len(s.Doubts) > 0 })
}

// thin leaves out of a comparison what neither the report nor its charts show, so that
// it can be committed.
func (x *experiment) thin(c *workload.Comparison) {
	c.All = nil
	shown := slices.ContainsFunc(x.charts, func(kind string) bool {
		return kind == "distribution" || kind == "time" || kind == "prediction"
	})
	for i := range c.Runs {
		if !shown {
			c.Runs[i].Curves = nil
		} else if c.Runs[i].Policy != defaultPolicy && c.Runs[i].Curves != nil {
			c.Runs[i].Curves.Predicted = nil
		}
	}
	if c.Bound != nil && !shown {
		c.Bound.Curves = nil
	}
}

// flatten puts lists of numbers that indented JSON has on many lines on one.
func flatten(b []byte) []byte {
	var out []byte
	for i := 0; i < len(b); i++ {
		out = append(out, b[i])
		switch b[i] {
		case '"': // up to its end
			for i++; i < len(b) && b[i] != '"'; i++ {
				out = append(out, b[i])
				if b[i] == '\\' && i+1 < len(b) {
					i++
					out = append(out, b[i])
				}
			}
			out = append(out, '"')
		case '[':
			if end := i + bytes.IndexAny(b[i:], "]{\""); end > i && b[end] == ']' && !bytes.ContainsRune(b[i+1:end], '[') {
				out = append(append(out, bytes.Join(bytes.Fields(b[i+1:end]), nil)...), ']')
				i = end
			}
		}
	}
	return out
}

func readEvaluated(dir string) (*evaluated, error) {
	m := new(evaluated)
	b, err := os.ReadFile(filepath.Join(dir, "evaluation.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	} else if err != nil {
		return nil, fmt.Errorf("results: %w", err)
	}
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("results: %s: %w", filepath.Join(dir, "evaluation.json"), err)
	}
	return m, nil
}

// note takes an experiment that was run in place of its last time.
func (m *evaluated) note(r evaluatee) {
	m.Runs = slices.DeleteFunc(m.Runs, func(old evaluatee) bool { return old.Name == r.Name })
	m.Runs = append(m.Runs, r)
	order := map[string]int{}
	for g := range plan {
		for i := range plan[g].experiments {
			order[plan[g].experiments[i].name] = len(order)
		}
	}
	slices.SortStableFunc(m.Runs, func(a, b evaluatee) int { return order[a.Name] - order[b.Name] })
}

func (m *evaluated) write(dir string) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "evaluation.json"), append(b, '\n'), 0o644)
}
