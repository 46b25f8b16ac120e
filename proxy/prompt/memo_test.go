package prompt

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// scanned returns the outline of a body.
func scanned(t testing.TB, kind Kind, body string) *outline {
	t.Helper()
	o := &outline{}
	if reason := o.scan(kind, []byte(body)); reason != Exact {
		t.Fatalf("%.80s: %v", body, reason)
	}
	return o
}

// follow does what Model.Follow does around a memo: recall, else ids, noted.
func follow(m *memo, o *outline, day time.Time, ids []uint32, ends []int) (p *Prompt, known bool) {
	p = &Prompt{}
	if m.recall(p, o, day) {
		return p, true
	}
	p.IDs, p.Ends = append(p.IDs, ids...), append(p.Ends, ends...)
	m.note(p, o)
	return p, false
}

// TestMemoStories: what is the same prompt, and what is another.
func TestMemoStories(t *testing.T) {
	monday := time.Date(2026, 7, 6, 1, 0, 0, 0, time.UTC)
	type request struct {
		kind Kind
		body string
		day  time.Time
	}
	chat := request{Chat, `{"messages":[{"role":"user","content":"hi"}],"tools":[]}`, time.Time{}}
	f := func(other request, want bool) {
		t.Helper()
		m := newMemo(tokenizer.NewCache(1 << 20))
		o := scanned(t, chat.kind, chat.body)
		for turn := range 3 {
			if _, known := follow(m, o, chat.day, []uint32{1, 2, 3}, []int{3}); known != (turn == 2) {
				t.Fatalf("turn %d: known %v", turn, known)
			}
		}
		p, known := follow(m, scanned(t, other.kind, other.body), other.day, nil, nil)
		if known != want {
			t.Errorf("%v %s: known %v, want %v", other.kind, other.body, known, want)
		}
		if known && (!slices.Equal(p.IDs, []uint32{1, 2, 3}) || !slices.Equal(p.Ends, []int{3})) {
			t.Errorf("got %v, %v", p.IDs, p.Ends)
		}
	}
	f(chat, true)
	// Members that do not bear on the prompt, others in another order, salts.
	f(request{Chat, `{"model":"m","stream":true,"tools":[],"messages":[{"role":"user","content":"hi"}],"n":2}`, time.Time{}}, true)
	f(request{Chat, `{"cache_salt":"mine","messages":[{"role":"user","content":"hi"}],"tools":[]}`, time.Time{}}, true)
	f(request{Chat, `{"messages":[{"role":"user","content":"ho"}],"tools":[]}`, time.Time{}}, false)
	f(request{Chat, `{"messages":[{"role":"user","content":"hi"}]}`, time.Time{}}, false)
	f(request{Chat, `{"messages":[{"role":"user","content":"hi"}],"documents":[]}`, time.Time{}}, false)
	f(request{Chat, `{"messages":[],"tools":[{"role":"user","content":"hi"}]}`, time.Time{}}, false)
	f(request{Chat, `{"messages":[{"role":"user","content":"hi"}],"tools":[],"add_generation_prompt":false}`, time.Time{}}, false)
	f(request{Tokenize, chat.body, time.Time{}}, false)
	f(request{Chat, chat.body, monday}, false)

	chat.day = monday
	f(request{Chat, chat.body, monday.Add(22 * time.Hour)}, true)
	f(request{Chat, chat.body, monday.Add(24 * time.Hour)}, false)
	f(request{Chat, chat.body, time.Time{}}, false)
}

// TestMemoOfModels: two models with one cache know nothing of each other, and
// without a cache nothing is known.
func TestMemoOfModels(t *testing.T) {
	cache := tokenizer.NewCache(1 << 20)
	a, b := newMemo(cache), newMemo(cache)
	o := scanned(t, Completion, `{"prompt":["a","b"]}`)
	for range 2 {
		follow(a, o, time.Time{}, []uint32{1, 2}, []int{1, 2})
	}
	if p, known := follow(a, o, time.Time{}, nil, nil); !known || !slices.Equal(p.IDs, []uint32{1, 2}) || !slices.Equal(p.Ends, []int{1, 2}) {
		t.Errorf("got %+v, %v", p, known)
	}
	if _, known := follow(b, o, time.Time{}, nil, nil); known {
		t.Error("another model's ids")
	}
	none := newMemo(nil)
	for range 3 {
		if _, known := follow(none, o, time.Time{}, nil, nil); known {
			t.Error("known without a cache")
		}
	}
	huge := scanned(t, Completion, `{"prompt":"`+strings.Repeat("x", memoBytes)+`"}`)
	for range 3 {
		if _, known := follow(a, huge, time.Time{}, nil, nil); known {
			t.Error("too large to be looked up, but known")
		}
	}
}

// TestMemoAgainstModel: a random history beside a map that forgets nothing.
func TestMemoAgainstModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	m := newMemo(tokenizer.NewCache(200_000))
	type known struct {
		ids  []uint32
		ends []int
	}
	model := map[string]known{}
	hits := 0
	for range 20_000 {
		n := int(float64(r.IntN(400)) * r.Float64())
		body := fmt.Sprintf(`{"prompt":"%d%s"}`, n, strings.Repeat("x", n*n%2000))
		k, ok := model[body]
		if !ok {
			for range r.IntN(4) {
				for range r.IntN(50) {
					k.ids = append(k.ids, r.Uint32())
				}
				k.ends = append(k.ends, len(k.ids))
			}
			model[body] = k
		}
		p, known := follow(m, scanned(t, Completion, body), time.Time{}, k.ids, k.ends)
		if !slices.Equal(p.IDs, k.ids) || !slices.Equal(p.Ends, k.ends) {
			t.Fatalf("%.40s: got %v, %v, want %+v", body, p.IDs, p.Ends, k)
		}
		if known {
			hits++
		}
	}
	if hits < 1000 {
		t.Errorf("only %d hits", hits)
	}
}

// TestMemoChangesNothing: a model that remembers makes the same of each of the
// requests that vLLM was asked about, however often they come.
func TestMemoChangesNothing(t *testing.T) {
	load := func(cache *tokenizer.Cache) *Model {
		m, err := Load(Source{Tokenizer: "builtin:sim", Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	plain, remembers := load(nil), load(tokenizer.NewCache(1<<20))
	defer plain.Close()
	defer remembers.Close()
	exact := 0
	datadriven.Walk(t, "testdata/bodies", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			for _, kind := range []Kind{Chat, Completion, Tokenize, Other} {
				var want Prompt
				plain.Follow(&want, kind, []byte(d.Input), time.Time{})
				for turn := range 3 {
					var got Prompt
					if remembers.recall(&got, kind, []byte(d.Input), time.Time{}) {
						exact++
						if got.Reason != Exact || want.Reason != Exact || !slices.Equal(got.IDs, want.IDs) {
							t.Errorf("turn %d of %s: recalled %+v, want %+v", turn, d.Input, got, want)
						}
					}
					remembers.Follow(&got, kind, []byte(d.Input), time.Time{})
					if got.Reason != want.Reason || !slices.Equal(got.IDs, want.IDs) || !slices.Equal(got.Ends, want.Ends) ||
						string(got.Text) != string(want.Text) || !slices.Equal(got.TextEnds, want.TextEnds) || string(got.Salt) != string(want.Salt) {
						t.Errorf("turn %d of %s: got %+v, want %+v", turn, d.Input, got, want)
					}
				}
			}
			return d.Expected
		})
	})
	if exact < 50 {
		t.Errorf("only %d were recalled", exact)
	}
	remembers.Demote("a test")
	var p Prompt
	body := []byte(`{"prompt":"hi"}`)
	for range 3 {
		plain.Follow(&p, Completion, body, time.Time{})
		remembers.Follow(&p, Completion, body, time.Time{})
		if p.Reason != Demoted || remembers.recall(&p, Completion, body, time.Time{}) {
			t.Fatalf("a demoted model recalls %+v", p)
		}
	}
}

// chatBody returns a chat of about so many bytes.
func chatBody(size int) string {
	var b strings.Builder
	b.WriteString(`{"model":"m","messages":[`)
	for i := 0; b.Len() < size; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"role":"user","content":"%s"}`, strings.Repeat(fmt.Sprint("word", i, " "), size/24/8))
	}
	b.WriteString(`],"stream":true}`)
	return b.String()
}

// TestMemoHitAllocatesNothing: from the body that a client sends to the ids.
func TestMemoHitAllocatesNothing(t *testing.T) {
	withoutRace(t)
	m, err := Load(Source{Tokenizer: "builtin:sim", Cache: tokenizer.NewCache(4 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for kind, body := range map[Kind]string{
		Chat: strings.TrimSuffix(chatBody(32<<10), "}") + `,"temperature":0.7,"max_tokens":256,"stream_options":{"include_usage":true},` +
			`"top_p":1.0,"stop":null,"user":"\u0041","cache_salt":"mine","tools":[{"type":"function","function":{"name":"f"}}]}`,
		Completion: `{"prompt":"` + strings.Repeat("many words ", 1000) + `","echo":false,"seed":-1}`,
		Tokenize:   `{"messages":[{"role":"user","content":"hi"}]}`,
	} {
		var p Prompt
		request := []byte(body)
		now := time.Now()
		for range 3 {
			m.Follow(&p, kind, request, now)
		}
		want := len(p.IDs)
		n := testing.AllocsPerRun(100, func() {
			if m.Follow(&p, kind, request, now); p.Reason != Exact || len(p.IDs) != want {
				t.Fatalf("kind %d: %v, %d ids", kind, p.Reason, len(p.IDs))
			}
		})
		if n != 0 {
			t.Errorf("kind %d: %v allocations", kind, n)
		}
	}
}

// BenchmarkMemoHit reads a chat of 8,000 tokens and 32 KiB that was seen
// before, from its bytes to its ids.
func BenchmarkMemoHit(b *testing.B) {
	m := newMemo(tokenizer.NewCache(256 << 20))
	body := chatBody(32 << 10)
	for range 2 {
		follow(m, scanned(b, Chat, body), time.Time{}, make([]uint32, 8000), []int{8000})
	}
	var p Prompt
	bytes := []byte(body)
	b.ReportAllocs()
	for b.Loop() {
		var o outline
		p.reset()
		if o.scan(Chat, bytes) != Exact || !m.recall(&p, &o, time.Time{}) {
			b.Fatal("not known")
		}
	}
}

// FuzzPlain: what is taken for a number or a string without being decoded is
// one, with the value that decoding gives.
func FuzzPlain(f *testing.F) {
	for _, raw := range []string{"0", "-0.5", "01", "-", "1.", ".5", "12e3", `"salt"`, `"s\u0041"`, `""`, "\"\x00\"", `"a"b"`, "99999999999999999999"} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		d := decoder{text: string(raw)}
		v, ok := d.decode()
		if plainNumber(raw) && (!ok || !v.IsInt() && !v.IsFloat() && !v.IsCallable()) {
			t.Errorf("%q is no number", raw)
		}
		if plainString(raw) && (!ok || !v.IsString() || v.AsString() != string(raw[1:len(raw)-1])) {
			t.Errorf("%q is no string that stands for itself", raw)
		}
	})
}
