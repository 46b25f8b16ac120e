package policy

import (
	"math"
	"math/bits"
)

// CostModel is the default policy: the expected time to first token, in seconds,
// and what the request takes from others. It is immutable once it scores; Score and
// AppendTerms may be called from any goroutine. The zero value weighs only the wait;
// NewCostModel returns one with its weights.
//
//	cost = (wait + room + prefill + own_work + load + crowd + company) / share + yield + leave + overload + kv_pressure
//
//	wait          until the prompts ahead are prefilled
//	room          and then until the request fits into the KV cache: with the above it is
//	              the candidate's Wait
//	prefill       of what is not cached, by the replica's Speed
//	own_work      (OwnWork - 1) · prefill, and OwnWorkBusy · busy + OwnWorkLong · T · Busy
//	              for each token that is not cached, times what it takes at the end of the
//	              prompt where it takes least, e: it also delays those who come after, where
//	              all have much to do, and a slow replica has fewer of them. busy is
//	              w / (w + A · n / 10), of the shortest wait w of all, the least A, and the n
//	              tokens of the whole prompt. T is e · n in parts of longestOwn, 1 at most, and
//	              Busy the candidate's
//	load          of what is cached in the host's memory or on disk; never more than
//	              it would take to compute it
//	crowd         Crowd · requests that have no first token there yet · prefill: what
//	              takes long goes where few wait, which is where others take long, too,
//	              and what does not is not behind it
//	company       Company · by how much later first tokens come for those who are there: its
//	              own, which comes at the end of a step that carries all sequences, and
//	              those of the requests that will go where this one does, which meet who is
//	              there usually, and how fast the replica is
//	share         of a replica that takes only part of its share for a while
//	yield         Yield · what prompts that are computed there in pieces wait longer for it:
//	              as long as it takes, or as their rest does, if that is less
//	leave         elsewhere than at the replica that alone holds a conversation which goes
//	              on: as long as it takes there to compute what nobody else holds of it,
//	              Leave at most, but for replicas that are faster
//	overload      of a replica that has far more requests than the others
//	kv_pressure   KVPressure where the KV cache is full while requests wait for it: to
//	              wait there takes longer than the prefill of those ahead, and the
//	              engine may preempt sequences that it has begun with
//
// Times that are not numbers, or are below zero, come from a replica's Speed that is
// broken. A replica whose cost is no number, or is below zero, is excluded.
type CostModel struct {
	// OwnWork is by how much the prefill counts where there are idle replicas,
	// OwnWorkBusy by how much more, at most, where there are none, and OwnWorkLong so of a
	// prompt that takes longestOwn, at a replica that never idles.
	OwnWork, OwnWorkBusy, OwnWorkLong float64
	// LoadCPU and LoadDisk are seconds for each token that is loaded from the
	// host's memory, and from disk or farther.
	LoadCPU, LoadDisk float64
	// Crowd is the part of the prefill that counts for each request that waits for its
	// first token there.
	Crowd float64
	// Company is how often it counts how much later first tokens come for those who are
	// there.
	Company float64
	// Approximate is how much counts of what a replica is only thought to have
	// cached.
	Approximate float64
	// Bound is how many times the requests that the others have on average a
	// replica may have, for its speed, and overloadFree more. Each beyond costs
	// Overload seconds.
	Bound, Overload float64
	// Yield is how often it counts how much longer prompts wait that have begun.
	Yield float64
	// Leave is how many seconds it costs at most that a conversation leaves the replica
	// which alone holds it.
	Leave float64
	// KVLimit is how full a KV cache may be when requests wait for it, and KVPressure
	// the seconds that it costs where it is fuller.
	KVLimit, KVPressure float64
	// Slack is the difference of costs, in seconds, and SlackShare that in parts of
	// the least one, or of a second if that is less, that makes no difference; the larger
	// counts.
	Slack, SlackShare float64
}

// overloadFree is how many requests more than Bound says a replica may have without
// cost: where there are few, they are as uneven as chance has it.
const overloadFree = 8

// NewCostModel returns a CostModel with its default weights.
//
// A token of an 8 B model with grouped queries (Llama 3.1: 32 layers, 8 heads of 128
// for keys and values each, 2 bytes a number) has 128 KiB of KV. Over 16 lanes of
// PCIe 4 in pieces of a block go some 22 GB/s: 6 us. Disks of the NVMe kind read some
// 5 GB/s: 25 us. Larger models have more KV, and are spread over more GPUs with a
// link each.
//
// What a replica is only thought to have counts in full. It is thought to have it
// from what this agent has sent there, which is corrected by what the engine says it
// has found; and to count less of it would make conversations leave their replicas
// earlier in fleets that have no events at all.
//
// One sequence more in a batch delays each step of all others by the time to read
// its KV: 2,000 tokens of 128 KiB at 2 TB/s are 130 us, 200 steps of that 26 ms.
//
// What the weights of one's own work and of the crowd do, by the mean time to first token in
// times of the bound, in inferrail simulate --profile reference --replicas 8: w1 to w4 with
// --rate 40 --requests 2000, and Mooncake's conversations with --trace, of which the last
// column has what they reuse, in parts of what one cache as large as all would find:
//
//	--policy cost_model:                          w1    w2    w3    w4    conversations
//	(the default)                                 1.06  1.04  1.41  1.16  1.13  97.0 %
//	own_work=1:own_work_busy=0:own_work_long=0    1.07  1.04  1.38  1.20  1.13  94.2 %
//	own_work=2:own_work_busy=0:own_work_long=0    1.10  1.05  1.85  1.22  1.13  97.3 %
//	own_work_busy=0                               1.06  1.04  1.38  1.20  1.13  96.1 %
//	own_work_busy=2                               1.06  1.04  1.38  1.17  1.13  96.9 %
//	own_work_long=0                               1.06  1.04  1.42  1.17  1.13  95.1 %
//	own_work_long=7                               1.07  1.04  1.41  1.17  1.14  97.8 %
//	crowd=0                                       1.06  1.04  1.38  1.16  1.13  97.2 %
//	company=0                                     1.05  1.04  1.41  1.17  1.13  96.3 %
//	slack_share=0                                 1.05  1.04  1.41  1.16  1.13  96.5 %
//	lmetric                                       1.06  1.05  1.57  1.47  1.22  83.5 %
//
// So there is little between them in time but where prefixes are hot and long under heavy
// load, w4, and where bursts of one conversation come, w3. Where nothing is shared (w6) all
// have 1.01.
// In package simulator/virtual the tests of the default hold it beside round_robin,
// least_request and lmetric: where nothing is shared, in fleets of one kind, in nothing more
// than least_request has; in fleets of several kinds its median may be more, where some are
// many times as fast and hardly keep up, and its 99th percentile and mean are not.
//
// Of the recorded conversations the mean is 1.13 times the bound, at which all replicas hold
// all, at their speed and at 1.8 times it (--speed 1.8), and 1.17 and 1.23 without Pieces. What
// Holding gives is in these numbers.
//
// OwnWorkLong is for what work of x seconds takes from those who come while it is computed, a
// second of them by a second: it grows with x squared, and with how often they come (the
// value function of a queue with Poisson arrivals, Hyytia, Penttinen and Aalto, Eur. J. Oper.
// Res. 217, 2012: lambda x^2 / 2 (1 - rho)). How busy a replica was in the last minutes stands
// for that, so that replicas have as much to compute in the long run and their caches forget
// at the same age, as one would. Times what they are without it (own_work_long=0), of four
// seeds:
//
//	                                mean ttft  p50 ttft  p99 ttft  reuse            hotspot
//	conversations                   1.00       0.99      1.00      97.1 after 95.0  1.01 after 1.05
//	at 1.8 times their speed        1.00       0.99      1.00      97.8 after 94.3  1.02 after 1.03
//	one engine twice as slow        1.02       0.98      1.03      94.6 after 90.4  1.12 after 1.18
//	without Holding and Pieces      1.00       0.98      1.01      93.6 after 90.5  1.02 after 1.04
//	the same at 1.8 times           1.01       0.96      1.04      92.3 after 87.3  1.01 after 1.04
//	all events lost                 1.00       0.99      1.01      93.4 after 90.8  1.02 after 1.04
//	through four agents             0.93       0.90      0.95      93.8 after 93.3  1.36 after 1.12
//	the synthetic trace             1.00       1.00      1.00      99.5 after 99.5  1.03 after 1.11
//
// Several agents do not see what the others compute, but that requests are there: long
// prompts keep away from where others usually are, which makes replicas uneven and all
// sooner; at 1.8 times the speed, and through two agents, the mean is 0.99 and 0.94 times what
// it is without the weight. Were others to count while their requests wait, or not at all, it
// would be 1.05 to 1.11 times. By who computes at the moment instead of in the last minutes it
// is 1.09 times, and a burst that shares a document waits for one replica, though others were
// done sooner. A weight of 5 reuses 97.5 and 97.9 %, and has 3 % more of the mean with one slow
// engine. Memories of 30 seconds to 5 minutes reuse within 0.3 % of each other.
//
// Were prefill to count more for each sequence that is decoded at the replica, as it did once,
// long prompts would go where few are, and sequences be the less even for it: 8 H100 keep their
// limits with unshared prompts (W6) at 152 a second then, at 164 without, and at 157 with
// round_robin (four seeds). What decoding delays is the company's.
//
// With an OwnWork of 1 alone a fleet near its limit computes too much twice, and is soon beyond it;
// with 2 alone a prefix that many ask for stays with few replicas, whose queues are
// then as long as it takes to compute it, though others idle. To compute it at one
// that idles is worth a little more than it costs, for it is there the next time.
//
// The company keeps agents with tools apart, who stay where their conversations began. How
// many of them a replica has is seen in who is there usually, hardly in who is there now, and
// how many requests a choice decides for in what is cached at one replica alone. Times what
// they are without it (company=0), of three seeds, of the bursts nine and of the sessions
// twelve:
//
//	                                   mean ttft    p50 ttft     p99 ttft     mean answer
//	agents, 8 H100 (W3, 8/s)           0.96         0.95         0.96         0.96
//	agents, 8 H100 (W3, 16/s)          1.00         0.99         1.00         0.96
//	agents, 8 H100 (W3, 28/s)          1.01         1.02         0.99         1.00
//	agents, 8 H100 (W3), 400 requests  1.00         0.96         1.00         0.93
//	agents, 8 L40S (W3, 5/s)           0.99         0.97         1.01         0.96
//	agents, 4 H100 and 4 L40S (W3)     1.05         1.02         1.15         1.02
//	chats, 4 H100 and 4 L40S (W2)      1.01         1.00         1.07         1.01
//	sessions, one throttled of 3       0.78         0.91         0.81         0.87
//	system prompts, 8 H200 (W1, 76/s)  0.99         0.99         1.00         1.00
//	bursts, a slow engine (W5, 44/s)   1.10         1.04         0.85         1.01
//
// Of bursts nine seeds differ by 8 % between programs that differ in nothing there. Weights
// between 0.8 and 1.5 are within what seeds differ by of each other. Were all that is
// cached to count, system prompts that many ask behind would: the bursts have 16 % more of the
// median then. Fast replicas have more requests: without what followers' prefill takes at slow
// ones, agents before two kinds have 11 % more of the mean; with all of it instead of a tenth,
// chats before two kinds have up to 80 % more of the 99th percentile. To take each request to
// delay the more the slower a replica is costs the bursts 40 % of the mean. To count how long
// prompts usually wait there as well takes up to 9 % off the mean of bursts, and the recorded
// conversations have 9 to 18 % more of it. A slope that may be chance, as where decoding is in
// nobody's way, counts: without it, agents have up to 7 % more of the median.
//
// Were OwnWorkBusy to go by how long the prefill takes at each replica, slow ones would be left
// to idle while fast ones have much before them: bursts with a slow engine (W5, 44/s) have 15 %
// more of the mean then.
//
// Leave is for chats. To compute again what one conversation has alone is of no use to anyone
// later, and what is to be won by it is known to no more than about a step of the engine, as
// nobody tells how far the one is that runs: of several replicas the least cost is the one that
// looks too good. Times what they are without it (leave=0), of eight seeds of chats, 10 of two
// kinds, 48 of 400 requests and 300 of sessions, and lmetric's, whose mean and 99th percentile of
// chats were below:
//
//	                                       mean ttft    p50 ttft     p99 ttft     reuse
//	chats, 8 H200 (W2, 21/s)               0.99 (0.99)  1.00 (1.00)  0.96 (0.99)  91.2 after 90.8
//	chats, 8 H200 (W2, 30/s)               0.99 (0.99)  0.99 (1.00)  0.95 (0.97)  90.0 after 89.5
//	chats, 8 H200 (W2, 37/s)               0.99 (0.99)  1.00 (0.99)  0.97 (0.96)  89.2 after 88.5
//	chats, 4 H100 and 4 L40S (W2)          0.98 (1.29)  0.99 (0.96)  0.99 (1.36)  84.8 after 82.8
//	agents, 4 H100 and 4 L40S (W3)         0.99 (1.46)  0.99 (1.20)  1.03 (2.20)  92.7 after 92.5
//	agents, 8 H100 (W3, 8/s), 400 requests 1.01 (1.10)  1.01 (1.01)  1.00 (1.41)  89.5 after 88.9
//	sessions, one throttled of 3           1.01 (1.53)  1.00 (1.02)  1.04 (1.74)  93.9 after 93.9
//
// From 15 to 60 ms chats are the same within what seeds differ by; sessions have 3 % more of the
// mean with 50 ms, and 9 % with any time, as those who are at an engine that is slow just now
// stay. Were a faster replica no exception, those would have 1 % more of the mean, and agents before
// two kinds 1 to 2 %. Were all that one replica alone holds to count instead of a conversation's own, bursts
// (W5, 44/s, 20 seeds) would have 5 % more of it, and system prompts (W1) up to 6 % more of the
// 99th percentile: those are worth a second copy.
//
// KVPressure is no exclusion of replicas with full caches: what comes between two reports
// would go where there is still room, and conversations leave what is cached.
func NewCostModel() *CostModel {
	return &CostModel{
		OwnWork:     0.9,
		OwnWorkBusy: 4,
		OwnWorkLong: 3.5,
		LoadCPU:     6e-6,
		LoadDisk:    25e-6,
		Crowd:       0.1,
		Company:     1.1,
		Approximate: 1,
		Bound:       2,
		Overload:    0.025,
		Yield:       1.5,
		Leave:       0.02,
		KVLimit:     0.9,
		KVPressure:  0.3,
		Slack:       2e-3,
		SlackShare:  0.05,
	}
}

// Name implements Policy.
func (*CostModel) Name() string { return "cost_model" }

// Score implements Policy.
func (m *CostModel) Score(r *Request, candidates []Candidate, costs []float64) (slack float64) {
	least := m.score(r, candidates, costs)
	if r.Begun {
		for i := range candidates {
			costs[i] += m.yield(r, &candidates[i])
		}
		least = lowest(costs)
	}
	if holder, leave := m.leave(r, candidates); leave > 0 {
		stays, faster := costs[holder], candidates[holder].Speed.A/hardly
		for i := range candidates {
			if candidates[i].Speed.A > faster {
				costs[i] += leave
			}
		}
		costs[holder] = stays
		least = lowest(costs)
	}
	if least == math.Inf(1) {
		return 0
	}
	return max(m.Slack, m.SlackShare*min(least, 1))
}

// score sets costs, and returns the least one. parts and plain say the same in plain
// words; this is for a decision among 256 candidates in half a microsecond, where the
// processor works on four of them at a time, and in one elsewhere. What is rare in most
// fleets is found by the way, and seen to afterwards.
func (m *CostModel) score(r *Request, candidates []Candidate, costs []float64) (least float64) {
	costs = costs[:len(candidates)]
	toll := m.toll(r, candidates)
	if m.Approximate < 1 || r.Tokens > math.MaxInt32 || !(m.KVLimit >= 0) {
		return m.plain(r, candidates, costs, toll)
	}
	var s scoring
	s.begin(m, r, toll)
	for from := 0; from < len(candidates); from += scoredPart {
		to := min(from+scoredPart, len(candidates))
		s.part(candidates[from:to], costs[from:to])
		m.complete(&s, r, candidates[from:to], costs[from:to])
	}
	least = math.Float64frombits(uint64(s.least))
	if inFours {
		least = lowest(costs)
	}
	// Of all that is not a time each leaves its trace in one of these.
	if s.inFlight < 0 || s.least < 0 || least < 0 || !(math.Abs(s.costs)+math.Abs(s.weighed) < math.Inf(1)) {
		return m.plain(r, candidates, costs, toll)
	}
	// One that has so many has the bit of it, or a higher one.
	if s.inFlight >= overloadFree && m.burden(&s, candidates, costs, least) {
		return lowest(costs)
	}
	return least
}

// complete adds to the costs of a part what is special of its candidates.
func (m *CostModel) complete(s *scoring, r *Request, candidates []Candidate, costs []float64) {
	for k := range (len(candidates) + scoredBlock - 1) / scoredBlock {
		special := (s.special[k] | s.special[k]>>4) & 0x0f0f_0f0f_0f0f_0f0f
		s.special[k] = 0
		for ; special != 0; special &= special - 1 {
			bit := bits.TrailingZeros64(special)
			i := k*scoredBlock + bit/8*4 + bit%8
			c, cost := &candidates[i], costs[i]
			if cost < 0 {
				s.least = -1
			}
			if cached := c.held(r); int(c.CachedGPU) < cached {
				cost += m.load(c, cached, m.times(c), s.toll.each(c))
			}
			cost = c.shared(cost) + m.pressure(c)
			costs[i] = cost
			s.costs += cost
			s.least = min(s.least, int64(math.Float64bits(cost)))
		}
	}
}

// burden adds what requests beyond Bound cost, and reports whether one that costs least
// may have them.
func (m *CostModel) burden(s *scoring, candidates []Candidate, costs []float64, least float64) (raised bool) {
	// Nobody with less has too much.
	limit := m.Bound * s.weighed / (float64(len(candidates)-1) + m.Bound)
	step := 1
	if inFours {
		step = len(s.busiest[0])
	}
	for k := range s.busiest {
		if k*scoredBlock >= len(candidates) {
			break
		}
		for lane, most := range s.busiest[k][:step] {
			if most <= limit {
				continue
			}
			for from := k * scoredBlock; from < len(candidates); from += scoredPart {
				for i := from + lane; i < min(from+scoredBlock, len(candidates)); i += step {
					if c := &candidates[i]; c.weighed() > limit {
						raised = raised || costs[i] <= least
						costs[i] += m.overload(c, s.weighed, len(candidates))
					}
				}
			}
		}
	}
	return raised
}

// A toll is how many seconds each token of a request that is not cached costs because it
// delays those who come after: so much always, and so much more at a replica that always
// is busy. It is a value; the zero value is nothing.
type toll struct{ always, busy float64 }

// each is how much that is at the candidate.
func (t toll) each(c *Candidate) float64 { return t.always + float64(t.busy*float64(c.Busy)) }

// toll is that of the request.
func (m *CostModel) toll(r *Request, candidates []Candidate) (t toll) {
	if r.Tokens <= 0 {
		return t
	}
	// Of many, some that lie together stand for all.
	if n := len(candidates); n > mostCounted {
		first, _ := bits.Mul64(mix(r.Rand), uint64(n-mostCounted+1))
		candidates = candidates[first:][:mostCounted]
	}
	// By their bits: which is the least is hard to foretell.
	waitBits, aBits, bBits := infinite, infinite, infinite
	for i := range candidates {
		c := &candidates[i]
		waitBits = min(waitBits, int64(math.Float64bits(c.Wait)))
		aBits = min(aBits, int64(math.Float64bits(c.Speed.A)))
		bBits = min(bBits, int64(math.Float64bits(c.Speed.B)))
	}
	wait, a, b := math.Float64frombits(uint64(waitBits)), math.Float64frombits(uint64(aBits)), math.Float64frombits(uint64(bBits))
	tokens := float64(r.Tokens)
	least := max(a+b*tokens, 0) // what is not cached is the end of the prompt
	if !(least < math.Inf(1)) {
		return t
	}
	t.busy = m.OwnWorkLong * min(least*tokens, longestOwn) / longestOwn * least
	if !(wait > 0) {
		return t
	}
	// It is no number when one of them is infinite.
	if busy := wait / (wait + max(a, 0)*tokens/busyPart); busy <= 1 {
		t.always = m.OwnWorkBusy * busy * least
	} else {
		t.always = m.OwnWorkBusy * least
	}
	return t
}

// longestOwn is how many seconds a prompt takes, if each of its tokens takes what the last
// does, that delays others by as much as any: who comes later still has gone elsewhere.
const longestOwn = 1

// mostCounted is how many candidates toll looks at. Where the least of those is not the least
// of all, as may be in large fleets of several kinds, all of them cost more by as much.
const mostCounted = 16

// busyPart: when the shortest wait is such a part of the time for the prompt's tokens,
// replicas are half busy.
const busyPart = 10

// plain is score for any numbers.
func (m *CostModel) plain(r *Request, candidates []Candidate, costs []float64, t toll) (least float64) {
	sum := weighed(candidates)
	for i := range candidates {
		c := &candidates[i]
		costs[i] = math.Inf(1)
		if p := m.parts(r, c, t); p.valid() {
			costs[i] = p.sum() + m.overload(c, sum, len(candidates)) + m.pressure(c)
		}
	}
	return lowest(costs)
}

// times is how often the candidate's prefill counts, by who is there.
func (m *CostModel) times(c *Candidate) float64 {
	return m.OwnWork + m.Crowd*c.crowd()
}

// crowd is how many requests have no first token there.
func (c *Candidate) crowd() float64 { return float64(c.InFlight) - float64(c.Decoding) }

// load is how long it takes to load what the candidate has of cached tokens, but not
// on the GPU. No part costs more than to compute it, of which the cost is so many
// times the time, and so much more for each token.
func (m *CostModel) load(c *Candidate, cached int, times, each float64) float64 {
	gpu := max(int(c.CachedGPU), 0)
	cpu := max(min(int(c.CachedCPU), cached), gpu)
	part := m.counted(c)
	onGPU, onCPU, all := part*float64(gpu), part*float64(cpu), part*float64(cached)
	return c.tier(onGPU, onCPU, m.LoadCPU, times, each) + c.tier(onCPU, all, m.LoadDisk, times, each)
}

// tier is how long it takes to load the tokens from one on to another, load seconds
// for each, or to compute them, if that costs less.
func (c *Candidate) tier(from, to, load, times, each float64) float64 {
	n := to - from
	return n * min(load, max(times*(c.Speed.A+c.Speed.B*(from+n/2))+each, 0))
}

// counted is how much counts of what the candidate has cached.
func (m *CostModel) counted(c *Candidate) float64 {
	if c.Exact {
		return 1
	}
	return m.Approximate
}

// weighed is the candidate's requests, by the time that it takes for a token: so a
// slow replica is as loaded as a fast one when it has fewer of them.
func (c *Candidate) weighed() float64 { return c.Speed.A * float64(max(c.InFlight, 0)) }

// weighed is the sum of what is a number.
func weighed(candidates []Candidate) (sum float64) {
	for i := range candidates {
		if s := candidates[i].weighed(); math.Abs(s) < math.Inf(1) {
			sum += s
		}
	}
	return sum
}

// overload is what the candidate's requests beyond Bound cost. overloadFree of them
// are free, and, weighed, so many times what the others have on average as Bound
// says. sum is what all have.
func (m *CostModel) overload(c *Candidate, sum float64, candidates int) float64 {
	own := c.weighed()
	if candidates < 2 || !(own > 0 && own < math.Inf(1)) || own > sum {
		return 0
	}
	over := own - overloadFree*c.Speed.A - m.Bound*(sum-own)/float64(candidates-1)
	return m.Overload * max(over, 0) / c.Speed.A
}

// held is how much of the request's prompt the candidate has.
func (c *Candidate) held(r *Request) int { return min(int(c.Cached), max(r.Tokens, 0)) }

// parts are the terms of one candidate's cost, without overload.
type parts struct {
	wait, prefill, ownWork, load, crowd, company, share float64
}

func (m *CostModel) parts(r *Request, c *Candidate, t toll) (p parts) {
	cached := c.held(r)
	p.wait = c.Wait
	tokens, held := float64(max(r.Tokens, 0)), m.counted(c)*float64(cached)
	p.prefill = c.Speed.fill(tokens, held)
	each := t.each(c)
	p.ownWork = (m.OwnWork-1)*p.prefill + each*(tokens-held)
	if int(c.CachedGPU) < cached {
		p.load = m.load(c, cached, m.times(c), each)
	}
	p.crowd = m.Crowd * c.crowd() * p.prefill
	p.company = m.Company * float64(c.Company)
	if sum := p.wait + p.prefill + p.ownWork + p.load + p.crowd + p.company; c.Share > 0 && c.Share < 1 {
		p.share = sum/float64(c.Share) - sum
	}
	return p
}

func (p *parts) sum() float64 {
	return p.wait + p.prefill + p.ownWork + p.load + p.crowd + p.company + p.share
}

// valid reports whether it is a time.
func (p *parts) valid() bool { s := p.sum(); return s >= 0 && s < math.Inf(1) }

// AppendTerms implements Explainer: the terms as in CostModel's comment, and of a
// candidate that is excluded invalid alone.
func (m *CostModel) AppendTerms(dst []Term, r *Request, candidates []Candidate, i int) []Term {
	c := &candidates[i]
	p := m.parts(r, c, m.toll(r, candidates))
	if !p.valid() {
		return append(dst, Term{"invalid", math.Inf(1)})
	}
	return append(dst,
		Term{"wait", p.wait - float64(c.Room)},
		Term{"room", float64(c.Room)},
		Term{"prefill", p.prefill},
		Term{"own_work", p.ownWork},
		Term{"load", p.load},
		Term{"crowd", p.crowd},
		Term{"company", p.company},
		Term{"share", p.share},
		Term{"yield", m.yield(r, c)},
		Term{"leave", m.leaves(r, candidates, i)},
		Term{"overload", m.overload(c, weighed(candidates), len(candidates))},
		Term{"kv_pressure", m.pressure(c)},
	)
}

// yield is what it costs that prompts that have begun there wait longer.
func (m *CostModel) yield(r *Request, c *Candidate) float64 {
	if c.Begun <= 0 {
		return 0
	}
	fill := c.Speed.fill(float64(max(r.Tokens, 0)), m.counted(c)*float64(c.held(r)))
	if wait := min(float64(c.Begun)*fill, c.Rest); wait > 0 {
		return m.Yield * wait
	}
	return 0 // or no number, and then what it is made of excludes the candidate
}

// leave is what it costs to send the request elsewhere than to the candidate that alone
// holds the conversation which it goes on with, and which that is; nothing when there is
// none.
func (m *CostModel) leave(r *Request, candidates []Candidate) (holder int, seconds float64) {
	if r.Own <= 0 {
		return 0, 0
	}
	tokens := Count(max(r.Tokens, 0))
	most, next := int32(0), max(tokens-Count(r.Own), 0)
	see := func(i int) {
		if held := min(candidates[i].Cached, tokens); held > most {
			holder, most, next = i, held, max(next, most)
		} else {
			next = max(next, held)
		}
	}
	// Few hold anything of a conversation.
	i := 0
	for ; i+4 <= len(candidates); i += 4 {
		four := candidates[i:][:4]
		if max(four[0].Cached, four[1].Cached, four[2].Cached, four[3].Cached) > next {
			for k := range four {
				see(i + k)
			}
		}
	}
	for ; i < len(candidates); i++ {
		see(i)
	}
	if most <= next {
		return 0, 0
	}
	s := candidates[holder].Speed
	seconds = float64(most-next) * (s.A + s.B*(float64(next)+float64(most-next)/2))
	if !(seconds > 0) {
		return 0, 0
	}
	return holder, min(seconds, m.Leave)
}

// leaves is what leave is of candidate i's cost.
func (m *CostModel) leaves(r *Request, candidates []Candidate, i int) float64 {
	holder, leave := m.leave(r, candidates)
	if i == holder || candidates[i].Speed.A <= candidates[holder].Speed.A/hardly {
		return 0
	}
	return leave
}

// pressure is what it costs that requests wait for room in a KV cache that is full.
func (m *CostModel) pressure(c *Candidate) float64 {
	if c.KV > float32(m.KVLimit) && c.Queued > 0 {
		return m.KVPressure
	}
	return 0
}

// MostTTFT is the most that TTFT says: a day.
const MostTTFT = 24 * 60 * 60

// usual has the weights by which TTFT loads from lower tiers.
var usual = NewCostModel()

// TTFT is the time to first token that is expected of the candidate, in seconds,
// whatever the policy: its wait, the prefill of what is not cached and the load from
// slower tiers, and by how much that is usually off. What decoding takes of the prefill
// is in the Speed, which was learned beside it. It is between 0 and MostTTFT, which stands also for what is no
// number.
func TTFT(r *Request, c *Candidate) float64 {
	p := usual.parts(r, c, toll{})
	t := max(p.wait, 0) + p.prefill + p.load
	if t += max(c.Late, -t/2); t >= 0 && t < MostTTFT {
		return t
	}
	return MostTTFT
}
