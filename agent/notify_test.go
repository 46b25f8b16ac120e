package agent

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// serviceManager is the end of the socket that a manager of services reads.
type serviceManager struct {
	*testing.T
	conn *net.UnixConn
}

func startServiceManager(t *testing.T, name string) serviceManager {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: name})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return serviceManager{t, conn}
}

// hear returns the next message.
func (m serviceManager) hear() string {
	m.Helper()
	buf := make([]byte, 4096)
	m.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	n, err := m.conn.Read(buf)
	if err != nil {
		m.Fatal(err)
	}
	return string(buf[:n])
}

const signOfLife = "WATCHDOG=1"

// expect hears that the next message but signs of life is so.
func (m serviceManager) expect(expr string) {
	m.Helper()
	message := m.hear()
	for message == signOfLife {
		message = m.hear()
	}
	if !regexp.MustCompile(expr).MatchString(message) {
		m.Fatalf("the manager is told %q, want %s", message, expr)
	}
}

// A service manager is told when requests are served, of each load of a
// configuration, good or bad, and of the end.
func TestServiceManagerIsTold(t *testing.T) {
	m := startServiceManager(t, filepath.Join(t.TempDir(), "notify"))
	t.Setenv("NOTIFY_SOCKET", m.conn.LocalAddr().String())
	t.Setenv("WATCHDOG_USEC", "20000")
	t.Setenv("WATCHDOG_PID", "")

	cfg := DefaultConfig()
	cfg.Listen, cfg.AdminListen, cfg.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
	cfg.Replicas = []ReplicaConfig{{ID: "a", URL: "http://127.0.0.1:1"}}
	cfg.Server.ShutdownTimeout = 7 * time.Second
	a, err := Start(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	m.expect(`^READY=1\nSTATUS=copy tier, 0 of 1 replicas up, configured [\d:]+$`)

	hangup, loads := make(chan os.Signal), make(chan Config, 1)
	loads <- cfg // for Follow's own look
	a.Follow(Source{Load: func() (Config, error) { return <-loads, nil }, Hangup: hangup})
	for _, url := range []string{"http://127.0.0.1:2", "ftp://nowhere"} {
		// Signs of life come beside.
		for m.hear() != signOfLife {
		}
		cfg.Replicas = []ReplicaConfig{{ID: "a", URL: url}}
		hangup <- syscall.SIGHUP
		loads <- cfg
		m.expect(`^RELOADING=1\nMONOTONIC_USEC=\d+$`)
		m.expect(`^READY=1\nSTATUS=`)
	}
	if err := a.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	m.expect(`^STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=17000000$`)
}

func TestManagerOf(t *testing.T) {
	f := func(environment, wantAddr string, wantWatchdog time.Duration, warned bool) {
		t.Helper()
		var log strings.Builder
		m := managerOf(func(key string) string {
			for pair := range strings.FieldsSeq(environment) {
				if k, v, _ := strings.Cut(pair, "="); k == key {
					return v
				}
			}
			return ""
		}, 7, slog.New(slog.NewTextHandler(&log, nil)))
		addr := ""
		if m.addr != nil {
			addr = m.addr.Name
		}
		if addr != wantAddr || m.watchdog != wantWatchdog || (log.Len() > 0) != warned {
			t.Errorf("%s: at %q, %v between signs of life, log %q", environment, addr, m.watchdog, &log)
		}
	}
	f("", "", 0, false)
	f("WATCHDOG_USEC=2000000", "", 0, false) // nobody hears it
	f("NOTIFY_SOCKET=/run/n", "/run/n", 0, false)
	f("NOTIFY_SOCKET=@n WATCHDOG_USEC=2000000", "@n", time.Second, false)
	f("NOTIFY_SOCKET=/n WATCHDOG_USEC=2000000 WATCHDOG_PID=7", "/n", time.Second, false)
	f("NOTIFY_SOCKET=/n WATCHDOG_USEC=2000000 WATCHDOG_PID=8", "/n", 0, false) // of another process
	f("NOTIFY_SOCKET=/n WATCHDOG_USEC=soon", "/n", 0, true)
	f("NOTIFY_SOCKET=/n WATCHDOG_USEC=-1", "/n", 0, true)
	f("NOTIFY_SOCKET=/n WATCHDOG_USEC=9223372036854775807", "/n", 0, true)
	f("NOTIFY_SOCKET=vsock:2:1", "", 0, true)
}

// An abstract name is one too, and who is not there stops nobody.
func TestManagerAwayStopsNobody(t *testing.T) {
	m := startServiceManager(t, "@inferrail-notify-"+filepath.Base(t.TempDir()))
	var log strings.Builder
	to := &manager{log: slog.New(slog.NewTextHandler(&log, nil)), addr: m.conn.LocalAddr().(*net.UnixAddr)}
	to.ready("well")
	m.expect(`^READY=1\nSTATUS=well$`)
	m.conn.Close()
	to.ready("well")
	if !strings.Contains(log.String(), "cannot tell the service manager") {
		t.Errorf("the log is %q", &log)
	}
	new(manager).ready("nobody hears")
}
