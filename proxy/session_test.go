package proxy

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/inferrail/inferrail/policy"
)

// keysTold is sticky, and notes what it is told.
type keysTold struct {
	*policy.Sticky
	mu   sync.Mutex // guards last
	last policy.Request
}

func (k *keysTold) Score(r *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	k.mu.Lock()
	k.last = *r
	k.mu.Unlock()
	return k.Sticky.Score(r, candidates, costs)
}

// Requests of one conversation have one key, and others another one. In each group
// all must be alike, and unlike all of the other groups.
func TestSessionKey(t *testing.T) {
	chat := func(messages string, members ...string) *exchange {
		body := []byte(`{"messages":[` + messages + `]` + strings.Join(append([]string{""}, members...), ",") + `}`)
		call, err := scanCall(body)
		if err != nil {
			t.Fatal(err)
		}
		return &exchange{model: &Model{Name: "m"}, body: body, call: call}
	}
	with := func(x *exchange, change func(x *exchange)) *exchange {
		change(x)
		return x
	}
	field := func(line string) func(x *exchange) {
		return func(x *exchange) { x.head.raw = []byte("Host: x\r\nX-Request-Id: 1\r\n" + line + "\r\n\r\n") }
	}
	const (
		system = `{"role":"system","content":"be brief"}`
		first  = `{"role":"user","content":"hello"}`
		answer = `{"role":"assistant","content":"hi"}`
		second = `{"role":"user","content":"more"}`
	)
	responses := func(text string) *exchange {
		body := []byte(`{"instructions":"x","input":[{"role":"user","content":"` + text + `"}]}`)
		call, err := scanCall(body)
		if err != nil {
			t.Fatal(err)
		}
		return &exchange{model: &Model{Name: "m"}, body: body, call: call}
	}
	groups := [][]*exchange{
		// How the conversation began.
		{chat(first), chat(first + "," + answer + "," + second), chat(first+","+answer, `"temperature":1`)},
		{chat(system + "," + first), chat(system + "," + first + "," + answer + ", " + second)},
		{chat(second), chat(second + "," + first)},
		{chat(first, `"system":"a"`), chat(first+","+answer, `"system":"a"`)},
		{chat(first, `"system":"b"`)},
		{chat(`{"content":[{"type":"text","text":"role"},{"role":"user"}],"role":"user"}`)},
		{with(chat(first), func(x *exchange) { x.model = &Model{Name: "other"} })},
		{responses("hello"), responses("hello")},
		{responses("bye")},
		// Keys in the body.
		{chat(first, `"prompt_cache_key":"k"`), chat(second, `"user":"u"`, `"prompt_cache_key":"k"`)},
		{chat(first, `"user":"u"`), chat(second, `"user":"u"`, `"safety_identifier":"s"`)},
		{chat(first, `"safety_identifier":"s"`), chat(second, `"safety_identifier":"s"`)},
		// The field goes first.
		{with(chat(first), field("X-Session-ID: a")), with(chat(second, `"prompt_cache_key":"k"`), field("x-session-id:  a "))},
		{with(chat(first), field("x-session-id: b"))},
		// Nothing but the prompt's beginning.
		{with(chat(answer), func(x *exchange) { x.asked.Prefix = 77 }), with(chat(""), func(x *exchange) { x.asked.Prefix = 77 })},
		{chat(answer), chat(""), chat("", `"user":""`, `"prompt_cache_key":7`)},
	}
	seen := map[uint64]string{}
	for i, group := range groups {
		want := group[0].sessionKey()
		for k, x := range group {
			if got := x.sessionKey(); got != want {
				t.Errorf("group %d, request %d: key %x, want %x of the first", i, k, got, want)
			}
		}
		if other := seen[want]; other != "" {
			t.Errorf("group %d has the key of %s", i, other)
		}
		seen[want] = fmt.Sprint("group ", i)
	}
	if groups[len(groups)-1][0].sessionKey() != 0 {
		t.Error("nothing is known, and there is a key")
	}
	x := with(chat(first), field("x-session-id: a"))
	x.model = &Model{Name: "m", SessionHeader: "X-Conversation"}
	if x.sessionKey() != groups[0][0].sessionKey() {
		t.Error("a field that is not configured counts")
	}
	field("x-conversation: a")(x)
	if x.sessionKey() == groups[0][0].sessionKey() {
		t.Error("the configured field does not count")
	}
}

// A conversation that goes on has tokens of its own, from its first message of a user on: in
// parts of the body, as there are. One that begins has none.
func TestOwnTokens(t *testing.T) {
	const (
		system = `{"role":"system","content":"be brief"},`
		user   = `{"role":"user","content":"hello"}`
		answer = `,{"role":"assistant","content":"hi"}`
	)
	f := func(body string, own string) {
		t.Helper()
		c, err := scanCall([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		x := &exchange{model: &Model{Name: "m"}, body: []byte(body), call: c}
		x.asked.Tokens = 10 * len(body)
		if got, want := x.ownTokens(), 10*len(own); got != want {
			t.Errorf("%s: %d, want %d", body, got, want)
		}
	}
	f(`{"messages":[`+system+user+answer+`,`+user+`]}`, user+answer+`,`+user+`]`)
	f(`{"tools":[{"type":"function"}],"messages":[`+user+answer+` ]}`, user+answer+` ]`)
	f(`{"messages":[`+system+user+` , {"content":null,"role":"assistant","tool_calls":[]},{"role":"tool","content":"1"}]}`,
		user+` , {"content":null,"role":"assistant","tool_calls":[]},{"role":"tool","content":"1"}]`)
	f(`{"instructions":"be brief","input":[`+user+`,{"type":"reasoning","content":[]}]}`, user+`,{"type":"reasoning","content":[]}]`)
	// It begins, or nothing tells that it goes on.
	f(`{"messages":[`+system+user+`]}`, "")
	f(`{"messages":[`+system+user+`,`+user+`]}`, "")
	f(`{"messages":[`+user+`,`+user+answer+`]}`, "")
	f(`{"messages":[{"role":"assistant","content":"hi"},`+user+`]}`, "")
	f(`{"messages":[`+user+`,7]}`, "")
	f(`{"messages":[]}`, "")
	f(`{"prompt":"hello"}`, "")
	f(`{"input":"hello"}`, "")
}

// A conversation that grows keeps its session, and from 1,024 tokens on its prefix;
// one with another system prompt has neither.
func TestPrefixKey(t *testing.T) {
	p, err := policy.New("sticky", nil)
	if err != nil {
		t.Fatal(err)
	}
	told := &keysTold{Sticky: p.(*policy.Sticky)}
	for _, known := range []string{"tokens", "text", "not looked up", "not looked up, text"} {
		t.Run(known, func(t *testing.T) {
			c := newCacher(t, nil, scripted(t))
			c.change(func(m *Model) {
				if m.Policy = told; strings.HasSuffix(known, "text") {
					m.Prompts = nil
				}
			})
			if strings.HasPrefix(known, "not") {
				c.s.SetIndex(nil, nil)
			}
			prefix := func(text string) uint64 {
				c.ask(completion(text))
				told.mu.Lock()
				defer told.mu.Unlock()
				if told.last.Tokens == 0 || told.last.Prefix == 0 {
					t.Errorf("%.20s...: %+v", text, told.last)
				}
				return told.last.Prefix
			}
			long := words(3000)
			if prefix(long) != prefix(long+"b c d") || prefix(long) != prefix(long+words(5000)) {
				t.Error("what grows gets another key")
			}
			if prefix(long) == prefix("b "+long) || prefix(long) == prefix(long[:200]+"b "+long) {
				t.Error("what begins otherwise has the same key")
			}
			short := prefix("a b")
			if short == prefix("a c") || short != prefix("a b") {
				t.Error("short prompts are not told apart")
			}
		})
	}
}

// BenchmarkOwnTokens is the same conversation.
func BenchmarkOwnTokens(b *testing.B) {
	x := longConversation(b)
	x.asked.Tokens = 1000
	b.ReportAllocs()
	for b.Loop() {
		x.ownTokens()
	}
}

// What no policy goes by is not computed.
func TestSessionIsLeftOut(t *testing.T) {
	sticky, err := policy.New("sticky", nil)
	if err != nil {
		t.Fatal(err)
	}
	f := func(m *Model, want bool) {
		t.Helper()
		if m.goesOn() {
			t.Error("no policy goes by what is a conversation's own")
		}
		if got := m.bySession(); got != want {
			t.Errorf("%v, want %v", got, want)
		}
	}
	f(&Model{}, false)
	f(&Model{Policy: policy.LeastRequest{}}, false)
	f(&Model{Policy: sticky}, true)
	f(&Model{Shadows: []*policy.Shadow{{Policy: policy.LeastRequest{}}, {Policy: sticky}}}, true)
	if !(&Model{Policy: policy.LeastRequest{}, Shadows: []*policy.Shadow{{Policy: policy.NewCostModel()}}}).goesOn() {
		t.Error("a policy beside goes by what is a conversation's own")
	}
}

// FuzzFirstOfUser: no body makes it fail, and what it finds is in the array.
func FuzzFirstOfUser(f *testing.F) {
	f.Add(`{"messages":[{"role":"system","content":"x"},{"role":"user","content":[{"text":"\"role\""}]}]}`)
	f.Add(`{"messages":[{}, {"role":"user"} ]}`)
	f.Add(`{"messages":[1,{"role":"user"}],"input":[[]]}`)
	f.Fuzz(func(t *testing.T, body string) {
		c, err := scanCall([]byte(body))
		if err != nil {
			return
		}
		start, end := firstOfUser([]byte(body), c.messages)
		if end != 0 && (start <= c.messages.start || start >= end || end >= c.messages.end || body[start] != '{' || body[end-1] != '}') {
			t.Errorf("%q: %d to %d in %+v", body, start, end, c.messages)
		}
		x := &exchange{model: &Model{Name: "m"}, body: []byte(body), call: c}
		x.asked.Tokens = 1000
		if own := x.ownTokens(); own < 0 || own >= 1000 || own > 0 && end == 0 {
			t.Errorf("%q: %d of 1,000 tokens are a conversation's own", body, own)
		}
	})
}

// BenchmarkSessionKey is a conversation of 20 messages with a system prompt of 2 KB.
func BenchmarkSessionKey(b *testing.B) {
	x := longConversation(b)
	b.ReportAllocs()
	for b.Loop() {
		x.sessionKey()
	}
}

func longConversation(b *testing.B) *exchange {
	body := []byte(`{"model":"m","messages":[{"role":"system","content":"` + strings.Repeat("be brief ", 220) + `"},{"role":"user","content":"hello"}` +
		strings.Repeat(`,{"role":"assistant","content":"hi"},{"role":"user","content":"more"}`, 10) + `]}`)
	call, err := scanCall(body)
	if err != nil {
		b.Fatal(err)
	}
	x := &exchange{model: &Model{Name: "m"}, body: body, call: call}
	x.head.raw = []byte("Host: x\r\nContent-Type: application/json\r\nAuthorization: Bearer x\r\nUser-Agent: y\r\n\r\n")
	return x
}
