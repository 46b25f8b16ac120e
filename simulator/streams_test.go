package simulator

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestThousandsOfStreams: one engine serves 3,000 streams at a time, and each of them has every
// token. Under the race detector they are fewer.
func TestThousandsOfStreams(t *testing.T) {
	streams, tokens, pace := 3000, 4, time.Second
	if raceEnabled {
		streams = 500
	}
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	// Both ends of each are in this process.
	if room := int(min(files.Cur, 1<<20)) - 200; 2*streams > room {
		if streams = room / 2; streams < 100 {
			t.Skipf("only %d files may be open here", files.Cur)
		}
		t.Logf("with %d streams, for only %d files may be open here", streams, files.Cur)
	}
	s := start(t, Config{MaxNumSeqs: streams, NumGPUBlocks: 4 * (streams + 1), MaxModelLen: 60, PrefillA: 10, TimePerOutputToken: pace})
	errs := make([]error, streams)
	var all sync.WaitGroup
	for i := range streams {
		all.Go(func() { _, errs[i] = listen(s.Addr(), i, tokens, pace) })
	}
	all.Wait()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("stream %d of %d: %v", i, streams, err)
		}
	}
	eventually(t, 20*time.Second, "all are over", func() bool { return s.Finished() == streams && s.Load() == Load{} })
}

// TestStreamsKeepTime holds many streams at ten tokens a second open at one time: none
// may fail, and it reports by how much tokens come later than their turn, which is
// the server's and the client's doing together. INFERRAIL_STREAMS says how many;
// the machine's limit of open files must allow two for each.
func TestStreamsKeepTime(t *testing.T) {
	streams, tokens, spread := 200, 20, 200*time.Millisecond
	if text := os.Getenv("INFERRAIL_STREAMS"); text != "" {
		var err error
		if streams, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
		tokens, spread = 100, 5*time.Second
	}
	const pace = 100 * time.Millisecond
	s := start(t, Config{MaxNumSeqs: streams, NumGPUBlocks: 16 * (streams + 1), MaxModelLen: 250, PrefillA: 10, TimePerOutputToken: pace})
	var (
		mu     sync.Mutex
		lags   []time.Duration
		failed []error
		all    sync.WaitGroup
	)
	began, used := time.Now(), processTime()
	for i := range streams {
		all.Go(func() {
			late, err := listen(s.Addr(), i, tokens, pace)
			mu.Lock()
			defer mu.Unlock()
			lags = append(lags, late...)
			if err != nil {
				failed = append(failed, err)
			}
		})
		// They do not all begin at one instant.
		time.Sleep(spread / time.Duration(streams))
	}
	all.Wait()
	took := time.Since(began)
	if len(failed) > 0 {
		t.Fatalf("%d of %d streams failed, one with: %v", len(failed), streams, failed[0])
	}
	slices.Sort(lags)
	at := func(part float64) time.Duration {
		return lags[int(part*float64(len(lags)-1))].Round(10 * time.Microsecond)
	}
	cpu := processTime() - used
	t.Logf("%d streams of %d tokens in %v: late by %v in the median, %v at p99, %v at most; %v of processor time for both ends, %v a token; %d goroutines",
		streams, tokens, took.Round(time.Millisecond), at(.5), at(.99), at(1), cpu.Round(time.Millisecond), cpu/time.Duration(len(lags)), runtime.NumGoroutine())
	eventually(t, 20*time.Second, "all are over", func() bool { return s.Finished() == streams && s.Load() == Load{} })
}

// listen reads one stream and returns by how much each token came after its turn,
// which is a pace after the one before, counted from the most punctual one.
func listen(addr string, i, tokens int, pace time.Duration) ([]time.Duration, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	body := fmt.Sprintf(`{"prompt":"stream %d","max_tokens":%d,"stream":true}`, i, tokens)
	if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body); err != nil {
		return nil, err
	}
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Minute)); err != nil {
		return nil, err
	}
	in := bufio.NewReaderSize(c, 1024)
	var came []time.Time
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return nil, fmt.Errorf("after %d tokens: %w", len(came), err)
		}
		if bytes.HasPrefix(line, []byte("data: [DONE]")) {
			break
		}
		if bytes.HasPrefix(line, []byte("data: {")) {
			came = append(came, time.Now())
		}
	}
	if len(came) != tokens {
		return nil, fmt.Errorf("%d tokens came, not %d", len(came), tokens)
	}
	late := make([]time.Duration, tokens)
	for k, at := range came {
		late[k] = at.Sub(came[0]) - time.Duration(k)*pace
	}
	first := slices.Min(late)
	for k := range late {
		late[k] -= first
	}
	return late, nil
}

// processTime is the processor time that the process has used.
func processTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
