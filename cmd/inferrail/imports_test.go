package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/inferrail/inferrail/"

// mayImport states which of our packages each top-level folder may import. A
// folder that is not here must not hold Go.
var mayImport = map[string][]string{
	"cmd":       {"agent", "bench", "simulator", "simulator/workload", "simulator/virtual"},
	"agent":     {"bpf", "proxy", "proxy/prompt", "proxy/prompt/tokenizer", "index", "index/kvevent", "policy"},
	"proxy":     {"index", "policy", "proxy/prompt", "proxy/prompt/template", "proxy/prompt/tokenizer"},
	"simulator": {"index", "index/kvevent", "policy", "proxy/prompt", "proxy/prompt/tokenizer", "simulator", "simulator/workload"},
	"bench":     {"simulator", "simulator/workload", "simulator/virtual"},
	"bpf":       {},
	"index":     {"index/kvevent"},
	"policy":    {},
	"deploy":    {},
}

// testsMayImport states what tests may import beyond that: the simulator is
// every test's upstream, and the lab of network namespaces that runs whole
// agents asks bpf whether the machine can.
var testsMayImport = map[string][]string{
	"agent": {"simulator", "simulator/workload"},
	// A cache is known exactly by events.
	"proxy": {"simulator", "index/kvevent"},
	"bpf":   {"simulator", "proxy"},
	"cmd":   {"bpf", "policy"},
	// What is deployed goes together with the agent.
	"deploy": {"agent", "simulator"},
}

// onlyIn states which folders may import packages of others, by the beginning
// of their path. The folders in tests may do so in their tests.
var onlyIn = []struct {
	path    string
	folders []string
	tests   []string
}{
	{path: "github.com/cilium/ebpf", folders: []string{"bpf"}},
	{path: "github.com/alecthomas/kong", folders: []string{"cmd"}},
	{path: "github.com/modelcontextprotocol/go-sdk", folders: []string{"cmd"}},
	{path: "github.com/miekg/dns", folders: []string{"agent"}},
	{path: "go.opentelemetry.io", folders: []string{"agent"}},
	{path: "k8s.io", folders: []string{"agent"}, tests: []string{"deploy"}},
	{path: "github.com/zeebo/xxh3", folders: []string{"index", "proxy"}},
	{path: "github.com/vishvananda/netlink", folders: []string{"agent", "bench"}, tests: []string{"bpf", "cmd"}},
	{path: "github.com/prometheus/prometheus", tests: []string{"deploy"}},
	{path: "github.com/klauspost/compress", folders: []string{"agent"}},
	{path: "github.com/vmihailenco/msgpack", folders: []string{"index"}},
	{path: "github.com/go-zeromq/zmq4", folders: []string{"agent", "simulator"}, tests: []string{"cmd"}},
	{path: "github.com/daulet/tokenizers", folders: []string{"proxy"}},
	{path: "github.com/cockroachdb/datadriven", tests: []string{"agent", "proxy", "policy", "index", "simulator", "bench", "bpf", "cmd"}},
	{path: "testing", tests: []string{"agent", "proxy", "policy", "index", "simulator", "bench", "bpf", "cmd", "deploy"}},
}

// topLevel are the entries that the repository may have, names that begin with
// a dot aside.
var topLevel = strings.Fields("bpf cmd agent proxy index policy simulator bench deploy go.mod go.sum Makefile README.md LICENSE bin")

// listed mirrors the part of "go list -json" that is looked at.
type listed struct {
	ImportPath                string
	Imports                   []string
	TestImports, XTestImports []string
	CgoFiles                  []string
}

func TestImportsPointOneWay(t *testing.T) {
	packages := goList(t)
	if len(packages) < 4 {
		t.Fatalf("go list found only %d packages", len(packages))
	}
	for _, p := range packages {
		for _, problem := range check(p) {
			t.Error(problem)
		}
	}
}

func TestTopLevelIsFixed(t *testing.T) {
	entries, err := os.ReadDir("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(topLevel, e.Name()) {
			t.Errorf("%s is not one of the top-level entries: %v", e.Name(), topLevel)
		}
	}
}

// The check itself must see what it is there for.
func TestImportCheck(t *testing.T) {
	f := func(p listed, want string) {
		t.Helper()
		p.ImportPath = module + p.ImportPath
		got := strings.Join(check(p), "\n")
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%+v: got %q, want %q", p, got, want)
		}
	}
	imports := func(from string, paths ...string) listed { return listed{ImportPath: from, Imports: paths} }

	f(imports("agent", "fmt", module+"proxy", module+"bpf"), "")
	f(imports("proxy", module+"proxy/prompt"), "")
	f(imports("cmd/inferrail", "github.com/alecthomas/kong", module+"agent"), "")
	f(listed{ImportPath: "proxy", XTestImports: []string{module + "simulator", module + "proxy", "testing"}}, "")
	f(listed{ImportPath: "bpf", TestImports: []string{"github.com/vishvananda/netlink"}}, "")

	f(imports("agent", module+"simulator"), "agent must not import simulator")
	f(imports("policy", module+"proxy"), "policy must not import proxy")
	f(imports("bench", module+"proxy/prompt"), "bench must not import proxy/prompt")
	f(imports("common", "fmt"), "unknown top-level folder")
	f(imports("agent", "github.com/cilium/ebpf/link"), "agent must not import github.com/cilium/ebpf/link")
	f(imports("bench", "github.com/alecthomas/kong"), "bench must not import")
	f(imports("bpf", "github.com/vishvananda/netlink"), "bpf must not import")
	f(imports("proxy", "testing"), "proxy must not import testing")
	f(listed{ImportPath: "policy", TestImports: []string{module + "simulator"}}, "policy's tests must not import simulator")
	f(listed{ImportPath: "proxy", TestImports: []string{module + "agent"}}, "proxy's tests must not import agent")
	f(listed{ImportPath: "agent", CgoFiles: []string{"x.go"}}, "uses cgo")
}

// check returns what is wrong with a package's imports.
func check(p listed) (problems []string) {
	self := strings.TrimPrefix(p.ImportPath, module)
	folder, _, _ := strings.Cut(self, "/")
	ours, ok := mayImport[folder]
	if !ok {
		return []string{self + " is in an unknown top-level folder"}
	}
	if len(p.CgoFiles) > 0 {
		problems = append(problems, self+" uses cgo")
	}
	for _, path := range p.Imports {
		if other, ok := strings.CutPrefix(path, module); ok {
			if !slices.Contains(ours, other) {
				problems = append(problems, self+" must not import "+other)
			}
			continue
		}
		for _, rule := range onlyIn {
			if under(path, rule.path) && !slices.Contains(rule.folders, folder) {
				problems = append(problems, self+" must not import "+path)
			}
		}
	}
	for _, path := range slices.Concat(p.TestImports, p.XTestImports) {
		if other, ok := strings.CutPrefix(path, module); ok {
			if other != self && !slices.Contains(ours, other) && !slices.Contains(testsMayImport[folder], other) {
				problems = append(problems, self+"'s tests must not import "+other)
			}
			continue
		}
		for _, rule := range onlyIn {
			if under(path, rule.path) && !slices.Contains(rule.folders, folder) && !slices.Contains(rule.tests, folder) {
				problems = append(problems, self+"'s tests must not import "+path)
			}
		}
	}
	return problems
}

func under(path, prefix string) bool {
	return path == prefix || strings.HasPrefix(path, prefix+"/")
}

func goList(t *testing.T) []listed {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,TestImports,XTestImports,CgoFiles", module+"...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var packages []listed
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
}
