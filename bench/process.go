package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a program that runs on a host, with whatever it starts itself.
// The measurement that started it stops it.
type process struct {
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser // workers only
	lines chan string    // standard output of workers; closed at its end
	log   *os.File       // everything else it writes
	ended chan struct{}  // closed when it and its group are gone
}

// startTimeout is how long a contestant may take until it answers, and the
// clients until every stream runs.
const startTimeout = 30 * time.Second

// stopTimeout is how long a process may take after SIGTERM.
const stopTimeout = 10 * time.Second

// start runs a program on h, in a process group of its own. Its output goes to
// a log in dir.
func start(h *host, dir, name string, command []string) (*process, error) {
	return startWith(h, dir, name, command, false)
}

// startWorker runs this program again as a worker (see Worker). Goroutine
// preemption is off because its signals would interrupt the worker's waits.
func startWorker(h *host, dir, name string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return startWith(h, dir, name, append([]string{self, "bench", "worker"}, args...), true)
}

func startWith(h *host, dir, name string, command []string, worker bool) (*process, error) {
	log, err := os.CreateTemp(dir, name+"-*.log")
	if err != nil {
		return nil, err
	}
	p := &process{name: name, log: log, cmd: exec.Command(command[0], command[1:]...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	// INFERRAIL_* of the caller are meant for another agent.
	p.cmd.Env = slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "INFERRAIL_") })
	var stdout io.ReadCloser
	if worker {
		p.cmd.Env = append(p.cmd.Env, "GODEBUG=asyncpreemptoff=1")
		p.cmd.Stdout = nil
		if stdout, err = p.cmd.StdoutPipe(); err == nil {
			p.stdin, err = p.cmd.StdinPipe()
		}
	}
	if err == nil {
		err = launch(h, p.cmd)
	}
	if err != nil {
		log.Close()
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	if worker {
		p.lines = make(chan string, 4)
	}
	go func() {
		if worker {
			for s := bufio.NewScanner(stdout); s.Scan(); {
				p.lines <- s.Text()
			}
			close(p.lines)
		}
		// Until Wait the leader is a zombie and its group's number is ours, so
		// children that it left behind can be ended safely.
		var info unix.Siginfo
		for unix.Waitid(unix.P_PID, p.cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
		}
		syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		p.cmd.Wait() // cmd.ProcessState says how it ended
		close(p.ended)
	}()
	return p, nil
}

// launch starts a command on h. PR_SET_PDEATHSIG follows the thread that has started a
// process. That of a host ends with the host; on the machine itself it is one that stays,
// for whichever goroutine asks may be on a thread that a host takes later, and ends.
func launch(h *host, cmd *exec.Cmd) error {
	if h != nil {
		return h.do(cmd.Start)
	}
	result := make(chan error, 1)
	launcher() <- func() { result <- cmd.Start() }
	return <-result
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

// line returns the next line of a worker's output.
func (p *process) line(ctx context.Context, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("nothing from %s in %v", p.name, timeout))
	defer cancel()
	select {
	case s, ok := <-p.lines:
		if !ok {
			<-p.ended
			return "", p.failed(fmt.Errorf("%s ended: %v", p.name, p.cmd.ProcessState))
		}
		return s, nil
	case <-ctx.Done():
		return "", p.failed(context.Cause(ctx))
	}
}

// awaitReady waits until a worker says "ready".
func (p *process) awaitReady(ctx context.Context) error {
	s, err := p.line(ctx, startTimeout)
	if err == nil && s != "ready" {
		err = fmt.Errorf("%s said %q instead of ready", p.name, s)
	}
	return err
}

// report reads the line of JSON that follows a stop into r.
func (p *process) report(ctx context.Context, r any) error {
	s, err := p.line(ctx, startTimeout)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(s), r); err != nil {
		return fmt.Errorf("%s reported %q: %w", p.name, s, err)
	}
	return nil
}

// command writes a line to a worker.
func (p *process) command(s string) error {
	if _, err := io.WriteString(p.stdin, s+"\n"); err != nil {
		return p.failed(fmt.Errorf("cannot tell %s to %s: %w", p.name, s, err))
	}
	return nil
}

// running reports an error when the process has ended.
func (p *process) running() error {
	select {
	case <-p.ended:
		return p.failed(fmt.Errorf("%s ended: %v", p.name, p.cmd.ProcessState))
	default:
		return nil
	}
}

// failed adds the end of the process's log to err.
func (p *process) failed(err error) error {
	const most = 4 << 10
	b, readErr := os.ReadFile(p.log.Name())
	if readErr != nil {
		return errors.Join(err, readErr)
	}
	b = bytes.TrimSpace(b)
	if len(b) == 0 {
		return fmt.Errorf("%w; the log of %s is empty", err, p.name)
	}
	if len(b) > most {
		b = append([]byte("..."), b[len(b)-most:]...)
	}
	return fmt.Errorf("%w; the log of %s:\n    %s", err, p.name, strings.ReplaceAll(string(b), "\n", "\n    "))
}

// stop ends the process and all of its group and waits for it. It reports
// false when SIGTERM alone was not enough.
func (p *process) stop() (clean bool) {
	clean = true
	if p.stdin != nil {
		p.stdin.Close()
	}
	p.cmd.Process.Signal(syscall.SIGTERM)
	timeout, lines := time.After(stopTimeout), p.lines
	for running := true; running; {
		select {
		case <-p.ended:
			running = false
		case _, ok := <-lines: // so that their reader is not stuck
			if !ok {
				lines = nil
			}
		case <-timeout:
			clean = false
			p.cmd.Process.Kill()
		}
	}
	p.log.Close()
	return clean
}
