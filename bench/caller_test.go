package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"
)

func TestArrivals(t *testing.T) {
	const rate, n = 2000, 200_000
	a, again, other := newArrivals(rate, 7, 1000), newArrivals(rate, 7, 1000), newArrivals(rate, 8, 1000)
	last, same, longer := int64(1000), 0, 0
	for range n {
		at := a.next()
		if at < last {
			t.Fatalf("due at %d after %d", at, last)
		}
		if at != again.next() {
			t.Fatal("the same seed gave other times")
		}
		if at == other.next() {
			same++
		}
		if at-last > int64(time.Second)/rate {
			longer++
		}
		last = at
	}
	if same > n/100 {
		t.Errorf("another seed gave %d equal times", same)
	}
	// The mean distance, and the share 1/e of distances above it.
	if seconds := float64(last-1000) / 1e9; math.Abs(seconds-n/rate) > 1 {
		t.Errorf("%d calls took %.2f s, want %d", n, seconds, n/rate)
	}
	if share := float64(longer) / n; math.Abs(share-1/math.E) > .01 {
		t.Errorf("%.3f of the distances are above the mean, want %.3f", share, 1/math.E)
	}
}

func TestWindow(t *testing.T) {
	f := func(w window, at int64, want bool) {
		t.Helper()
		if w.holds(at) != want {
			t.Errorf("%v holds %d: %v", w, at, !want)
		}
	}
	f(window{}, 5, false)
	f(window{from: 5}, 4, false)
	f(window{from: 5}, 5, true)
	f(window{from: 5, to: 9}, 8, true)
	f(window{from: 5, to: 9}, 9, false)
}

// callServer answers calls as the engine does. spoil, if not nil, may answer
// the nth itself, from 1.
func callServer(t *testing.T, spoil func(n int64, w http.ResponseWriter, whole []byte) bool) string {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served atomic.Int64
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		seed, _ := member(body, `"seed":`)
		a, _, _ := parseAnswer(newAnswer().with(uint32(seed)))
		if spoil != nil && spoil(served.Add(1), w, a.body) {
			return
		}
		w.Write(a.body)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Serve(l)
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	return l.Addr().String()
}

// call runs this program as a caller that measures for so long.
func call(t *testing.T, measure time.Duration, args ...string) (r CallReport, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], append([]string{"bench", "worker", "caller"}, args...)...)
	cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1")
	cmd.Stderr = t.Output()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewScanner(stdout)
	if out.Scan() && out.Text() == "ready" {
		io.WriteString(stdin, "start\n")
		time.Sleep(measure) // the length of the measurement, not a wait for something
		io.WriteString(stdin, "stop\n")
	}
	var report []byte
	if out.Scan() {
		report = out.Bytes()
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		return r, err
	}
	return r, json.Unmarshal(report, &r)
}

func TestOpenLoopCountsFromWhenACallIsDue(t *testing.T) {
	// One answer takes long. Only one connection is allowed, so the calls that
	// are due meanwhile wait, and their waiting counts.
	const pause = 400 * time.Millisecond
	addr := callServer(t, func(n int64, _ http.ResponseWriter, _ []byte) bool {
		if n == 100 {
			time.Sleep(pause)
		}
		return false
	})
	r, err := call(t, time.Second, "-target", addr, "-rate", "200", "-connections", "1", "-seed", "1")
	if err != nil {
		t.Fatal(err)
	}
	if r.Bad+r.Lost != 0 || r.Connections != 1 || r.Calls < 120 || r.Calls > 280 {
		t.Errorf("%+v", r)
	}
	// About 80 of 200 calls were due in the pause: half of those waited for over
	// 200 ms, which is 20 % of all and far more than the one that was slow.
	if r.Latency.P99 < 150_000 || r.Latency.Max < uint64(pause.Microseconds()) {
		t.Errorf("the calls that waited do not show: %+v", r.Latency)
	}
}

func TestOpenLoopOpensWhatItNeeds(t *testing.T) {
	addr := callServer(t, func(int64, http.ResponseWriter, []byte) bool {
		time.Sleep(50 * time.Millisecond)
		return false
	})
	r, err := call(t, time.Second, "-target", addr, "-rate", "200", "-connections", "100", "-seed", "1")
	if err != nil {
		t.Fatal(err)
	}
	// 200 a second that each take 50 ms: 10 at one time on average.
	if r.Bad+r.Lost != 0 || r.Connections < 8 || r.Latency.P50 < 50_000 {
		t.Errorf("%+v", r)
	}
}

func TestClosedLoop(t *testing.T) {
	r, err := call(t, 500*time.Millisecond, "-target", callServer(t, nil), "-rate", "0", "-connections", "5")
	if err != nil {
		t.Fatal(err)
	}
	if r.Bad+r.Lost != 0 || r.Connections != 5 || r.Answers == 0 || r.Calls+5 < r.Answers || r.Answers+5 < r.Calls {
		t.Errorf("%+v", r)
	}
}

func TestWrongAnswersAreCounted(t *testing.T) {
	f := func(wantBad, wantLost bool, spoil func(w http.ResponseWriter, whole []byte)) {
		t.Helper()
		addr := callServer(t, func(n int64, w http.ResponseWriter, whole []byte) bool {
			if n%10 == 0 {
				spoil(w, whole)
			}
			return n%10 == 0
		})
		r, err := call(t, 300*time.Millisecond, "-target", addr, "-rate", "200", "-connections", "10")
		if err != nil {
			t.Error(err)
		}
		if r.Bad > 0 != wantBad || r.Lost > 0 != wantLost || r.Answers == 0 || r.Fault == "" {
			t.Errorf("%+v", r)
		}
	}
	f(true, false, func(w http.ResponseWriter, _ []byte) { w.WriteHeader(http.StatusServiceUnavailable) })
	f(true, false, func(w http.ResponseWriter, whole []byte) {
		whole[len(whole)/2] ^= 1
		w.Write(whole)
	})
	f(true, false, func(w http.ResponseWriter, _ []byte) {
		a, _, _ := parseAnswer(newAnswer().with(100_000_000)) // another call's
		w.Write(a.body)
	})
	f(false, true, func(http.ResponseWriter, []byte) { panic(http.ErrAbortHandler) })
}

func TestACallerThatGetsNoAnswerEnds(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close() // so that connections are refused
	if r, err := call(t, 0, "-target", addr, "-rate", "100"); err == nil {
		t.Errorf("%+v", r)
	}
	if r, err := call(t, 0, "-target", addr, "-rate", "0"); err == nil {
		t.Errorf("%+v", r)
	}
}
