package agent

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/simulator"
)

// A node with an engine that publishes its events, one that does not, one that wants a
// key, and something else that listens.
func TestSurvey(t *testing.T) {
	t.Setenv("HF_HUB_CACHE", "/nowhere/hub")
	var see only
	run := func(c simulator.Config) string {
		c.ZeroLatency = true
		engine, err := simulator.Start(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { engine.Close() })
		see.add(strings.TrimPrefix(engine.URL(), "http://"))
		return engine.URL()
	}
	publishes := run(simulator.Config{ServedModelName: []string{"a", "b"}, KVEvents: simulator.KVEvents{Endpoint: "tcp://127.0.0.1:0"}})
	silent := run(simulator.Config{ServedModelName: []string{"c"}, Engine: "sglang"})
	locked := run(simulator.Config{ServedModelName: []string{"d"}, APIKey: "secret"})
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	see.add(other.Listener.Addr().String())

	s := see.sockets()
	got, err := surveyNode(context.Background(), &s)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Locked, []string{locked}) {
		t.Errorf("locked: %v, want %s", got.Locked, locked)
	}
	if !slices.Contains(got.Interfaces, "lo") {
		t.Errorf("interfaces: %v", got.Interfaces)
	}
	if len(got.Engines) != 2 {
		t.Fatalf("%+v", got.Engines)
	}
	for _, e := range got.Engines {
		var models []string
		for _, m := range e.Models {
			models = append(models, m.Name)
			if m.Exact || !strings.Contains(m.Prompts, m.Name) {
				t.Errorf("%s: exact %v, %q", m.Name, m.Exact, m.Prompts)
			}
			if m.MaxLen <= 0 {
				t.Errorf("%s has no length", m.Name)
			}
		}
		if e.Why != "" || e.BlockSize == 0 || e.Blocks == 0 {
			t.Errorf("%+v", e)
		}
		switch text := fmt.Sprint(e.Engine, models); {
		case e.URL == publishes && text == "vllm[a b]":
			if !strings.HasPrefix(e.KVEvents, "tcp://127.0.0.1:") || e.ID() != "vllm-"+e.URL[strings.LastIndexByte(e.URL, ':')+1:] {
				t.Errorf("%+v, %s", e, e.ID())
			}
		case e.URL == silent && text == "sglang[c]":
			if e.KVEvents != "" || !strings.Contains(e.NoKVEvents, "--kv-events-config") {
				t.Errorf("%+v", e)
			}
		default:
			t.Errorf("%s is %s", e.URL, text)
		}
	}
}

// Nothing listens: that is no error. Who has given up gets no answer.
func TestSurveyOfNothing(t *testing.T) {
	var see only
	s := see.sockets()
	got, err := surveyNode(context.Background(), &s)
	if err != nil || len(got.Engines) != 0 || len(got.Locked) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := surveyNode(ctx, &s); err == nil {
		t.Error("no error of one that was given up")
	}
	s.tables = []string{"/nowhere/tcp"}
	if _, err := surveyNode(context.Background(), &s); err == nil || !strings.Contains(err.Error(), "cannot list the sockets") {
		t.Errorf("without tables: %v", err)
	}
}
