package bench

import (
	"encoding/xml"
	"fmt"
	"strings"
)

// chart is a group of horizontal bars under one title.
type chart struct {
	title string
	bars  []bar
}

type bar struct {
	label, note string
	value       float64
	ours        bool
}

// appendChart appends results/datapath.svg: for each load the CPU above direct
// and the 99th percentile of the latency.
func (r *Report) appendChart(dst []byte) []byte {
	var charts []chart
	starred := false
	for i := 0; i < len(r.Rows); {
		load := r.Rows[i].Load
		cpu := chart{title: fmt.Sprintf("CPU per chunk above direct, us (%d streams x %g chunks/s)", load.Streams, load.Rate)}
		p99 := chart{title: fmt.Sprintf("Latency p99, us (%d streams x %g chunks/s)", load.Streams, load.Rate)}
		for ; i < len(r.Rows) && r.Rows[i].Load == load; i++ {
			row := &r.Rows[i]
			ours := row.Contestant == "packet" || row.Contestant == "copy"
			star := ""
			if row.marks() != "" {
				star, starred = " *", true
			}
			if row.CPUAbove != nil {
				cpu.bars = append(cpu.bars, bar{row.Contestant, fmt.Sprintf("%.2f%s", *row.CPUAbove, star), *row.CPUAbove, ours})
			}
			p99.bars = append(p99.bars, bar{row.Contestant, fmt.Sprintf("%.0f%s", row.P99, star), row.P99, ours})
		}
		if len(cpu.bars) > 0 {
			charts = append(charts, cpu)
		}
		charts = append(charts, p99)
	}
	foot := fmt.Sprintf("%s, %d CPUs, Linux %s, %.10s", r.Machine.CPU, r.Machine.CPUs, r.Machine.Kernel, r.Date)
	if starred {
		foot += " (* datapath.json says what disturbed it)"
	}
	return appendSVG(dst, charts, foot)
}

func appendSVG(dst []byte, charts []chart, foot string) []byte {
	const (
		width, left, right = 640, 100, 130
		barHeight, step    = 16, 22
		titleHeight, gap   = 26, 14
	)
	height := 40
	for _, c := range charts {
		height += titleHeight + step*len(c.bars) + gap
	}
	dst = fmt.Appendf(dst, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	dst = fmt.Appendf(dst, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	y := 10
	for _, c := range charts {
		highest := 0.0
		for _, b := range c.bars {
			highest = max(highest, b.value)
		}
		y += titleHeight
		dst = fmt.Appendf(dst, `<text x="10" y="%d" font-weight="bold" fill="#222">%s</text>`+"\n", y-10, escape(c.title))
		for _, b := range c.bars {
			length := 0.0
			if highest > 0 {
				length = max(b.value, 0) / highest * (width - left - right)
			}
			colour := "#9aa5b1"
			if b.ours {
				colour = "#1f7a8c"
			}
			dst = fmt.Appendf(dst, `<text x="%d" y="%d" text-anchor="end" fill="#222">%s</text>`, left-8, y+12, escape(b.label))
			dst = fmt.Appendf(dst, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`, left, y, length, barHeight, colour)
			dst = fmt.Appendf(dst, `<text x="%.1f" y="%d" fill="#222">%s</text>`+"\n", left+length+6, y+12, escape(b.note))
			y += step
		}
		y += gap
	}
	dst = fmt.Appendf(dst, `<text x="10" y="%d" font-size="10" fill="#666">%s</text>`+"\n", height-10, escape(foot))
	return append(dst, "</svg>\n"...)
}

func escape(s string) string {
	var b strings.Builder
	xml.EscapeText(&b, []byte(s)) // a strings.Builder takes every write
	return b.String()
}
