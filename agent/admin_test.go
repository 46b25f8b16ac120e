package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

func hashOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// adminAnswer is what an admin page answers to a request with the given head
// fields; Host among them is the Host field.
func adminAnswer(t *testing.T, a *Agent, path string, fields ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+a.AdminAddr().String()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range fields {
		name, value, _ := strings.Cut(field, ": ")
		if name == "Host" {
			req.Host = value
		}
		req.Header.Set(name, value)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

var guarded = []string{"/metrics", "/debug/fleet", "/debug/datapath", "/debug/prompt", "/debug/pprof/", "/debug/pprof/heap", "/nowhere", "//metrics", "/healthz/../metrics"}

// Without a token who can connect, which is this node alone, may read; but not
// a web page in a browser on it.
func TestAdminOnLoopback(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	port := a.AdminAddr().String()[strings.LastIndex(a.AdminAddr().String(), ":"):]
	f := func(status int, want string, fields ...string) {
		t.Helper()
		resp := adminAnswer(t, a, "/debug/fleet", fields...)
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != status || !strings.Contains(string(body), want) {
			t.Errorf("%v: status %d, want %d; says %.80q, want %q", fields, resp.StatusCode, status, body, want)
		}
	}
	f(200, "r0")
	f(200, "r0", "Host: localhost"+port)
	f(200, "r0", "Host: LOCALHOST")
	f(200, "r0", "Host: [::1]"+port)
	f(200, "r0", "Host: ::1")
	f(200, "r0", "Host: 10.0.0.1")
	f(200, "r0", "Origin: http://"+a.AdminAddr().String())
	f(200, "r0", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
	f(200, "r0", "Sec-Fetch-Site: none")

	const rebound, foreign = "asked for by address", "other web sites"
	f(403, rebound, "Host: evil.example.com")
	f(403, rebound, "Host: evil.example.com"+port)
	f(403, rebound, "Host: localhost.evil.example.com")
	f(403, rebound, "Host: 127.0.0.1.evil.example.com")
	f(403, foreign, "Origin: http://evil.example.com")
	f(403, foreign, "Origin: http://localhost:3000")
	f(403, foreign, "Origin: null")
	f(403, foreign, "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors")
	f(403, foreign, "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors") // another port of this host
	f(200, "r0", "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors")

	for _, path := range guarded {
		if resp := adminAnswer(t, a, path, "Host: evil.example.com"); resp.StatusCode != 403 && resp.StatusCode/100 != 3 {
			t.Errorf("%s: status %d for a name that leads here", path, resp.StatusCode)
		}
	}
	resp := adminAnswer(t, a, "/metrics")
	for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store"} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// With a token only who has it may read, wherever from.
func TestAdminToken(t *testing.T) {
	gone := startEngine(t, 0, "m")
	c := testConfig(startEngine(t, 0, "m"), gone)
	gone.Close()
	c.AdminListen, c.AdminTokenSHA256 = "0.0.0.0:0", strings.ToUpper(hashOf("right"))
	a := startAgent(t, c)
	defer stopped(t, a)

	f := func(status int, fields ...string) {
		t.Helper()
		for _, path := range guarded {
			resp := adminAnswer(t, a, path, fields...)
			if status == 200 {
				if resp.StatusCode == 401 || resp.StatusCode == 403 {
					t.Errorf("%s with %v: status %d", path, fields, resp.StatusCode)
				}
				continue
			}
			if resp.StatusCode != status && resp.StatusCode/100 != 3 {
				t.Errorf("%s with %v: status %d, want %d", path, fields, resp.StatusCode, status)
			}
			if status == 401 && resp.StatusCode == 401 && !strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), "Bearer ") {
				t.Errorf("%s: 401 asks for %q", path, resp.Header.Get("WWW-Authenticate"))
			}
		}
	}
	f(401)
	f(401, "Authorization: Bearer wrong")
	f(401, "Authorization: Bearer ")
	f(401, "Authorization: Bearer "+hashOf("right"))
	f(401, "Authorization: Basic right")
	f(401, "Authorization: right")
	f(200, "Authorization: Bearer right")
	f(200, "Authorization: bearer right", "Host: agent.example.com")
	f(403, "Authorization: Bearer right", "Origin: http://evil.example.com")

	ready := func(names bool, fields ...string) {
		t.Helper()
		resp := adminAnswer(t, a, "/readyz", fields...)
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != 200 || !strings.HasPrefix(string(body), "degraded") || strings.HasPrefix(string(body), "degraded: ") != names {
			t.Errorf("readyz with %v: %d %q, with names: %v", fields, resp.StatusCode, body, names)
		}
	}
	ready(false)
	ready(false, "Authorization: Bearer wrong")
	ready(true, "Authorization: Bearer right")
	if resp := adminAnswer(t, a, "/healthz", "Host: anything.example.com"); resp.StatusCode != 200 {
		t.Errorf("healthz: status %d", resp.StatusCode)
	}
}

// Who opens connections to the admin port without end takes no descriptors from
// requests, and keeps nobody else away: the next probe is answered.
func TestAdminConnectionsAreBounded(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	open := func() int {
		a.adminConns.mu.Lock()
		defer a.adminConns.mu.Unlock()
		return len(a.adminConns.conns)
	}
	var conns []net.Conn
	for i := range mostAdminConns + 20 {
		c, err := net.Dial("tcp", a.AdminAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
		if i%2 == 0 { // half of a request is no better than nothing of one
			io.WriteString(c, "GET / HT")
		}
		if i < mostAdminConns {
			eventually(t, func() bool { return open() == i+1 }, func() string { return "they are counted wrongly" })
		}
	}
	gone := make(chan error, len(conns))
	for _, c := range conns {
		go func() {
			c.SetReadDeadline(time.Now().Add(9 * time.Second)) // before the server has waited for the head for too long
			_, err := c.Read(make([]byte, 1))
			gone <- err
		}()
	}
	for range 20 {
		if err := <-gone; errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("more stay than there is room for")
		}
	}
	for range 3 {
		if resp := adminAnswer(t, a, "/healthz"); resp.StatusCode != 200 {
			t.Errorf("status %d", resp.StatusCode)
		}
	}
	if n := open(); n > mostAdminConns {
		t.Errorf("there are %d", n)
	}
	for _, c := range conns {
		c.Close()
	}
	eventually(t, func() bool { return open() == 0 }, func() string { return "they are counted for ever" })
}

// Who asks for pages and does not read them is not waited for.
func TestAdminPagesAreRead(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	server := newAdmin(a)
	if server.WriteTimeout <= 0 || server.WriteTimeout > 5*time.Minute {
		t.Errorf("a page may take %v", server.WriteTimeout)
	}
	server.WriteTimeout = 200 * time.Millisecond
	left := make(chan struct{})
	server.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			close(left)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	defer func() {
		server.Close()
		<-done
	}()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		for {
			if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"); err != nil {
				return
			}
		}
	}()
	select {
	case <-left:
	case <-time.After(30 * time.Second):
		t.Error("a page waits for its reader for ever")
	}
}

func TestProfilesAreBounded(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	f := func(status int, path string) {
		t.Helper()
		if resp := adminAnswer(t, a, "/debug/pprof/"+path); resp.StatusCode != status {
			t.Errorf("%s: status %d, want %d", path, resp.StatusCode, status)
		}
	}
	f(200, "trace?seconds=0.01")
	f(400, "trace?seconds=1e9")
	f(400, "trace?seconds=Inf")
	f(400, "trace?seconds=NaN")
	f(400, "profile?seconds=301")
}

func TestCertificateExpiryIsAMetric(t *testing.T) {
	c := testConfig(startEngine(t, 0, "m"))
	c.Server.TLS = tlsFiles(t)
	c.Server.TLS.Listen = "127.0.0.1:0"
	expires := time.Now().Add(time.Hour).Truncate(time.Second)
	cert, key := pemPair(t, "a", expires)
	write(t, c.Server.TLS.CertFile, cert)
	write(t, c.Server.TLS.KeyFile, key)
	a := startAgent(t, c)
	defer stopped(t, a)
	_, body := page(t, a, "/metrics")
	_, value, _ := strings.Cut(body, "\ninferrail_certificate_expiry_timestamp_seconds ")
	value, _, _ = strings.Cut(value, "\n")
	if got, err := strconv.ParseFloat(value, 64); err != nil || int64(got) != expires.Unix() {
		t.Errorf("expires %q, want %d", value, expires.Unix())
	}
}
