package simulator

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// process is what an engine's restart makes anew: its ranks, with their caches
// and publishers, and its metrics. The server has one at a time.
type process struct {
	s       *Server
	began   time.Time
	metrics *metrics
	ranks   []*rank
	// runner is Ollama's, nil of others.
	runner *ollamaRunner
	// throttled is by how much the engines are; 1 is not at all. The server's
	// mutex guards it.
	throttled float64
	// turn is the rank that the next request without a wish is offered first.
	// The server's mutex guards it.
	turn int

	// cancel ends the ranks' goroutines, which ran counts.
	cancel context.CancelFunc
	ran    sync.WaitGroup
}

// rank is one data-parallel engine of a process.
type rank struct {
	number int
	// publisher is nil when the engine tells nothing.
	publisher *publisher

	// The server's mutex guards the engine, the plans of the sequences in it,
	// when its goroutine looks at it again, and memory for Engine.Changed.
	engine  *Engine
	until   time.Duration
	changed []*Sequence
	// sequences have entered the engine, with prompts of so many tokens, and
	// generated are the tokens of those that have left it; the same mutex guards
	// them.
	sequences, prompted, generated int
	// rounds is how many rounds were over when the sequences' watches were last set.
	rounds int64
	// kick holds a token when the goroutine must look earlier.
	kick chan struct{}
}

// newProcess starts a process: its ranks listen when it returns.
func newProcess(s *Server) (*process, error) {
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{s: s, began: time.Now(), cancel: cancel, throttled: 1}
	for i := range s.cfg.DataParallelSize {
		r := &rank{number: i, engine: s.cfg.newEngine(), until: never, kick: make(chan struct{}, 1)}
		p.ranks = append(p.ranks, r)
		if s.cfg.KVEvents.Endpoint == "" {
			continue
		}
		var err error
		if r.publisher, err = newPublisher(&s.cfg, i, s.faults.Load()); err != nil {
			p.close()
			return nil, err
		}
	}
	p.metrics = newMetrics(p)
	if s.cfg.Engine == "ollama" {
		p.runner = newOllamaRunner(&s.cfg)
	}
	for _, r := range p.ranks {
		p.settle(r, s.now())
		p.ran.Go(func() { p.run(ctx, r) })
	}
	return p, nil
}

// throttleLocked makes all that the engines do from now on take by times as
// long as it takes else. The server's mutex is held.
func (p *process) throttleLocked(by float64) {
	if p.throttled == by {
		return
	}
	p.throttled = by
	now := p.s.now()
	for _, r := range p.ranks {
		r.engine.Slow(by, now)
		r.engine.Advance(now)
		p.settle(r, now)
	}
}

// close ends the goroutines and the publishers, and waits for them.
func (p *process) close() {
	p.cancel()
	p.ran.Wait()
	for _, r := range p.ranks {
		if r.publisher != nil {
			r.publisher.close()
		}
	}
}

// run lets the time of one engine pass.
func (p *process) run(ctx context.Context, r *rank) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		p.s.mu.Lock()
		now := p.s.now()
		r.engine.Advance(now)
		p.settle(r, now)
		wait := time.Hour
		r.until = never
		if next, ok := r.next(); ok {
			r.until, wait = next, max(0, next-now)
		}
		p.s.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-r.kick:
		case <-ctx.Done():
			return
		}
	}
}

// settle passes on what has happened in an engine. The server's mutex is held,
// unless nobody else knows the process yet.
func (p *process) settle(r *rank, now time.Duration) {
	r.changed = r.engine.Changed(r.changed[:0])
	e := r.engine
	for _, s := range r.changed {
		s.watch.see(e.Made(s), true)
	}
	if n := e.rounds(); n != r.rounds || e.apart {
		r.rounds = n
		for _, s := range e.running {
			if s.state == Decoding {
				s.watch.see(e.Made(s), false)
			}
		}
	}
	clear(r.changed)
	if changes := r.engine.Told(); len(changes) > 0 && r.publisher != nil {
		r.publisher.publish(changes, p.s.began.Add(now))
	}
	if next, ok := r.next(); ok && next < r.until {
		r.until = next
		select {
		case r.kick <- struct{}{}:
		default:
		}
	}
}

// next returns when the engine is to be looked at again, be it for a token, and false
// when there is nothing to see before another call. The server's mutex is held.
func (r *rank) next() (time.Duration, bool) {
	next, ok := r.engine.Next()
	if token, runs := r.engine.Token(); runs && (!ok || token < next) {
		next, ok = token, true
	}
	return next, ok
}

// rankHeader names the rank that is to serve a request.
const rankHeader = "X-data-parallel-rank"

// pickLocked returns the rank that is to serve a request: the one it asks for,
// else that with the fewest requests. The server's mutex is held.
func (p *process) pickLocked(h http.Header, now time.Duration) (*rank, error) {
	// What is no number is no wish.
	if n, err := strconv.Atoi(strings.TrimSpace(h.Get(rankHeader))); err == nil {
		if n < 0 || n >= len(p.ranks) {
			return nil, badParameter("", "data_parallel_rank %d is out of range [0, %d).", n, len(p.ranks))
		}
		return p.ranks[n], nil
	}
	var best *rank
	least := 0
	for i := range p.ranks {
		r := p.ranks[(p.turn+i)%len(p.ranks)]
		l := r.engine.Load(now)
		if n := l.Running + l.Waiting; best == nil || n < least {
			best, least = r, n
		}
	}
	p.turn = (best.number + 1) % len(p.ranks)
	return best, nil
}

// Restart makes the engine begin anew, as a process that has died and is
// started again does: all connections are reset, the cache is empty, counters
// are at 0, and events are numbered from 0 on. An error means that a publisher
// could not listen again; then nothing is published.
func (s *Server) Restart() error {
	s.restart.Lock()
	defer s.restart.Unlock()
	s.mu.Lock()
	old := s.process
	s.mu.Unlock()
	for _, r := range old.ranks {
		if r.publisher != nil {
			r.publisher.close()
		}
	}
	fresh, err := newProcess(s)
	if err != nil {
		return fmt.Errorf("simulated engine: cannot restart: %w", err)
	}
	s.mu.Lock()
	s.process = fresh
	s.process.throttleLocked(s.faults.Load().throttle())
	s.mu.Unlock()
	s.connections.Range(func(c, _ any) bool {
		c.(*conn).reset()
		return true
	})
	old.close()
	return nil
}

// postRestart serves POST /sim/restart. The query's refuse_ms is for how long
// the server does not listen afterwards.
func (s *Server) postRestart(w http.ResponseWriter, r *http.Request) {
	refuse := 0
	if text := r.URL.Query().Get("refuse_ms"); text != "" {
		var err error
		if refuse, err = strconv.Atoi(text); err != nil || refuse < 0 || refuse > int(time.Hour/time.Millisecond) {
			writeError(w, badParameter("refuse_ms", "refuse_ms must be between 0 and one hour, got %.20q", text))
			return
		}
	}
	s.listener.refuse(time.Duration(refuse) * time.Millisecond)
	// All connections but the caller's are reset; that is closed in order.
	s.connections.Delete(connOf(r.Context()))
	w.Header().Set("Connection", "close")
	if err := s.Restart(); err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, []byte("{}"))
}

// current returns the process that serves.
func (s *Server) current() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process
}

// resetCache serves POST /reset_prefix_cache, which vLLM has in its development
// mode only.
func (s *Server) resetCache(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"success":%v}`, s.reset()))
}

// flushCache serves SGLang's POST /flush_cache.
func (s *Server) flushCache(w http.ResponseWriter, _ *http.Request) {
	if !s.reset() {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	_, _ = w.Write([]byte("Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"))
}

// reset empties the caches of all ranks, and reports whether all of them are
// empty now.
func (s *Server) reset() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, all := s.now(), true
	for _, r := range s.process.ranks {
		r.engine.Advance(now)
		if l := r.engine.Load(now); l.Running+l.Waiting > 0 && s.cfg.sglang() || !r.engine.Reset() {
			all = false
		}
		s.process.settle(r, now)
	}
	return all
}

// serverInfo serves SGLang's GET /server_info.
func (s *Server) serverInfo(w http.ResponseWriter, _ *http.Request) {
	type events struct {
		Publisher  string `json:"publisher"`
		Host       string `json:"endpoint_host"`
		Port       int    `json:"endpoint_port_base"`
		ReplayPort int    `json:"replay_endpoint_port_base,omitzero"`
		Topic      string `json:"topic"`
		BlockSize  int    `json:"block_size"`
		Ranks      int    `json:"dp_size"`
	}
	info := struct {
		Path    string  `json:"model_path"`
		Model   string  `json:"served_model_name"`
		Length  int     `json:"context_length"`
		Page    int     `json:"page_size"`
		Ranks   int     `json:"dp_size"`
		Tokens  int     `json:"max_total_num_tokens"`
		Running int     `json:"max_running_requests"`
		NoRadix bool    `json:"disable_radix_cache"`
		Version string  `json:"version"`
		Events  *events `json:"kv_events"`
	}{s.cfg.ServedModelName[0], s.cfg.ServedModelName[0], s.cfg.MaxModelLen, s.cfg.BlockSize, s.cfg.DataParallelSize,
		s.cfg.NumGPUBlocks * s.cfg.BlockSize, s.cfg.MaxNumSeqs, s.cfg.NoEnablePrefixCaching, sglangVersion, nil}
	if p := s.current().ranks[0].publisher; p != nil {
		told := p.source()
		base, port, _ := cutLast(told.Endpoint, ":")
		info.Events = &events{Publisher: "zmq", Host: base[len("tcp://"):], Topic: told.Topic, BlockSize: s.cfg.BlockSize, Ranks: s.cfg.DataParallelSize}
		info.Events.Port, _ = strconv.Atoi(port)
		if told.Replay != nil {
			_, port, _ = cutLast(*told.Replay, ":")
			info.Events.ReplayPort, _ = strconv.Atoi(port)
		}
	}
	writeJSON(w, http.StatusOK, appendJSON(nil, info))
}
