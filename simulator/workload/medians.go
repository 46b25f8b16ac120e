package workload

import (
	"math"
	"slices"
)

// Medians are the medians of the summaries of several runs of one policy, each figure by
// itself. Failures are added up, and Doubts are those of any run, so that neither is
// lost. There must be at least one run.
func Medians(runs []Summary) Summary {
	m := Summary{Policy: runs[0].Policy}
	over := func(f func(*Summary) float64) float64 {
		values := make([]float64, len(runs))
		for i := range runs {
			values[i] = f(&runs[i])
		}
		return median(values)
	}
	count := func(f func(*Summary) int) int {
		return int(math.Round(over(func(s *Summary) float64 { return float64(f(s)) })))
	}
	quantiles := func(f func(*Summary) *Quantiles) Quantiles {
		of := func(g func(*Quantiles) float64) float64 { return over(func(s *Summary) float64 { return g(f(s)) }) }
		return Quantiles{
			Mean: of(func(q *Quantiles) float64 { return q.Mean }), P50: of(func(q *Quantiles) float64 { return q.P50 }),
			P90: of(func(q *Quantiles) float64 { return q.P90 }), P99: of(func(q *Quantiles) float64 { return q.P99 }),
			Max: of(func(q *Quantiles) float64 { return q.Max }),
		}
	}
	m.Requests = count(func(s *Summary) int { return s.Requests })
	m.Failed = count(func(s *Summary) int { return s.Failed })
	m.Refused = count(func(s *Summary) int { return s.Refused })
	m.Seconds = over(func(s *Summary) float64 { return s.Seconds })
	m.Rate = over(func(s *Summary) float64 { return s.Rate })
	m.TTFT = quantiles(func(s *Summary) *Quantiles { return &s.TTFT })
	m.TPOT = quantiles(func(s *Summary) *Quantiles { return &s.TPOT })
	m.ITL = quantiles(func(s *Summary) *Quantiles { return &s.ITL })
	m.E2E = quantiles(func(s *Summary) *Quantiles { return &s.E2E })
	m.Lag = quantiles(func(s *Summary) *Quantiles { return &s.Lag })
	m.HitRate = over(func(s *Summary) float64 { return s.HitRate })
	m.EngineHitRate = over(func(s *Summary) float64 { return s.EngineHitRate })
	m.Ceiling = over(func(s *Summary) float64 { return s.Ceiling })
	m.Hotspot = over(func(s *Summary) float64 { return s.Hotspot })
	m.Goodput = over(func(s *Summary) float64 { return s.Goodput })
	m.Good = over(func(s *Summary) float64 { return s.Good })
	m.Prediction = over(func(s *Summary) float64 { return s.Prediction })
	m.PredictionError = over(func(s *Summary) float64 { return s.PredictionError })
	for i := range runs {
		for k := range runs[i].Replicas {
			for len(m.Replicas) <= k {
				m.Replicas = append(m.Replicas, 0)
			}
		}
		for why, n := range runs[i].Failures {
			if m.Failures == nil {
				m.Failures = map[string]int{}
			}
			m.Failures[why] += n
		}
		for _, doubt := range runs[i].Doubts {
			if !slices.Contains(m.Doubts, doubt) {
				m.Doubts = append(m.Doubts, doubt)
			}
		}
	}
	for k := range m.Replicas {
		m.Replicas[k] = count(func(s *Summary) int {
			if k < len(s.Replicas) {
				return s.Replicas[k]
			}
			return 0
		})
	}
	return m
}
