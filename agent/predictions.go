package agent

import (
	"cmp"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/proxy"
)

// predictionsReport is what /debug/predictions shows: how well it was predicted when
// the first tokens of the last requests would be there.
type predictionsReport struct {
	// Summary is of all decisions that are kept, one row for each replica and model
	// of which there are some.
	Summary []predictionSummary `json:"summary"`
	// Calibrations are of all replicas.
	Calibrations []calibrationReport `json:"calibrations"`
	// Predictions are the decisions whose requests have ended last, the last one
	// first.
	Predictions []predictionReport `json:"predictions"`
}

// predictionSummary is how the predictions for a replica and a model have done.
type predictionSummary struct {
	Replica string `json:"replica"`
	Model   string `json:"model"`
	// Decisions is how many are kept, Compared of how many the first token was seen.
	Decisions int `json:"decisions"`
	Compared  int `json:"compared"`
	// Bias is the median of observed over predicted: above 1, it takes longer than
	// is predicted. The errors are relative to what was observed, as absolute
	// values. All are null when nothing could be compared.
	Bias        *float64 `json:"bias"`
	MedianError *float64 `json:"median_error"`
	P90Error    *float64 `json:"p90_error"`
	// CachedCompared is of how many the engine has told what it had cached, and the
	// tokens are the sums of those.
	CachedCompared  int `json:"cached_compared"`
	CachedPredicted int `json:"cached_predicted_tokens"`
	CachedActual    int `json:"cached_actual_tokens"`
}

// calibrationReport is what was learned of a replica's speed.
type calibrationReport struct {
	Replica string `json:"replica"`
	// What its prefill costs, as in proxy.ConsideredSpeed.
	TokenUS     float64 `json:"us_per_token"`
	AttentionNS float64 `json:"ns_per_pair"`
	PromptMS    float64 `json:"ms_per_prompt"`
	// Samples is how many first tokens that is learned from: with 0 it is what was
	// supposed at first.
	Samples int `json:"samples"`
	// Error is the median of how far off the last predictions were, relative to
	// what was seen.
	Error float64 `json:"error"`
	// Determined: the traffic tells the three numbers apart. Otherwise they are right
	// together, for prompts such as there were.
	Determined bool `json:"determined"`
	// Changes is how often the replica has become slower or faster as a whole.
	Changes int `json:"changes"`
}

// predictionReport is one decision. Numbers that are not known are null.
type predictionReport struct {
	Time            time.Time `json:"time"`
	RequestID       string    `json:"request_id"`
	Model           string    `json:"model"`
	Policy          string    `json:"policy"`
	Replica         string    `json:"replica"`
	Reason          string    `json:"reason"`
	Outcome         string    `json:"outcome"`
	Status          int       `json:"status"`
	Attempts        int       `json:"attempts"`
	Exact           bool      `json:"exact"`
	PromptTokens    int       `json:"prompt_tokens"`
	CachedPredicted *int      `json:"cached_predicted"`
	CachedActual    *int      `json:"cached_actual"`
	PredictedMS     *float64  `json:"predicted_ms"`
	ObservedMS      *float64  `json:"observed_ms"`
}

const (
	usualPredictions = 100
	mostPredictions  = 1024
)

// predictions shows the last decisions beside what became of them.
func (ad *admin) predictions(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	limit := usualPredictions
	if text := query.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			http.Error(w, fmt.Sprintf("limit=%.40q is not a number from 0 to %d", text, mostPredictions), http.StatusBadRequest)
			return
		}
		limit = min(n, mostPredictions)
	}
	ad.write(w, ad.agent.predictionsReport(query.Get("model"), query.Get("replica"), limit))
}

// predictionsReport makes the page for the decisions of a model, by whatever name,
// and a replica; empty is any.
func (a *Agent) predictionsReport(model, replica string, limit int) predictionsReport {
	if m := a.fleet.current().Models[model]; m != nil {
		model = m.Name
	}
	rows := slices.DeleteFunc(a.proxy.Predictions(nil), func(p proxy.Prediction) bool {
		return model != "" && p.Model != model || replica != "" && p.Replica != replica
	})
	out := predictionsReport{Summary: summarize(rows), Calibrations: a.fleet.calibrations(replica), Predictions: []predictionReport{}}
	for i := range rows[:min(limit, len(rows))] {
		out.Predictions = append(out.Predictions, reportPrediction(&rows[i]))
	}
	return out
}

// summarize sums up decisions by replica and model.
func summarize(rows []proxy.Prediction) []predictionSummary {
	type key struct{ replica, model string }
	groups := map[key][]proxy.Prediction{}
	for _, p := range rows {
		k := key{p.Replica, p.Model}
		groups[k] = append(groups[k], p)
	}
	list := []predictionSummary{}
	for k, group := range groups {
		s := predictionSummary{Replica: k.replica, Model: k.model, Decisions: len(group)}
		var ratios, errors []float64
		for _, p := range group {
			if p.CachedPredicted >= 0 && p.CachedActual >= 0 {
				s.CachedCompared++
				s.CachedPredicted += p.CachedPredicted
				s.CachedActual += p.CachedActual
			}
			if p.Observed > 0 && p.Predicted > 0 && !math.IsInf(p.Predicted, 0) {
				ratios = append(ratios, p.Observed/p.Predicted)
				errors = append(errors, math.Abs(p.Observed-p.Predicted)/p.Observed)
			}
		}
		s.Compared = len(ratios)
		s.Bias, s.MedianError, s.P90Error = percentile(ratios, 50), percentile(errors, 50), percentile(errors, 90)
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b predictionSummary) int {
		return cmp.Or(cmp.Compare(a.Replica, b.Replica), cmp.Compare(a.Model, b.Model))
	})
	return list
}

// percentile is one of values, which it sorts; nil of none.
func percentile(values []float64, percent int) *float64 {
	if len(values) == 0 {
		return nil
	}
	slices.Sort(values)
	v := thousandths(values[(len(values)-1)*percent/100])
	return &v
}

// thousandths are those of f, 0 of what is no number, which JSON does not have.
func thousandths(f float64) float64 {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return 0
	}
	return math.Round(f*1000) / 1000
}

func reportPrediction(p *proxy.Prediction) predictionReport {
	tokens := func(n int) *int {
		if n < 0 {
			return nil
		}
		return &n
	}
	milliseconds := func(seconds float64) *float64 {
		if !(seconds >= 0) || math.IsInf(seconds, 1) {
			return nil
		}
		ms := thousandths(seconds * 1000)
		return &ms
	}
	return predictionReport{p.Time, p.RequestID, p.Model, p.Policy, p.Replica, p.Reason, p.Outcome, p.Status, p.Attempts, p.Exact, p.Tokens,
		tokens(p.CachedPredicted), tokens(p.CachedActual), milliseconds(p.Predicted), milliseconds(p.Observed)}
}

// calibrations tells what was learned of the replicas' speeds, or of one's.
func (f *fleet) calibrations(replica string) []calibrationReport {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := []calibrationReport{}
	for _, m := range f.members {
		if replica != "" && m.id != replica {
			continue
		}
		e := m.replica.Calibration().Estimate()
		list = append(list, calibrationReport{m.id, thousandths(e.Speed.A * 1e6), thousandths(e.Speed.B * 1e9), thousandths(e.Speed.D * 1e3),
			e.Samples, thousandths(e.Error), e.Determined, e.Changes})
	}
	return list
}
