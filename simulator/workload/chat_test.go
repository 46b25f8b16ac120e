package workload

import "testing"

// What the template puts around parts, as doc.go and others count on it. That it is the
// simulated model's is tested there.
func TestOverhead(t *testing.T) {
	f := func(want int, parts ...Part) {
		t.Helper()
		r := Request{Parts: parts}
		sum := 0
		for _, p := range parts {
			sum += p.Tokens
		}
		if got := r.Input() - sum; got != want {
			t.Errorf("%v: %d tokens beside the parts' own, want %d", parts, got, want)
		}
		if n := len(r.AppendPrompt(nil)); n != r.Input() {
			t.Errorf("%v: %d tokens, said to be %d", parts, n, r.Input())
		}
	}
	part := func(tokens int, role string) Part { return Part{uint64(tokens) + 7, tokens, role} }
	f(0, part(512, ""), part(1, ""))
	f(6+6, part(10, "user"))
	f(6+7, part(10, "system"))
	f(6+7+6, part(10, "system"), part(1, "user"))
	f(6+6+7+6, part(10, "user"), part(5, "assistant"), part(10, "user"))
	f(6+6+7+2*14+2*6, part(10, "user"), part(5, "assistant"), part(10, "tool"), part(11, "tool"))
	f(6+6+5+83, part(1, "tools"), part(1, "user"))
	f(6+6+5+83, part(100, "tools"), part(1, "user"))
	f(6+6+5+2*83, part(101, "tools"), part(1, "user"))
}

func TestToolNames(t *testing.T) {
	seen := map[string]bool{}
	for k := range 4096 {
		if n := toolName(k); seen[n] {
			t.Errorf("two tools are called %s", n)
		} else {
			seen[n] = true
		}
	}
}

func TestWords(t *testing.T) {
	seen := map[string]bool{}
	for _, w := range words {
		if n := nextToken(w.text + "x"); n != len(w.text) || seen[w.text] || countTokens(w.text) != 1 {
			t.Errorf("%q is no word", w.text)
		}
		seen[w.text] = true
	}
	// Two parts have as few words in common at the same place as chance has it.
	same := 0
	for k := range 100_000 {
		a, _ := Word(1, k)
		if b, _ := Word(2, k); a == b {
			same++
		}
	}
	if same < 8 || same > 50 { // 24 are expected
		t.Errorf("%d of 100,000 words are the same", same)
	}
}

// Two prompts have those tokens in common that their leading equal parts have, and
// hardly more: what stands before the next part, which is most where it is a list of
// tools, and a word by chance.
func TestPromptsShareParts(t *testing.T) {
	for _, name := range Names() {
		w := generated(t, Options{Name: name, Seed: 9, Requests: 60, Rate: 20})
		prompts := make([][]uint32, len(w.Requests))
		for i := range w.Requests {
			prompts[i] = w.Requests[i].AppendPrompt(nil)
		}
		for i := range w.Requests {
			for k := range i {
				a, b := &w.Requests[i], &w.Requests[k]
				n := 0
				for n < min(len(a.Parts), len(b.Parts)) && a.Parts[n] == b.Parts[n] {
					n++
				}
				// A last part that one goes on behind may be followed by calls in one alone.
				shared, calls := 0, 0
				for p := range n {
					calls = a.calls(p) + b.calls(p)
					shared += a.Parts[p].Tokens + a.overhead(p) - a.calls(p)*callCount
					if p < n-1 {
						shared += a.calls(p) * callCount
					}
				}
				common := 0
				for common < min(len(prompts[i]), len(prompts[k])) && prompts[i][common] == prompts[k][common] {
					common++
				}
				if common < shared || common > shared+calls*callCount+len(toolsTokens)+toolBeforeCount+2 {
					t.Fatalf("%s: requests %d and %d share %d parts of %d tokens, and %d tokens are the same", name, k, i, n, shared, common)
				}
			}
		}
	}
}
