package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// contestant is one way from the clients to the engine. It listens on
// proxyAddr and passes everything on to engineAddr.
type contestant struct {
	name string
	// command returns what to run on the proxy host; nil runs nothing and lets
	// the kernel forward. Configuration goes to dir.
	command func(d *Datapath, load Load, dir string) ([]string, error)
	// agent: it has an admin port with /debug/datapath.
	agent bool
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

func (c *contestant) target() string {
	if c.command == nil {
		return engineAddr
	}
	return proxyAddr
}

func agentCommand(tier string) func(*Datapath, Load, string) ([]string, error) {
	return func(d *Datapath, _ Load, _ string) ([]string, error) {
		command := d.Agent
		if len(command) == 0 {
			self, err := os.Executable()
			if err != nil {
				return nil, err
			}
			command = []string{self, "agent"}
		}
		return append(command[:len(command):len(command)],
			"--datapath", tier,
			"--replica", "e0=http://"+engineAddr,
			"--listen", ":"+proxyPort,
			"--iface", clientDevice,
			"--iface", engineDevice,
		), nil
	}
}

// proxyThreads is what nginx and haproxy get: as many as there are CPUs, at
// most two.
func proxyThreads() int { return min(runtime.NumCPU(), 2) }

// proxyFiles is the number of files a proxy may need under a load: one worker
// of nginx may get every stream.
func proxyFiles(load Load) int { return 2*load.Streams + 256 }

// Every connection towards the engine may be kept: nginx and haproxy would
// otherwise close and open them between responses.
func nginxCommand(_ *Datapath, load Load, dir string) ([]string, error) {
	path, err := exec.LookPath("nginx")
	if err != nil {
		return nil, fmt.Errorf("%w (apt-get install nginx-light)", err)
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
    upstream engine {
        server %[5]s;
        keepalive %[4]d;
        keepalive_requests 1000000;
    }
    server {
        listen %[6]s backlog=4096;
        location / {
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 10m;
        }
    }
}
`, proxyThreads(), proxyFiles(load), dir, proxyFiles(load), engineAddr, proxyPort)
	file := filepath.Join(dir, "nginx.conf")
	return []string{path, "-p", dir, "-e", "stderr", "-c", file}, os.WriteFile(file, []byte(config), 0o600)
}

func haproxyCommand(_ *Datapath, load Load, dir string) ([]string, error) {
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
    bind :%s backlog 4096
    maxconn %[2]d
    default_backend engine
backend engine
    server e0 %[4]s
`, proxyThreads(), load.Streams+64, proxyPort, engineAddr)
	file := filepath.Join(dir, "haproxy.cfg")
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
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
			return h.dial(&net.Dialer{Timeout: time.Second}, addr)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
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
