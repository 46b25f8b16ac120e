package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// GatewayReport is results/gateway.json.
type GatewayReport struct {
	Date           string       `json:"date"`
	Took           float64      `json:"took_seconds"`
	Machine        Machine      `json:"machine"`
	Note           string       `json:"note"`
	Reps           int          `json:"repetitions"`
	Seconds        float64      `json:"seconds_per_measurement"`
	RequestBytes   int          `json:"request_body_bytes"`
	AnswerBytes    int          `json:"answer_body_bytes"`
	Engines        int          `json:"engines"`
	Connections    int          `json:"open_loop_connections_at_most"`
	Callers        int          `json:"closed_loop_connections"`
	OtherLoadLimit float64      `json:"other_load_limit_percent"`
	Rows           []GatewayRow `json:"medians"`
	Absent         []Absent     `json:"left_out"`
	Runs           []CallRun    `json:"runs"`
}

// GatewayRow is one line of the table: medians over a contestant's runs at a
// rate, or in the closed loop, which is rate 0.
type GatewayRow struct {
	Contestant string  `json:"contestant"`
	Rate       int     `json:"rate"`
	Runs       int     `json:"runs"` // that the medians are taken over
	Answers    float64 `json:"answers_per_second"`
	P50        float64 `json:"p50_us"`
	P99        float64 `json:"p99_us"`
	P999       float64 `json:"p999_us"`
	// CPU is the contestant's own; PerCore how many answers a second of it gave.
	CPU     float64 `json:"cpu_us_per_request"`
	PerCore float64 `json:"answers_per_cpu_second,omitempty"`
	Wakeups float64 `json:"wakeups_per_request"`
	PeakMiB float64 `json:"peak_mib,omitempty"`
	Busy    float64 `json:"busy_percent"`
	Other   float64 `json:"other_load_percent"`
	// Above direct in the same repetition; nil without it. CPUAbove is that of
	// all that take part.
	P50Above   *float64 `json:"p50_us_above_direct"`
	P99Above   *float64 `json:"p99_us_above_direct"`
	P999Above  *float64 `json:"p999_us_above_direct"`
	CPUAbove   *float64 `json:"cpu_us_per_request_above_direct"`
	Bad        int      `json:"bad"`
	Lost       int      `json:"lost"`
	Unanswered uint64   `json:"unanswered"`
	Noisy      bool     `json:"noisy,omitempty"`  // no run was quiet
	Behind     bool     `json:"behind,omitempty"` // in any of them
}

// comparison is a run and, where there is one, the direct run of the same
// repetition at the same rate.
type comparison struct{ run, direct *CallRun }

func (c comparison) quiet() bool { return !c.run.Noisy && (c.direct == nil || !c.direct.Noisy) }

// summarise fills Rows from Runs.
func (r *GatewayReport) summarise() {
	r.Rows = nil
	var rates []int
	for i := range r.Runs {
		if !slices.Contains(rates, r.Runs[i].Rate) {
			rates = append(rates, r.Runs[i].Rate)
		}
	}
	for _, rate := range rates {
		for _, c := range gateways() {
			if row, ok := r.row(c.name, rate); ok {
				r.Rows = append(r.Rows, row)
			}
		}
	}
}

func (r *GatewayReport) row(contestant string, rate int) (row GatewayRow, ok bool) {
	row = GatewayRow{Contestant: contestant, Rate: rate, Noisy: true}
	var all, quiet []comparison
	compared := true
	for i := range r.Runs {
		m := &r.Runs[i]
		if m.Rate != rate || m.Contestant != contestant {
			continue
		}
		c := comparison{run: m}
		if contestant != "direct" {
			c.direct = r.direct(rate, m.Rep)
		}
		compared = compared && c.direct != nil
		all = append(all, c)
		if c.quiet() {
			quiet = append(quiet, c)
		}
		row.Bad += m.Bad
		row.Lost += m.Lost
	}
	if len(all) == 0 {
		return row, false
	}
	if len(quiet) > 0 {
		all, row.Noisy = quiet, false
	}
	for _, c := range all {
		row.Unanswered += c.run.Unanswered
	}
	over := func(f func(*CallRun) float64) float64 {
		values := make([]float64, len(all))
		for i, c := range all {
			values[i] = f(c.run)
		}
		return median(values)
	}
	above := func(f func(*CallRun) float64) *float64 {
		if !compared {
			return nil
		}
		values := make([]float64, len(all))
		for i, c := range all {
			values[i] = f(c.run) - f(c.direct)
		}
		m := median(values)
		return &m
	}
	p50 := func(m *CallRun) float64 { return float64(m.Latency.P50) }
	p99 := func(m *CallRun) float64 { return float64(m.Latency.P99) }
	p999 := func(m *CallRun) float64 { return float64(m.Latency.P999) }
	total := func(m *CallRun) float64 { return m.CPU.Total }
	row.Runs = len(all)
	row.Behind = slices.ContainsFunc(all, func(c comparison) bool { return c.run.Behind })
	row.Answers = over((*CallRun).perSecond)
	row.P50, row.P50Above = over(p50), above(p50)
	row.P99, row.P99Above = over(p99), above(p99)
	row.P999, row.P999Above = over(p999), above(p999)
	row.CPUAbove = above(total)
	row.CPU = over(func(m *CallRun) float64 { return m.CPU.Proxy })
	if row.CPU > 0 {
		row.PerCore = 1e6 / row.CPU
	}
	row.Wakeups = over(func(m *CallRun) float64 { return m.Wakeups })
	row.PeakMiB = over(func(m *CallRun) float64 { return float64(m.PeakKiB) / 1024 })
	row.Busy = over(func(m *CallRun) float64 { return m.Busy })
	row.Other = over(func(m *CallRun) float64 { return m.Other })
	return row, true
}

func (r *GatewayReport) direct(rate, rep int) *CallRun {
	for i := range r.Runs {
		if m := &r.Runs[i]; m.Contestant == "direct" && m.Rate == rate && m.Rep == rep {
			return m
		}
	}
	return nil
}

// writeTable prints the rows for people.
func (r *GatewayReport) writeTable(w io.Writer) error {
	m := &r.Machine
	fmt.Fprintf(w, "%s, %d CPUs, Linux %s, %s\n", m.CPU, m.CPUs, m.Kernel, r.Date)
	fmt.Fprintf(w, "%d-byte requests, %d-byte answers, %d engines; medians over repetitions (%d) of %.3g s\n%s\n",
		r.RequestBytes, r.AnswerBytes, r.Engines, r.Reps, r.Seconds, r.Note)
	open, closed := newColumns(), newColumns()
	fmt.Fprintln(open, "\nrate\tcontestant\tp50\tadded\tp99\tadded\tp99.9\tadded\town CPU\tabove direct\twake-ups\tother load\t")
	fmt.Fprintln(open, "\t\tus\tus\tus\tus\tus\tus\tus/request\tus/request\t/request\t%\t")
	fmt.Fprintf(closed, "\nclosed loop of %d\tanswers\town CPU\tper core\tabove direct\tp50\tp99\tpeak\tother load\t\n", r.Callers)
	fmt.Fprintln(closed, "\t/s\tus/request\trequests/s\tus/request\tus\tus\tMiB\t%\t")
	saturated := false
	for i := range r.Rows {
		row := &r.Rows[i]
		own, perCore, wakeups, peak := "-", "-", "-", "-"
		if row.CPU > 0 {
			own, perCore = fmt.Sprintf("%.1f", row.CPU), fmt.Sprintf("%.0f", row.PerCore)
			wakeups, peak = fmt.Sprintf("%.2f", row.Wakeups), fmt.Sprintf("%.0f", row.PeakMiB)
		}
		if row.Rate == 0 {
			saturated = true
			fmt.Fprintf(closed, "%s\t%.0f\t%s\t%s\t%s\t%.0f\t%.0f\t%s\t%.1f\t  %s\n", row.Contestant, row.Answers, own, perCore,
				signed(row.CPUAbove, 1), row.P50, row.P99, peak, row.Other, row.marks())
			continue
		}
		fmt.Fprintf(open, "%d/s\t%s\t%.0f\t%s\t%.0f\t%s\t%.0f\t%s\t%s\t%s\t%s\t%.1f\t  %s\n", row.Rate, row.Contestant,
			row.P50, signed(row.P50Above, 0), row.P99, signed(row.P99Above, 0), row.P999, signed(row.P999Above, 0),
			own, signed(row.CPUAbove, 1), wakeups, row.Other, row.marks())
	}
	if err := open.writeTo(w); err != nil {
		return err
	}
	if saturated {
		if err := closed.writeTo(w); err != nil {
			return err
		}
	}
	var rest strings.Builder
	any := func(mark string) bool {
		return slices.ContainsFunc(r.Rows, func(row GatewayRow) bool { return strings.Contains(row.marks(), mark) })
	}
	if any("noisy") {
		fmt.Fprintf(&rest, "noisy: every run, or the direct one beside it, had over %g %% of other load\n", r.OtherLoadLimit)
	}
	if any("behind") {
		rest.WriteString("behind: a run answered less than 97 % of the calls in its time\n")
	}
	if any("saturated") {
		rest.WriteString("saturated: the CPUs were over 90 % busy, so latencies are those of a queue\n")
	}
	for _, a := range r.Absent {
		fmt.Fprintf(&rest, "%s was left out: %s\n", a.Contestant, a.Reason)
	}
	_, err := io.WriteString(w, rest.String())
	return err
}

// marks says what is wrong with a row.
func (row *GatewayRow) marks() string {
	var marks []string
	if row.Bad+row.Lost > 0 {
		marks = append(marks, fmt.Sprintf("BAD %d LOST %d", row.Bad, row.Lost))
	}
	if row.Unanswered > 0 {
		marks = append(marks, fmt.Sprintf("%d unanswered", row.Unanswered))
	}
	if row.Noisy {
		marks = append(marks, "noisy")
	}
	if row.Behind {
		marks = append(marks, "behind")
	}
	if row.Busy > 90 && row.Rate > 0 {
		marks = append(marks, "saturated")
	}
	return strings.Join(marks, ", ")
}

// appendChart appends results/gateway.svg: the added 99th percentile at each
// rate, and what a core gives.
func (r *GatewayReport) appendChart(dst []byte) []byte {
	var charts []chart
	starred := false
	for i := 0; i < len(r.Rows); {
		rate := r.Rows[i].Rate
		c := chart{title: fmt.Sprintf("p99 above direct at %d requests/s, us", rate)}
		if rate == 0 {
			c.title = "Requests/s per core at saturation"
		}
		for ; i < len(r.Rows) && r.Rows[i].Rate == rate; i++ {
			row := &r.Rows[i]
			value := row.PerCore
			if rate > 0 {
				if row.P99Above == nil {
					continue
				}
				value = *row.P99Above
			} else if value == 0 {
				continue // direct
			}
			star := ""
			if row.marks() != "" {
				star, starred = " *", true
			}
			ours := row.Contestant == "packet" || row.Contestant == "copy"
			c.bars = append(c.bars, bar{row.Contestant, fmt.Sprintf("%.0f%s", value, star), value, ours})
		}
		if len(c.bars) > 0 {
			charts = append(charts, c)
		}
	}
	foot := fmt.Sprintf("%s, %d CPUs, Linux %s, %.10s", r.Machine.CPU, r.Machine.CPUs, r.Machine.Kernel, r.Date)
	if starred {
		foot += " (* gateway.json says what disturbed it)"
	}
	return appendSVG(dst, charts, foot)
}
