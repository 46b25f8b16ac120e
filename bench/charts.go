package bench

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/inferrail/inferrail/simulator/workload"
)

// Chart is a picture under the name that its file gets, without what that ends in.
type Chart struct {
	Name string
	SVG  []byte
}

// Charts draws one comparison: what it has the numbers for. Names begin with name.
func Charts(name string, c *workload.Comparison) []Chart {
	runs := inOrder(c.Runs)
	rows := make([]string, len(runs))
	column := func(f func(*workload.Summary) float64) []float64 {
		values := make([]float64, len(runs))
		for i, r := range runs {
			rows[i], values[i] = r.Policy, f(r)
		}
		return values
	}
	head, foot := describe(c), asked(c)+provenance(c)
	var charts []Chart
	add := func(kind string, svg []byte) { charts = append(charts, Chart{name + "-" + kind, svg}) }

	ttft := bars{title: "Time to first token: " + head, note: "Shorter is better. " + boundNote(c), foot: foot, rows: rows, columns: []barColumn{
		{title: "mean", unit: inMS, values: column(func(s *workload.Summary) float64 { return s.TTFT.Mean })},
		{title: "p50", unit: inMS, values: column(func(s *workload.Summary) float64 { return s.TTFT.P50 })},
		{title: "p99", unit: inMS, values: column(func(s *workload.Summary) float64 { return s.TTFT.P99 })},
	}}
	if c.Bound != nil {
		for i, v := range []float64{c.Bound.TTFT.Mean, c.Bound.TTFT.P50, c.Bound.TTFT.P99} {
			ttft.columns[i].limit, ttft.columns[i].what = v, boundName
		}
	}
	add("ttft", ttft.svg())

	ceiling := 0.0
	for _, r := range runs {
		ceiling = max(ceiling, r.Ceiling)
	}
	reuse := bars{title: "Reuse and balance: " + head, foot: foot, rows: rows,
		note: "Hit rate: longer is better. Hotspot: the busiest replica's work over the mean, 1 is even." + infinite(c),
		columns: []barColumn{
			{title: "hit rate", unit: inPercent, values: column(func(s *workload.Summary) float64 { return s.HitRate }), limit: ceiling, what: "ceiling"},
			{title: "hotspot", values: column(func(s *workload.Summary) float64 { return s.Hotspot })},
		}}
	add("reuse", reuse.svg())

	replicas := replicaChart{title: "Requests per replica: " + head, note: "One column for each replica, one scale for all; the dotted line is the mean.", foot: foot}
	for _, r := range runs {
		replicas.rows = append(replicas.rows, replicaRow{r.Policy, r.Replicas, r.Hotspot})
	}
	add("replicas", replicas.svg())

	distribution := graph{title: "Distribution of the time to first token: " + head, note: "How many of the requests had their first token within a time. Further left is better.", foot: foot,
		x: axis{label: "time to first token", unit: inMS, log: true}, y: axis{label: "requests", unit: inPercent, most: 1}}
	course := graph{title: "Time to first token in the course of the run: " + head, note: "Means of a sixtieth of the run each.", foot: foot,
		x: axis{label: "time", unit: inSeconds}, y: axis{label: "mean time to first token", unit: inMS, log: true}}
	foretold := graph{title: "Predicted and observed time to first token: " + head, foot: foot, diagonal: true,
		x: axis{label: "predicted", unit: inMS, log: true}, y: axis{label: "observed", unit: inMS, log: true}}
	for _, m := range c.Marks {
		course.marks = append(course.marks, graphMark{at: m.Seconds, what: m.What})
	}
	drawn := runs
	if c.Bound != nil {
		drawn = append(slices.Clip(drawn), c.Bound)
	}
	for _, r := range drawn {
		name := r.Policy
		if r == c.Bound {
			name = boundName
		}
		if r.Curves == nil {
			continue
		}
		// What was made elsewhere may have fewer points than there are parts.
		parts := workload.Parts[:min(len(workload.Parts), len(r.Curves.TTFT))]
		distribution.lines = append(distribution.lines, trace{name, r.Curves.TTFT[:len(parts)], parts})
		t := trace{name: name}
		for _, w := range r.Curves.Windows {
			t.x, t.y = append(t.x, w.Seconds), append(t.y, w.TTFT)
		}
		course.lines = append(course.lines, t)
		if p := r.Curves.Predicted; len(p) > 0 && len(foretold.dots) == 0 && name != boundName {
			t := trace{name: name}
			for _, pair := range p {
				t.x, t.y = append(t.x, pair[0]), append(t.y, pair[1])
			}
			foretold.dots = append(foretold.dots, t)
			foretold.note = fmt.Sprintf("Under %s, by the median: %s observed for each predicted, %s off.", name,
				inPercent.write(1/max(r.Prediction, 1e-6)), inPercent.write(r.PredictionError))
			if r.Prediction <= 0 {
				foretold.note = "Under " + name + "."
			}
		}
	}
	if len(distribution.lines) > 0 {
		add("distribution", distribution.svg())
		add("time", course.svg())
	}
	if len(foretold.dots) > 0 {
		add("prediction", foretold.svg())
	}
	if len(c.Capacity) > 0 {
		capacity := bars{title: "Capacity: " + head, foot: foot, columns: []barColumn{
			{title: "requests a second"}, {title: "replicas for the same load"}}}
		capacity.note = fmt.Sprintf("The highest rate at which 99 of 100 requests have their first token in %s and the others in %s each.",
			inMS.write(c.Limits.TTFT), inMS.write(c.Limits.TPOT))
		held := slices.Clone(c.Capacity)
		slices.SortStableFunc(held, func(a, b workload.Capacity) int { return lookOf(a.Policy) - lookOf(b.Policy) })
		for _, h := range held {
			capacity.rows = append(capacity.rows, h.Policy)
			capacity.columns[0].values = append(capacity.columns[0].values, h.Rate)
			capacity.columns[1].values = append(capacity.columns[1].values, h.GPUs)
		}
		add("capacity", capacity.svg())
	}
	return charts
}

// RateCharts draws latency against the rate of requests, for each workload that
// several of the comparisons have served at different rates.
func RateCharts(comparisons []*workload.Comparison) []Chart {
	type fleet struct {
		workload, face, engine string
		replicas               int
	}
	var order []fleet
	groups := map[fleet][]*workload.Comparison{}
	for _, c := range comparisons {
		f := fleet{c.Workload, c.Face, c.Engine, c.Replicas}
		if groups[f] == nil {
			order = append(order, f)
		}
		groups[f] = append(groups[f], c)
	}
	var charts []Chart
	for _, f := range order {
		group := groups[f]
		slices.SortStableFunc(group, func(a, b *workload.Comparison) int { return cmp.Compare(rateOf(a), rateOf(b)) })
		// Other seeds have nearly the same rate.
		if least, most := rateOf(group[0]), rateOf(group[len(group)-1]); !(most > least*1.05) {
			continue
		}
		g := graph{title: fmt.Sprintf("Latency against rate: %s, %d replicas", f.workload, f.replicas), foot: provenance(group[0]),
			note: "99 of 100 requests had their first token in this time. Lower is better, and further right is more load.",
			x:    axis{label: "requests a second"}, y: axis{label: "time to first token, p99", unit: inMS, log: true}}
		if limit := group[0].Limits.TTFT; limit > 0 {
			g.marks = append(g.marks, graphMark{across: true, at: limit, what: "limit " + inMS.write(limit)})
		}
		add := func(name string, s *workload.Summary) {
			i := slices.IndexFunc(g.lines, func(t trace) bool { return t.name == name })
			if i < 0 {
				i = len(g.lines)
				g.lines = append(g.lines, trace{name: name})
			}
			g.lines[i].x, g.lines[i].y = append(g.lines[i].x, s.Rate), append(g.lines[i].y, s.TTFT.P99)
		}
		for _, c := range group {
			for _, r := range inOrder(c.Runs) {
				add(r.Policy, r)
			}
		}
		for _, c := range group {
			if c.Bound != nil {
				add(boundName, c.Bound)
			}
		}
		slices.SortStableFunc(g.lines, func(a, b trace) int { return lookOf(a.name) - lookOf(b.name) })
		charts = append(charts, Chart{slug(fmt.Sprintf("%s-%s-%d-rate", f.workload, f.face, f.replicas)), g.svg()})
	}
	return charts
}

// rateOf is how many requests a second a comparison was served.
func rateOf(c *workload.Comparison) float64 {
	if len(c.Runs) == 0 {
		return 0
	}
	return c.Runs[0].Rate
}

// WriteCharts puts each chart into dir, which it makes.
func WriteCharts(dir string, charts []Chart) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("folder for charts: %w", err)
	}
	for _, c := range charts {
		if err := os.WriteFile(filepath.Join(dir, c.Name+".svg"), c.SVG, 0o644); err != nil {
			return fmt.Errorf("chart %s: %w", c.Name, err)
		}
	}
	return nil
}

// ChartName is what the names of a comparison's charts begin with.
func ChartName(c *workload.Comparison) string {
	name := c.Workload
	if c.Speed != 0 && c.Speed != 1 {
		name += fmt.Sprintf("-x%g", c.Speed)
	}
	return slug(name)
}

// slug is s as a file's name.
func slug(s string) string {
	keep := func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '-'
	}
	s = strings.Trim(strings.Map(keep, s), "-.")
	if s == "" {
		return "comparison"
	}
	return s
}

// describe is a comparison in a few words.
func describe(c *workload.Comparison) string {
	s := c.Workload
	if c.Speed != 0 && c.Speed != 1 {
		s += fmt.Sprintf(" at %gx", c.Speed)
	}
	return s
}

// asked is how many requests there were, for a chart's foot.
func asked(c *workload.Comparison) string {
	if len(c.Runs) == 0 {
		return ""
	}
	s := digits(float64(c.Runs[0].Requests)) + " requests"
	if c.Runs[0].Rate > 0 {
		s += ", " + digits(c.Runs[0].Rate) + " a second"
	}
	return s + "; "
}

// provenance is what a chart's foot says of how the numbers came about.
func provenance(c *workload.Comparison) string {
	var of []string
	if c.Replicas > 0 {
		replicas := fmt.Sprintf("%d replicas", c.Replicas)
		if c.Engine != "" {
			replicas += " of " + c.Engine
		}
		of = append(of, replicas)
	}
	switch c.Face {
	case "virtual":
		of = append(of, "virtual time")
	case "http":
		of = append(of, "over HTTP")
	}
	switch len(c.Seeds) {
	case 0:
	case 1:
		of = append(of, fmt.Sprintf("seed %d", c.Seeds[0]))
	default:
		of = append(of, fmt.Sprintf("medians over %d seeds", len(c.Seeds)))
	}
	return strings.Join(of, ", ")
}

func boundNote(c *workload.Comparison) string {
	if c.Bound == nil {
		return ""
	}
	return "The bound: every replica holds all that was ever computed, and the earliest free one serves."
}

func infinite(c *workload.Comparison) string {
	if c.Infinite <= 0 {
		return ""
	}
	return " A cache that never forgets has " + inPercent.write(c.Infinite) + "."
}
