package agent

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/proxy"
)

// TROUBLESHOOTING.md tells of every reason for which the kernel does not carry an
// answer, and of none that there is not.
func TestTroubleshootingHasEveryReason(t *testing.T) {
	page, err := os.ReadFile("TROUBLESHOOTING.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, ok := strings.Cut(string(page), "\n## Why is this stream not spliced?\n")
	if !ok {
		t.Fatal("there is no section of streams that are not spliced")
	}
	told := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]+`) \\|").FindAllStringSubmatch(part, -1) {
		for _, word := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			told[word[1]] = true
		}
	}
	reasons := slices.Concat(bpf.Whys(), bpf.SocketWhys(), []string{copyForced, copyUnavailable},
		proxy.LabelValues()["inferrail_responses_total"]["reason"])
	for _, reason := range reasons {
		if reason != "" && !told[reason] {
			t.Errorf("the reason %s is not told of", reason)
		}
	}
	for word := range told {
		if !slices.Contains(reasons, word) {
			t.Errorf("there is no reason %s", word)
		}
	}
}

// Each metric that the documents name is one that there is, by its full name or, after
// such a name, by how it goes on.
func TestDocumentsNameMetricsThatThereAre(t *testing.T) {
	list, err := os.ReadFile("METRICS.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(inferrail_[a-z_]+)` \\|").FindAllStringSubmatch(string(list), -1) {
		known[row[1]] = true
	}
	if len(known) < 50 {
		t.Fatalf("only %d metrics found", len(known))
	}
	for _, file := range []string{"../README.md", "README.md", "TROUBLESHOOTING.md", "TUNING.md", "SECURITY.md", "../bpf/README.md", "../deploy/README.md"} {
		page, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("`(inferrail_[a-z_]+)[`{]").FindAllStringSubmatch(string(page), -1) {
			if !known[m[1]] {
				t.Errorf("%s: there is no metric %s", file, m[1])
			}
		}
	}
}
