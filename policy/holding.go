package policy

// Holding is the rule by which an agent holds requests back while every replica has
// enough before it: which one goes next, and in what order, is decided late, when more
// is known of who waits and of what is cached. It is a value, and used from any
// goroutine. The zero value holds nobody back.
//
// Those that are held are in a Queue, by Key. Whenever a replica is Free the first of
// them is chosen a replica for, and goes there, until none is. So nobody is held while a
// replica idles, nor longer than Longest.
//
// The order is by the time at which a request came and ageing times its prefill: the
// shortest first, but one that takes so many seconds lets nobody pass who comes more
// than ageing times as many later. So nobody waits for ever.
type Holding struct {
	// Lead is how many seconds of work a replica has before it at most when it is free
	// for more: so much it needs not to idle before what is sent has come. It is free,
	// too, while what it has before it is less than an engine computes in one step.
	Lead float64
}

const (
	// ageing is how many times its own prefill a request lets later ones pass.
	ageing = 5
	// stepTokens is what engines compute in one step at least, of all prompts that are
	// there, if nobody has said otherwise: vLLM, SGLang and llama.cpp take 2,048 tokens
	// where there is little memory. Prompts that are computed together wait for nothing of
	// each other, while those that come later have to wait for another step.
	stepTokens = 2048
)

// Holds reports that requests are held back at all.
func (h Holding) Holds() bool { return h.Lead > 0 }

// Free reports that the replica takes more.
func (h Holding) Free(c *Candidate) bool { return c.Wait < h.Lead || c.Ahead.Tokens < stepTokens }

// Next is in how many seconds that should be so, if nothing comes in between.
func (h Holding) Next(c *Candidate) float64 {
	if h.Free(c) {
		return 0
	}
	// The tokens before it become fewer at about the same rate.
	return min(c.Wait-h.Lead, c.Wait*(1-stepTokens/c.Ahead.Tokens))
}

// Key is the place in the order of a request that came at so many seconds, and takes
// prefill where it takes least.
func (h Holding) Key(came, prefill float64) float64 { return came + ageing*max(prefill, 0) }

// Longest is how many seconds a request is held at most: as long as was foretold when it
// came, from what replicas had before them and others that were held, and as long as it
// lets later ones pass. It is longer than that only where what is foretold is wrong, and
// then it is no use to hold it.
func (h Holding) Longest(foretold, prefill float64) float64 {
	return min(max(foretold, 0)+ageing*max(prefill, 0), MostTTFT)
}
