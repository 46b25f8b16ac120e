package virtual

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/inferrail/inferrail/simulator/workload"
)

// WriteTable writes a comparison for people, in lines of no more than 120 columns.
func WriteTable(w io.Writer, c *workload.Comparison) error {
	var b strings.Builder
	n := 0
	if len(c.Runs) > 0 {
		n = c.Runs[0].Requests
	}
	fmt.Fprintf(&b, "%s: %d request%s", c.Workload, n, plural(n))
	if len(c.Runs) > 0 {
		fmt.Fprintf(&b, ", %.3g a second", c.Runs[0].Rate)
	}
	if c.Speed != 0 && c.Speed != 1 {
		fmt.Fprintf(&b, " (x%.4g)", c.Speed)
	}
	fmt.Fprintf(&b, "; %d replica%s, %s\n", c.Replicas, plural(c.Replicas), c.Engine)
	several := len(c.All) > len(c.Runs)
	if several {
		fmt.Fprintf(&b, "medians of %d seeds; ± is half of what the means are apart\n", len(c.Seeds))
	}
	fmt.Fprintf(&b, "\n%-24s %5s %5s | %7s %7s %7s %5s %6s | %5s %5s %6s | %7s %6s %5s\n", "", "hit", "of", "TTFT ms", "", "", "", "of",
		"TPOT", "ITL", "E2E s", "", "", "fore-")
	fmt.Fprintf(&b, "%-24s %5s %5s | %7s %7s %7s %5s %6s | %5s %5s %6s | %7s %6s %5s\n", "policy", "%", "max %", "p50", "p99", "mean", "±", "bound",
		"p99", "p99", "p99", "hotspot", "good %", "told")
	for i := range c.Runs {
		s := &c.Runs[i]
		spread := ""
		if means := s.Spread.TTFTMean; several && s.TTFT.Mean > 0 {
			half := 50 * (means[1] - means[0]) / s.TTFT.Mean
			if spread = fmt.Sprintf("%.1f%%", half); half >= 99.95 {
				spread = fmt.Sprintf("%.0f%%", half)
			}
		}
		line(&b, c, s, s.Policy, spread)
	}
	if c.Shared != nil {
		line(&b, c, c.Shared, "shared", "")
	}
	if c.Bound != nil {
		line(&b, c, c.Bound, "bound", "")
	}
	if c.Least > 0 {
		fmt.Fprintf(&b, "%-24s %5s %5s | %7s %7s %7s\n", "proven least", "", "", "", "", number(c.Least))
	}
	if len(c.Runs) > 0 && c.Runs[0].Ceiling > 0 {
		fmt.Fprintf(&b, "\nmost hits: %.1f %% with all that was ever computed, %.1f %% with caches of this size\n", 100*c.Infinite, 100*c.Runs[0].Ceiling)
	}
	for i := range c.Runs {
		if s := &c.Runs[i]; s.Ahead > 0 {
			fmt.Fprintf(&b, "%s: %.1f %% of all prompts' tokens were computed ahead, which are no hits\n", s.Policy, 100*s.Ahead)
		}
	}
	for i := range c.Runs {
		s := &c.Runs[i]
		if s.Failed+s.Refused > 0 {
			fmt.Fprintf(&b, "%s: %d failed, %d refused", s.Policy, s.Failed, s.Refused)
			for _, why := range slices.Sorted(maps.Keys(s.Failures)) {
				if why != workload.Refused {
					fmt.Fprintf(&b, "; %s: %d", why, s.Failures[why])
				}
			}
			b.WriteByte('\n')
		}
	}
	if len(c.Capacity) > 0 {
		fmt.Fprintf(&b, "\nhighest rate with TTFT of %v ms and TPOT of %v ms at p99\n", c.Limits.TTFT, c.Limits.TPOT)
		fmt.Fprintf(&b, "%-24s %12s %10s %12s\n", "policy", "requests/s", "of first", "GPUs for it")
		for _, k := range c.Capacity {
			of, gpus := "-", "-"
			if first := c.Capacity[0].Rate; first > 0 {
				of = fmt.Sprintf("%.2f", k.Rate/first)
			}
			if k.GPUs > 0 {
				gpus = fmt.Sprintf("%.3g", k.GPUs)
			}
			fmt.Fprintf(&b, "%-24s %12.2f %10s %12s\n", cut(k.Policy), k.Rate, of, gpus)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func line(b *strings.Builder, c *workload.Comparison, s *workload.Summary, name, spread string) {
	if s.Requests > 0 && s.Failed+s.Refused == s.Requests {
		fmt.Fprintf(b, "%-24s nothing was served\n", cut(name))
		return
	}
	ceiling, bound, gap := "", "", ""
	if s.ITL.Max > 0 {
		gap = number(s.ITL.P99)
	}
	if s.Ceiling > 0 {
		ceiling = fmt.Sprintf("%.0f", 100*s.HitRate/s.Ceiling)
	}
	// What is served of a part of the requests is not to be measured by all.
	if c.Bound != nil && c.Bound.TTFT.Mean > 0 && s.Failed+s.Refused == 0 {
		bound = fmt.Sprintf("%.2f", s.TTFT.Mean/c.Bound.TTFT.Mean)
	}
	told := ""
	if s.Prediction > 0 {
		told = fmt.Sprintf("%.2f", s.Prediction)
	}
	fmt.Fprintf(b, "%-24s %5.1f %5s | %7s %7s %7s %5s %6s | %5s %5s %6s | %7.2f %6.1f %5s\n", cut(name), 100*s.HitRate, ceiling,
		number(s.TTFT.P50), number(s.TTFT.P99), number(s.TTFT.Mean), spread, bound, number(s.TPOT.P99), gap, number(s.E2E.P99/1e3), s.Hotspot, 100*s.Good, told)
}

// plural is the ending of what there are n of.
func plural(n int) string {
	if n == 1 {
		return ""
	}
	return "s"
}

// cut is a name that fits its column.
func cut(name string) string {
	if len(name) > 24 {
		return name[:23] + "~"
	}
	return name
}

// number has three digits at least, and none behind the point that says nothing.
func number(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}
