package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// knownLoad is what /debug/fleet says of a replica's load.
type knownLoad struct {
	State, Why, Page          string
	Running, Waiting, Foreign int
	ForeignWaiting            int     `json:"foreign_waiting"`
	KV                        float64 `json:"kv_usage"`
	Age                       int     `json:"age_ms"`
	Took                      int     `json:"took_ms"`
	Reports                   map[string]int
}

func (g *guard) load(t *testing.T) knownLoad {
	t.Helper()
	var page struct {
		Replicas []struct{ Load knownLoad }
	}
	if err := json.Unmarshal(g.page("/debug/fleet"), &page); err != nil || len(page.Replicas) != 1 {
		t.Fatalf("%d replicas, %v", len(page.Replicas), err)
	}
	return page.Replicas[0].Load
}

// TestVLLMLoad: two agents before one vLLM each know what the other sends there,
// and take none of their own requests for another's.
func TestVLLMLoad(t *testing.T) {
	bin := os.Getenv("INFERRAIL_VLLM")
	if bin == "" {
		t.Skip("INFERRAIL_VLLM names no folder with vLLM (make test-vllm)")
	}
	p := &place{t: t, bin: bin, model: filepath.Join(t.TempDir(), "llama")}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := command(ctx, ".", filepath.Join(bin, "python"), "testdata/vllm/model.py", p.model); err != nil {
		t.Fatal(err)
	}
	v := p.vllm(t, "--max-num-seqs", "4")
	one, other := p.agent(t, "copy", []string{v.url}), p.agent(t, "copy", []string{v.url})

	traffic, leave := context.WithCancel(ctx)
	defer leave()
	hold := func(g *guard, n int) {
		for range n {
			req, err := http.NewRequestWithContext(traffic, "POST", g.url+"/v1/chat/completions", strings.NewReader(endless(true)))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			go func() {
				resp, err := g.client.Do(req)
				if err != nil {
					return // it has left
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}()
		}
	}
	await := func(g *guard, running, waiting, foreign int) {
		t.Helper()
		var l knownLoad
		for end := time.Now().Add(time.Minute); l.State != "ok" || l.Running != running || l.Waiting != waiting || l.Foreign != foreign; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("the load is %+v; want %d running, %d waiting, %d of them others'", l, running, waiting, foreign)
			}
			l = g.load(t)
		}
		t.Logf("%+v", l)
	}
	await(one, 0, 0, 0)
	hold(one, 2)
	await(one, 2, 0, 0)
	await(other, 2, 0, 2)
	hold(other, 5)
	await(one, 4, 3, 5)
	await(other, 4, 3, 2)
	// It stays so for as long as they do.
	most, least, reports := 0, 7, one.load(t).Reports["ok"]
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if l := one.load(t); l.Running+l.Waiting == 7 {
			most, least = max(most, l.Foreign), min(least, l.Foreign)
		}
	}
	if most != 5 || least != 5 {
		t.Errorf("between %d and %d requests were foreign, and 5 are", least, most)
	}
	t.Logf("%d reports in 2 s", one.load(t).Reports["ok"]-reports)
	leave()
	await(one, 0, 0, 0)
	await(other, 0, 0, 0)
	if l := one.load(t); l.Reports["unreadable"]+l.Reports["absent"] > 0 || l.Page != "/metrics" {
		t.Errorf("reports: %+v", l)
	}
	if n := one.metric("inferrail_replica_load_reports_total", `outcome="ok"`); n < 20 {
		t.Errorf("the metric tells of %v reports", n)
	}
}
