package simulator

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// volatile are the parts of an answer that change from run to run, and what they
// are shown as: times, and ids that are drawn.
var volatile = []struct {
	pattern *regexp.Regexp
	shown   string
}{
	{regexp.MustCompile(`("(?:[a-z_]*_ms|[a-z_]*_per_second|[a-z_]*_duration)":)[0-9.e+-]+`), "$1#"},
	{regexp.MustCompile(`("created_at":|"modified_at":|"expires_at":)"[^"]+"`), `$1"#"`},
	{regexp.MustCompile(`"created":[0-9]{10}`), `"created":#`},
	{regexp.MustCompile(`"((?:chatcmpl|cmpl)-)[A-Za-z0-9]+"`), `"$1#"`},
	{regexp.MustCompile(`(_seconds(?:_total)?) [0-9.e+-]+`), "$1 #"},
	{regexp.MustCompile(`("n_remain":|"n_decoded":)[0-9]+`), "$1#"},
	{regexp.MustCompile(`"n_prompt_tokens":[0-9]+,"n_prompt_tokens_processed":[0-9]+`), `"n_prompt_tokens":#,"n_prompt_tokens_processed":#`},
}

// shownHeaders are those that a story shows of an answer.
var shownHeaders = []string{"Content-Type", "Server", "Allow", "Access-Control-Allow-Origin"}

// TestConversations tells over real sockets what the faces of llama.cpp and Ollama
// answer, byte for byte.
//
//	start engine=NAME [name=value ...]   a server, in place of the one before
//	METHOD PATH [header=value ...]       a request; its body follows
//	METHOD PATH keep=NAME [...]          one whose answer is waited for later
//	answer NAME                          shows that
//	leave NAME                           its client leaves
//	busy N wait=M                        waits until so many have a slot, and wait
//	queued N loading=B                   waits until so many wait for the model to be
//	                                     loaded, beside whom it is loaded for
//
// In a path "~" stands for "=". A body may be shortened: "short" shows only the
// status, "lines" how many lines there are, and only=WORD those with the word.
func TestConversations(t *testing.T) {
	for _, engine := range []string{"llamacpp", "ollama"} {
		datadriven.Walk(t, "testdata/"+engine, func(t *testing.T, path string) {
			var s *Server
			kept, leave := map[string]chan string{}, map[string]context.CancelFunc{}
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
				switch d.Cmd {
				case "start":
					if s != nil {
						_ = s.Close()
					}
					cfg := Config{Engine: engine, Created: 1796040000}
					for _, arg := range d.CmdArgs {
						setConfig(t, &cfg, arg.Key, arg.Vals)
					}
					var err error
					if s, err = Start(cfg); err != nil {
						return err.Error() + "\n"
					}
					t.Cleanup(func() { _ = s.Close() })
					return ""
				case "answer":
					select {
					case out := <-kept[d.CmdArgs[0].Key]:
						return out
					case <-time.After(time.Minute):
						t.Fatalf("%s: no answer", d.Pos)
					}
				case "leave":
					leave[d.CmdArgs[0].Key]()
					<-kept[d.CmdArgs[0].Key]
					return ""
				case "busy":
					running, err := strconv.Atoi(d.CmdArgs[0].Key)
					if err != nil {
						t.Fatal(err)
					}
					var waiting int
					d.ScanArgs(t, "wait", &waiting)
					waitFor(t, func() bool {
						l := s.Load()
						return l.Running == running && l.Waiting == waiting
					})
					return ""
				}
				if d.Cmd == "queued" {
					waitFor(t, func() bool {
						queued, loading := s.current().runner.waiting()
						return fmt.Sprintf("%d %v", queued, loading) == d.CmdArgs[0].Key+" "+d.CmdArgs[1].Vals[0]
					})
					return ""
				}
				keep := ""
				if d.MaybeScanArgs(t, "keep", &keep) {
					out := make(chan string, 1)
					ctx, cancel := context.WithCancel(t.Context())
					kept[keep], leave[keep] = out, cancel
					s, d := s, *d
					go func() { out <- converse(ctx, s, &d) }()
					return ""
				}
				return converse(t.Context(), s, d)
			})
		})
	}
}

// waitFor waits until a condition holds.
func waitFor(t *testing.T, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); {
		if time.Now().After(end) {
			t.Fatal("it has not come to that")
		}
		time.Sleep(time.Millisecond)
	}
}

// converse sends the request that a command stands for and returns what is shown of the
// answer.
func converse(ctx context.Context, s *Server, d *datadriven.TestData) string {
	path := strings.ReplaceAll(d.CmdArgs[0].Key, "~", "=")
	r, err := http.NewRequestWithContext(ctx, d.Cmd, s.URL()+path, strings.NewReader(strings.TrimSpace(d.Input)))
	if err != nil {
		return err.Error() + "\n"
	}
	short, lines, only := false, false, ""
	for _, arg := range d.CmdArgs[1:] {
		switch arg.Key {
		case "keep":
		case "short":
			short = true
		case "lines":
			lines = true
		case "only":
			only = arg.Vals[0]
		case "Host":
			r.Host = arg.Vals[0]
		default:
			r.Header.Set(arg.Key, strings.Join(arg.Vals, ","))
		}
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err.Error() + "\n"
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error() + "\n"
	}
	for _, v := range volatile {
		body = v.pattern.ReplaceAll(body, []byte(v.shown))
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%d", resp.StatusCode)
	for _, name := range shownHeaders {
		if v := resp.Header.Get(name); v != "" {
			fmt.Fprintf(&out, " %s: %s;", name, v)
		}
	}
	out.WriteString("\n")
	switch all := bytes.Split(bytes.TrimSpace(body), []byte("\n")); {
	case short:
	case lines:
		fmt.Fprintf(&out, "%d lines\n", len(all))
	default:
		for _, line := range all {
			// An empty line would end the output.
			if len(line) > 0 && bytes.Contains(line, []byte(only)) {
				out.Write(append(line, '\n'))
			}
		}
	}
	return out.String()
}

// setConfig sets what a story says of a server.
func setConfig(t *testing.T, cfg *Config, name string, values []string) {
	t.Helper()
	value := ""
	if len(values) > 0 {
		value = values[0]
	}
	number := func() int {
		n, err := strconv.Atoi(value)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	length := func() time.Duration {
		d, err := time.ParseDuration(value)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return d
	}
	switch name {
	case "names":
		cfg.ServedModelName = slices.Clone(values)
	case "fast":
		cfg.ZeroLatency = true
	case "slots":
		cfg.MaxNumSeqs = number()
	case "context":
		cfg.MaxModelLen = number()
	case "output":
		cfg.DefaultOutputTokens = number()
	case "key":
		cfg.APIKey = value
	case "load":
		cfg.LoadTime = length()
	case "token":
		cfg.TimePerOutputToken = length()
	case "metrics":
		cfg.LlamaCPP.Metrics = true
	case "no-slots":
		cfg.LlamaCPP.NoSlots = true
	case "embeddings":
		cfg.LlamaCPP.Embeddings = true
	case "keep-alive":
		cfg.Ollama.KeepAlive = length()
	case "queue":
		cfg.Ollama.MaxQueue = number()
	default:
		t.Fatalf("no setting %q", name)
	}
}

// waiting returns how many wait for their turn to load the model, and whether
// somebody has it.
func (r *ollamaRunner) waiting() (queued int, loading bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.queued, len(r.turn) == 0
}
