package tokenizer

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"
)

// oracle is the tokenizers library itself, in a Python beside the test: the
// interpreter that INFERRAIL_TOKENIZERS_PYTHON names. Without it tests that
// need it are skipped.
type oracle struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
}

func startOracle(t *testing.T) *oracle {
	t.Helper()
	python := os.Getenv("INFERRAIL_TOKENIZERS_PYTHON")
	if python == "" {
		t.Skip("INFERRAIL_TOKENIZERS_PYTHON names no Python with the tokenizers package to compare with")
	}
	cmd := exec.CommandContext(t.Context(), python, "testdata/oracle.py")
	cmd.Env = append(os.Environ(), "TOKENIZERS_PARALLELISM=false")
	if testing.Verbose() {
		cmd.Stderr = os.Stderr // where the library panics it says so
	}
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
		cmd.Wait()
	})
	return &oracle{t: t, in: in, out: bufio.NewReaderSize(out, 1<<20)}
}

func (o *oracle) ask(question, answer any) {
	o.t.Helper()
	line, err := json.Marshal(question)
	if err != nil {
		o.t.Fatal(err)
	}
	if _, err := o.in.Write(append(line, '\n')); err != nil {
		o.t.Fatal(err)
	}
	got, err := o.out.ReadBytes('\n')
	if err != nil {
		o.t.Fatal(err)
	}
	if err := json.Unmarshal(got, answer); err != nil {
		o.t.Fatalf("the oracle answers %.500s", got)
	}
}

// agrees compares the ids of texts.
func (o *oracle) agrees(t *testing.T, tok *Tokenizer, texts []string, special bool) {
	t.Helper()
	bad := 0
	for chunk := range slices.Chunk(texts, 512) {
		var want [][]uint32
		o.ask(map[string]any{"texts": chunk, "special": special}, &want)
		for i, text := range chunk {
			got := tok.Append(nil, text, special)
			if want[i] == nil || slices.Equal(got, want[i]) {
				continue
			}
			if bad++; bad <= 5 {
				k := 0
				for k < min(len(got), len(want[i])) && got[k] == want[i][k] {
					k++
				}
				t.Errorf("%.300q: at token %d of %d: got %v, want %v", text, k, len(want[i]), got[k:min(k+6, len(got))], want[i][k:min(k+6, len(want[i]))])
			}
		}
	}
	if bad > 0 {
		t.Errorf("%d of %d texts have other ids", bad, len(texts))
	}
}

// modelPath is where a model's tokenizer.json is.
func modelPath(t *testing.T, model string) string {
	t.Helper()
	dir, err := packages(t.Context())
	if err != nil {
		t.Skipf("the tokenizers of real models cannot be had: %v", err)
	}
	return filepath.Join(packagePath(dir, model), "models/tokenizer.json")
}

// randomTexts draws texts in which what matters to tokenizers is frequent.
func randomTexts(r *rand.Rand, n int) []string {
	pools := [][]rune{
		[]rune("abcXYZ éÉß"), []rune("0123456789 ٣४Ⅷ½"), []rune(" \t\n\r\u00a0\u3000\u2028\x0b\x0c\u0085\u200b"), []rune("  \n\n\t"),
		[]rune("'s'tT'reRE'veVE'mM'llLL'dD'ſ"), []rune("!?.,;:/\\|-_()[]{}<>#@&*+=~`\"'$%^"), []rune("▁▁_ "),
		[]rune("你好世界こんにちは안녕हिन्दीไทย・゠゙"), []rune("\u0301\u0308\u0327\u093f\u0e31\ufe0f\u200d\u0316\u0345"), []rune("😀👩‍👧🇫🇷🤷🏽‍♀️"),
		[]rune("ǅǈʰˠªºłΣσςİıſK"), []rune("e\u0301\u1100\u1161\u11a8\u212b\u2126가각"), []rune("\x00\x01\x1f\x7f\u00ad\ufeff\ufffd\U000e0001"),
	}
	words := []string{"<|im_start|>", "<|im_end|>", "<|eot_id|>", "<think>", "</think>", "<|im_start", "<|endoftext|><|endoftext|>", "<|start|>", "<tool_call>",
		"<s>", "</s>", "<bos>", "<start_of_turn>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<0x0A>", "<unused1>", "<table>", "[multimodal]", "don't", "WE'LL", "HTTPServer", "the quick brown fox", "\n\n", "    ", "return x\n\n\n", "▁▁▁"}
	texts := make([]string, n)
	for i := range texts {
		var b strings.Builder
		for range 1 + r.IntN(60) {
			if r.IntN(12) == 0 {
				b.WriteString(words[r.IntN(len(words))])
				continue
			}
			pool := pools[r.IntN(len(pools))]
			for range 1 + r.IntN(4) {
				b.WriteRune(pool[r.IntN(len(pool))])
			}
		}
		texts[i] = b.String()
	}
	return texts
}

// everyCodePoint is every code point in several places, 16 of them a text.
func everyCodePoint() (texts []string) {
	var b strings.Builder
	n := 0
	for c := rune(0); c < 0x110000; c++ {
		if c >= 0xd800 && c < 0xe000 {
			continue
		}
		fmt.Fprintf(&b, "a%cb %c%c 1%cA\n%c '%c|", c, c, c, c, c, c)
		if n++; n%16 == 0 {
			texts = append(texts, b.String())
			b.Reset()
		}
	}
	return append(texts, b.String())
}

// hardTexts are those that take long if anything does.
func hardTexts() (texts []string) {
	for _, n := range []int{63, 64, 65, 100, 1000, 20000} {
		texts = append(texts, strings.Repeat("a", n), strings.Repeat(" ", n), strings.Repeat("=", n), strings.Repeat("ab", n), strings.Repeat("\n", n),
			strings.Repeat("é", n), strings.Repeat("aA", n), strings.Repeat("0", n), strings.Repeat("你", n), strings.Repeat("😀", n), strings.Repeat(" \n", n), strings.Repeat("▁", n)+"x")
	}
	return texts
}

func TestModelsAgreeWithLibrary(t *testing.T) {
	o := startOracle(t)
	for _, model := range npmModels {
		t.Run(model, func(t *testing.T) {
			tok, err := loadJSON(tokenizerJSON(t, model), Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer tok.Close()
			t.Log(tok.Kind())
			o.ask(map[string]any{"load": modelPath(t, model)}, new([]int))
			r := rand.New(rand.NewPCG(1, 2))
			for _, special := range []bool{false, true} {
				o.agrees(t, tok, []string{"", " ", "\n", "a", "Hello, world!", " <s>", "▁"}, special)
				o.agrees(t, tok, randomTexts(r, 4000), special)
			}
			o.agrees(t, tok, hardTexts(), false)
			if !testing.Short() {
				o.agrees(t, tok, everyCodePoint(), false)
			}
		})
	}
}

// Every pipeline that is followed, with a small vocabulary.
func TestPipelinesAgreeWithLibrary(t *testing.T) {
	o := startOracle(t)
	for name, y := range toyPipelines() {
		t.Run(name, func(t *testing.T) {
			tok := y.load(t)
			o.ask(map[string]any{"json": y.json(t)}, new([]int))
			r := rand.New(rand.NewPCG(5, 6))
			o.agrees(t, tok, []string{"", " ", "\n", "a", "Hello, world!", " <s>", "▁", toyText}, true)
			o.agrees(t, tok, randomTexts(r, 2000), true)
			o.agrees(t, tok, hardTexts(), false)
			if !testing.Short() {
				o.agrees(t, tok, everyCodePoint(), false)
			}
		})
	}
}

// Added tokens with all flags, that overlap each other.
func TestAddedTokensAgreeWithLibrary(t *testing.T) {
	o := startOracle(t)
	r := rand.New(rand.NewPCG(7, 8))
	contents := []string{"<s>", "<s", "<s><s>", "ab", "abc", "bc", "b", " x", "  ", "\n", "\n\n", "é", "e\u0301", "▁", "▁▁", "\u212b", "the", "quick", "[A]", "<a b>", "1", "x ", ">"}
	parts := append([]string{" ", " ", "  ", "\t", "\n", "a", "_", "-", "é", "\u0301", "你", "A", "c", "y\u00a0", "\u200d"}, contents...)
	names := slices.Sorted(maps.Keys(toyPipelines()))
	for range 150 {
		name := names[r.IntN(len(names))]
		y := toyPipelines()[name]
		for range 1 + r.IntN(6) {
			c := contents[r.IntN(len(contents))]
			if slices.ContainsFunc(y.added, func(t fileToken) bool { return t.Content == c }) {
				continue
			}
			some := func() bool { return r.IntN(4) == 0 }
			y.added = append(y.added, fileToken{Content: c, SingleWord: some(), LStrip: some(), RStrip: some(), Normalized: some(), Special: some()})
		}
		tok, err := loadJSON([]byte(y.json(t)), Options{})
		if errors.Is(err, ErrUnrecognised) && strings.Contains(err.Error(), "once they are normalized") {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		o.ask(map[string]any{"json": y.json(t)}, new([]int))
		texts := make([]string, 300)
		for i := range texts {
			for range 1 + r.IntN(14) {
				texts[i] += parts[r.IntN(len(parts))]
			}
		}
		o.agrees(t, tok, texts, true)
		if t.Failed() {
			t.Fatalf("%s with %+v", name, y.added)
		}
	}
}

func TestNFCAgreesWithLibrary(t *testing.T) {
	o := startOracle(t)
	r := rand.New(rand.NewPCG(9, 10))
	// Code points that norm does something with are most of them.
	var special []rune
	for c := rune(0xc0); c < 0x30000; c++ {
		if (c < 0xd800 || c >= 0xe000) && (isNew(c) || norm.NFC.String(string(c)) != string(c)) {
			special = append(special, c)
		}
	}
	texts := make([]string, 60_000)
	for i := range texts {
		var b strings.Builder
		for range 1 + r.IntN(6) {
			switch r.IntN(4) {
			case 0:
				b.WriteRune(rune("aeE\u00e9\u1100\uac00A\u0301\u0316"[0]))
			case 1:
				b.WriteRune([]rune("e\u0301\u0316\u0345\u1161\u11a8\uac00\u05d0")[r.IntN(8)])
			default:
				b.WriteRune(special[r.IntN(len(special))])
			}
		}
		texts[i] = b.String()
	}
	for c := range special {
		texts = append(texts, string(special[c]), "e"+string(special[c])+"\u0301", "e\u0345"+string(special[c])+"\u0316")
	}
	bad := 0
	for chunk := range slices.Chunk(texts, 2000) {
		var want []string
		o.ask(map[string]any{"nfc": chunk}, &want)
		for i, text := range chunk {
			if got := nfc(text); got != want[i] {
				if bad++; bad < 8 {
					t.Errorf("%+q: got %+q, want %+q", text, got, want[i])
				}
			}
		}
	}
	if bad > 0 {
		t.Errorf("%d of %d texts differ", bad, len(texts))
	}
}
