package bench

import "fmt"

// bars is a chart of rows, one for each policy, that has horizontal bars in one or
// several columns. Each column has a scale of its own.
type bars struct {
	title, note, foot string
	rows              []string // policies
	columns           []barColumn
}

type barColumn struct {
	title string
	unit  unit
	// values are one for each row.
	values []float64
	// limit, when above 0, is a line across the column: what no bar can be beyond.
	limit float64
	what  string // of the limit
	// most, when not 0, has room too.
	most float64
}

const (
	barsLeft, barsTop, barsStep, barsHeight = 116.0, 92.0, 24.0, 15.0
	barsNote, barsGap                       = 58.0, 14.0
)

// svg draws it.
func (b *bars) svg() []byte {
	height := barsTop + barsStep*float64(max(len(b.rows), 1)) + 34
	d := newDrawing(graphWidth, height)
	d.title(b.title)
	d.text(16, 45, "start", "pale", b.note, noteSize)
	if len(b.rows) == 0 {
		d.text(barsLeft, barsTop+11, "start", "pale", "nothing to draw")
	}
	for i, name := range b.rows {
		y := barsTop + barsStep*float64(i)
		weight := []string(nil)
		if name == defaultPolicy {
			weight = []string{`font-weight="600"`}
		}
		d.text(barsLeft-8, y+12, "end", "", name, weight...)
	}
	width := (graphWidth - barsLeft - 16 - barsGap*float64(len(b.columns)-1)) / float64(max(len(b.columns), 1))
	for c := range b.columns {
		column := &b.columns[c]
		x, room := barsLeft+(width+barsGap)*float64(c), width-barsNote
		highest := max(column.limit, column.most)
		for _, v := range column.values {
			if finite(v) {
				highest = max(highest, v)
			}
		}
		length := func(v float64) float64 {
			if !finite(v) || highest <= 0 {
				return 0
			}
			return max(v, 0) / highest * room
		}
		d.text(x, barsTop-24, "start", "", column.title, `font-weight="600"`)
		for i := range b.rows {
			y := barsTop + barsStep*float64(i)
			d.rect(fmt.Sprintf("f%d", lookOf(b.rows[i])), x, y, length(column.values[i]), barsHeight)
			d.text(x+max(length(column.values[i]), length(column.limit))+5, y+12, "start", "", column.unit.write(column.values[i]), noteSize)
		}
		if column.limit > 0 && len(b.rows) > 0 {
			at := x + length(column.limit)
			class := fmt.Sprintf("l%d", lookOf(boundName))
			d.line(class, at, barsTop-6, at, barsTop+barsStep*float64(len(b.rows))-5, `stroke-width="1.4"`, `stroke-dasharray="5 4"`)
			d.text(x, barsTop-9, "start", "pale", column.what+" "+column.unit.write(column.limit), noteSize)
		}
	}
	d.text(16, height-10, "start", "pale", b.foot, `font-size="10"`)
	return d.svg()
}
