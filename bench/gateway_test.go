package bench

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func callRun(contestant string, rate, rep int, p50, p99 uint64, own, total float64, noisy bool) CallRun {
	m := CallRun{Contestant: contestant, Rate: rate, Rep: rep, CPU: CPU{Proxy: own, Total: total}, Other: 1, Noisy: noisy}
	m.Seconds, m.Calls, m.Answers, m.Latency = 3, 1500, 1500, Latency{P50: p50, P99: p99, P999: 2 * p99, Max: 3 * p99}
	if noisy {
		m.Other = 20
	}
	if contestant != "direct" {
		m.PeakKiB, m.Wakeups = 20<<10, 2.5
	}
	return m
}

func exampleGatewayReport() *GatewayReport {
	slow := callRun("haproxy", 500, 1, 150, 900, 40, 100, false)
	slow.Bad, slow.Lost, slow.Unanswered, slow.Behind, slow.Busy = 1, 2, 3, true, 95
	r := &GatewayReport{Date: "2026-01-02T03:04:05Z", Reps: 3, Seconds: 3, RequestBytes: 1000, AnswerBytes: 500, Engines: 2, Callers: 64,
		OtherLoadLimit: 8, Note: "All share two CPUs.", Machine: Machine{CPU: "Abacus <9>", CPUs: 2, Kernel: "6.6.0"},
		Absent: []Absent{{"vllm-router", "no such thing"}},
		Runs: []CallRun{
			// What is added is that of the same repetition: 40, 30 and, left out
			// because direct was noisy, 500.
			callRun("nginx", 500, 1, 140, 240, 30, 80, false),
			callRun("direct", 500, 1, 100, 200, 0, 50, false),
			callRun("direct", 500, 2, 50, 150, 0, 40, false),
			callRun("nginx", 500, 2, 80, 200, 20, 60, false),
			callRun("direct", 500, 3, 60, 160, 0, 40, true),
			callRun("nginx", 500, 3, 560, 660, 50, 90, false),
			// Compared with nothing that was quiet.
			callRun("packet", 500, 3, 100, 300, 25, 75, false),
			slow,
			callRun("direct", 0, 1, 400, 800, 0, 14, false),
			callRun("copy", 0, 1, 1000, 2000, 20, 34, false),
		}}
	r.summarise()
	return r
}

func TestGatewayTable(t *testing.T) {
	var b strings.Builder
	if err := exampleGatewayReport().writeTable(&b); err != nil {
		t.Fatal(err)
	}
	want := `
Abacus <9>, 2 CPUs, Linux 6.6.0, 2026-01-02T03:04:05Z
1000-byte requests, 500-byte answers, 2 engines; medians over repetitions (3) of 3 s
All share two CPUs.

   rate  contestant  p50  added  p99  added  p99.9  added     own CPU  above direct  wake-ups  other load
                      us     us   us     us     us     us  us/request    us/request  /request           %
  500/s      direct   75      -  175      -    350      -           -             -         -         1.0
  500/s      packet  100    +40  300   +140    600   +280        25.0         +35.0      2.50         1.0  noisy
  500/s       nginx  110    +35  220    +45    440    +90        25.0         +25.0      2.50         1.0
  500/s     haproxy  150    +50  900   +700   1800  +1400        40.0         +50.0      2.50         1.0  BAD 1 LOST 2, 3 unanswered, behind, saturated

  closed loop of 64  answers     own CPU    per core  above direct   p50   p99  peak  other load
                          /s  us/request  requests/s    us/request    us    us   MiB           %
             direct      500           -           -             -   400   800     -         1.0
               copy      500        20.0       50000         +20.0  1000  2000    20         1.0
noisy: every run, or the direct one beside it, had over 8 % of other load
behind: a run answered less than 97 % of the calls in its time
saturated: the CPUs were over 90 % busy, so latencies are those of a queue
vllm-router was left out: no such thing
`
	if got := "\n" + b.String(); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
}

func TestGatewayRowsWithoutDirectCompareNothing(t *testing.T) {
	r := &GatewayReport{Runs: []CallRun{callRun("nginx", 500, 1, 140, 240, 30, 80, false)}}
	r.summarise()
	if len(r.Rows) != 1 || r.Rows[0].P99Above != nil || r.Rows[0].CPUAbove != nil || r.Rows[0].P99 != 240 {
		t.Errorf("%+v", r.Rows)
	}
}

func TestGatewayResultFiles(t *testing.T) {
	r := exampleGatewayReport()
	dir := t.TempDir()
	if err := writeResults(dir, "gateway", r, r.appendChart(nil)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "gateway.json"))
	if err != nil {
		t.Fatal(err)
	}
	var back GatewayReport
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if len(back.Runs) != len(r.Runs) || len(back.Rows) != len(r.Rows) || back.Runs[7].Lost != 2 || len(back.Absent) != 1 {
		t.Errorf("read back as %+v", back)
	}
	svg, err := os.ReadFile(filepath.Join(dir, "gateway.svg"))
	if err != nil {
		t.Fatal(err)
	}
	// The background, three above direct, and one that has a rate per core.
	if got := svgElements(t, svg)["rect"]; got != 1+3+1 {
		t.Errorf("%d rectangles in %s", got, svg)
	}
}

// svgElements counts elements by name, and fails when the text is not XML.
func svgElements(t *testing.T, svg []byte) map[string]int {
	t.Helper()
	elements := map[string]int{}
	for d := xml.NewDecoder(strings.NewReader(string(svg))); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return elements
		}
		if err != nil {
			t.Fatalf("%v in %s", err, svg)
		}
		if start, ok := token.(xml.StartElement); ok {
			elements[start.Name.Local]++
		}
	}
}

// newGateway is a short run, or a skip where it cannot be had.
func newGateway(t *testing.T, only ...string) (*Gateway, *strings.Builder) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	var out strings.Builder
	return &Gateway{
		Rates: []int{500}, Connections: 100, Reps: 1, Warm: 100 * time.Millisecond, Measure: time.Second, Only: only,
		OtherLoad: 100, Limit: time.Minute, Agent: []string{os.Args[0], "test-agent", "pass"},
		Stdout: &out, Stderr: t.Output(),
	}, &out
}

func TestGatewayRun(t *testing.T) {
	g, out := newGateway(t, "direct", "copy")
	if _, err := exec.LookPath("nginx"); err == nil {
		g.Only = append(g.Only, "nginx")
	}
	if _, err := exec.LookPath("haproxy"); err == nil {
		g.Only = append(g.Only, "haproxy")
	}
	g.Callers, g.Results = 8, filepath.Join(t.TempDir(), "results")
	if err := g.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", out)
	b, err := os.ReadFile(filepath.Join(g.Results, "gateway.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r GatewayReport
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Runs) != 2*len(g.Only) || len(r.Rows) != 2*len(g.Only) {
		t.Fatalf("%d runs, %d rows", len(r.Runs), len(r.Rows))
	}
	for _, m := range r.Runs {
		// How many calls are due is the same for all, whatever the machine does.
		if m.Rate == 500 && (m.Calls < 350 || m.Calls > 650) {
			t.Errorf("%s: %d calls", m.Contestant, m.Calls)
		}
		if m.Answers == 0 || m.Bad+m.Lost > 0 || m.CPU.Client <= 0 || m.CPU.Engine <= 0 || m.Latency.P50 == 0 {
			t.Errorf("%s: %+v", m.Contestant, m)
		}
		if proxied := m.Contestant != "direct"; proxied != (m.CPU.Proxy > 0) || proxied != (m.PeakKiB > 0) || proxied != (m.Wakeups > 0) {
			t.Errorf("%s: %+v", m.Contestant, m)
		}
	}
}

func TestGatewayRunFailsWithTheAgent(t *testing.T) {
	f := func(behaviour string, want ...string) {
		t.Helper()
		g, _ := newGateway(t, "copy")
		g.Agent, g.Rates = []string{os.Args[0], "test-agent", behaviour}, []int{2000}
		err := g.Run(t.Context())
		if err == nil {
			t.Fatalf("%s: no error", behaviour)
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q is not in: %v", behaviour, w, err)
			}
		}
	}
	f("corrupt", "copy at 2000/s", "wrong answer")
	f("cut", "copy at 2000/s", "lost calls", "connection ended")
	f("refuse", "copy: did not start", "this agent does not want to")
}

func TestGatewayRunFailsWhenNothingIsAnswered(t *testing.T) {
	g, _ := newGateway(t, "copy")
	g.Agent = []string{os.Args[0], "test-agent", "models"}
	if err := g.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "copy: the load did not start") || !strings.Contains(err.Error(), "connection ended") {
		t.Errorf("%v", err)
	}
}

func TestGatewayRunGoesOnWithoutARouter(t *testing.T) {
	g, out := newGateway(t, "direct", "sglang-router")
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("PATH", t.TempDir())
	if err := g.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "sglang-router was left out: cannot install sglang-router") {
		t.Errorf("%s", out)
	}
}

func TestGatewayFlags(t *testing.T) {
	f := func(change func(*Gateway), want string) {
		t.Helper()
		g := Gateway{Rates: []int{500}, Connections: 10, Callers: 10, Reps: 1, Measure: time.Second}
		change(&g)
		if _, err := g.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", g, err, want)
		}
	}
	f(func(g *Gateway) { g.Rates = []int{0} }, "--rates 0")
	f(func(g *Gateway) { g.Rates = []int{500, 1e6} }, "--rates 1000000")
	f(func(g *Gateway) { g.Rates, g.Callers = nil, 0 }, "--rates or --callers")
	f(func(g *Gateway) { g.Reps = 0 }, "--reps")
	f(func(g *Gateway) { g.Measure = 0 }, "--measure")
	f(func(g *Gateway) { g.Connections = 1e6 }, "1000000 connections")
	f(func(g *Gateway) { g.Only = []string{"ngnix"} }, `"ngnix"; there are direct, packet, copy, nginx, haproxy, sglang-router, vllm-router`)
}
