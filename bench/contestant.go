package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// contestant is one way from the clients to the engines. It listens on
// proxyAddr and passes everything on to them.
type contestant struct {
	name string
	// command returns what to run on the proxy host; nil runs nothing and lets
	// the kernel forward.
	command func(s setup) ([]string, error)
	// prepare gets what command needs and the machine may lack; nil does nothing.
	prepare func(ctx context.Context) error
	// agent: it is ours, and has an admin port with /debug/datapath.
	agent bool
}

// setup is what a contestant must be told.
type setup struct {
	agent    []string // how to start the agent; empty is this program's agent command
	engines  []string // addresses to pass requests on to
	clients  int      // connections that clients may open
	streamed bool     // answers are streams, not to be held back
	dir      string   // for its configuration
	// host and port are where to listen; without them every address and proxyPort.
	host, port string
	// balance is how to choose among the engines, in the contestant's own words; its
	// usual way when empty.
	balance string
}

// listen is where to listen, with a port of the host's own if it has none.
func (s *setup) listen() (host, port string) {
	if s.port == "" {
		return s.host, proxyPort
	}
	return s.host, s.port
}

// address is what nginx and haproxy are told to listen at.
func (s *setup) address() string {
	host, port := s.listen()
	return net.JoinHostPort(cmp.Or(host, "*"), port)
}

// contestants in the order of the table. direct is first: it is what the
// others are compared with.
var contestants = []contestant{
	{name: "direct"},
	{name: "packet", command: agentCommand("packet"), agent: true},
	{name: "copy", command: agentCommand("copy"), agent: true},
	{name: "nginx", command: nginxCommand},
	{name: "haproxy", command: haproxyCommand},
}

// choose returns those of all that are named; no name stands for all of them.
func choose(all []contestant, only []string) (chosen []contestant, err error) {
	var names []string
	for _, c := range all {
		names = append(names, c.name)
		if len(only) == 0 || slices.Contains(only, c.name) {
			chosen = append(chosen, c)
		}
	}
	for _, name := range only {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("no contestant %q; there are %s", name, strings.Join(names, ", "))
		}
	}
	return chosen, nil
}

// checkMachine reports whether contestants can be run for so many clients.
func checkMachine(clients int) error {
	if os.Geteuid() != 0 {
		return errors.New("must run as root: it makes network namespaces")
	}
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("getrlimit: %w", err)
	}
	if need := uint64(proxyFiles(clients)); files.Max < need {
		return fmt.Errorf("%d clients need %d open files in a proxy, the limit is %d (ulimit -Hn)", clients, need, files.Max)
	}
	return nil
}

func (c *contestant) target() string {
	if c.command == nil {
		return engineAddr
	}
	return proxyAddr
}

func agentCommand(tier string) func(setup) ([]string, error) {
	return func(s setup) ([]string, error) {
		command := s.agent
		if len(command) == 0 {
			self, err := os.Executable()
			if err != nil {
				return nil, err
			}
			command = []string{self, "agent"}
		}
		command = append(command[:len(command):len(command)], "--datapath", tier)
		for i, addr := range s.engines {
			command = append(command, "--replica", fmt.Sprintf("e%d=http://%s", i, addr))
		}
		return append(command, "--listen", ":"+proxyPort, "--iface", clientDevice, "--iface", engineDevice), nil
	}
}

// proxyThreads is what nginx and haproxy get: as many as there are CPUs, at
// most two.
func proxyThreads() int { return min(runtime.NumCPU(), 2) }

// proxyFiles is the number of files a proxy may need for so many clients: one
// worker of nginx may get them all.
func proxyFiles(clients int) int { return 2*clients + 256 }

// Every connection towards the engine may be kept: nginx and haproxy would
// otherwise close and open them between responses.
func nginxCommand(s setup) ([]string, error) {
	path, err := exec.LookPath("nginx")
	if err != nil {
		return nil, fmt.Errorf("%w (apt-get install nginx-light)", err)
	}
	var servers strings.Builder
	for _, addr := range s.engines {
		fmt.Fprintf(&servers, "        server %s;\n", addr)
	}
	buffering, balance := "on", ""
	if s.streamed {
		buffering = "off"
	}
	if s.balance != "" {
		balance = "        " + s.balance + ";\n"
	}
	config := fmt.Sprintf(`user root;
daemon off;
worker_processes %[1]d;
worker_rlimit_nofile %[2]d;
pid %[3]s/nginx.pid;
error_log stderr warn;
events { worker_connections %[4]d; }
http {
    access_log off;
    tcp_nodelay on;
    keepalive_requests 1000000;
    client_body_temp_path %[3]s/body;
    proxy_temp_path %[3]s/proxy;
    fastcgi_temp_path %[3]s/fastcgi;
    uwsgi_temp_path %[3]s/uwsgi;
    scgi_temp_path %[3]s/scgi;
    client_max_body_size 64m;
    client_body_buffer_size 1m;
    upstream engine {
        zone engine 256k;
%[8]s%[5]s        keepalive %[4]d;
        keepalive_requests 1000000;
    }
    server {
        listen %[6]s backlog=4096;
        location / {
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering %[7]s;
            proxy_read_timeout 10m;
        }
    }
}
`, proxyThreads(), proxyFiles(s.clients), s.dir, proxyFiles(s.clients), servers.String(), s.address(), buffering, balance)
	file := filepath.Join(s.dir, "nginx.conf")
	return []string{path, "-p", s.dir, "-e", "stderr", "-c", file}, os.WriteFile(file, []byte(config), 0o600)
}

func haproxyCommand(s setup) ([]string, error) {
	path, err := exec.LookPath("haproxy")
	if err != nil {
		return nil, fmt.Errorf("%w (apt-get install haproxy)", err)
	}
	config := fmt.Sprintf(`global
    nbthread %d
    maxconn %d
defaults
    mode http
    option http-no-delay
    http-reuse always
    timeout connect 5s
    timeout client 10m
    timeout server 10m
frontend clients
    bind %s backlog 4096
    maxconn %[2]d
    default_backend engine
backend engine
    balance %[4]s
`, proxyThreads(), s.clients+64, s.address(), cmp.Or(s.balance, "roundrobin"))
	for i, addr := range s.engines {
		config += fmt.Sprintf("    server e%d %s\n", i, addr)
	}
	file := filepath.Join(s.dir, "haproxy.cfg")
	return []string{path, "-db", "-f", file}, os.WriteFile(file, []byte(config), 0o600)
}

// awaitReady waits until a client gets the engine's model list through the
// contestant. p may be nil.
func (c *contestant) awaitReady(ctx context.Context, n *network, p *process) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("no answer in %v", startTimeout))
	defer cancel()
	url := "http://" + c.target() + "/v1/models"
	for {
		body, err := get(ctx, n.client, url)
		if err == nil && strings.Contains(string(body), `"`+model+`"`) {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("GET %s: no %s in %.200q", url, model, body)
		}
		if p != nil {
			if err := p.running(); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			err = fmt.Errorf("%w; last: %w", context.Cause(ctx), err)
			if p != nil {
				err = p.failed(err)
			}
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// AgentReport is what the agent's GET /debug/datapath says of itself. The
// counters are cumulative there, and differences in a Measurement.
type AgentReport struct {
	Tier    string  `json:"tier"`
	Reason  string  `json:"reason,omitempty"`
	Wakeups *uint64 `json:"wakeups"`
	Chunks  *uint64 `json:"chunks"`
}

const debugURL = "http://127.0.0.1:9090/debug/datapath"

func agentReport(ctx context.Context, h *host) (r AgentReport, err error) {
	body, err := get(ctx, h, debugURL)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return r, fmt.Errorf("GET %s: %w in %.200q", debugURL, err, body)
	}
	if r.Wakeups == nil || r.Chunks == nil {
		return r, fmt.Errorf("GET %s: no wakeups or chunks in %.200q", debugURL, body)
	}
	return r, nil
}

func (r AgentReport) since(before AgentReport) AgentReport {
	wakeups, chunks := *r.Wakeups-*before.Wakeups, *r.Chunks-*before.Chunks
	r.Wakeups, r.Chunks = &wakeups, &chunks
	return r
}

// get fetches a page from a host. It is for questions, not for load.
func get(ctx context.Context, h *host, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	// Connected here, not by the transport: that leaves a goroutine behind, which
	// may use the host when it is closed already.
	conn, err := h.dial(&net.Dialer{Timeout: time.Second}, req.URL.Host)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %s: %.200q", url, resp.Status, body)
	}
	return body, nil
}
