package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// router is a router for LLM engines that PyPI serves. It is installed into a
// virtual environment of its own under the user's cache folder, where later
// runs find it.
type router struct {
	name    string // of the package
	version string
	module  string   // that python -m runs
	args    []string // beside address, policy and workers
}

// routers are compared in round-robin mode where it is about what passing a request
// on costs: their other policies read more of it than the other contestants do.
var routers = []router{
	{name: "sglang-router", version: "0.3.2", module: "sglang_router.launch_router",
		args: []string{"--log-level", "warn", "--shutdown-grace-period-secs", "1"}},
	{name: "vllm-router", version: "0.1.17", module: "vllm_router.launch_router",
		args: []string{"--log-level", "warning"}},
}

// installTime bounds the installation of one router.
const installTime = 4 * time.Minute

func (r *router) contestant() contestant {
	return contestant{name: r.name, command: r.command, prepare: r.install}
}

func (r *router) command(s setup) ([]string, error) {
	dir, err := r.dir()
	if err != nil {
		return nil, err
	}
	host, port := s.listen()
	if host == "" {
		if host, _, err = net.SplitHostPort(proxyAddr); err != nil {
			return nil, err
		}
	}
	command := []string{filepath.Join(dir, "bin", "python"), "-m", r.module, "--host", host, "--port", port,
		"--policy", cmp.Or(s.balance, "round_robin"), "--worker-startup-check-interval", "1", "--worker-urls"}
	for _, addr := range s.engines {
		command = append(command, "http://"+addr)
	}
	return append(command, r.args...), nil
}

func (r *router) dir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder to install %s to: %w", r.name, err)
	}
	return filepath.Join(cache, "inferrail", "bench", r.name+"-"+r.version), nil
}

// install makes sure that the router is there. A folder of its name is whole:
// it gets the name last.
func (r *router) install(ctx context.Context) error {
	dir, err := r.dir()
	if err != nil {
		return err
	}
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	unfinished, err := os.MkdirTemp(filepath.Dir(dir), "unfinished-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(unfinished)
	ctx, cancel := context.WithTimeoutCause(ctx, installTime, fmt.Errorf("not done after %v", installTime))
	defer cancel()
	for _, args := range [][]string{
		{"python3", "-m", "venv", unfinished},
		{filepath.Join(unfinished, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", r.name + "==" + r.version},
	} {
		out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("cannot install %s %s: %w: %s", r.name, r.version, err, lastLine(out))
		}
	}
	if err := os.Rename(unfinished, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

// lastLine is where pip says what was wrong.
func lastLine(out []byte) []byte {
	out = bytes.TrimSpace(out)
	return out[bytes.LastIndexByte(out, '\n')+1:]
}
