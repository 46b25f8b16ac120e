package deploy_test

import (
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
)

// rules are those of the alerts.
func rules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile("prometheus/alerts.yaml", false, model.UTF8Validation, promParser, slog.New(slog.DiscardHandler))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var all []rulefmt.Rule
	for _, g := range groups.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// Prometheus reads the alerts, which are of metrics that there are. Each names a
// section of the README that says what to do, and each such section is of an alert.
func TestAlerts(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	metrics := exported(t)
	named := map[string]bool{}
	for _, r := range rules(t) {
		known(t, r.Alert, r.Expr, metrics)
		named[r.Alert] = true
		if want := "deploy/README.md#" + strings.ToLower(r.Alert); r.Annotations["runbook"] != want {
			t.Errorf("the runbook of %s is %s, want %s", r.Alert, r.Annotations["runbook"], want)
		}
		if !strings.Contains(string(readme), "\n#### "+r.Alert+"\n") {
			t.Errorf("the README says nothing of %s", r.Alert)
		}
		if severity := r.Labels["severity"]; severity != "critical" && severity != "warning" || r.Annotations["summary"] == "" {
			t.Errorf("%s is %q: %s", r.Alert, severity, r.Annotations["summary"])
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^#### (Inferrail\w+)$`).FindAllStringSubmatch(string(readme), -1) {
		if !named[m[1]] {
			t.Errorf("the README speaks of %s, which is no alert", m[1])
		}
	}
	if len(named) < 5 {
		t.Errorf("only %d alerts", len(named))
	}
}

// No alert fires for an agent that is well, and each does for one that is not.
func TestAlertsFire(t *testing.T) {
	now := time.Now()
	// Two scrapes of a series, a minute apart.
	type series struct {
		name     string
		labels   map[string]string
		from, to float64
	}
	ill := map[string][]series{
		"InferrailAgentDown":            {{"up", nil, 0, 0}},
		"InferrailNoReplica":            {{"inferrail_replica_up", map[string]string{"replica": "a"}, 0, 0}},
		"InferrailReplicaDown":          {{"inferrail_replica_up", map[string]string{"replica": "a"}, 0, 0}, {"inferrail_replica_up", map[string]string{"replica": "b"}, 1, 1}},
		"InferrailRequestsFail":         {{"inferrail_requests_total", map[string]string{"model": "m", "blame": "engine", "outcome": "engine_died"}, 0, 10}, {"inferrail_requests_total", map[string]string{"model": "m", "blame": "nobody", "outcome": "ok"}, 0, 90}},
		"InferrailRequestsRefused":      {{"inferrail_requests_total", map[string]string{"model": "m", "blame": "nobody", "outcome": "over_budget"}, 0, 10}, {"inferrail_requests_total", map[string]string{"model": "m", "blame": "nobody", "outcome": "ok"}, 0, 90}},
		"InferrailConfigurationRefused": {{"inferrail_config_last_reload_successful", nil, 0, 0}},
		"InferrailPredictionsOff": {
			{"inferrail_prediction_ratio_bucket", map[string]string{"model": "m", "le": "2"}, 0, 10},
			{"inferrail_prediction_ratio_bucket", map[string]string{"model": "m", "le": "8"}, 0, 200},
			{"inferrail_prediction_ratio_bucket", map[string]string{"model": "m", "le": "+Inf"}, 0, 200},
			{"inferrail_prediction_ratio_count", map[string]string{"model": "m"}, 0, 200}},
		"InferrailCertificateExpires": {{"inferrail_certificate_expiry_timestamp_seconds", nil, float64(now.Unix()), float64(now.Add(24 * time.Hour).Unix())}},
	}
	well, at := scrapes(t)
	for _, r := range rules(t) {
		if got := well.ask(t, r.Expr, at); len(got) > 0 {
			t.Errorf("%s fires for an agent that is well: %v", r.Alert, got)
		}
		s := scraped{}
		for _, one := range ill[r.Alert] {
			s.add(now.Add(-time.Minute), one.from, one.name, one.labels)
			s.add(now, one.to, one.name, one.labels)
		}
		if len(s.ask(t, r.Expr, now)) == 0 {
			t.Errorf("%s does not fire for an agent that is ill", r.Alert)
		}
	}
	// An agent that knows of no replica exports none.
	s := scraped{}
	s.add(now, 1, "up", nil)
	for _, r := range rules(t) {
		if got := s.ask(t, r.Expr, now); (len(got) > 0) != (r.Alert == "InferrailNoReplica") {
			t.Errorf("%s: with no replica it tells %v", r.Alert, got)
		}
	}
}
