package prompt

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	oldCommit = "0123456789abcdef0123456789abcdef01234567"
	newCommit = "89abcdef0123456789abcdef0123456789abcdef"
)

// hub makes a Hugging Face cache as its own library lays it out: files are
// links into blobs, refs hold commits.
func hub(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	model := filepath.Join(dir, "models--org--name")
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(model, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("blobs/aaaa", "{}")
	for _, commit := range []string{oldCommit, newCommit} {
		snapshot := filepath.Join(model, "snapshots", commit)
		if err := os.MkdirAll(snapshot, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("../../blobs/aaaa", filepath.Join(snapshot, "tokenizer.json")); err != nil {
			t.Fatal(err)
		}
	}
	write("refs/main", newCommit)
	write("refs/v1.0", oldCommit+"\n")
	write("refs/refs/pr/3", oldCommit)
	write("refs/gone", strings.Repeat("f", 40))
	write("refs/hostile", "../../..")
	if err := os.MkdirAll(filepath.Join(dir, "models--single", "snapshots", "main"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "outside"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestResolveSuccess(t *testing.T) {
	cache := hub(t)
	model := filepath.Join(cache, "models--org--name", "snapshots")
	f := func(name, want string) {
		t.Helper()
		got, err := resolve(name, cache)
		if err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, want)
		}
	}
	f("org/name", filepath.Join(model, newCommit))
	f("org/name@main", filepath.Join(model, newCommit))
	f("org/name@v1.0", filepath.Join(model, oldCommit))
	f("org/name@refs/pr/3", filepath.Join(model, oldCommit))
	f("org/name@"+oldCommit, filepath.Join(model, oldCommit))
	f("single", filepath.Join(cache, "models--single", "snapshots", "main"))
	f(model, model)
	f(filepath.Join(model, newCommit), filepath.Join(model, newCommit))

	if _, err := os.Stat(filepath.Join(model, newCommit, "tokenizer.json")); err != nil {
		t.Error(err)
	}

	// A directory of that name comes first, as it does for the engines.
	t.Chdir(t.TempDir())
	if err := os.MkdirAll("org/name", 0o755); err != nil {
		t.Fatal(err)
	}
	f("org/name", "org/name")
	f("./org/name", "./org/name")
}

func TestResolveFailure(t *testing.T) {
	cache := hub(t)
	file := filepath.Join(cache, "models--org--name", "refs", "main")
	f := func(name string, want ...string) {
		t.Helper()
		got, err := resolve(name, cache)
		if err == nil {
			t.Errorf("%s: got %q", name, got)
			return
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", name, err, w)
			}
		}
	}
	f("org/other", "models--org--other", "hf download org/other", cache)
	f("org/other@v2", "--revision v2")
	f("org/name@v9", "no revision v9", "main, ", "v1.0", "refs/pr/3", oldCommit, "hf download org/name --revision v9")
	f("org/name@gone", "no revision gone")
	f("org/name@hostile", "does not hold a commit", `"../../.."`)
	f("org/name@", "revision")
	f("org/name@..", "revision")
	f("org/name@../../outside", "revision")
	f("org/name@../main", "revision")
	f("org/name@refs//pr", "revision")
	f("org/name@/etc", "revision")
	f(`org/name@..\main`, "revision")
	f("../outside", "no such directory")
	f("../../etc", "no such directory")
	f("org/..", "no such directory")
	f("org--name", "no such directory")
	f("org/name/more", "no such directory")
	f("-org/name", "no such directory")
	f("örg/name", "no such directory")
	f(filepath.Join(cache, "nowhere"), "no such directory")
	f(file, "is a file")
	f("", "no such directory")
	f("org/"+strings.Repeat("n", 97), "no such directory")
}

// TestHubDirectory: the variables in the order of the hub's own library.
func TestHubDirectory(t *testing.T) {
	for _, name := range []string{"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", "/home/someone")
	f := func(given, want string) {
		t.Helper()
		if got, err := hubDirectory(given); err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", given, got, err, want)
		}
	}
	f("", "/home/someone/.cache/huggingface/hub")
	t.Setenv("XDG_CACHE_HOME", "/xdg")
	f("", "/xdg/huggingface/hub")
	t.Setenv("HF_HOME", "~/hf")
	f("", "/home/someone/hf/hub")
	t.Setenv("HUGGINGFACE_HUB_CACHE", "/old")
	f("", "/old")
	t.Setenv("HF_HUB_CACHE", "$HOME/new")
	f("", "/home/someone/new")
	f("/given", "/given")
	f("~/given", "/home/someone/given")
}
