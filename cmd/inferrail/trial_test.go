package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/bench"
	"github.com/inferrail/inferrail/simulator"
)

// runLine runs a command line to its end.
func runLine(args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = run(&env{args: args, stdout: &out, stderr: &errs})
	return status, out.String(), errs.String()
}

// `inferrail bench run` asks an engine for a workload, and writes what it found: the
// engine has generated every token that was asked for, and was told what to say.
func TestTrial(t *testing.T) {
	engine, err := simulator.Start(simulator.Config{PrefillA: 1, TimePerOutputToken: 200_000, EnablePromptTokensDetails: true, APIKey: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	dir := t.TempDir()
	summary, records := filepath.Join(dir, "summary.json"), filepath.Join(dir, "records.jsonl")
	status, stdout, stderr := runLine("bench", "run", "--url", engine.URL()+"/v1", "--api-key", "secret", "--workload", "chat", "--requests", "40", "--rate", "4", "--speed", "40",
		"--say", "--json", summary, "--records", records, "--max-lag", "1h", "--max-busy", "2")
	if status != 0 {
		t.Fatalf("status %d\n%s\n%s", status, stdout, stderr)
	}
	var report bench.TrialReport
	b, err := os.ReadFile(summary)
	if err == nil {
		err = json.Unmarshal(b, &report)
	}
	if err != nil {
		t.Fatal(err)
	}
	if report.Requests != 40 || report.Failed+report.Refused != 0 || report.Model != "sim" || report.HitRate < 0.1 || report.TTFT.P50 <= 0 || len(report.Names) != 1 || report.Replicas[0] != 40 {
		t.Errorf("%+v", report)
	}
	f, err := os.Open(records)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	for lines := bufio.NewScanner(f); lines.Scan(); n++ {
		var line struct {
			Index, Input, Output int
			Sent                 float64   `json:"sent_ms"`
			First                float64   `json:"first_ms"`
			End                  float64   `json:"end_ms"`
			Gaps                 []float64 `json:"gaps_ms"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if line.Index != n || line.Input < 1 || line.Output < 1 || line.First < line.Sent || line.End < line.First || len(line.Gaps) > line.Output-1 {
			t.Errorf("%+v", line)
		}
	}
	if n != 40 {
		t.Errorf("%d lines", n)
	}
	if got := engine.Finished(); got != 40 {
		t.Errorf("the engine has finished %d answers", got)
	}
	for _, want := range []string{"40 requests in ", "40 served, 0 refused, 0 failed", "to the first token", "% of the prompts' tokens were cached", "sent after it was due"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}

	fails := func(want string, args ...string) {
		t.Helper()
		args = append([]string{"bench", "run", "--requests", "2", "--rate", "1000", "--max-busy", "2"}, args...)
		if status, stdout, stderr := runLine(args...); status == 0 || !strings.Contains(stderr, want) {
			t.Errorf("%q: status %d, no %q in\n%s\n%s", args, status, want, stderr, stdout)
		}
	}
	fails("missing flags: --url=", "-w", "w1")
	fails("--workload or --trace is missing; workloads are ", "--url", engine.URL())
	fails(`--url "sim": want http://HOST:PORT`, "-w", "w1", "--url", "sim")
	fails("does not tell its model: GET "+engine.URL()+"/v1/models: status 401: give its key as --api-key", "-w", "w1", "--url", engine.URL())
	fails("no request was served", "-w", "w1", "--url", engine.URL(), "--model", "sim", "--api-key", "wrong")
	fails("no request was served", "-w", "w1", "--url", "http://127.0.0.1:1", "--model", "sim")
	fails("the figures should not be relied on", "-w", "w1", "--url", engine.URL(), "--api-key", "secret", "--max-lag", "1ns")
	fails("none/a.json: no such file", "-w", "w1", "--url", engine.URL(), "--json", filepath.Join(dir, "none", "a.json"))
	fails("none/a.jsonl: no such file", "-w", "w1", "--url", engine.URL(), "--records", filepath.Join(dir, "none", "a.jsonl"))
	fails("status 404: is the path right?", "-w", "w1", "--url", engine.URL()+"/elsewhere", "--api-key", "secret")
	fails("can't be used together", "-w", "w1", "--url", engine.URL(), "--trace", "x")
	fails("no such file", "--url", engine.URL(), "--trace", "nowhere")
	fails("--max-at-once 0: want at least 1", "-w", "w1", "--url", engine.URL(), "--max-at-once", "0")
	fails(`--header "x": want NAME: VALUE`, "-w", "w1", "--url", engine.URL(), "--header", "x")
}

// Nothing is said of what was cached where no answer says it: "0 %" would be about the
// engine, and it is about its flags.
func TestTrialUntold(t *testing.T) {
	engine, err := simulator.Start(simulator.Config{PrefillA: 1, TimePerOutputToken: 200_000})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	_, stdout, stderr := runLine("bench", "run", "--url", engine.URL(), "-w", "w1", "--requests", "5", "--rate", "100", "--max-lag", "1h", "--max-busy", "2")
	if !strings.Contains(stdout, "no answer says how much of its prompt was cached; vLLM does with --enable-prompt-tokens-details") || strings.Contains(stdout, "% of the prompts' tokens") {
		t.Errorf("%s%s", stdout, stderr)
	}
}
