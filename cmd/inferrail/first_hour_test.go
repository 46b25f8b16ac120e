package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/inferrail/inferrail/agent"
)

// walked are the documents whose commands are run, in the order in which a newcomer
// reads them.
var walked = []string{"README.md", "agent/TROUBLESHOOTING.md", "agent/SECURITY.md", "agent/TUNING.md", "deploy/README.md"}

// leftOut are beginnings of commands that the walk does not run, and why. Files that
// they name must be there, and keys of the configuration that they set.
var leftOut = map[string]string{
	"kubectl":            "there is no cluster",
	"helm":               "there is no cluster; the chart is rendered and checked in package deploy",
	"TOKEN=":             "it is for the commands of kubectl and helm around it",
	"curl 127.0.0.1:909": "it goes through kubectl's forwarded port",
	"curl -X ":           "it asks an engine of the compose file",
	"docker":             "there is no container runtime; the files are checked in package deploy",
	"systemctl":          "there is no service manager; the unit is checked in package deploy",
	"journalctl":         "there is no service manager",
	"sudo":               "it changes the machine",
	"install":            "it changes the machine",
	"make image":         "it needs a container runtime or fetches base images",
}

// expected says of commands, by how they begin, what they print. Of what is not listed
// it is enough that it ends well.
var expected = []struct {
	command, prints string
	// stays: it serves until it is interrupted. The walk goes on when it has
	// printed that.
	stays bool
}{
	{command: "make run", prints: `(?m)^try +curl -N `, stays: true},
	{command: "bin/inferrail agent", prints: `(?m)^replicas +[1-9] of [1-9] serve `, stays: true},
	{command: "bin/inferrail sim ", prints: `at http://(\S+) serves`, stays: true},
	{command: "curl -s 127.0.0.1:8080/v1/models", prints: `"id":\s*"sim"`},
	{command: "curl -sN 127.0.0.1:8080/v1/completions", prints: `data: \[DONE\]`},
	{command: "curl -s 127.0.0.1:9090/readyz", prints: `^(ok|degraded: .*)\n$`},
	{command: "curl -s 127.0.0.1:9090/debug/fleet", prints: `"state": "up"`},
	{command: "curl -s 127.0.0.1:9090/debug/datapath", prints: `"tier": "(packet|copy)"`},
	{command: "curl -s 127.0.0.1:9090/metrics", prints: `(?m)^(inferrail|go)_`},
	{command: "curl -s '127.0.0.1:9090/debug/", prints: `^\{`},
	{command: "bin/inferrail explain", prints: `(?m)^winner +\S+ \(`},
	{command: "inferrail explain", prints: `(?m)^winner +\S+ \(`},
	{command: "bin/inferrail status", prints: `(?i)\b(ok|degraded)\b`},
	{command: "inferrail status", prints: `(?i)\b(ok|degraded)\b`},
	{command: "bin/inferrail init", prints: `inferrail.yaml`},
	{command: "bin/inferrail check", prints: `.`},
	{command: "bin/inferrail demo", prints: `With cost_model an answer took`},
	{command: "bin/inferrail simulate", prints: `(?m)^cost_model `},
	{command: "bin/inferrail bench run", prints: `20 served`},
}

// A newcomer with a fresh clone runs every command of the documents from top to
// bottom, and each does what is said of it. On a quiet machine that takes about a
// minute, most of which the demo takes beside the rest.
func TestFirstHour(t *testing.T) {
	withoutRace(t) // nothing runs in this process
	t.Parallel()
	for _, tool := range []string{"bash", "make", "curl", "git"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("no " + tool)
		}
	}
	w := &walk{T: t, dir: clone(t), actual: map[string]string{}}
	var ctx context.Context
	ctx, w.cancel = context.WithTimeout(t.Context(), 10*time.Minute) // on a busy machine
	defer w.cancel()
	w.ctx = ctx
	defer w.interrupt()
	ran := 0
	for _, document := range walked {
		w.document = document
		for _, block := range blocks(read(t, document)) {
			if !isCommands(block) {
				w.configuration(block)
				continue
			}
			for _, command := range commandsOf(block) {
				if why, ok := isLeftOut(command); ok {
					t.Logf("%s: not run, because %s: %s", document, why, command)
					w.checkNames(command)
					continue
				}
				ran++
				w.run(command)
			}
		}
	}
	for _, end := range w.later {
		end()
	}
	if ran < 15 {
		t.Errorf("only %d commands were found", ran)
	}
}

// walk is a newcomer's way. One goroutine uses it.
type walk struct {
	*testing.T
	ctx      context.Context
	cancel   context.CancelFunc
	dir      string // the clone
	document string
	actual   map[string]string // addresses as the documents have them, and as they are
	agent    *child            // the one that serves now
	children []*child
	engines  bool     // those of the configuration are there
	later    []func() // what runs beside the rest
}

// clone copies what a clone of the tree would have.
func clone(t *testing.T) string {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	list := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Skipf("not a git checkout: %v", err)
	}
	dir := filepath.Join(t.TempDir(), "inferrail")
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		from := filepath.Join(root, name)
		info, err := os.Lstat(from)
		if err != nil || !info.Mode().IsRegular() {
			continue // deleted and not committed yet, or another repository's folder
		}
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, info.Mode().Perm())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// blocks are the indented blocks of a text in Markdown that are no part of a list.
func blocks(text string) (list []string) {
	var block []string
	for line := range strings.SplitSeq(text+"\n", "\n") {
		if rest, ok := strings.CutPrefix(line, "    "); ok {
			block = append(block, rest)
			continue
		}
		if len(block) > 0 && strings.TrimSpace(line) == "" {
			list = append(list, strings.Join(block, "\n"))
		}
		block = nil
	}
	return list
}

// isCommands tells a block of commands from one of a configuration or of output.
func isCommands(block string) bool {
	return regexp.MustCompile(`^(make|bin/inferrail|inferrail|curl|echo|kubectl|helm|docker|sudo|install|systemctl|journalctl|[A-Z]+=\S+) ?`).MatchString(block)
}

// commandsOf are the commands of a block; one may go on behind a backslash.
func commandsOf(block string) []string {
	return strings.Split(strings.ReplaceAll(block, "\\\n", ""), "\n")
}

func isLeftOut(command string) (why string, ok bool) {
	for begin, why := range leftOut {
		if strings.HasPrefix(command, begin) {
			return why, true
		}
	}
	return "", false
}

// checkNames looks for the files that a command names, and for the keys that it sets.
func (w *walk) checkNames(command string) {
	w.Helper()
	for _, name := range regexp.MustCompile(`(?:^|[\s=])((?:deploy|bench|agent)/[^\s'"]+)`).FindAllStringSubmatch(command, -1) {
		if _, err := os.Stat(filepath.Join(w.dir, name[1])); err != nil {
			w.Errorf("%s: %s: %v", w.document, command, err)
		}
	}
	var values map[string]any
	if err := yaml.Unmarshal([]byte(read(w.T, "deploy/helm/inferrail/values.yaml")), &values); err != nil {
		w.Fatal(err)
	}
	for _, set := range regexp.MustCompile(`--set ([\w.]+)=`).FindAllStringSubmatch(command, -1) {
		if key, ok := strings.CutPrefix(set[1], "config."); ok {
			if !slices.Contains(configKeys(reflect.TypeFor[agent.Config](), ""), key) {
				w.Errorf("%s: the configuration has no key %s", w.document, key)
			}
			continue
		}
		var at any = values
		for key := range strings.SplitSeq(set[1], ".") {
			m, _ := at.(map[string]any)
			var ok bool
			if at, ok = m[key]; !ok {
				w.Errorf("%s: the chart has no value %s", w.document, set[1])
				break
			}
		}
	}
}

// configuration checks a block of YAML. The first that names engines becomes the file
// that commands name.
func (w *walk) configuration(block string) {
	w.Helper()
	if !regexp.MustCompile(`^[a-z_]+:`).MatchString(block) {
		return // output, or a picture
	}
	whole := block
	if !regexp.MustCompile(`(?m)^(replicas|discovery):`).MatchString(block) {
		whole = "replicas: [{url: 'http://127.0.0.1:1'}]\n" + block
	}
	c := agent.DefaultConfig()
	err := c.ParseConfig([]byte(whole))
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		w.Errorf("%s: %v in\n%s", w.document, err, block)
	}
	if strings.Contains(block, "replicas:\n") && w.document == "README.md" {
		w.startEngines()
		if err := os.WriteFile(filepath.Join(w.dir, "inferrail.yaml"), []byte(w.here(block)), 0o644); err != nil {
			w.Fatal(err)
		}
	}
}

// startEngines starts those whose addresses the documents have.
func (w *walk) startEngines() {
	if w.engines {
		return
	}
	w.engines = true
	for _, address := range []string{"10.0.0.10:8000", "10.0.0.11:8000"} {
		c := w.serve("bin/inferrail sim --port 0")
		w.actual[address] = w.await(c, `at http://(\S+) serves`)
	}
}

// here is a command with the addresses of this walk. No port of the machine is taken.
func (w *walk) here(command string) string {
	command = regexp.MustCompile(`--port \d+`).ReplaceAllString(command, "--port 0")
	for documented, actual := range w.actual {
		command = strings.ReplaceAll(command, documented, actual)
	}
	return command
}

// serve starts a command, in a group of its own as a shell does.
func (w *walk) serve(command string) *child {
	w.Helper()
	c := &child{cmd: exec.Command("bash", "-o", "pipefail", "-c", command), out: new(output), ended: make(chan struct{})}
	c.cmd.Dir = w.dir
	c.cmd.Env = append(os.Environ(), "INFERRAIL_LISTEN=127.0.0.1:0", "INFERRAIL_ADMIN_LISTEN=127.0.0.1:0",
		"INFERRAIL_ADMIN=http://"+w.actual["127.0.0.1:9090"], "KEY=secret", "PATH="+filepath.Join(w.dir, "bin")+":"+os.Getenv("PATH"))
	c.cmd.Stdout, c.cmd.Stderr = c.out, c.out
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := launch(c.cmd); err != nil {
		w.Fatal(err)
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.ended)
	}()
	w.children = append(w.children, c)
	return c
}

// await waits until a command has printed something, and returns its last group.
func (w *walk) await(c *child, expr string) string {
	w.Helper()
	re := regexp.MustCompile(expr)
	for {
		if m := re.FindStringSubmatch(c.out.String()); m != nil {
			return m[len(m)-1]
		}
		select {
		case <-c.ended:
			w.Fatalf("%s: %q has ended: %s", w.document, c.cmd.Args, c.out)
		case <-w.ctx.Done():
			w.Fatalf("%s: %q has not printed %s: %s", w.document, c.cmd.Args, expr, c.out)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// run runs a command as a newcomer would.
func (w *walk) run(command string) {
	w.Helper()
	began := time.Now()
	prints, stays := "", false
	for _, e := range expected {
		if strings.HasPrefix(command, e.command) {
			prints, stays = e.prints, e.stays
			break
		}
	}
	if strings.Contains(command, "10.0.0.1") || strings.Contains(command, "inferrail.yaml") {
		w.startEngines()
	}
	switch {
	case stays:
		isAgent := !strings.Contains(command, "inferrail sim ")
		if isAgent && w.agent != nil {
			w.end(w.agent) // Ctrl-C
		}
		c := w.serve(w.here(command))
		found := w.await(c, prints)
		if !isAgent {
			w.actual["127.0.0.1:8001"] = found
			break
		}
		w.agent = c
		w.actual["127.0.0.1:8080"] = w.await(c, `(?m)^listening +(\S+), admin`)
		w.actual["127.0.0.1:9090"] = w.await(c, `(?m)^listening .*admin http://(\S+)$`)
		w.checkTry(c)
	case strings.HasPrefix(command, "bin/inferrail demo"):
		c := w.serve(command)
		w.later = append(w.later, func() { w.ends(command, c, prints) })
	default:
		w.ends(command, w.serve(w.here(command)), prints)
	}
	w.Logf("%s: %s: %v", w.document, command, time.Since(began).Round(time.Millisecond))
}

// ends waits for a command and checks what it has printed.
func (w *walk) ends(command string, c *child, prints string) {
	w.Helper()
	select {
	case <-c.ended:
	case <-w.ctx.Done():
		w.Fatalf("%s: %s does not end: %s", w.document, command, c.out)
	}
	out := c.out.String()
	// A busy machine makes a measurement doubtful, and may make an agent degraded for a
	// moment, which is no matter here.
	if c.err != nil && !strings.Contains(out, "should not be relied on") && !(strings.Contains(command, "inferrail status") && strings.Contains(out, "degraded")) {
		w.Errorf("%s: %s: %v: %s", w.document, command, c.err, out)
	}
	if !regexp.MustCompile(prints).MatchString(out) {
		w.Errorf("%s: %s has not printed %s: %s", w.document, command, prints, out)
	}
}

// checkTry pastes the line that an agent prints.
func (w *walk) checkTry(c *child) {
	w.Helper()
	command := w.await(c, `(?m)^try +(curl .*)\n`)
	w.ends(command, w.serve(command), `data: `)
}

// end interrupts a command, which then drains.
func (w *walk) end(c *child) {
	w.Helper()
	syscall.Kill(-c.cmd.Process.Pid, syscall.SIGINT)
	select {
	case <-c.ended:
	case <-w.ctx.Done():
		w.Fatalf("does not end upon Ctrl-C: %s", c.out)
	}
}

// interrupt ends all that is left. A command that has ended, with all that held its
// output, is passed over: its group's number may be another's by now.
func (w *walk) interrupt() {
	w.cancel()
	for _, c := range w.children {
		select {
		case <-c.ended:
			continue
		default:
		}
		syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
		<-c.ended
	}
}
