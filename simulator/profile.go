package simulator

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Profile is how fast an engine is on a GPU with a model, and how much it holds. What
// a Config leaves open is taken from the one that it names. A Profile is a value and
// not changed.
type Profile struct {
	Name    string
	Latency Latency
	// Tokens is what the KV cache has room for, BlockSize how many of them a block has.
	Tokens, BlockSize int
	// Sequences and Budget are what vLLM takes for --max-num-seqs and
	// --max-num-batched-tokens on such a GPU.
	Sequences, Budget int
	// Apart: prompts are computed one after the other and decoding goes on beside
	// them, without interference.
	Apart bool
}

// gpu is what a data sheet says: dense 16-bit operations a second, bytes of memory a
// second and altogether, bytes a second over PCIe in one direction. Flops and bandwidth
// are what part of the first two an engine gets to use.
type gpu struct {
	operations, memory, size, pcie float64
	flops, bandwidth               float64
	sequences, budget              int
}

// llm is what a model's config.json says: parameters, and of its attention layers,
// query and KV heads and their length. All are of 16 bits.
type llm struct {
	parameters                  float64
	layers, heads, kvHeads, dim float64
}

// The data sheets of NVIDIA, without sparsity. A decoding engine gets to use about
// three quarters of the memory's bandwidth: 77 % of an A100's (a concurrency sweep of
// vLLM 0.23, johnmusgrave.com), 74 % of an H100's (6.48 ms a token, a sweep of vLLM 0.21,
// yobitelcomm.github.io/bench). GDDR is a little better off, as it is slower. Of the
// operations, prefill gets about half on Hopper, where they are hard to feed, and more
// on Ampere; the sizes of batches are those of vLLM 0.32's engine/arg_utils.py.
var (
	h100 = gpu{989e12, 3.35e12, 85.5e9, 50e9, .55, .75, 1024, 8192}
	h200 = gpu{989e12, 4.8e12, 150.7e9, 50e9, .55, .75, 1024, 8192}
	a100 = gpu{312e12, 2.039e12, 85.1e9, 25e9, .65, .75, 256, 2048}
	l40s = gpu{362e12, 864e9, 48.3e9, 25e9, .5, .8, 256, 2048}
	l4   = gpu{121e12, 300e9, 24.1e9, 12e9, .5, .8, 256, 2048}
	t4   = gpu{65e12, 320e9, 15.8e9, 12e9, .4, .75, 256, 2048}
	// A server's processor with 16 cores, AMX and four channels of DDR5-4800.
	cpu = gpu{8e12, 154e9, 32e9, 154e9, .25, .6, 128, 2048}
)

var (
	llama8B  = llm{8.03e9, 32, 32, 8, 128}
	llama70B = llm{70.55e9, 80, 64, 8, 128}
	qwen32B  = llm{32.76e9, 64, 64, 8, 128} // Qwen3
	qwen3B   = llm{3.09e9, 36, 16, 2, 128}  // Qwen2.5
	qwen05B  = llm{0.494e9, 24, 14, 2, 64}  // Qwen2.5
)

// profile returns that of a model on so many GPUs that share each of its layers.
//
//	A         2·parameters operations for a token
//	B         4·layers·heads·dim operations for a pair of tokens: a product with the key,
//	          one with the value, each a multiplication and an addition
//	PerToken  2·parameters bytes are read; no step that computes anything takes less
//	Read      4·layers·kvHeads·dim bytes are read for a token: key and value of 16 bits
//	Sequence  a token that is decoded takes the operations of one of a prompt
//	D         2 ms for what is done once for a prompt: its entry, kernels that no graph
//	          launches, the first sample. What the API server takes is not in it
//	Load      the bytes of Read over PCIe
//
// Several GPUs exchange what they have computed twice in each layer; that costs a
// fifth of what each can do, and 8 µs each time a step does it. A tenth of the memory
// and 3 GB are not for the cache, as vLLM's --gpu-memory-utilization of 0.9 has it; of
// a processor's it is half.
func profile(name string, g gpu, m llm, n float64) Profile {
	spread, exchange := 1.0, 0.0
	if n > 1 {
		spread, exchange = .8, 2*m.layers*8e-6
	}
	operations := g.operations * g.flops * n * spread
	memory := g.memory * g.bandwidth * n
	weights, kv := 2*m.parameters, 4*m.layers*m.kvHeads*m.dim
	a := 2 * m.parameters / operations
	read := time.Duration((weights/memory + exchange) * 1e9)
	room := .9*g.size*n - weights - 3e9*n
	if g == cpu {
		room = .5*g.size - weights
	}
	return Profile{
		Name: name,
		Latency: Latency{A: a * 1e6, B: 4 * m.layers * m.heads * m.dim / operations * 1e6, D: 2000, PerToken: read, Least: read,
			Read: kv / memory * 1e9, Sequence: a * 1e9, Load: kv / (g.pcie * n) * 1e9},
		Tokens: int(room/kv) / 16 * 16, BlockSize: 16, Sequences: g.sequences, Budget: g.budget,
	}
}

// profiles are all that there are, by name.
var profiles = []Profile{
	// 4,000 blocks of 512, and one that is not for tokens: what shared traces are
	// compared on, in a replay without interference.
	{Name: "reference", Latency: Latency{A: 60, B: 0.001, D: 5000, PerToken: 20 * time.Millisecond}, Tokens: 4001 * 512, BlockSize: 512,
		Sequences: 4096, Budget: 2048, Apart: true},
	profile("h100-llama-8b", h100, llama8B, 1),
	profile("a100-llama-8b", a100, llama8B, 1),
	profile("l40s-llama-8b", l40s, llama8B, 1),
	profile("l4-llama-8b", l4, llama8B, 1),
	profile("h100x8-llama-70b", h100, llama70B, 8),
	profile("a100x4-llama-70b", a100, llama70B, 4),
	profile("h200-qwen-32b", h200, qwen32B, 1),
	profile("t4-qwen-3b", t4, qwen3B, 1),
	profile("cpu-qwen-0.5b", cpu, qwen05B, 1),
}

// Profiles returns the names of all profiles.
func Profiles() []string {
	var names []string
	for i := range profiles {
		names = append(names, profiles[i].Name)
	}
	return names
}

// ProfileOf returns the profile of a name.
func ProfileOf(name string) (Profile, error) {
	i := slices.IndexFunc(profiles, func(p Profile) bool { return p.Name == name })
	if i < 0 {
		return Profile{}, fmt.Errorf("profile must be one of %s, not %q", strings.Join(Profiles(), ", "), name)
	}
	return profiles[i], nil
}

// apply gives a profile's values to the fields that are not set.
func (p *Profile) apply(c *Config) {
	if c.PrefillA == 0 && c.PrefillB == 0 && c.PrefillD == 0 {
		c.PrefillA, c.PrefillB, c.PrefillD = p.Latency.A, p.Latency.B, p.Latency.D
	}
	setDefault(&c.TimePerOutputToken, p.Latency.PerToken)
	setDefault(&c.KVReadNS, p.Latency.Read)
	setDefault(&c.SequenceNS, p.Latency.Sequence)
	setDefault(&c.KVLoadNS, p.Latency.Load)
	setDefault(&c.LeastStep, p.Latency.Least)
	setDefault(&c.BlockSize, p.BlockSize)
	if c.BlockSize > 0 {
		setDefault(&c.NumGPUBlocks, p.Tokens/c.BlockSize)
	}
	setDefault(&c.MaxNumSeqs, p.Sequences)
	setDefault(&c.MaxNumBatchedTokens, p.Budget)
	c.apart = p.Apart
}
