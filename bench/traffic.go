package bench

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// Traffic is what is asked, as the command line says it: a workload that is made, or a
// trace that is read.
type Traffic struct {
	Workload  string        `short:"w" placeholder:"NAME" xor:"traffic" help:"What is asked: w1 to w6, or their names."`
	Trace     string        `placeholder:"FILE" xor:"traffic" help:"Requests from a file: a trace of Mooncake or Azure, conversations of ShareGPT, or the agent's decision log."`
	Rate      float64       `placeholder:"N" help:"Requests a second on average, by default 4; a trace that tells when its requests came keeps its times."`
	Speed     float64       `default:"1" help:"How many times faster than that they come."`
	Requests  int           `short:"n" placeholder:"N" help:"Requests at most, by default 1000 of a workload and all of a trace."`
	Duration  time.Duration `placeholder:"TIME" help:"Only requests that come within this time."`
	MaxTokens int           `name:"max-tokens" placeholder:"N" help:"No answer has more tokens than this; by default it has what the workload or the trace says."`
	Warm      Warm          `placeholder:"TIME|N%" help:"Requests of this time, or of this part of the whole, are sent and not counted."`

	TraceModel string `name:"trace-model" placeholder:"NAME" help:"Whose requests of a decision log, where it has those of several models."`

	TTFTLimit time.Duration `name:"ttft-limit" default:"2s" help:"A good answer has its first token within this time,"`
	TPOTLimit time.Duration `name:"tpot-limit" default:"100ms" help:"and takes at most this for each further one."`
}

// Warm is the beginning of a run that is not counted: a time, or a part of the whole.
// The zero value is none.
type Warm struct {
	Time time.Duration
	Part float64
}

// UnmarshalText reads 30s or 10%.
func (w *Warm) UnmarshalText(text []byte) error {
	s := string(text)
	if number, ok := strings.CutSuffix(s, "%"); ok {
		percent, err := strconv.ParseFloat(number, 64)
		if err != nil || !(percent >= 0 && percent < 100) {
			return fmt.Errorf("%q: want a percentage from 0%% to below 100%%", s)
		}
		*w = Warm{Part: percent / 100}
		return nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return fmt.Errorf("%q: want a time such as 30s, or a percentage such as 10%%", s)
	}
	*w = Warm{Time: d}
	return nil
}

// of is the time that is not counted of a workload.
func (w Warm) of(requests []workload.Request) time.Duration {
	if n := len(requests); w.Part > 0 && n > 0 {
		return time.Duration(w.Part * float64(requests[n-1].At))
	}
	return w.Time
}

// limits are those of good answers.
func (t *Traffic) limits() workload.Limits {
	return workload.Limits{TTFT: ms(t.TTFTLimit), TPOT: ms(t.TPOTLimit)}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// load makes or reads the workload.
func (t *Traffic) load(seed uint64) (*workload.Workload, error) {
	if !(t.Speed > 0 && t.Speed <= 1e6) {
		return nil, fmt.Errorf("--speed %v: want a number above 0", t.Speed)
	}
	if t.Rate < 0 || t.Requests < 0 || t.MaxTokens < 0 || t.Duration < 0 || t.TTFTLimit < 0 || t.TPOTLimit < 0 {
		return nil, errors.New("--rate, --requests, --max-tokens, --duration, --ttft-limit and --tpot-limit must not be negative")
	}
	var w *workload.Workload
	var err error
	switch {
	case t.Workload != "" && t.Trace != "":
		return nil, errors.New("--workload or --trace, not both")
	case t.Workload != "":
		w, err = workload.Generate(workload.Options{Name: t.Workload, Seed: seed, Rate: t.Rate, Requests: t.Requests, MaxTokens: t.MaxTokens,
			Duration: time.Duration(float64(t.Duration) * t.Speed)})
	case t.Trace != "":
		w, err = workload.ReadOptions{Rate: t.Rate, Seed: seed, Model: t.TraceModel}.Read(t.Trace)
	default:
		return nil, fmt.Errorf("--workload or --trace is missing; workloads are %s", strings.Join(workload.Names(), ", "))
	}
	if err != nil {
		return nil, err
	}
	if t.MaxTokens > 0 {
		w = w.Shorter(t.MaxTokens)
	}
	if w = w.Faster(t.Speed); t.Requests > 0 {
		w = w.Limit(t.Requests)
	}
	if t.Duration > 0 {
		w = w.Window(0, t.Duration)
	}
	if len(w.Requests) == 0 {
		return nil, fmt.Errorf("no request of %s comes within %v", w.Name, t.Duration)
	}
	if warm := t.Warm.of(w.Requests); warm > w.Requests[len(w.Requests)-1].At {
		return nil, fmt.Errorf("--warm %v is all of %s: its last request comes at %v", warm, w.Name, w.Requests[len(w.Requests)-1].At.Round(time.Millisecond))
	}
	return w, nil
}
