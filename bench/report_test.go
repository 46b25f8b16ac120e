package bench

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func run(contestant string, rep int, cpu float64, p50, p99 uint64, noisy bool) Measurement {
	m := Measurement{Contestant: contestant, Load: Load{1000, 20}, Rep: rep, CPU: CPU{Total: cpu}, Other: 1, Noisy: noisy}
	m.Seconds, m.Chunks, m.Latency = 6, 120_000, Latency{P50: p50, P99: p99}
	if noisy {
		m.Other = 20
	}
	if contestant != "direct" {
		m.Wakeups, m.PeakKiB = 150, 20<<10
	}
	return m
}

func exampleReport() *Report {
	packet := run("packet", 1, 13.5, 101, 140, false)
	wakeups, chunks := uint64(2400), uint64(120_000)
	packet.Agent = &AgentReport{Tier: "packet", Wakeups: &wakeups, Chunks: &chunks}
	fallen := run("copy", 1, 24, 130, 300, true)
	fallen.Agent = &AgentReport{Tier: "none", Wakeups: &wakeups, Chunks: &chunks}
	lossy := run("haproxy", 1, 27, 150, 400, false)
	lossy.Bad, lossy.Lost, lossy.Behind, lossy.Busy = 1, 2, true, 95
	r := &Report{Date: "2026-01-02T03:04:05Z", Reps: 3, Seconds: 6, ChunkBytes: 200, ResponseChunks: 200, OtherLoadLimit: 8,
		Machine: Machine{CPU: "Abacus <9>", CPUs: 2, Kernel: "6.6.0"},
		Runs: []Measurement{
			run("nginx", 1, 26, 150, 300, false), // rows do not follow the order of runs
			run("direct", 1, 12, 100, 130, false),
			run("direct", 2, 12.4, 100, 131, false),
			run("direct", 3, 99, 900, 9000, true), // left out: others are quiet
			run("nginx", 2, 24, 140, 280, false),
			run("nginx", 3, 25, 145, 290, false),
			packet, fallen, lossy,
		}}
	r.summarise()
	return r
}

func TestTable(t *testing.T) {
	var b strings.Builder
	if err := exampleReport().writeTable(&b); err != nil {
		t.Fatal(err)
	}
	want := `
Abacus <9>, 2 CPUs, Linux 6.6.0, 2026-01-02T03:04:05Z
200-byte chunks, 200 to a response; medians over repetitions (3) of 6 s

     load  contestant  CPU/chunk  above direct  p50  added  p99  added   wake-ups  agent's count  peak  other load
                              us            us   us     us   us     us  per 1,000      per 1,000   MiB           %
  1000x20      direct      12.20             -  100      -  130      -          -              -     -         1.0
  1000x20      packet      13.50         +1.30  101     +1  140    +10        150           20.0    20         1.0
  1000x20        copy      24.00        +11.80  130    +30  300   +170        150           20.0    20        20.0  tier none, noisy
  1000x20       nginx      25.00        +12.80  145    +45  290   +160        150              -    20         1.0
  1000x20     haproxy      27.00        +14.80  150    +50  400   +270        150              -    20         1.0  BAD 1 LOST 2, behind, saturated
noisy: every run had over 8 % of other load
behind: a run delivered less than 97 % of the chunks asked for
saturated: the CPUs were over 90 % busy, so latencies are those of a queue
`
	if got := "\n" + b.String(); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
}

func TestMedian(t *testing.T) {
	f := func(want float64, values ...float64) {
		t.Helper()
		if got := median(values); got != want {
			t.Errorf("%v: %v, want %v", values, got, want)
		}
	}
	f(3, 3)
	f(2, 3, 1)
	f(2, 3, 1, 2)
	f(2.5, 4, 1, 2, 3)
}

func TestResultFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "results")
	r := exampleReport()
	if err := r.write(dir); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "datapath.json"))
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if len(back.Runs) != len(r.Runs) || back.Runs[0].Chunks != 120_000 || back.Runs[6].Agent == nil || len(back.Rows) != 5 {
		t.Errorf("read back as %+v", back)
	}
	svg, err := os.ReadFile(filepath.Join(dir, "datapath.svg"))
	if err != nil {
		t.Fatal(err)
	}
	elements := svgElements(t, svg)
	// The background, a bar above direct for each of four, a bar of p99 for each of five.
	if elements["rect"] != 1+4+5 {
		t.Errorf("%v in %s", elements, svg)
	}
}

func TestLoadText(t *testing.T) {
	f := func(in string, want Load) {
		t.Helper()
		var got Load
		if err := got.UnmarshalText([]byte(in)); got != want || err != nil {
			t.Errorf("%q: %v, %v", in, got, err)
		}
		if got.String() != in {
			t.Errorf("%q is written as %q", in, got)
		}
	}
	f("1000x20", Load{1000, 20})
	f("1x0.5", Load{1, 0.5})

	fail := func(in string) {
		t.Helper()
		var got Load
		if err := got.UnmarshalText([]byte(in)); err == nil || !strings.Contains(err.Error(), `"`+in+`"`) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	fail("")
	fail("1000")
	fail("x20")
	fail("0x20")
	fail("1000x0")
	fail("1000xNaN")
	fail("1000x1001")
	fail("99999999x1")
}
