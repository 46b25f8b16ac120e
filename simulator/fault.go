package simulator

import (
	"bytes"
	"encoding/binary"
	"encoding/json/v2"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Faults is misbehaviour that a test asks for: of a whole server through
// Config, POST or PATCH /sim/faults or Server.SetFaults, or of one request
// through the body member "vllm_xargs":{"sim":{…}}, which then replaces the
// server's. The zero value behaves well.
type Faults struct {
	// TokenBytes lengthens each token's text to at least so many bytes with
	// x's; with TokenBytesMax above it, to a random length between the two. A
	// lengthened text does not have as many tokens as were generated.
	TokenBytes    int `json:"token_bytes" yaml:"token_bytes" name:"token-bytes" placeholder:"N" help:"Pad each token's text to this many bytes."`
	TokenBytesMax int `json:"token_bytes_max" yaml:"token_bytes_max" name:"token-bytes-max" placeholder:"N" help:"Pad each token's text to a random length up to this."`
	// BodyBytes lengthens a body that is not streamed to exactly so many
	// bytes, if it is shorter.
	BodyBytes int `json:"body_bytes" yaml:"body_bytes" name:"body-bytes" placeholder:"N" help:"Pad bodies that are not streamed to this many bytes."`
	// HeadDelayUS is how many microseconds pass before anything is sent.
	HeadDelayUS int64 `json:"head_delay_us" yaml:"head_delay_us" name:"head-delay-us" placeholder:"US" help:"Microseconds before the head of a response."`
	// HeadWithToken holds the head of a stream back until the first token is
	// ready. vLLM sends it at once; some engines do not.
	HeadWithToken bool `json:"head_with_token" yaml:"head_with_token" name:"head-with-token" help:"Send a stream's head with its first token."`
	// SplitWrites cuts what is written to the socket at random places and
	// after anything that looks like the end of a chunked body.
	SplitWrites bool `json:"split_writes" yaml:"split_writes" name:"split-writes" help:"Cut writes to the socket at random places."`
	// Slow multiplies the engine's times; 0 is 1.
	Slow float64 `json:"slow" yaml:"slow" name:"slow" placeholder:"FACTOR" help:"Multiply the engine's times by this; 0 is 1."`
	// Break is what happens after BreakAfter tokens of a stream, or bytes of
	// a body that is not streamed: "stall" sends nothing more and waits for
	// the client to leave, "fin" closes the connection, "rst" resets it,
	// "chunk" sends what is no chunk of a chunked body and closes, "error"
	// ends a stream with the event of an error; a body is an error instead.
	Break      string `json:"break" yaml:"break" name:"break" enum:",stall,fin,rst,chunk,error" default:"" help:"stall, fin, rst, chunk or error after --fault-break-after."`
	BreakAfter int    `json:"break_after" yaml:"break_after" name:"break-after" placeholder:"N" help:"Tokens of a stream, or bytes of another body, before --fault-break."`
	// LengthExcess is by how many bytes the Content-Length of a body that is
	// not streamed is too large; the connection is closed after the body.
	LengthExcess int `json:"length_excess" yaml:"length_excess" name:"length-excess" placeholder:"N" help:"Announce this many bytes more than a body has, then close."`

	// The following keep a request from being answered. The first that is set
	// counts.

	// Hang takes the request and never answers it.
	Hang bool `json:"hang" yaml:"hang" name:"hang" help:"Take requests and never answer them."`
	// CloseBeforeHead closes the connection before the first byte of an
	// answer: "fin" orderly, "rst" with a reset.
	CloseBeforeHead string `json:"close_before_head" yaml:"close_before_head" name:"close-before-head" enum:",fin,rst" default:"" help:"fin or rst instead of an answer."`
	// Garbage answers with bytes that are not HTTP, and closes.
	Garbage bool `json:"garbage" yaml:"garbage" name:"garbage" help:"Answer with bytes that are not HTTP."`
	// Tokenizer computes prompts of other tokens than the agent expects:
	// "token" adds one, "template" leaves the end of the template out.
	Tokenizer string `json:"tokenizer" yaml:"tokenizer" name:"tokenizer" enum:",token,template" default:"" help:"token or template: compute prompts of other tokens."`
	// Status answers with an error of this HTTP status.
	Status int `json:"status" yaml:"status" name:"status" placeholder:"STATUS" help:"Answer with this HTTP status, 400 to 599, and an error."`

	// The following are of a whole server only.

	// AfterMS and ForMS are when the faults above, the throttle, those of health
	// and of the metrics begin, in milliseconds from when they are set or the
	// start, and how long they last; 0 is at once, and for ever. At other times
	// the server behaves well.
	AfterMS int64 `json:"after_ms" yaml:"after_ms" name:"after-ms" placeholder:"MS" help:"Milliseconds until faults begin."`
	ForMS   int64 `json:"for_ms" yaml:"for_ms" name:"for-ms" placeholder:"MS" help:"Milliseconds that faults last; 0 is for ever."`
	// AfterRequests is how many requests the faults above spare first, and
	// FailRequests how many they hit then before the server behaves well; 0 is
	// all. The throttle lasts from the first of these until the first after them.
	// Of those that they may hit each is with the Probability, from 0 to 1, as
	// Seed draws; 0 is 1.
	AfterRequests int     `json:"after_requests" yaml:"after_requests" name:"after-requests" placeholder:"N" help:"Requests that faults spare first."`
	FailRequests  int     `json:"fail_requests" yaml:"fail_requests" name:"fail-requests" placeholder:"N" help:"Requests that the faults hit before the server behaves well; 0 is all."`
	Probability   float64 `json:"probability" yaml:"probability" name:"probability" placeholder:"P" help:"Probability that a request is hit, from 0 to 1; 0 is 1."`
	Seed          uint64  `json:"seed" yaml:"seed" name:"seed" placeholder:"N" help:"Seed that draws which requests are hit."`
	// Throttle multiplies the time that all work of the engines takes, that of
	// requests which run already as well; 0 is 1.
	Throttle float64 `json:"throttle" yaml:"throttle" name:"throttle" placeholder:"FACTOR" help:"Multiply the time of all of the engine's work by this, that of running requests too; 0 is 1."`
	// HealthStatus answers /health, /ping, /metrics and /v1/loads with this status, and
	// HealthHang never answers them.
	HealthStatus int  `json:"health_status" yaml:"health_status" name:"health-status" placeholder:"STATUS" help:"Answer /health, /ping and /metrics with this HTTP status, 400 to 599."`
	HealthHang   bool `json:"health_hang" yaml:"health_hang" name:"health-hang" help:"Never answer /health, /ping and /metrics."`
	// Metrics makes the pages that tell of load, as /metrics, useless: "garbage"
	// is what is no such page, "stale" the page as it was when it was first asked
	// for, "hang" no answer, "empty" a page with nothing on it, and "nan" has no
	// number that is one. MetricsMissing are families that are not on /metrics, separated by commas.
	Metrics        string `json:"metrics" yaml:"metrics" name:"metrics" enum:",garbage,stale,hang,empty,nan" default:"" help:"garbage, stale, hang, empty or nan: what is wrong with the pages that tell of load."`
	MetricsMissing string `json:"metrics_missing" yaml:"metrics_missing" name:"metrics-missing" placeholder:"NAMES" help:"Families that are not on /metrics, separated by commas."`
	// EventsDrop batches of KV cache events are numbered and kept for replay
	// but not sent, from when the faults are set on; with EventsStop none is.
	// EventsTwice sends each twice, EventsDelayUS waits before each.
	EventsDrop    int   `json:"events_drop" yaml:"events_drop" name:"events-drop" placeholder:"N" help:"Batches of KV cache events not to send."`
	EventsStop    bool  `json:"events_stop" yaml:"events_stop" name:"events-stop" help:"Send no KV cache events."`
	EventsTwice   bool  `json:"events_twice" yaml:"events_twice" name:"events-twice" help:"Send KV cache events twice."`
	EventsDelayUS int64 `json:"events_delay_us" yaml:"events_delay_us" name:"events-delay-us" placeholder:"US" help:"Microseconds to wait before each batch of KV cache events."`
	// ReplayLost forgets the batches kept so far when the faults are set.
	// ReplayGone closes the endpoint for replay.
	ReplayLost bool `json:"replay_lost" yaml:"replay_lost" name:"replay-lost" help:"Forget the KV cache events that are kept for replay."`
	ReplayGone bool `json:"replay_gone" yaml:"replay_gone" name:"replay-gone" help:"Answer no requests for replay."`
	// RefuseMS is for how many milliseconds from now, or from the start, the
	// server does not listen. Open connections stay.
	RefuseMS int64 `json:"refuse_ms" yaml:"refuse_ms" name:"refuse-ms" placeholder:"MS" help:"Milliseconds to refuse connections for."`
}

// Limits that keep a request from asking for more than a process has.
const (
	maxTokenBytes = 1 << 20
	maxBodyBytes  = 1 << 30
	maxRawBytes   = 1 << 36
	maxFaultMS    = int64(24 * time.Hour / time.Millisecond)
)

func (f *Faults) check() error {
	badStatus := func(status int) bool { return status != 0 && (status < 400 || status > 599) }
	switch {
	case f.TokenBytes < 0 || f.TokenBytes > maxTokenBytes || f.TokenBytesMax < 0 || f.TokenBytesMax > maxTokenBytes:
		return fmt.Errorf("token_bytes and token_bytes_max must be between 0 and %d", maxTokenBytes)
	case f.BodyBytes < 0 || f.BodyBytes > maxBodyBytes:
		return fmt.Errorf("body_bytes must be between 0 and %d", maxBodyBytes)
	case f.HeadDelayUS < 0 || f.HeadDelayUS > int64(time.Hour/time.Microsecond):
		return errors.New("head_delay_us must be between 0 and one hour")
	case f.BreakAfter < 0:
		return errors.New("break_after must not be negative")
	case !(f.Slow >= 0 && f.Slow <= 1e6):
		return fmt.Errorf("slow must be between 0 and 1000000, got %v", f.Slow)
	case f.LengthExcess < 0 || f.LengthExcess > maxBodyBytes:
		return fmt.Errorf("length_excess must be between 0 and %d", maxBodyBytes)
	case f.CloseBeforeHead != "" && f.CloseBeforeHead != "fin" && f.CloseBeforeHead != "rst":
		return fmt.Errorf("close_before_head must be fin or rst, not %q", f.CloseBeforeHead)
	case f.Tokenizer != "" && f.Tokenizer != "token" && f.Tokenizer != "template":
		return fmt.Errorf("tokenizer must be token or template, not %q", f.Tokenizer)
	case badStatus(f.Status) || badStatus(f.HealthStatus):
		return errors.New("status and health_status must be between 400 and 599")
	case f.EventsDrop < 0:
		return errors.New("events_drop must not be negative")
	case f.EventsDelayUS < 0 || f.EventsDelayUS > int64(time.Minute/time.Microsecond):
		return errors.New("events_delay_us must be between 0 and one minute")
	case f.FailRequests < 0 || f.AfterRequests < 0:
		return errors.New("after_requests and fail_requests must not be negative")
	case f.AfterMS < 0 || f.ForMS < 0 || f.AfterMS > maxFaultMS || f.ForMS > maxFaultMS:
		return errors.New("after_ms and for_ms must be between 0 and one day")
	case !(f.Probability >= 0 && f.Probability <= 1):
		return fmt.Errorf("probability must be between 0 and 1, got %v", f.Probability)
	case !(f.Throttle >= 0 && f.Throttle <= 1e6):
		return fmt.Errorf("throttle must be between 0 and 1000000, got %v", f.Throttle)
	case f.Metrics != "" && !slices.Contains([]string{"garbage", "stale", "hang", "empty", "nan"}, f.Metrics):
		return fmt.Errorf("metrics must be garbage, stale, hang, empty or nan, not %q", f.Metrics)
	case f.RefuseMS < 0 || f.RefuseMS > int64(time.Hour/time.Millisecond):
		return errors.New("refuse_ms must be between 0 and one hour")
	}
	switch f.Break {
	case "", "stall", "fin", "rst", "chunk", "error":
		return nil
	}
	return fmt.Errorf("break must be stall, fin, rst, chunk or error, not %q", f.Break)
}

// checkRequest checks the faults of one request.
func (f *Faults) checkRequest() error {
	if f.AfterMS != 0 || f.ForMS != 0 || f.AfterRequests != 0 || f.Probability != 0 || f.Seed != 0 || f.Throttle != 0 || f.Metrics != "" ||
		f.MetricsMissing != "" || f.FailRequests != 0 || f.HealthStatus != 0 || f.HealthHang || f.RefuseMS != 0 || f.EventsDrop != 0 || f.EventsStop ||
		f.EventsTwice || f.EventsDelayUS != 0 || f.ReplayLost || f.ReplayGone {
		return errors.New("after_…, for_ms, fail_requests, probability, seed, throttle, health_…, metrics…, refuse_ms, events_… and replay_… are of a whole server: send them to /sim/faults")
	}
	return f.check()
}

// faultSet is a server's faults since they were set: which requests they hit,
// and how many batches of events of each rank they still drop. Its methods may
// be called from any goroutine.
type faultSet struct {
	Faults
	began time.Time
	drop  []atomic.Int64
	// gone is closed when others take its place.
	gone chan struct{}

	// mu guards the counts of requests that have come, and that were hit, and the
	// pages of metrics that stand still, by path.
	mu         sync.Mutex
	taken, hit int
	pages      map[string]page
}

// dropped reports whether one more batch of a rank is not to be sent.
func (f *faultSet) dropped(rank int) bool {
	return f.EventsStop || f.EventsDrop > 0 && f.drop[rank].Add(-1) >= 0
}

// timely reports whether it is the time of the faults.
func (f *faultSet) timely() bool {
	since := time.Since(f.began)
	after, lasts := time.Duration(f.AfterMS)*time.Millisecond, time.Duration(f.ForMS)*time.Millisecond
	return since >= after && (lasts == 0 || since < after+lasts)
}

// dueLocked reports whether it is the time of the faults, and the turn of one
// more request. mu is held.
func (f *faultSet) dueLocked() bool {
	return f.taken >= f.AfterRequests && (f.FailRequests == 0 || f.hit < f.FailRequests) && f.timely()
}

// take returns the faults that hit one more request.
func (f *faultSet) take() Faults {
	f.mu.Lock()
	defer f.mu.Unlock()
	due := f.dueLocked()
	f.taken++
	// 53 bits are a number between 0 and 1.
	if due && f.Probability != 0 && float64(mix(f.Seed+uint64(f.taken)*golden)>>11)/(1<<53) >= f.Probability {
		due = false
	}
	if !due {
		return Faults{}
	}
	f.hit++
	return f.Faults
}

// peek returns the faults that may hit the next request, and uses none up.
func (f *faultSet) peek() Faults {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.dueLocked() {
		return Faults{}
	}
	return f.Faults
}

// throttle is how many times as long as else the engine's work takes now.
func (f *faultSet) throttle() float64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	last := f.AfterRequests + f.FailRequests
	if f.Throttle == 0 || !f.timely() || f.AfterRequests > 0 && f.taken <= f.AfterRequests || f.FailRequests > 0 && f.taken > last {
		return 1
	}
	return f.Throttle
}

// Faults returns the server's faults.
func (s *Server) Faults() Faults { return s.faults.Load().Faults }

// SetFaults replaces the server's faults. Requests that have been taken keep
// theirs. It may be called from any goroutine.
func (s *Server) SetFaults(f Faults) error {
	if err := f.check(); err != nil {
		return err
	}
	set := &faultSet{Faults: f, began: time.Now(), gone: make(chan struct{}), drop: make([]atomic.Int64, s.cfg.DataParallelSize), pages: map[string]page{}}
	for i := range set.drop {
		set.drop[i].Store(int64(f.EventsDrop))
	}
	if old := s.faults.Swap(set); old != nil {
		close(old.gone)
	}
	s.throttle()
	if f.Throttle != 0 && (f.AfterMS > 0 || f.ForMS > 0) {
		s.served.Go(func() { s.followThrottle(set) })
	}
	if p := s.current(); p != nil {
		for _, r := range p.ranks {
			if r.publisher != nil {
				r.publisher.setFaults(set)
			}
		}
	}
	s.listener.refuse(time.Duration(f.RefuseMS) * time.Millisecond)
	return nil
}

// followThrottle throttles the engines when it is time, and lets go of them.
func (s *Server) followThrottle(f *faultSet) {
	for _, ms := range []int64{f.AfterMS, f.AfterMS + f.ForMS} {
		timer := time.NewTimer(time.Until(f.began.Add(time.Duration(ms) * time.Millisecond)))
		select {
		case <-timer.C:
			s.throttle()
		case <-f.gone:
			timer.Stop()
			return
		case <-s.closed:
			timer.Stop()
			return
		}
	}
}

// throttle makes the engines as fast as the faults have it now.
func (s *Server) throttle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process != nil {
		s.process.throttleLocked(s.faults.Load().throttle())
	}
}

// getFaults serves GET /sim/faults.
func (s *Server) getFaults(w http.ResponseWriter, _ *http.Request) {
	out, err := json.Marshal(s.Faults())
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, out)
}

// postFaults serves POST /sim/faults: the body is what Faults becomes, and a
// member that is not there is zero. patchFaults serves PATCH, where a member that
// is not there stays as it was. With both the faults begin anew.
func (s *Server) postFaults(w http.ResponseWriter, r *http.Request) { s.changeFaults(w, r, Faults{}) }

func (s *Server) patchFaults(w http.ResponseWriter, r *http.Request) {
	s.changeFaults(w, r, s.Faults())
}

func (s *Server) changeFaults(w http.ResponseWriter, r *http.Request, f Faults) {
	body, err := readBody(w, r)
	if err != nil {
		writeError(w, err)
		return
	}
	if err := unmarshal(body, &f, json.RejectUnknownMembers(true)); err != nil {
		writeError(w, err)
		return
	}
	if err := s.SetFaults(f); err != nil {
		writeError(w, badParameter("", "%v", err))
		return
	}
	s.getFaults(w, r)
}

// healthy wraps the handler of a route that tells of the server's health.
func (s *Server) healthy(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f := s.faults.Load()
		switch {
		case !f.timely():
			h(w, r)
		case f.HealthHang:
			<-r.Context().Done()
		case f.HealthStatus != 0:
			w.WriteHeader(f.HealthStatus)
		default:
			h(w, r)
		}
	}
}

// page is an answer that is kept. It is a ResponseWriter for one request.
type page struct {
	header http.Header
	status int
	body   []byte
}

func (p *page) Header() http.Header { return p.header }

func (p *page) WriteHeader(status int) {
	if p.status == 0 {
		p.status = status
	}
}

func (p *page) Write(b []byte) (int, error) {
	p.body = append(p.body, b...)
	return len(b), nil
}

// telling wraps the handler of a route that tells of the server's load.
func (s *Server) telling(h http.HandlerFunc) http.HandlerFunc {
	return s.healthy(func(w http.ResponseWriter, r *http.Request) {
		f := s.faults.Load()
		if f.Metrics == "" && f.MetricsMissing == "" || !f.timely() {
			h(w, r)
			return
		}
		if f.Metrics == "hang" {
			<-r.Context().Done()
			return
		}
		r = r.Clone(r.Context())
		r.Header.Del("Accept-Encoding") // the page is to be read here
		shown := f.pageOf(r, h)
		maps.Copy(w.Header(), shown.header)
		w.Header().Del("Content-Length")
		if shown.status != 0 {
			w.WriteHeader(shown.status)
		}
		_, _ = w.Write(shown.body)
	})
}

// pageOf returns the page that h has, as the faults want it.
func (f *faultSet) pageOf(r *http.Request, h http.HandlerFunc) page {
	shown := page{header: http.Header{}}
	if f.Metrics == "stale" {
		f.mu.Lock()
		defer f.mu.Unlock()
		old, ok := f.pages[r.URL.RequestURI()]
		if !ok {
			old.header = http.Header{}
			h(&old, r)
			f.pages[r.URL.RequestURI()] = old
		}
		shown = old
	} else {
		h(&shown, r)
	}
	switch f.Metrics {
	case "garbage":
		shown.body = []byte("# TYPE load gauge\nload{a=\"b\n\x00\xff{[not a page of metrics\n")
	case "empty":
		shown.body = nil
	case "nan":
		shown.body = sample.ReplaceAll(shown.body, []byte("${1}NaN"))
	}
	if f.MetricsMissing != "" {
		missing := strings.Split(f.MetricsMissing, ",")
		var kept []byte
		for line := range bytes.Lines(shown.body) {
			if name, part := familyOf(line); !slices.Contains(missing, name) && !slices.Contains(missing, part) {
				kept = append(kept, line...)
			}
		}
		shown.body = kept
	}
	return shown
}

// sample is a line of a page of metrics up to its value, or a member of JSON up
// to a number.
var sample = regexp.MustCompile(`(?m)(^[^#\s{].* |":)[-+0-9.eE]+`)

// familyOf returns the name in a line of a page of metrics, and the family it is
// a part of if it is one of a histogram.
func familyOf(line []byte) (name, family string) {
	text := strings.TrimPrefix(strings.TrimPrefix(string(line), "# HELP "), "# TYPE ")
	name = text
	if end := strings.IndexAny(text, "{ \n"); end >= 0 {
		name = text[:end]
	}
	for _, part := range []string{"_bucket", "_sum", "_count"} {
		if family, ok := strings.CutSuffix(name, part); ok {
			return name, family
		}
	}
	return name, name
}

// garbage looks like nothing that HTTP allows.
const garbage = "\x16\x03\x01 this is not HTTP\r\n\r\n"

// badChunk is where a chunk's size should be.
const badChunk = "not a size\r\n"

// misbehave keeps the request from being answered, if its faults say so, and
// reports whether they did. It panics with http.ErrAbortHandler for faults
// that close the connection.
func (x *exchange) misbehave() bool {
	f := &x.req.faults
	if !f.Hang && f.CloseBeforeHead == "" && !f.Garbage && f.Status == 0 {
		return false
	}
	if !x.pause(time.Duration(f.HeadDelayUS) * time.Microsecond) {
		return true
	}
	switch {
	case f.Hang:
		<-x.ctx.Done()
	case f.CloseBeforeHead != "":
		x.breakOff(f.CloseBeforeHead)
	case f.Garbage:
		x.corrupt(garbage)
	default:
		x.s.refuse(x.w, x.r, statusError(f.Status))
	}
	return true
}

// breakOff ends an answer in the middle, as Faults.Break says. It returns only
// for "stall", when the client has left, and for "error".
func (x *exchange) breakOff(how string) {
	switch how {
	case "stall":
		<-x.ctx.Done()
		return
	case "error":
		x.reason = "error"
		x.failed = statusError(x.s.face.failure)
		if x.req.opens == withToken && !x.said {
			x.s.refuse(x.w, x.r, x.failed)
			return
		}
		x.sendEvents(x.appendFailure(x.buf[:0]))
		return
	case "chunk":
		x.corrupt(badChunk)
	case "rst":
		x.conn.resetOnClose()
	}
	panic(http.ErrAbortHandler)
}

// corrupt writes past net/http to the connection and closes it. All that was
// to come before must have been flushed.
func (x *exchange) corrupt(bytes string) {
	_, _ = x.conn.Write([]byte(bytes))
	panic(http.ErrAbortHandler)
}

// statusError is an error of an engine that fails.
func statusError(status int) *apiError {
	kind := strings.ReplaceAll(http.StatusText(status), " ", "")
	if kind == "" {
		kind = "Unknown"
	}
	if !strings.HasSuffix(kind, "Error") {
		kind += "Error"
	}
	return &apiError{status: status, kind: kind, param: "", message: "The simulated engine was told to fail with status " + strconv.Itoa(status) + "."}
}

// appendFailure appends the events that end a stream in which the engine has
// failed.
func (x *exchange) appendFailure(dst []byte) []byte {
	if x.req.dialect != nil {
		return x.req.dialect.appendPart(dst, x.answer, atFailure, 0)
	}
	a := x.req.api
	if x.aborted {
		return append(dst, done...)
	}
	e := x.failed
	if a == messages {
		dst = append(dst, "event: error\n"...)
	}
	dst = append(dst, "data: "...)
	dst = a.appendError(dst, e)
	dst = append(dst, "\n\n"...)
	if a == messages || a == responses {
		return dst
	}
	return append(dst, done...)
}

// Raw asks for a body of deterministic random bytes instead of an answer:
// POST /sim/raw?seed=1&chunks=100&max=400&interval_us=50&length=chunked, or
// "vllm_xargs":{"sim_raw":{…}} in a request to either API route. AppendRaw
// returns the bytes that must arrive.
type Raw struct {
	Seed uint64 `json:"seed"`
	// Chunks pieces of 1 to Max bytes are written and flushed one by one,
	// IntervalUS microseconds apart. Many hold or end in bytes that look like
	// the end of a chunked body.
	Chunks     int   `json:"chunks"`
	Max        int   `json:"max"`
	IntervalUS int64 `json:"interval_us"`
	// First bounds the first piece, which is as small in most streams; 0 does not.
	First int `json:"first"`
	// Length is "chunked", also when empty, or "fixed": with a Content-Length.
	Length string `json:"length"`
	// Split cuts the writes as Faults.SplitWrites does.
	Split bool `json:"split"`
	// Break and BreakAfter are as in Faults, counted in pieces.
	Break      string `json:"break"`
	BreakAfter int    `json:"break_after"`
}

func (r *Raw) check() error {
	f := Faults{Break: r.Break, BreakAfter: r.BreakAfter}
	switch {
	case r.Chunks < 0 || r.Max < 1:
		return fmt.Errorf("raw: chunks must not be negative and max at least 1, got %d and %d", r.Chunks, r.Max)
	case r.Chunks > 0 && r.Max > maxRawBytes/r.Chunks:
		return fmt.Errorf("raw: chunks times max must be at most %d", int64(maxRawBytes))
	case r.First < 0:
		return fmt.Errorf("raw: first must not be negative, got %d", r.First)
	case r.IntervalUS < 0 || r.IntervalUS > int64(time.Hour/time.Microsecond):
		return errors.New("raw: interval_us must be between 0 and one hour")
	case r.Length != "" && r.Length != "chunked" && r.Length != "fixed":
		return fmt.Errorf("raw: length must be chunked or fixed, not %q", r.Length)
	case r.Break == "error" || r.Break == "chunk" && r.Length == "fixed":
		return fmt.Errorf("raw: no break %q in such a body", r.Break)
	}
	return f.check()
}

// AppendRaw appends the body that r asks for, whole and without its framing.
func AppendRaw(dst []byte, r Raw) []byte {
	for i := range r.Chunks {
		dst = r.appendPiece(dst, i)
	}
	return dst
}

// size returns the length of piece i.
func (r *Raw) size(i int) int {
	most := r.Max
	if i == 0 && r.First > 0 {
		most = min(most, r.First)
	}
	return 1 + int(mix(r.Seed+uint64(i)*golden)%uint64(most))
}

// fakeEnds look like the end of a chunked body, or like a whole one.
var fakeEnds = []string{"\r\n0\r\n\r\n", "0\r\n\r\n", "\r\n0\r\n", "5\r\nhello\r\n0\r\n\r\n"}

// appendPiece appends piece i. Two in three hold one of fakeEnds, half of
// those as their end.
func (r *Raw) appendPiece(dst []byte, i int) []byte {
	start, size := len(dst), r.size(i)
	state := mix(r.Seed ^ mix(uint64(i)))
	fate := mix(state + 1)
	for n := 0; n < size; n += 8 {
		state += golden
		dst = binary.LittleEndian.AppendUint64(dst, mix(state))
	}
	dst = dst[:start+size]
	fake := fakeEnds[fate>>8%uint64(len(fakeEnds))]
	if room := size - len(fake); room >= 0 {
		switch fate % 3 {
		case 0:
			copy(dst[start+room:], fake)
		case 1:
			copy(dst[start+int(fate>>16%uint64(room+1)):], fake)
		}
	}
	return dst
}

// Expect returns the text of each choice of the answer that a server with this
// Config gives to body at path, such as "/v1/chat/completions"; of a tool call
// it is the arguments. An error is the refusal that the server would answer.
func Expect(cfg Config, path string, body []byte) ([]string, error) {
	r, err := expected(&cfg, path, body)
	if err != nil {
		return nil, err
	}
	a := newAnswer(&cfg, r, "", 0)
	var texts []string
	for i := range a.choices {
		texts = append(texts, a.choices[i].text())
	}
	return texts, nil
}

// ExpectBody returns the whole body, without its framing, of the answer that a
// server with this Config gives to body at path, byte for byte. Config.Created
// must be set, the request must carry the header X-Request-Id with id, and
// must either not be streamed, or have one choice or a server without latency.
// What the answer tells of the cache is as of an empty one.
func ExpectBody(cfg Config, path, id string, body []byte) ([]byte, error) {
	r, err := expected(&cfg, path, body)
	if err != nil {
		return nil, err
	}
	if r.raw != nil {
		return AppendRaw(nil, *r.raw), nil
	}
	a := newAnswer(&cfg, r, id, cfg.Created)
	if !r.stream {
		return a.appendPaddedBody(nil), nil
	}
	out := a.appendPrelude(nil)
	out = a.appendOpening(out)
	for sent := true; sent; {
		sent = false
		for i := range a.choices {
			if a.choices[i].sent < a.choices[i].seq.Output {
				out = a.appendToken(out, i)
				sent = true
			}
		}
	}
	return a.appendClosing(out), nil
}

// expected returns the request that a server with this Config would serve.
func expected(cfg *Config, path string, body []byte) (*request, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	parse, ok := cfg.face().parsers[path]
	if !ok {
		return nil, fmt.Errorf("no generating route %q", path)
	}
	r, err := parse(cfg, body)
	if err != nil {
		return nil, err
	}
	r.distort()
	return r, nil
}

// appendPaddedBody appends the body of an answer that is not streamed,
// lengthened to BodyBytes.
func (a *answer) appendPaddedBody(dst []byte) []byte {
	start := len(dst)
	dst = a.appendBody(dst, 0)
	if pad := a.req.faults.BodyBytes - (len(dst) - start); pad > 0 {
		dst = a.appendBody(dst[:start], pad)
	}
	return dst
}
