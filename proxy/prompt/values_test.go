package prompt

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// randomJSON writes a random JSON value with all kinds of escapes in its
// strings, at all distances from each other.
func randomJSON(b *strings.Builder, r *rand.Rand, depth int) {
	switch kind := r.IntN(10); {
	case depth > 0 && kind < 2:
		b.WriteByte('[')
		for i := range r.IntN(5) {
			if i > 0 {
				b.WriteString(", ")
			}
			randomJSON(b, r, depth-1)
		}
		b.WriteByte(']')
	case depth > 0 && kind < 5:
		b.WriteByte('{')
		for i := range r.IntN(14) {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(b, `"%d`, i)
			randomString(b, r)
			b.WriteString(`":`)
			randomJSON(b, r, depth-1)
		}
		b.WriteByte('}')
	case kind < 6:
		b.WriteString([]string{"true", "false", "null", "12", "-1.5"}[r.IntN(5)])
	default:
		b.WriteByte('"')
		randomString(b, r)
		b.WriteByte('"')
	}
}

func randomString(b *strings.Builder, r *rand.Rand) {
	for range r.IntN(6) {
		switch r.IntN(4) {
		case 0:
			b.WriteString([]string{`\n`, `\"`, `\\`, `\/`, `\t`, `\b`, `\f`, `\r`, `\u0000`, `\u00e9`, `\u20ac`, `\ud83d\ude00`}[r.IntN(12)])
		case 1:
			b.WriteString([]string{"é", "€", "😀", "\u007f", "\u0080"}[r.IntN(5)])
		default:
			for range r.IntN(20) {
				c := byte(' ' + r.IntN(95))
				if c != '"' && c != '\\' {
					b.WriteByte(c)
				}
			}
		}
	}
}

// same reports how a value differs from what encoding/json has made of the same
// text, "" if it does not.
func same(v jinja.Value, want any) string {
	ok := false
	switch want := want.(type) {
	case nil:
		ok = v.IsNone()
	case bool:
		ok = v.IsBool() && v.AsBool() == want
	case string:
		ok = v.IsString() && v.AsString() == want
	case json.Number:
		ok = v.IsNumber() && v.String() == want.String()
	case []any:
		if ok = v.IsList() && v.AsList().Len() == len(want); ok {
			for i, item := range want {
				if wrong := same(v.AsList().Get(i), item); wrong != "" {
					return wrong
				}
			}
		}
	case map[string]any:
		if ok = v.IsDict() && v.AsDict().Len() == len(want) && len(v.AsDict().Data) == len(want); ok {
			for _, key := range v.AsDict().Keys {
				if wrong := same(v.AsDict().Data[key], want[key]); wrong != "" {
					return wrong
				}
			}
		}
	}
	if !ok {
		return fmt.Sprintf("%v, want %v", v, want)
	}
	return ""
}

// TestValuesAgainstEncodingJSON decodes random texts, several of them in the same
// memory, which is then released and used again.
func TestValuesAgainstEncodingJSON(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	var memory values
	for round := range 2000 {
		var texts []string
		var got []jinja.Value
		size := 0
		for range 1 + r.IntN(3) {
			var b strings.Builder
			randomJSON(&b, r, 4)
			texts = append(texts, b.String())
			size += b.Len()
		}
		if round%2 == 0 {
			memory.room(size + 8)
		}
		for i, text := range texts {
			d := decoder{text: text, memory: &memory}
			if i == 1 {
				d.memory = nil
			}
			v, ok := d.decode()
			if !ok || d.odd != Exact {
				t.Fatalf("not decoded: %q", text)
			}
			got = append(got, v)
			// What is wrong at its end leaves the memory in order.
			broken := decoder{text: text[:len(text)-1] + "\x01", memory: &memory}
			if _, ok := broken.decode(); ok {
				t.Fatalf("decoded: %q", broken.text)
			}
		}
		for i, text := range texts {
			d := json.NewDecoder(strings.NewReader(text))
			d.UseNumber()
			var want any
			if err := d.Decode(&want); err != nil {
				t.Fatal(err)
			}
			if wrong := same(got[i], want); wrong != "" {
				t.Fatalf("%q: %s", text, wrong)
			}
		}
		memory.release()
		for _, v := range memory.dicts {
			if v.AsDict().Len() > 0 || len(v.AsDict().Data) > 0 {
				t.Fatal("a dict that is free has members")
			}
		}
	}
	if n := memory.memory(); n == 0 || n > keptMemory {
		t.Errorf("%d bytes are kept", n)
	}
}

// TestUsedPromptIsAsGoodAsNew: random conversations that grow turn by turn, some
// of them cut off, through one Prompt and each through one of its own. What the
// used one holds is no memory of a body.
func TestUsedPromptIsAsGoodAsNew(t *testing.T) {
	models := setups(t)
	used := new(Prompt)
	followed := 0
	for seed := range uint64(40) {
		b := newBodies(seed)
		head := append(b.chatObject("m"), jsonField{"media_io_kwargs", object{}})
		if b.chance(20) {
			head = append(head, jsonField{"mm_processor_kwargs", object{{"size", []int{1}}}})
		}
		var messages []any
		for turn := range 6 {
			messages = append(messages, b.messages()...)
			o := object{{"messages", messages}}
			for _, f := range head {
				if f.name != "messages" {
					o = append(o, f)
				}
			}
			body := marshal(o)
			kind := Chat
			switch {
			case turn == 4 && b.chance(50):
				body = body[:len(body)-1-b.IntN(len(body)/2)]
			case b.chance(20):
				kind = Tokenize
			case b.chance(20):
				kind, body = Completion, b.completion("m")
			}
			for name, m := range models {
				var want Prompt
				m.Follow(&want, kind, body, epoch)
				its := slices.Clone(body)
				m.Follow(used, kind, its, epoch)
				for i := range its {
					its[i] = '#'
				}
				if used.Reason != want.Reason || !slices.Equal(used.IDs, want.IDs) || !slices.Equal(used.Ends, want.Ends) ||
					string(used.Text) != string(want.Text) || !slices.Equal(used.TextEnds, want.TextEnds) || string(used.Salt) != string(want.Salt) {
					t.Fatalf("%s of %s:\n got %v %q\nwant %v %q", body, name, used.Reason, used.Text, want.Reason, want.Text)
				}
				if v := &used.scratch.values; v.used > 0 || len(v.text) > 0 || len(v.items) > 0 {
					t.Fatalf("%s of %s: values are not released", body, name)
				}
				if len(want.Text) > 0 && want.Reason == NoTokenizer {
					followed++
				}
			}
		}
	}
	if followed < 500 {
		t.Errorf("only %d were rendered", followed)
	}
}

// TestGrowingChatAlloc bounds what a turn of a conversation leaves to the garbage
// collector: little beside the body and the text, which are not copied.
func TestGrowingChatAlloc(t *testing.T) {
	withoutRace(t)
	m, err := Load(Source{Tokenizer: simulated, Cache: tokenizer.NewCache(64 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var p Prompt
	m.Follow(&p, Chat, turns(62), epoch) // memory for all of them
	var before, after runtime.MemStats
	messages := 0
	var bodies [][]byte
	for n := 12; n <= 60; n += 2 {
		bodies = append(bodies, turns(n))
		messages += n
	}
	runtime.ReadMemStats(&before)
	for _, body := range bodies {
		if m.Follow(&p, Chat, body, epoch); p.Reason != Exact {
			t.Fatal(p.Reason)
		}
	}
	runtime.ReadMemStats(&after)
	if n := float64(after.Mallocs-before.Mallocs) / float64(messages); n > 22 {
		t.Errorf("%.1f allocations a message", n)
	}
	if n := float64(after.TotalAlloc-before.TotalAlloc) / float64(messages); n > 2000 {
		t.Errorf("%.0f bytes are allocated a message, which has 1,300", n)
	}
}

// FuzzString compares strings, valid or not, with encoding/json.
func FuzzString(f *testing.F) {
	f.Add(`plain`)
	f.Add(`\n\n1234567\"12345678\\`)
	f.Add("\\u00e9 \x1f")
	f.Add(`12345678901234567890\q`)
	f.Add(`\ud83d\ude00`)
	f.Fuzz(func(t *testing.T, s string) {
		if !utf8.ValidString(s) {
			return
		}
		text := `"` + s + `"`
		var want string
		valid := json.Unmarshal([]byte(text), &want) == nil
		d := decoder{text: text}
		v, ok := d.decode()
		if d.odd != Exact {
			return // half of a surrogate pair
		}
		if ok && !v.IsString() || ok != valid || ok && v.AsString() != want {
			t.Errorf("%q: %v, %v, want %q, %v", text, v, ok, want, valid)
		}
	})
}
