package bench

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// progress shows how far something is: a bar on a terminal, elsewhere a line every few
// seconds. Who starts it stops it, and writes nothing to the same place in between.
type progress struct {
	w        io.Writer
	terminal bool
	name     string
	began    time.Time
	state    func() (done, of int64, note string)
	stopping chan struct{}
	stopped  chan struct{}
}

// Times between two pictures of it.
const (
	barInterval  = 200 * time.Millisecond
	lineInterval = 5 * time.Second
)

// startProgress calls state, from another goroutine, until stop.
func startProgress(w io.Writer, name string, state func() (done, of int64, note string)) *progress {
	p := &progress{w: w, terminal: isTerminal(w), name: name, began: time.Now(), state: state,
		stopping: make(chan struct{}), stopped: make(chan struct{})}
	go p.run()
	return p
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func (p *progress) run() {
	defer close(p.stopped)
	interval := lineInterval
	if p.terminal {
		interval = barInterval
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			p.show()
		case <-p.stopping:
			if p.terminal {
				fmt.Fprint(p.w, "\r\x1b[K")
			}
			return
		}
	}
}

func (p *progress) show() {
	done, of, note := p.state()
	text := fmt.Sprintf("%d of %d  %s  %s", done, of, time.Since(p.began).Round(time.Second), note)
	if !p.terminal {
		fmt.Fprintf(p.w, "%s: %s\n", p.name, text)
		return
	}
	const width = 30
	full := 0
	if of > 0 {
		full = int(min(done, of) * width / of)
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s [%s%s] %s", p.name, strings.Repeat("=", full), strings.Repeat(" ", width-full), text)
}

// stop takes the bar away.
func (p *progress) stop() {
	close(p.stopping)
	<-p.stopped
}
