package bench

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

var rewriteCharts = flag.Bool("rewrite-charts", false, "write the golden charts anew")

// served makes up a comparison in which each policy is slower than the one before it.
func served(speed float64, policies ...string) *workload.Comparison {
	c := &workload.Comparison{Workload: "conversation", Face: "virtual", Replicas: 8, Engine: "vllm", Speed: speed, Seeds: []uint64{1, 2, 3},
		Limits: workload.Limits{TTFT: 2000, TPOT: 100}, Infinite: 0.366,
		Marks: []workload.Mark{{Seconds: 1800, What: "replica 2 is 8x slower"}}}
	r := rand.New(rand.NewPCG(1, 2))
	run := func(policy string, slow float64) workload.Summary {
		var records []workload.Record
		s := workload.Summary{Policy: policy, Requests: 2000, Rate: 3.34 * speed, Replicas: make([]int, 8), Ceiling: 0.35, HitRate: 0.35 / (1 + slow/3), Hotspot: 1 + slow/5}
		for i := range s.Requests {
			at := time.Duration(i) * 1800 * time.Millisecond
			ttft := 230 * math.Exp(r.NormFloat64()) * (1 + slow*speed)
			if at > 1800*time.Second {
				ttft *= 1 + slow
			}
			record := workload.Record{Scheduled: at, First: at + time.Duration(ttft*1e6)}
			if policy == "cost_model" {
				record.Predicted = time.Duration(ttft * 1e6 * math.Exp(r.NormFloat64()/5))
			}
			records = append(records, record)
			s.Replicas[int(float64(len(s.Replicas))*math.Pow(r.Float64(), 1+slow/10))]++
		}
		s.Curves = workload.NewCurves(records, 0)
		s.TTFT = workload.Quantiles{Mean: 630 * (1 + slow*speed), P50: s.Curves.TTFT[25], P99: s.Curves.TTFT[slices.Index(workload.Parts, 0.99)]}
		return s
	}
	for i, p := range policies {
		c.Runs = append(c.Runs, run(p, 0.15*float64(i+1)))
		c.Capacity = append(c.Capacity, workload.Capacity{Policy: p, Rate: 9 / (1 + 0.2*float64(i)), GPUs: 8 * (1 + 0.2*float64(i))})
	}
	bound := run("bound", 0)
	c.Bound = &bound
	return c
}

// The charts of a comparison are as they were when somebody last looked at them.
func TestChartsGolden(t *testing.T) {
	// In the order of the alphabet, as simulate has them.
	c := served(1, "cost_model", "least_request", "round_robin")
	charts := append(Charts("conversation", c), RateCharts([]*workload.Comparison{c, served(1.8, "cost_model", "round_robin"), served(0.5, "round_robin", "cost_model")})...)
	if len(charts) != 8 {
		t.Errorf("%d charts", len(charts))
	}
	for _, chart := range charts {
		checkSVG(t, chart)
		file := filepath.Join("testdata", "charts", chart.Name+".svg")
		if *rewriteCharts {
			if err := WriteCharts(filepath.Dir(file), []Chart{chart}); err != nil {
				t.Fatal(err)
			}
		}
		if want, err := os.ReadFile(file); err != nil {
			t.Error(err)
		} else if !bytes.Equal(chart.SVG, want) {
			t.Errorf("%s is another one; look at it and run go test ./bench -run %s -rewrite-charts", file, t.Name())
		}
	}
}

// Whatever there is little or nothing of, the chart is one that a browser draws.
func TestChartsOfLittle(t *testing.T) {
	one := workload.NewCurves([]workload.Record{{First: time.Second, Predicted: time.Second}}, 0)
	zero := &workload.Curves{TTFT: make([]float64, 3), Windows: []workload.Window{{}}, Predicted: [][2]float64{{0, 0}}}
	for _, c := range []workload.Comparison{
		{},
		{Runs: []workload.Summary{{}}},
		{Runs: []workload.Summary{{Policy: "cost_model", Replicas: []int{0, 0}}}, Bound: &workload.Summary{}, Capacity: []workload.Capacity{{}}},
		{Runs: []workload.Summary{{Policy: "mine", Replicas: []int{1}, Curves: one, Prediction: 1}}, Bound: &workload.Summary{Curves: one}},
		{Runs: []workload.Summary{{Policy: "mine", Curves: zero}}, Bound: &workload.Summary{Curves: &workload.Curves{}}},
		{Workload: "<a & \"b\">", Runs: []workload.Summary{{Policy: "<&>", TTFT: workload.Quantiles{Mean: math.NaN(), P99: math.Inf(1)}, HitRate: math.NaN(), Hotspot: math.Inf(-1)}}},
		{Runs: []workload.Summary{{Policy: "sticky", Replicas: make([]int, 1000), TTFT: workload.Quantiles{Mean: 1e-9, P50: 1e12, P99: math.MaxFloat64}}}},
	} {
		for _, chart := range Charts("x", &c) {
			checkSVG(t, chart)
		}
		other := c
		other.Speed = 2
		for _, chart := range RateCharts([]*workload.Comparison{&c, &other}) {
			checkSVG(t, chart)
		}
	}
}

// checkSVG sees that a chart is XML, with only numbers that are ones, and that
// nothing lies outside of it.
func checkSVG(t *testing.T, c Chart) {
	t.Helper()
	if regexp.MustCompile(`NaN|Inf|%!`).Match(c.SVG) {
		t.Errorf("%s: not a number in %s", c.Name, c.SVG)
	}
	var size struct {
		Width  float64 `xml:"width,attr"`
		Height float64 `xml:"height,attr"`
	}
	if err := xml.Unmarshal(c.SVG, &size); err != nil {
		t.Errorf("%s: %v", c.Name, err)
		return
	}
	for dec := xml.NewDecoder(bytes.NewReader(c.SVG)); ; {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			return
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		var at struct{ x, y, width, height float64 }
		for _, a := range start.Attr {
			value := json.Number(a.Value)
			switch a.Name.Local {
			case "x", "x1", "x2", "cx":
				at.x, _ = value.Float64()
			case "y", "y1", "y2", "cy":
				at.y, _ = value.Float64()
			case "width":
				at.width, _ = value.Float64()
			case "height":
				at.height, _ = value.Float64()
			}
		}
		if at.x < 0 || at.y < 0 || at.x+at.width > size.Width || at.y+at.height > size.Height {
			t.Errorf("%s: outside of %v: %v", c.Name, size, start)
		}
	}
}

func TestScale(t *testing.T) {
	f := func(log bool, values []float64, wantFrom, wantTo float64, wantTicks int) {
		t.Helper()
		s := newScale(inMS, log, values...)
		if math.Abs(s.from-wantFrom) > 1e-9*wantTo || math.Abs(s.to-wantTo) > 1e-9*wantTo || len(s.ticks) != wantTicks {
			t.Errorf("%v, log %v: %v to %v with ticks %v; want %v to %v with %d", values, log, s.from, s.to, s.ticks, wantFrom, wantTo, wantTicks)
		}
		for _, v := range s.ticks {
			if p := s.at(v); p < 0 || p > 1 || math.IsNaN(p) {
				t.Errorf("%v: tick %v is at %v", values, v, p)
			}
		}
	}
	f(false, nil, 0, 1, 6)
	f(false, []float64{0}, 0, 0.2, 2)
	f(false, []float64{0.37, 1}, 0, 1, 6)
	f(false, []float64{3, 9.7}, 0, 10, 6)
	f(false, []float64{math.NaN(), 120}, 0, 150, 4)
	f(true, nil, 0.2, 2, 4)
	f(true, []float64{0, -3}, 0.2, 2, 4)
	f(true, []float64{7}, 2, 20, 4)
	f(true, []float64{13, 28_000}, 10, 50_000, 4)
	f(true, []float64{100, 1000}, 100, 1000, 4)
	f(true, []float64{math.Inf(1), 229, 7000}, 200, 10_000, 6)

	// Values are where the ticks beside them say, on either kind.
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		values := []float64{math.Exp(r.NormFloat64() * 6), math.Exp(r.NormFloat64() * 6)}
		for _, log := range []bool{false, true} {
			s := newScale(inSeconds, log, values...)
			low, high := min(values[0], values[1]), max(values[0], values[1])
			if s.from > low*1.001 || s.to < high*0.999 || len(s.ticks) < 2 || len(s.ticks) > 16 || !slices.IsSorted(s.ticks) ||
				!(s.at(low) <= s.at(high)) || low < high/2 && s.at(low) == s.at(high) && s.at(high) > 0.01 {
				t.Fatalf("%v, log %v: %+v", values, log, s)
			}
		}
	}
}

func TestUnit(t *testing.T) {
	f := func(u unit, v float64, want string) {
		t.Helper()
		if got := u.write(v); got != want {
			t.Errorf("%v of %v: %q, want %q", v, u, got, want)
		}
	}
	f(bare, 0, "0")
	f(bare, 1.0349, "1.03")
	f(bare, 0.01234, "0.0123")
	f(bare, 99.96, "100")
	f(bare, 12031, "12,031")
	f(bare, 1234567, "1,234,567")
	f(bare, -1234, "-1,234")
	f(bare, -0.00001, "0")
	f(bare, math.NaN(), "-")
	f(inMS, 31, "31 ms")
	f(inMS, 0.25, "0.25 ms")
	f(inMS, 627.4, "627 ms")
	f(inMS, 999.7, "1 s")
	f(inMS, 13_165, "13.2 s")
	f(inMS, 700_000, "11.7 min")
	f(inPercent, 0.366, "36.6 %")
	f(inPercent, 1, "100 %")
	f(inSeconds, 90, "90 s")
	f(inSeconds, 3600, "1 h")
	f(inSeconds, 7200, "2 h")
}

// One order everywhere, and a place for a policy that nobody knows.
func TestLooks(t *testing.T) {
	if len(looks) != len(hues) {
		t.Errorf("%d looks have %d hues", len(looks), len(hues))
	}
	var order []string
	for _, r := range inOrder([]workload.Summary{{Policy: "round_robin"}, {Policy: "mine"}, {Policy: "lmetric"}, {Policy: "cost_model"}}) {
		order = append(order, r.Policy)
	}
	if got := strings.Join(order, " "); got != "cost_model lmetric round_robin mine" {
		t.Errorf("order %s", got)
	}
}

func TestPlot(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, v any) string {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	var out strings.Builder
	plot := func(files ...string) error {
		out.Reset()
		return (&Plot{Files: files, Out: filepath.Join(dir, "charts"), Stdout: &out}).Run()
	}
	one, two := write("one.json", served(1, "cost_model")), write("Two.json", served(2, "cost_model"))
	if err := plot(one, two); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"one-ttft", "one-distribution", "two-time", "two-prediction", "conversation-virtual-8-rate"} {
		file := filepath.Join(dir, "charts", name+".svg")
		if svg, err := os.ReadFile(file); err != nil || !bytes.HasPrefix(svg, []byte("<svg ")) {
			t.Errorf("%s: %v, %.40s", name, err, svg)
		}
		if !strings.Contains(out.String(), file+"\n") {
			t.Errorf("%s is not told of:\n%s", file, &out)
		}
	}
	f := func(want string, files ...string) {
		t.Helper()
		if err := plot(files...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %s", files, err, want)
		}
	}
	f("nowhere.json: no such file", filepath.Join(dir, "nowhere.json"))
	f("it has no \"runs\"", write("empty.json", map[string]string{"workload": "x"}))
	f("list.json: json: cannot unmarshal array", write("list.json", []int{1}))
	f("would have the same names", one, write("other/one.json", served(1, "sticky")))
}
