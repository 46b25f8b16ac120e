package bench

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/inferrail/inferrail/simulator/workload"
)

//go:embed report.md.tmpl
var reportText string

// evaluationReport is what report.md.tmpl is filled with.
type evaluationReport struct {
	Tiny     bool
	Machine  Machine
	Commits  []string
	Dates    string
	Seconds  float64
	Targets  []targetRow
	Met, Of  int
	Beyond   int      // of the targets that are not met: nobody could
	Overview []string // lines of a table
	Lost     []string
	Groups   []reportGroup
	Missing  []string
}

type targetRow struct{ What, Where, Measured, Met string }

type reportGroup struct {
	ID, Title, About string
	Curves           []reportCurve
	Experiments      []reportExperiment
}

// reportCurve is latency against rate: a chart, and its points.
type reportCurve struct {
	Title, Chart string
	Table        []string
	Commands     []string // of points that have no section
}

type reportExperiment struct {
	Name, Title, Command string
	Facts                string
	Table                []string
	Charts               []string
	Verdict              string
	Doubts               []string
}

// renderEvaluation makes the report and its charts from the results in dir, and from
// nothing else: the same results give the same report.
func renderEvaluation(dir string) (report []byte, charts []Chart, err error) {
	meta, err := readEvaluated(dir)
	if err != nil {
		return nil, nil, err
	}
	r := &evaluationReport{Tiny: meta.Tiny, Machine: meta.Machine}
	comparisons := map[string]*workload.Comparison{}
	for i := range meta.Runs {
		run := &meta.Runs[i]
		x := planned(run.Name)
		if x == nil {
			continue
		}
		c, err := ReadComparison(x.file(dir))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, nil, err
		}
		comparisons[run.Name] = c
		r.Seconds += run.Seconds
		if !slices.Contains(r.Commits, run.Commit) {
			r.Commits = append(r.Commits, run.Commit)
		}
		switch date := run.Date[:min(len(run.Date), 10)]; {
		case r.Dates == "":
			r.Dates = date
		case !strings.HasSuffix(r.Dates, date):
			r.Dates = r.Dates[:10] + " to " + date
		}
	}
	for g := range plan {
		section := reportGroup{ID: plan[g].id, Title: plan[g].title, About: plan[g].about}
		for i := range plan[g].experiments {
			x := &plan[g].experiments[i]
			c := comparisons[x.name]
			if c == nil {
				r.Missing = append(r.Missing, x.name)
				continue
			}
			shown := reportExperiment{Name: x.name, Title: x.title, Facts: asked(c) + provenance(c), Table: policyTable(c), Verdict: verdict(c)}
			if l := shareOf(x, comparisons); l != "" {
				shown.Facts += "; " + l
			}
			if ours := runOf(c, defaultPolicy); ours != nil && ours.Ahead > 0 {
				shown.Facts += fmt.Sprintf("; the default had %s of all prompts' tokens computed ahead", percent(ours.Ahead))
			}
			shown.Facts += "."
			if twin := comparisons[x.twin]; twin != nil {
				shown.Verdict += agreement(c, twin)
			}
			for _, run := range meta.Runs {
				if run.Name == x.name {
					shown.Command = run.Command
				}
			}
			for i := range c.Runs {
				for _, d := range c.Runs[i].Doubts {
					shown.Doubts = append(shown.Doubts, c.Runs[i].Policy+": "+d)
				}
			}
			if x.point {
				continue
			}
			titled := *c
			titled.Workload, titled.Speed = x.title, 1 // the title says how fast it is
			for _, chart := range Charts(x.name, &titled) {
				if kind := strings.TrimPrefix(chart.Name, x.name+"-"); slices.Contains(x.charts, kind) {
					charts = append(charts, chart)
					shown.Charts = append(shown.Charts, chart.Name)
				}
			}
			section.Experiments = append(section.Experiments, shown)
			if lost := losses(c); lost != "" {
				r.Lost = append(r.Lost, x.title+": "+lost)
			}
		}
		for _, name := range curvesOf(plan[g].experiments) {
			curve, chart := reportedCurve(name, comparisons)
			if curve == nil {
				continue
			}
			charts = append(charts, chart)
			section.Curves = append(section.Curves, *curve)
		}
		if len(section.Experiments)+len(section.Curves) > 0 {
			r.Groups = append(r.Groups, section)
		}
	}
	for i := range targets {
		for _, name := range targets[i].on {
			x := planned(name)
			row := targetRow{What: targets[i].what, Where: x.title, Measured: "not measured", Met: "?"}
			if l := shareOf(x, comparisons); l != "" {
				row.Where += " (" + l + ")"
			}
			if c := comparisons[name]; c != nil {
				if f, ok := targets[i].measure(c); ok {
					row.Measured, row.Met = f.measured, f.verdict()
					switch {
					case f.met:
						r.Met++
					case f.beyond != "":
						r.Beyond++
					}
				}
			}
			r.Of++
			r.Targets = append(r.Targets, row)
		}
	}
	r.Overview = overview(comparisons)
	t, err := template.New("report").Funcs(template.FuncMap{"seconds": inSeconds.write, "join": strings.Join}).Parse(reportText)
	if err != nil {
		return nil, nil, fmt.Errorf("BUG: report.md.tmpl: %w", err)
	}
	var b bytes.Buffer
	if err := t.Execute(&b, r); err != nil {
		return nil, nil, fmt.Errorf("BUG: report.md.tmpl: %w", err)
	}
	return b.Bytes(), charts, nil
}

// curvesOf are the names of the curves that have points in a section, which is theirs.
func curvesOf(experiments []experiment) (of []string) {
	for i := range experiments {
		if x := &experiments[i]; x.point && !slices.Contains(of, x.curve) {
			of = append(of, x.curve)
		}
	}
	return of
}

// reportedCurve is the curve of a name, nil where there are not two points of it.
func reportedCurve(name string, comparisons map[string]*workload.Comparison) (*reportCurve, Chart) {
	var of []*workload.Comparison
	curve := &reportCurve{Chart: name + "-rates"}
	for g := range plan {
		for i := range plan[g].experiments {
			x := &plan[g].experiments[i]
			c := comparisons[x.name]
			if x.curve != name || c == nil {
				continue
			}
			of = append(of, c)
			if curve.Title == "" || !x.point {
				curve.Title = c.Workload
			}
			if x.point {
				curve.Commands = append(curve.Commands, x.shown())
			}
		}
	}
	slices.SortStableFunc(of, func(a, b *workload.Comparison) int { return cmp.Compare(rateOf(a), rateOf(b)) })
	// Only who is at most of the points has a line.
	most := map[string]int{}
	for _, c := range of {
		for i := range c.Runs {
			most[c.Runs[i].Policy]++
		}
	}
	var points []*workload.Comparison
	for _, c := range of {
		c := *c
		c.Runs = slices.DeleteFunc(slices.Clone(c.Runs), func(s workload.Summary) bool { return most[s.Policy] <= len(of)/2 })
		points = append(points, &c)
	}
	charts := RateCharts(points)
	if len(charts) != 1 {
		return nil, Chart{}
	}
	charts[0].Name = curve.Chart
	head, line := []string{"p99 TTFT"}, []string{"---"}
	for _, c := range points {
		head, line = append(head, digits(rateOf(c))+"/s"), append(line, "---:")
	}
	curve.Table = []string{row(head...), row(line...)}
	var policies []string
	for _, c := range points {
		for _, s := range inOrder(c.Runs) {
			if !slices.Contains(policies, s.Policy) {
				policies = append(policies, s.Policy)
			}
		}
	}
	for _, p := range policies {
		cells := []string{p}
		if p == defaultPolicy {
			cells[0] = "**" + p + "**"
		}
		for _, c := range points {
			if s := runOf(c, p); s != nil {
				cells = append(cells, inMS.write(s.TTFT.P99))
			} else {
				cells = append(cells, "")
			}
		}
		curve.Table = append(curve.Table, row(cells...))
	}
	return curve, charts[0]
}

// shareOf says how much of what round_robin can take an experiment's rate is, "" where
// that is not known.
func shareOf(x *experiment, comparisons map[string]*workload.Comparison) string {
	c, found := comparisons[x.name], comparisons[x.capacity]
	if c == nil || found == nil {
		return ""
	}
	turns := capacityOf(found, "round_robin")
	if turns == nil || turns.Rate <= 0 {
		return ""
	}
	return fmt.Sprintf("%.0f %% of what round_robin can take", 100*rateOf(c)/turns.Rate)
}

// agreement says how far an experiment is from the same requests in virtual time, by
// the median time to first token.
func agreement(c, virtual *workload.Comparison) string {
	var of []string
	for _, s := range inOrder(c.Runs) {
		if v := runOf(virtual, s.Policy); v != nil && v.TTFT.P50 > 0 {
			of = append(of, fmt.Sprintf("%s %s", s.Policy, change(s.TTFT.P50/v.TTFT.P50-1)))
		}
	}
	if of == nil {
		return ""
	}
	return " Beside virtual time, the median TTFT: " + strings.Join(of, ", ") + "."
}

// percent is a part in columns: all with one digit behind the point.
func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

// row joins the cells of one line of a table.
func row(cells ...string) string { return "| " + strings.Join(cells, " | ") + " |" }

// policyTable is a comparison as a table, a policy a line.
func policyTable(c *workload.Comparison) []string {
	refused, failed, capacity := false, false, len(c.Capacity) > 0
	for i := range c.Runs {
		refused = refused || c.Runs[i].Refused > 0
		failed = failed || c.Runs[i].Failed > 0
	}
	head := []string{"policy", "TTFT mean", "p50", "p99", "of bound", "TPOT p99", "E2E mean", "E2E p99", "hit rate", "hotspot", "good"}
	if refused {
		head = append(head, "refused")
	}
	if failed {
		head = append(head, "failed")
	}
	if capacity {
		head = append(head, "requests/s", "replicas")
	}
	line := make([]string, len(head))
	for i := range line {
		line[i] = "---:"
	}
	line[0] = "---"
	table := []string{row(head...), row(line...)}
	add := func(s *workload.Summary, name string) {
		of := "-"
		if c.Bound != nil && c.Bound.TTFT.Mean > 0 {
			of = fmt.Sprintf("%.2fx", s.TTFT.Mean/c.Bound.TTFT.Mean)
		}
		hotspot, good := fmt.Sprintf("%.2f", s.Hotspot), percent(s.Good)
		if s == c.Bound {
			hotspot, good = "-", "-"
		}
		cells := []string{name, inMS.write(s.TTFT.Mean), inMS.write(s.TTFT.P50), inMS.write(s.TTFT.P99), of, inMS.write(s.TPOT.P99),
			inMS.write(s.E2E.Mean), inMS.write(s.E2E.P99), percent(s.HitRate), hotspot, good}
		if refused {
			cells = append(cells, digits(float64(s.Refused)))
		}
		if failed {
			cells = append(cells, digits(float64(s.Failed)))
		}
		if capacity {
			rate, gpus := "-", "-"
			if h := capacityOf(c, s.Policy); h != nil && s != c.Bound && s != c.Shared {
				rate, gpus = digits(h.Rate), digits(h.GPUs)
			}
			cells = append(cells, rate, gpus)
		}
		table = append(table, row(cells...))
	}
	for _, s := range inOrder(c.Runs) {
		name := s.Policy
		if name == defaultPolicy {
			name = "**" + name + "**"
		}
		add(s, name)
	}
	if c.Shared != nil {
		add(c.Shared, "_shared_")
	}
	if c.Bound != nil {
		add(c.Bound, "_bound_")
	}
	return table
}

// measures are what policies are compared by. Smaller is better. Ends are the least and
// the most of several seeds, 0 of one. served: it is of those requests alone that were, so
// that who refuses more of them has the easier ones.
var measures = []struct {
	name   string
	of     func(*workload.Summary) float64
	ends   func(*workload.Spread) [2]float64
	served bool
}{
	{"mean TTFT", func(s *workload.Summary) float64 { return s.TTFT.Mean }, func(s *workload.Spread) [2]float64 { return s.TTFTMean }, true},
	{"median TTFT", func(s *workload.Summary) float64 { return s.TTFT.P50 }, func(s *workload.Spread) [2]float64 { return s.TTFTP50 }, true},
	{"p99 TTFT", func(s *workload.Summary) float64 { return s.TTFT.P99 }, func(s *workload.Spread) [2]float64 { return s.TTFTP99 }, true},
	{"mean E2E", func(s *workload.Summary) float64 { return s.E2E.Mean }, func(s *workload.Spread) [2]float64 { return s.E2EMean }, true},
	{"tokens not cached", func(s *workload.Summary) float64 { return 1 - s.HitRate },
		func(s *workload.Spread) [2]float64 { return [2]float64{1 - s.HitRate[1], 1 - s.HitRate[0]} }, true},
	{"late or refused", func(s *workload.Summary) float64 { return 1 - s.Good },
		func(s *workload.Spread) [2]float64 { return [2]float64{} }, false},
}

// near is how much better another policy has to be for the default to have lost, as a
// part: less is chance.
const near = 0.01

// losses names the policies that are better than the default, by what; "" when none is.
func losses(c *workload.Comparison) string {
	ours := runOf(c, defaultPolicy)
	if ours == nil {
		return ""
	}
	var lost []string
	for _, m := range measures {
		var better []string
		for _, s := range inOrder(c.Runs) {
			if m.served && refusesMore(s, ours) {
				continue
			}
			if !m.served && m.of(ours)-m.of(s) < near {
				continue // of a few among all a part says nothing
			}
			if s != ours && s.Requests > 0 && m.of(s) > 0 && m.of(s) < m.of(ours)*(1-near) {
				by := change(m.of(s)/m.of(ours) - 1)
				if s.Spread.Runs > 1 && ours.Spread.Runs > 1 && m.served && m.ends(&s.Spread)[1] >= m.ends(&ours.Spread)[0] {
					by += ", seeds differ by more"
				}
				better = append(better, fmt.Sprintf("%s (%s)", s.Policy, by))
			}
		}
		if better != nil {
			lost = append(lost, m.name+": "+strings.Join(better, ", "))
		}
	}
	return strings.Join(lost, "; ")
}

// refusesMore reports that a policy has refused more of the requests than another, by more
// than chance.
func refusesMore(s, than *workload.Summary) bool {
	return float64(s.Refused-than.Refused) > near*float64(s.Requests)
}

// verdict is what a comparison comes to in a sentence or two.
func verdict(c *workload.Comparison) string {
	ours, theirs := runOf(c, defaultPolicy), runOf(c, "round_robin")
	if ours == nil || theirs == nil || theirs.TTFT.Mean <= 0 || theirs.TTFT.P99 <= 0 {
		return ""
	}
	s := fmt.Sprintf("The default's mean TTFT is %s %s's, its p99 %s.", change(ours.TTFT.Mean/theirs.TTFT.Mean-1), theirs.Policy, change(ours.TTFT.P99/theirs.TTFT.P99-1))
	if lost := losses(c); lost != "" {
		s += " **Not the best**: " + lost + "."
	}
	return s
}

// overview is a table of mean times to first token over the bound, or where there is no
// bound over the best: an experiment a line, a policy a column. The best is emphasised.
func overview(comparisons map[string]*workload.Comparison) []string {
	var policies []string
	for _, c := range comparisons {
		for _, s := range inOrder(c.Runs) {
			if !slices.Contains(policies, s.Policy) {
				policies = append(policies, s.Policy)
			}
		}
	}
	slices.SortFunc(policies, func(a, b string) int {
		if d := lookOf(a) - lookOf(b); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	line := []string{"---"}
	for range policies {
		line = append(line, "---:")
	}
	table := []string{row(append([]string{"mean TTFT, in bounds"}, policies...)...), row(line...)}
	for g := range plan {
		for i := range plan[g].experiments {
			x := &plan[g].experiments[i]
			c := comparisons[x.name]
			if c == nil || c.Bound == nil || c.Bound.TTFT.Mean <= 0 || x.point || plan[g].id == "admission" || plan[g].id == "capacity" {
				continue
			}
			least := 0.0
			for k := range c.Runs {
				if m := c.Runs[k].TTFT.Mean; m > 0 && (least == 0 || m < least) {
					least = m
				}
			}
			cells := []string{x.title}
			for _, p := range policies {
				s := runOf(c, p)
				switch {
				case s == nil || s.TTFT.Mean <= 0:
					cells = append(cells, "")
				case s.TTFT.Mean <= least*(1+near):
					cells = append(cells, "**"+fmt.Sprintf("%.2f**", s.TTFT.Mean/c.Bound.TTFT.Mean))
				default:
					cells = append(cells, fmt.Sprintf("%.2f", s.TTFT.Mean/c.Bound.TTFT.Mean))
				}
			}
			table = append(table, row(cells...))
		}
	}
	if len(table) == 2 {
		return nil
	}
	return table
}

// evaluationDir is where the committed results are, from this package's folder.
var evaluationDir = filepath.Join("results", "evaluation")
