package deploy_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

// dashboard mirrors what is looked at of Grafana's own format.
type dashboard struct {
	UID           string  `json:"uid"`
	Title         string  `json:"title"`
	SchemaVersion int     `json:"schemaVersion"`
	Panels        []panel `json:"panels"`
	Templating    struct {
		List []struct {
			Name       string `json:"name"`
			Type       string `json:"type"`
			Definition string `json:"definition"`
		} `json:"list"`
	} `json:"templating"`
	Annotations struct {
		List []struct {
			Name string `json:"name"`
			Expr string `json:"expr"`
		} `json:"list"`
	} `json:"annotations"`
}

type panel struct {
	ID      int    `json:"id"`
	Type    string `json:"type"`
	Title   string `json:"title"`
	GridPos struct{ X, Y, W, H int }
	Targets []struct {
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
	} `json:"targets"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
}

// dashboards reads all that there are, by file.
func dashboards(t *testing.T) map[string]dashboard {
	t.Helper()
	files, err := filepath.Glob("grafana/*.json")
	if err != nil || len(files) < 4 {
		t.Fatalf("%d dashboards, %v", len(files), err)
	}
	all := map[string]dashboard{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var d dashboard
		if err := json.Unmarshal(text, &d); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		all[file] = d
	}
	return all
}

// exported are the labels of each metric that an agent exports, as the snapshot in
// package agent has them.
func exported(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../agent/testdata/metrics.txt")
	if err != nil {
		t.Fatal(err)
	}
	metrics := map[string][]string{}
	for _, m := range regexp.MustCompile(`(?m)^(inferrail_\w+) (\w+) \{(.*)\}$`).FindAllStringSubmatch(string(text), -1) {
		with := []string{"__name__", "instance", "job"}
		if m[3] != "" {
			with = append(with, strings.Split(m[3], ",")...)
		}
		if m[2] == "histogram" {
			metrics[m[1]+"_sum"], metrics[m[1]+"_count"] = with, with
			metrics[m[1]+"_bucket"] = append(slices.Clone(with), "le")
		} else {
			metrics[m[1]] = with
		}
	}
	if len(metrics) < 100 {
		t.Fatalf("only %d metrics found", len(metrics))
	}
	for _, name := range []string{"up", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} {
		metrics[name] = []string{"__name__", "instance", "job"}
	}
	return metrics
}

// known reports what a query wants that no agent exports.
func known(t *testing.T, where, query string, metrics map[string][]string) {
	t.Helper()
	expr, err := promParser.ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %v in %s", where, err, query)
		return
	}
	labelsOf := func(e parser.Node) (all []string) {
		parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
			if s, ok := n.(*parser.VectorSelector); ok {
				all = append(all, metrics[s.Name]...)
			}
			return nil
		})
		return all
	}
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			with, ok := metrics[n.Name]
			if !ok {
				t.Errorf("%s: nobody exports %s", where, n.Name)
				return nil
			}
			for _, m := range n.LabelMatchers {
				if !slices.Contains(with, m.Name) {
					t.Errorf("%s: %s has no label %s", where, n.Name, m.Name)
				}
				if m.Type == labels.MatchEqual || m.Type == labels.MatchRegexp {
					wordsKnown(t, where, n.Name, m)
				}
			}
		case *parser.AggregateExpr:
			for _, by := range n.Grouping {
				if !slices.Contains(labelsOf(n.Expr), by) {
					t.Errorf("%s: there is no label %s in %s", where, by, n.Expr)
				}
			}
		}
		return nil
	})
}

// wordsKnown checks a word that a label must be against agent/METRICS.md, which has
// those that are fixed.
func wordsKnown(t *testing.T, where, metric string, m *labels.Matcher) {
	text, err := os.ReadFile("../agent/METRICS.md")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile("(?m)^`" + m.Name + "` of `" + regexp.QuoteMeta(metric) + "` is one of (.*)$").FindStringSubmatch(string(text))
	if line == nil || m.Value == "" || strings.Contains(m.Value, ".*") {
		return
	}
	for word := range strings.SplitSeq(m.Value, "|") {
		if !strings.Contains(line[1], "`"+word+"`") {
			t.Errorf("%s: %s of %s is never %q", where, m.Name, metric, word)
		}
	}
}

// filled puts values into Grafana's variables.
var filled = strings.NewReplacer("$__rate_interval", "1m", "$__range", "1h", "$instance", ".*", "$model", ".*", "$replica", ".*")

// Every query of every dashboard is one that Prometheus understands, of metrics
// and labels that there are, and tells something of an agent with traffic.
func TestDashboards(t *testing.T) {
	// What an agent in the copy tier, to which nothing bad happens, has nothing to
	// tell of, by the beginning of the query's metric.
	quiet := map[string]string{
		"inferrail_kernel_":  "the kernel carries nothing in the copy tier",
		"inferrail_key_":     "there are no API keys",
		"inferrail_retries_": "nothing failed",
		`blame!="nobody"`:    "nobody is to blame for anything",
	}
	metrics := exported(t)
	s, now := scrapes(t)
	uids := map[string]bool{}
	used := map[string]bool{}
	for file, d := range dashboards(t) {
		if d.UID == "" || uids[d.UID] || d.Title == "" || d.SchemaVersion < 39 {
			t.Errorf("%s: uid %q, title %q, version %d", file, d.UID, d.Title, d.SchemaVersion)
		}
		uids[d.UID] = true
		variables := map[string]bool{"__rate_interval": true}
		for _, v := range d.Templating.List {
			variables[v.Name] = true
			if v.Type == "query" {
				m := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`).FindStringSubmatch(v.Definition)
				if m == nil {
					t.Errorf("%s: variable %s is %q", file, v.Name, v.Definition)
					continue
				}
				known(t, file+": variable "+v.Name, fmt.Sprintf("count by (%s) (%s)", m[2], filled.Replace(m[1])), metrics)
			}
		}
		for _, a := range d.Annotations.List {
			known(t, file+": annotation "+a.Name, filled.Replace(a.Expr), metrics)
		}
		ids := map[int]bool{}
		for i, p := range d.Panels {
			where := fmt.Sprintf("%s: %s", file, p.Title)
			if ids[p.ID] {
				t.Errorf("%s has the id of another", where)
			}
			ids[p.ID] = true
			if p.GridPos.X+p.GridPos.W > 24 || p.GridPos.W == 0 || p.GridPos.H == 0 {
				t.Errorf("%s does not fit: %+v", where, p.GridPos)
			}
			for _, o := range d.Panels[:i] {
				a, b := p.GridPos, o.GridPos
				if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
					t.Errorf("%s lies over %s", where, o.Title)
				}
			}
			if p.Type == "row" {
				if !strings.HasSuffix(p.Title, "?") {
					t.Errorf("%s is no question", where)
				}
				continue
			}
			if len(p.Targets) == 0 || p.FieldConfig.Defaults.Unit == "" && p.Type != "heatmap" {
				t.Errorf("%s has no query or no unit", where)
			}
			for _, target := range p.Targets {
				for _, m := range regexp.MustCompile(`\$(\w+)`).FindAllStringSubmatch(target.Expr, -1) {
					if !variables[m[1]] {
						t.Errorf("%s: there is no variable %s", where, m[1])
					}
				}
				query := filled.Replace(target.Expr)
				known(t, where, query, metrics)
				told := s.ask(t, query, now)
				for _, m := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(target.LegendFormat, -1) {
					if len(told) > 0 && told[0].Metric.Get(m[1]) == "" {
						t.Errorf("%s: the legend has %s, which %s does not", where, m[1], told[0].Metric)
					}
				}
				if len(told) > 0 {
					continue
				}
				excused := false
				for part := range quiet {
					if strings.Contains(target.Expr, part) {
						excused, used[part] = true, true
					}
				}
				if !excused {
					t.Errorf("%s tells nothing: %s", where, query)
				}
			}
		}
	}
	for part, why := range quiet {
		if !used[part] {
			t.Errorf("nothing is quiet because %s", why)
		}
	}
}
