package tokenizer

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
)

// toy is a tokenizer.json small enough to be made by a test: a few hundred
// merges that are learnt from toyText.
type toy struct {
	sentence      bool // code points and ▁ in place of bytes
	normalizer    string
	preTokenizer  string
	postProcessor string
	ignoreMerges  bool
	across        bool // tokens lie across spaces and newlines: in a sentence's model only
	added         []fileToken
	merges        int
}

const toyText = `The quick brown fox jumps over the lazy dog. It doesn't care, and they've said: "WE'LL SEE"!
func main() {
	for i := 0; i < 1000; i++ {
		fmt.Println("hello, world", i, x[i][3], 3.14159)
	}
}

	return nil // TODO: 12345 + 67890 == 80235
你好世界，你好！ Привет, мир. Où êtes-vous ? 안녕하세요 🙂🙂 ▁▁ ----====____
<div class="a"><p>Some    spaces, some
   lines.</p></div>
` + "\t\t  \n\n\n      \nthe theory of the other\nThe there\n1 22 333 4444\n"

const (
	byteLevelOnly = `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}`
	metaspace     = `{"type":"Metaspace","replacement":"▁","prepend_scheme":"%s","split":false}`
	replaceSpaces = `{"type":"Replace","pattern":{"String":" "},"content":"▁"}`
	prependSpace  = `{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},` + replaceSpaces + `]}`
	composedForm  = `{"type":"NFC"}`
	template      = `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"</s>","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"<s>":{"id":"<s>","ids":[7],"tokens":["<s>"]},"</s>":{"id":"</s>","ids":[8,9],"tokens":["</s>","x"]}}}`
)

// split is a pre-tokenizer of a pattern and bytes.
func split(pattern string) string {
	quoted, _ := json.Marshal(pattern)
	return fmt.Sprintf(`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":%s},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]}`, quoted)
}

func splits(patterns ...string) string {
	var b strings.Builder
	for _, p := range patterns {
		quoted, _ := json.Marshal(p)
		fmt.Fprintf(&b, `{"type":"Split","pattern":{"Regex":%s},"behavior":"Isolated","invert":false},`, quoted)
	}
	return `{"type":"Sequence","pretokenizers":[` + b.String() + `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]}`
}

// toyPipelines are all kinds of pipelines that are followed.
func toyPipelines() map[string]toy {
	all := map[string]toy{
		"gpt2":          {preTokenizer: byteLevelOnly},
		"digits, gpt2":  {preTokenizer: `{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},` + byteLevelOnly + `]}`},
		"deepseek":      {preTokenizer: splits(deepseekSplits[:]...)},
		"gemma":         {sentence: true, normalizer: replaceSpaces, preTokenizer: `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`},
		"llama2":        {sentence: true, normalizer: prependSpace},
		"first":         {sentence: true, preTokenizer: fmt.Sprintf(metaspace, "first")},
		"always":        {sentence: true, preTokenizer: fmt.Sprintf(metaspace, "always")},
		"never":         {sentence: true, preTokenizer: fmt.Sprintf(metaspace, "never"), postProcessor: template},
		"across":        {sentence: true, normalizer: replaceSpaces, across: true},
		"composed gpt2": {preTokenizer: byteLevelOnly, normalizer: composedForm},
	}
	for pattern, p := range knownPatterns {
		all[p.String()] = toy{preTokenizer: split(pattern)}
		all[p.String()+", NFC, whole"] = toy{preTokenizer: split(pattern), normalizer: composedForm, ignoreMerges: true, postProcessor: template}
	}
	return all
}

// toys are those that have been made.
var toys sync.Map

func (y toy) json(t testing.TB) string {
	t.Helper()
	key := fmt.Sprintf("%+v", y)
	made, ok := toys.Load(key)
	if !ok {
		made = y.make(t)
		toys.Store(key, made)
	}
	return made.(string)
}

func (y toy) make(t testing.TB) string {
	t.Helper()
	alphabet := make([]string, 256)
	for r, b := range byteOfRune {
		if b > 0 {
			alphabet[b-1] = string(rune(r))
		}
	}
	var words [][]string
	vocab := map[string]int{}
	put := func(s string) {
		if _, ok := vocab[s]; !ok {
			vocab[s] = len(vocab)
		}
	}
	if y.sentence {
		for b := range 256 {
			put(fmt.Sprintf("<0x%02X>", b))
		}
		put("▁")
		var word []string
		last := '▁'
		for _, r := range strings.ReplaceAll(toyText, " ", "▁") {
			if !y.across && (r == '▁' && last != '▁' || last == '\n' && r != '\n') {
				words = append(words, word)
				word = nil
			}
			if r < 0x1f600 && r != '\t' { // others are bytes
				put(string(r))
			}
			word = append(word, string(r))
			last = r
		}
		words = append(words, word)
	} else {
		for _, letter := range alphabet {
			put(letter)
		}
		p := pieces{rule: casedWords, digits: 3}
		for i := 0; i < len(toyText); {
			end := p.end(toyText, i)
			var word []string
			for _, b := range []byte(toyText[i:end]) {
				word = append(word, alphabet[b])
			}
			words = append(words, word)
			i = end
		}
	}
	n := y.merges
	if n == 0 {
		n = 300
	}
	var merges [][2]string
	for range n {
		count := map[[2]string]int{}
		for _, w := range words {
			for i := 0; i+1 < len(w); i++ {
				_, ok := vocab[w[i]]
				_, ok2 := vocab[w[i+1]]
				if ok && ok2 {
					count[[2]string{w[i], w[i+1]}]++
				}
			}
		}
		var best [2]string
		for _, p := range slices.SortedFunc(maps.Keys(count), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
			if count[p] > count[best] {
				best = p
			}
		}
		if count[best] == 0 {
			break
		}
		merges = append(merges, best)
		put(best[0] + best[1])
		for k, w := range words {
			var merged []string
			for i := 0; i < len(w); i++ {
				if i+1 < len(w) && w[i] == best[0] && w[i+1] == best[1] {
					merged = append(merged, w[i]+w[i+1])
					i++
				} else {
					merged = append(merged, w[i])
				}
			}
			words[k] = merged
		}
	}
	raw := func(s string) json.RawMessage {
		if s == "" {
			return json.RawMessage("null")
		}
		return json.RawMessage(s)
	}
	added := slices.Clone(y.added)
	if added == nil {
		added = []fileToken{{Content: "<s>", Special: true}, {Content: "<|im_start|>", Special: true}, {Content: "<|im_end|>", Special: true}}
	}
	for i := range added {
		added[i].ID = uint32(len(vocab) + i)
	}
	text, err := json.Marshal(map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": added,
		"normalizer": raw(y.normalizer), "pre_tokenizer": raw(y.preTokenizer), "post_processor": raw(y.postProcessor), "decoder": nil,
		"model": map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": false, "byte_fallback": y.sentence, "ignore_merges": y.ignoreMerges, "vocab": vocab, "merges": merges},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func (y toy) load(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := loadJSON([]byte(y.json(t)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	return tok
}
