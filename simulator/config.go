package simulator

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Config is how a simulated engine is set up. Its tags are read by the command
// line; flags that vLLM has too are named as there. A field that is zero means
// its default.
type Config struct {
	Host string `yaml:"host" name:"host" default:"127.0.0.1" help:"Address to listen on."`
	// Port 0 is any free port.
	Port int `yaml:"port" name:"port" default:"8000" help:"Port to listen on."`
	// ServedModelName are the names the model answers to. Responses carry the
	// first. Default: sim.
	ServedModelName []string `yaml:"served_model_name" name:"served-model-name" default:"sim" help:"Name of the model, repeatable for aliases."`
	// MaxModelLen is by default what the KV cache has room for, at most 32768.
	MaxModelLen int `yaml:"max_model_len" name:"max-model-len" default:"0" help:"Most tokens of a prompt and its answer; 0 is what the KV cache has room for, at most 32768."`
	// MaxNumSeqs is by default 256; of llama.cpp, whose slots they are, 4; of Ollama 1.
	MaxNumSeqs int `yaml:"max_num_seqs" name:"max-num-seqs" aliases:"parallel" default:"0" help:"Most sequences that run at the same time; others wait. --parallel of llama.cpp, OLLAMA_NUM_PARALLEL of Ollama. 0 is the profile's or 256, of these two 4 and 1."`
	// APIKey, when not empty, must be sent as bearer token to /v1 and /v2.
	APIKey       string `yaml:"api_key" name:"api-key" help:"Key that requests to /v1 must carry."`
	BlockSize    int    `yaml:"block_size" name:"block-size" group:"KV cache" default:"0" help:"Tokens of a KV cache block; --page-size of SGLang. 0 is 16, or the profile's."`
	NumGPUBlocks int    `yaml:"num_gpu_blocks_override" name:"num-gpu-blocks-override" group:"KV cache" default:"0" help:"Blocks of each rank's KV cache; 0 is 16384, or the profile's."`
	// Engine is whose API, cache, events, metrics and counts it has: one of engines.
	Engine string `yaml:"engine" name:"engine" enum:"vllm,sglang,tgi,llamacpp,ollama" default:"vllm" help:"vllm, sglang, tgi, llamacpp or ollama: whose API, KV cache, events, metrics and counts it has."`
	// HostBlocks is the room of the host tier; 0 is none.
	HostBlocks int `yaml:"host_blocks" name:"host-blocks" group:"KV cache" default:"0" help:"Blocks of the host tier, SGLang's HiCache or vLLM's KV offloading; 0 is none."`
	// HicacheRatio is HostBlocks as a multiple of NumGPUBlocks, where that is 0.
	HicacheRatio float64 `yaml:"hicache_ratio" name:"hicache-ratio" group:"KV cache" placeholder:"RATIO" help:"SGLang's host tier as a multiple of its KV cache, where --host-blocks is 0."`
	// NoAsyncScheduling: vLLM schedules a step when the one before it is over.
	NoAsyncScheduling     bool `yaml:"no_async_scheduling" name:"no-async-scheduling" help:"vLLM schedules each step when the one before it is over."`
	NoEnablePrefixCaching bool `yaml:"no_enable_prefix_caching" name:"no-enable-prefix-caching" group:"KV cache" aliases:"disable-radix-cache" help:"Compute every prompt anew; --disable-radix-cache of SGLang."`
	// DataParallelSize is how many ranks there are, each with a cache of its
	// own. Default: 1.
	DataParallelSize int `yaml:"data_parallel_size" name:"data-parallel-size" default:"1" help:"Engines behind the one address, each with a KV cache of its own."`
	// EnablePromptTokensDetails: answers tell how many tokens were cached.
	EnablePromptTokensDetails bool `yaml:"enable_prompt_tokens_details" name:"enable-prompt-tokens-details" aliases:"enable-cache-report" help:"Tell in usage how many tokens of the prompt were cached; --enable-cache-report of SGLang."`
	// MaxNumQueuedReqs is from how many sequences on vLLM refuses others; 0 is never.
	MaxNumQueuedReqs int `yaml:"max_num_queued_reqs" name:"max-num-queued-reqs" placeholder:"N" help:"Sequences, running ones too, at which vLLM refuses others with 503; 0 is never."`
	// MaxConcurrentRequests and MaxInputTokens are TGI's limits. Defaults: 128,
	// and one less than MaxModelLen.
	MaxConcurrentRequests int `yaml:"max_concurrent_requests" name:"max-concurrent-requests" group:"TGI" default:"128" help:"Most requests that TGI has at one time; it refuses others with 429."`
	MaxInputTokens        int `yaml:"max_input_tokens" name:"max-input-tokens" group:"TGI" default:"0" help:"Most tokens of a prompt for TGI; 0 is one less than --max-model-len."`
	// LoRAModules are the names of adapters, which models are served as too.
	LoRAModules []string `yaml:"lora_modules" name:"lora-modules" help:"Name of a LoRA adapter, repeatable."`

	KVEvents KVEvents `yaml:"kv_events" embed:"" prefix:"kv-events-" group:"KV cache events"`
	LlamaCPP LlamaCPP `yaml:"llamacpp" embed:"" group:"llama.cpp and Ollama"`
	Ollama   Ollama   `yaml:"ollama" embed:"" group:"llama.cpp and Ollama"`
	// LoadTime is how long llama.cpp loads its model before it serves, and Ollama
	// before the first request that needs it is.
	LoadTime time.Duration `yaml:"load_time" name:"load-time" group:"llama.cpp and Ollama" default:"0s" help:"How long llama.cpp at its start, and Ollama with the first request, loads the model."`

	TimeoutKeepAliveS int `yaml:"timeout_keep_alive" name:"timeout-keep-alive" default:"5" help:"Seconds until an idle connection is closed; negative is never."`

	// PrefillA, PrefillB and PrefillD are Latency's A, B and D. The defaults
	// are used when all three are 0.
	PrefillA float64 `yaml:"prefill_a" name:"prefill-a" default:"0" help:"Microseconds of prefill for each uncached prompt token. If this, -b and -d are all 0, they are 60, 0.002 and 5000, or the profile's."`
	PrefillB float64 `yaml:"prefill_b" name:"prefill-b" default:"0" help:"Microseconds of attention for each uncached token and each token before it."`
	PrefillD float64 `yaml:"prefill_d" name:"prefill-d" default:"0" help:"Microseconds of prefill for each request."`
	// TimePerOutputToken is the time from one token to the next.
	TimePerOutputToken time.Duration `yaml:"time_per_output_token" name:"time-per-output-token" default:"0s" help:"Time from one output token to the next while few are generated; 0 is 10 ms, or the profile's."`
	// KVReadNS and SequenceNS are what a step takes beside, for each token that is held
	// by a sequence that decodes, and for each of these; KVLoadNS is for each token
	// that comes back from the host's memory.
	KVReadNS   float64 `yaml:"kv_read_ns" name:"kv-read-ns" default:"0" help:"Nanoseconds that reading one token of the KV cache adds to a step."`
	SequenceNS float64 `yaml:"sequence_ns" name:"sequence-ns" default:"0" help:"Nanoseconds that each sequence that decodes adds to a step."`
	KVLoadNS   float64 `yaml:"kv_load_ns" name:"kv-load-ns" default:"0" help:"Nanoseconds that each token adds that comes back from the host's memory."`
	// LeastStep is what a step takes at least.
	LeastStep time.Duration `yaml:"least_step" name:"least-step" default:"0s" help:"Least time of a step, of those too in which nothing is decoded."`
	// Profile is a pair of GPU and model, one of those that Profiles returns, whose times and sizes are
	// used where a field is not set.
	Profile string `yaml:"profile" name:"profile" help:"GPU and model whose times, cache and budget are used where no other flag says so, such as h100-llama-8b; reference has no interference.."`
	// MaxNumBatchedTokens is the most tokens of a step, at least one for each sequence:
	// vLLM's default is 2048, or what its GPU's profile says; llama.cpp's --batch-size is
	// 2048 too.
	MaxNumBatchedTokens       int  `yaml:"max_num_batched_tokens" name:"max-num-batched-tokens" aliases:"batch-size" default:"0" help:"Most tokens of one step; --batch-size of llama.cpp. 0 is 2048, or the profile's."`
	NoEnableChunkedPrefill    bool `yaml:"no_enable_chunked_prefill" name:"no-enable-chunked-prefill" help:"vLLM computes each prompt in one step."`
	LongPrefillTokenThreshold int  `yaml:"long_prefill_token_threshold" name:"long-prefill-token-threshold" default:"0" help:"Most tokens of one prompt in a step of vLLM's while there are others; 0 is any number."`
	// ChunkedPrefillSize is SGLang's.
	ChunkedPrefillSize int  `yaml:"chunked_prefill_size" name:"chunked-prefill-size" default:"0" help:"Most tokens of prompts in a step of SGLang's; 0 is 8192, -1 computes each prompt in one."`
	EnableMixedChunk   bool `yaml:"enable_mixed_chunk" name:"enable-mixed-chunk" help:"SGLang goes on decoding while it computes prompts."`
	// MaxBatchPrefillTokens is TGI's.
	MaxBatchPrefillTokens int `yaml:"max_batch_prefill_tokens" name:"max-batch-prefill-tokens" default:"0" help:"Most tokens of prompts in a step of TGI's; 0 is 4096."`
	// apart is set by a profile: decoding and prefill do not disturb each other.
	apart bool

	DefaultOutputTokens int `yaml:"default_output_tokens" name:"default-output-tokens" default:"128" help:"Tokens of a chat answer whose request sets no limit."`
	// ZeroLatency ignores all of the model's times.
	ZeroLatency bool   `yaml:"zero_latency" name:"zero-latency" help:"Answer as fast as possible."`
	Seed        uint64 `yaml:"seed" name:"seed" default:"0" help:"Seed of the generated text."`

	// Created, when not 0, stands as the time in every answer, so that
	// answers to equal requests are equal. It has no flag.
	Created int64 `yaml:"-" kong:"-"`

	Faults Faults `yaml:"faults" embed:"" prefix:"fault-" group:"Faults, also at /sim/faults while it runs"`
}

// complete fills in defaults and reports every value that cannot be used.
func (c *Config) complete() error {
	if c.Host == "" {
		c.Host = "127.0.0.1"
	}
	if len(c.ServedModelName) == 0 {
		c.ServedModelName = []string{"sim"}
	}
	// A profile's number of sequences is for engines that share one cache among them.
	switch c.Engine {
	case "llamacpp":
		setDefault(&c.MaxNumSeqs, 4)
	case "ollama":
		setDefault(&c.MaxNumSeqs, 1)
	}
	var errs []error
	if c.Profile != "" {
		if p, err := ProfileOf(c.Profile); err != nil {
			errs = append(errs, err)
		} else {
			p.apply(c)
		}
	}
	setDefault(&c.MaxNumSeqs, 256)
	setDefault(&c.BlockSize, 16)
	setDefault(&c.NumGPUBlocks, 16384)
	if c.Engine == "" {
		c.Engine = "vllm"
	}
	setDefault(&c.DataParallelSize, 1)
	setDefault(&c.MaxNumBatchedTokens, max(2048, c.MaxNumSeqs))
	setDefault(&c.ChunkedPrefillSize, 8192)
	setDefault(&c.MaxBatchPrefillTokens, 4096)
	if c.HostBlocks == 0 && c.HicacheRatio > 0 && c.HicacheRatio <= maxHicacheRatio {
		c.HostBlocks = int(c.HicacheRatio * float64(c.NumGPUBlocks))
	}
	setDefault(&c.KVEvents.BufferSteps, 10000)
	setDefault(&c.KVEvents.HWM, 100000)
	// One block is not for tokens.
	room := (c.NumGPUBlocks - 1) * c.BlockSize
	if c.slotted() {
		room = c.NumGPUBlocks * c.BlockSize / max(c.MaxNumSeqs, 1) // of each slot
	}
	setDefault(&c.MaxModelLen, min(32768, room))
	setDefault(&c.MaxConcurrentRequests, tgiConcurrent)
	setDefault(&c.MaxInputTokens, c.MaxModelLen-1)
	setDefault(&c.TimeoutKeepAliveS, 5)
	setDefault(&c.DefaultOutputTokens, 128)
	setDefault(&c.TimePerOutputToken, 10*time.Millisecond)
	if c.PrefillA == 0 && c.PrefillB == 0 && c.PrefillD == 0 {
		c.PrefillA, c.PrefillB, c.PrefillD = 60, 0.002, 5000
	}

	atLeast := func(name string, value, least int) {
		if value < least {
			errs = append(errs, fmt.Errorf("%s must be at least %d, got %d", name, least, value))
		}
	}
	if c.Port < 0 || c.Port > 65535 {
		errs = append(errs, fmt.Errorf("port must be between 0 and 65535, got %d", c.Port))
	}
	for _, name := range c.ServedModelName {
		if name == "" {
			errs = append(errs, errors.New("served-model-name must not be empty"))
		}
	}
	atLeast("max-model-len", c.MaxModelLen, 2)
	if c.MaxModelLen > room && c.BlockSize > 0 {
		needed, of := ceilDiv(c.MaxModelLen, c.BlockSize)+1, ""
		if c.slotted() {
			needed, of = ceilDiv(c.MaxModelLen*c.MaxNumSeqs, c.BlockSize), fmt.Sprintf(" for max-num-seqs %d slots", c.MaxNumSeqs)
		}
		errs = append(errs, fmt.Errorf("max-model-len %d needs a KV cache of %d blocks%s, num-gpu-blocks-override is %d",
			c.MaxModelLen, needed, of, c.NumGPUBlocks))
	}
	atLeast("max-concurrent-requests", c.MaxConcurrentRequests, 1)
	if c.MaxInputTokens < 1 || c.MaxInputTokens >= c.MaxModelLen {
		errs = append(errs, fmt.Errorf("max-input-tokens must be between 1 and max-model-len - 1 = %d, got %d", c.MaxModelLen-1, c.MaxInputTokens))
	}
	if !slices.Contains(engines, c.Engine) {
		errs = append(errs, fmt.Errorf("engine must be one of %s, not %q", strings.Join(engines, ", "), c.Engine))
	}
	atLeast("data-parallel-size", c.DataParallelSize, 1)
	// Each product of numbers below is one that an int has.
	atMost := func(name string, value, most int) {
		if value > most {
			errs = append(errs, fmt.Errorf("%s must be at most %d, got %d", name, most, value))
		}
	}
	atMost("data-parallel-size", c.DataParallelSize, maxRanks)
	atMost("max-num-seqs", c.MaxNumSeqs, maxSequences)
	if c.NumGPUBlocks > maxBlocks || c.HostBlocks > maxBlocks || (c.NumGPUBlocks+c.HostBlocks)*min(max(c.DataParallelSize, 1), maxRanks) > maxBlocks {
		errs = append(errs, fmt.Errorf("num-gpu-blocks-override and host-blocks of all ranks must be at most %d blocks together", maxBlocks))
	}
	atMost("block-size", c.BlockSize, maxBlockSize)
	atLeast("host-blocks", c.HostBlocks, 0)
	atLeast("max-num-queued-reqs", c.MaxNumQueuedReqs, 0)
	if !(c.HicacheRatio >= 0 && c.HicacheRatio <= maxHicacheRatio) {
		errs = append(errs, fmt.Errorf("hicache-ratio must be between 0 and %d, got %v", maxHicacheRatio, c.HicacheRatio))
	}
	if c.HostBlocks > 0 && !c.sglang() && c.Engine != "vllm" {
		errs = append(errs, errors.New("host-blocks and hicache-ratio are for the engines vllm and sglang"))
	}
	for _, name := range c.LoRAModules {
		if name == "" {
			errs = append(errs, errors.New("lora-modules must not be empty"))
		}
	}
	if err := c.KVEvents.check(c.DataParallelSize, c.sglang()); err != nil {
		errs = append(errs, fmt.Errorf("kv-events: %w", err))
	}
	atLeast("max-num-seqs", c.MaxNumSeqs, 1)
	if c.MaxNumBatchedTokens < c.MaxNumSeqs {
		errs = append(errs, fmt.Errorf("max-num-batched-tokens must be at least max-num-seqs, %d, got %d", c.MaxNumSeqs, c.MaxNumBatchedTokens))
	}
	atLeast("long-prefill-token-threshold", c.LongPrefillTokenThreshold, 0)
	atLeast("chunked-prefill-size", c.ChunkedPrefillSize, -1)
	atLeast("max-batch-prefill-tokens", c.MaxBatchPrefillTokens, 1)
	atLeast("block-size", c.BlockSize, 1)
	atLeast("num-gpu-blocks-override", c.NumGPUBlocks, 2)
	atLeast("default-output-tokens", c.DefaultOutputTokens, 1)
	if !(c.PrefillA >= 0 && c.PrefillB >= 0 && c.PrefillD >= 0) {
		errs = append(errs, fmt.Errorf("prefill-a, -b and -d must not be negative, got %v, %v and %v", c.PrefillA, c.PrefillB, c.PrefillD))
	}
	if !(c.KVReadNS >= 0 && c.SequenceNS >= 0 && c.KVLoadNS >= 0) {
		errs = append(errs, fmt.Errorf("kv-read-ns, sequence-ns and kv-load-ns must not be negative, got %v, %v and %v", c.KVReadNS, c.SequenceNS, c.KVLoadNS))
	}
	if c.LeastStep < 0 {
		errs = append(errs, fmt.Errorf("least-step must not be negative, got %v", c.LeastStep))
	}
	if c.TimePerOutputToken < 0 {
		errs = append(errs, fmt.Errorf("time-per-output-token must not be negative, got %v", c.TimePerOutputToken))
	}
	if c.LoadTime < 0 {
		errs = append(errs, fmt.Errorf("load-time must not be negative, got %v", c.LoadTime))
	}
	// What engines do not have must not seem to be there.
	if c.KVEvents.Endpoint != "" && slices.Contains([]string{"tgi", "llamacpp", "ollama"}, c.Engine) {
		errs = append(errs, fmt.Errorf("kv-events are not for the engine %s, which tells nothing of its cache", c.Engine))
	}
	if c.slotted() {
		if c.DataParallelSize > 1 {
			errs = append(errs, fmt.Errorf("data-parallel-size is not for the engine %s", c.Engine))
		}
		if len(c.LoRAModules) > 0 {
			errs = append(errs, fmt.Errorf("lora-modules are not for the engine %s", c.Engine))
		}
	}
	c.Ollama.complete()
	if err := c.Ollama.check(); err != nil {
		errs = append(errs, err)
	}
	if err := c.Faults.check(); err != nil {
		errs = append(errs, fmt.Errorf("fault: %w", err))
	}
	return errors.Join(errs...)
}

const maxHicacheRatio = 1000

// What a configuration may ask of this machine's memory: a typing error must not take
// all of it.
const (
	maxRanks     = 256
	maxSequences = 1 << 20
	maxBlocks    = 1 << 24
	maxBlockSize = 1 << 30
)

// engines are what Config.Engine may be.
var engines = []string{"vllm", "sglang", "tgi", "llamacpp", "ollama"}

func setDefault[T int | float64 | time.Duration](field *T, value T) {
	if *field == 0 {
		*field = value
	}
}

// latency returns the model's times.
func (c *Config) latency() Latency {
	if c.ZeroLatency {
		return Latency{}
	}
	return Latency{A: c.PrefillA, B: c.PrefillB, D: c.PrefillD, PerToken: c.TimePerOutputToken,
		Least: c.LeastStep, Read: c.KVReadNS, Sequence: c.SequenceNS, Load: c.KVLoadNS}
}

func (c *Config) sglang() bool { return c.Engine == "sglang" }

// slotted reports that each sequence has a part of the cache for itself.
func (c *Config) slotted() bool { return c.Engine == "llamacpp" || c.Engine == "ollama" }

// Completed returns the configuration with all that it leaves open filled in, as a
// server has it, or says what is wrong with it.
func (c Config) Completed() (Config, error) {
	err := c.complete()
	return c, err
}

// Latency returns how long an engine's work takes. The configuration must be complete.
func (c *Config) Latency() Latency { return c.latency() }

// NewEngine returns an engine as a server of this configuration has one in each of
// its ranks. It does no I/O; what is set for events, KVEvents.Endpoint, is only
// whether the engine tells of its cache.
func (c Config) NewEngine() (*Engine, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	return c.newEngine(), nil
}

// newEngine returns one rank's engine.
func (c *Config) newEngine() *Engine {
	e := NewEngine(c.latency(), c.MaxNumSeqs)
	n := naming{block: c.BlockSize, sglang: c.sglang()}
	shares, told := !c.NoEnablePrefixCaching, c.KVEvents.Endpoint != ""
	switch c.Engine {
	case "sglang":
		e.cache = newRadixCache(n, c.NumGPUBlocks, c.HostBlocks, shares, told)
		// Without chunks the budget is its --max-prefill-tokens.
		e.batching = batching{first: true, mixed: c.EnableMixedChunk, whole: c.ChunkedPrefillSize < 0, budget: c.ChunkedPrefillSize}
		if e.whole {
			e.budget = 16384
		}
		e.passOn() // that it is empty
	case "tgi":
		radix := newRadixCache(naming{block: 1}, c.NumGPUBlocks*c.BlockSize, 0, shares, false)
		radix.late = true
		e.cache = radix
		e.batching = batching{first: true, whole: true, patient: true, reserves: true, budget: c.MaxBatchPrefillTokens}
	case "llamacpp", "ollama":
		e.cache = newSlotCache(c.MaxNumSeqs, c.NumGPUBlocks*c.BlockSize/c.MaxNumSeqs, shares)
		e.batching = batching{budget: c.MaxNumBatchedTokens}
	default:
		e.cache = newBlockPool(n, c.NumGPUBlocks, c.HostBlocks, shares, told)
		e.batching = batching{ahead: !c.NoAsyncScheduling, budget: c.MaxNumBatchedTokens, long: c.LongPrefillTokenThreshold, whole: c.NoEnableChunkedPrefill}
		if e.whole {
			e.budget = max(e.budget, c.MaxModelLen)
		}
	}
	if c.apart {
		e.batching = batching{apart: true, first: e.first}
	}
	if c.ZeroLatency {
		// All is over at once, so it makes no difference how.
		e.budget, e.apart = 0, false
	}
	return e
}

// version is the release of vLLM whose behaviour is simulated.
const version = "0.32.0"

// sglangVersion is that of SGLang.
const sglangVersion = "0.5.21"

// fingerprint returns what answers carry as system_fingerprint: the version
// and a number of the configuration.
func (c *Config) fingerprint() string {
	return fmt.Sprintf("vllm-%s-%08x", version, uint32(mix(c.Seed^hashText(c.ServedModelName[0]))))
}
