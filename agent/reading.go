package agent

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"
)

// reading is what one look at the pages of an engine has told. The
// zero value tells nothing.
type reading struct {
	// engine is which one it is, as in ReplicaConfig.Engine, "" when its pages
	// do not tell.
	engine string
	// started stands for the process: it is another number after a restart, and
	// 0 when it is not told.
	started float64
	// counts are those that it does not tell by rank, and so gauges.
	counts counts
	gauges gauges
	// uncounted: it does not tell how many requests it has. resident is how much of
	// the GPUs' memory its models have then, in bytes.
	uncounted bool
	resident  float64
	// ranks are the data-parallel ranks in their order. Without any, the engine
	// tells nothing of its cache.
	ranks []rankReading
}

// rankReading is what is told of one data-parallel rank.
type rankReading struct {
	label string
	// block is how many tokens a block of the KV cache has, blocks how many
	// there are; 0 when they are not told.
	block, blocks int
	// uncached: the engine reuses nothing of a prompt for another.
	uncached bool
	// sequences is how many run at a time, each with a cache of its own; 0: they share one.
	sequences int
	counts    counts
	gauges    gauges
}

// counts are what an engine counts from its start on, by family from
// firstCounter on. The zero value has none.
type counts struct {
	known [counters]bool
	value [counters]float64
}

func (c *counts) add(f family, value float64) {
	if sum := c.value[f-firstCounter] + value; finite(sum) {
		c.known[f-firstCounter], c.value[f-firstCounter] = true, sum
	}
}

// finite: it is a number that can be compared and saved.
func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// below tells whether one of the counts is lower than it was before.
func (c *counts) below(before *counts) bool {
	for i := range c.value {
		if c.known[i] && before.known[i] && c.value[i] < before.value[i] {
			return true
		}
	}
	return false
}

// update takes over the counts that are known now.
func (c *counts) update(now *counts) {
	for i, known := range now.known {
		if known {
			c.known[i], c.value[i] = true, now.value[i]
		}
	}
}

// rank returns what is known of a rank, to be added to before another is asked
// for. Of more than mostRanks the rest is lost.
func (r *reading) rank(label []byte) *rankReading {
	i, found := slices.BinarySearchFunc(r.ranks, label, func(k rankReading, label []byte) int {
		// Numbers without leading zeros.
		if len(k.label) != len(label) {
			return len(k.label) - len(label)
		}
		return strings.Compare(k.label, string(label))
	})
	if !found {
		if len(r.ranks) == mostRanks {
			return &rankReading{}
		}
		r.ranks = slices.Insert(r.ranks, i, rankReading{label: string(label)})
	}
	return &r.ranks[i]
}

// mostBlockTokens is larger than any engine's block.
const mostBlockTokens = 1 << 20

// readMetrics reads an engine's /metrics, of which points are what
// appendPoints has found.
func readMetrics(points []point) reading {
	var r reading
	for i := range points {
		s := &points[i]
		switch f := s.family; {
		case f == processStart:
			if finite(s.value) {
				r.started = s.value
			}
		case f == vllmCache:
			r.engine = "vllm"
			label, _ := s.label("engine")
			rank := r.rank(label)
			rank.block, rank.blocks = vllmBlocks(s)
			caching, _ := s.label("enable_prefix_caching")
			rank.uncached = string(caching) == "False"
		case f >= vllmPrompt && f <= vllmSuccess:
			r.engine = "vllm"
			label, _ := s.label("engine")
			r.rank(label).counts.add(f, s.value)
		case f >= vllmRunning && f <= vllmUsage:
			r.engine = "vllm"
			label, _ := s.label("engine")
			r.rank(label).gauges.read(f, s.value)
		case f >= sglangRunning && f <= sglangHitRate:
			r.engine = "sglang"
			// With priorities there is a series for each, and the total has none.
			if priority, _ := s.label("priority"); len(priority) > 0 {
				continue
			}
			label, _ := s.label("dp_rank")
			r.rank(label).gauges.read(f, s.value)
		case f == sglangCapacity || f == sglangPage:
			r.engine = "sglang"
			label, _ := s.label("dp_rank")
			rank := r.rank(label)
			// Those that share a rank tell the same.
			if n := int(min(max(s.value, 0), mostBlocks)); f == sglangPage {
				rank.block = max(rank.block, min(n, mostBlockTokens))
			} else {
				rank.blocks = max(rank.blocks, n) // tokens, for now
			}
		case f >= sglangPrompt && f <= sglangRequests:
			r.engine = "sglang"
			if label, ok := s.label("dp_rank"); ok {
				r.rank(label).counts.add(f, s.value)
			} else {
				r.counts.add(f, s.value)
			}
		case f >= llamaPrompt && f <= llamaDecoded:
			r.engine = "llamacpp"
			r.counts.add(f, s.value)
		case f == llamaRunning || f == llamaWaiting:
			r.engine = "llamacpp"
			r.gauges.read(f, s.value)
		case f == tgiRunning || f == tgiWaiting:
			r.engine = "tgi"
			r.gauges.read(f, s.value)
		case f >= tgiRequests && f <= tgiBatches:
			r.engine = "tgi"
			r.counts.add(f, s.value)
		}
	}
	// What is told without a rank beside ranks is none; what it says of blocks is of a
	// single one, if that says nothing.
	if i := slices.IndexFunc(r.ranks, func(k rankReading) bool { return k.label == "" }); i >= 0 && len(r.ranks) > 1 {
		all := r.ranks[i]
		if r.ranks = slices.Delete(r.ranks, i, i+1); len(r.ranks) == 1 && r.ranks[0].block == 0 {
			r.ranks[0].block, r.ranks[0].blocks = all.block, all.blocks
		}
	}
	switch r.engine {
	case "vllm":
		r.shareBlocks(points)
	case "sglang":
		for i := range r.ranks {
			k := &r.ranks[i]
			if k.block > 0 {
				k.blocks /= k.block
			} else {
				k.blocks = 0
			}
		}
	}
	return r
}

// vllmBlocks reads the block size and the number of blocks, of all ranks
// together, of a cache_config_info.
func vllmBlocks(s *point) (block, blocks int) {
	// What the blocks of one rank's share of the context are together, where it
	// is told.
	if block = s.count("effective_attention_block_size"); block == 0 {
		block = s.count("block_size")
	}
	if block > mostBlockTokens {
		block = 0
	}
	return block, min(s.count("num_gpu_blocks"), mostBlocks)
}

// shareBlocks makes the numbers of blocks those of single ranks. vLLM adds up
// the blocks of all ranks and tells the sum for each.
//
// Where models have several kinds of layers, each of which has blocks of its own,
// only what vLLM says that one rank's cache holds in tokens tells how much of a
// prompt is kept. That number is made of how many of the longest prompts there is
// room for, which need not fill their last block. So it is not taken where the
// blocks are as many as such prompts need that have one of each.
func (r *reading) shareBlocks(points []point) {
	for i := range points {
		s := &points[i]
		if s.family != vllmCache {
			continue
		}
		label, _ := s.label("engine")
		i := slices.IndexFunc(r.ranks, func(k rankReading) bool { return k.label == string(label) })
		if i < 0 && len(label) == 0 && len(r.ranks) == 1 {
			i = 0
		}
		if i < 0 {
			continue
		}
		k := &r.ranks[i]
		k.blocks /= max(len(r.ranks), 1)
		tokens, prompts := s.number("kv_cache_size_tokens"), s.number("kv_cache_max_concurrency")
		if k.block == 0 || tokens < float64(k.block) {
			continue
		}
		if k.blocks > 0 && prompts > 0 {
			each := math.Ceil(math.Ceil(tokens/prompts) / float64(k.block))
			if math.Abs(float64(k.blocks)/each-prompts) <= prompts/100 {
				continue
			}
		}
		// Where it is not told, what differs by less than a block is the same.
		if whole := number(tokens / float64(k.block)).upTo(mostBlocks); k.blocks == 0 || prompts > 0 || max(whole-k.blocks, k.blocks-whole) > 1 {
			k.blocks = whole
		}
	}
}

// description is what an engine's page about itself tells, which does not change
// while it runs. The zero value tells nothing.
type description struct {
	engine        string
	block, blocks int // of each rank; 0 when they are not told
	ranks         int // 0 when it is not told
	uncached      bool
	sequences     int // that it runs at a time, each with a cache of its own; 0 where they share one
}

// add lays what the engine says of itself over what its metrics tell.
func (d *description) add(r *reading) {
	if r.engine == "" {
		r.engine = d.engine
	}
	if d.engine == "" || d.engine != r.engine {
		return
	}
	for i := len(r.ranks); i < max(d.ranks, 1); i++ {
		r.ranks = append(r.ranks, rankReading{label: strconv.Itoa(i)})
	}
	for i := range r.ranks {
		k := &r.ranks[i]
		k.uncached = k.uncached || d.uncached
		k.sequences = d.sequences
		if k.block == 0 {
			k.block = d.block
		}
		if k.blocks == 0 {
			k.blocks = d.blocks
		}
	}
}

// describer is a page on which an engine of a kind describes itself.
type describer struct {
	engine, page string
	read         func(page []byte) (description, bool)
}

// describers are the pages that are asked for where /metrics does not tell it
// all. read reports false for what some other engine answers.
var describers = []describer{
	{"sglang", "/server_info", readServerInfo},
	{"llamacpp", "/props", readProps},
	{"tgi", "/info", readInfo},
	{"ollama", "/", readGreeting},
}

// readServerInfo reads SGLang's /server_info.
func readServerInfo(page []byte) (description, bool) {
	var info struct {
		PageSize  number `json:"page_size"`
		MaxTokens number `json:"max_total_num_tokens"`
		Ranks     number `json:"dp_size"`
		NoRadix   *bool  `json:"disable_radix_cache"`
		Internal  []struct {
			MaxTokens number `json:"max_total_num_tokens"`
			Memory    struct {
				Capacity number `json:"token_capacity"`
			} `json:"memory_usage"`
		} `json:"internal_states"`
	}
	if json.Unmarshal(page, &info) != nil || info.NoRadix == nil && info.PageSize == 0 {
		return description{}, false
	}
	d := description{engine: "sglang", block: info.PageSize.upTo(mostBlockTokens), ranks: info.Ranks.upTo(mostRanks), uncached: info.NoRadix != nil && *info.NoRadix}
	tokens := info.MaxTokens
	for _, state := range info.Internal {
		if tokens == 0 {
			tokens = max(state.MaxTokens, state.Memory.Capacity)
		}
	}
	if d.block > 0 {
		d.blocks = (tokens / number(d.block)).upTo(mostBlocks)
	}
	return d, true
}

// readProps reads llama.cpp's /props. Each of its slots has a context of its
// own, and a cache of that size; where they share memory (--kv-unified) there is less
// in all, which it does not tell. It reuses single tokens; they are counted in
// blocks of the default size here.
func readProps(page []byte) (description, bool) {
	var props struct {
		Slots    number `json:"total_slots"`
		Settings struct {
			Context number `json:"n_ctx"`
		} `json:"default_generation_settings"`
	}
	if json.Unmarshal(page, &props) != nil || props.Settings.Context == 0 {
		return description{}, false
	}
	tokens := props.Settings.Context * max(props.Slots, 1)
	return description{engine: "llamacpp", block: defaultBlock, blocks: (tokens / defaultBlock).upTo(mostBlocks),
		sequences: max(props.Slots, 1).upTo(mostSequences)}, true
}

// mostSequences is more than any engine has that tells of them.
const mostSequences = 1 << 12

// readGreeting reads what Ollama answers to who asks for nothing. It tells nothing of how
// many sequences a model has; by default it is one.
func readGreeting(page []byte) (description, bool) {
	if string(bytes.TrimSpace(page)) != "Ollama is running" {
		return description{}, false
	}
	return description{engine: "ollama", sequences: 1}, true
}

// readInfo reads TGI's /info. The tokens that a batch may have are those that
// its cache has room for.
func readInfo(page []byte) (description, bool) {
	var info struct {
		Router string `json:"router"`
		Batch  number `json:"max_batch_total_tokens"`
		Total  number `json:"max_total_tokens"`
	}
	if json.Unmarshal(page, &info) != nil || info.Batch == 0 && info.Total == 0 {
		return description{}, false
	}
	return description{engine: "tgi", block: defaultBlock, blocks: (info.Batch / defaultBlock).upTo(mostBlocks)}, true
}

// number is a number of a JSON page; anything else, and what is below zero, is 0.
type number float64

// UnmarshalJSON implements json.Unmarshaler.
func (n *number) UnmarshalJSON(text []byte) error {
	v, err := strconv.ParseFloat(string(text), 64)
	if *n = number(v); err != nil || v < 0 || !finite(v) {
		*n = 0
	}
	return nil
}

func (n number) upTo(most int) int { return int(min(n, number(most))) }

// life follows an engine's process from one look at its pages to the next. Its
// owner lets one call run at a time; the zero value has seen none.
type life struct {
	// What was told last: a page that lacks something for once takes nothing away.
	started float64
	counts  counts
	ranks   []rankLife

	seen  []float64 // processes before, the latest at the end
	alike int       // looks since the process has changed
	// shared: several processes answer in turns, as behind a load balancer.
	shared bool
}

// rankLife is what a rank has counted last.
type rankLife struct {
	label  string
	counts counts
}

const (
	// mostSeen is how many processes are remembered, to know one again.
	mostSeen = 8
	// alone is after how many looks at one and the same process it is believed
	// to be the only one.
	alone = 60
)

// next takes what is told now. It returns which ranks have lost what they had in
// their caches since the look before, by their place in r, and why; all is whether
// it is the process, and with it every rank.
//
// A process that was seen before and is there again was never gone: somebody
// between the agent and the engines sends each look elsewhere. Of such nothing
// can be concluded.
func (l *life) next(r *reading) (restarted []int, all bool, why string) {
	other := r.started != 0 && l.started != 0 && r.started != l.started
	if l.alike++; l.alike >= alone {
		l.shared, l.seen = false, nil
	}
	if other {
		l.alike = 0
		l.shared = l.shared || slices.Contains(l.seen, r.started)
		if l.seen = append(l.seen, l.started); len(l.seen) > mostSeen {
			l.seen = l.seen[1:]
		}
		why = "it is another process"
	}
	less := r.counts.below(&l.counts)
	for i := range r.ranks {
		if k := l.rank(r.ranks[i].label); k != nil && r.ranks[i].counts.below(&k.counts) {
			restarted = append(restarted, i)
		}
	}
	if !other && (less || len(restarted) > 0) {
		why = "it counts less than before"
	}
	l.note(r, other || less)
	if l.shared {
		return nil, false, ""
	}
	return restarted, other || less, why
}

func (l *life) rank(label string) *rankLife {
	for i := range l.ranks {
		if l.ranks[i].label == label {
			return &l.ranks[i]
		}
	}
	return nil
}

// note keeps what is told now; anew: of what was told before nothing holds.
func (l *life) note(r *reading, anew bool) {
	if anew {
		l.counts, l.ranks = counts{}, nil
	}
	if r.started != 0 {
		l.started = r.started
	}
	l.counts.update(&r.counts)
	for i := range r.ranks {
		k := l.rank(r.ranks[i].label)
		if k == nil {
			l.ranks = append(l.ranks, rankLife{label: r.ranks[i].label})
			k = &l.ranks[len(l.ranks)-1]
		}
		k.counts.update(&r.ranks[i].counts)
	}
	// Labels that somebody makes up do not grow it.
	if extra := len(l.ranks) - mostRanks; extra > 0 {
		l.ranks = slices.Delete(l.ranks, 0, extra)
	}
}

// tells reports whether a restart would be seen.
func (l *life) tells() bool {
	if l.shared {
		return false
	}
	counted := func(c *counts) bool { return slices.Contains(c.known[:], true) }
	return l.started != 0 || counted(&l.counts) || slices.ContainsFunc(l.ranks, func(k rankLife) bool { return counted(&k.counts) })
}
