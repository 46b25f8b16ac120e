package bench

import (
	"fmt"

	"github.com/inferrail/inferrail/simulator/workload"
)

// target is one thing that the default policy is to reach.
type target struct {
	what string
	// on are the experiments that it is to be reached in.
	on []string
	// measure says what an experiment has, and false when the experiment does not tell.
	measure func(c *workload.Comparison) (finding, bool)
}

// finding is what an experiment says of a target.
type finding struct {
	measured string
	met      bool
	// beyond is where what nobody can pass is, if not even that reaches the target; ""
	// where it does, or where there is no such limit.
	beyond string
}

// verdict is what the report says of it.
func (f *finding) verdict() string {
	switch {
	case f.met:
		return "yes"
	case f.beyond != "":
		return "out of reach: " + f.beyond
	}
	return "**no**"
}

// traces are the experiments with recorded prefixes before the reference's engines.
var traces = []string{"conversation", "conversation-fast", "synthetic", "synthetic-fast"}

// targets are what the evaluation is there to check.
var targets = []target{
	{"97 % of the reuse that capacity allows to who knows what will come", traces,
		ofReuse(func(c *workload.Comparison, ours *workload.Summary) float64 { return ours.Ceiling })},
	{"97 % of the reuse of one cache as large as all", traces,
		ofReuse(func(c *workload.Comparison, ours *workload.Summary) float64 { return c.Pooled })},
	{"hotspot at most 1.1", traces,
		func(c *workload.Comparison) (f finding, ok bool) {
			ours := runOf(c, defaultPolicy)
			if ours == nil {
				return f, false
			}
			return finding{measured: fmt.Sprintf("%.3f", ours.Hotspot), met: ours.Hotspot <= 1.1}, true
		}},
	{"mean TTFT within 15 % of the bound", traces,
		func(c *workload.Comparison) (f finding, ok bool) {
			ours := runOf(c, defaultPolicy)
			if ours == nil || c.Bound == nil || c.Bound.TTFT.Mean <= 0 {
				return f, false
			}
			above := ours.TTFT.Mean/c.Bound.TTFT.Mean - 1
			s := fmt.Sprintf("%s, bound %s: %s above", inMS.write(ours.TTFT.Mean), inMS.write(c.Bound.TTFT.Mean), inPercent.write(above))
			if turns := runOf(c, "round_robin"); turns != nil {
				s += fmt.Sprintf(" (round_robin is at %.2fx)", turns.TTFT.Mean/c.Bound.TTFT.Mean)
			}
			return finding{measured: s, met: above <= 0.15}, true
		}},
	{"p99 TTFT 40 % below round_robin", []string{"w1", "w1-busy", "w1-limit", "w2", "w2-busy", "w2-limit", "w3", "w3-busy", "w3-limit", "w4", "w4-busy", "w4-limit"}, below("round_robin", 0.40)},
	{"p99 TTFT 48 % below round_robin with one engine twice as slow", []string{"dio-asymmetry", "dio-asymmetry-busy"}, below("round_robin", 0.48)},
	{"at least one GPU in four saved at equal limits", []string{"capacity-w1", "capacity-w2", "capacity-w3"},
		func(c *workload.Comparison) (f finding, ok bool) {
			ours, turns := capacityOf(c, defaultPolicy), capacityOf(c, "round_robin")
			if ours == nil || turns == nil || turns.GPUs <= 0 || ours.GPUs <= 0 {
				return f, false
			}
			saved := 1 - ours.GPUs/turns.GPUs
			f.measured = fmt.Sprintf("%s instead of %s: %s saved", digits(ours.GPUs), digits(turns.GPUs), inPercent.write(saved))
			f.met = saved >= 0.25
			return f, true
		}},
	{"as good as round_robin where nothing is shared (mean and p99 TTFT at most 3 % above, or within what seeds differ by)", []string{"w6", "w6-busy"},
		func(c *workload.Comparison) (f finding, ok bool) {
			ours, turns := runOf(c, defaultPolicy), runOf(c, "round_robin")
			if ours == nil || turns == nil || turns.TTFT.Mean <= 0 || turns.TTFT.P99 <= 0 {
				return f, false
			}
			mean, p99 := ours.TTFT.Mean/turns.TTFT.Mean-1, ours.TTFT.P99/turns.TTFT.P99-1
			f.measured = fmt.Sprintf("mean %s, p99 %s", change(mean), change(p99))
			f.met = within(mean, ours.Spread.TTFTMean, turns.Spread.TTFTMean) && within(p99, ours.Spread.TTFTP99, turns.Spread.TTFTP99)
			return f, true
		}},
}

// within reports that one median is not more above another than chance makes of it: by
// more than 3 %, all runs of one being above all runs of the other.
func within(above float64, ours, theirs [2]float64) bool {
	return above <= 0.03 || ours[0] > 0 && ours[0] <= theirs[1]
}

// ofReuse measures the default's hit rate as a part of another. Nobody's is above the
// ceiling, and hardly anybody's above that of one cache as large as all, for engines drop
// what was used least recently, wherever requests go.
func ofReuse(most func(*workload.Comparison, *workload.Summary) float64) func(*workload.Comparison) (finding, bool) {
	const least = 0.97
	return func(c *workload.Comparison) (f finding, ok bool) {
		ours := runOf(c, defaultPolicy)
		if ours == nil || most(c, ours) <= 0 {
			return f, false
		}
		of := most(c, ours)
		f.measured = fmt.Sprintf("%s of %s: %s", percent(ours.HitRate), percent(of), percent(ours.HitRate/of))
		f.met = ours.HitRate/of >= least
		if ours.Ceiling > 0 && ours.Ceiling/of < least {
			f.beyond = fmt.Sprintf("the ceiling is at %s", percent(ours.Ceiling/of))
		} else if of == ours.Ceiling && c.Pooled > 0 && c.Pooled/of < least {
			f.beyond = fmt.Sprintf("one cache as large as all, which drops what was used least recently as engines do, is at %s", percent(c.Pooled/of))
		}
		return f, true
	}
}

// below measures how far the default's p99 is below another policy's.
func below(other string, least float64) func(*workload.Comparison) (finding, bool) {
	return func(c *workload.Comparison) (f finding, ok bool) {
		ours, theirs := runOf(c, defaultPolicy), runOf(c, other)
		if ours == nil || theirs == nil || theirs.TTFT.P99 <= 0 {
			return f, false
		}
		by := 1 - ours.TTFT.P99/theirs.TTFT.P99
		f.measured = fmt.Sprintf("%s after %s: %s", inMS.write(ours.TTFT.P99), inMS.write(theirs.TTFT.P99), change(-by))
		f.met = by >= least
		if c.Bound != nil && c.Bound.TTFT.P99 > 0 {
			bound := 1 - c.Bound.TTFT.P99/theirs.TTFT.P99
			f.measured += fmt.Sprintf(" (the bound: %s", change(-bound))
			if c.Shared != nil {
				f.measured += "; shared: " + change(c.Shared.TTFT.P99/theirs.TTFT.P99-1)
			}
			f.measured += ")"
			if bound < least {
				f.beyond = "the bound is " + change(-bound)
			}
		}
		return f, true
	}
}

// change is a difference as a part of what it is compared with.
func change(by float64) string {
	if by < 0 {
		return inPercent.write(-by) + " below"
	}
	return inPercent.write(by) + " above"
}

// runOf is a policy's run, nil when there is none.
func runOf(c *workload.Comparison, policy string) *workload.Summary {
	for i := range c.Runs {
		if c.Runs[i].Policy == policy {
			return &c.Runs[i]
		}
	}
	return nil
}

func capacityOf(c *workload.Comparison, policy string) *workload.Capacity {
	for i := range c.Capacity {
		if c.Capacity[i].Policy == policy {
			return &c.Capacity[i]
		}
	}
	return nil
}
