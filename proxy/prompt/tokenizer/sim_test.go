package tokenizer

import (
	"hash/fnv"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// simTokens returns the texts of the tokens.
func simTokens(text string) (list []string) {
	for text != "" {
		n, _ := NextSim(text)
		list = append(list, text[:n])
		text = text[n:]
	}
	return list
}

func TestSimTokens(t *testing.T) {
	f := func(text string, want ...string) {
		t.Helper()
		if got := simTokens(text); !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
		var ids []uint32
		for _, token := range want {
			h := fnv.New64a()
			_, _ = h.Write([]byte(token))
			ids = append(ids, uint32(h.Sum64()%SimVocabulary))
		}
		for _, special := range []bool{false, true} {
			if got := Sim().Append([]uint32{1}, text, special); !slices.Equal(got[1:], ids) {
				t.Errorf("%q: got %v, want %v", text, got[1:], ids)
			}
		}
	}
	f("")
	f("a", "a")
	f("hello world", "hello ", "world")
	f("internationalisation", "intern", "ationa", "lisati", "on")
	f("one,two", "one,", "two")
	f("\n\n", "\n", "\n")
	f("<|user|>\n", "<", "|", "user|", ">", "\n")
	f("größer", "größer")
	f("日本語の文字列です", "日本語の文字", "列です")
	f("a\xff\xfeb c", "a\xff\xfeb ", "c")
	f("\x00a", "\x00", "a")
}

func TestSimToken(t *testing.T) {
	s := Sim()
	defer s.Close()
	if id, ok := s.Token("hello "); !ok || !slices.Equal(s.Append(nil, "hello ", false), []uint32{id}) {
		t.Errorf("got %d, %v", id, ok)
	}
	for _, text := range []string{"", "two words", "toolong"} {
		if _, ok := s.Token(text); ok {
			t.Errorf("%q is one token", text)
		}
	}
}

// FuzzSim: tokens are the text, and appending leaves all tokens but the last
// as they are.
func FuzzSim(f *testing.F) {
	f.Add("the quick, brown", " fox")
	f.Add("größe", "日本\xff")
	f.Add("", "x")
	f.Fuzz(func(t *testing.T, left, right string) {
		whole := simTokens(left + right)
		if strings.Join(whole, "") != left+right {
			t.Fatalf("%q became %q", left+right, whole)
		}
		if n := len(Sim().Append(nil, left+right, false)); n != len(whole) {
			t.Fatalf("%q has %d tokens and %d ids", left+right, len(whole), n)
		}
		// A boundary in the middle of a rune is not one of the text's.
		if !utf8.ValidString(left) {
			return
		}
		part := simTokens(left)
		if n := len(part) - 1; n > 0 && !slices.Equal(part[:n], whole[:n]) {
			t.Fatalf("%q: %q, followed by %q: %q", left, part, right, whole)
		}
	})
}
