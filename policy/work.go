package policy

// Work is what there is to compute for prompts: how many there are, their tokens
// that are not cached, and the attention of those: for each, the tokens before it.
// Works of several prompts add up. It is a value; the zero value is none.
type Work struct {
	Prompts, Tokens, Attention float64
}

// Prefill is the Work of one prompt of which cached tokens are in the cache and
// uncached are not.
func Prefill(uncached, cached int) Work {
	u, m := float64(max(uncached, 0)), float64(max(cached, 0))
	return Work{1, u, u * (m + u/2)}
}

// Plus returns the sum of both.
func (w Work) Plus(v Work) Work {
	return Work{w.Prompts + v.Prompts, w.Tokens + v.Tokens, w.Attention + v.Attention}
}

// Minus returns w without v, of which it holds.
func (w Work) Minus(v Work) Work {
	return Work{max(w.Prompts-v.Prompts, 0), max(w.Tokens-v.Tokens, 0), max(w.Attention-v.Attention, 0)}
}

// Speed is how long a replica takes for Work, in seconds: A for each token, B for
// each token and token before it, D for each prompt. It is a value; the zero value
// takes no time.
type Speed struct {
	A, B, D float64
}

// Time is how long w takes.
func (s *Speed) Time(w Work) float64 {
	return s.A*w.Tokens + s.B*w.Attention + s.D*w.Prompts
}

// fill is how long it takes to prefill a prompt of so many tokens of which the first
// held are cached.
func (s *Speed) fill(tokens, held float64) float64 {
	u := max(tokens-held, 0)
	return s.A*u + s.B*(u*(held+u/2)) + s.D
}

// DefaultSpeed is where nothing was learned yet: 60 us a token, 1 ns for each pair
// of tokens and 5 ms a prompt, as of an 8 B model on a GPU of the A100's class.
var DefaultSpeed = Speed{A: 60e-6, B: 1e-9, D: 5e-3}
