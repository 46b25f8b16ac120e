package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// container runs what follows as a container runtime would run an agent with the
// node's network: no way to new privileges, and sysctls that cannot be written.
// Only it has a network namespace of its own, for the ports to be free.
const container = `set -e
ip link set lo up
mount --make-rprivate /
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
exec setpriv --no-new-privs "$@"
`

// An agent has the packet tier with the three capabilities that the Helm chart
// gives it, and with none of them less; and the copy tier without any privilege.
func TestPrivilegesThatSuffice(t *testing.T) {
	needLab(t)
	for _, tool := range []string{"unshare", "setpriv", "mount", "ip"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("no " + tool)
		}
	}
	// Somebody else must be able to read it, where go test has put it nobody can.
	program := filepath.Join(t.TempDir(), "inferrail")
	binary, err := os.ReadFile(thisTest())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, binary, 0o755); err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(program); strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	told := regexp.MustCompile(`(?m)^datapath +(.*)$`)
	tier := func(t *testing.T, mode string, privileges ...string) string {
		t.Helper()
		args := append([]string{"--net", "--mount", "sh", "-c", container, "sh"}, privileges...)
		c := startChild(t, "unshare", append(args, program, "agent", "--listen", "127.0.0.1:8080", "--admin-listen", "127.0.0.1:9090",
			"--datapath", mode, "--replica", "http://127.0.0.1:1")...)
		defer c.end()
		for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(20 * time.Millisecond) {
			if m := told.FindStringSubmatch(c.out.String()); m != nil {
				return m[1]
			}
			select {
			case <-c.ended:
				t.Fatalf("the agent has ended: %v\n%s", c.err, c.out)
			default:
			}
		}
		t.Fatalf("the agent tells no tier:\n%s", c.out)
		return ""
	}
	with := func(capabilities string) []string {
		return []string{"--bounding-set", "-all" + capabilities, "--inh-caps", "-all"}
	}
	f := func(capabilities, want string) {
		t.Run(capabilities, func(t *testing.T) {
			if got := tier(t, "auto", with(capabilities)...); !strings.HasPrefix(got, want) {
				t.Errorf("the tier is %s; want %s", got, want)
			}
		})
	}
	f(",+bpf,+net_admin,+perfmon", "packet (self-test passed")
	f(",+bpf,+net_admin", "copy (load BPF programs: ")
	f(",+bpf,+perfmon", "copy (cannot load a BPF program (CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON are needed)")
	f(",+net_admin,+perfmon", "copy (cannot load a BPF program (CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON are needed)")
	// What a container runtime has that does not know CAP_BPF.
	f(",+sys_admin,+net_admin", "packet (self-test passed")
	t.Run("nobody", func(t *testing.T) {
		got := tier(t, "copy", append(with(""), "--reuid", "65532", "--regid", "65532", "--clear-groups")...)
		if !strings.HasPrefix(got, "copy (forced by configuration)") {
			t.Errorf("the tier is %s", got)
		}
	})
}
