package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

func TestWarm(t *testing.T) {
	requests := []workload.Request{{At: time.Second}, {At: 20 * time.Second}}
	f := func(in string, want time.Duration) {
		t.Helper()
		var w Warm
		if err := w.UnmarshalText([]byte(in)); err != nil || w.of(requests) != want {
			t.Errorf("%q is %v, %v; want %v", in, w.of(requests), err, want)
		}
	}
	f("0s", 0)
	f("30s", 30*time.Second)
	f("10%", 2*time.Second)
	f("0%", 0)
	f("12.5%", 2500*time.Millisecond)
	if (Warm{Part: 0.5}).of(nil) != 0 {
		t.Error("half of nothing")
	}

	bad := func(in string) {
		t.Helper()
		if err := new(Warm).UnmarshalText([]byte(in)); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q: want a ", in)) {
			t.Errorf("%q: %v", in, err)
		}
	}
	bad("")
	bad("10")
	bad("-1s")
	bad("100%")
	bad("-1%")
	bad("NaN%")
	bad("%")
}

// times tells when requests come.
func times(w *workload.Workload) string {
	var b strings.Builder
	for i := range w.Requests {
		fmt.Fprintf(&b, "%v ", w.Requests[i].At)
	}
	return strings.TrimSpace(b.String())
}

func TestTrafficOfATrace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	var lines string
	for i := range 4 {
		lines += fmt.Sprintf(`{"timestamp":%d,"input_length":600,"output_length":10,"hash_ids":[0,%d]}`+"\n", 3000*i, i+1)
	}
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(traffic Traffic, want string) {
		t.Helper()
		traffic.Trace = file
		if traffic.Speed == 0 {
			traffic.Speed = 1
		}
		w, err := traffic.load(1)
		got := ""
		if err != nil {
			got = "error: " + err.Error()
		} else {
			got = times(w)
		}
		if got != want && (err == nil || !strings.Contains(got, want)) {
			t.Errorf("%+v: %s, want %s", traffic, got, want)
		}
	}
	f(Traffic{}, "0s 3s 6s 9s")
	f(Traffic{Speed: 3}, "0s 1s 2s 3s")
	f(Traffic{Requests: 2}, "0s 3s")
	f(Traffic{Requests: 20}, "0s 3s 6s 9s")
	f(Traffic{Duration: 6 * time.Second}, "0s 3s")
	f(Traffic{Duration: 3 * time.Second, Speed: 3}, "0s 1s 2s")
	f(Traffic{Warm: Warm{Time: 9 * time.Second}}, "0s 3s 6s 9s")
	f(Traffic{Warm: Warm{Time: 10 * time.Second}}, "error: --warm 10s is all of trace.jsonl: its last request comes at 9s")
	f(Traffic{Speed: -1}, "error: --speed -1: want a number above 0")
	f(Traffic{Requests: -1}, "must not be negative")
	f(Traffic{Workload: "w1"}, "error: --workload or --trace, not both")
	for _, name := range []string{"w1", "system-prompts"} {
		w, err := (&Traffic{Workload: name, Speed: 2, Requests: 50, Rate: 10}).load(7)
		if err != nil || len(w.Requests) != 50 {
			t.Fatal(w, err)
		}
		if last := w.Requests[49].At; last < time.Second || last > 6*time.Second {
			t.Errorf("50 requests, 20 a second, take %v", last)
		}
	}
	if _, err := (&Traffic{Speed: 1}).load(1); err == nil || !strings.Contains(err.Error(), "--workload or --trace is missing; workloads are ") {
		t.Errorf("without either: %v", err)
	}
	if _, err := (&Traffic{Speed: 1, Workload: "w99"}).load(1); err == nil || !strings.Contains(err.Error(), `there is no workload "w99"`) {
		t.Errorf("unknown: %v", err)
	}
}
