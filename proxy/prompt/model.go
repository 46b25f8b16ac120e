package prompt

import (
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// Source says where a model's files are and how its engines were started. The
// zero value is a model without a tokenizer: its prompts are approximate.
type Source struct {
	// Tokenizer is a model's directory, a name org/name[@revision] in the
	// Hugging Face cache, or builtin:sim. Empty is none.
	Tokenizer string
	// HubCache is the Hugging Face cache; empty is where its environment
	// variables say, else where it is by default.
	HubCache string
	// Template is a file that replaces the tokenizer's chat template, as
	// vLLM's --chat-template does.
	Template string
	// ContentFormat is what messages' contents become for the template:
	// "auto" or "" to find out as vLLM does, "string" or "openai".
	ContentFormat string
	// TemplateKwargs is a JSON object, as vLLM's
	// --default-chat-template-kwargs.
	TemplateKwargs string
	// Cache is shared by all models; nil caches nothing.
	Cache *tokenizer.Cache
}

// Model follows the prompts of one served model. The agent loads it, the proxy
// uses it from any goroutine until it is closed. A nil Model has no tokenizer.
type Model struct {
	tokenizer *tokenizer.Tokenizer // nil for none
	// lacking is why no prompt, and chatLacking why no chat can be followed;
	// Exact when they can. why and chatWhy tell people.
	lacking, chatLacking Reason
	why, chatWhy         string
	demoted              atomic.Pointer[string]
}

// Load loads what source names. An error says what to change; a model that is
// there but cannot be followed is no error: Describe tells why.
func Load(source Source) (*Model, error) {
	return &Model{lacking: NoTokenizer}, nil
}

// Follow reads a prompt from a request body. It never fails: what cannot be
// followed is marked with the Reason. p keeps nothing of body.
func (m *Model) Follow(p *Prompt, kind Kind, body []byte, now time.Time) {
	p.reset()
	p.Reason = NoTokenizer
}

// Verify is Follow as if the model was not demoted: for who compares it with an
// engine, so as to demote it or to take that back.
func (m *Model) Verify(p *Prompt, kind Kind, body []byte, now time.Time) {
	m.Follow(p, kind, body, now)
}

// Approximate fills p without rendering or tokenizing, for the reason.
func (m *Model) Approximate(p *Prompt, kind Kind, body []byte, reason Reason) {
	p.reset()
	p.Reason = reason
}

// Demote makes every further prompt approximate: why tells people what the
// engine has counted otherwise. "" takes it back.
func (m *Model) Demote(why string) {
	if why == "" {
		m.demoted.Store(nil)
		return
	}
	m.demoted.Store(&why)
}

// Describe tells people how the model's prompts are followed, and whether
// chats are followed exactly.
func (m *Model) Describe() (how string, exact bool) { return "", false }

// Close releases what the tokenizer holds. No prompt may be followed after it.
func (m *Model) Close() {}
