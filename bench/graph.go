package bench

import "fmt"

// graph is a chart of lines and points over two axes. The zero value with axes
// draws them empty, and says so.
type graph struct {
	title, note, foot string
	x, y              axis
	lines             []trace
	dots              []trace
	marks             []graphMark
	// diagonal: where x and y are equal there is a line.
	diagonal bool
}

type axis struct {
	label string
	unit  unit
	log   bool
	// least and most, when not 0, have room too.
	least, most float64
}

// trace is one policy's points.
type trace struct {
	name string // a policy or the bound
	x, y []float64
}

// graphMark is a line across, at a value of one axis.
type graphMark struct {
	across bool // at a y
	at     float64
	what   string
}

const (
	graphWidth, graphHeight = 760.0, 430.0
	graphLeft, graphRight   = 74.0, 150.0
	graphTop, graphBottom   = 64.0, 66.0
	noteSize, grow          = `font-size="11"`, 2.8
)

// svg draws it.
func (g *graph) svg() []byte {
	d := newDrawing(graphWidth, graphHeight)
	width, height := graphWidth-graphLeft-graphRight, graphHeight-graphTop-graphBottom
	d.title(g.title)
	d.text(16, 45, "start", "pale", g.note, noteSize)

	xs, ys := []float64{g.x.least, g.x.most}, []float64{g.y.least, g.y.most}
	points := 0
	for _, list := range [][]trace{g.lines, g.dots} {
		for i := range list {
			xs, ys = append(xs, list[i].x...), append(ys, list[i].y...)
			points += len(list[i].x)
		}
	}
	if g.diagonal {
		xs = append(xs, ys...)
		ys = xs
	}
	for _, m := range g.marks {
		if m.across {
			ys = append(ys, m.at)
		} else {
			xs = append(xs, m.at)
		}
	}
	xScale, yScale := newScale(g.x.unit, g.x.log, xs...), newScale(g.y.unit, g.y.log, ys...)
	px := func(v float64) float64 { return graphLeft + xScale.at(v)*width }
	py := func(v float64) float64 { return graphTop + (1-yScale.at(v))*height }

	for _, v := range xScale.ticks {
		d.line("grid", px(v), graphTop, px(v), graphTop+height)
		d.text(px(v), graphTop+height+17, "middle", "pale", g.x.unit.write(v), noteSize)
	}
	for _, v := range yScale.ticks {
		d.line("grid", graphLeft, py(v), graphLeft+width, py(v))
		d.text(graphLeft-8, py(v)+4, "end", "pale", g.y.unit.write(v), noteSize)
	}
	d.line("axis", graphLeft, graphTop+height, graphLeft+width, graphTop+height)
	d.text(graphLeft+width/2, graphTop+height+36, "middle", "", g.x.label)
	d.text(18, graphTop+height/2, "middle", "", g.y.label, fmt.Sprintf(`transform="rotate(-90 18 %s)"`, coordinate(graphTop+height/2)))

	if points == 0 {
		d.text(graphLeft+width/2, graphTop+height/2, "middle", "pale", "nothing to draw")
	}
	if g.diagonal {
		low, high := max(xScale.from, yScale.from), min(xScale.to, yScale.to)
		d.line("axis", px(low), py(low), px(high), py(high), `stroke-dasharray="5 4"`)
	}
	for _, m := range g.marks {
		if m.across {
			d.line("axis", graphLeft, py(m.at), graphLeft+width, py(m.at), `stroke-dasharray="2 3"`)
			d.text(graphLeft+width-4, py(m.at)-5, "end", "pale", m.what, noteSize)
			continue
		}
		d.line("axis", px(m.at), graphTop, px(m.at), graphTop+height, `stroke-dasharray="2 3"`)
		// On the side that has more room.
		if xScale.at(m.at) > 0.5 {
			d.text(px(m.at)-5, graphTop+12, "end", "pale", m.what, noteSize)
		} else {
			d.text(px(m.at)+5, graphTop+12, "start", "pale", m.what, noteSize)
		}
	}
	// The default is drawn last, above all others.
	for i := len(g.lines) - 1; i >= 0; i-- {
		t := &g.lines[i]
		x, y := make([]float64, 0, len(t.x)), make([]float64, 0, len(t.x))
		for k := range t.x {
			if finite(t.x[k]) && finite(t.y[k]) {
				x, y = append(x, px(t.x[k])), append(y, py(t.y[k]))
			}
		}
		switch class := fmt.Sprintf("l%d", lookOf(t.name)); len(x) {
		case 0:
		case 1:
			d.circle(fmt.Sprintf("f%d", lookOf(t.name)), x[0], y[0], 4)
		default:
			d.path(class, x, y, false, stroke(t.name)...)
		}
	}
	for i := len(g.dots) - 1; i >= 0; i-- {
		t := &g.dots[i]
		for k := range t.x {
			if finite(t.x[k]) && finite(t.y[k]) {
				d.circle(fmt.Sprintf("f%d", lookOf(t.name)), px(t.x[k]), py(t.y[k]), 3, `fill-opacity="0.55"`)
			}
		}
	}
	y := graphTop + 6
	for _, list := range [][]trace{g.lines, g.dots} {
		for i := range list {
			legend(d, graphLeft+width+16, y, list[i].name)
			y += 20
		}
	}
	d.text(16, graphHeight-10, "start", "pale", g.foot, `font-size="10"`)
	return d.svg()
}

// legend writes one policy's entry.
func legend(d *drawing, x, y float64, name string) {
	d.line(fmt.Sprintf("l%d", lookOf(name)), x, y, x+24, y, stroke(name)...)
	weight := []string(nil)
	if name == defaultPolicy {
		weight = []string{`font-weight="600"`}
	}
	d.text(x+31, y+4, "start", "", name, weight...)
}

// stroke are the attributes of a policy's lines.
func stroke(name string) []string {
	width := 1.6
	if name == defaultPolicy {
		width = grow
	}
	attributes := []string{fmt.Sprintf(`stroke-width="%.1f"`, width), `stroke-linejoin="round"`}
	if dash := looks[lookOf(name)].dash; dash != "" {
		attributes = append(attributes, fmt.Sprintf(`stroke-dasharray="%s"`, dash))
	}
	return attributes
}
