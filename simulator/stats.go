package simulator

import (
	"net/http"
	"time"
)

// Stats are what a server has counted and has to do, in the same words whatever
// its engine is. GET /sim/stats shows them. The counts of requests and
// connections are of the server, the others of the process, and begin anew when
// it is restarted.
type Stats struct {
	Engine string `json:"engine"`
	// UptimeS is how many seconds the process runs.
	UptimeS float64 `json:"uptime_s"`
	// Running, Finished, Aborted and Accepted are the Server's.
	Running  int `json:"running"`
	Finished int `json:"finished"`
	Aborted  int `json:"aborted"`
	Accepted int `json:"accepted"`
	// Throttled is by how much the engines are; 1 is not at all.
	Throttled float64     `json:"throttled"`
	Ranks     []RankStats `json:"ranks"`
}

// RankStats are those of one data-parallel rank.
type RankStats struct {
	// Running and Waiting are sequences, Tokens those that the running ones have,
	// WaitingTokens those of the prompts that wait.
	Running       int `json:"running"`
	Waiting       int `json:"waiting"`
	Tokens        int `json:"tokens"`
	WaitingTokens int `json:"waiting_tokens"`
	// Sequences, PromptTokens and OutputTokens count what has entered the engine,
	// their prompts, and what was generated for those that have left it.
	Sequences    int `json:"sequences"`
	PromptTokens int `json:"prompt_tokens"`
	OutputTokens int `json:"output_tokens"`
	// QueriedTokens are those that were looked for in the cache, HitTokens those
	// found there, Preempted how often a sequence was.
	QueriedTokens int `json:"queried_tokens"`
	HitTokens     int `json:"hit_tokens"`
	Preempted     int `json:"preempted"`
	// Blocks are those of the cache that sequences have, of BlocksTotal with
	// BlockSize tokens each.
	Blocks      int `json:"blocks"`
	BlocksTotal int `json:"blocks_total"`
	BlockSize   int `json:"block_size"`
}

// Stats returns what the server has counted: all of it is of one instant. It may
// be called from any goroutine.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, now := s.process, s.now()
	out := Stats{Engine: s.cfg.Engine, UptimeS: time.Since(p.began).Seconds(), Throttled: p.throttled,
		Running: s.Running(), Finished: s.Finished(), Aborted: s.Aborted(), Accepted: s.Accepted()}
	for _, r := range p.ranks {
		l := r.engine.Load(now)
		p.settle(r, now)
		counts := r.engine.Counts()
		one := RankStats{Running: l.Running, Waiting: l.Waiting, Tokens: l.Tokens, WaitingTokens: l.WaitingTokens,
			Sequences: r.sequences, PromptTokens: r.prompted, OutputTokens: r.generated,
			QueriedTokens: counts.Queried, HitTokens: counts.Hit, Preempted: counts.Preempted}
		one.Blocks, one.BlocksTotal = r.engine.Usage()
		if r.engine.cache != nil {
			one.BlockSize, _ = r.engine.cache.size()
		}
		out.Ranks = append(out.Ranks, one)
	}
	return out
}

// getStats serves GET /sim/stats.
func (s *Server) getStats(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, appendJSON(nil, s.Stats()))
}
