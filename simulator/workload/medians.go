package workload

import (
	"math"
	"slices"
)

// Medians returns for each policy, in the order of their first runs, the medians of its
// runs, each measure by itself, and how far they are apart. Doubts are those of any run,
// so that none is lost.
func Medians(runs []Summary) []Summary {
	var policies []string
	by := map[string][]Summary{}
	for _, s := range runs {
		if by[s.Policy] == nil {
			policies = append(policies, s.Policy)
		}
		by[s.Policy] = append(by[s.Policy], s)
	}
	var out []Summary
	for _, p := range policies {
		out = append(out, medians(by[p]))
	}
	return out
}

// medians is of the runs of one policy.
func medians(runs []Summary) Summary {
	out := Summary{Policy: runs[0].Policy}
	all := make([]float64, len(runs))
	middle := func(of func(*Summary) float64) float64 {
		for i := range runs {
			all[i] = of(&runs[i])
		}
		return median(all)
	}
	for k, m := range out.measures() {
		*m = middle(func(s *Summary) float64 { return *s.measures()[k] })
	}
	for k, c := range out.counts() {
		*c = int(math.Round(middle(func(s *Summary) float64 { return float64(*s.counts()[k]) })))
	}
	why := map[string]int{}
	for i := range runs {
		for len(out.Replicas) < len(runs[i].Replicas) {
			out.Replicas = append(out.Replicas, 0)
		}
		for w := range runs[i].Failures {
			why[w] = 0
		}
	}
	for k := range out.Replicas {
		out.Replicas[k] = int(math.Round(middle(func(s *Summary) float64 {
			if k >= len(s.Replicas) {
				return 0
			}
			return float64(s.Replicas[k])
		})))
	}
	for w := range why {
		if n := math.Round(middle(func(s *Summary) float64 { return float64(s.Failures[w]) })); n > 0 {
			if out.Failures == nil {
				out.Failures = map[string]int{}
			}
			out.Failures[w] = int(n)
		}
	}
	for i := range runs {
		for _, doubt := range runs[i].Doubts {
			if !slices.Contains(out.Doubts, doubt) {
				out.Doubts = append(out.Doubts, doubt)
			}
		}
		if out.Curves == nil {
			out.Curves = runs[i].Curves
		}
	}
	if len(runs) > 1 {
		out.Spread.Runs = len(runs)
		for k, ends := range out.Spread.ends() {
			middle(func(s *Summary) float64 { return *s.spreading()[k] }) // which sorts
			*ends = [2]float64{all[0], all[len(all)-1]}
		}
	}
	return out
}

// measures are all that are numbers.
func (s *Summary) measures() []*float64 {
	list := []*float64{&s.Seconds, &s.Rate, &s.HitRate, &s.EngineHitRate, &s.Ceiling, &s.Hotspot, &s.Goodput, &s.Good, &s.Prediction, &s.PredictionError}
	for _, q := range []*Quantiles{&s.TTFT, &s.TPOT, &s.ITL, &s.E2E, &s.Lag} {
		list = append(list, &q.Mean, &q.P50, &q.P90, &q.P99, &q.Max)
	}
	return list
}

func (s *Summary) counts() []*int { return []*int{&s.Requests, &s.Failed, &s.Refused} }

// spreading are the measures that a Spread is of, and ends where it has them.
func (s *Summary) spreading() []*float64 {
	return []*float64{&s.TTFT.Mean, &s.TTFT.P50, &s.TTFT.P99, &s.E2E.Mean, &s.HitRate, &s.Hotspot, &s.Goodput}
}

func (s *Spread) ends() []*[2]float64 {
	return []*[2]float64{&s.TTFTMean, &s.TTFTP50, &s.TTFTP99, &s.E2EMean, &s.HitRate, &s.Hotspot, &s.Goodput}
}
