package agent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/proxy"
)

// loggedDecisions are the lines of a decision log.
func loggedDecisions(t *testing.T, file string) (list []proxy.Decision) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		if line[len(line)-1] != '\n' {
			break // it is being written
		}
		var d proxy.Decision
		if err := json.Unmarshal(line, &d); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		list = append(list, d)
	}
	return list
}

// A decision is written with what came of it. Lines are appended, and after the file
// was moved away and a hangup go to a new one; a file that is configured anew is
// used at once; and what is there when the agent stops is written.
func TestDecisionLog(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "decisions.jsonl")
	c := testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "m"))
	c.Decisions = DecisionsConfig{File: file, Sample: 1}
	a := startAgent(t, c)
	running := true
	defer func() {
		if running {
			stopped(t, a)
		}
	}()
	send := func() {
		t.Helper()
		askWhole(t, a, "Hello!")
	}
	lines := func(file string, n int) []proxy.Decision {
		t.Helper()
		var list []proxy.Decision
		eventually(t, func() bool { list = loggedDecisions(t, file); return len(list) >= n }, func() string {
			return fmt.Sprintf("%s has %d lines, want %d", file, len(list), n)
		})
		if len(list) != n {
			t.Errorf("%s has %d lines, want %d", file, len(list), n)
		}
		return list
	}
	send()
	d := lines(file, 1)[0]
	if d.Model != "m" || d.Winner == "" || len(d.Replicas) != 2 || d.Outcome == nil || d.Outcome.Outcome != "ok" || d.RequestID == "" {
		t.Errorf("%+v", d)
	}
	text, err := os.ReadFile(file)
	if err != nil || bytes.Contains(text, []byte("Hello")) || bytes.Contains(text, []byte("brief")) {
		t.Errorf("%v: the prompt is in %s", err, text)
	}

	moved := file + ".1"
	if err := os.Rename(file, moved); err != nil {
		t.Fatal(err)
	}
	send()
	lines(moved, 2)
	a.decisions.reopen()
	eventually(t, func() bool { return len(a.decisions.reopens) == 0 }, func() string { return "the file is not opened again" })
	send()
	lines(file, 1)
	lines(moved, 2)

	other := c
	other.Decisions.File = filepath.Join(dir, "other")
	if err := a.Reload(other); err != nil {
		t.Fatal(err)
	}
	send()
	lines(other.Decisions.File, 1)
	off := c
	off.Decisions.File = ""
	if err := a.Reload(off); err != nil {
		t.Fatal(err)
	}
	send()
	if err := a.Reload(other); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		send()
	}
	running = false
	stopped(t, a)
	if list := loggedDecisions(t, other.Decisions.File); len(list) != 6 {
		t.Errorf("%d decisions were written before the end, want 6", len(list))
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm()&0o007 != 0 {
		t.Errorf("%v, %v: everybody may read it", info.Mode(), err)
	}
}

// logrotate moves the file away and sends a hangup: the configuration says what it
// said, and the file is opened again all the same.
func TestDecisionLogRotates(t *testing.T) {
	file := filepath.Join(t.TempDir(), "decisions")
	l := followed(t, testConfig(startEngine(t, 0, "m")), "decisions: {file: "+file+", sample: 1}\n")
	askWhole(t, l.Agent, "Hello!")
	eventually(t, func() bool { return len(loggedDecisions(t, file)) == 1 }, func() string { return "nothing is written" })
	if err := os.Rename(file, file+".1"); err != nil {
		t.Fatal(err)
	}
	l.hangup <- syscall.SIGHUP
	eventually(t, func() bool {
		askWhole(t, l.Agent, "Hello!")
		return len(loggedDecisions(t, file)) > 0
	}, func() string { return "the file is not opened again" })
}

func TestDecisionsConfig(t *testing.T) {
	f := func(d DecisionsConfig, want string) {
		t.Helper()
		c := testConfig()
		c.Replicas = []ReplicaConfig{{URL: "http://gpu:8000"}}
		c.Decisions = d
		switch err := c.Check(); {
		case want == "" && err != nil:
			t.Errorf("%+v: %v", d, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%+v: %v, want %q", d, err, want)
		}
	}
	f(DecisionsConfig{}, "")
	f(DecisionsConfig{File: filepath.Join(t.TempDir(), "d"), Sample: 1}, "")
	f(DecisionsConfig{File: "d", Sample: 1}, `decisions.file: "d" is not an absolute path`)
	f(DecisionsConfig{File: "/nowhere/d"}, "decisions.file: cannot be written")
	f(DecisionsConfig{File: t.TempDir()}, "is there and is not a file")
	f(DecisionsConfig{Sample: -1}, "decisions.sample: -1 is outside 0 to 1")
	f(DecisionsConfig{Sample: 1.01}, "decisions.sample: 1.01 is outside 0 to 1")
}

// When nothing takes what is written, nobody waits for it: requests go on, decisions
// are dropped and counted, and the end comes all the same.
func TestDecisionLogHangs(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	// Somebody holds it open and reads nothing.
	reader, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	engine := startEngine(t, 0, "m")
	c := testConfig(engine)
	a := startAgent(t, c)
	// A pipe is none that a configuration may name; a file on a disk that hangs is no
	// better.
	a.decisions.configure(DecisionsConfig{File: pipe, Sample: 1})
	a.proxy.SetDecisions(a.decisions.records, proxy.DecisionsWanted{Sample: 1})
	client := &http.Client{Timeout: 20 * time.Second}
	defer client.CloseIdleConnections()
	dropped := func() bool {
		_, text := page(t, a, "/metrics")
		return !strings.Contains(text, "inferrail_decision_log_dropped_total 0\n")
	}
	// A pipe has room for some hundred, and as many wait.
	for n := 0; !dropped(); n++ {
		if n > 100 {
			t.Fatal("nothing is dropped")
		}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 25 {
					resp, err := client.Post("http://"+a.Addr().String()+"/v1/completions", "application/json", strings.NewReader(`{"model":"m","prompt":"a","max_tokens":1}`))
					if err != nil {
						t.Error(err)
						return
					}
					resp.Body.Close()
				}
			})
		}
		wg.Wait()
	}
	began := time.Now()
	stopped(t, a)
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("stopping took %v", d)
	}
	<-a.decisions.done // the goroutine ends too
}

// On a full disk requests go on and nothing stops; what is not written is counted, and
// told once.
func TestDecisionLogOnAFullDisk(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("there is no /dev/full")
	}
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	a.decisions.configure(DecisionsConfig{File: "/dev/full", Sample: 1})
	a.proxy.SetDecisions(a.decisions.records, proxy.DecisionsWanted{Sample: 1})
	for range 5 {
		if resp := ask(t, a, 2); resp.StatusCode != 200 {
			t.Fatalf("status %d", resp.StatusCode)
		}
	}
	eventually(t, func() bool { return a.decisions.failed.Load() > 0 }, func() string { return "nothing has failed" })
	if n := a.decisions.written.Load(); n > 0 {
		t.Errorf("%d are written", n)
	}
}

// A file that may not grow beyond a size, as on a disk with little room, is left with
// whole lines.
func TestDecisionLogWritesWholeLines(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	l := newDecisionLog(DecisionsConfig{}, (&lines{}).logger())
	l.close()
	<-l.done
	l.wanted.Store(&DecisionsConfig{File: file, Sample: 1})
	if err := l.put([]byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	was := unix.Rlimit{}
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1000, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	long := append(bytes.Repeat([]byte("x"), 2000), '\n')
	err := l.put(long)
	if restored := unix.Setrlimit(unix.RLIMIT_FSIZE, &was); restored != nil {
		t.Fatal(restored)
	}
	if err == nil {
		t.Fatal("it was written")
	}
	if err := l.put([]byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(file); string(text) != "{}\n{}\n" {
		t.Errorf("the file has %d bytes: %.80q", len(text), text)
	}
	l.shut()
}

// What cannot be written is counted and told once; when it can be again, lines go on
// behind one that was torn.
func TestDecisionLogAils(t *testing.T) {
	said := &lines{}
	dir := t.TempDir()
	file := filepath.Join(dir, "no", "log")
	l := newDecisionLog(DecisionsConfig{File: file, Sample: 1}, said.logger())
	defer l.close()
	write := func(n int) {
		for i := range n {
			l.records <- &proxy.Decision{Turn: uint64(i)}
		}
	}
	write(10)
	eventually(t, func() bool { return l.failed.Load() == 10 }, func() string { return fmt.Sprint(l.failed.Load(), " have failed") })
	if n := strings.Count(said.String(), "decisions cannot be written down"); n != 1 || !strings.Contains(said.String(), "no such file") {
		t.Errorf("told %d times:\n%s", n, said)
	}
	if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	l.reopen() // it would be tried again in a second
	eventually(t, func() bool { write(1); return l.written.Load() > 0 }, func() string { return "nothing is written" })
	if !strings.Contains(said.String(), "written down again") {
		t.Errorf("not told:\n%s", said)
	}
	if len(loggedDecisions(t, file)) == 0 {
		t.Error("there are no lines")
	}
}

func TestDecisionLogTornLine(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	l := &decisionLog{log: testLog(t)}
	l.file.Store(w)
	tried := make(chan error)
	go func() { tried <- l.put(append(bytes.Repeat([]byte("x"), 1<<20), '\n')) }()
	eventually(t, func() bool {
		n, err := unix.IoctlGetInt(int(r.Fd()), unix.TIOCINQ)
		return err == nil && n > 0
	}, func() string { return "nothing is written" })
	if err := w.SetWriteDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if <-tried == nil || !l.torn {
		t.Fatal("a pipe takes a megabyte")
	}
	got := make([]byte, 1<<20)
	n, err := r.Read(got)
	if err != nil || n == 0 {
		t.Fatal(n, err)
	}
	if err := w.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if err := l.put([]byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	w.Close()
	var rest []byte
	for {
		n, err := r.Read(got)
		rest = append(rest, got[:n]...)
		if err != nil {
			break
		}
	}
	if !slices.Equal(rest[len(rest)-4:], []byte("\n{}\n")) {
		t.Errorf("it ends with %q", rest[max(len(rest)-10, 0):])
	}
}

// A decision that is sent after another file was configured goes there, whichever of
// the two the goroutine hears of first; and what is sent after a file was deleted goes
// to a new one.
func TestDecisionLogOfAnotherFile(t *testing.T) {
	dir := t.TempDir()
	first, second := filepath.Join(dir, "first"), filepath.Join(dir, "second")
	l := &decisionLog{log: testLog(t), closing: t.Context(), reopens: make(chan struct{}, 1)}
	defer l.shut()
	l.configure(DecisionsConfig{File: first, Sample: 1})
	if err := l.put([]byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	l.configure(DecisionsConfig{File: second, Sample: 1})
	if err := l.put([]byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	if len(loggedDecisions(t, first)) != 1 || len(loggedDecisions(t, second)) != 1 {
		t.Error("both are not in files of their own")
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	if err := l.put([]byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	if len(loggedDecisions(t, second)) != 1 {
		t.Error("what is written after a file was deleted is lost")
	}
}

// A file that becomes too large is renamed, and those before it: what was written last
// is all there, in files that are not too large and not too many.
func TestDecisionLogIsBounded(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "log")
	l := newDecisionLog(DecisionsConfig{File: file, Sample: 1, MaxBytes: leastDecisions, Keep: 3}, testLog(t))
	turn := uint64(0)
	write := func(n int) {
		t.Helper()
		before := l.written.Load()
		for range n {
			turn++
			l.records <- &proxy.Decision{Turn: turn, Path: strings.Repeat("x", 2000)}
		}
		eventually(t, func() bool { return l.written.Load() == before+uint64(n) }, func() string { return "nothing is written" })
	}
	whole := func(names ...string) {
		t.Helper()
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range entries {
			if info, err := e.Info(); err != nil || info.Size() > decisionBatch+4096 || info.Size() == 0 {
				t.Errorf("%s: %v, %d bytes", e.Name(), err, info.Size())
			}
			got = append(got, e.Name())
		}
		if !slices.Equal(got, names) {
			t.Fatalf("the files are %v, want %v", got, names)
		}
		next := turn
		for _, name := range names { // the newest first
			list := loggedDecisions(t, filepath.Join(dir, name))
			slices.Reverse(list)
			for _, d := range list {
				if d.Turn != next {
					t.Fatalf("%s has decision %d, want %d", name, d.Turn, next)
				}
				next--
			}
		}
	}
	write(5)
	whole("log")
	write(550)
	whole("log", "log.1", "log.2", "log.3")
	l.close()

	// What is there from before counts, and without old ones there is one file.
	for _, old := range []string{"log.1", "log.2", "log.3"} {
		if err := os.Remove(filepath.Join(dir, old)); err != nil {
			t.Fatal(err)
		}
	}
	l = newDecisionLog(DecisionsConfig{File: file, Sample: 1, MaxBytes: leastDecisions}, testLog(t))
	write(200)
	whole("log")
	l.close()
}

// When no file can be renamed the lines go where they went, and that is told once.
func TestDecisionLogIsStuck(t *testing.T) {
	dir := t.TempDir()
	file, said := filepath.Join(dir, "log"), &lines{}
	if err := os.MkdirAll(filepath.Join(file+".1", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	l := newDecisionLog(DecisionsConfig{File: file, Sample: 1, MaxBytes: leastDecisions, Keep: 1}, said.logger())
	defer l.close()
	for i := range 200 {
		l.records <- &proxy.Decision{Turn: uint64(i), Path: strings.Repeat("x", 2000)}
	}
	eventually(t, func() bool { return l.written.Load() == 200 }, func() string { return "nothing is written" })
	if n := len(loggedDecisions(t, file)); n != 200 {
		t.Errorf("%d lines, want 200", n)
	}
	if n := strings.Count(said.String(), "no new file can be begun"); n != 1 {
		t.Errorf("told %d times:\n%s", n, said)
	}
}
