package virtual

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

const (
	// mostSpeed is how much faster than recorded, or slower, it is tried at most.
	mostSpeed = 1 << 12
	// precision is how far apart, as a part, the fastest speed that was found good and
	// the slowest that was not are at the end.
	precision = 0.02
	// mostFleets is how many times as many replicas are tried at most.
	mostFleets = 8
)

// FindCapacity finds for each policy the highest rate at which the limits are kept: the
// 99th percentiles of the times to first token and per output token are within them, and
// not more than one request of a hundred fails or is refused. It is found by bisection on
// the speed of the workload, with the same requests, seeds and random numbers at each; of
// several seeds the medians count. Where keeping the limits does not end with one speed
// for good, as chance may have it near the edge, it is one of the edges. The rate is 0
// when no speed is slow enough: when single prompts alone take longer.
//
// GPUs is how many replicas, each as the fleet's first, it would take under a policy to
// serve what the first policy serves at its highest rate, found by bisection, too: caches
// are as many fewer, so this is no ratio of rates. Where the replicas are not alike it is
// that ratio. It is 0 when that is not known: the first policy's rate is 0, or a policy
// does not do it with eight times as many.
func (p *Plan) FindCapacity(ctx context.Context) ([]workload.Capacity, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	if p.Limits.TTFT <= 0 && p.Limits.TPOT <= 0 {
		return nil, errors.New("capacity is found by limits, and there are none")
	}
	recorded := 0.0 // requests a second
	for i := range p.Workloads {
		w := p.Workloads[i]
		last := w.Requests[len(w.Requests)-1].At
		if last <= 0 {
			return nil, fmt.Errorf("all requests of %s come at once, so that they have no rate", w.Name)
		}
		recorded += float64(len(w.Requests)) / last.Seconds() / float64(len(p.Workloads))
	}
	n := len(p.Policies)
	out, speeds := make([]workload.Capacity, n), make([]float64, n)
	err := inParallel(ctx, n, func(ctx context.Context, i int) (err error) {
		speeds[i], err = p.fastest(ctx, p.Policies[i])
		out[i] = workload.Capacity{Policy: p.Policies[i], Rate: speeds[i] * recorded}
		return err
	})
	if err != nil || speeds[0] == 0 {
		return out, err
	}
	err = inParallel(ctx, n, func(ctx context.Context, i int) (err error) {
		size := float64(len(p.Fleet.Engines))
		switch {
		case i == 0:
			out[i].GPUs = size
		case p.Fleet.alike():
			out[i].GPUs, err = p.fewest(ctx, p.Policies[i], speeds[0], speeds[i] >= speeds[0])
		case speeds[i] > 0:
			out[i].GPUs = size * speeds[0] / speeds[i]
		}
		return err
	})
	return out, err
}

// alike reports that all replicas are set up alike and stay so.
func (f *Fleet) alike() bool {
	return len(f.Throttles) == 0 && !slices.ContainsFunc(f.Engines, func(c simulator.Config) bool { return !reflect.DeepEqual(c, f.Engines[0]) })
}

// keeps reports that a policy keeps the limits at a speed with a fleet.
func (p *Plan) keeps(ctx context.Context, name string, fleet *Fleet, speed float64) (bool, error) {
	jobs, err := p.jobs(name, fleet, speed)
	if err != nil {
		return false, err
	}
	runs := make([]workload.Summary, len(jobs))
	for i := range jobs {
		if runs[i], err = p.do(ctx, &jobs[i], false); err != nil {
			return false, err
		}
	}
	s := workload.Medians(runs)
	return (p.Limits.TTFT <= 0 || s.TTFT.P99 <= p.Limits.TTFT) && (p.Limits.TPOT <= 0 || s.TPOT.P99 <= p.Limits.TPOT) &&
		100*(s.Failed+s.Refused) <= s.Requests, nil
}

// fastest is the highest speed at which a policy keeps the limits, 0 for none.
func (p *Plan) fastest(ctx context.Context, name string) (float64, error) {
	good, bad, speed := 0.0, 0.0, p.speed()
	for good == 0 || bad == 0 {
		ok, err := p.keeps(ctx, name, &p.Fleet, speed)
		if err != nil {
			return 0, err
		}
		if ok {
			good, speed = speed, speed*2
		} else {
			bad, speed = speed, speed/2
		}
		if speed > mostSpeed || speed < 1.0/mostSpeed {
			return good, nil
		}
	}
	for bad/good > 1+precision {
		speed := (good + bad) / 2
		ok, err := p.keeps(ctx, name, &p.Fleet, speed)
		if err != nil {
			return 0, err
		}
		if ok {
			good = speed
		} else {
			bad = speed
		}
	}
	return good, nil
}

// fewest is the least number of replicas with which a policy keeps the limits at a
// speed, 0 when it is not found. enough: those of the fleet do.
func (p *Plan) fewest(ctx context.Context, name string, speed float64, enough bool) (float64, error) {
	bad, good, most := 0, len(p.Fleet.Engines), len(p.Fleet.Engines)*mostFleets
	for !enough {
		bad = good
		if good *= 2; good > most {
			return 0, nil
		}
		var err error
		if enough, err = p.keeps(ctx, name, p.Fleet.of(good), speed); err != nil {
			return 0, err
		}
	}
	for good-bad > 1 {
		n := (good + bad) / 2
		ok, err := p.keeps(ctx, name, p.Fleet.of(n), speed)
		if err != nil {
			return 0, err
		}
		if ok {
			good = n
		} else {
			bad = n
		}
	}
	return float64(good), nil
}

// of is the fleet with n replicas like its first.
func (f *Fleet) of(n int) *Fleet {
	other := *f
	other.Engines = slices.Repeat(f.Engines[:1], n)
	return &other
}

// Lasts is how long a workload of a plan lasts at a rate: what is found by a run of less
// than a minute is about filling queues, not about load.
func (p *Plan) Lasts(rate float64) time.Duration {
	if rate <= 0 {
		return 0
	}
	return time.Duration(float64(len(p.Workloads[0].Requests)) / rate * float64(time.Second))
}
