package bench

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakePython puts a python3 into PATH that makes a virtual environment whose
// own python runs the given lines.
func fakePython(t *testing.T, lines string) {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\nmkdir -p \"$3/bin\"\nprintf '%s' '#!/bin/sh\n" + lines + "\n' >\"$3/bin/python\"\nchmod +x \"$3/bin/python\"\n"
	if err := os.WriteFile(filepath.Join(dir, "python3"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func TestInstall(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	r := router{name: "some-router", version: "1.2", module: "some_router.launch", args: []string{"--quiet"}}
	left := func() (names []string) {
		entries, err := os.ReadDir(filepath.Join(cache, "inferrail", "bench"))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}

	fakePython(t, "echo looking\necho no such package\nexit 1")
	if err := r.install(t.Context()); err == nil || !strings.HasSuffix(err.Error(), "cannot install some-router 1.2: exit status 1: no such package") {
		t.Errorf("%v", err)
	}
	if names := left(); len(names) > 0 {
		t.Errorf("a failed installation leaves %v", names)
	}

	fakePython(t, `echo "$*" >"$(dirname "$0")/ran"`)
	if err := r.install(t.Context()); err != nil {
		t.Fatal(err)
	}
	if names := left(); len(names) != 1 {
		t.Errorf("an installation leaves %v", names)
	}
	command, err := r.command(setup{engines: []string{"10.0.0.1:1", "10.0.0.1:2"}})
	if err != nil {
		t.Fatal(err)
	}
	ran, err := os.ReadFile(filepath.Join(filepath.Dir(command[0]), "ran"))
	if err != nil || !strings.HasSuffix(string(ran), " some-router==1.2\n") {
		t.Errorf("pip was run with %q, %v", ran, err)
	}
	want := "-m some_router.launch --host 10.77.1.1 --port 8080 --policy round_robin --worker-startup-check-interval 1 --worker-urls http://10.0.0.1:1 http://10.0.0.1:2 --quiet"
	if got := strings.Join(command[1:], " "); got != want {
		t.Errorf("started with\n%s, want\n%s", got, want)
	}

	// What is there is not installed again.
	fakePython(t, "exit 1")
	if err := r.install(t.Context()); err != nil {
		t.Error(err)
	}
}
