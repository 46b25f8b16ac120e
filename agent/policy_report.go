package agent

import (
	"maps"
	"net/http"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// policyReport is one model of what /debug/policy shows: how its replicas are
// chosen, and how other policies would have done.
type policyReport struct {
	Model string `json:"model"`
	// Policy is the one that chooses, with all its weights.
	Policy   string             `json:"policy"`
	Weights  map[string]float64 `json:"weights"`
	Replicas int                `json:"replicas"`
	// BudgetMS is the time to first token that a request is granted that does not
	// say, 0 for any.
	BudgetMS  float64          `json:"budget_ms"`
	Admission *admissionReport `json:"admission"` // nil takes all
	// Waiting are the requests that wait instead of being refused, of which there may
	// be MaxWaiting.
	Waiting    int            `json:"waiting"`
	MaxWaiting int            `json:"max_waiting"`
	Shadows    []shadowReport `json:"shadows"`
}

// admissionReport is what decides whether a model's requests are taken. Observed is
// the Percentile of the times to first token in the Window, 0 of no samples. For
// LateForS requests whose budget is at most LateBudgetMS are taken to be late still.
type admissionReport struct {
	Mode         string  `json:"mode"`
	Percentile   float64 `json:"percentile"`
	WindowS      float64 `json:"window_s"`
	ObservedMS   float64 `json:"observed_ms"`
	Samples      int     `json:"samples"`
	LateForS     float64 `json:"late_for_s"`
	LateBudgetMS float64 `json:"late_budget_ms"`
}

// shadowReport is a policy beside the live one. Times are in milliseconds, and above
// 0 when the shadow would have been better.
type shadowReport struct {
	Name    string             `json:"name"`
	Policy  string             `json:"policy"`
	Weights map[string]float64 `json:"weights"`
	// Decisions are those that it was asked for, Agreed those in which it chose as
	// the live policy did.
	Decisions uint64 `json:"decisions"`
	Agreed    uint64 `json:"agreed"`
	// PredictedMS is by how much its choice was expected to be better, on average of
	// all decisions; ObservedMS by how much that is so against what the live choice
	// has taken, on average of those that could be Compared; ErrorMS how much of
	// that is because the live choice has taken longer than was expected.
	PredictedMS float64 `json:"predicted_ms"`
	Compared    uint64  `json:"compared"`
	ObservedMS  float64 `json:"observed_ms"`
	ErrorMS     float64 `json:"error_ms"`
	// Of the last 256 that could be compared.
	LowMS    float64 `json:"p10_ms"`
	MedianMS float64 `json:"p50_ms"`
	HighMS   float64 `json:"p90_ms"`
}

// policies shows how the replicas of each model are chosen.
func (ad *admin) policies(w http.ResponseWriter, _ *http.Request) {
	ad.write(w, map[string]any{"models": ad.agent.fleet.policyReports()})
}

func (f *fleet) policyReports() []policyReport {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, list := time.Now(), []policyReport{}
	for _, m := range f.snapshot.Listed {
		row := policyReport{Model: m.Name, Policy: policyName(m.Policy), Weights: map[string]float64{},
			Replicas: len(m.Replicas), BudgetMS: float64(m.Budget.Microseconds()) / 1000, Shadows: []shadowReport{}}
		if m.Admission != nil {
			s := m.Admission.State(now)
			row.Admission = &admissionReport{s.Mode, s.Percentile, s.Window.Seconds(), thousandths(s.Observed.Seconds() * 1000), s.Samples,
				thousandths(s.LateFor.Seconds()), thousandths(s.LateBudget.Seconds() * 1000)}
		}
		row.MaxWaiting = m.Waiting.Max
		if m.State != nil {
			row.Waiting = m.State.Waiting()
		}
		chosen := f.policies.models[m.Name]
		if chosen != nil {
			row.Weights = allWeights(chosen.name, chosen.weights)
		}
		for i, s := range m.ShadowReports() {
			r := &s.Regret
			out := shadowReport{Name: s.Name, Policy: m.Shadows[i].Policy.Name(), Weights: map[string]float64{}, Decisions: r.Decisions, Agreed: r.Agreed,
				PredictedMS: mean(r.Predicted, r.Decisions), Compared: r.Compared, ObservedMS: mean(r.Observed, r.Compared), ErrorMS: mean(r.Error, r.Compared),
				LowMS: thousandths(r.Low * 1000), MedianMS: thousandths(r.Median * 1000), HighMS: thousandths(r.High * 1000)}
			if chosen != nil && i < len(chosen.specs) {
				out.Weights = allWeights(chosen.specs[i].Policy, chosen.specs[i].Weights)
			}
			row.Shadows = append(row.Shadows, out)
		}
		list = append(list, row)
	}
	return list
}

// mean is one of n, in milliseconds, of which sum are the seconds.
func mean(sum float64, n uint64) float64 {
	if n == 0 {
		return 0
	}
	return thousandths(sum / float64(n) * 1000)
}

// allWeights are a policy's weights, those that are given and the others.
func allWeights(name string, given Weights) map[string]float64 {
	weights := policy.Weights(name)
	if weights == nil {
		weights = map[string]float64{}
	}
	maps.Copy(weights, given)
	return weights
}
