package main

import (
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/inferrail/inferrail/agent"
	"github.com/inferrail/inferrail/simulator"
)

// readmes are those for users.
var readmes = []string{"README.md", "agent/README.md", "deploy/README.md", "bench/README.md", "simulator/README.md", "cmd/inferrail/README.md"}

// What the READMEs point to is there.
func TestReadme(t *testing.T) {
	for _, file := range readmes {
		readme := read(t, file)
		links := regexp.MustCompile(`\]\(([^)#]+)\)`).FindAllStringSubmatch(readme, -1)
		if file == "README.md" && len(links) < 10 {
			t.Errorf("%s: only %d links found", file, len(links))
		}
		for _, link := range links {
			if strings.Contains(link[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join("../..", filepath.Dir(file), link[1])); err != nil {
				t.Errorf("%s: a link leads nowhere: %v", file, err)
			}
		}
		for _, target := range regexp.MustCompile(`make ([a-z-]+)`).FindAllStringSubmatch(readme, -1) {
			if !strings.Contains(read(t, "Makefile"), "\n"+target[1]+":") && target[1] != "and" {
				t.Errorf("%s: no target for %q", file, target[0])
			}
		}
	}
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

// Every command that a README or a help text shows is one that there is, with flags
// that it has.
func TestReadmeCommandsParse(t *testing.T) {
	texts := map[string]string{"sim --help": (&simCommand{}).Help(), "simulate --help": (&simulateCommand{}).Help()}
	for _, file := range readmes {
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

// The commands of the README that need nothing do what it says.
func TestReadmeSimulates(t *testing.T) {
	withoutRace(t) // it computes for long, as TestSimulateJSON does in little
	ran := 0
	for _, args := range commandLines(read(t, "README.md")) {
		if args[0] == "simulate" && slices.Contains(args, "--workload") && !slices.Contains(args, "--find-capacity") {
			ran++
			p := start(t, args...)
			if status := <-p.status; status != 0 { // as long as it takes on a busy machine
				t.Errorf("%v: status %d, %s", args, status, &p.stderr)
			}
			if out := p.stdout.String(); !strings.Contains(out, "\ncost_model ") || !strings.Contains(out, "\nbound ") {
				t.Errorf("%v: %s", args, out)
			}
		}
	}
	if ran == 0 {
		t.Error("no command found")
	}
}

// The README's way from traffic to what other policies would have made of it: an agent
// records, a load is sent, and simulate serves the log.
func TestReadmeTraffic(t *testing.T) {
	readme := read(t, "README.md")
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
