package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"
)

// harms are what is done to an engine. breaks: answers may break off; all
// others have to be whole.
var harms = []struct {
	name   string
	breaks bool
	do     func(h *harm)
}{
	{"killed", true, (*harm).kill},
	{"hung", false, (*harm).hang},
	{"flapping", true, (*harm).flap},
	{"hung and killed", true, (*harm).hangAndKill},
	{"late", false, func(h *harm) { h.faults(`{"head_delay_us":400000}`, time.Second, 4*time.Second) }},
	{"slow", false, func(h *harm) { h.faults(`{"slow":10}`, time.Second, 4*time.Second) }},
	{"unavailable", false, func(h *harm) {
		h.faults(fmt.Sprintf(`{"status":%d}`, 502+h.rng.IntN(3)), time.Second, 3*time.Second)
	}},
	{"unavailable at times", false, func(h *harm) {
		for range 10 {
			h.faults(fmt.Sprintf(`{"status":503,"fail_requests":%d}`, 1+h.rng.IntN(4)), 50*time.Millisecond, 400*time.Millisecond)
		}
	}},
	{"closing", false, func(h *harm) { h.faults(`{"close_before_head":"fin"}`, time.Second, 3*time.Second) }},
	{"resetting", false, func(h *harm) { h.faults(`{"close_before_head":"rst"}`, time.Second, 3*time.Second) }},
	{"late and resetting", false, func(h *harm) {
		h.faults(`{"head_delay_us":200000,"close_before_head":"rst"}`, time.Second, 3*time.Second)
	}},
	{"talking nonsense", false, func(h *harm) { h.faults(`{"garbage":true}`, time.Second, 3*time.Second) }},
	{"mute", false, (*harm).mute},
	{"ill", false, func(h *harm) { h.faults(`{"health_status":503}`, 2*time.Second, 5*time.Second) }},
	{"silent about its health", false, func(h *harm) { h.faults(`{"health_hang":true}`, 2*time.Second, 6*time.Second) }},
	{"refusing", false, func(h *harm) { h.faults(`{"refuse_ms":2000}`, 2*time.Second, 3*time.Second) }},
	{"ending early", true, func(h *harm) { h.faultsAfter(`"break":"fin"`) }},
	{"resetting early", true, func(h *harm) { h.faultsAfter(`"break":"rst"`) }},
	{"framing wrongly", true, func(h *harm) { h.faultsAfter(`"break":"chunk"`) }},
	{"promising too much", true, func(h *harm) { h.faults(`{"length_excess":100}`, time.Second, 3*time.Second) }},
	{"choppy", false, func(h *harm) { h.faults(`{"split_writes":true,"token_bytes":1}`, time.Second, 3*time.Second) }},
}

// harm is done to one engine by one goroutine.
type harm struct {
	*chaos
	engine *chaosEngine
	rng    *rand.Rand
}

// harmEngines harms one engine, or two, and lets all recover before the next.
// It goes through all kinds of harm in random order, again and again.
func (c *chaos) harmEngines(ctx context.Context) {
	rng := rand.New(rand.NewPCG(c.seed, 1))
	victims := c.engines[:len(c.engines)-1]
	var kinds []int
	for ctx.Err() == nil {
		first, n := rng.IntN(len(victims)), 1
		if rng.IntN(3) == 0 {
			n = 2
		}
		var wg sync.WaitGroup
		for i := range n {
			if len(kinds) == 0 {
				kinds = rng.Perm(len(harms))
			}
			kind := &harms[kinds[0]]
			kinds = kinds[1:]
			e := victims[(first+i)%len(victims)]
			h := &harm{c, e, rand.New(rand.NewPCG(rng.Uint64(), 2))}
			wg.Go(func() {
				if kind.breaks {
					e.harms.Add(1)
					defer e.harms.Add(1)
				}
				kind.do(h)
				c.tally.add(kind.name)
			})
		}
		wg.Wait()
		for _, e := range victims {
			// As long as the longest ejection, and until a check has seen that it is well.
			if !c.admin.awaitMetric(c.T, 6*time.Minute, func(v float64) bool { return v == 1 }, "inferrail_replica_up", `"`+e.id+`"`) {
				fleet, err := c.admin.page("/debug/fleet")
				c.Errorf("%s does not come up: %v\n%s", e.id, err, fleet)
				return
			}
		}
	}
}

// span lets a random time pass.
func (h *harm) span(least, most time.Duration) {
	time.Sleep(least + time.Duration(h.rng.Int64N(int64(most-least))))
}

func (h *harm) restart() {
	if err := h.startEngine(h.engine); err != nil {
		h.Error(err)
	}
}

func (h *harm) kill() {
	h.engine.child.end()
	h.span(200*time.Millisecond, 3*time.Second)
	h.restart()
}

func (h *harm) flap() {
	for range 3 {
		h.engine.child.end()
		h.span(20*time.Millisecond, 300*time.Millisecond)
		h.restart()
		h.span(50*time.Millisecond, time.Second)
	}
}

// hang: its socket still accepts.
func (h *harm) hang() {
	h.engine.child.signal(syscall.SIGSTOP)
	h.span(time.Second, 6*time.Second)
	h.engine.child.signal(syscall.SIGCONT)
}

func (h *harm) hangAndKill() {
	h.engine.child.signal(syscall.SIGSTOP)
	h.span(time.Second, 4*time.Second)
	h.engine.child.end()
	h.restart()
}

// mute: requests are taken and never answered, nor are checks. It lasts until
// no request waits there any more: all have been sent elsewhere.
func (h *harm) mute() {
	h.fault(`{"hang":true,"health_hang":true}`)
	name := `"` + h.engine.id + `"`
	none := func(v float64) bool { return v == 0 }
	if !h.admin.awaitMetric(h.T, time.Minute, none, "inferrail_replica_up", name) ||
		!h.admin.awaitMetric(h.T, time.Minute, none, "inferrail_replica_requests_running", name) {
		page, _ := h.admin.page("/debug/fleet")
		h.Errorf("requests wait for %s, which is down:\n%s", h.engine.id, page)
	}
	h.fault(`{}`)
}

func (h *harm) faults(body string, least, most time.Duration) {
	h.fault(body)
	h.span(least, most)
	h.fault(`{}`)
}

// faultsAfter makes answers go wrong after some tokens.
func (h *harm) faultsAfter(fault string) {
	for range 4 {
		h.faults(fmt.Sprintf(`{%s,"break_after":%d}`, fault, h.rng.IntN(20)), 300*time.Millisecond, 800*time.Millisecond)
	}
	// Those that were taken last may go wrong a little later.
	h.span(time.Second, 2*time.Second)
}

// fault sets what the engine does wrong.
func (h *harm) fault(body string) {
	client := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		resp, err := client.Post("http://127.0.0.1:"+h.engine.port+"/sim/faults", "application/json", strings.NewReader(body))
		if err != nil && time.Since(began) < 20*time.Second {
			continue // it refuses connections for a while
		}
		if err != nil {
			h.Errorf("%s: %v", h.engine.id, err)
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode >= 300 {
			text, _ := io.ReadAll(resp.Body)
			h.Errorf("%s: POST /sim/faults: %d %s", h.engine.id, resp.StatusCode, text)
		}
		return
	}
}
