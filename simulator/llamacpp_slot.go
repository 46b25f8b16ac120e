package simulator

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// llamaSlots are the slots of llama.cpp: each has one sequence at a time, and those
// for which there is none are deferred. The server's mutex guards it; it lives as
// long as the process.
type llamaSlots struct {
	engine *Engine
	// last are the tasks that the slots have, or had last.
	last  []*llamaTask
	tasks []*llamaTask // not over, in the order of their arrival
	ids   int          // the last task's
	// counts are of all time, bucket since the page of metrics was last looked at.
	counts, bucket llamaCounts
	longest        int
	// busy counts a batch as often as there were slots in it.
	busy int
}

// llamaTask is one sequence of a request.
type llamaTask struct {
	id    int
	seq   *Sequence
	d     *llamaDialect
	pools bool
	slot  int // -1 while it is deferred
	// counted: its prompt is. over: it has left its slot.
	counted, over bool
}

// llamaCounts are what the metrics count of prompts and answers.
type llamaCounts struct {
	prompt, cached, predicted int
	promptTime, predictedTime time.Duration
}

func (c *llamaCounts) add(d llamaCounts) {
	c.prompt += d.prompt
	c.cached += d.cached
	c.predicted += d.predicted
	c.promptTime += d.promptTime
	c.predictedTime += d.predictedTime
}

// llamacpp makes what the page of metrics shows.
func (m *metrics) llamacpp(r *rank) *rankMetrics {
	rm := &rankMetrics{slots: &llamaSlots{engine: r.engine, last: make([]*llamaTask, m.p.s.cfg.MaxNumSeqs), ids: -1}}
	rm.counters("", nil)
	rm.taken = rm.slots.arrived
	rm.done = func(x *exchange, c *choice, _ bool) { rm.slots.departed(c, x.s.now()) }
	return rm
}

// arrived takes in the sequences of an answer.
func (s *llamaSlots) arrived(a *answer) {
	d, ok := a.req.dialect.(*llamaDialect)
	if !ok {
		return // nothing that the engine has a part in
	}
	for i := range a.choices {
		s.ids++
		s.tasks = append(s.tasks, &llamaTask{id: s.ids, seq: &a.choices[i].seq, d: d, slot: -1, pools: a.req.pooled != nil})
	}
}

// follow notes which sequences have slots, and counts the prompts that are computed.
func (s *llamaSlots) follow(now time.Duration) {
	for _, t := range s.tasks {
		if t.over {
			continue
		}
		state := t.seq.State()
		if t.slot < 0 && (state == Prefilling || state == Decoding || state == Ended && t.seq.Start+t.seq.First > 0) {
			t.slot = t.seq.slot
			s.last[t.slot] = t
			s.add(llamaCounts{cached: t.seq.Cached})
		}
		if !t.counted && t.slot >= 0 && (state == Decoding || state == Ended && s.engine.Made(t.seq) > 0) {
			t.counted = true
			s.add(llamaCounts{prompt: t.seq.Uncached, promptTime: t.seq.First - t.seq.Start})
		}
		if state == Ended {
			s.leave(t, now)
		}
	}
}

func (s *llamaSlots) add(c llamaCounts) {
	s.counts.add(c)
	s.bucket.add(c)
}

// leave takes a task that is over out of its slot.
func (s *llamaSlots) leave(t *llamaTask, now time.Duration) {
	t.over = true
	made := s.engine.Made(t.seq)
	if t.slot < 0 || made == 0 {
		return
	}
	s.busy += ceilDiv(t.seq.Uncached, llamaBatch) + made - 1
	s.longest = max(s.longest, t.seq.prompt()+made-1)
	if !t.pools {
		s.add(llamaCounts{predicted: made, predictedTime: max(0, min(now, t.seq.End)-t.seq.First)})
	}
}

// departed takes a sequence out.
func (s *llamaSlots) departed(c *choice, now time.Duration) {
	s.follow(now)
	i := slices.IndexFunc(s.tasks, func(t *llamaTask) bool { return t.seq == &c.seq })
	if i < 0 {
		return
	}
	// The sequence is the exchange's, which ends.
	s.tasks[i].seq = nil
	s.tasks = slices.Delete(s.tasks, i, i+1)
}

// processing is how many slots have a task.
func (s *llamaSlots) processing() int {
	n := 0
	for _, t := range s.last {
		if t != nil && !t.over {
			n++
		}
	}
	return n
}

// deferred is how many wait for a slot.
func (s *llamaSlots) deferred() int {
	n := 0
	for _, t := range s.tasks {
		if t.slot < 0 && !t.over {
			n++
		}
	}
	return n
}

// llamaNow runs look with the slots of the process that serves, followed up to now.
func (s *Server) llamaNow(look func(slots *llamaSlots)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.process.ranks[0]
	now := s.now()
	r.engine.Advance(now)
	slots := s.process.metrics.slotsOf(r)
	slots.follow(now)
	s.process.settle(r, now)
	look(slots)
}

// llamaSlots serves GET /slots.
func (s *Server) llamaSlots(w http.ResponseWriter, r *http.Request) {
	if s.cfg.LlamaCPP.NoSlots {
		s.refuse(w, r, llamaUnsupported("This server does not support slots endpoint. Start it with `--slots`"))
		return
	}
	out, idle := []byte{'['}, 0
	s.llamaNow(func(slots *llamaSlots) {
		for i, t := range slots.last {
			if i > 0 {
				out = append(out, ',')
			}
			if t == nil || t.over {
				idle++
			}
			out = slots.append(out, i, s.cfg.MaxModelLen)
		}
	})
	if idle == 0 && r.URL.Query().Get("fail_on_no_slot") != "" {
		s.refuse(w, r, &apiError{status: http.StatusServiceUnavailable, kind: "unavailable_error", message: "no slot available"})
		return
	}
	writeJSON(w, http.StatusOK, append(out, ']'))
}

// append appends what /slots shows of a slot.
func (s *llamaSlots) append(dst []byte, id, context int) []byte {
	t := s.last[id]
	busy := t != nil && !t.over
	dst = fmt.Appendf(dst, `{"id":%d,"n_ctx":%d,"speculative":false,"is_processing":%v`, id, context, busy)
	if t != nil {
		// What is computed of the prompt and the answer. A task that is over has
		// nothing to tell of itself any more.
		processed, cached, made, held, remain := 0, 0, 0, 0, -1
		if cache, ok := s.engine.cache.(*slotCache); ok {
			held = len(cache.slots[id].tokens)
		}
		if busy {
			made, cached = s.engine.Made(t.seq), t.seq.Cached
			if t.seq.State() != Prefilling {
				processed = t.seq.Uncached
			}
			held = cached + processed + max(0, made-1)
			if t.d.limit >= 0 && !t.pools {
				remain = t.d.limit - made
			}
		}
		dst = fmt.Appendf(dst, `,"id_task":%d,"n_prompt_tokens":%d,"n_prompt_tokens_processed":%d,"n_prompt_tokens_cache":%d,"params":`,
			t.id, held, processed, cached)
		dst = appendLlamaSettings(dst, t.d, true)
		dst = fmt.Appendf(dst, `,"next_token":[{"has_next_token":%v,"has_new_line":false,"n_remain":%d,"n_decoded":%d}]`, busy, remain, made)
	}
	return append(dst, '}')
}

// llamaMetrics serves GET /metrics.
func (s *Server) llamaMetrics(w http.ResponseWriter, r *http.Request) {
	if !s.cfg.LlamaCPP.Metrics {
		s.refuse(w, r, llamaUnsupported("This server does not support metrics endpoint. Start it with `--metrics`"))
		return
	}
	var out []byte
	add := func(kind, name, help string, value float64) {
		out = fmt.Appendf(out, "# HELP llamacpp:%s %s\n# TYPE llamacpp:%[1]s %[3]s\nllamacpp:%[1]s %[4]s\n", name, help, kind, strconv.FormatFloat(value, 'g', 6, 64))
	}
	rate := func(n int, d time.Duration) float64 {
		if d <= 0 {
			return 0
		}
		return float64(n) / d.Seconds()
	}
	began := s.current().began
	s.llamaNow(func(l *llamaSlots) {
		add("counter", "prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens.", float64(l.counts.prompt))
		add("counter", "prompt_tokens_cached_total", "Number of prompt tokens taken from the cache.", float64(l.counts.cached))
		add("counter", "prompt_seconds_total", "Time spent on prompts.", l.counts.promptTime.Seconds())
		add("counter", "tokens_predicted_total", "Number of tokens generated.", float64(l.counts.predicted))
		add("counter", "tokens_predicted_seconds_total", "Time spent on generating tokens.", l.counts.predictedTime.Seconds())
		add("counter", "n_decode_total", "Number of batches computed.", float64(l.engine.Counts().Steps))
		add("counter", "n_tokens_max", "Tokens of the longest sequence.", float64(l.longest))
		add("counter", "spec_decode_num_draft_tokens_total", "Number of draft tokens.", 0)
		add("counter", "spec_decode_num_accepted_tokens_total", "Number of draft tokens accepted.", 0)
		add("counter", "spec_decode_num_drafts_total", "Number of drafts.", 0)
		add("gauge", "prompt_tokens_seconds", "Prompt tokens a second since the last look.", rate(l.bucket.prompt, l.bucket.promptTime))
		add("gauge", "predicted_tokens_seconds", "Generated tokens a second since the last look.", rate(l.bucket.predicted, l.bucket.predictedTime))
		busy := l.processing()
		if s.cfg.ZeroLatency {
			busy = min(s.Running(), len(l.last))
		}
		add("gauge", "requests_processing", "Number of requests that have a slot.", float64(busy))
		add("gauge", "requests_deferred", "Number of requests that wait for a slot.", float64(l.deferred()))
		add("gauge", "n_busy_slots_per_decode", "Mean number of busy slots of a batch.", float64(l.busy)/float64(max(l.engine.Counts().Steps, 1)))
		l.bucket = llamaCounts{}
	})
	w.Header().Set("Process-Start-Time-Unix", strconv.FormatInt(began.UnixMicro(), 10))
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(out)
}
