package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// Report is results/datapath.json.
type Report struct {
	Date           string        `json:"date"`
	Took           float64       `json:"took_seconds"`
	Machine        Machine       `json:"machine"`
	Reps           int           `json:"repetitions"`
	Seconds        float64       `json:"seconds_per_measurement"`
	ChunkBytes     int           `json:"chunk_bytes"`
	ResponseChunks int           `json:"chunks_per_response"`
	OtherLoadLimit float64       `json:"other_load_limit_percent"`
	Rows           []Row         `json:"medians"`
	Runs           []Measurement `json:"runs"`
}

// Machine is where and with what the figures were measured.
type Machine struct {
	CPU       string            `json:"cpu"`
	CPUs      int               `json:"cpus"`
	MemoryMiB uint64            `json:"memory_mib"`
	Kernel    string            `json:"kernel"`
	Arch      string            `json:"arch"`
	Commit    string            `json:"commit"`
	Versions  map[string]string `json:"versions"`
}

// Row is one line of the table: medians over a contestant's runs under a load.
type Row struct {
	Load       Load    `json:"load"`
	Contestant string  `json:"contestant"`
	Runs       int     `json:"runs"` // that the medians are taken over
	CPU        float64 `json:"cpu_us_per_chunk"`
	P50        float64 `json:"p50_us"`
	P99        float64 `json:"p99_us"`
	Wakeups    float64 `json:"wakeups_per_1000_chunks"`
	PeakMiB    float64 `json:"peak_mib"`
	Busy       float64 `json:"busy_percent"`
	Other      float64 `json:"other_load_percent"`
	// Above direct under the same load; nil without a direct run.
	CPUAbove *float64 `json:"cpu_us_per_chunk_above_direct"`
	P50Above *float64 `json:"p50_us_above_direct"`
	P99Above *float64 `json:"p99_us_above_direct"`
	// AgentWakeups is the agent's own count; nil for others.
	AgentWakeups *float64 `json:"agent_wakeups_per_1000_chunks"`
	Tier         string   `json:"tier,omitempty"`
	Bad          int      `json:"bad"`
	Lost         int      `json:"lost"`
	Noisy        bool     `json:"noisy,omitempty"`  // no run was quiet
	Behind       bool     `json:"behind,omitempty"` // in any of them
}

// summarise fills Rows from Runs.
func (r *Report) summarise() {
	r.Rows = nil
	var loads []Load
	for i := range r.Runs {
		if !slices.Contains(loads, r.Runs[i].Load) {
			loads = append(loads, r.Runs[i].Load)
		}
	}
	for _, load := range loads {
		var direct *Row
		for _, c := range contestants {
			row, ok := r.row(load, c.name)
			if !ok {
				continue
			}
			if direct != nil {
				above := func(v, base float64) *float64 { v -= base; return &v }
				row.CPUAbove = above(row.CPU, direct.CPU)
				row.P50Above = above(row.P50, direct.P50)
				row.P99Above = above(row.P99, direct.P99)
			}
			r.Rows = append(r.Rows, row)
			if c.command == nil {
				direct = &row
			}
		}
	}
}

func (r *Report) row(load Load, contestant string) (row Row, ok bool) {
	row = Row{Load: load, Contestant: contestant, Noisy: true}
	var runs, quiet []*Measurement
	for i := range r.Runs {
		m := &r.Runs[i]
		if m.Load != load || m.Contestant != contestant {
			continue
		}
		runs = append(runs, m)
		if !m.Noisy {
			quiet = append(quiet, m)
		}
		row.Bad += m.Bad
		row.Lost += m.Lost
		if m.Agent != nil {
			row.Tier = m.Agent.Tier
		}
	}
	if len(runs) == 0 {
		return row, false
	}
	if len(quiet) > 0 {
		runs, row.Noisy = quiet, false
	}
	over := func(f func(*Measurement) float64) float64 {
		values := make([]float64, len(runs))
		for i, m := range runs {
			values[i] = f(m)
		}
		return median(values)
	}
	row.Runs = len(runs)
	row.Behind = slices.ContainsFunc(runs, func(m *Measurement) bool { return m.Behind })
	row.CPU = over(func(m *Measurement) float64 { return m.CPU.Total })
	row.P50 = over(func(m *Measurement) float64 { return float64(m.Latency.P50) })
	row.P99 = over(func(m *Measurement) float64 { return float64(m.Latency.P99) })
	row.Wakeups = over(func(m *Measurement) float64 { return m.Wakeups })
	row.PeakMiB = over(func(m *Measurement) float64 { return float64(m.PeakKiB) / 1024 })
	row.Busy = over(func(m *Measurement) float64 { return m.Busy })
	row.Other = over(func(m *Measurement) float64 { return m.Other })
	if row.Tier != "" {
		// The agent counts a response when it ends, so chunks are its own too.
		own := over(func(m *Measurement) float64 {
			return 1000 * float64(*m.Agent.Wakeups) / max(float64(*m.Agent.Chunks), 1)
		})
		row.AgentWakeups = &own
	}
	return row, true
}

// median of at least one value; values are sorted.
func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

// writeTable prints the rows for people.
func (r *Report) writeTable(w io.Writer) error {
	m := &r.Machine
	fmt.Fprintf(w, "%s, %d CPUs, Linux %s, %s\n", m.CPU, m.CPUs, m.Kernel, r.Date)
	fmt.Fprintf(w, "%d-byte chunks, %d to a response; medians over repetitions (%d) of %.3g s\n\n", r.ChunkBytes, r.ResponseChunks, r.Reps, r.Seconds)
	t := newColumns()
	fmt.Fprintln(t, "load\tcontestant\tCPU/chunk\tabove direct\tp50\tadded\tp99\tadded\twake-ups\tagent's count\tpeak\tother load\t")
	fmt.Fprintln(t, "\t\tus\tus\tus\tus\tus\tus\tper 1,000\tper 1,000\tMiB\t%\t")
	for i := range r.Rows {
		row := &r.Rows[i]
		wakeups, peak := "-", "-"
		if row.PeakMiB > 0 {
			wakeups, peak = fmt.Sprintf("%.0f", row.Wakeups), fmt.Sprintf("%.0f", row.PeakMiB)
		}
		fmt.Fprintf(t, "%s\t%s\t%.2f\t%s\t%.0f\t%s\t%.0f\t%s\t%s\t%s\t%s\t%.1f\t  %s\n", row.Load, row.Contestant,
			row.CPU, signed(row.CPUAbove, 2), row.P50, signed(row.P50Above, 0), row.P99, signed(row.P99Above, 0),
			wakeups, plainOr(row.AgentWakeups), peak, row.Other, row.marks())
	}
	if err := t.writeTo(w); err != nil {
		return err
	}
	_, err := io.WriteString(w, r.legend())
	return err
}

// columns is a table on its way to people: cells end with a tab and are
// aligned at their right.
type columns struct {
	*tabwriter.Writer
	text *bytes.Buffer
}

func newColumns() columns {
	text := new(bytes.Buffer)
	return columns{tabwriter.NewWriter(text, 0, 0, 2, ' ', tabwriter.AlignRight), text}
}

// writeTo writes the lines without the blanks at their end. Nothing may be
// added after it.
func (c columns) writeTo(w io.Writer) error {
	if err := c.Flush(); err != nil {
		return err
	}
	for line := range bytes.Lines(c.text.Bytes()) {
		if _, err := fmt.Fprintf(w, "%s\n", bytes.TrimRight(line, " \n")); err != nil {
			return err
		}
	}
	return nil
}

// marks says what is wrong with a row.
func (row *Row) marks() string {
	var marks []string
	if row.Bad+row.Lost > 0 {
		marks = append(marks, fmt.Sprintf("BAD %d LOST %d", row.Bad, row.Lost))
	}
	if row.Tier != "" && row.Tier != row.Contestant {
		marks = append(marks, "tier "+row.Tier)
	}
	if row.Noisy {
		marks = append(marks, "noisy")
	}
	if row.Behind {
		marks = append(marks, "behind")
	}
	if row.Busy > 90 {
		marks = append(marks, "saturated")
	}
	return strings.Join(marks, ", ")
}

func (r *Report) legend() string {
	var b strings.Builder
	any := func(f func(*Row) bool) bool {
		return slices.ContainsFunc(r.Rows, func(row Row) bool { return f(&row) })
	}
	if any(func(row *Row) bool { return row.Noisy }) {
		fmt.Fprintf(&b, "noisy: every run had over %g %% of other load\n", r.OtherLoadLimit)
	}
	if any(func(row *Row) bool { return row.Behind }) {
		b.WriteString("behind: a run delivered less than 97 % of the chunks asked for\n")
	}
	if any(func(row *Row) bool { return row.Busy > 90 }) {
		b.WriteString("saturated: the CPUs were over 90 % busy, so latencies are those of a queue\n")
	}
	return b.String()
}

func signed(v *float64, digits int) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%+.*f", digits, *v)
}

func plainOr(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f", *v)
}

// write puts datapath.json and datapath.svg into dir.
func (r *Report) write(dir string) error {
	return writeResults(dir, "datapath", r, r.appendChart(nil))
}

// writeResults puts name.json and name.svg into dir.
func writeResults(dir, name string, report any, svg []byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	b, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".svg"), svg, 0o644)
}

func describeMachine(ctx context.Context) (m Machine, err error) {
	m = Machine{CPU: "unknown CPU", CPUs: runtime.NumCPU(), Arch: runtime.GOARCH, Commit: commit(ctx),
		Versions: map[string]string{"go": runtime.Version()}}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return m, fmt.Errorf("uname: %w", err)
	}
	m.Kernel = unix.ByteSliceToString(uts.Release[:])
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if name := regexp.MustCompile(`(?m)^model name\s*:\s*(.*)$`).FindSubmatch(b); name != nil {
			m.CPU = string(name[1])
		}
	}
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		m.MemoryMiB = statusNumber(b, "MemTotal") / 1024
	}
	for _, name := range []string{"nginx", "haproxy"} {
		// A contestant that is not installed fails when its turn comes.
		out, _ := exec.CommandContext(ctx, name, "-v").CombinedOutput()
		if v := regexp.MustCompile(`\d+\.\d+\.\d+`).Find(out); v != nil {
			m.Versions[name] = string(v)
		}
	}
	return m, nil
}

// commit is what this program was built from.
func commit(ctx context.Context) string {
	revision, modified := "", false
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value
			case "vcs.modified":
				modified = s.Value == "true"
			}
		}
	}
	if revision == "" {
		out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").Output()
		if err != nil {
			return "unknown"
		}
		return strings.TrimSpace(string(out))
	}
	if modified {
		revision += "-dirty"
	}
	return revision
}
