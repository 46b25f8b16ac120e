package agent

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// Each story in testdata/reading is what pages of engines tell (metrics, of the
// input or of a file in testdata/pages; describe, laid over the metrics before
// it), or what is concluded from one look to the next (look). Regenerate with
// -rewrite and read the difference.
func TestReadingStories(t *testing.T) {
	datadriven.Walk(t, filepath.Join("testdata", "reading"), func(t *testing.T, path string) {
		var r reading
		var l life
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			page := []byte(d.Input + "\n")
			switch d.Cmd {
			case "metrics":
				if d.HasArg("file") {
					var file string
					d.ScanArgs(t, "file", &file)
					var err error
					if page, err = os.ReadFile(filepath.Join("testdata", "pages", file)); err != nil {
						t.Fatal(err)
					}
				}
				r = readMetrics(appendPoints(nil, page))
				return r.show()
			case "describe":
				for _, p := range describers {
					if found, ok := p.read(page); ok {
						found.add(&r)
						return p.page + "\n" + r.show()
					}
				}
				return "nothing\n"
			case "page":
				// One that tells of the load beside, or in place of, the metrics.
				for _, p := range slices.Concat(loadPages["sglang"], loadPages["llamacpp"], loadPages["ollama"]) {
					if p.read == nil {
						continue
					}
					if found, ok := p.read(page); ok {
						r = found
						return p.page + "\n" + r.show()
					}
				}
				return "nothing\n"
			case "load":
				rank := -1
				d.MaybeScanArgs(t, "rank", &rank)
				g, _, why := r.gaugesOf(rank, len(r.ranks))
				if why != "" {
					return why + "\n"
				}
				return fmt.Sprintf("running %v, waiting %v, KV %v\n", g.running.value, g.waiting.value, g.usage.value)
			case "forget":
				r, l = reading{}, life{}
				return ""
			case "look":
				now := readMetrics(appendPoints(nil, page))
				restarted, all, why := l.next(&now)
				switch {
				case l.shared:
					return "several processes\n"
				case all:
					return "restarted: " + why + "\n"
				case len(restarted) == 0:
					return "goes on\n"
				}
				return fmt.Sprintf("rank %v restarted: %s\n", restarted, why)
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}

// show is the reading for people.
func (r *reading) show() string {
	var out strings.Builder
	names := make([]string, familyEnd)
	for name, f := range families {
		if names[f] == "" || len(name) < len(names[f]) {
			names[f] = name
		}
	}
	counted := func(c *counts) string {
		text := ""
		for i, known := range c.known {
			if known {
				text += fmt.Sprintf(" %s=%v", strings.TrimSuffix(names[firstCounter+family(i)], "_total"), c.value[i])
			}
		}
		return text
	}
	gauged := func(g *gauges) string {
		text := ""
		for _, x := range []struct {
			name string
			gauge
		}{{"running", g.running}, {"waiting", g.waiting}, {"waiting_tokens", g.waitingTokens}, {"usage", g.usage}, {"hit_rate", g.hitRate}} {
			if x.told {
				text += fmt.Sprintf(" %s=%v", x.name, x.value)
			}
		}
		if g.wrong != "" {
			text += fmt.Sprintf(" wrong: %s=%v", g.wrong, g.wrongValue)
		}
		return text
	}
	fmt.Fprintf(&out, "%q started=%v%s%s", r.engine, strconv.FormatFloat(r.started, 'f', -1, 64), gauged(&r.gauges), counted(&r.counts))
	if r.uncounted {
		fmt.Fprintf(&out, " resident=%v", r.resident)
	}
	out.WriteString("\n")
	for _, k := range r.ranks {
		fmt.Fprintf(&out, "rank %q: %d blocks of %d", k.label, k.blocks, k.block)
		if k.uncached {
			out.WriteString(", not reused")
		}
		out.WriteString(gauged(&k.gauges) + counted(&k.counts) + "\n")
	}
	return out.String()
}

func TestPoints(t *testing.T) {
	f := func(page string, want ...string) {
		t.Helper()
		var got []string
		for _, p := range appendPoints(nil, []byte(page)) {
			text := fmt.Sprint(p.family, " ", p.value)
			if engine, ok := p.label("engine"); ok {
				text += " engine " + string(engine)
			}
			got = append(got, text)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", page, got, want)
		}
	}
	prompt := fmt.Sprint(vllmPrompt)
	f("")
	f("\n\n# HELP vllm:prompt_tokens_total x\n")
	f("vllm:prompt_tokens_total 3\n", prompt+" 3")
	f("vllm:prompt_tokens_total 3\r\n", prompt+" 3")
	f("vllm:prompt_tokens_total{} 3 1700000000000\n", prompt+" 3")
	f("vllm:prompt_tokens_total\t{engine=\"0\"} 3\n")
	f("vllm:prompt_tokens_total{engine=\"1\",} 1e+06\n", prompt+" 1e+06 engine 1")
	f(`vllm:prompt_tokens_total{a="x}\"{,engine=\"7\"", engine = "2" } 5`+"\n", prompt+" 5 engine 2")
	f(`vllm:prompt_tokens_total{engines="9",engine="12"} NaN`+"\n", prompt+" NaN engine 12")
	f("vllm:prompt_tokens_total{engine=\"1\"} 4\nvllm:prompt_tokens_totals 1\nxvllm:prompt_tokens_total 1\n", prompt+" 4 engine 1")
	// What cannot be read.
	f("vllm:prompt_tokens_total{engine=\"1\" 4\n")
	f("vllm:prompt_tokens_total{engine=\"1} 4\n")
	f("vllm:prompt_tokens_total\n")
	f("vllm:prompt_tokens_total three\n")
	f("vllm:prompt_tokens_total{} \n")
	// A page that breaks off: the number may go on.
	f("vllm:prompt_tokens_total 1\nvllm:prompt_tokens_total 23", prompt+" 1")
	f("process_start_time_seconds 1.79601955942e+09\n", fmt.Sprint(processStart, " 1.79601955942e+09"))
}

// FuzzPages: whatever is on a page, it is read without harm, and what is found
// is within its bounds.
func FuzzPages(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "pages", "*"))
	if err != nil || len(files) == 0 {
		f.Fatal("no pages: ", err)
	}
	for _, file := range files {
		page, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(page)
	}
	f.Add([]byte(`vllm:cache_config_info{engine="\`))
	f.Add([]byte(`{"loads":[{"dp_rank":-3,"num_running_reqs":1e300,"num_waiting_reqs":2},{"dp_rank":1e9,"token_usage":-1}]}`))
	f.Add([]byte(`[{"is_processing":true},{"state":2}]`))
	f.Add([]byte(`{"models":[{"size_vram":1e400},{"size_vram":-5},{"size_vram":1.7e308},{"size_vram":1.7e308}]}`))
	f.Add([]byte("sglang:num_running_reqs{priority=\"\"} 1e9\nsglang:num_queue_reqs +Inf\n"))
	f.Add([]byte(`{"page_size":1e400,"dp_size":"x","max_total_num_tokens":-3,"disable_radix_cache":true}`))
	f.Fuzz(func(t *testing.T, page []byte) {
		r := readMetrics(appendPoints(nil, page))
		for _, p := range describers {
			if d, ok := p.read(page); ok {
				d.add(&r)
			}
		}
		for _, pages := range loadPages {
			for _, p := range pages {
				if p.read == nil {
					checkLoad(t, &r)
				} else if found, ok := p.read(page); ok {
					checkLoad(t, &found)
				}
			}
		}
		for _, k := range r.ranks {
			if k.block < 0 || k.block > mostBlockTokens || k.blocks < 0 || k.blocks > mostBlocks {
				t.Fatalf("%+v", k)
			}
		}
		var l life
		for range 2 {
			if restarted, all, why := l.next(&r); all || len(restarted) > 0 {
				t.Fatalf("restarted %v: %s", restarted, why)
			}
		}
	})
}

// checkLoad: what is taken for a load is one that an engine may have.
func checkLoad(t *testing.T, r *reading) {
	t.Helper()
	if !(r.resident >= 0) || math.IsInf(r.resident, 1) {
		t.Fatalf("%v bytes are resident", r.resident)
	}
	for rank := -1; rank < 3; rank++ {
		g, _, why := r.gaugesOf(rank, len(r.ranks))
		if why != "" || r.uncounted {
			continue
		}
		for _, x := range []gauge{g.running, g.waiting, g.waitingTokens, g.usage, g.hitRate} {
			if !(x.value >= 0) || x.value > mostRanks*math.MaxInt32 || x.value > 0 && !x.told {
				t.Fatalf("rank %d: %+v", rank, g)
			}
		}
		if !g.running.told || !g.waiting.told || g.usage.value > mostShare || g.hitRate.value > mostShare {
			t.Fatalf("rank %d: %+v", rank, g)
		}
	}
}

// largePage is the page of an engine of some ranks, of about 300 KB.
func largePage(tb testing.TB) []byte {
	page, err := os.ReadFile(filepath.Join("testdata", "pages", "vllm-0.32.0-two-ranks.txt"))
	if err != nil {
		tb.Fatal(err)
	}
	return bytes.Repeat(page, 5)
}

// TestPagesAllocate: what is passed over on a page costs no memory.
func TestPagesAllocate(t *testing.T) {
	withoutRace(t)
	page := largePage(t)
	points := appendPoints(nil, page)
	if n := testing.AllocsPerRun(10, func() { points = appendPoints(points[:0], page) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if n := testing.AllocsPerRun(10, func() { readMetrics(points) }); n > 20 {
		t.Errorf("%v allocations to make a reading", n)
	}
}

// TestPageOfManyRanks: a page that makes up ranks takes little longer than another
// of its length.
func TestPageOfManyRanks(t *testing.T) {
	var page []byte
	for i := range 200_000 {
		page = fmt.Appendf(page, "vllm:prompt_tokens_total{engine=\"%d\"} 1\n", i)
	}
	points := appendPoints(nil, page)
	var r reading
	if d := computing(t, func() { r = readMetrics(points) }); d > 5*time.Second {
		t.Errorf("%d points take %v", len(points), d)
	}
	if len(r.ranks) != mostRanks || r.ranks[1].label != "1" || len(points) != 200_000 {
		t.Errorf("%d ranks, the second %q, of %d points", len(r.ranks), r.ranks[1].label, len(points))
	}
}

func BenchmarkPage(b *testing.B) {
	page := largePage(b)
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	var points []point
	for b.Loop() {
		points = appendPoints(points[:0], page)
		if r := readMetrics(points); len(r.ranks) != 2 || math.IsNaN(r.started) {
			b.Fatal(r.show())
		}
	}
}
