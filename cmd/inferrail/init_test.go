package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/agent"
)

// Two engines run on a node. The configuration that is written names them, passes the
// check, is that of an agent that serves them, and is not overwritten.
func TestInitWritesWhatRuns(t *testing.T) {
	t.Setenv("HF_HUB_CACHE", "/nowhere/hub")
	with := simulated(t, "--served-model-name", "model-a")
	without := simulated(t, "--served-model-name", "model: b", "--engine", "sglang")
	dir := t.TempDir()
	path := filepath.Join(dir, "inferrail.yaml")
	p := start(t, "init", "--output", path)
	p.exit(0)
	said := p.stdout.String()
	for _, want := range []string{with, without, "vllm, serves model-a", "sglang, serves model: b", "--kv-events-config", "datapath: ", "next:  inferrail check " + path + "\n"} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in\n%s", want, said)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
	c := start(t, "check", path)
	c.exit(0)
	config := agent.DefaultConfig()
	if err := config.ReadConfig(path); err != nil {
		t.Fatal(err)
	}
	for url, engine := range map[string]string{with: "vllm", without: "sglang"} {
		if !slices.ContainsFunc(config.Replicas, func(r agent.ReplicaConfig) bool { return r.URL == url && r.Engine == engine }) {
			t.Errorf("no %s at %s in %+v", engine, url, config.Replicas)
		}
	}
	if config.Discovery.Local {
		t.Error("engines are named, and looked for too")
	}

	// Once more: the file stays as it is, until force is given.
	again := start(t, "init", "--output", path)
	again.exit(1)
	if got := again.stderr.String(); !strings.Contains(got, path+" is there already; give --force") {
		t.Errorf("stderr: %s", got)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, text) {
		t.Errorf("it was changed: %v", err)
	}
	if err := cmp.Or(os.WriteFile(path, []byte("old"), 0o600), os.Chmod(path, 0o640)); err != nil {
		t.Fatal(err)
	}
	start(t, "init", "-o", path, "--force").exit(0)
	if now, err := os.ReadFile(path); err != nil || !bytes.Contains(now, []byte(with)) {
		t.Errorf("it was not written anew: %v\n%s", err, now)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("its mode is %v, %v", info.Mode(), err)
	}
	// A folder that is not there, and the standard output, on which there is nothing else.
	nowhere := start(t, "init", "-o", filepath.Join(dir, "no", "x.yaml"))
	nowhere.exit(1)
	if got := nowhere.stderr.String(); !strings.Contains(got, "no such file or directory") {
		t.Errorf("stderr: %s", got)
	}
	out := start(t, "init", "-o", "-")
	out.exit(0)
	printed := agent.DefaultConfig()
	if err := printed.ParseConfig([]byte(out.stdout.String())); err != nil || !strings.Contains(out.stderr.String(), "datapath: ") {
		t.Errorf("%v\n%s", err, &out.stderr)
	}
}

// simulated starts an engine, a process of its own: the sockets of this one are not
// looked at. It returns its URL.
func simulated(t *testing.T, args ...string) string {
	t.Helper()
	url := "http://127.0.0.1:" + freePort(t)
	engine := startChild(t, thisTest(), append([]string{"sim", "--port", strings.TrimPrefix(url, "http://127.0.0.1:")}, args...)...)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := admin(url).page("/health"); err == nil {
			return url
		} else if time.Now().After(end) {
			t.Fatalf("it does not answer: %v\n%s", err, engine.out)
		}
	}
}

// written is the configuration that is made of a survey.
func written(t *testing.T, s agent.Survey) string {
	t.Helper()
	var text bytes.Buffer
	if err := configTemplate.Execute(&text, newDraft(&s)); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// What engines tell of themselves stays in comments and in strings, whatever it is.
func TestInitOfHostileEngines(t *testing.T) {
	odd := "m\n  - url: http://evil:1\n#\": {[\u2028\x1b[31m'"
	s := agent.Survey{Interfaces: []string{"lo"}, NoBPF: "operation not permitted\nlisten: :1", Locked: []string{"http://127.0.0.1:1"},
		Engines: []agent.SurveyedEngine{
			{URL: "http://127.0.0.1:8000", Engine: "vllm", Models: []agent.SurveyedModel{{Name: odd, Prompts: odd}, {Name: "null", MaxLen: 10}, {Name: "yes", Parent: odd}}, Why: odd, NoKVEvents: odd},
			{URL: "http://[::1]:8000", Models: []agent.SurveyedModel{{Name: "org/Model-1", Exact: true}}, KVEvents: "tcp://[::1]:5557", Ranks: 2, Blocks: 1, BlockSize: 16},
			{URL: "http://10.0.0.1:8000", Engine: "vllm"},
		}}
	text := written(t, s)
	config := agent.DefaultConfig()
	if err := config.ParseConfig([]byte(text)); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if err := config.Validate(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	var got []string
	for _, r := range config.Replicas {
		got = append(got, r.ID+" "+r.URL)
	}
	want := []string{"vllm-8000 http://127.0.0.1:8000", "engine-..1-8000 http://[::1]:8000", "vllm-10.0.0.1-8000 http://10.0.0.1:8000"}
	if !slices.Equal(got, want) || config.Listen != ":8080" || len(config.Models) != 0 {
		t.Errorf("got %q, listen %s, models %v", got, config.Listen, config.Models)
	}
	if strings.ContainsAny(text, "\x1b\u2028") {
		t.Error("control characters came through")
	}
}

// setting is a key with its default, that is to be written without the #.
var setting = regexp.MustCompile(`(?m)^( *)#([a-z])`)

// The defaults that the file tells are those that there are, and every key is in it. With
// no engine found, the agent looks for them.
func TestInitTellsEveryKeyAndItsDefault(t *testing.T) {
	text := written(t, agent.Survey{})
	config := agent.DefaultConfig()
	if err := config.ParseConfig([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := config.Validate(); err != nil || !config.Discovery.Local {
		t.Errorf("%v, looks for engines: %v", err, config.Discovery.Local)
	}
	var got agent.Config // without defaults: what is told is all there is
	if err := got.ParseConfig([]byte(setting.ReplaceAllString(text, "$1$2"))); err != nil {
		t.Fatal(err)
	}
	want := agent.DefaultConfig()
	want.Discovery.Local = true
	differ(t, "", reflect.ValueOf(got), reflect.ValueOf(want))

	named := regexp.MustCompile(`[a-z_0-9]+`).FindAllString(text, -1)
	var each func(path string, of reflect.Type)
	each = func(path string, of reflect.Type) {
		for of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		if of.Kind() != reflect.Struct {
			return
		}
		for i := range of.NumField() {
			key, _, _ := strings.Cut(of.Field(i).Tag.Get("yaml"), ",")
			if key == "" || key == "-" {
				continue
			}
			if !slices.Contains(named, key) {
				t.Errorf("%s%s is not told of", path, key)
			}
			each(path+key+".", of.Field(i).Type)
		}
	}
	each("", reflect.TypeFor[agent.Config]())
}

// differ tells of each key whose values differ; nothing and empty are the same.
func differ(t *testing.T, path string, got, want reflect.Value) {
	t.Helper()
	if got.Kind() == reflect.Struct {
		for i := range got.NumField() {
			if key := got.Type().Field(i).Tag.Get("yaml"); key != "" {
				differ(t, path+"."+key, got.Field(i), want.Field(i))
			}
		}
		return
	}
	if k := got.Kind(); (k == reflect.Slice || k == reflect.Map) && got.Len() == 0 && want.Len() == 0 {
		return
	}
	if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
		t.Errorf("%s: the file tells %q, the default is %q", path[1:], g, w)
	}
}

func TestInYAML(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		if got := inYAML(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	f("vllm-8000", "vllm-8000")
	f("http://127.0.0.1:8000", "http://127.0.0.1:8000")
	f("", `""`)
	f("null", `"null"`)
	f("yes", `"yes"`)
	f("1e3", `"1e3"`)
	f("a: b", `"a: b"`)
	f("a:", `"a:"`)
	f("a #b", `"a #b"`)
	f("[::1]", `"[::1]"`)
	f("a\nb", `"a\nb"`)
}
