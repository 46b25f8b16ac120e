package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/inferrail/inferrail/simulator/workload"
)

// TestSimulate runs the command lines of testdata/simulate, and compares what they print.
// TRACE stands for a trace of a few requests.
func TestSimulate(t *testing.T) {
	withoutRace(t) // it computes for long, as TestSimulateJSON does in little
	trace := file(t, "trace.jsonl", `
{"timestamp": 0, "input_length": 2000, "output_length": 20, "hash_ids": [0, 1, 2, 3]}
{"timestamp": 1500, "input_length": 1700, "output_length": 5, "hash_ids": [0, 1, 2, 4]}
{"timestamp": 3000, "input_length": 600, "output_length": 40, "hash_ids": [5, 6]}
{"timestamp": 3001, "input_length": 3000, "output_length": 1, "hash_ids": [0, 1, 2, 4, 7, 8]}
`)
	datadriven.Walk(t, filepath.Join("testdata", "simulate"), func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			args := strings.Fields(strings.ReplaceAll(d.Input, "TRACE", trace))
			p := start(t, append([]string{d.Cmd}, args...)...)
			status := <-p.status
			out := p.stdout.String()
			if status != 0 || p.stderr.String() != "" {
				out += fmt.Sprintf("status %d\n%s", status, p.stderr.String())
			}
			return strings.ReplaceAll(out, trace, "TRACE")
		})
	})
}

// What is written as JSON has the keys that others read, and is the same each time.
func TestSimulateJSON(t *testing.T) {
	args := strings.Fields("simulate --workload w2 --requests 60 --replicas 2 --profile reference --policy round_robin --policy cost_model --seed 1 --seed 2 --json -")
	var texts [2]string
	for i := range texts {
		p := start(t, args...)
		p.exit(0)
		texts[i] = p.stdout.String()
		if !strings.Contains(p.stderr.String(), "round_robin") {
			t.Errorf("the table is not on stderr: %s", &p.stderr)
		}
	}
	if texts[0] != texts[1] {
		t.Error("two runs differ")
	}
	var c workload.Comparison
	if err := json.Unmarshal([]byte(texts[0]), &c); err != nil {
		t.Fatal(err)
	}
	if len(c.Runs) != 2 || len(c.All) != 4 || c.Face != "virtual" || c.Replicas != 2 || c.Bound == nil || c.Infinite <= 0 || c.Pooled <= 0 || c.Least <= 0 {
		t.Errorf("%+v", c)
	}
	var raw struct {
		Runs []map[string]any `json:"runs"`
	}
	if err := json.Unmarshal([]byte(texts[0]), &raw); err != nil {
		t.Fatal(err)
	}
	for _, measure := range []string{"ttft", "tpot", "itl", "e2e"} {
		of, _ := raw.Runs[0][measure].(map[string]any)
		for _, quantile := range []string{"p50", "p90", "p99"} {
			if v, ok := of[quantile].(float64); !ok || v <= 0 {
				t.Errorf("%s.%s is %v", measure, quantile, of[quantile])
			}
		}
	}
	for _, key := range []string{"hit_rate", "hotspot", "ceiling"} {
		if v, ok := raw.Runs[1][key].(float64); !ok || v <= 0 {
			t.Errorf("%s is %v", key, raw.Runs[1][key])
		}
	}
}

// A signal ends it soon, and no file is there that says nothing.
func TestSimulateInterrupted(t *testing.T) {
	out := filepath.Join(t.TempDir(), "a.json")
	p := start(t, "simulate", "--workload", "w2", "--requests", "200000", "--json", out)
	p.signals <- syscall.SIGINT
	p.exit(1)
	if got := p.stderr.String(); got != "inferrail: interrupted; nothing was written\n" {
		t.Errorf("stderr %q", got)
	}
	if _, err := os.Stat(out); !os.IsNotExist(err) {
		t.Errorf("the file: %v", err)
	}
}

// Results and charts go into files.
func TestSimulateFiles(t *testing.T) {
	dir := t.TempDir()
	p := start(t, "simulate", "--workload", "w1", "--requests", "50", "--profile", "reference", "--replicas", "2", "--policy", "random",
		"--json", filepath.Join(dir, "a.json"), "--plot", filepath.Join(dir, "charts"))
	p.exit(0)
	text, err := os.ReadFile(filepath.Join(dir, "a.json"))
	if err != nil || !json.Valid(text) {
		t.Errorf("%v: %s", err, text)
	}
	charts, err := filepath.Glob(filepath.Join(dir, "charts", "*.svg"))
	if err != nil || len(charts) == 0 {
		t.Errorf("there are no charts: %v", err)
	}
	q := start(t, "simulate", "--workload", "w1", "--requests", "50", "--profile", "reference", "--json", filepath.Join(dir, "none", "a.json"))
	q.exit(1)
	if !strings.Contains(q.stderr.String(), "no such file") {
		t.Errorf("%s", &q.stderr)
	}
}
