package deploy_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// unit is the systemd unit's assignments, a list a key.
func unit(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("systemd/inferrail.service")
	if err != nil {
		t.Fatal(err)
	}
	keys := map[string][]string{}
	for _, m := range regexp.MustCompile(`(?m)^(\w+)=(.*)$`).FindAllStringSubmatch(string(text), -1) {
		keys[m[1]] = append(keys[m[1]], m[2])
	}
	return keys
}

// The unit has the privileges that the test of them in cmd/inferrail shows to
// suffice, and the agent's own patience goes before systemd's.
func TestUnit(t *testing.T) {
	u := unit(t)
	f := func(key, want string) {
		t.Helper()
		if got := strings.Join(u[key], " | "); got != want {
			t.Errorf("%s=%s, want %s", key, got, want)
		}
	}
	f("Type", "notify")
	f("CapabilityBoundingSet", "CAP_BPF CAP_NET_ADMIN CAP_PERFMON")
	f("NoNewPrivileges", "yes")
	f("ReadWritePaths", "-/sys/fs/bpf -/proc/sys/net/ipv4/conf/lo")
	f("User", "") // of whom the BPF file system is
	if u["WatchdogSec"] == nil || u["LimitNOFILE"] == nil || u["ExecReload"] == nil {
		t.Errorf("the unit is %v", u)
	}
	// Variables of the file are those of the agent's flags, or of what it is made of.
	env, err := os.ReadFile("systemd/inferrail.env")
	if err != nil {
		t.Fatal(err)
	}
	var knows strings.Builder
	for _, file := range []string{"../cmd/inferrail/agent.go", "../agent/traces.go"} {
		code, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		knows.Write(code)
	}
	for _, m := range regexp.MustCompile(`(?m)^#([A-Z_]+)=`).FindAllStringSubmatch(string(env), -1) {
		if m[1] != "GOMEMLIMIT" && !strings.Contains(knows.String(), m[1]) {
			t.Errorf("the agent knows no %s", m[1])
		}
	}
}

// systemd takes every line of the unit for what it knows.
func TestUnitVerifies(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze")
	}
	// It looks for the program, which is not installed here.
	dir := t.TempDir()
	text, err := os.ReadFile("systemd/inferrail.service")
	if err != nil {
		t.Fatal(err)
	}
	truth, err := exec.LookPath("true")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "inferrail.service")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(text), "/usr/local/bin/inferrail", truth)), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(analyze, "verify", "--man=no", file).CombinedOutput()
	if err != nil || strings.Contains(string(out), "inferrail.service") {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	out, err = exec.Command(analyze, "security", "--offline=yes", "--threshold=25", file).CombinedOutput()
	if err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}
}
