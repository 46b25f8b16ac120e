package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// The benchmark starts this program again as its workers, and the tests as
// their agent.
func TestMain(m *testing.M) {
	var err error
	switch {
	case len(os.Args) > 2 && os.Args[1] == "bench" && os.Args[2] == "worker":
		err = Worker(os.Args[3:])
	case len(os.Args) > 2 && os.Args[1] == "test-agent":
		err = testAgent(os.Args[2], os.Args[3:])
	case len(os.Args) > 1 && os.Args[1] == "test-streams":
		err = testStreams()
	case len(os.Args) > 1 && os.Args[1] == "test-compare":
		err = testCompare(os.Args[2:])
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// testAgent stands in for the agent: the same flags, the same debug page.
func testAgent(behaviour string, args []string) error {
	one := "--datapath copy --replica e0=http://" + engineAddr + " --listen :8080 --iface toclient --iface toengine"
	two := strings.Replace(one, " --listen", " --replica e1=http://"+engineAddr2+" --listen", 1)
	if got := strings.Join(args, " "); got != one && got != two {
		return fmt.Errorf("started with %q, want %q or %q", got, one, two)
	}
	if behaviour == "refuse" {
		return fmt.Errorf("this agent does not want to")
	}
	var reads atomic.Uint64
	admin := http.NewServeMux()
	admin.HandleFunc("/debug/datapath", func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(map[string]any{"tier": "copy", "wakeups": reads.Load(), "chunks": reads.Load(), "other": true})
	})
	go http.ListenAndServe("127.0.0.1:9090", admin)
	l, err := net.Listen("tcp", ":8080")
	if err != nil {
		return err
	}
	for {
		client, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer client.Close()
			engine, err := net.Dial("tcp", engineAddr)
			if err != nil {
				return
			}
			go func() {
				defer engine.Close()
				io.Copy(engine, client)
			}()
			b := make([]byte, 4096)
			for {
				n, err := engine.Read(b)
				if err != nil || behaviour == "models" && !bytes.Contains(b[:n], []byte("owned_by")) {
					return
				}
				if reads.Add(1) > 1000 {
					switch behaviour {
					case "corrupt":
						b[n/2] ^= 1
					case "cut":
						return
					}
				}
				if _, err := client.Write(b[:n]); err != nil {
					return
				}
			}
		}()
	}
}

// newDatapath is a short run, or a skip where it cannot be had.
func newDatapath(t *testing.T, programs ...string) (*Datapath, *strings.Builder) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%s is not installed", p)
		}
	}
	var out strings.Builder
	return &Datapath{
		Streams: []Load{{50, 20}}, Reps: 1, Warm: 200 * time.Millisecond, Measure: 2 * time.Second,
		Chunks: 20, OtherLoad: 100, Limit: time.Minute, Results: filepath.Join(t.TempDir(), "results"),
		Stdout: &out, Stderr: t.Output(),
	}, &out
}

func TestDirectAndNginx(t *testing.T) {
	d, out := newDatapath(t, "nginx")
	d.Only = []string{"direct", "nginx"}
	if err := d.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", out)
	b, err := os.ReadFile(filepath.Join(d.Results, "datapath.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Runs) != 2 || len(r.Rows) != 2 {
		t.Fatalf("%d runs, %d rows", len(r.Runs), len(r.Rows))
	}
	for _, m := range r.Runs {
		// 50 streams at 20 chunks a second make 2,000 in 2 s, and end 100 responses.
		if m.Chunks < 1700 || m.Chunks > 2300 || m.Responses < 80 || m.Responses > 120 {
			t.Errorf("%s: %d chunks, %d responses", m.Contestant, m.Chunks, m.Responses)
		}
		if m.CPU.Client <= 0 || m.CPU.Engine <= 0 || m.Latency.P50 == 0 || m.Latency.P99 < m.Latency.P50 {
			t.Errorf("%s: %+v", m.Contestant, m)
		}
		if proxied := m.Contestant != "direct"; proxied != (m.CPU.Proxy > 0) || proxied != (m.Wakeups > 0) || proxied != (m.PeakKiB > 0) {
			t.Errorf("%s: %+v", m.Contestant, m)
		}
	}
}

func TestAgent(t *testing.T) {
	f := func(behaviour string, wantErr ...string) *strings.Builder {
		t.Helper()
		d, out := newDatapath(t)
		d.Only, d.Agent = []string{"copy"}, []string{os.Args[0], "test-agent", behaviour}
		err := d.Run(t.Context())
		if (err == nil) != (len(wantErr) == 0) {
			t.Fatalf("%s: %v", behaviour, err)
		}
		for _, want := range wantErr {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q is not in: %v", behaviour, want, err)
			}
		}
		return out
	}
	// One read a chunk, and two more a response of 20.
	row := f("pass").String()
	fields := strings.Fields(row[strings.Index(row, "copy"):])
	if wakeups, err := strconv.ParseFloat(fields[8], 64); err != nil || wakeups < 900 || wakeups > 1200 {
		t.Errorf("wake-ups by its own count: %q in\n%s", fields[8], row)
	}
	f("corrupt", "copy at 50x20", "client ended", "wrong")
	f("cut", "copy at 50x20", "client ended", "connection ended")
	f("refuse", "copy at 50x20", "did not start", "exit status 1", "this agent does not want to")
}

func TestInterruptedRunLeavesNothing(t *testing.T) {
	d, _ := newDatapath(t, "nginx")
	d.Only, d.Measure = []string{"nginx"}, time.Minute
	interrupt(t, d.Run)
	g, out := newGateway(t, "nginx")
	g.Measure = time.Minute
	interrupt(t, g.Run)
	if out.Len() > 0 {
		t.Errorf("an interrupted run has a result:\n%s", out)
	}
}

func interrupt(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	begin := time.Now()
	if err := run(ctx); err == nil || !strings.Contains(err.Error(), "deadline exceeded") {
		t.Errorf("%v", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("ended %v after the interruption", took-time.Second)
	}
	pids, err := family(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if len(pids) > 1 {
		t.Errorf("processes are left: %v", pids)
	}
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if ns, err := os.Readlink(task); err == nil && ns != own {
			t.Errorf("%s is still in %s", task, ns)
		}
	}
}
