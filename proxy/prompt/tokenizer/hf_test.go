//go:build hftokenizers

package tokenizer

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"
)

func loadedLibrary(t testing.TB, data []byte) *Tokenizer {
	t.Helper()
	p, err := loadLibrary(data)
	if err != nil {
		t.Fatal(err)
	}
	return &Tokenizer{pipeline: p}
}

// The library as this package uses it gives the ids that Python gives, NULs
// included.
func TestLibraryGolden(t *testing.T) {
	load := func(t *testing.T, data []byte) *Tokenizer { return loadedLibrary(t, data) }
	eachGolden(t, load, func(t *testing.T, k *Tokenizer, text string, special bool, want []uint32) {
		wantIDs(t, "library", k.Append(nil, text, special), want, text)
	})
}

// smallJSON is a tokenizer.json with parts of it replaced: characters a to c, the
// escapes and an added token, each an id.
func smallJSON(replace ...string) []byte {
	return []byte(strings.NewReplacer(replace...).Replace(`{
		"version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
		"padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
		"added_tokens": [{"id": 99, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
		"normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
		"model": {"type": "BPE", "unk_token": null, "vocab": {"a": 0, "b": 1, "c": 2, "\u0001": 3, "` + libraryEscape + `": 4, "` + libraryMark + `": 5, "�": 6}, "merges": []}
	}`))
}

func TestLibraryText(t *testing.T) {
	k := loadedLibrary(t, smallJSON())
	defer k.Close()
	f := func(text string, want ...uint32) {
		t.Helper()
		wantIDs(t, "small", k.Append(nil, text, false), want, text)
	}
	f("")
	f("abcabc", 0, 1, 2, 0, 1, 2) // neither truncated nor padded
	f("a<x>b", 0, 7, 1)           // what the file says of its id is not used
	f("x")                        // in no vocabulary, without unk_token: no ids
	f("a\x00b\x00", 0, 1)         // NUL neither, but what follows it is there
	f("\x00<x>\x00", 7)
	f("a"+libraryEscape+"b", 0, 4, 1)
	f(libraryMark+libraryEscape+libraryEscape+libraryMark, 5, 4, 4, 5)
	f("\x00"+libraryEscape+"\x00"+libraryMark+"\x00\x00", 4, 5)
	f("a\xffb\xe4\xbd", 0, 6, 1, 6)
	f("\xed\xa0\x80", 6, 6, 6)
	if id, ok := k.Token("<x>"); !ok || id != 7 {
		t.Errorf("<x> is %d, %v", id, ok)
	}
	if id, ok := k.Token("b"); !ok || id != 1 {
		t.Errorf("b is %d, %v", id, ok)
	}
	if id, ok := k.Token("d"); ok {
		t.Errorf("d is %d", id)
	}
}

func TestLibraryRefuses(t *testing.T) {
	f := func(data []byte, want string) {
		t.Helper()
		p, err := loadLibrary(data)
		if err == nil {
			p.close()
			t.Errorf("loaded, want an error with %q", want)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	f(nil, "unexpected end of JSON")
	f([]byte("[]"), "tokenizer.json")
	f([]byte("{}"), "no model")
	f(smallJSON(`"post_processor": null`, `"post_processor": {"type": "\u0000"}`), "NUL")
	f(smallJSON(`"post_processor": null`, `"post_processor": {"type": "Nothing"}`), "tokenizers library")
	f(smallJSON(`"content": "<x>"`, `"content": "<`+libraryEscape+`>"`), "stands for another")
	f(smallJSON(`"unk_token": null`, `"unk_token": "<unk>"`), "not in the vocabulary")
	f(smallJSON(`"unk_token": null`, `"unk_token": null, "dropout": 0.1`), "random")
	f(smallJSON(`"BPE"`, `"WordLevel"`), "without unk_token")
	f(smallJSON(`"type": "BPE", "unk_token": null, "vocab": {`, `"type": "Unigram", "unk_id": null, "vocab": [["a", -1.5]], "x": {`), "unk_id")
	f(smallJSON(`"vocab": {`, `"vocab": 7, "x": {`), "vocab")
}

// Many goroutines use one at a time, and what it holds is freed with it.
func TestLibraryGoroutines(t *testing.T) {
	for range 20 {
		k := loadedLibrary(t, smallJSON())
		var done sync.WaitGroup
		for g := range 8 {
			done.Go(func() {
				text := strings.Repeat("abc\x00", 100+g)
				for range 20 {
					if ids := k.Append(nil, text, true); len(ids) != 3*(100+g) {
						t.Errorf("%d ids", len(ids))
					}
				}
			})
		}
		done.Wait()
		k.Close()
	}
}

// libraryPools are what random texts are put together from.
var libraryPools = []string{
	"abcXYZ éÉß", "0123456789 ٣४Ⅷ½", " \t\n\r\u00a0\u3000\u2028\x0b\x0c\x85\u200b", "'sS'tT'reRE'veVE'mM'llLL'dD'ſ",
	"!?.,;:/\\|-_()[]{}<>#@&*+=~`\"'$%^", "你好世界こんにちは안녕हिन्दीไทย", "\u0301\u0308\u0327\u093f\u0e31\ufe0f\u200d",
	"😀👩\u200d👩\u200d👧\u200d👦🇫🇷🤷🏽\u200d♀\ufe0f", "ǅǈʰˠªºłΣσςİıſK", "e\u0301\u1100\u1161\u11a8\u212b\u2126", "\x00\x01\x1f\x7f\u0080\ufeff\ufffd\U0010fffe\U0010ffff",
	"▁▁ ▁a", "<|>｜<<s/s>", "aaaaab", "\n\n  \n", "the of and ing tion ",
}

func libraryText(r *rand.Rand, added []string) string {
	var b strings.Builder
	for range 1 + r.IntN(40) {
		pool := []rune(libraryPools[r.IntN(len(libraryPools))])
		for range 1 + r.IntN(4) {
			b.WriteRune(pool[r.IntN(len(pool))])
		}
		if r.IntN(30) == 0 {
			token := added[r.IntN(len(added))]
			if r.IntN(4) == 0 {
				token = token[:r.IntN(len(token))]
			}
			b.WriteString(token)
		}
		if r.IntN(60) == 0 {
			b.WriteString(strings.Repeat(string(pool[0]), r.IntN(300)))
		}
	}
	return strings.ToValidUTF8(b.String(), "")
}

// enginePair is a model as this package follows it and as the library does.
type enginePair struct {
	native, library *Tokenizer
	added           []string
}

// enginePairs calls test with every model, as its file is and as transformers
// 4 and 5 change it where they do. The pair is closed afterwards.
func enginePairs(t testing.TB, test func(name string, load func(testing.TB) enginePair)) {
	for _, model := range npmModels {
		data := tokenizerJSON(t, model)
		var g golden
		readGolden(t, model, &g)
		files := map[string][]byte{model: data}
		for _, v := range g.Versions {
			if v.changes() > 0 {
				files[model+"/"+v.Transformers] = v.file(t, data)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(files)) {
			test(name, func(t testing.TB) enginePair {
				native, err := loadJSON(files[name], Options{Cache: NewCache(8 << 20)})
				if err != nil {
					t.Fatal(err)
				}
				p := enginePair{native: native, library: loadedLibrary(t, files[name])}
				for content := range p.library.pipeline.(*library).ids {
					if strings.HasPrefix(content, "<") && len(content) > 2 {
						p.added = append(p.added, content)
					}
				}
				slices.Sort(p.added)
				t.Cleanup(func() {
					p.native.Close()
					p.library.Close()
				})
				return p
			})
		}
	}
}

// compare encodes text in every way and reports whether the ids are the same.
func (p enginePair) compare(t testing.TB, text string) bool {
	for _, special := range []bool{false, true} {
		want := p.library.Append(nil, text, special)
		wantIDs(t, fmt.Sprintf("special %v", special), p.native.pipeline.appendIDs(nil, text, special, nil), want, text)
		wantIDs(t, fmt.Sprintf("special %v, cached", special), p.native.Append(nil, text, special), want, text)
	}
	return !t.Failed()
}

// Random texts, and every code point beside letters, spaces, digits and itself,
// have the ids that the library gives.
func TestNativeAgainstLibrary(t *testing.T) {
	enginePairs(t, func(name string, load func(testing.TB) enginePair) {
		t.Run(name, func(t *testing.T) {
			p := load(t)
			r := rand.New(rand.NewPCG(1, 2))
			for range 1200 {
				if !p.compare(t, libraryText(r, p.added)) {
					return
				}
			}
			// A conversation that grows is cut, and found in the cache again.
			var texts []string
			readGolden(t, "strings", &texts)
			for range 4 {
				grown := ""
				for len(grown) < 20_000 {
					grown += libraryText(r, p.added)
					if line := texts[r.IntN(len(texts))]; len(line) < 600 {
						grown += []string{"", " ", "\n", "\n\n", "\r\n", "▁"}[r.IntN(6)] + line
					}
					want := p.library.Append(nil, grown, false)
					wantIDs(t, "growing, cached", p.native.Append(nil, grown, false), want, grown)
					if t.Failed() {
						return
					}
				}
				wantIDs(t, "grown", p.native.pipeline.appendIDs(nil, grown, true, nil), p.library.Append(nil, grown, true), grown)
			}
			if strings.Contains(name, "/") {
				return // what the versions change has nothing to do with classes of characters
			}
			var b strings.Builder
			for c := rune(0); c <= utf8.MaxRune; c++ {
				// Of large blocks that are of one class a few stand for all.
				if !utf8.ValidRune(c) || (c >= 0x20000 && c>>16 != 14 || c>>8 >= 0xE0 && c>>8 < 0xF9) && c%251 > 1 {
					continue
				}
				s := string(c)
				b.WriteString("a" + s + "b " + s + s + " 1" + s + "A\n" + s + " '" + s + "|")
				if b.Len() > 2000 || c == utf8.MaxRune {
					text := b.String()
					wantIDs(t, "code points", p.native.pipeline.appendIDs(nil, text, false, nil), p.library.Append(nil, text, false), text)
					b.Reset()
				}
				if t.Failed() {
					return
				}
			}
		})
	})
}

func FuzzNativeAgainstLibrary(f *testing.F) {
	var texts []string
	readGolden(f, "strings", &texts)
	for _, text := range texts {
		f.Add(text)
	}
	pairs := map[string]enginePair{}
	enginePairs(f, func(name string, load func(testing.TB) enginePair) { pairs[name] = load(f) })
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) {
			t.Skip("requests with such a text are refused")
		}
		for name, p := range pairs {
			if !p.compare(t, text) {
				t.Errorf("so by %s", name)
			}
		}
	})
}
