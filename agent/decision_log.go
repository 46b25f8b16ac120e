package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
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
	// Prompts, when it is "hashes", has what requests share written down instead of
	// what each was chosen from. Then whole conversations are drawn.
	Prompts string `yaml:"prompts"`
	// MaxBytes is how large the file may become: then it is renamed, with .1 at its
	// end, and a new one is begun. Keep is how many old ones there may be. 0 bytes is no
	// limit.
	MaxBytes Bytes `yaml:"max_bytes"`
	Keep     int   `yaml:"keep"`
}

func (c *Config) validateDecisions(p *problems) {
	d := &c.Decisions
	if d.File != "" && !filepath.IsAbs(d.File) {
		p.add("decisions.file", "%q is not an absolute path", d.File)
	}
	if !(d.Sample >= 0 && d.Sample <= 1) {
		p.add("decisions.sample", "%v is outside 0 to 1; 1 writes all", d.Sample)
	}
	if d.Prompts != "" && d.Prompts != promptHashes {
		p.add("decisions.prompts", "%q is unknown; it may be %s, and is left out for what requests were chosen from", d.Prompts, promptHashes)
	}
	if d.MaxBytes != 0 && d.MaxBytes < leastDecisions {
		p.add("decisions.max_bytes", "%d is below %d; 0 is no limit", d.MaxBytes, leastDecisions)
	}
	if d.Keep < 0 || d.Keep > mostOldDecisions {
		p.add("decisions.keep", "%d is outside 0 to %d", d.Keep, mostOldDecisions)
	}
}

// promptHashes is what DecisionsConfig.Prompts may be.
const promptHashes = "hashes"

// leastDecisions is the least size at which a new file is begun, mostOldDecisions how
// many old ones are renamed at most.
const (
	leastDecisions   = 64 << 10
	mostOldDecisions = 1000
)

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
	size   int64     // of the file that is open; below 0 of what is none
	stuck  bool      // it cannot be renamed, and that was told
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

// asks is which decisions it wants.
func (l *decisionLog) asks() proxy.DecisionsWanted {
	cfg := l.wanted.Load()
	if cfg.File == "" {
		return proxy.DecisionsWanted{}
	}
	return proxy.DecisionsWanted{Sample: cfg.Sample, Hashes: cfg.Prompts == promptHashes}
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
	if f != nil && l.full(len(lines)) {
		l.rotate()
		f = l.file.Load()
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
		l.torn, l.size = false, sizeOf(f)
		if l.closing.Err() != nil {
			_ = f.SetWriteDeadline(time.Now().Add(decisionPatience))
		}
	}
	if l.torn {
		lines = append([]byte("\n"), lines...)
	}
	n, err := f.Write(lines)
	if err != nil && n > 0 && l.size >= 0 && sizeOf(f) == l.size+int64(n) && f.Truncate(l.size) == nil {
		n = 0 // on a full disk half a line is worse than none
	}
	if l.size >= 0 {
		l.size += int64(n)
	}
	l.torn = err != nil && (n > 0 || l.torn)
	return err
}

// full reports that the file has no room for so many bytes more, and something to be
// kept.
func (l *decisionLog) full(more int) bool {
	cfg := l.wanted.Load()
	return cfg != nil && cfg.MaxBytes > 0 && l.size > 0 && l.size+int64(more) > int64(cfg.MaxBytes)
}

// rotate renames the file and those that were renamed before, so that the next lines
// begin a new one. When that cannot be done, the lines go where they went: too large a
// file is better than none.
func (l *decisionLog) rotate() {
	cfg := l.wanted.Load()
	old := func(n int) string { return cfg.File + "." + strconv.Itoa(n) }
	var err error
	if cfg.Keep == 0 {
		err = os.Remove(cfg.File)
	}
	for n := cfg.Keep; n > 0 && err == nil; n-- {
		from := cfg.File
		if n > 1 {
			from = old(n - 1)
		}
		if err = os.Rename(from, old(n)); n > 1 && errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err == nil {
		l.stuck = false
		l.anew()
		return
	}
	l.size = 0 // it is tried again when as much has been written once more
	if !l.stuck {
		l.stuck = true
		l.log.Warn("the decision log is too large, and no new file can be begun", "file", cfg.File, "why", err)
	}
}

// sizeOf is how large a file is, -1 of what is no regular file.
func sizeOf(f *os.File) int64 {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return -1
	}
	return info.Size()
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
