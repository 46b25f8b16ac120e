package prompt

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// repository is a name that the Hugging Face hub allows: [org/]name. What else
// it forbids is in isRepository.
var repository = regexp.MustCompile(`^(?:\w(?:[\w.-]{0,94}\w)?/)?\w(?:[\w.-]{0,94}\w)?$`)

func isRepository(name string) bool {
	return repository.MatchString(name) && !strings.Contains(name, "--") && !strings.Contains(name, "..") && !strings.HasSuffix(name, ".git")
}

// resolve returns the directory that holds the files of a model: that of this
// name, else the snapshot of org/name[@revision] in the Hugging Face cache. A
// revision is a branch, a tag or a commit; without one it is main. hubCache is
// the cache, empty for where the environment has it. An error says what was
// looked for and where. Nothing is downloaded.
func resolve(name, hubCache string) (dir string, err error) {
	path := expand(name)
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return path, nil
	case err == nil:
		return "", fmt.Errorf("tokenizer %q: it is a file; name the directory of the model that it belongs to", name)
	case !os.IsNotExist(err) && filepath.IsAbs(path):
		return "", fmt.Errorf("tokenizer %q: %v", name, err)
	}
	repo, revision, named := strings.Cut(name, "@")
	if !named {
		revision = "main"
	}
	if !isRepository(repo) {
		return "", fmt.Errorf("tokenizer %q: there is no such directory, and it is no name org/name[@revision] of a model either", name)
	}
	if !isRevision(revision) {
		return "", fmt.Errorf("tokenizer %q: %q cannot be a revision; name a branch, a tag or a commit", name, revision)
	}
	cache, err := hubDirectory(hubCache)
	if err != nil {
		return "", fmt.Errorf("tokenizer %q: %v", name, err)
	}
	model := filepath.Join(cache, "models--"+strings.ReplaceAll(repo, "/", "--"))
	download := "hf download " + repo
	if named {
		download += " --revision " + revision
	}
	if !isDirectory(model) {
		return "", fmt.Errorf("tokenizer %q: there is no such directory, and the Hugging Face cache has no %s; "+
			"fetch it with %q, or name a directory", name, model, download)
	}
	commit := revision
	if ref, err := os.ReadFile(filepath.Join(model, "refs", filepath.FromSlash(revision))); err == nil {
		commit = strings.TrimSpace(string(ref))
		if !isRevision(commit) || strings.Contains(commit, "/") {
			return "", fmt.Errorf("tokenizer %q: %s does not hold a commit but %.60q; fetch the model again with %q",
				name, filepath.Join(model, "refs", revision), commit, download)
		}
	}
	snapshot := filepath.Join(model, "snapshots", commit)
	if !strings.Contains(commit, "/") && isDirectory(snapshot) {
		return snapshot, nil
	}
	return "", fmt.Errorf("tokenizer %q: %s has no revision %s (it has %s); fetch it with %q",
		name, model, revision, cached(model), download)
}

// isRevision reports whether a branch, tag or commit can be called so. One
// that is a path out of the cache cannot.
func isRevision(revision string) bool {
	for part := range strings.SplitSeq(revision, "/") {
		if part == "" || part == "." || part == ".." {
			return false
		}
	}
	return !strings.ContainsAny(revision, "\\\x00\n") && len(revision) < 256
}

// hubDirectory returns the Hugging Face cache: the one given, or what its
// environment variables say, in its own order.
func hubDirectory(given string) (string, error) {
	home := func(name, below string) string {
		if dir := os.Getenv(name); dir != "" {
			return filepath.Join(expand(os.ExpandEnv(dir)), below)
		}
		return ""
	}
	for _, dir := range []string{expand(given), home("HF_HUB_CACHE", ""), home("HUGGINGFACE_HUB_CACHE", ""), home("HF_HOME", "hub"),
		home("XDG_CACHE_HOME", "huggingface/hub")} {
		if dir != "" {
			return dir, nil
		}
	}
	user, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("cannot tell where the Hugging Face cache is: %v; set HF_HUB_CACHE", err)
	}
	return filepath.Join(user, ".cache/huggingface/hub"), nil
}

// expand replaces ~ in front of a path.
func expand(path string) string {
	if path != "~" && !strings.HasPrefix(path, "~/") {
		return path
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return path
	}
	return filepath.Join(home, path[1:])
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// cached tells people which revisions of a model there are.
func cached(model string) string {
	var names []string
	refs := filepath.Join(model, "refs")
	_ = filepath.WalkDir(refs, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return nil
		}
		// One of which only the name was fetched is not there.
		commit, err := os.ReadFile(path)
		if err == nil && isDirectory(filepath.Join(model, "snapshots", filepath.Base(strings.TrimSpace(string(commit))))) {
			names = append(names, strings.TrimPrefix(path, refs+string(filepath.Separator)))
		}
		return nil
	})
	snapshots, _ := os.ReadDir(filepath.Join(model, "snapshots"))
	for _, s := range snapshots {
		names = append(names, s.Name())
	}
	switch n := len(names); {
	case n == 0:
		return "none"
	case n > 8:
		names = append(slices.Clip(names[:8]), fmt.Sprintf("%d more", n-8))
	}
	return strings.Join(names, ", ")
}
