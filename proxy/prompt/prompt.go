package prompt

// Kind is what rules a request's prompt follows: which route it came by.
type Kind uint8

const (
	// Other has a prompt that is not followed: Responses, Messages, embeddings.
	Other Kind = iota
	// Chat is /v1/chat/completions.
	Chat
	// Completion is /v1/completions.
	Completion
	// Tokenize is /tokenize: either of the two, by its members.
	Tokenize
)

// Prompt is one request's prompt as the engine will see it. The proxy has one
// a request, from Pool.Read until Pool.Put; it is no one else's meanwhile. The
// zero value is empty. What it holds is valid until it is put back.
type Prompt struct {
	// Reason is why the prompt could not be followed, 0 when IDs are exactly
	// what the engine will compute.
	Reason Reason
	// IDs are the token ids of all sequences, one after another; Ends is where
	// each ends. A completion request may ask for several sequences, a chat
	// has one. Without ids both are empty.
	IDs  []uint32
	Ends []int
	// Text stands for the ids when there are none: the rendered text, or else
	// role and content of each message, or the prompts. TextEnds is as Ends.
	Text     []byte
	TextEnds []int
	// Salt is the request's cache_salt: requests that differ in it share no
	// blocks. Of LoRA adapters the proxy knows.
	Salt []byte

	scratch scratch
}

// scratch is memory that following a prompt needs and that is worth keeping.
type scratch struct {
	// key is that of the prompt in the memo.
	key []byte
	// values are what was decoded, text what was rendered.
	values values
	text   []byte
	// made is what decoder.made counts.
	made int
}

// Tokens is how many tokens the engine will count for the prompt, 0 when that
// is not known.
func (p *Prompt) Tokens() int { return len(p.IDs) }

// Memory is how many bytes it holds until it is put back.
func (p *Prompt) Memory() int64 { return int64(p.memory()) }

// reset empties the prompt and keeps its memory.
func (p *Prompt) reset() {
	p.Reason = 0
	p.IDs, p.Ends = p.IDs[:0], p.Ends[:0]
	p.Text, p.TextEnds = p.Text[:0], p.TextEnds[:0]
	p.Salt = p.Salt[:0]
}
