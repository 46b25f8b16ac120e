package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/inferrail/inferrail/simulator/workload"
)

// Plot is `inferrail bench plot`: charts of comparisons that `inferrail simulate
// --json` and `inferrail bench compare --json` have written.
type Plot struct {
	Files []string `arg:"" placeholder:"FILE" help:"Comparisons, as simulate and bench compare write them with --json."`
	Out   string   `short:"o" placeholder:"DIR" default:"charts" help:"Folder for the charts."`

	Stdout io.Writer `kong:"-"`
}

// Run draws all files, or says what is wrong with the first that it cannot draw.
func (p *Plot) Run() error {
	var charts []Chart
	var comparisons []*workload.Comparison
	named := map[string]string{}
	for _, file := range p.Files {
		c, err := ReadComparison(file)
		if err != nil {
			return err
		}
		base := filepath.Base(file)
		name := slug(strings.TrimSuffix(base, filepath.Ext(base)))
		if other, ok := named[name]; ok {
			return fmt.Errorf("%s and %s: the charts of both would have the same names; rename one", other, file)
		}
		named[name] = file
		charts = append(charts, Charts(name, c)...)
		comparisons = append(comparisons, c)
	}
	charts = append(charts, RateCharts(comparisons)...)
	if err := WriteCharts(p.Out, charts); err != nil {
		return err
	}
	for _, c := range charts {
		fmt.Fprintln(p.Stdout, filepath.Join(p.Out, c.Name+".svg"))
	}
	return nil
}

// ReadComparison reads a file that simulate or compare has written.
func ReadComparison(file string) (*workload.Comparison, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("comparison: %w", err)
	}
	c := new(workload.Comparison)
	if err := json.Unmarshal(data, c); err != nil {
		return nil, fmt.Errorf("comparison %s: %w; want what inferrail simulate --json, bench compare --json or demo --json writes", file, err)
	}
	if len(c.Runs) == 0 {
		return nil, fmt.Errorf("comparison %s: %w", file, errNoRuns)
	}
	return c, nil
}

var errNoRuns = errors.New(`it has no "runs"; want what inferrail simulate --json or bench compare --json writes`)
