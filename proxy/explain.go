package proxy

import (
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// Explain tells where a request for path with these fields and this body would go
// now, and why. It does what is done for a request up to the choice, in the same
// way and under the same bounds, but sends nothing, takes no place, is charged to no
// key and counted nowhere. The error is a *Refusal when the request would be refused
// before. One that has no key is explained as one that may be sent. It may be called
// at any time, after Shutdown too, as long as the replicas are not closed.
func (s *Server) Explain(path string, header http.Header, body []byte) (*Decision, error) {
	x := s.explained(path, header, body)
	defer x.giveBack()
	if f := x.understand(); f != none {
		row := &failureTable[f]
		r := &Refusal{Status: row.status, Message: x.message}
		if r.Message == "" {
			r.Message = row.text
		}
		return nil, r
	}
	x.readPrompt()
	x.lookUp()
	// The turn is that of the next request, which it is not taken from.
	x.turned, x.asked.Rand, x.asked.Turn = true, rand.Uint64(), x.state().turns.Load()+1
	d := new(Decision)
	r, full := x.pick(false)
	line := r == nil && full
	for _, x.displaces = range []bool{false, true} {
		if r == nil && full {
			r, _ = x.pick(true)
		}
	}
	x.replica = r // for these only: it is in no gate
	x.tell(d)
	d.WorkOut()
	if r != nil {
		d.PieceTokens = x.nextPiece()
	}
	x.replica = nil
	switch {
	case r == nil && full:
		d.Reason = "none: every replica has as many requests as it may"
	case r == nil:
		d.Reason = "none: no replica takes requests; the answer would be 503"
	case line:
		d.Waits = "in the line of " + r.ID
	}
	hold := r != nil && !line && x.mustHold()
	if a := x.model.Admission; a != nil && r != nil && x.computes() {
		wait, ahead := x.candidates[x.choice.Index].Wait, 0.0
		if hold {
			ahead = x.heldAhead()
		}
		v := a.Foresee(time.Now(), durationOf(x.expected+ahead), waitOf(wait+ahead, line), x.budget)
		d.Admission, d.Refused, d.RetryAfterMS = v.Reason, v.Refuse, float64(v.RetryAfter.Milliseconds())
	}
	switch ahead := !x.mayTry(); {
	case !ahead && !d.Refused && hold:
		d.Waits = "in the agent, until a replica has less than " + durationOf(x.model.Holding.Lead).String() + " of prefill before it"
	case !ahead && !d.Refused && (r != nil || !full):
	case x.model.Waiting.Max > x.state().Waiting():
		d.Waits = "in the queue of " + x.model.Name
	case r == nil:
		d.Reason += "; the answer would be 503"
	}
	for _, shadow := range x.model.Shadows {
		costs := make([]float64, len(x.candidates))
		if c := policy.Choose(shadow.Policy, &x.asked, x.candidates, costs); c.Index >= 0 {
			d.Shadows = append(d.Shadows, ShadowDecision{shadow.Name(), x.places[c.Index].ID,
				milliseconds(policy.TTFT(&x.asked, &x.candidates[c.Index])), x.places[c.Index] == r})
		}
	}
	return d, nil
}

// explained returns an exchange that is on no connection.
func (s *Server) explained(path string, header http.Header, body []byte) *exchange {
	c := &conn{s: s, fd: -1}
	x := &c.x
	x.c, x.limits, x.access = c, s.limits.Load(), s.access.Load()
	x.predicted = -1
	x.method, x.path, x.body = []byte(http.MethodPost), []byte(path), body
	x.route, x.allow = routeOf(x.path)
	x.pooled.in, x.pooled.out = heads.Get().(*[]byte), heads.Get().(*[]byte)
	x.in, x.out = (*x.pooled.in)[:0], (*x.pooled.out)[:0]
	var raw []byte
	for name, values := range header {
		for _, value := range values {
			raw = appendField(raw, []byte(name), []byte(value))
		}
	}
	x.message = x.head.read(append(raw, crlf...))
	x.caller = readCaller(x.head.raw)
	return x
}

// understand finds out what a request that is explained wants.
func (x *exchange) understand() failure {
	switch {
	case x.message != "":
		return badRequest
	case x.head.encoding != nil:
		return badEncoding
	case x.route == routeUnknown || x.route >= routeModels:
		x.message = "No requests to " + strconv.Quote(string(x.path)) + " are sent to engines; try /v1/chat/completions."
		return notFound
	case int64(len(x.body)) > x.limits.MaxBodyBytes:
		x.message = "The request body is " + strconv.Itoa(len(x.body)) + " bytes; at most " + strconv.FormatInt(x.limits.MaxBodyBytes, 10) + " are taken."
		return bodyTooLarge
	}
	if x.caller.key != nil && !x.access.Open() {
		if x.key = x.access.Find(x.caller.key); x.key == nil {
			return badKey
		}
	}
	if f := x.findModel(x.c.s.fleet.Load()); f != none {
		return f
	}
	return x.classify()
}

// ShadowReport is how one of a model's shadows has done.
type ShadowReport struct {
	// Name is what it is called, with a number where several have the same name.
	Name   string
	Regret policy.Regret
}

// ShadowReports are those of the model's shadows.
func (m *Model) ShadowReports() []ShadowReport {
	var list []ShadowReport
	seen := map[string]int{}
	for _, s := range m.Shadows {
		name := s.Name()
		if seen[name]++; seen[name] > 1 {
			name += "#" + strconv.Itoa(seen[name])
		}
		list = append(list, ShadowReport{name, s.Regret()})
	}
	return list
}
