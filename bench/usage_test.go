package bench

import (
	"math"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseSchedstat(t *testing.T) {
	f := func(in string, want time.Duration) {
		t.Helper()
		if got, err := parseSchedstat([]byte(in)); got != want || err != nil {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	f("0 0 0\n", 0)
	f("1234567 89 10\n", 1234567)

	fail := func(in string) {
		t.Helper()
		if got, err := parseSchedstat([]byte(in)); err == nil {
			t.Errorf("%q: %v", in, got)
		}
	}
	fail("")
	fail("1 2")
	fail("-1 2 3")
	fail("x 2 3")
	fail("99999999999999999999 2 3")
}

func TestParseStat(t *testing.T) {
	got, err := parseStat([]byte("cpu  10 0 20 300 7 0 5 4 0 0\ncpu0 1 2 3 4 5 6 7 8\n"))
	if want := (cpuTime{idle: 3070 * time.Millisecond, steal: 40 * time.Millisecond}); got != want || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "cpu 1 2", "cpu0 1 2 3 4 5 6 7 8", "cpu 1 2 3 x 5 6 7 8", "cpu 1 2 3 4 5 6 7 x"} {
		if got, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

func TestConsumed(t *testing.T) {
	at := time.Now()
	cpus := time.Duration(runtime.NumCPU())
	one := func(ran time.Duration, sleeps uint64) usage { return usage{1: {ran: ran, sleeps: sleeps}} }
	before := reading{at: at, client: one(0, 0), engine: one(0, 0), proxy: one(0, 10), kernel: one(0, 0)}
	after := reading{at: at.Add(time.Second), client: one(10*time.Millisecond, 0), engine: one(20*time.Millisecond, 0),
		proxy: one(30*time.Millisecond, 15), kernel: one(40*time.Millisecond, 0),
		cpus: cpuTime{idle: cpus*time.Second - 150*time.Millisecond, steal: 20 * time.Millisecond}}
	c := after.since(before)
	if want := (CPU{Client: 10_000, Engine: 20_000, Proxy: 30_000, Kernel: 40_000, Total: 100_000}); c.cpu != want || c.sleeps != 5 {
		t.Errorf("%+v, %d sleeps", c.cpu, c.sleeps)
	}
	// 150 ms were busy, 100 ms of them accounted for.
	f := func(name string, got, wantMillis float64) {
		t.Helper()
		if want := wantMillis / 10 / float64(cpus); math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v %%, want %v %%", name, got, want)
		}
	}
	f("busy", c.busy, 150)
	f("other", c.other, 50)
	after.cpus.steal = 70 * time.Millisecond
	f("other, mostly stolen", after.since(before).other, 70)
}

func TestStatusNumber(t *testing.T) {
	f := func(name string, want uint64) {
		t.Helper()
		const status = "Name:\tx\nVmHWM:\t  1234 kB\nnonvoluntary_ctxt_switches:\t9\nvoluntary_ctxt_switches:\t5\nEmpty:\n"
		if got := statusNumber([]byte(status), name); got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
	f("VmHWM", 1234)
	f("voluntary_ctxt_switches", 5)
	f("Empty", 0)
	f("Missing", 0)
}

func TestUsageSince(t *testing.T) {
	before := usage{1: {ran: 100, sleeps: 5}, 2: {ran: 1000, sleeps: 50}}
	after := usage{1: {ran: 150, sleeps: 7}, 3: {ran: 30, sleeps: 1}} // 2 has ended, 3 is new
	if got, want := after.since(before), (threadUsage{ran: 80, sleeps: 3}); got != want {
		t.Errorf("%v, want %v", got, want)
	}
}

// The kernel's own answer must agree with what a thread knows it did.
func TestUsageOfThisThread(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	read := func() threadUsage {
		time.Sleep(time.Millisecond) // run time is brought up to date when a thread sleeps
		u := usage{}
		if err := u.addProcess(os.Getpid()); err != nil {
			t.Fatal(err)
		}
		return u[unix.Gettid()]
	}
	before := read()
	var cpu unix.Timespec
	burnt := func() time.Duration {
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &cpu); err != nil {
			t.Fatal(err)
		}
		return time.Duration(cpu.Nano())
	}
	for start := burnt(); burnt()-start < 50*time.Millisecond; {
	}
	after := read()
	if ran := after.ran - before.ran; ran < 45*time.Millisecond || ran > 100*time.Millisecond {
		t.Errorf("50 ms of work counted as %v", ran)
	}
	if after.sleeps <= before.sleeps {
		t.Errorf("%d sleeps, then %d", before.sleeps, after.sleeps)
	}
}

func TestFamily(t *testing.T) {
	pids, err := family(os.Getppid())
	if err != nil {
		t.Fatal(err)
	}
	if pids[0] != os.Getppid() {
		t.Errorf("family of %d begins with %d", os.Getppid(), pids[0])
	}
	for _, pid := range pids {
		if pid == os.Getpid() {
			return
		}
	}
	t.Errorf("this process, %d, is not in the family of its parent: %v", os.Getpid(), pids)
}
