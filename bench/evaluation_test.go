package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/simulator/workload"
)

// testCompare stands for simulate and compare: it makes numbers up, and fails where the
// test wants it to.
func testCompare(args []string) error {
	line := strings.Join(args, " ")
	file := args[slices.Index(args, "--json")+1]
	switch os.Getenv("TEST_COMPARE_" + strings.ToUpper(arg(args, "--workload"))) {
	case "fail":
		return errors.New("it cannot be done")
	case "garbage":
		return os.WriteFile(file, []byte("garbage"), 0o644)
	}
	policies := []string{"round_robin", "least_request", "lmetric", "cost_model"}
	if strings.Contains(line, "--speed 1.8") {
		policies = []string{"cost_model", "kv_aware", "round_robin"} // by which the default is the best
	}
	c := served(1, policies...)
	c.Workload = arg(args, "--workload") + strings.TrimPrefix(arg(args, "--trace"), "somewhere/")
	if s := arg(args, "--speed"); s != "" {
		fmt.Sscan(s, &c.Speed)
	}
	for i := range c.Runs {
		c.Runs[i].Rate *= c.Speed
		if rate := arg(args, "--rate"); rate != "" {
			fmt.Sscan(rate, &c.Runs[i].Rate)
		}
		c.All = append(c.All, c.Runs[i])
	}
	if slices.Contains(args, "--find-capacity") {
		c.Capacity = []workload.Capacity{{Policy: "round_robin", Rate: 80, GPUs: 8}, {Policy: "cost_model", Rate: 100, GPUs: 6}}
	}
	c.Pooled = 0.34
	doubtful := strings.HasPrefix(line, "bench compare") && arg(args, "--workload") == "w5"
	if doubtful {
		c.Runs[0].Doubts = []string{"the machine was too slow"}
	}
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, b, 0o644); err != nil {
		return err
	}
	if doubtful {
		return errors.New("figures are doubtful")
	}
	return nil
}

// arg is what follows a flag, "" where it is not.
func arg(args []string, flag string) string {
	if i := slices.Index(args, flag); i >= 0 {
		return args[i+1]
	}
	return ""
}

func newEvaluation(t *testing.T) (e *Evaluation, stderr *bytes.Buffer) {
	stderr = new(bytes.Buffer)
	return &Evaluation{Traces: "somewhere", Out: t.TempDir(), Command: []string{thisTest(t), "test-compare"}, Stdout: new(bytes.Buffer), Stderr: stderr}, stderr
}

func thisTest(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

func TestEvaluation(t *testing.T) {
	e, stderr := newEvaluation(t)
	if err := e.Run(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	results := filepath.Join(e.Out, "results", "evaluation")
	report := string(readFile(t, filepath.Join(e.Out, "REPORT.md")))
	checkReport(t, e.Out)

	// What must be in it by the numbers that were made up.
	for _, want := range []string{
		"| p99 TTFT 40 % below round_robin | W1 system prompts, 48/s (60 % of what round_robin can take) |", "## Where the default does not win", "round_robin (", "**Not the best**: mean TTFT: ",
		"Doubtful: round_robin: the machine was too slow", "    inferrail simulate --trace $TRACES/mooncake_conversation_trace.jsonl --speed 1.8 --replicas 8 --profile reference --blocks 4000 --seed 1,2,3\n",
		"![latency against rate](results/evaluation/conversation-rates.svg)", "![latency against rate](results/evaluation/w4-rates.svg)",
		"| p99 TTFT | 24/s | 48/s | 67/s | 76/s | 88/s | 110/s |\n", "; 60 % of what round_robin can take.", "W1 system prompts, 76/s (95 % of what round_robin can take) |", "out of reach: the bound is ", "Beside virtual time, the median TTFT: cost_model 0 % above",
	} {
		if !strings.Contains(report, want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	for g := range plan {
		if !strings.Contains(report, "\n## "+plan[g].title+"\n") {
			t.Errorf("the report lacks the section %q", plan[g].title)
		}
	}
	if strings.Contains(report, "Not measured") || strings.Contains(report, "| ? |") {
		t.Error("something is not measured")
	}
	if strings.Contains(report, "somewhere") || strings.Contains(string(readFile(t, filepath.Join(results, "evaluation.json"))), "somewhere") {
		t.Error("the folder of the traces is in the results")
	}

	// Written anew about the same results it is the same.
	again := *e
	again.Write = true
	if err := again.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(readFile(t, filepath.Join(e.Out, "REPORT.md")), []byte(report)) {
		t.Error("the same results make another report")
	}

	// Nothing is missing, until one of them was found by another command.
	again = *e
	again.Missing = true
	stderr.Reset()
	if err := again.Run(t.Context()); err != nil || stderr.Len() > 0 {
		t.Errorf("%v; has run\n%s", err, stderr)
	}
	meta, err := readEvaluated(results)
	if err != nil {
		t.Fatal(err)
	}
	meta.Runs[slices.IndexFunc(meta.Runs, func(r evaluatee) bool { return r.Name == "w4" })].Command = "inferrail simulate"
	if err := meta.write(results); err != nil {
		t.Fatal(err)
	}
	if err := again.Run(t.Context()); err != nil || !strings.Contains(stderr.String(), "  1/1  w4 ") {
		t.Errorf("%v; has run\n%s", err, stderr)
	}

	// One of them is run again, and the others' numbers stay. One that fails leaves what
	// was found before.
	t.Setenv("TEST_COMPARE_W2", "fail")
	t.Setenv("TEST_COMPARE_W3", "garbage")
	before := readFile(t, filepath.Join(results, "w2.json"))
	e.Only = []string{"w1", "w2", "w3"}
	stderr.Reset()
	err = e.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "2 of 3 experiments have failed") || !strings.Contains(err.Error(), "w2: exit status 1: it cannot be done") ||
		!strings.Contains(err.Error(), "w3: comparison") {
		t.Errorf("%v", err)
	}
	if !bytes.Equal(readFile(t, filepath.Join(results, "w2.json")), before) {
		t.Error("a run that failed has changed what was found before")
	}
	checkReport(t, e.Out)
	if left, _ := filepath.Glob(filepath.Join(results, "*.part")); left != nil {
		t.Errorf("%v are left", left)
	}
}

// What was never measured is said to be.
func TestEvaluationOfPart(t *testing.T) {
	e, stderr := newEvaluation(t)
	e.Only, e.Tiny = []string{"dio", "w6"}, true
	if err := e.Run(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	report := string(readFile(t, filepath.Join(e.Out, "REPORT.md")))
	for _, want := range []string{"## Not measured", "conversation-fast, synthetic", "| mean TTFT within 15 % of the bound | Mooncake synthetic | not measured | ? |", "They say nothing"} {
		if !strings.Contains(report, want) {
			t.Errorf("the report lacks %q:\n%s", want, report)
		}
	}
	checkReport(t, e.Out)
}

func TestEvaluationRefuses(t *testing.T) {
	e, _ := newEvaluation(t)
	e.Only = []string{"w7"}
	if err := e.Run(t.Context()); err == nil || !strings.Contains(err.Error(), `no experiment and no section "w7"; there are traces, conversation,`) {
		t.Errorf("%v", err)
	}
	e.Only, e.Traces = []string{"w1", "conversation"}, ""
	if err := e.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "--traces: name the folder") {
		t.Errorf("%v", err)
	}
}

// The committed report says what the committed results say, and shows charts of them.
func TestReportIsOfResults(t *testing.T) { checkReport(t, ".") }

// checkReport sees that the report in a folder is one about the results there: it is
// what is written about them now, its tables have the numbers of the files, and what it
// links to is there.
func checkReport(t *testing.T, dir string) {
	t.Helper()
	results, report := filepath.Join(dir, evaluationDir), readFile(t, filepath.Join(dir, "REPORT.md"))
	now, charts, err := renderEvaluation(results)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(report, now) {
		t.Errorf("%s is not the report about %s; write it with inferrail bench report --write", filepath.Join(dir, "REPORT.md"), results)
	}
	for _, c := range charts {
		if !bytes.Equal(c.SVG, readFile(t, filepath.Join(results, c.Name+".svg"))) {
			t.Errorf("%s.svg is not the chart of the results", c.Name)
		}
	}
	for _, link := range regexp.MustCompile(`\]\((results/[^)]+)\)`).FindAllSubmatch(report, -1) {
		if _, err := os.Stat(filepath.Join(dir, string(link[1]))); err != nil {
			t.Errorf("a link leads nowhere: %v", err)
		}
	}
	meta, err := readEvaluated(results)
	if err != nil {
		t.Fatal(err)
	}
	if len(meta.Runs) == 0 {
		t.Error("there are no results")
	}
	sections := map[string]string{}
	for _, s := range strings.Split(string(report), "\n### ")[1:] {
		title, text, _ := strings.Cut(s, "\n")
		sections[title] = text
	}
	for _, run := range meta.Runs {
		x := planned(run.Name)
		if x == nil {
			t.Errorf("%s has results and is not planned", run.Name)
			continue
		}
		if run.Command != x.shown() {
			t.Errorf("%s was run as %q and is planned as %q; run it again", run.Name, run.Command, x.shown())
		}
		// By another reader than the one that has written the report.
		var c struct {
			Runs []struct {
				Policy string
				TTFT   struct{ Mean, P50, P99 float64 }
				Hit    float64 `json:"hit_rate"`
			}
		}
		if err := json.Unmarshal(readFile(t, x.file(results)), &c); err != nil {
			t.Fatalf("%s: %v", run.Name, err)
		}
		if x.point {
			for _, s := range c.Runs {
				if want := inMS.write(s.TTFT.P99); !strings.Contains(string(report), "    "+run.Command+"\n") || !strings.Contains(string(report), " | "+want+" |") {
					t.Errorf("%s: the report lacks its command, or %s's p99 of %s", run.Name, s.Policy, want)
				}
			}
			continue
		}
		section, ok := sections[x.title]
		if !ok || !strings.Contains(section, "    "+run.Command+"\n") {
			t.Errorf("%s: no section, or not its command:\n%s", run.Name, section)
		}
		rows := map[string][]string{}
		for line := range strings.Lines(section) {
			if cells := strings.Split(strings.Trim(line, "|\n "), " | "); len(cells) > 9 {
				rows[strings.Trim(cells[0], "*")] = cells
			}
		}
		for _, s := range c.Runs {
			cells := rows[s.Policy]
			if cells == nil {
				t.Errorf("%s: no row of %s: %v", run.Name, s.Policy, slices.Collect(maps.Keys(rows)))
				continue
			}
			for i, ms := range []float64{s.TTFT.Mean, s.TTFT.P50, s.TTFT.P99} {
				if !says(cells[1+i], ms) {
					t.Errorf("%s: %s has %q for %v ms", run.Name, s.Policy, cells[1+i], ms)
				}
			}
			if want := fmt.Sprintf("%.1f %%", s.Hit*100); cells[8] != want {
				t.Errorf("%s: %s has a hit rate of %s, not %s", run.Name, s.Policy, cells[8], want)
			}
		}
	}
}

// says reports that a cell is about a time: to three digits.
func says(cell string, ms float64) bool {
	var v float64
	var unit string
	if _, err := fmt.Sscanf(strings.ReplaceAll(cell, ",", ""), "%g %s", &v, &unit); err != nil {
		return false
	}
	v *= map[string]float64{"ms": 1, "s": 1000, "min": 60_000}[unit]
	return v >= ms*0.994-1e-9 && v <= ms*1.006+1e-9
}

func readFile(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Every target is about something that is measured, and every name is one's.
func TestPlan(t *testing.T) {
	seen := map[string]bool{}
	for g := range plan {
		for i := range plan[g].experiments {
			x := &plan[g].experiments[i]
			if seen[x.name] || x.title == "" || slug(x.name) != x.name {
				t.Errorf("experiment %q: twice, without a title, or no name of a file", x.name)
			}
			seen[x.name] = true
			kinds := strings.Fields("ttft reuse replicas distribution time prediction capacity")
			for _, kind := range x.charts {
				if !slices.Contains(kinds, kind) {
					t.Errorf("experiment %q: no chart %q", x.name, kind)
				}
			}
		}
	}
	for g := range plan {
		for i := range plan[g].experiments {
			x := &plan[g].experiments[i]
			for _, other := range []string{x.capacity, x.twin} {
				if other != "" && planned(other) == nil {
					t.Errorf("experiment %q: no experiment %q", x.name, other)
				}
			}
			if x.capacity != "" && !strings.Contains(planned(x.capacity).args, "--find-capacity") {
				t.Errorf("experiment %q: %s does not find a capacity", x.name, x.capacity)
			}
			if x.point && x.curve == "" {
				t.Errorf("experiment %q is a point of no curve", x.name)
			}
		}
	}
	for _, target := range targets {
		for _, name := range target.on {
			if planned(name) == nil {
				t.Errorf("target %q: no experiment %q", target.what, name)
			}
		}
	}
}

func TestTargets(t *testing.T) {
	run := func(policy string, mean, p99, hit, hotspot float64) workload.Summary {
		return workload.Summary{Policy: policy, Requests: 9, TTFT: workload.Quantiles{Mean: mean, P99: p99}, HitRate: hit, Ceiling: 0.4, Hotspot: hotspot}
	}
	of := func(bound float64, runs ...workload.Summary) *workload.Comparison {
		c := &workload.Comparison{Runs: runs}
		if bound > 0 {
			c.Bound = &workload.Summary{TTFT: workload.Quantiles{Mean: bound}}
		}
		return c
	}
	// The verdict is "" where an experiment does not tell.
	f := func(what string, c *workload.Comparison, want, verdict string) {
		t.Helper()
		i := slices.IndexFunc(targets, func(t target) bool { return strings.HasPrefix(t.what, what) })
		if i < 0 {
			t.Fatalf("no target %q", what)
		}
		said := ""
		got, ok := targets[i].measure(c)
		if ok {
			said = got.verdict()
		}
		if got.measured != want || said != verdict {
			t.Errorf("%s: %q, %q; want %q, %q", what, got.measured, said, want, verdict)
		}
	}
	turns := run("round_robin", 1000, 10_000, 0.1, 1)
	f("97 %", of(0, run("cost_model", 1, 1, 0.389, 1)), "38.9 % of 40.0 %: 97.2 %", "yes")
	f("97 %", of(0, run("cost_model", 1, 1, 0.387, 1)), "38.7 % of 40.0 %: 96.8 %", "**no**")
	f("97 %", of(0, turns), "", "")
	pooled := of(0, run("cost_model", 1, 1, 0.34, 1))
	f("97 % of the reuse of one", pooled, "", "")
	pooled.Pooled = 0.35
	f("97 % of the reuse of one", pooled, "34.0 % of 35.0 %: 97.1 %", "yes")
	f("hotspot", of(0, run("cost_model", 1, 1, 0.4, 1.1)), "1.100", "yes")
	f("hotspot", of(0, run("cost_model", 1, 1, 0.4, 1.101)), "1.101", "**no**")
	f("mean TTFT within", of(400, turns, run("cost_model", 460, 1, 0.4, 1)), "460 ms, bound 400 ms: 15 % above (round_robin is at 2.50x)", "yes")
	f("mean TTFT within", of(400, run("cost_model", 470, 1, 0.4, 1)), "470 ms, bound 400 ms: 17.5 % above", "**no**")
	f("mean TTFT within", of(0, turns, run("cost_model", 460, 1, 0.4, 1)), "", "")
	f("p99 TTFT 40 %", of(0, turns, run("cost_model", 1, 6000, 0.4, 1)), "6 s after 10 s: 40 % below", "yes")
	f("p99 TTFT 40 %", of(0, turns, run("cost_model", 1, 11_000, 0.4, 1)), "11 s after 10 s: 10 % above", "**no**")
	f("p99 TTFT 48 %", of(0, turns, run("cost_model", 1, 5300, 0.4, 1)), "5.3 s after 10 s: 47 % below", "**no**")
	f("p99 TTFT 48 %", of(0, turns), "", "")
	f("as good as", of(0, turns, run("cost_model", 1020, 9000, 0.4, 1)), "mean 2 % above, p99 10 % below", "yes")
	f("as good as", of(0, turns, run("cost_model", 900, 10_500, 0.4, 1)), "mean 10 % below, p99 5 % above", "**no**")
	f("p99 TTFT 40 %", &workload.Comparison{Runs: []workload.Summary{turns, run("cost_model", 1, 6000, 0.4, 1)}, Bound: &workload.Summary{TTFT: workload.Quantiles{P99: 5000}}},
		"6 s after 10 s: 40 % below (the bound: 50 % below)", "yes")
	bounded := func(p99 float64) *workload.Comparison {
		return &workload.Comparison{Runs: []workload.Summary{turns, run("cost_model", 1, 7000, 0.4, 1)}, Bound: &workload.Summary{TTFT: workload.Quantiles{P99: p99}}}
	}
	f("p99 TTFT 40 %", bounded(6000), "7 s after 10 s: 30 % below (the bound: 40 % below)", "**no**")
	f("p99 TTFT 40 %", bounded(6100), "7 s after 10 s: 30 % below (the bound: 39 % below)", "out of reach: the bound is 39 % below")
	pooled.Pooled, pooled.Runs[0].Ceiling = 0.36, 0.35
	f("97 % of the reuse of one", pooled, "34.0 % of 36.0 %: 94.4 %", "**no**")
	pooled.Runs[0].Ceiling = 0.34
	f("97 % of the reuse of one", pooled, "34.0 % of 36.0 %: 94.4 %", "out of reach: the ceiling is at 94.4 %")
	f("as good as", of(0, turns, run("cost_model", 1100, 9000, 0.4, 1)), "mean 10 % above, p99 10 % below", "**no**")
	several := of(0, turns, run("cost_model", 1100, 9000, 0.4, 1))
	several.Runs[0].Spread = workload.Spread{Runs: 3, TTFTMean: [2]float64{950, 1060}}
	several.Runs[1].Spread = workload.Spread{Runs: 3, TTFTMean: [2]float64{1050, 1200}}
	f("as good as", several, "mean 10 % above, p99 10 % below", "yes")
	several.Runs[1].Spread.TTFTMean[0] = 1070
	f("as good as", several, "mean 10 % above, p99 10 % below", "**no**")
	capacity := of(0, turns)
	f("at least one GPU", capacity, "", "")
	capacity.Capacity = []workload.Capacity{{Policy: "round_robin", Rate: 10, GPUs: 8}, {Policy: "cost_model", Rate: 13, GPUs: 6}}
	f("at least one GPU", capacity, "6 instead of 8: 25 % saved", "yes")
	capacity.Capacity[1].GPUs = 7
	f("at least one GPU", capacity, "7 instead of 8: 12.5 % saved", "**no**")
}

func TestLosses(t *testing.T) {
	run := func(policy string, mean, p99, e2e, hit float64) workload.Summary {
		return workload.Summary{Policy: policy, Requests: 9, TTFT: workload.Quantiles{Mean: mean, P99: p99}, E2E: workload.Quantiles{Mean: e2e}, HitRate: hit}
	}
	ours := run("cost_model", 100, 1000, 5000, 0.5)
	f := func(want string, others ...workload.Summary) {
		t.Helper()
		if got := losses(&workload.Comparison{Runs: append(others, ours)}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	f("")
	f("", run("lmetric", 99.5, 2000, 6000, 0.5))
	f("", run("unserved", 0, 0, 0, 0))
	f("mean TTFT: lmetric (10 % below)", run("lmetric", 90, 1000, 5000, 0.5))
	f("p99 TTFT: kv_aware (50 % below), p2c (20 % below); mean E2E: p2c (10 % below)", run("p2c", 100, 800, 4500, 0), run("kv_aware", 100, 500, 5000, 0.5))
	f("tokens not cached: kv_aware (20 % below)", run("kv_aware", 200, 2000, 9000, 0.6))
	median := func(s workload.Summary, p50 float64) workload.Summary {
		s.TTFT.P50 = p50
		return s
	}
	ours = median(ours, 80)
	f("median TTFT: lmetric (10 % below)", median(run("lmetric", 100, 1000, 5000, 0.5), 72))

	// Who refuses more has the easier ones left.
	refusing := func(s workload.Summary, requests, refused int, good float64) workload.Summary {
		s.Requests, s.Refused, s.Good = requests, refused, good
		return s
	}
	ours = refusing(ours, 1000, 20, 0.95)
	f("", refusing(run("round_robin", 50, 500, 2500, 0.6), 1000, 31, 0.94))
	f("mean TTFT: round_robin (50 % below)", refusing(run("round_robin", 50, 1000, 5000, 0.5), 1000, 30, 0.94))
	f("late or refused: round_robin (20 % below)", refusing(run("round_robin", 50, 500, 2500, 0.6), 1000, 31, 0.96))
	ours = refusing(ours, 9, 0, 0)

	// What seeds may have made.
	several := func(s workload.Summary, least, most float64) workload.Summary {
		s.Spread = workload.Spread{Runs: 3, TTFTMean: [2]float64{least, most}}
		return s
	}
	ours = several(ours, 95, 110)
	f("mean TTFT: lmetric (10 % below, seeds differ by more)", several(run("lmetric", 90, 1000, 5000, 0.5), 80, 95))
	f("mean TTFT: lmetric (10 % below)", several(run("lmetric", 90, 1000, 5000, 0.5), 80, 94))
}

func TestFlatten(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		if got := string(flatten([]byte(in))); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
	f("[\n 1,\n 2.5\n]", "[1,2.5]")
	f("[\n [\n  1\n ],\n []\n]", "[\n [1],\n []\n]")
	f(`{"a \" [ 1 ]": "[ 2 ]", "b": [ "c [ 3 ]" ], "d": [`+"\n"+`4 ]}`, `{"a \" [ 1 ]": "[ 2 ]", "b": [ "c [ 3 ]" ], "d": [4]}`)
	f(`["unended`, `["unended"`)
}
