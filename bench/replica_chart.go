package bench

import "fmt"

// replicaChart draws how many requests each replica has served, a row of columns for
// each policy.
type replicaChart struct {
	title, note, foot string
	rows              []replicaRow
}

type replicaRow struct {
	policy   string
	requests []int
	hotspot  float64
}

const (
	replicaStep, replicaHeight = 46.0, 34.0
	// mostColumns of a row are drawn; of more replicas several share a column, which
	// is as high as the highest of them.
	mostColumns = 160
)

// svg draws it. All rows have one scale.
func (c *replicaChart) svg() []byte {
	const top = 66.0
	height := top + replicaStep*float64(max(len(c.rows), 1)) + 34
	d := newDrawing(graphWidth, height)
	d.title(c.title)
	d.text(16, 45, "start", "pale", c.note, noteSize)
	highest := 0
	for i := range c.rows {
		for _, n := range c.rows[i].requests {
			highest = max(highest, n)
		}
	}
	if highest == 0 {
		d.text(barsLeft, top+14, "start", "pale", "nothing to draw")
	}
	width := graphWidth - barsLeft - 120
	for i := range c.rows {
		row := &c.rows[i]
		y := top + replicaStep*float64(i)
		weight := []string(nil)
		if row.policy == defaultPolicy {
			weight = []string{`font-weight="600"`}
		}
		d.text(barsLeft-8, y+replicaHeight-6, "end", "", row.policy, weight...)
		d.rect("fill", barsLeft, y, width, replicaHeight)
		sum, columns := 0, min(len(row.requests), mostColumns)
		for _, n := range row.requests {
			sum += n
		}
		if highest == 0 || columns == 0 {
			continue
		}
		step := width / float64(columns)
		for k := range columns {
			most := 0
			for _, n := range row.requests[k*len(row.requests)/columns : (k+1)*len(row.requests)/columns] {
				most = max(most, n)
			}
			h := float64(most) / float64(highest) * replicaHeight
			gap := min(step*0.15, 3)
			d.rect(fmt.Sprintf("f%d", lookOf(row.policy)), barsLeft+step*float64(k)+gap/2, y+replicaHeight-h, step-gap, h)
		}
		mean := y + replicaHeight - float64(sum)/float64(len(row.requests))/float64(highest)*replicaHeight
		d.line("axis", barsLeft, mean, barsLeft+width, mean, `stroke-dasharray="2 3"`)
		d.text(barsLeft+width+10, y+replicaHeight-6, "start", "", "hotspot "+digits(row.hotspot), noteSize)
	}
	d.text(16, height-10, "start", "pale", c.foot, `font-size="10"`)
	return d.svg()
}
