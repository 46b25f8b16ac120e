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
	list   []llamaSlot
	tasks  []*llamaTask // not over, in the order of their arrival
	ids    int          // the last task's
	// counts are of all time, bucket since the page of metrics was last looked at.
	counts, bucket  llamaCounts
	longest         int
	decodes, busies int
}

// llamaSlot is one slot. What it shows is of the task that it has, or had last.
type llamaSlot struct {
	task *llamaTask
	used time.Duration // when its last task left
	// held are the tokens whose computation it keeps.
	held []uint32
}

// llamaTask is one sequence of a request.
type llamaTask struct {
	id    int
	seq   *Sequence
	d     *llamaDialect
	pools bool
	slot  int // -1 while it is deferred
	// counted: its prompt is. over: it has left its slot, with so many tokens.
	counted, over bool
	tokens        int
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
	rm := &rankMetrics{slots: &llamaSlots{engine: r.engine, list: make([]llamaSlot, m.p.s.cfg.MaxNumSeqs), ids: -1}}
	rm.counters("", nil)
	rm.taken = rm.slots.arrived
	rm.done = func(x *exchange, c *choice, _ bool) { rm.slots.departed(c, x.s.now()) }
	return rm
}

// arrived takes in the sequences of an answer.
func (s *llamaSlots) arrived(a *answer) {
	d, ok := a.req.dialect.(*llamaDialect)
	if !ok {
		return // a raw body, or nothing that the engine has a part in
	}
	for i := range a.choices {
		s.ids++
		a.choices[i].seq.seat = -1
		s.tasks = append(s.tasks, &llamaTask{id: s.ids, seq: &a.choices[i].seq, d: d, slot: -1, pools: a.req.pooled != nil})
	}
}

// follow gives slots to the sequences that have begun, and counts the prompts that
// are computed.
func (s *llamaSlots) follow(now time.Duration) {
	for _, t := range s.tasks {
		if t.over {
			continue
		}
		if t.slot < 0 && t.seq.State() != Waiting {
			if t.slot = s.free(t.d.slot); t.slot < 0 {
				continue
			}
			t.seq.seat = t.slot
			s.list[t.slot].task = t
			s.add(llamaCounts{cached: t.seq.Cached})
		}
		if state := t.seq.State(); !t.counted && t.slot >= 0 && (state == Decoding || state == Ended) {
			t.counted = true
			s.add(llamaCounts{prompt: t.seq.Uncached, promptTime: t.seq.First - t.seq.Start})
			s.decodes += ceilDiv(t.seq.Uncached, llamaBatch)
			s.busies += ceilDiv(t.seq.Uncached, llamaBatch) * s.busy()
		}
		if t.seq.State() == Ended {
			s.leave(t, t.seq.Output, now)
		}
	}
}

func (s *llamaSlots) add(c llamaCounts) {
	s.counts.add(c)
	s.bucket.add(c)
}

// free returns the wanted slot, if it is free, or else the one that was not used for
// the longest time, or -1.
func (s *llamaSlots) free(wanted int) int {
	best := -1
	for i := range s.list {
		switch slot := &s.list[i]; {
		case slot.busy():
		case i == wanted:
			return i
		case best < 0 || slot.used < s.list[best].used:
			best = i
		}
	}
	return best
}

func (s *llamaSlot) busy() bool { return s.task != nil && !s.task.over }

func (s *llamaSlots) busy() int {
	n := 0
	for i := range s.list {
		if s.list[i].busy() {
			n++
		}
	}
	return n
}

// leave takes a task that has generated so many tokens out of its slot.
func (s *llamaSlots) leave(t *llamaTask, made int, now time.Duration) {
	t.over, t.tokens = true, made
	if t.slot < 0 {
		return
	}
	slot := &s.list[t.slot]
	slot.used = now
	if made > 0 && !t.pools {
		s.add(llamaCounts{predicted: made, predictedTime: max(0, min(now, t.seq.End)-t.seq.First)})
		s.decodes += made - 1
		s.busies += (made - 1) * (s.busy() + 1)
	}
	slot.held = t.seq.appendTokens(slot.held[:0], 0, min(len(t.seq.Prompt)+max(0, made-1), len(t.seq.Prompt)+len(t.seq.Said)))
	s.longest = max(s.longest, len(slot.held))
}

// departed takes a sequence out.
func (s *llamaSlots) departed(c *choice, now time.Duration) {
	s.follow(now)
	i := slices.IndexFunc(s.tasks, func(t *llamaTask) bool { return t.seq == &c.seq })
	if i < 0 {
		return
	}
	t := s.tasks[i]
	s.tasks = slices.Delete(s.tasks, i, i+1)
	if !t.over {
		s.leave(t, c.sent, now)
	}
	// The sequence is the exchange's, which ends.
	t.seq = &Sequence{Uncached: t.seq.Uncached, Cached: t.seq.Cached, Output: t.seq.Output, state: Ended}
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
func (s *Server) llamaNow(look func(slots *llamaSlots, now time.Duration)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.process.ranks[0]
	now := s.now()
	r.engine.Advance(now)
	slots := s.process.metrics.slotsOf(r)
	slots.follow(now)
	s.process.settle(r, now)
	look(slots, now)
}

// llamaSlots serves GET /slots.
func (s *Server) llamaSlots(w http.ResponseWriter, r *http.Request) {
	if s.cfg.LlamaCPP.NoSlots {
		s.refuse(w, r, llamaUnsupported("This server does not support slots endpoint. Start it with `--slots`"))
		return
	}
	out, idle := []byte{'['}, 0
	s.llamaNow(func(slots *llamaSlots, _ time.Duration) {
		for i := range slots.list {
			if i > 0 {
				out = append(out, ',')
			}
			slot := &slots.list[i]
			if !slot.busy() {
				idle++
			}
			out = slot.append(out, i, s.cfg.MaxModelLen, slots.engine)
		}
	})
	if idle == 0 && r.URL.Query().Get("fail_on_no_slot") != "" {
		s.refuse(w, r, &apiError{status: http.StatusServiceUnavailable, kind: "unavailable_error", message: "no slot available"})
		return
	}
	writeJSON(w, http.StatusOK, append(out, ']'))
}

// append appends what /slots shows of a slot.
func (s *llamaSlot) append(dst []byte, id, context int, e *Engine) []byte {
	dst = fmt.Appendf(dst, `{"id":%d,"n_ctx":%d,"speculative":false,"is_processing":%v`, id, context, s.busy())
	if t := s.task; t != nil {
		// What is computed of the prompt and the answer. A task that is over has
		// nothing to tell of itself any more.
		processed, cached, made, held := 0, 0, 0, len(s.held)
		if !t.over {
			made, cached = e.Made(t.seq), t.seq.Cached
			if t.seq.State() != Prefilling {
				processed = t.seq.Uncached
			}
			held = cached + processed + max(0, made-1)
		}
		remain := -1
		if t.d.limit >= 0 && !t.pools && !t.over {
			remain = t.d.limit - made
		}
		dst = fmt.Appendf(dst, `,"id_task":%d,"n_prompt_tokens":%d,"n_prompt_tokens_processed":%d,"n_prompt_tokens_cache":%d,"params":`,
			t.id, held, processed, cached)
		dst = appendLlamaSettings(dst, t.d, true)
		dst = fmt.Appendf(dst, `,"next_token":[{"has_next_token":%v,"has_new_line":false,"n_remain":%d,"n_decoded":%d}]`, !t.over, remain, made)
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
	s.llamaNow(func(l *llamaSlots, _ time.Duration) {
		add("counter", "prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens.", float64(l.counts.prompt))
		add("counter", "prompt_tokens_cached_total", "Number of prompt tokens taken from the cache.", float64(l.counts.cached))
		add("counter", "prompt_seconds_total", "Time spent on prompts.", l.counts.promptTime.Seconds())
		add("counter", "tokens_predicted_total", "Number of tokens generated.", float64(l.counts.predicted))
		add("counter", "tokens_predicted_seconds_total", "Time spent on generating tokens.", l.counts.predictedTime.Seconds())
		add("counter", "n_decode_total", "Number of batches computed.", float64(l.decodes))
		add("counter", "n_tokens_max", "Tokens of the longest sequence.", float64(l.longest))
		add("counter", "spec_decode_num_draft_tokens_total", "Number of draft tokens.", 0)
		add("counter", "spec_decode_num_accepted_tokens_total", "Number of draft tokens accepted.", 0)
		add("counter", "spec_decode_num_drafts_total", "Number of drafts.", 0)
		add("gauge", "prompt_tokens_seconds", "Prompt tokens a second since the last look.", rate(l.bucket.prompt, l.bucket.promptTime))
		add("gauge", "predicted_tokens_seconds", "Generated tokens a second since the last look.", rate(l.bucket.predicted, l.bucket.predictedTime))
		busy := l.busy()
		if s.cfg.ZeroLatency {
			busy = min(s.Running(), len(l.list))
		}
		add("gauge", "requests_processing", "Number of requests that have a slot.", float64(busy))
		add("gauge", "requests_deferred", "Number of requests that wait for a slot.", float64(l.deferred()))
		add("gauge", "n_busy_slots_per_decode", "Mean number of busy slots of a batch.", float64(l.busies)/float64(max(l.decodes, 1)))
		l.bucket = llamaCounts{}
	})
	w.Header().Set("Process-Start-Time-Unix", strconv.FormatInt(began.UnixMicro(), 10))
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(out)
}
