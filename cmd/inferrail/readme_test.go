package main

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unicode"

	"github.com/inferrail/inferrail/agent"
	"github.com/inferrail/inferrail/simulator"
)

// documents are all pages of Markdown in the tree, from its root.
func documents(t *testing.T) (list []string) {
	t.Helper()
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && path != "../.." && (strings.HasPrefix(name, ".") || name == "bin" || name == "node_modules") {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			list = append(list, filepath.ToSlash(strings.TrimPrefix(path, "../../")))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// Links of all documents lead to files that are there, and to headings that are in
// them; and no target of make is named that there is not.
func TestDocumentsLinkToWhatThereIs(t *testing.T) {
	found := 0
	for _, file := range documents(t) {
		text := regexp.MustCompile("(?ms)^```.*?^```|`[^`\n]*`").ReplaceAllString(read(t, file), "")
		for _, link := range regexp.MustCompile(`\]\(([^)\s]*)\)`).FindAllStringSubmatch(text, -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			found++
			path, anchor, _ := strings.Cut(link[1], "#")
			target := file
			if path != "" {
				target = filepath.Join(filepath.Dir(file), path)
			}
			if _, err := os.Stat(filepath.Join("../..", target)); err != nil {
				t.Errorf("%s: the link %s leads nowhere: %v", file, link[1], err)
			} else if anchor != "" && strings.HasSuffix(target, ".md") && !slices.Contains(anchors(read(t, target)), anchor) {
				t.Errorf("%s: the link %s leads to no heading of %s", file, link[1], target)
			}
		}
		for _, target := range regexp.MustCompile("(?m)(?:`|^    )make ([a-z-]+)").FindAllStringSubmatch(read(t, file), -1) {
			if !strings.Contains(read(t, "Makefile"), "\n"+target[1]+":") {
				t.Errorf("%s: there is no make %s", file, target[1])
			}
		}
	}
	if found < 100 {
		t.Errorf("only %d links found", found)
	}
}

// anchors are the names of a page's headings, as GitHub makes them.
func anchors(text string) (list []string) {
	seen := map[string]int{}
	for _, heading := range regexp.MustCompile(`(?m)^#+ +(.*?) *$`).FindAllStringSubmatch(text, -1) {
		name := strings.Map(func(c rune) rune {
			switch {
			case c == ' ':
				return '-'
			case c == '-' || c == '_' || unicode.IsLetter(c) || unicode.IsDigit(c):
				return unicode.ToLower(c)
			}
			return -1
		}, heading[1])
		if n := seen[name]; n > 0 {
			list = append(list, name+"-"+strconv.Itoa(n))
		} else {
			list = append(list, name)
		}
		seen[name]++
	}
	return list
}

func TestAnchors(t *testing.T) {
	f := func(text string, want ...string) {
		t.Helper()
		if got := anchors(text); !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
	f("# One\n\n## What is `it`, in 5 words?\n", "one", "what-is-it-in-5-words")
	f("## Metrics\ntext\n### Metrics\n", "metrics", "metrics-1")
	f("## Why 503 over_budget?", "why-503-over_budget")
	f("not # a heading")
}

// commandLines returns the lines of a text that run this program, without its name and
// without comments.
func commandLines(text string) (lines [][]string) {
	for _, m := range regexp.MustCompile(`(?m)^ {2,}(?:bin/)?inferrail +([a-z][^|<>\n]*)$`).FindAllStringSubmatch(text, -1) {
		line, _, _ := strings.Cut(m[1], "  #")
		lines = append(lines, strings.Fields(line))
	}
	return lines
}

// Every command that a document or a help text shows is one that there is, with flags
// that it has.
func TestReadmeCommandsParse(t *testing.T) {
	texts := map[string]string{"sim --help": (&simCommand{}).Help(), "simulate --help": (&simulateCommand{}).Help()}
	for _, file := range documents(t) {
		texts[file] = read(t, file)
	}
	total := 0
	for from, text := range texts {
		for _, args := range commandLines(text) {
			total++
			if _, err := newParser(&commands{}, &env{stdout: io.Discard, stderr: io.Discard}).Parse(args); err != nil {
				t.Errorf("%s: inferrail %s: %v", from, strings.Join(args, " "), err)
			}
		}
	}
	if total < 20 {
		t.Errorf("only %d commands found", total)
	}
}

// The simulator's README's way from traffic to what other policies would have made of it: an agent
// records, a load is sent, and simulate serves the log.
func TestReadmeTraffic(t *testing.T) {
	readme := read(t, "simulator/README.md")
	config := regexp.MustCompile(`(?m)^ +(decisions: \{.*\})$`).FindStringSubmatch(readme)
	if config == nil {
		t.Fatal("no configuration found")
	}
	log := filepath.Join(t.TempDir(), "decisions.jsonl")
	recording := strings.Replace(config[1], "/var/log/inferrail/decisions.jsonl", log, 1)
	if recording == config[1] {
		t.Fatalf("no file in %s", config[1])
	}
	a := start(t, agentArgs("--config", file(t, "inferrail.yaml", recording+"\n"), "--sim", "3", "--datapath", "copy")...)
	url := "http://" + a.expect(`(?m)^listening +(\S+), admin`)
	a.expect(`(?m)^replicas +3 of 3 serve (sim)$`)
	// A busy machine makes the run doubtful, which is no matter here.
	load := start(t, "bench", "run", "--url", url, "--workload", "w3", "--rate", "40", "--requests", "40", "--json", filepath.Join(t.TempDir(), "run.json"))
	<-load.status
	if out := load.stdout.String(); !strings.Contains(out, "40 served") {
		t.Fatalf("%s%s", out, &load.stderr)
	}
	a.signals <- syscall.SIGTERM
	a.exit(0)
	ran := 0
	for _, args := range commandLines(readme) {
		i := slices.Index(args, "decisions.jsonl")
		if i < 0 || slices.Contains(args, "--find-capacity") {
			continue
		}
		ran++
		args = slices.Clone(args)
		args[i] = log
		p := start(t, args...)
		if status := <-p.status; status != 0 {
			t.Errorf("%v: status %d, %s", args, status, &p.stderr)
		}
		out := p.stdout.String()
		if !strings.Contains(out, "40 requests") || !regexp.MustCompile(`(?m)^cost_model +[1-9]`).MatchString(out) {
			t.Errorf("%v: %s", args, out)
		}
	}
	if ran == 0 {
		t.Error("no command found")
	}
}

// The agent's README tells of every configuration key.
func TestReadmeHasEveryKey(t *testing.T) {
	readme := read(t, "agent/README.md")
	keys := configKeys(reflect.TypeFor[agent.Config](), "")
	if len(keys) < 20 {
		t.Errorf("only %d configuration keys found: %v", len(keys), keys)
	}
	for _, key := range keys {
		section, last := "", key
		if dot := strings.LastIndex(key, "."); dot >= 0 {
			section, last = key[:dot+1], key[dot+1:]
		}
		// A row has `section.key`, or `section.other`, `.key`.
		row := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(section) + "[^|]*`" + `[^|]*\b` + regexp.QuoteMeta(last) + "`[^|]*\\|")
		short := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(key) + "`")
		if !row.MatchString(readme) && !short.MatchString(readme) {
			t.Errorf("the configuration key %s is not in the table", key)
		}
	}
}

// The simulator's README names every fault, and each can be had from the start by a flag.
func TestReadmeHasEveryFault(t *testing.T) {
	readme := read(t, "simulator/README.md")
	help := start(t, "sim", "--help")
	help.exit(0)
	faults := configKeys(reflect.TypeFor[simulator.Faults](), "")
	if len(faults) < 20 {
		t.Errorf("only %d faults found: %v", len(faults), faults)
	}
	for _, name := range faults {
		if !strings.Contains(readme, "`"+name+"`") {
			t.Errorf("the fault %s is not in the table", name)
		}
		if flag := "--fault-" + strings.ReplaceAll(name, "_", "-"); !strings.Contains(help.stdout.String(), flag) {
			t.Errorf("there is no flag %s", flag)
		}
	}
}

// What the documents say of the default policy is what the report has.
func TestDocumentsSayWhatTheReportSays(t *testing.T) {
	report := read(t, "bench/REPORT.md")
	_, overview, _ := strings.Cut(report, "\n## Overview\n")
	head := regexp.MustCompile(`(?m)^\| mean TTFT, in bounds \|(.*)\|$`).FindStringSubmatch(overview)
	if head == nil {
		t.Fatal("the report has no table of means in bounds")
	}
	columns := strings.Split(head[1], "|")
	var byPolicy [2][]float64
	for _, row := range regexp.MustCompile(`(?m)^\| Mooncake (?:conversation|synthetic)(?: at 1\.8x)? \|(.*)\|$`).FindAllStringSubmatch(overview, 4) {
		for i, cell := range strings.Split(row[1], "|") {
			of := slices.Index([]string{"cost_model", "round_robin"}, strings.TrimSpace(columns[i]))
			if of < 0 {
				continue
			}
			n, err := strconv.ParseFloat(strings.Trim(cell, " *"), 64)
			if err != nil {
				t.Fatal(err)
			}
			byPolicy[of] = append(byPolicy[of], n)
		}
	}
	var saved []string
	for _, row := range regexp.MustCompile(`at equal limits \| How much of W[123] \| (\d+) instead of 8`).FindAllStringSubmatch(report, -1) {
		saved = append(saved, row[1])
	}
	if len(byPolicy[0]) != 4 || len(byPolicy[1]) != 4 || len(saved) != 3 {
		t.Fatalf("found %v, and %v", byPolicy, saved)
	}
	ours, theirs := byPolicy[0], byPolicy[1]
	times := fmt.Sprintf("%.2f to %.2f times", slices.Min(ours), slices.Max(ours))
	robin := fmt.Sprintf("%.1f to %.0f times", slices.Min(theirs), slices.Max(theirs))
	for _, file := range []string{"README.md", "agent/TUNING.md", "policy/README.md"} {
		text := strings.Join(strings.Fields(read(t, file)), " ")
		for _, want := range []string{times, robin} {
			if !strings.Contains(text, want) {
				t.Errorf("%s does not say %q, which is what bench/REPORT.md has", file, want)
			}
		}
	}
	for file, want := range map[string]string{
		"README.md":       fmt.Sprintf("with %s to %s.", slices.Min(saved), slices.Max(saved)),
		"agent/TUNING.md": fmt.Sprintf("takes %s (system prompts), %s (chats), %s (agents)", saved[0], saved[1], saved[2]),
	} {
		text := strings.Join(strings.Fields(read(t, file)), " ")
		if !strings.Contains(text, want) {
			t.Errorf("%s does not say %q, which is what bench/REPORT.md has", file, want)
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile("../../" + file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// configKeys lists the paths of the keys that hold values.
func configKeys(typ reflect.Type, path string) []string {
	switch {
	case typ.Kind() == reflect.Slice && typ.Elem().Kind() == reflect.Struct:
		return configKeys(typ.Elem(), path+"[]")
	case typ.Kind() != reflect.Struct:
		return []string{path}
	}
	var keys []string
	for i := range typ.NumField() {
		if tag := typ.Field(i).Tag.Get("yaml"); tag != "" && tag != "-" {
			keys = append(keys, configKeys(typ.Field(i).Type, strings.TrimPrefix(path+"."+tag, "."))...)
		}
	}
	return keys
}
