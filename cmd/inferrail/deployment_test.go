package main

import (
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/inferrail/inferrail/agent"
)

// compose mirrors as much of a compose file as is used; another key is an error.
type compose struct {
	Name     string `yaml:"name"`
	Base     any    `yaml:"x-inferrail"`
	Services map[string]composed
	Volumes  map[string]any
}

type composed struct {
	Image       string            `yaml:"image"`
	Build       map[string]string `yaml:"build"`
	Network     string            `yaml:"network_mode"`
	Restart     string            `yaml:"restart"`
	ReadOnly    bool              `yaml:"read_only"`
	CapDrop     []string          `yaml:"cap_drop"`
	CapAdd      []string          `yaml:"cap_add"`
	Security    []string          `yaml:"security_opt"`
	Profiles    []string          `yaml:"profiles"`
	User        string            `yaml:"user"`
	Ulimits     map[string]int    `yaml:"ulimits"`
	Grace       string            `yaml:"stop_grace_period"`
	Command     []string          `yaml:"command"`
	Environment map[string]string `yaml:"environment"`
	Volumes     []mount           `yaml:"volumes"`
	Health      struct {
		Test        []string `yaml:"test"`
		Interval    string   `yaml:"interval"`
		Timeout     string   `yaml:"timeout"`
		StartPeriod string   `yaml:"start_period"`
		Retries     int      `yaml:"retries"`
		Disable     bool     `yaml:"disable"`
	} `yaml:"healthcheck"`
	DependsOn map[string]struct {
		Condition string `yaml:"condition"`
	} `yaml:"depends_on"`
}

type mount struct {
	Type     string `yaml:"type"`
	Source   string `yaml:"source"`
	Target   string `yaml:"target"`
	ReadOnly bool   `yaml:"read_only"`
}

// parses reports what is wrong with a command line.
func parses(t *testing.T, where string, args []string) *commands {
	t.Helper()
	var c commands
	if _, err := newParser(&c, &env{stdout: io.Discard, stderr: io.Discard}).Parse(args); err != nil {
		t.Errorf("%s: inferrail %s: %v", where, strings.Join(args, " "), err)
	}
	return &c
}

// What the compose file starts goes together: command lines, files, ports, health
// checks, and nothing that is reached from elsewhere.
func TestComposeFile(t *testing.T) {
	const dir = "../../deploy/compose/"
	var c compose
	if err := yaml.UnmarshalWithOptions([]byte(read(t, "deploy/compose/compose.yaml")), &c, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	p := start(t, "check", dir+"config.yaml")
	p.exit(0)
	cfg := agent.DefaultConfig()
	if err := cfg.ReadConfig(dir + "config.yaml"); err != nil {
		t.Fatal(err)
	}
	loopback := func(where, address string) {
		t.Helper()
		if !strings.HasPrefix(address, "127.0.0.1:") {
			t.Errorf("%s is at %s, which is not loopback", where, address)
		}
	}
	loopback("the agent", cfg.Listen)
	loopback("its admin port", cfg.AdminListen)

	engines := map[string]string{} // their URLs, by the service
	for name, s := range c.Services {
		if s.Network != "host" || !strings.Contains(s.Image, ":") || strings.HasSuffix(s.Image, ":latest") {
			t.Errorf("%s: network %q, image %q", name, s.Network, s.Image)
		}
		if s.Health.Test == nil && !s.Health.Disable && name != "jaeger" {
			t.Errorf("%s has no health check", name)
		}
		for other, d := range s.DependsOn {
			if c.Services[other].Health.Test == nil || d.Condition != "service_healthy" {
				t.Errorf("%s waits for %s, of which nobody knows whether it is well", name, other)
			}
		}
		for _, v := range s.Volumes {
			switch {
			case v.Type == "volume":
				if _, ok := c.Volumes[v.Source]; !ok {
					t.Errorf("%s: there is no volume %s", name, v.Source)
				}
			case strings.HasPrefix(v.Source, "."):
				if _, err := os.Stat(dir + v.Source); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if !v.ReadOnly {
					t.Errorf("%s may change %s", name, v.Source)
				}
			case v.Source != "/sys/fs/bpf":
				t.Errorf("%s has %s of the host", name, v.Source)
			}
		}
		if s.Build == nil {
			continue
		}
		if s.Build["target"] == "" || !regexp.MustCompile(`(?m)^FROM \S+ AS `+s.Build["target"]+`$`).MatchString(read(t, filepath.Join("deploy/compose", s.Build["context"], s.Build["dockerfile"]))) {
			t.Errorf("%s is built from stage %q", name, s.Build["target"])
		}
		if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) {
			t.Errorf("%s may do more than it has to", name)
		}
		command := parses(t, name, s.Command)
		probed := ""
		if test := s.Health.Test; test != nil {
			if len(test) < 2 || test[0] != "CMD" || test[1] != "/inferrail" {
				t.Fatalf("%s is asked by %q", name, test)
			}
			probed = parses(t, name, test[2:]).Probe.URL
		}
		switch s.Command[0] {
		case "agent":
			if probed != "http://"+cfg.AdminListen+"/readyz" {
				t.Errorf("the agent's health is asked at %s", probed)
			}
			if !slices.Equal(s.CapAdd, []string{"BPF", "NET_ADMIN", "PERFMON"}) {
				t.Errorf("the agent has %q", s.CapAdd)
			}
			grace, err := time.ParseDuration(s.Grace)
			if err != nil || grace < cfg.Server.ShutdownTimeout+10*time.Second {
				t.Errorf("%v are granted to an agent that takes %v", grace, cfg.Server.ShutdownTimeout)
			}
			mounted := func(m mount) bool { return m.Target == command.Agent.Config && m.Source == "./config.yaml" }
			if !slices.ContainsFunc(s.Volumes, mounted) {
				t.Errorf("the configuration is not at %s", command.Agent.Config)
			}
		case "sim":
			sim := command.Sim.Config
			engines[name] = fmt.Sprintf("http://%s:%d", sim.Host, sim.Port)
			loopback(name, strings.TrimPrefix(engines[name], "http://"))
			if probed != engines[name]+"/health" {
				t.Errorf("the health of %s is asked at %s", name, probed)
			}
			if _, err := sim.Completed(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case "bench":
			if command.Bench.Run.URL != "http://"+cfg.Listen {
				t.Errorf("%s asks %s", name, command.Bench.Run.URL)
			}
		}
	}
	configured := map[string]string{}
	for _, r := range cfg.Replicas {
		configured[r.ID] = r.URL
	}
	if fmt.Sprint(configured) != fmt.Sprint(engines) {
		t.Errorf("the agent asks %v, and there are %v", configured, engines)
	}

	// The others reach what they look at.
	for file, wants := range map[string][]string{
		"deploy/prometheus/prometheus.yml":                    {`"` + cfg.AdminListen + `"`, "rule_files: [alerts.yaml]"},
		"deploy/compose/grafana/datasources/datasources.yaml": {"http://127.0.0.1:9091", "http://127.0.0.1:16686"},
		"deploy/compose/grafana/dashboards/dashboards.yaml":   {"path: /var/lib/inferrail/dashboards"},
	} {
		for _, want := range wants {
			if !strings.Contains(read(t, file), want) {
				t.Errorf("%s lacks %s", file, want)
			}
		}
	}
	if !slices.Contains(c.Services["prometheus"].Command, "--web.listen-address=127.0.0.1:9091") || c.Services["grafana"].Environment["GF_SERVER_HTTP_ADDR"] != "127.0.0.1" ||
		c.Services["jaeger"].Environment["JAEGER_LISTEN_HOST"] != "127.0.0.1" {
		t.Error("one of the others listens elsewhere than on loopback")
	}
}

// What the Containerfile copies is there, and its instructions are known ones.
func TestContainerfile(t *testing.T) {
	text := read(t, "deploy/container/Containerfile")
	text = regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(text, "")
	text = strings.ReplaceAll(text, "\\\n", " ")
	stages := map[string]bool{}
	known := strings.Fields("ARG FROM WORKDIR ENV COPY RUN LABEL USER EXPOSE STOPSIGNAL ENTRYPOINT CMD HEALTHCHECK")
	built := false
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if !slices.Contains(known, f[0]) {
			t.Errorf("unknown instruction: %s", line)
		}
		f = append(f[:1:1], slices.DeleteFunc(f[1:], func(s string) bool {
			if stage, ok := strings.CutPrefix(s, "--from="); ok && !stages[stage] {
				t.Errorf("there is no stage %s", stage)
			}
			return strings.HasPrefix(s, "--platform") || strings.HasPrefix(s, "--mount")
		})...)
		switch f[0] {
		case "FROM":
			if len(f) != 4 || f[2] != "AS" {
				t.Fatalf("no name: %s", line)
			}
			stages[f[3]] = true
		case "COPY":
			if strings.HasPrefix(f[1], "--from=") {
				continue
			}
			for _, source := range f[1 : len(f)-1] {
				if _, err := os.Stat("../../" + source); err != nil {
					t.Error(err)
				}
			}
		case "HEALTHCHECK":
			words := regexp.MustCompile(`"([^"]+)"`).FindAllStringSubmatch(line, -1)
			var args []string
			for _, w := range words[1:] {
				args = append(args, w[1])
			}
			parses(t, "HEALTHCHECK", args)
		case "CMD":
			parses(t, "CMD", strings.FieldsFunc(strings.TrimPrefix(strings.TrimSpace(line), "CMD "), func(r rune) bool { return strings.ContainsRune(`[]", `, r) }))
		case "RUN":
			built = built || strings.Contains(line, "CGO_ENABLED=0") && strings.Contains(line, "go build -trimpath") && strings.Contains(line, "./cmd/inferrail")
		}
	}
	if !built || !stages["inferrail"] || !stages["hf"] {
		t.Errorf("the stages are %v", stages)
	}
	if v := regexp.MustCompile(`(?m)^toolchain go(\S+)$`).FindStringSubmatch(read(t, "go.mod")); !strings.Contains(text, "GO_VERSION="+v[1]+"\n") {
		t.Errorf("the image is built by another Go than %s", v[1])
	}
}

// What the image holds suffices: the program and the certificates, in a root with
// nothing else, for a user whom no file knows.
func TestImageIsEnough(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("chroot needs root")
	}
	const certificates = "/etc/ssl/certs/ca-certificates.crt"
	served := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "well\n") }))
	defer served.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: served.Certificate().Raw})
	chroot, err := exec.LookPath("chroot")
	if err != nil {
		t.Skip(err)
	}
	root := t.TempDir()
	program, err := os.ReadFile(asUsed(t))
	if err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string][]byte{"/inferrail": program, certificates: ca, "/etc/inferrail/config.yaml": []byte(
		"listen: 127.0.0.1:0\nadmin_listen: 127.0.0.1:0\ndatapath: {mode: copy}\nreplicas: [{url: \"http://127.0.0.1:1\"}]\n")} {
		if err := os.MkdirAll(root+filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+file, content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for dir := root; strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	inside := func(args ...string) []string {
		return append([]string{"--userspec=65532:65532", root, "/inferrail"}, args...)
	}
	a := startChild(t, chroot, inside("agent", "--config", "/etc/inferrail/config.yaml")...)
	told := regexp.MustCompile(`(?m)^listening +\S+, admin (\S+)$`)
	var admin string
	for began := time.Now(); admin == ""; time.Sleep(20 * time.Millisecond) {
		if m := told.FindStringSubmatch(a.out.String()); m != nil {
			admin = m[1]
		}
		select {
		case <-a.ended:
			t.Fatalf("the agent has ended: %v\n%s", a.err, a.out)
		default:
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("the agent does not start:\n%s", a.out)
		}
	}
	if out, err := exec.Command(chroot, inside("probe", admin+"/healthz")...).CombinedOutput(); err != nil {
		t.Errorf("the health check: %v, %s", err, out)
	}
	// Authorities are found where the image has them, and nowhere else.
	if out, err := exec.Command(chroot, inside("probe", served.URL)...).CombinedOutput(); err != nil {
		t.Errorf("a server whose authority is known: %v, %s", err, out)
	}
	if err := os.Remove(root + certificates); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(chroot, inside("probe", served.URL)...).CombinedOutput(); err == nil || !strings.Contains(string(out), "certificate signed by unknown authority") {
		t.Errorf("a server whose authority is not: %v, %s", err, out)
	}
}
