package agent

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// readConfig is a valid configuration: what the text says, and a replica.
func readConfig(t *testing.T, text string) *Config {
	t.Helper()
	c := DefaultConfig()
	if err := c.ParseConfig([]byte("replicas: [{url: http://gpu:8000}]\n" + text)); err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return &c
}

// A shadow counts on while it and the policy that it is beside are configured as
// before, whatever else changes.
func TestShadowsAreKept(t *testing.T) {
	var p policies
	of := func(text string) (live string, shadows []*policy.Shadow) {
		t.Helper()
		c := p.of(readConfig(t, text), "m")
		return c.live.Name(), c.shadows
	}
	live, first := of("routing: {default_policy: cost_model, shadows: [least_request, {policy: cost_model, name: other}]}")
	if live != "cost_model" || len(first) != 2 || first[0].Policy.Name() != "least_request" {
		t.Fatalf("%s beside %d shadows", live, len(first))
	}
	_, again := of("routing: {default_policy: cost_model, shadows: [least_request, {policy: cost_model, name: other}]}\nretry: {max_attempts: 1}")
	if !slices.Equal(first, again) {
		t.Error("shadows are new though nothing of them has changed")
	}
	_, moved := of("routing: {default_policy: cost_model, shadows: [{policy: cost_model, name: other}]}\nmodels: [{name: m, shadows: [least_request]}]")
	if len(moved) != 2 || moved[0] != first[1] || moved[1] != first[0] {
		t.Error("a shadow is new that has moved to the model's own")
	}
	live, fresh := of("routing: {default_policy: cost_model}\nmodels: [{name: m, policy: least_request, shadows: [least_request]}]")
	if live != "least_request" || len(fresh) != 1 || fresh[0] == first[0] {
		t.Errorf("%s: a shadow goes on that has counted beside another policy", live)
	}
	p.keep(func(string) bool { return false })
	if len(p.models) != 0 {
		t.Error("a model is kept that is not served")
	}
}

// Weights of routing are those of its policy, wherever a model has it; a model's
// own go first.
func TestWeightsOfModels(t *testing.T) {
	f := func(model, name string, want Weights) {
		t.Helper()
		c := DefaultConfig()
		text := "routing: {default_policy: cost_model, weights: {own_work: 3, slack: 0.5}}\nmodels: [" + model + "]"
		if err := c.ParseConfig([]byte(text)); err != nil {
			t.Fatal(err)
		}
		got, weights := c.chosenBy(&c.Models[0])
		if got != name || len(weights) != len(want) {
			t.Errorf("%s: %s with %v, want %s with %v", model, got, weights, name, want)
		}
		for k, v := range want {
			if weights[k] != v {
				t.Errorf("%s: %s is %v, want %v", model, k, weights[k], v)
			}
		}
	}
	f("{name: m}", "cost_model", Weights{"own_work": 3, "slack": 0.5})
	f("{name: m, weights: {slack: 0}}", "cost_model", Weights{"own_work": 3, "slack": 0})
	f("{name: m, policy: cost_model, weights: {bound: 2}}", "cost_model", Weights{"own_work": 3, "slack": 0.5, "bound": 2})
	f("{name: m, policy: least_request}", "least_request", nil)
}

// The fleet gives each model its own, those that only engines name too.
func TestFleetHasPolicies(t *testing.T) {
	cfg := readConfig(t, "routing: {default_policy: cost_model, shadows: [least_request]}\nmodels: [{name: m, policy: least_request, shadows: [cost_model], session_header: x-chat}]")
	var published *proxy.Fleet
	f := newFleet(cfg, testLog(t), func(s *proxy.Fleet) { published = s }, func([]netip.AddrPort) {})
	defer f.close()
	publish := func() *proxy.Model {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.publishLocked()
		return published.Models["m"]
	}
	m := publish()
	if m.Policy.Name() != "least_request" || len(m.Shadows) != 2 || m.Shadows[0].Policy.Name() != "least_request" || m.Shadows[1].Policy.Name() != "cost_model" {
		t.Errorf("m has %s and %d shadows", m.Policy.Name(), len(m.Shadows))
	}
	if m.SessionHeader != "x-chat" {
		t.Errorf("sessions are named by %q", m.SessionHeader)
	}
	if again := publish(); again == m || !slices.Equal(again.Shadows, m.Shadows) {
		t.Error("the next snapshot has other shadows")
	}
}

// Each policy answers all requests, with all others in its shadow, and chooses by
// what it is made for: turns, sessions and beginnings of prompts come to it.
func TestEveryPolicyServes(t *testing.T) {
	const requests = 12
	c := testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "m"), startEngine(t, 0, "m"))
	c.Health.Timeout = patience // none leaves on a busy machine
	for _, name := range policy.Names() {
		c.Routing.Shadows = append(c.Routing.Shadows, ShadowConfig{Policy: name})
	}
	a := startAgent(t, c)
	defer stopped(t, a)
	fleet := func() string { _, text := page(t, a, "/debug/fleet"); return text }
	eventually(t, func() bool { return strings.Count(fleet(), `"up": true`) == 3 }, fleet)
	for _, name := range policy.Names() {
		n := c
		n.Routing.DefaultPolicy = name
		if err := a.Reload(n); err != nil {
			t.Fatal(err)
		}
		if text := fleet(); !strings.Contains(text, fmt.Sprintf(`"policy": %q`, name)) {
			t.Errorf("%s is not in use:\n%s", name, text)
		}
		seen := map[string]int{}
		for i := range requests {
			body := fmt.Sprintf(`{"model":"m","stream":true,"max_tokens":2,"messages":[{"role":"system","content":"the same for all"},{"role":"user","content":"%s %d"}]}`, strings.Repeat("hi ", 100), i)
			req, _ := http.NewRequest("POST", "http://"+a.Addr().String()+"/v1/chat/completions", strings.NewReader(body))
			req.Header.Set("X-Session-Id", "ann")
			resp, err := (&http.Client{Timeout: patience}).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("%s: %s, %v: %s", name, resp.Status, err, answer)
			}
			seen[resp.Header.Get("X-Inferrail-Replica")]++
		}
		switch name {
		case "round_robin":
			for id, got := range seen {
				if got != requests/3 {
					t.Errorf("%s: %d requests at %s", name, got, id)
				}
			}
		case "sticky":
			if len(seen) != 1 {
				t.Errorf("%s: a session at %v", name, seen)
			}
		}
	}
}

// README.md tells of every policy and weight, and what it is unless it is configured.
func TestReadmeHasEveryWeight(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(readme), "\n## Policies\n")
	text, _, ok := strings.Cut(text, "\n## ")
	if !ok {
		t.Fatal("README.md has no section of policies")
	}
	// In the table of policies a weight's value is behind its name, and in that of the
	// default policy in the next column.
	told := map[string]map[string]float64{}
	number := regexp.MustCompile("`([a-z_]+)` ([0-9.e-]+)")
	of := func(policy string) map[string]float64 {
		if told[policy] == nil {
			told[policy] = map[string]float64{}
		}
		return told[policy]
	}
	value := func(s string) float64 {
		v, err := strconv.ParseFloat(strings.TrimSpace(s), 64)
		if err != nil {
			t.Errorf("README.md: %q is no number", s)
		}
		return v
	}
	for row := range strings.Lines(text) {
		cells := strings.Split(row, "|")
		if len(cells) == 6 {
			for name := range strings.SplitSeq(cells[1], ",") {
				for _, m := range number.FindAllStringSubmatch(cells[3], -1) {
					of(strings.Trim(name, " `"))[m[1]] = value(m[2])
				}
			}
		}
		if names := strings.Split(cells[min(1, len(cells)-1)], ", "); len(cells) == 5 && policy.Weights(policy.Default)[strings.Trim(names[0], " `")] != 0 {
			for i, v := range strings.Split(cells[2], ", ") {
				of(policy.Default)[strings.Trim(names[i], " `")] = value(v)
			}
		}
	}
	for _, name := range policy.Names() {
		if !strings.Contains(text, "| `"+name+"`") && !strings.Contains(text, ", `"+name+"` |") {
			t.Errorf("README.md has no row of the policy %s", name)
		}
		if want := policy.Weights(name); !maps.Equal(told[name], want) && len(told[name])+len(want) > 0 {
			t.Errorf("README.md tells of %s the weights %v, and they are %v", name, told[name], want)
		}
	}
}
