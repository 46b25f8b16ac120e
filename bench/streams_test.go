package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// streamed is a connection of testStreams whose answer runs.
type streamed struct {
	conn net.Conn
	left int
	next func()
}

// testStreams is a server, in a process of its own, that costs little: each answer has
// 200 tokens, 20 a second, written by one goroutine for all of them.
func testStreams() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	const slots, tokens = 50, 200 // of a millisecond
	var mu sync.Mutex             // guards answers
	var answers [slots][]*streamed
	chunk := func(data string) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(data), data) }
	token := chunk(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"sim",` +
		`"choices":[{"index":0,"delta":{"content":"word "},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	last := append(chunk(`data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":200}}`+"\n\ndata: [DONE]\n\n"), "0\r\n\r\n"...)
	go func() {
		for at, slot := time.Now(), 0; ; slot = (slot + 1) % slots {
			at = at.Add(time.Millisecond)
			time.Sleep(time.Until(at))
			mu.Lock()
			keep := answers[slot][:0]
			for _, a := range answers[slot] {
				if a.left--; a.left > 0 {
					_, _ = a.conn.Write(token)
					keep = append(keep, a)
				} else {
					_, _ = a.conn.Write(last)
					go a.next()
				}
			}
			answers[slot] = keep
			mu.Unlock()
		}
	}()
	emptiest := func() (best int) {
		for i := range answers {
			if len(answers[i]) < len(answers[best]) {
				best = i
			}
		}
		return best
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		r := bufio.NewReader(conn)
		var serve func()
		serve = func() {
			req, err := http.ReadRequest(r)
			if err != nil {
				conn.Close()
				return
			}
			req.Body.Close()
			_, _ = conn.Write([]byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"))
			mu.Lock()
			defer mu.Unlock()
			slot := emptiest()
			answers[slot] = append(answers[slot], &streamed{conn, tokens + 1, serve})
		}
		go serve()
	}
}

// TestLoadOfManyStreams measures what 2,000 streams of 20 tokens a second cost the
// harness, and how well it keeps its schedule meanwhile. It needs a machine with
// nothing else to do.
func TestLoadOfManyStreams(t *testing.T) {
	if os.Getenv("INFERRAIL_SOAK") == "" {
		t.Skip("without INFERRAIL_SOAK")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	server := exec.Command(self, "test-streams")
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := server.StdoutPipe()
	if err == nil {
		err = server.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	// An answer takes ten seconds, so 200 requests a second are 2,000 streams.
	const rate, seconds = 200, 25
	l := loadAt(t, "http://"+strings.TrimSpace(address), rate*seconds, 200, time.Second/rate)
	used := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	var progress bytes.Buffer
	result, err := l.runShown(t.Context(), &progress, "streams")
	if err != nil {
		t.Fatal(err)
	}
	cpu := used() - before
	s := workload.Summarize(result.records, l.workload, workload.SummaryOptions{Warm: 10 * time.Second})
	t.Logf("%d at once, CPUs %.0f %% busy; sent late %+v; between tokens %+v", result.mostAtOnce, 100*result.busy, s.Lag, s.ITL)
	t.Logf("%v of CPU for %d tokens: %.1f us each; %d KiB at most", cpu, 200*rate*seconds, float64(cpu.Microseconds())/(200*rate*seconds), peakMemory([]int{os.Getpid()}))
	if s.Failed > 0 || result.mostAtOnce < 1900 {
		t.Errorf("%d failed, %d at once: %v", s.Failed, result.mostAtOnce, result.why)
	}
	if s.Lag.P99 > 5 {
		t.Errorf("one in a hundred requests was sent over %.1f ms late", s.Lag.P99)
	}
}
