package agent

import (
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// manager is the service manager that has started this process, systemd or one
// that speaks as it does (sd_notify(3)), and is told how the agent fares. An Agent
// makes it with managerOf when it starts, and ends it with close when it has
// stopped; tell may be called from any goroutine. The zero value tells nobody.
type manager struct {
	log      *slog.Logger
	addr     *net.UnixAddr // nil when nobody wants to be told
	watchdog time.Duration // between two signs of life; 0 is none

	watching sync.WaitGroup // the goroutine that gives them
	done     chan struct{}  // ends it
}

// tellTime bounds telling: a manager that does not read must not stop the agent.
const tellTime = time.Second

// managerOf is what the environment says of a process with that id.
func managerOf(getenv func(string) string, pid int, log *slog.Logger) *manager {
	m := &manager{log: log}
	name := getenv("NOTIFY_SOCKET")
	if name == "" {
		return m
	}
	if name[0] != '/' && name[0] != '@' {
		log.Warn("NOTIFY_SOCKET is neither a path nor an abstract name: the service manager is not told", "value", name)
		return m
	}
	m.addr = &net.UnixAddr{Net: "unixgram", Name: name}
	usec := getenv("WATCHDOG_USEC")
	if of := getenv("WATCHDOG_PID"); usec == "" || of != "" && of != strconv.Itoa(pid) {
		return m
	}
	n, err := strconv.ParseInt(usec, 10, 64)
	if err != nil || n <= 0 || n > int64(time.Hour*24*365/time.Microsecond) {
		log.Warn("WATCHDOG_USEC is no number of microseconds: the service manager gets no signs of life", "value", usec)
		return m
	}
	m.watchdog = time.Duration(n) * time.Microsecond / 2
	return m
}

// tell sends one message of several assignments.
func (m *manager) tell(assignments ...string) {
	if m.addr == nil {
		return
	}
	c, err := net.DialUnix("unixgram", nil, m.addr)
	if err == nil {
		c.SetWriteDeadline(time.Now().Add(tellTime))
		_, err = c.Write([]byte(strings.Join(assignments, "\n")))
		c.Close()
	}
	if err != nil {
		m.log.Warn("cannot tell the service manager", "what", assignments[0], "why", err)
	}
}

// ready tells that requests are served, and by a configuration that is in use.
func (m *manager) ready(status string) { m.tell("READY=1", "STATUS="+status) }

// reloading tells that a configuration is being loaded; ready must follow. The time
// tells the manager that this answers the signal which it has just sent.
func (m *manager) reloading() {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) == nil {
		m.tell("RELOADING=1", fmt.Sprintf("MONOTONIC_USEC=%d", now.Nano()/1000))
	}
}

// stopping tells that the agent drains and may take so long, which the manager
// grants even where its own patience is less.
func (m *manager) stopping(patience time.Duration) {
	m.tell("STOPPING=1", "STATUS=draining", fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", patience.Microseconds()))
}

// watch gives signs of life until close, each after alive has returned: one that
// hangs on a lock gives none.
func (m *manager) watch(alive func()) {
	if m.watchdog == 0 {
		return
	}
	m.done = make(chan struct{})
	m.watching.Go(func() {
		tick := time.NewTicker(m.watchdog)
		defer tick.Stop()
		for {
			alive()
			m.tell("WATCHDOG=1")
			select {
			case <-m.done:
				return
			case <-tick.C:
			}
		}
	})
}

func (m *manager) close() {
	if m.done != nil {
		close(m.done)
		m.watching.Wait()
	}
}
