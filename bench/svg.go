package bench

import (
	"fmt"
	"math"
	"strings"
)

// drawing is an SVG picture that is being made. What draws on it uses it from one
// goroutine; svg ends it. Colours are classes of one style sheet, which has one set
// for light and one for dark surroundings. No number in it is infinite or none.
type drawing struct {
	width, height float64
	body          []byte
}

func newDrawing(width, height float64) *drawing { return &drawing{width: width, height: height} }

// svg returns the picture's file.
func (d *drawing) svg() []byte {
	dst := fmt.Appendf(nil, `<svg xmlns="http://www.w3.org/2000/svg" width="%s" height="%s" viewBox="0 0 %[1]s %[2]s" font-family="system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" font-size="12">`+"\n",
		coordinate(d.width), coordinate(d.height))
	dst = append(dst, "<style>\n"...)
	dst = appendSheet(dst, "", func(h hue) string { return h.light }, lightSurface)
	dst = append(dst, "@media (prefers-color-scheme: dark) {\n"...)
	dst = appendSheet(dst, "  ", func(h hue) string { return h.dark }, darkSurface)
	dst = append(dst, "}\n</style>\n"...)
	dst = fmt.Appendf(dst, `<rect class="paper" width="%s" height="%s"/>`+"\n", coordinate(d.width), coordinate(d.height))
	return append(append(dst, d.body...), "</svg>\n"...)
}

// surface is what is not data.
type surface struct{ paper, ink, pale, grid, axis, fill string }

var (
	lightSurface = surface{paper: "#ffffff", ink: "#1b2530", pale: "#5b6875", grid: "#e6eaee", axis: "#9aa7b4", fill: "#eef1f4"}
	darkSurface  = surface{paper: "#12161b", ink: "#e4e9ee", pale: "#9ba8b5", grid: "#262e37", axis: "#56636f", fill: "#1f262e"}
)

func appendSheet(dst []byte, indent string, colour func(hue) string, s surface) []byte {
	rule := func(format string, args ...any) { dst = fmt.Appendf(append(dst, indent...), format+"\n", args...) }
	rule("text { fill: %s }", s.ink)
	rule(".pale { fill: %s }", s.pale)
	rule(".paper { fill: %s }", s.paper)
	rule(".fill { fill: %s }", s.fill)
	rule(".grid { stroke: %s; stroke-width: 1 }", s.grid)
	rule(".axis { stroke: %s; stroke-width: 1 }", s.axis)
	for i, h := range hues {
		rule(".l%d { stroke: %s; fill: none }", i, colour(h))
		rule(".f%d { fill: %s }", i, colour(h))
	}
	return dst
}

// text writes one line; class may be "", anchor "start", "middle" or "end".
func (d *drawing) text(x, y float64, anchor, class, text string, attributes ...string) {
	d.body = append(d.body, "<text"...)
	if class != "" {
		d.body = fmt.Appendf(d.body, ` class="%s"`, class)
	}
	d.body = fmt.Appendf(d.body, ` x="%s" y="%s"`, coordinate(x), coordinate(y))
	if anchor != "start" {
		d.body = fmt.Appendf(d.body, ` text-anchor="%s"`, anchor)
	}
	for _, a := range attributes {
		d.body = append(append(d.body, ' '), a...)
	}
	d.body = fmt.Appendf(d.body, ">%s</text>\n", escape(text))
}

// title writes a chart's title, smaller when it is long, so that it has room.
func (d *drawing) title(text string) {
	const size, letter = 15, 0.6 // a bold letter is about so wide, as a part of its height
	fits := (d.width - 24) / (letter * float64(max(len([]rune(text)), 1)))
	d.text(16, 26, "start", "", text, fmt.Sprintf(`font-size="%s" font-weight="600"`, coordinate(max(min(size, fits), 9))))
}

func (d *drawing) rect(class string, x, y, width, height float64, attributes ...string) {
	d.body = fmt.Appendf(d.body, `<rect class="%s" x="%s" y="%s" width="%s" height="%s"`, class,
		coordinate(x), coordinate(y), coordinate(max(width, 0)), coordinate(max(height, 0)))
	d.end(attributes)
}

func (d *drawing) line(class string, x1, y1, x2, y2 float64, attributes ...string) {
	d.body = fmt.Appendf(d.body, `<line class="%s" x1="%s" y1="%s" x2="%s" y2="%s"`, class,
		coordinate(x1), coordinate(y1), coordinate(x2), coordinate(y2))
	d.end(attributes)
}

func (d *drawing) circle(class string, x, y, radius float64, attributes ...string) {
	d.body = fmt.Appendf(d.body, `<circle class="%s" cx="%s" cy="%s" r="%s"`, class, coordinate(x), coordinate(y), coordinate(radius))
	d.end(attributes)
}

// path joins points by straight lines; close makes an area of them.
func (d *drawing) path(class string, x, y []float64, close bool, attributes ...string) {
	d.body = fmt.Appendf(d.body, `<path class="%s" d="`, class)
	for i := range x {
		command := byte('L')
		if i == 0 {
			command = 'M'
		}
		d.body = append(d.body, command)
		d.body = fmt.Appendf(d.body, "%s %s", coordinate(x[i]), coordinate(y[i]))
	}
	if close {
		d.body = append(d.body, 'Z')
	}
	d.body = append(d.body, '"')
	d.end(attributes)
}

func (d *drawing) end(attributes []string) {
	for _, a := range attributes {
		d.body = append(append(d.body, ' '), a...)
	}
	d.body = append(d.body, "/>\n"...)
}

// coordinate is a number as SVG has it, to a tenth.
func coordinate(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		panic(fmt.Sprintf("BUG: a coordinate of a chart is %v", v))
	}
	v = math.Round(v*10) / 10
	if v == 0 {
		v = 0 // not -0
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0")
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
