package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
)

func TestProbe(t *testing.T) {
	served := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/well":
			w.Write([]byte("ok\n"))
		case "/hangs":
			<-r.Context().Done()
		default:
			http.Error(w, "no engine answers", http.StatusServiceUnavailable)
		}
	}))
	defer served.Close()
	// A proxy of the environment is not asked.
	t.Setenv("http_proxy", "http://127.0.0.1:1")
	f := func(status int, want string, args ...string) {
		t.Helper()
		p := start(t, append([]string{"probe"}, args...)...)
		p.exit(status)
		if got := p.stdout.String() + p.stderr.String(); !strings.Contains(got, want) {
			t.Errorf("%v says %q, want %q", args, got, want)
		}
	}
	f(0, "ok\n", served.URL+"/well")
	f(1, "/readyz answers 503 Service Unavailable: no engine answers", served.URL+"/readyz")
	f(1, "deadline exceeded", served.URL+"/hangs", "--timeout", "50ms")
	f(1, "connection refused", "http://127.0.0.1:1/")
	f(1, "unsupported protocol scheme", "nowhere")

	a := start(t, agentArgs("--sim", "1", "--datapath", "copy")...)
	admin := a.expect(`(?m)^listening  \S+, admin (\S+)$`)
	a.expect(`(?m)^replicas   1 of 1`)
	f(0, "ok", admin+"/healthz")
	f(0, "", admin+"/readyz")
	a.signals <- syscall.SIGTERM
	a.exit(0)
}
