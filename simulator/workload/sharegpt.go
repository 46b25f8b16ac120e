package workload

import (
	"bufio"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"io"
	"math/rand/v2"
	"time"
	"unicode/utf8"
)

// shareGPT is a conversation as ShareGPT's collections have it.
type shareGPT struct {
	Conversations []struct {
		From  string `json:"from"`
		Value string `json:"value"`
	} `json:"conversations"`
}

// roles are what those who speak in such conversations are in a chat.
var roles = map[string]string{
	"human": "user", "user": "user",
	"gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "assistant": "assistant",
	"system": "system", "tool": "tool", "observation": "tool", "function": "tool",
}

// readShareGPT reads conversations: a JSON array of them, or one after the other. Each
// answer is a request, whose prompt is all that was said before. When they come is
// not known: conversations begin in a Poisson process, and go on as those of Generate
// do by default. Texts are as long as the simulated model has them, which is about
// what others do with English.
func (o ReadOptions) readShareGPT(r *bufio.Reader) (*Workload, error) {
	if o.Rate == 0 {
		o.Rate = 4
	}
	if !(o.Rate > 0 && o.Rate <= 1e6) {
		return nil, fmt.Errorf("the rate must be above 0 and at most a million requests a second, not %v", o.Rate)
	}
	dec := jsontext.NewDecoder(r, jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	array := dec.PeekKind() == '['
	if array {
		if _, err := dec.ReadToken(); err != nil {
			return nil, err
		}
	}
	w := &Workload{}
	sessions := 0
	for n := 1; ; n++ {
		switch kind := dec.PeekKind(); {
		case kind == ']' && array:
			if _, err := dec.ReadToken(); err != nil {
				return nil, err
			}
			array = false
			continue
		case kind == jsontext.KindInvalid:
			if _, err := dec.ReadToken(); err != io.EOF { // the decoder's own io.EOF is bare
				return nil, fmt.Errorf("conversation %d: %w", n, err)
			}
			o.scheduleSessions(w, sessions)
			return w, nil
		}
		var c shareGPT
		if err := json.UnmarshalDecode(dec, &c); err != nil {
			return nil, fmt.Errorf("conversation %d: %w", n, err)
		}
		before := len(w.Requests)
		if err := w.addConversation(&c, sessions+1); err != nil {
			return nil, fmt.Errorf("conversation %d: %w", n, err)
		}
		if len(w.Requests) > before {
			sessions++
		}
	}
}

func (w *Workload) addConversation(c *shareGPT, session int) error {
	var said []Part
	for _, m := range c.Conversations {
		role, ok := roles[m.From]
		if !ok {
			return fmt.Errorf("nobody known speaks as %q; known are human, gpt, system and tool", m.From)
		}
		p := Part{ID: textID(m.Value), Tokens: countTokens(m.Value), Role: role}
		if p.Tokens == 0 {
			continue
		}
		if p.Tokens > mostTokens {
			return fmt.Errorf("a text has %d tokens, and may have up to %d", p.Tokens, mostTokens)
		}
		if role == "assistant" && len(said) > 0 {
			w.Requests = append(w.Requests, Request{Session: session, Parts: said[:len(said):len(said)], Output: p.Tokens, Answer: p.ID})
		}
		said = append(said, p)
	}
	return nil
}

// textID is a number for a text.
func textID(text string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(text) {
		h = (h ^ uint64(text[i])) * 1099511628211
	}
	return mix(h)>>1 | 1
}

// countTokens returns how many tokens text has for the simulated model.
func countTokens(text string) (n int) {
	letters := 0
	for _, c := range text {
		if letters == 0 {
			n++
		}
		letters++
		word := c >= utf8.RuneSelf || c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z'
		if letters == longest || !word {
			letters = 0
		}
	}
	return n
}

// scheduleSessions gives requests their times, which are in order within each of the
// conversations.
func (o ReadOptions) scheduleSessions(w *Workload, sessions int) {
	var by Options
	by.complete(&Options{Think: 20 * time.Second})
	random := rand.New(rand.NewPCG(o.Seed, 0))
	every := float64(len(w.Requests)) / float64(max(sessions, 1)) / o.Rate
	wait := func(mean float64) time.Duration {
		return time.Duration(random.ExpFloat64() * mean * float64(time.Second))
	}
	var begin, at time.Duration
	for i := range w.Requests {
		r := &w.Requests[i]
		if i == 0 || r.Session != w.Requests[i-1].Session {
			begin = min(begin+wait(every), longestTime)
			at = begin
		}
		r.At = at
		at = min(at+time.Duration(r.Output)*by.PerToken+wait(by.Think.Seconds()), longestTime)
	}
}
