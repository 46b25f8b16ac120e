package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/proxy"
)

// DecisionsConfig says which decisions are written down.
type DecisionsConfig struct {
	// File gets them, a line of JSON each; when empty, none is written. It is
	// opened again upon SIGHUP, so that it can be moved away, and when it was deleted.
	File string `yaml:"file"`
	// Sample is the part of all decisions, drawn at random, that is written: 1 is
	// all.
	Sample float64 `yaml:"sample"`
}

func (c *Config) validateDecisions(p *problems) {
	d := &c.Decisions
	if d.File != "" && !filepath.IsAbs(d.File) {
		p.add("decisions.file", "%q is not an absolute path", d.File)
	}
	if !(d.Sample >= 0 && d.Sample <= 1) {
		p.add("decisions.sample", "%v is outside 0 to 1; 1 writes all", d.Sample)
	}
}

// decisionsQueue is how many decisions wait to be written. One of a fleet of 256
// replicas takes some 200 KB.
const decisionsQueue = 256

// decisionBatch is about how many bytes are written at one time.
const decisionBatch = 64 << 10

// decisionPatience is the time between two tries to open the file, and how long
// the last lines may take to be written when the agent stops.
const decisionPatience = time.Second

// decisionLog writes decisions to a file, on one goroutine that the Agent starts
// with newDecisionLog and ends with close. Nobody waits for it: what it has no room
// for is dropped by who sends it. The other methods may be called from any
// goroutine.
type decisionLog struct {
	log     *slog.Logger
	records chan *proxy.Decision
	wanted  atomic.Pointer[DecisionsConfig]
	reopens chan struct{} // asks for the file to be opened again; holds one
	closing context.Context
	end     context.CancelFunc
	done    chan struct{} // closed when the goroutine has ended

	written, failed atomic.Uint64
	// file is the one that is open. The goroutine alone changes it; close lets what
	// is being written end.
	file atomic.Pointer[os.File]

	// The goroutine's own.
	buffer []byte
	torn   bool      // the last line was not written whole
	ailing bool      // the last try has failed, and that was told
	retry  time.Time // when to try to open the file again
}

func newDecisionLog(cfg DecisionsConfig, log *slog.Logger) *decisionLog {
	l := &decisionLog{log: log, records: make(chan *proxy.Decision, decisionsQueue), reopens: make(chan struct{}, 1), done: make(chan struct{})}
	l.closing, l.end = context.WithCancel(context.Background())
	l.wanted.Store(&cfg)
	go l.run()
	return l
}

// configure makes it write what cfg says from now on.
func (l *decisionLog) configure(cfg DecisionsConfig) {
	l.wanted.Store(&cfg)
	l.reopen()
}

// reopen opens the file again, which may have been moved away.
func (l *decisionLog) reopen() {
	select {
	case l.reopens <- struct{}{}:
	default:
	}
}

// sample is the part of the decisions that it wants.
func (l *decisionLog) sample() float64 {
	if cfg := l.wanted.Load(); cfg.File != "" {
		return cfg.Sample
	}
	return 0
}

// close writes what is there, for a while, and ends the goroutine. A disk that
// hangs is not waited for: the goroutine ends when it answers, or with the process.
func (l *decisionLog) close() {
	l.end()
	give := func() {
		if f := l.file.Load(); f != nil {
			// Of what is no disk, such as a pipe, this ends the writing.
			_ = f.SetWriteDeadline(time.Now())
		}
	}
	timer := time.AfterFunc(decisionPatience, give)
	defer timer.Stop()
	select {
	case <-l.done:
	case <-time.After(2 * decisionPatience):
		l.log.Warn("the decision log is left behind: its file does not take what is written", "file", l.wanted.Load().File)
	}
}

func (l *decisionLog) run() {
	defer close(l.done)
	defer l.shut()
	for {
		select {
		case <-l.reopens:
			l.anew()
		case d := <-l.records:
			l.write(d)
		case <-l.closing.Done():
			for {
				select {
				case d := <-l.records:
					l.write(d)
				default:
					return
				}
			}
		}
	}
}

// write writes one decision, and with it as many of those that wait as fit.
func (l *decisionLog) write(d *proxy.Decision) {
	l.buffer = l.buffer[:0]
	n := uint64(0)
	for d != nil {
		d.WorkOut()
		line, err := json.Marshal(d)
		if err != nil {
			l.failed.Add(1)
			l.ail("a decision cannot be written down", err)
		} else {
			l.buffer = append(append(l.buffer, line...), '\n')
			n++
		}
		d = nil
		if len(l.buffer) < decisionBatch {
			select {
			case d = <-l.records:
			default:
			}
		}
	}
	if n == 0 {
		return
	}
	if err := l.put(l.buffer); err != nil {
		l.failed.Add(n)
		l.ail("decisions cannot be written down", err)
		return
	}
	l.written.Add(n)
	if l.ailing {
		l.ailing = false
		l.log.Info("decisions are written down again", "file", l.wanted.Load().File)
	}
}

// put appends lines to the file, which it opens if need be.
func (l *decisionLog) put(lines []byte) error {
	select {
	case <-l.reopens: // before lines were sent, it may be
		l.anew()
	default:
	}
	f := l.file.Load()
	if f != nil && deleted(f) {
		l.anew() // nobody would ever read it
		f = nil
	}
	if f == nil {
		cfg := l.wanted.Load()
		if cfg.File == "" {
			return errNoDecisionFile
		}
		if time.Now().Before(l.retry) {
			return fmt.Errorf("%s is tried again in a moment", cfg.File)
		}
		var err error
		// A pipe that nobody reads is not waited for.
		if f, err = os.OpenFile(cfg.File, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NONBLOCK, 0o640); err != nil {
			l.retry = time.Now().Add(decisionPatience)
			return err
		}
		l.file.Store(f)
		l.torn = false
		if l.closing.Err() != nil {
			_ = f.SetWriteDeadline(time.Now().Add(decisionPatience))
		}
	}
	if l.torn {
		lines = append([]byte("\n"), lines...)
	}
	n, err := f.Write(lines)
	l.torn = err != nil && (n > 0 || l.torn)
	return err
}

// deleted reports that no name leads to a file any more.
func deleted(f *os.File) bool {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stat.Nlink == 0
}

var errNoDecisionFile = fmt.Errorf("no file is configured any more")

// ail tells once that the file cannot be written.
func (l *decisionLog) ail(what string, err error) {
	if !l.ailing {
		l.ailing = true
		l.log.Warn(what, "file", l.wanted.Load().File, "why", err)
	}
}

// anew lets the next lines open the file.
func (l *decisionLog) anew() {
	l.shut()
	l.retry = time.Time{}
}

func (l *decisionLog) shut() {
	if f := l.file.Swap(nil); f != nil {
		if err := f.Close(); err != nil {
			l.ail("decisions may not have been written down", err)
		}
	}
}

var (
	decisionsWrittenDesc = prometheus.NewDesc("inferrail_decision_log_written_total",
		"Decisions that were written to the decision log.", nil, nil)
	decisionsFailedDesc = prometheus.NewDesc("inferrail_decision_log_failed_total",
		"Decisions that could not be written to the decision log.", nil, nil)
)

// Describe implements prometheus.Collector.
func (l *decisionLog) Describe(ch chan<- *prometheus.Desc) {
	ch <- decisionsWrittenDesc
	ch <- decisionsFailedDesc
}

// Collect implements prometheus.Collector.
func (l *decisionLog) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(decisionsWrittenDesc, prometheus.CounterValue, float64(l.written.Load()))
	ch <- prometheus.MustNewConstMetric(decisionsFailedDesc, prometheus.CounterValue, float64(l.failed.Load()))
}
