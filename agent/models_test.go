package agent

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// listing is an engine that lists so many models, each engine the same.
func listing(t *testing.T, models *atomic.Int64) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/models" {
			return
		}
		sep := `{"data":[`
		for i := range models.Load() {
			fmt.Fprintf(w, `%s{"id":"%06d"}`, sep, i)
			sep = ","
		}
		fmt.Fprint(w, "]}")
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// computing is how long a processor works on what is done, however busy the
// machine is.
func computing(t *testing.T, do func()) time.Duration {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	now := func() time.Duration {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
			t.Fatal(err)
		}
		return time.Duration(ts.Nano())
	}
	began := now()
	do()
	return now() - began
}

// TestTooManyModels: an engine that lists models without bounds is not believed,
// and why is told; the others go on.
func TestTooManyModels(t *testing.T) {
	var n atomic.Int64
	n.Store(200_000)
	good := startEngine(t, 0, "m")
	c := DefaultConfig()
	// The list takes long to be written and read by a machine that has more to do.
	c.Health.Interval, c.Health.Timeout = 10*time.Millisecond, 20*time.Second
	c.Replicas = []ReplicaConfig{{ID: "mad", URL: listing(t, &n)}, {ID: "good", URL: good.URL()}}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	s := newStageOf(t, &c)
	s.expect("m=good")
	eventually(t, func() bool { return strings.Contains(strings.Join(s.fleet.ailments(), "\n"), "lists 200000 models") },
		func() string { return fmt.Sprintf("it is told %q", s.fleet.ailments()) })
	n.Store(1)
	s.expect("000000=mad m=good")
}

// TestManyModels: what the fleet does under its lock takes no longer than it may
// with as many models as are taken.
func TestManyModels(t *testing.T) {
	var n atomic.Int64
	n.Store(maxModels)
	var replicas []ReplicaConfig
	for i := range 4 {
		replicas = append(replicas, ReplicaConfig{ID: fmt.Sprint("e", i), URL: listing(t, &n)})
	}
	c := DefaultConfig()
	c.Health.Interval, c.Health.Timeout, c.Replicas = time.Hour, 10*time.Second, replicas
	c.Health.EjectionBackoff = 5 * time.Minute // none returns before it is looked at
	s := newStageOf(t, &c)
	eventually(t, func() bool { up, _ := s.fleet.upCount(); return up == len(replicas) }, func() string { return "not all come up" })
	// It takes about 50 ms each; with loops over models in loops over models,
	// many seconds.
	if d := computing(t, func() {
		for _, m := range s.fleet.members {
			s.fleet.requestFailed(m, 3, nil)
		}
	}); d > 4*time.Second {
		t.Errorf("four replicas that fail are dealt with in %v", d)
	}
	f := s.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, m := range f.members {
		if want := (standing)(ejected); i < 2 && m.vitals.standing != want {
			t.Errorf("%s is %v, want %v", m.id, m.vitals.standing, want)
		}
		m.vitals.standing = ejected
	}
	if d := computing(t, f.publishLocked); d > 2*time.Second {
		t.Errorf("a fleet of which all is ejected is published in %v", d)
	}
	if got := len(f.snapshot.Listed[maxModels-1].Replicas); got != len(replicas) {
		t.Errorf("%d replicas are the last resort, want %d", got, len(replicas))
	}
}
