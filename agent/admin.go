package agent

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/gzhttp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// admin answers the pages of the admin port. It only reads, and no page fetches
// what a request names.
type admin struct {
	agent *Agent
	page  http.Handler // /metrics
	// prompts has a place for each prompt that is looked at; see promptReports.
	prompts chan struct{}
}

// collectors are all that the page of metrics shows.
func (a *Agent) collectors() []prometheus.Collector {
	list := []prometheus.Collector{a.proxy, a.datapath, a.fleet, a.fleet.prompts, indexMetrics{a.fleet}, loadMetrics{a.fleet}, &a.reloads, a.decisions, a.traces,
		buildInfo, a.uptime(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})}
	if a.certificate != nil {
		list = append(list, a.certificate)
	}
	return list
}

func newAdmin(a *Agent) *http.Server {
	registry := prometheus.NewRegistry()
	registry.MustRegister(a.collectors()...)
	ad := &admin{agent: a, prompts: make(chan struct{}, promptReports), page: promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog:           slog.NewLogLogger(a.log.Handler(), slog.LevelError),
		EnableOpenMetrics:  true,
		DisableCompression: true, // as of all pages
		// What is gathered of a large fleet takes megabytes until it has been read.
		MaxRequestsInFlight: mostScrapes,
	})}

	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", ad.console)
	mux.HandleFunc("GET /console/", ad.console)
	mux.Handle("GET /metrics", ad.page)
	mux.HandleFunc("GET /healthz", ad.healthz)
	mux.HandleFunc("GET /readyz", ad.readyz)
	mux.HandleFunc("GET /debug/fleet", ad.fleet)
	mux.HandleFunc("GET /debug/index", ad.index)
	mux.HandleFunc("GET /debug/datapath", ad.datapath)
	mux.HandleFunc("/debug/prompt", ad.prompt)
	mux.HandleFunc("/explain", ad.explain)
	mux.HandleFunc("GET /debug/overview", ad.overview)
	mux.HandleFunc("GET /debug/predictions", ad.predictions)
	mux.HandleFunc("GET /debug/decisions", ad.decisions)
	mux.HandleFunc("GET /debug/policy", ad.policies)
	mux.HandleFunc("GET /debug/prewarm", ad.prewarm)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", bounded(pprof.Profile))
	mux.HandleFunc("GET /debug/pprof/trace", bounded(pprof.Trace))
	// A page about a thousand replicas is long and says much the same of each.
	pack, err := gzhttp.NewWrapper(gzhttp.MinSize(2<<10), gzhttp.CompressionLevel(gzip.BestSpeed))
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return &http.Server{
		Handler:           ad.guard(pack(mux)),
		ReadHeaderTimeout: 10 * time.Second,
		WriteTimeout:      pageTime,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ConnState:         a.adminConns.note,
		ErrorLog:          slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
	}
}

// pageTime bounds how long a page may take to be made and to be read, from the head
// of its request on: what a reader has not taken is memory. Profiles get their own
// duration beside that.
const pageTime = time.Minute

// mostScrapes is how many requests for /metrics are answered at one time.
const mostScrapes = 8

// mostProfile is how long a profile or a trace may be taken.
const mostProfile = 5 * time.Minute

// bounded refuses profiles that are longer than that.
func bounded(profile http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if s, err := strconv.ParseFloat(r.URL.Query().Get("seconds"), 64); err == nil && !(s <= mostProfile.Seconds()) {
			http.Error(w, fmt.Sprintf("seconds=%v is more than %v", s, mostProfile.Seconds()), http.StatusBadRequest)
			return
		}
		profile(w, r)
	}
}

// mostAdminConns bounds the connections of the admin port: whoever reaches it
// needs no token to open one, and the descriptors are wanted for requests.
const mostAdminConns = 256

// adminConns are the connections of an http.Server. One beyond mostAdminConns takes
// the place of the one that has waited longest for its request, or if each has one,
// of that whose request is the oldest: however many are held open, the next probe or
// scrape is answered. The zero value is none. note is the server's ConnState.
type adminConns struct {
	mu    sync.Mutex // guards the rest
	conns map[net.Conn]adminConn
	n     uint64 // changes so far
}

// adminConn is one of them.
type adminConn struct {
	busy   bool   // it has a request, or has just been accepted for one
	active bool   // something of a request has arrived, and not all of its answer was sent
	since  uint64 // the change that made it so
}

func (b *adminConns) note(c net.Conn, state http.ConnState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conns == nil {
		b.conns = map[net.Conn]adminConn{}
	}
	_, known := b.conns[c]
	switch {
	case state == http.StateClosed || state == http.StateHijacked:
		delete(b.conns, c)
		return
	case state == http.StateNew && len(b.conns) == mostAdminConns:
		b.makeRoomLocked()
	case state != http.StateNew && !known:
		return // it had to make room
	}
	b.n++
	b.conns[c] = adminConn{state == http.StateNew || state == http.StateActive, state == http.StateActive, b.n}
}

func (b *adminConns) makeRoomLocked() {
	var last net.Conn
	var is adminConn
	for c, other := range b.conns {
		if last == nil || is.active && !other.active || is.active == other.active && other.since < is.since {
			last, is = c, other
		}
	}
	delete(b.conns, last)
	last.Close() // the server finds that out
}

// busy is how many have a request, or have just been accepted for one.
func (b *adminConns) busy() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.conns {
		if c.busy {
			n++
		}
	}
	return n
}

// wait waits until none is busy, or ctx ends.
func (b *adminConns) wait(ctx context.Context) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if b.busy() == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// guard lets through who may see the pages: who has the token or, where none is
// configured, processes of this node, for which web pages in a browser do not
// count. /healthz and /readyz are for everybody, but /readyz tells others one
// word only. The files of the console need no token either: they are those of every
// agent of this version and hold nothing of this one, and a browser that opens a page
// has no way to send a token. The page asks its user for it, and sends it with
// whatever it fetches.
func (ad *admin) guard(pages http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Content-Security-Policy", "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		if r.URL.Path == "/healthz" || r.URL.Path == "/readyz" {
			pages.ServeHTTP(w, r)
			return
		}
		_, file := consoleFiles()[r.URL.Path]
		switch why := ad.refuses(r); {
		case why == "", file && why == noToken:
			pages.ServeHTTP(w, r)
		case why == noToken:
			h.Set("WWW-Authenticate", `Bearer realm="inferrail admin"`)
			http.Error(w, why, http.StatusUnauthorized)
		default:
			http.Error(w, why, http.StatusForbidden)
		}
	})
}

const noToken = "this page wants the token whose hash is admin_token_sha256 in the configuration: Authorization: Bearer TOKEN"

// refuses says why a request may not see the pages; nothing when it may.
func (ad *admin) refuses(r *http.Request) string {
	if origin := r.Header.Get("Origin"); origin != "" {
		if u, err := url.Parse(origin); err != nil || u.Host == "" || u.Host != r.Host {
			return "requests of other web sites are refused"
		}
	}
	// Browsers say so even where they send no Origin, as of images; another port of
	// this host is "same-site". A link that is followed is not the other site's request.
	if from := r.Header.Get("Sec-Fetch-Site"); (from == "cross-site" || from == "same-site") && r.Header.Get("Sec-Fetch-Mode") != "navigate" {
		return "requests of other web sites are refused"
	}
	hash := ad.agent.cfg.Load().AdminTokenSHA256
	if hash == "" {
		if !isLiteral(r.Host) {
			// A name of another site may lead here (DNS rebinding).
			return "the admin pages are asked for by address, such as 127.0.0.1, or as localhost; for other names configure admin_token_sha256"
		}
		return ""
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	want, err := hex.DecodeString(hash)
	got := sha256.Sum256([]byte(strings.TrimSpace(token)))
	if err != nil || !strings.EqualFold(scheme, "bearer") || subtle.ConstantTimeCompare(got[:], want) != 1 {
		return noToken
	}
	return ""
}

// isLiteral tells whether a Host field is an address or localhost, with or
// without a port: no name that somebody else controls leads here by it.
func isLiteral(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else {
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	_, err := netip.ParseAddr(host)
	return err == nil || host == "" || strings.EqualFold(host, "localhost")
}

// healthz: the process is alive.
func (*admin) healthz(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprintln(w, "ok")
}

// readyz: requests are served. Status 503 when none can be; "degraded", with
// status 200, names what is missing while some can be.
func (ad *admin) readyz(w http.ResponseWriter, r *http.Request) {
	status, state, why := http.StatusOK, "ok", ad.agent.degraded()
	switch {
	case ad.agent.draining.Load() && !ad.agent.adminL.given.Load():
		// With a successor on the same port the node goes on to be ready.
		status, state, why = http.StatusServiceUnavailable, "draining", nil
	case !ad.agent.fleet.routes():
		status, state = http.StatusServiceUnavailable, "not ready"
	case len(why) > 0:
		state = "degraded"
	}
	if len(why) > 0 && ad.refuses(r) == "" {
		state += ": " + strings.Join(why, "; ")
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	fmt.Fprintln(w, state)
}

// degraded names what is not as it should be.
func (a *Agent) degraded() (list []string) {
	if _, of := a.Replicas(); !a.fleet.routes() {
		list = append(list, fmt.Sprintf("none of %d replicas takes requests", of))
	}
	list = append(list, a.fleet.ailments()...)
	if why := a.reloads.problem(); why != "" {
		list = append(list, why)
	}
	if a.certificate != nil {
		if why := a.certificate.problem(); why != "" {
			list = append(list, "certificate: "+why+"; the last good one is in use")
		}
	}
	return list
}

// fleet shows the replicas, or the one that ?replica= names, the models, and where
// replicas come from.
func (ad *admin) fleet(w http.ResponseWriter, r *http.Request) {
	ad.write(w, ad.agent.fleet.status(r.URL.Query().Get("replica")))
}

// datapath shows what the kernel datapath says of itself and what the proxy
// counts, as one object.
func (ad *admin) datapath(w http.ResponseWriter, _ *http.Request) {
	counts := ad.agent.proxy.Datapath()
	chunks := counts.CopiedChunks + counts.KernelChunks
	totals := map[string]any{"chunks": chunks, "wakeups_per_1000_chunks": nil}
	if chunks > 0 {
		totals["wakeups_per_1000_chunks"] = 1000 * float64(counts.Wakeups) / float64(chunks)
	}
	page := map[string]json.RawMessage{}
	for _, part := range []any{counts, totals, ad.agent.datapath.Status()} {
		text, err := json.Marshal(part)
		if err == nil {
			err = json.Unmarshal(text, &page) // adds to what is there
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	ad.write(w, page)
}

func (ad *admin) write(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		ad.agent.log.Warn("cannot write an admin page", "error", err)
	}
}
