package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// zmqPublisher is testdata/publisher.py as it runs.
type zmqPublisher struct {
	t      *testing.T
	in     io.Writer
	out    *bufio.Reader
	events string // host:port
	replay string
}

// startPublisher starts it, or skips the test without a Python that has pyzmq.
func startPublisher(t *testing.T) *zmqPublisher {
	t.Helper()
	python := os.Getenv("INFERRAIL_VLLM")
	if python == "" {
		t.Skip("INFERRAIL_VLLM does not name the folder of a Python with pyzmq; make test-vllm does")
	}
	cmd := exec.Command(filepath.Join(python, "python"), filepath.Join("testdata", "publisher.py"))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		kill := time.AfterFunc(patience, func() { cmd.Process.Kill() })
		defer kill.Stop()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the publisher: %v", err)
		}
	})
	p := &zmqPublisher{t: t, in: in, out: bufio.NewReader(out)}
	var pub, router int
	if _, err := fmt.Fscanln(p.out, &pub, &router); err != nil {
		t.Fatal(err)
	}
	p.events, p.replay = fmt.Sprintf("127.0.0.1:%d", pub), fmt.Sprintf("127.0.0.1:%d", router)
	return p
}

// do has it obey a command, and returns the sequence of its next batch.
func (p *zmqPublisher) do(command string) (next uint64) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, command); err != nil {
		p.t.Fatal(err)
	}
	if _, err := fmt.Fscanf(p.out, "ok %d\n", &next); err != nil {
		p.t.Fatalf("%s: %v", command, err)
	}
	return next
}

func (p *zmqPublisher) source() publisher {
	return publisher{events: endpoint{"tcp", p.events}, replay: endpoint{"tcp", p.replay}, topic: "kv"}
}

// open opens a feed, and publishes until something of it has arrived.
func (p *zmqPublisher) open(t *testing.T, from publisher) (*feed, uint64) {
	t.Helper()
	f, err := openFeed(t.Context(), from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.close)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		p.do("send 1")
		if m, err := f.next(20 * time.Millisecond); err == nil {
			return f, m.Seq
		} else if !errors.Is(err, errQuiet) {
			t.Fatal(err)
		}
	}
	t.Fatal("nothing arrives")
	return nil, 0
}

// TestVLLMFeed: what the library that engines publish with sends.
func TestVLLMFeed(t *testing.T) {
	p := startPublisher(t)
	f, seq := p.open(t, p.source())
	last := p.do("send 5000")
	decoder, batch := kvevent.Decoder{}, kvevent.Batch{}
	for seq+1 < last {
		m, err := f.next(patience)
		if err != nil {
			t.Fatal(err)
		}
		if m.Seq != seq+1 {
			t.Fatalf("sequence %d after %d", m.Seq, seq)
		}
		if err := decoder.Batch(&batch, m.Payload); err != nil {
			t.Fatal(err)
		}
		if len(batch.Events) != 1 || batch.Events[0].Kind != kvevent.Stored || len(batch.Events[0].Tokens) != 4 {
			t.Fatalf("%+v", batch)
		}
		seq++
	}
	if _, err := f.next(time.Millisecond); !errors.Is(err, errQuiet) {
		t.Errorf("got %v", err)
	}

	// What was lost is to be had again, as often as wanted. libzmq drops replies
	// beyond a thousand that wait.
	lost := p.do("lose 3")
	for _, from := range []uint64{lost - 3, lost - 1, lost, lost + 100, 0} {
		got := []uint64{}
		if err := f.replay(from, func(m kvevent.Message) error {
			got = append(got, m.Seq)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		want := []uint64{}
		for n := from; n < lost; n++ {
			want = append(want, n)
		}
		if !slices.Equal(got, want) {
			t.Errorf("from %d: got %v", from, got)
		}
	}
	// One that is given up does not disturb the next.
	full := errors.New("enough")
	if err := f.replay(0, func(kvevent.Message) error { return full }); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	var got []uint64
	if err := f.replay(lost-1, func(m kvevent.Message) error { got = append(got, m.Seq); return nil }); err != nil || !slices.Equal(got, []uint64{lost - 1}) {
		t.Errorf("got %v, %v", got, err)
	}

	// Those that are no messages are told apart from a broken connection.
	p.do("garbage")
	bad := 0
	for {
		m, err := f.next(patience)
		if err == nil {
			if err := decoder.Batch(&batch, m.Payload); err == nil {
				t.Errorf("%q is a batch", m.Payload)
			}
			break
		}
		var malformed errMalformed
		if !errors.As(err, &malformed) && !strings.Contains(err.Error(), "more than 4 parts") {
			t.Fatal(err)
		}
		if bad++; !errors.As(err, &malformed) {
			break // the connection is given up
		}
	}
	if bad < 2 {
		t.Errorf("%d are malformed", bad)
	}

	p.do("stop")
	if _, err := f.next(patience); err == nil || errors.Is(err, errQuiet) {
		t.Errorf("the publisher is gone: %v", err)
	}
	if _, err := openFeed(t.Context(), p.source()); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("got %v", err)
	}
	p.do("start")
	p.open(t, p.source())
}

// TestVLLMFeedIsNotFlooded: a publisher that sends more than anybody reads waits or
// drops; nothing gathers here.
func TestVLLMFeedIsNotFlooded(t *testing.T) {
	p := startPublisher(t)
	f, _ := p.open(t, p.source())
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	p.do("flood 200")
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 16<<20 {
		t.Errorf("%d bytes more while nobody reads", grown)
	}
	for range 100 {
		if _, err := f.next(patience); err != nil {
			t.Fatal(err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 16<<20 {
		t.Errorf("%d bytes more after reading", grown)
	}
}

// TestVLLMFeedReplayFails: an endpoint for replays that does not answer, is none, or
// is not there.
func TestVLLMFeedReplayFails(t *testing.T) {
	p := startPublisher(t)
	nothing := func(kvevent.Message) error { return nil }
	from := p.source()
	from.replay = endpoint{}
	f, _ := p.open(t, from)
	if err := f.replay(0, nothing); err == nil || !strings.Contains(err.Error(), "no replay endpoint") {
		t.Errorf("got %v", err)
	}
	f.from.replay = endpoint{"tcp", p.events}
	if err := f.replay(0, nothing); err == nil || !strings.Contains(err.Error(), "no ZeroMQ handshake") {
		t.Errorf("got %v", err)
	}
	f.from.replay = endpoint{"tcp", p.replay}
	p.do("mute")
	ctx, cancel := context.WithCancel(t.Context())
	f.ctx = ctx
	time.AfterFunc(50*time.Millisecond, cancel)
	if err := f.replay(0, nothing); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
