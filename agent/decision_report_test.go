package agent

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/proxy"
)

// recentPage is what /debug/decisions shows.
func recentPage(t *testing.T, a *Agent, query string) (d proxy.RecentDecisions) {
	t.Helper()
	status, text := page(t, a, "/debug/decisions"+query)
	if err := json.Unmarshal([]byte(text), &d); status != 200 || err != nil {
		t.Fatalf("status %d, %v in %s", status, err, text)
	}
	return d
}

// Who polls the page sees a decision when it is made, and again when its request is
// over; a request that is tried again has two, and one that is refused is there too.
// Nothing of what was asked is told.
func TestDecisionsPage(t *testing.T) {
	engine := startEngine(t, 0, "m")
	c := testConfig(engine)
	c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim", BlockSize: 4}}
	a := startAgent(t, c)
	defer stopped(t, a)
	if d := recentPage(t, a, ""); len(d.Decisions) != 0 || d.Seq != 0 {
		t.Fatalf("%+v before any request", d)
	}
	askWhole(t, a, "Hello, secret!")
	var d proxy.RecentDecisions
	eventually(t, func() bool {
		d = recentPage(t, a, "")
		return len(d.Decisions) == 1 && d.Decisions[0].Outcome != nil
	}, func() string { return fmt.Sprintf("%+v", d) })
	if row := d.Decisions[0]; row.Winner == "" || row.Outcome.Status != 200 || row.Model != "m" || row.Candidates < 1 {
		t.Errorf("%+v", row)
	}
	if again := recentPage(t, a, fmt.Sprint("?after=", d.Seq)); len(again.Decisions) != 0 || again.Seq != d.Seq {
		t.Errorf("%+v is new", again)
	}
	for _, query := range []string{"?id=1", "?request_id=" + d.Decisions[0].RequestID} {
		status, text := page(t, a, "/debug/decisions"+query)
		var e Explanation
		if err := json.Unmarshal([]byte(text), &e); status != 200 || err != nil || e.Winner != d.Decisions[0].Winner || len(e.Replicas) == 0 || e.Outcome == nil {
			t.Errorf("%s: status %d, %v in %s", query, status, err, text)
		}
		if strings.Contains(text, "secret") {
			t.Errorf("the prompt is told: %s", text)
		}
	}
	for query, want := range map[string]int{"?id=99": 404, "?request_id=x": 404, "?after=x": 400, "?id=-1": 400} {
		if status, text := page(t, a, "/debug/decisions"+query); status != want {
			t.Errorf("%s: status %d: %s; want %d", query, status, text, want)
		}
	}
	// The engine goes: requests that are sent there are tried again, and when there is
	// no replica they are refused.
	engine.Close()
	refused := false
	eventually(t, func() bool {
		ask(t, a, 1)
		d = recentPage(t, a, "")
		for _, row := range d.Decisions {
			refused = refused || row.Attempt == 0 && row.Winner == "" && row.Reason == "no_replica" && row.Outcome != nil && row.Outcome.Status == 503
		}
		return refused
	}, func() string { return fmt.Sprintf("%+v", d) })
	for i, row := range d.Decisions[:len(d.Decisions)-1] {
		if next := d.Decisions[i+1]; next.Attempt > 1 && (row.RequestID != next.RequestID || row.Outcome == nil || row.Outcome.Outcome == "ok") {
			t.Errorf("%+v is followed by %+v", row, next)
		}
	}
}
