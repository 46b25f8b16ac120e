package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// child is a process of a test. It is ended by its id. Its methods may be called from any goroutine.
type child struct {
	cmd   *exec.Cmd
	out   *output
	ended chan struct{}
	err   error // of Wait; set when ended is closed
}

// thisTest is the test binary, which TestMain lets be the program.
var thisTest = sync.OnceValue(func() string {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return self
})

// inferrail is the program as it is used: with the race detector in it an agent takes
// several times the memory, and a second to end. It is built for the first test that
// asks, and TestMain removes it. Like thisTest it may be asked for from any goroutine.
var inferrail = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "inferrail-test-")
	if err != nil {
		return "", err
	}
	// The agent may run as a user that has no right to the folders of this one.
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	builtIn.Store(&dir)
	path := filepath.Join(dir, "inferrail")
	// As make build does, which may have built most of it.
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// builtIn is the folder that inferrail has made.
var builtIn atomic.Pointer[string]

func asUsed(t testing.TB) string {
	t.Helper()
	path, err := inferrail()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// startChild starts a process that ends when the test does, at the latest.
func startChild(t *testing.T, program string, args ...string) *child {
	t.Helper()
	c, err := spawn(program, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.end)
	return c
}

// launch starts a process that is to be killed with this one. Pdeathsig follows the
// thread that has started it, and threads end with the goroutines that are bound to them,
// as those in other network namespaces are: so it is one that stays.
func launch(cmd *exec.Cmd) (err error) {
	started := make(chan struct{})
	launcher() <- func() {
		err = cmd.Start()
		close(started)
	}
	<-started
	return err
}

// launcher is the thread of launch.
var launcher = sync.OnceValue(func() chan<- func() {
	starts := make(chan func())
	go func() {
		runtime.LockOSThread()
		for start := range starts {
			start()
		}
	}()
	return starts
})

// spawn is startChild for goroutines that are not the test's own: they end the
// process themselves.
func spawn(program string, args ...string) (*child, error) {
	c := &child{cmd: exec.Command(program, args...), out: new(output), ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), "INFERRAIL_RUN=1")
	c.cmd.Stdout, c.cmd.Stderr = c.out, c.out
	// Killed with the test, whatever ends that.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := launch(c.cmd); err != nil {
		return nil, err
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.ended)
	}()
	return c, nil
}

func (c *child) signal(s os.Signal) { _ = c.cmd.Process.Signal(s) }

// end ends the process, hung or not, and waits for it.
func (c *child) end() {
	c.signal(syscall.SIGKILL)
	<-c.ended
}

func freePort(t *testing.T) string {
	t.Helper()
	for range lastPort - firstPort {
		port := strconv.Itoa(firstPort + int(nextPort.Add(1)%(lastPort-firstPort)))
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err == nil {
			l.Close()
			return port
		}
	}
	t.Fatalf("every port from %d to %d is in use", firstPort, lastPort)
	return ""
}

// Free ports are below those that the kernel gives to whoever asks for any: one of
// these may belong to somebody else before it is listened at. Each is given once in
// a long time.
const firstPort, lastPort = 20000, 30000

var nextPort atomic.Uint64

func init() { nextPort.Store(rand.Uint64N(lastPort - firstPort)) }

// admin is the address of an agent's admin pages, such as http://127.0.0.1:9090.
type admin string

// page fetches one on a connection of its own.
func (a admin) page(path string) (string, error) {
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(string(a) + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// metric is the sum of a metric's samples that have the labels; -1 when the
// page cannot be had.
func (a admin) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	page, err := a.page("/metrics")
	if err != nil {
		return -1
	}
	return sumMetric(t, page, name, labels...)
}

// awaitMetric waits until a metric is as it should be, and reports false when
// it is not in time.
func (a admin) awaitMetric(t *testing.T, patience time.Duration, ok func(v float64) bool, name string, labels ...string) bool {
	t.Helper()
	for began := time.Now(); time.Since(began) < patience; time.Sleep(20 * time.Millisecond) {
		if v := a.metric(t, name, labels...); v >= 0 && ok(v) {
			return true
		}
	}
	return false
}

// footprint is what an agent holds.
type footprint struct {
	rss, goroutines, files int
}

func (a admin) footprint(t *testing.T) (f footprint) {
	t.Helper()
	page, err := a.page("/metrics")
	if err != nil {
		t.Errorf("footprint: %v", err)
		return f
	}
	return footprint{
		rss:        int(sumMetric(t, page, "process_resident_memory_bytes")),
		goroutines: int(sumMetric(t, page, "go_goroutines")),
		files:      int(sumMetric(t, page, "process_open_fds")),
	}
}

// awaitIdle waits until the agent holds no more goroutines and files than it
// did when it was idle before, and returns what it holds then.
func (a admin) awaitIdle(t *testing.T, before footprint) (now footprint) {
	t.Helper()
	// Idle engine connections are kept for four seconds, and those between
	// the agent and its HTTP/2 streams for thirty.
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		now = a.footprint(t)
		if now.goroutines <= before.goroutines+3 && now.files <= before.files+3 {
			break
		}
		if time.Since(began) > 75*time.Second {
			stacks, _ := a.page("/debug/pprof/goroutine?debug=1")
			t.Errorf("left behind: %+v before, %+v after\n%s", before, now, stacks[:min(len(stacks), 20000)])
			break
		}
	}
	for _, name := range []string{"inferrail_replica_requests_running", "inferrail_replica_requests_pending",
		"inferrail_requests_running", "inferrail_buffered_bytes"} {
		if !a.awaitMetric(t, 20*time.Second, func(v float64) bool { return v == 0 }, name) {
			t.Errorf("%s is %v for ever", name, a.metric(t, name))
		}
	}
	return now
}
