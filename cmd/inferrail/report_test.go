package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Every command of the evaluation is one that this program takes, and the report is
// written of what they find: with so few requests that it takes a moment.
func TestReport(t *testing.T) {
	withoutRace(t)
	t.Setenv("INFERRAIL_RUN", "1") // what the report starts is this program
	traces, out := t.TempDir(), t.TempDir()
	var mooncake, azure strings.Builder
	azure.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range 80 {
		fmt.Fprintf(&mooncake, `{"timestamp": %d, "input_length": 1600, "output_length": 9, "hash_ids": [0, %d, %d, %d]}`+"\n", i*300, 1+i%7, 10+i%20, 100+i)
		fmt.Fprintf(&azure, "%s,%d,%d\n", time.Date(2023, 11, 16, 18, 0, i, 0, time.UTC).Format("2006-01-02 15:04:05.0000000"), 100+i, 5+i%9)
	}
	for name, text := range map[string]string{
		"mooncake_conversation_trace.jsonl": mooncake.String(), "mooncake_synthetic_trace.jsonl": mooncake.String(),
		"azure2023_conv.csv": azure.String(), "azure2023_code.csv": azure.String(),
	} {
		if err := os.WriteFile(filepath.Join(traces, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	only := "traces,rates,gpus,workloads,fleets,dio,admission,capacity,http-w1,virtual-w1"
	p := start(t, "bench", "report", "--tiny", "--traces", traces, "--only", only, "-o", out)
	select {
	case status := <-p.status:
		if status != 0 {
			t.Fatalf("exit status %d\n%s\n%s", status, &p.stdout, &p.stderr)
		}
	case <-time.After(5 * time.Minute):
		t.Fatalf("does not end:\n%s\n%s", &p.stdout, &p.stderr)
	}
	t.Log(&p.stderr)
	report, err := os.ReadFile(filepath.Join(out, "REPORT.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"### W3 agents, 16/s", "### W1 over HTTP", "They say nothing", "| **cost_model** |", "_bound_"} {
		if !strings.Contains(string(report), want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	var c struct {
		Runs  []struct{ Policy string }
		Marks []struct{ What string }
	}
	data, err := os.ReadFile(filepath.Join(out, "results", "evaluation", "w5.json"))
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil || len(c.Runs) < 8 || len(c.Marks) == 0 {
		t.Errorf("W5: %v, %d policies, marks %v", err, len(c.Runs), c.Marks)
	}
}
