package simulator

import (
	"strconv"
	"sync"
	"time"

	follow "github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// prompt is what the model is asked to continue.
type prompt struct {
	tokens int
	// hash decides what the model says.
	hash uint64
	// text is the prompt, given are its token ids where they are not those of
	// text: the client has sent ids, or the text is the simulator's own view
	// of messages.
	text  string
	given []int
}

func textPrompt(text string) prompt {
	return prompt{tokens: countTokens(text), hash: hashText(text), text: text}
}

func idsPrompt(ids []int) prompt {
	var text []byte
	for _, id := range ids {
		text = append(strconv.AppendInt(text, int64(id), 10), ' ')
	}
	return prompt{tokens: len(ids), hash: hashText(string(text)), given: ids}
}

// ids returns the numbers of its tokens.
func (p *prompt) ids() []int {
	if p.given != nil {
		return p.given
	}
	return tokenIDs(p.text)
}

// tokenIDs returns a number for each of its tokens. Those of a recording are
// a function of the sound.
func (p *prompt) tokenIDs() []uint32 {
	out := make([]uint32, 0, p.tokens)
	for _, id := range p.ids() {
		out = append(out, uint32(id))
	}
	for k := len(out); k < p.tokens; k++ {
		out = append(out, uint32(mix(p.hash+uint64(k)*golden)))
	}
	return out
}

// model is that of every simulated engine, as the agent knows it. Load tests
// send the same prompts again and again, which costs little with a cache.
var model = sync.OnceValue(func() *follow.Model {
	m, err := follow.Load(follow.Source{Tokenizer: "builtin:sim", Cache: tokenizer.NewCache(16 << 20)})
	if err != nil {
		panic("BUG: the simulated model does not load: " + err.Error())
	}
	return m
})

// chatPrompt returns the prompt of a request with messages. Its tokens are
// those that the agent expects, found by the agent's own code, for whatever
// that can follow; text, the simulator's view of the same messages, decides
// what the model says and has the tokens of all other requests.
func chatPrompt(kind follow.Kind, body []byte, text string) prompt {
	p := textPrompt(text)
	var followed follow.Prompt
	// The template does not ask for the time.
	model().Follow(&followed, kind, body, time.Time{})
	if followed.Reason == follow.Exact {
		p.tokens, p.given = len(followed.IDs), make([]int, 0, len(followed.IDs))
		for _, id := range followed.IDs {
			p.given = append(p.given, int(id))
		}
	}
	return p
}

// opening is what the template ends with, for the model to go on from.
const opening = "<|assistant|>\n"

// distort makes the prompt one of other tokens, as Faults.Tokenizer says.
func (p *prompt) distort(how string) {
	ids := p.ids()
	switch how {
	case "token":
		ids = append(ids[:len(ids):len(ids)], tokenID("\n"))
	case "template":
		if end := tokenIDs(opening); len(ids) > len(end) {
			ids = ids[:len(ids)-len(end)]
		}
	default:
		return
	}
	p.given, p.tokens = ids, len(ids)
}
