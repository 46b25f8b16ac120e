package agent

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// admin answers the pages of the admin port. It only reads.
type admin struct {
	agent *Agent
	page  http.Handler // /metrics
}

func newAdmin(a *Agent) *http.Server {
	registry := prometheus.NewRegistry()
	registry.MustRegister(a.proxy, a.datapath, a.fleet,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	ad := &admin{agent: a, page: promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelError),
	})}

	mux := http.NewServeMux()
	mux.Handle("GET /metrics", ad.page)
	mux.HandleFunc("GET /healthz", ad.healthz)
	mux.HandleFunc("GET /readyz", ad.readyz)
	mux.HandleFunc("GET /debug/fleet", ad.fleet)
	mux.HandleFunc("GET /debug/datapath", ad.datapath)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
	}
}

// healthz: the process is alive.
func (*admin) healthz(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprintln(w, "ok")
}

// readyz: requests are served. Status 503 when none can be; "degraded", with
// status 200, names each replica that takes none and each source of discovery
// that fails, while some can be.
func (ad *admin) readyz(w http.ResponseWriter, _ *http.Request) {
	ailments := ad.agent.fleet.ailments()
	switch {
	case ad.agent.draining.Load():
		http.Error(w, "draining", http.StatusServiceUnavailable)
	case !ad.agent.fleet.routes():
		_, of := ad.agent.Replicas()
		text := fmt.Sprintf("not ready: none of %d replicas takes requests", of)
		http.Error(w, strings.Join(append([]string{text}, ailments...), "; "), http.StatusServiceUnavailable)
	case len(ailments) > 0:
		fmt.Fprintln(w, "degraded: "+strings.Join(ailments, "; "))
	default:
		fmt.Fprintln(w, "ok")
	}
}

func (ad *admin) fleet(w http.ResponseWriter, _ *http.Request) {
	ad.write(w, ad.agent.fleet.status())
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
