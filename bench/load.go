package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// load asks all that a workload asks, each request when it is due, whatever has become
// of those before it: an open loop. Its maker calls run once.
type load struct {
	endpoint *endpoint
	workload *workload.Workload
	// body makes the body of request i, and where it is posted.
	body func(dst []byte, i int) (path string, body []byte, err error)
	// most is how many requests may be on their way at one time. A request that is due
	// beyond that is not sent and has failed: it would have to wait, and nobody would see
	// that it does.
	most int
	// replicas are the names that are known beforehand, in the order of their numbers;
	// others that have served come behind them.
	replicas []string

	began      time.Time
	mostAtOnce int
	// What the progress shows while it runs.
	sent, over, failed atomic.Int64
}

// loaded is what came of a load.
type loaded struct {
	// records are those of the requests that were due before the end, in their order.
	records []workload.Record
	// replicas are the names of those that were known or have served, in the order of
	// the numbers that they have in records.
	replicas []string
	// why has an example for each way to fail.
	why map[string]string
	// busy is what part of the machine's CPUs was not idle, stolen what part of them
	// the hypervisor took. mostAtOnce is how many requests were on their way at once.
	busy, stolen float64
	mostAtOnce   int
	interrupted  bool
	// told: an answer has said how much of its prompt was cached, if only nothing.
	told bool
}

// ahead is how many requests are made before they are due.
const ahead = 64

// now is the time since the load began.
func (l *load) now() time.Duration { return time.Since(l.began) }

// run returns when each request has its answer or has failed. Requests are due from the
// time began on. When ctx ends no more are sent, and those on their way are given up.
func (l *load) run(ctx context.Context, began time.Time) (*loaded, error) {
	l.began = began
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil) // also ends a preparer that nobody listens to
	made, broken := make(chan *exchange, ahead), make(chan error, 1)
	var preparing sync.WaitGroup
	preparing.Go(func() {
		defer close(made)
		for i := range l.workload.Requests {
			x, err := l.prepare(i)
			if err != nil {
				broken <- err
				cancel(err)
				return
			}
			select {
			case made <- x:
			case <-ctx.Done():
				return
			}
		}
	})
	before, metered := readCPUs()
	asked := l.send(ctx, made)
	busy, stolen := 0.0, 0.0
	if after, ok := readCPUs(); metered && ok {
		busy, stolen = after.since(before)
	}
	cancel(nil)
	preparing.Wait()
	select {
	case err := <-broken:
		return nil, err
	default:
	}
	result := l.collect(asked)
	result.busy, result.stolen = busy, stolen
	result.interrupted = len(asked) < len(l.workload.Requests)
	return result, nil
}

// prepare makes request i.
func (l *load) prepare(i int) (*exchange, error) {
	asked := &l.workload.Requests[i]
	path, body, err := l.body(nil, i)
	if err != nil {
		return nil, fmt.Errorf("request %d: %w", i, err)
	}
	req, err := l.endpoint.request(context.Background(), http.MethodPost, path, body, asked.Tenant)
	if err != nil {
		return nil, fmt.Errorf("request %d: %w", i, err)
	}
	if asked.Session != 0 {
		req.Header.Set("X-Session-Id", strconv.Itoa(asked.Session))
	}
	return &exchange{load: l, request: req, record: workload.Record{
		Index: i, Scheduled: asked.At, Input: asked.Input(), Replica: -1,
		Gaps: make([]time.Duration, 0, min(asked.Output, 1<<14)),
	}}, nil
}

// send sends each request when it is due and returns those that were, after all of
// their answers.
func (l *load) send(ctx context.Context, made <-chan *exchange) []*exchange {
	var running sync.WaitGroup
	defer running.Wait()
	pacer := newPacer()
	defer pacer.close()
	asked := make([]*exchange, 0, len(l.workload.Requests))
	for x := range made {
		if !pacer.until(ctx, l.began.Add(x.record.Scheduled)) {
			break
		}
		asked = append(asked, x)
		if l.sent.Load()-l.over.Load() >= int64(l.most) {
			x.record.Sent = l.now()
			x.fail(errTooMany)
			l.failed.Add(1)
			continue
		}
		l.mostAtOnce = max(l.mostAtOnce, int(l.sent.Add(1)-l.over.Load()))
		running.Go(func() {
			x.run(ctx)
			if x.record.Failure != "" {
				l.failed.Add(1)
			}
			l.over.Add(1)
		})
	}
	return asked
}

// errTooMany is the error of a request that was not sent, and tooMany what a Record calls
// it.
var errTooMany = errors.New("as many requests are on their way as may be")

const tooMany = "too many at once"

// collect gives those that have served and were not known numbers, in the order of
// their names.
func (l *load) collect(asked []*exchange) *loaded {
	result := &loaded{why: map[string]string{}, mostAtOnce: l.mostAtOnce}
	numbers := map[string]int{}
	for _, x := range asked {
		if x.replica != "" && !slices.Contains(l.replicas, x.replica) {
			numbers[x.replica] = 0
		}
	}
	result.replicas = append(slices.Clone(l.replicas), slices.SortedFunc(maps.Keys(numbers), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) // e2 is before e10
	})...)
	for i, name := range result.replicas {
		numbers[name] = i
	}
	for _, x := range asked {
		if x.replica != "" {
			x.record.Replica = numbers[x.replica]
		}
		if why := x.record.Failure; why != "" && result.why[why] == "" {
			result.why[why] = x.detail
		}
		result.records = append(result.records, x.record)
		result.told = result.told || x.told
	}
	return result
}

// cpuReading is what the machine's CPUs had done at one moment.
type cpuReading struct {
	at time.Time
	cpuTime
}

// readCPUs reports false where the kernel does not tell.
func readCPUs() (r cpuReading, ok bool) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return r, false
	}
	r.cpuTime, err = parseStat(stat)
	r.at = time.Now()
	return r, err == nil
}

// since returns which part of all CPUs was not idle and which was stolen.
func (r cpuReading) since(before cpuReading) (busy, stolen float64) {
	all := r.at.Sub(before.at).Seconds() * float64(runtime.NumCPU())
	if all <= 0 {
		return 0, 0
	}
	part := func(d time.Duration) float64 { return min(max(d.Seconds()/all, 0), 1) }
	return 1 - part(r.idle-before.idle), part(r.steal - before.steal)
}
