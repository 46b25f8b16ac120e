package deploy_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"

	dto "github.com/prometheus/client_model/go"

	"github.com/inferrail/inferrail/agent"
	"github.com/inferrail/inferrail/simulator"
)

// scraped is what Prometheus would have of an agent after some scrapes, by the
// series' labels. It answers queries of Prometheus's own engine. The zero value
// has nothing.
type scraped map[string]*storedSeries

type storedSeries struct {
	labels  labels.Labels
	samples []chunks.Sample
}

// between is the time from one scrape to the next, as far as queries know.
const between = 15 * time.Second

// sample is a chunks.Sample of a number.
type sample struct {
	t int64
	v float64
}

func (s sample) T() int64                      { return s.t }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.v }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }

func (s scraped) add(at time.Time, value float64, name string, pairs map[string]string) {
	b := labels.NewBuilder(labels.EmptyLabels())
	for k, v := range pairs {
		b.Set(k, v)
	}
	l := b.Set("__name__", name).Set("job", "inferrail").Set("instance", "agent:9090").Labels()
	if s[l.String()] == nil {
		s[l.String()] = &storedSeries{labels: l}
	}
	s[l.String()].samples = append(s[l.String()].samples, sample{at.UnixMilli(), value})
}

// scrape takes in a page in the text format.
func (s scraped) scrape(t *testing.T, at time.Time, page []byte) {
	t.Helper()
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	s.add(at, 1, "up", nil)
	for name, f := range families {
		for _, m := range f.Metric {
			with := map[string]string{}
			for _, l := range m.Label {
				with[l.GetName()] = l.GetValue()
			}
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				s.add(at, m.Counter.GetValue(), name, with)
			case dto.MetricType_GAUGE:
				s.add(at, m.Gauge.GetValue(), name, with)
			case dto.MetricType_HISTOGRAM:
				s.add(at, float64(m.Histogram.GetSampleCount()), name+"_count", with)
				s.add(at, m.Histogram.GetSampleSum(), name+"_sum", with)
				buckets := m.Histogram.Bucket
				if len(buckets) == 0 || !math.IsInf(buckets[len(buckets)-1].GetUpperBound(), 1) {
					le := maps.Clone(with)
					le["le"] = "+Inf"
					s.add(at, float64(m.Histogram.GetSampleCount()), name+"_bucket", le)
				}
				for _, b := range buckets {
					le := maps.Clone(with)
					le["le"] = fmt.Sprint(b.GetUpperBound())
					s.add(at, float64(b.GetCumulativeCount()), name+"_bucket", le)
				}
			}
		}
	}
}

// Querier implements storage.Queryable.
func (s scraped) Querier(from, to int64) (storage.Querier, error) {
	return querier{s, from, to}, nil
}

type querier struct {
	scraped
	from, to int64
}

func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	var found []storage.Series
	for _, key := range slices.Sorted(maps.Keys(q.scraped)) {
		series := q.scraped[key]
		fits := true
		for _, m := range matchers {
			fits = fits && m.Matches(series.labels.Get(m.Name))
		}
		var within []chunks.Sample
		for _, one := range series.samples {
			if one.T() >= q.from && one.T() <= q.to {
				within = append(within, one)
			}
		}
		if fits && len(within) > 0 {
			found = append(found, storage.NewListSeries(series.labels, within))
		}
	}
	return &seriesSet{found: found, at: -1}
}

func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) Close() error { return nil }

type seriesSet struct {
	found []storage.Series
	at    int
}

func (s *seriesSet) Next() bool                        { s.at++; return s.at < len(s.found) }
func (s *seriesSet) At() storage.Series                { return s.found[s.at] }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }

var queries = promql.NewEngine(promql.EngineOpts{MaxSamples: 1 << 22, Timeout: time.Minute, Parser: promParser})

var promParser = parser.NewParser(parser.Options{})

// ask runs a query, and returns what it tells.
func (s scraped) ask(t *testing.T, query string, at time.Time) promql.Vector {
	t.Helper()
	q, err := queries.NewInstantQuery(t.Context(), s, nil, query, at)
	if err != nil {
		t.Errorf("%s: %v", query, err)
		return nil
	}
	defer q.Close()
	result := q.Exec(t.Context())
	v, err := result.Vector()
	if err != nil {
		t.Errorf("%s: %v", query, err)
	}
	return slices.Clone(v)
}

// scrapes is what a Prometheus has of the agent of the compose file, and now the
// time of its last scrape. It is made once for all tests.
func scrapes(t *testing.T) (s scraped, now time.Time) {
	t.Helper()
	pages, err := traffic()
	if err != nil {
		t.Fatal(err)
	}
	s = scraped{}
	now = time.Now()
	for i, page := range pages {
		s.scrape(t, now.Add(time.Duration(i+1-len(pages))*between), page)
	}
	return s, now
}

// traffic is the pages of metrics, one after the other, of an agent with the
// configuration of the compose file before three engines like those there.
var traffic = sync.OnceValues(func() (pages [][]byte, _ error) {
	var engines []agent.ReplicaConfig
	for i := range 3 {
		cfg := simulator.Config{Seed: uint64(i), ServedModelName: []string{"sim"}, EnablePromptTokensDetails: true, TimePerOutputToken: time.Millisecond,
			KVEvents: simulator.KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"}}
		if i == 2 {
			cfg.Faults.Throttle = 3
		}
		engine, err := simulator.Start(cfg)
		if err != nil {
			return nil, err
		}
		defer engine.Close()
		engines = append(engines, agent.ReplicaConfig{ID: fmt.Sprintf("engine-%d", i), URL: engine.URL()})
	}
	cfg := agent.DefaultConfig()
	if err := cfg.ReadConfig("compose/config.yaml"); err != nil {
		return nil, err
	}
	cfg.Listen, cfg.AdminListen, cfg.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
	cfg.Replicas = engines
	cfg.Observability.OTLPEndpoint = ""
	cfg.Routing.Admission.Budget = time.Minute
	a, err := agent.Start(context.Background(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		a.Stop(ctx)
	}()
	client := http.Client{Timeout: time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	defer client.CloseIdleConnections()
	get := func(url string) ([]byte, error) {
		resp, err := client.Get(url)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		return io.ReadAll(resp.Body)
	}
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		if up, of := a.Replicas(); up == of {
			break
		}
		if time.Since(began) > time.Minute {
			return nil, fmt.Errorf("the engines do not join")
		}
	}
	text := strings.Repeat("The quick brown fox jumps over the lazy dog. ", 60)
	for round := range 4 {
		var clients sync.WaitGroup
		for c := range 8 {
			clients.Go(func() {
				for n := range 8 {
					body := fmt.Sprintf(`{"model":"sim","stream":%v,"max_tokens":8,"messages":[{"role":"user","content":"%d %s %d %d"}]}`, n%8 != 7, c%3, text, round, n)
					if resp, err := client.Post("http://"+a.Addr().String()+"/v1/chat/completions", "application/json", strings.NewReader(body)); err == nil {
						io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
				}
			})
		}
		clients.Wait()
		page, err := get("http://" + a.AdminAddr().String() + "/metrics")
		if err != nil {
			return nil, err
		}
		pages = append(pages, page)
	}
	return pages, nil
})
