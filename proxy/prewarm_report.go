package proxy

import (
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
)

// PrewarmReport is what there is to say of what a model's replicas compute ahead, as people
// are told it.
type PrewarmReport struct {
	Model string `json:"model"`
	// PieceMS is how long a piece takes, 0 where nothing is computed ahead.
	PieceMS float64 `json:"piece_ms"`
	// Prefixes are what prompts begin with that requests have lost by, the most first.
	Prefixes []PrewarmPrefix `json:"prefixes"`
	// Replicas says which of them compute something, or are not asked, and why.
	Replicas []PrewarmReplica `json:"replicas"`
}

// PrewarmPrefix is one prefix. Tokens is 0 as long as one request alone has lost by it.
type PrewarmPrefix struct {
	Key    string  `json:"key"`
	Tokens int     `json:"tokens"`
	Asked  float64 `json:"asked"`
	// Replicas are all, or, as long as there are no Tokens, those where something was lost.
	Replicas []PrewarmLoss `json:"replicas"`
}

// PrewarmLoss is how much was lost because a replica does not hold a prefix, how many tokens
// of it it holds now, and how long it would take to compute the others.
type PrewarmLoss struct {
	Replica    string  `json:"replica"`
	LostMS     float64 `json:"lost_ms"`
	HeldTokens int     `json:"held_tokens"`
	ComputeMS  Number  `json:"compute_ms"`
}

// PrewarmReplica is how a replica stands to what is computed ahead. State is "ready",
// "computes", "pauses" after it has failed, "refuses", or "left out", and then Why is why.
type PrewarmReplica struct {
	Replica string `json:"replica"`
	State   string `json:"state"`
	Why     string `json:"why,omitempty"`
	// PausesMS is for how long it is not asked.
	PausesMS float64 `json:"pauses_ms,omitempty"`
}

// Prewarm tells what a model's replicas compute ahead. It may be called at any time.
func (s *Server) Prewarm(m *Model, now time.Time) PrewarmReport {
	out := PrewarmReport{Model: m.Name, PieceMS: float64(milliseconds(m.Prewarming.Length)), Prefixes: []PrewarmPrefix{}, Replicas: []PrewarmReplica{}}
	known := s.cache.Load()
	var look index.Lookup
	if known != nil {
		known.index.Look(&look, &index.Prompt{})
	}
	for _, r := range m.Replicas {
		row := PrewarmReplica{Replica: r.ID, State: "ready"}
		pause := time.Unix(0, r.ahead.until.Load()).Sub(now)
		switch {
		case r.ahead.busy.Load():
			row.State = "computes"
		case r.ahead.refuses.Load() || r.takesWhole.Load():
			row.State = "refuses"
		case pause > 0:
			row.State, row.PausesMS = "pauses", float64(pause.Milliseconds())
		default:
			if row.Why = m.leavesOut(r, &look); row.Why != "" {
				row.State = "left out"
			}
		}
		out.Replicas = append(out.Replicas, row)
	}
	if m.State == nil {
		return out
	}
	for _, x := range m.State.prefixes.All(now) {
		p := PrewarmPrefix{Key: strconv.FormatUint(x.Key, 16), Tokens: len(x.IDs), Asked: math.Round(x.Asked*100) / 100, Replicas: []PrewarmLoss{}}
		looked := 0 // for blocks of that size
		for _, r := range m.Replicas {
			i := slices.IndexFunc(x.At, func(l policy.LostAt) bool { return l.Replica == r.key })
			if i < 0 && x.IDs == nil {
				continue
			}
			row := PrewarmLoss{Replica: r.ID}
			if i >= 0 {
				row.LostMS, row.HeldTokens = float64(milliseconds(x.At[i].Seconds)), x.At[i].Held
			}
			if block := int(r.block.Load()); block > 0 && x.IDs != nil && known != nil {
				if block != looked {
					prompt := prefixPrompt(m, x.IDs, block)
					known.index.Look(&look, &prompt)
					looked = block
				}
				row.HeldTokens = int(look.Held(r.Slot)[index.Tiers-1]) * block
			}
			if lacks := len(x.IDs) - row.HeldTokens; lacks > 0 {
				speed := r.standing.Calibration.Speed()
				row.ComputeMS = milliseconds(speed.Time(policy.Prefill(lacks, row.HeldTokens)))
			}
			p.Replicas = append(p.Replicas, row)
		}
		out.Prefixes = append(out.Prefixes, p)
	}
	return out
}

// leavesOut is why nothing is asked of a replica, "" where nothing is known against it. look
// was asked just now.
func (m *Model) leavesOut(r *Replica, look *index.Lookup) string {
	switch {
	case !m.Prewarming.On():
		return "routing.prewarm, or the model's, is off, or the policy is not cost_model"
	case !look.Exact(r.Slot):
		return "its cache is not known exactly; /debug/index says why"
	case r.block.Load() <= 0:
		return "the size of its blocks is not known"
	case r.failures.Load() > 0:
		return "it has failed"
	case r.allChats.Load():
		return "it is sent whole chats"
	case r.gate.lineless():
		return "it has max_concurrency and no line"
	}
	return ""
}
