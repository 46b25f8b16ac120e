package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed" // the configuration's text
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/inferrail/inferrail/agent"
)

type initCommand struct {
	Output string `short:"o" placeholder:"FILE" default:"inferrail.yaml" help:"Where to write it, by default inferrail.yaml; - is the standard output."`
	Force  bool   `help:"Overwrite a file that is there."`
}

// Help is shown below the flags.
func (*initCommand) Help() string {
	return `Looks for engines that listen on this node, asks each what it is, and writes a configuration that names them, with every key, its
default and what it is for. Nothing is changed but that file, which is never overwritten without --force.`
}

//go:embed inferrail.yaml.tmpl
var configText string

var configTemplate = template.Must(template.New("inferrail.yaml").Funcs(template.FuncMap{"yaml": inYAML}).Parse(configText))

// draft is what the configuration is written from.
type draft struct {
	Host       string
	Engines    []draftEngine
	Models     []draftModel
	Locked     []string
	Policies   string
	NoBPF      string
	Interfaces string
}

type draftEngine struct {
	ID, URL, Engine string
	Said, Hints     []string
}

type draftModel struct {
	Name, Said string
	Hints      []string
}

// Run finds engines, and writes the configuration.
func (c *initCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	tell := e.stdout
	if c.Output == "-" {
		tell = e.stderr
	} else if err := c.mayWrite(); err != nil {
		return err // before anything is looked for, which takes seconds
	}
	survey, err := agent.SurveyNode(ctx)
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil {
		return err
	}
	var text bytes.Buffer
	if err := configTemplate.Execute(&text, newDraft(&survey)); err != nil {
		return fmt.Errorf("BUG: the configuration's text: %w", err)
	}
	config := agent.DefaultConfig()
	if err := cmp.Or(config.ParseConfig(text.Bytes()), config.Validate()); err != nil {
		return fmt.Errorf("BUG: what was written is no configuration (%w):\n%s", err, &text)
	}
	if c.Output == "-" {
		if _, err := e.stdout.Write(text.Bytes()); err != nil {
			return err
		}
	} else if err := writeWhole(c.Output, text.Bytes(), c.Force); err != nil {
		return err
	}
	return c.report(tell, &survey)
}

// mayWrite reports that there is no file that would be lost.
func (c *initCommand) mayWrite() error {
	switch _, err := os.Lstat(c.Output); {
	case err == nil && !c.Force:
		return fmt.Errorf("%s is there already; give --force to overwrite it, or another name with --output", c.Output)
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return nil
	default:
		return err
	}
}

// writeWhole writes a file so that there is the whole of it or none, whatever happens. One
// that is there is replaced only if force is given, one that has come meanwhile too.
func writeWhole(name string, data []byte, force bool) error {
	if to, err := filepath.EvalSymlinks(name); err == nil {
		name = to // the link stays one
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", name, err)
	}
	_, err = f.Write(data)
	mode := fs.FileMode(0o600) // an engine's key may come to be in it
	if info, was := os.Stat(name); was == nil {
		mode = info.Mode().Perm()
	}
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil && force {
		err = os.Rename(f.Name(), name)
	} else if err == nil {
		// Unlike a rename, it fails when the file is there.
		err = os.Link(f.Name(), name)
	}
	if removed := os.Remove(f.Name()); err == nil && !force {
		err = removed
	}
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s has come to be there meanwhile; give --force to overwrite it", name)
	}
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", name, err)
	}
	return nil
}

func newDraft(s *agent.Survey) *draft {
	d := &draft{Host: "this node", Locked: s.Locked, NoBPF: remark(s.NoBPF), Interfaces: strings.Join(s.Interfaces, ", ")}
	if host, err := os.Hostname(); err == nil {
		d.Host = remark(host)
	}
	d.Policies = strings.Join(agent.PolicyNames(), ", ")
	seen := map[string]bool{}
	for i := range s.Engines {
		engine := &s.Engines[i]
		row := draftEngine{ID: engine.ID(), URL: engine.URL, Engine: engine.Engine}
		for _, line := range describe(engine) {
			row.Said = append(row.Said, remark(line))
		}
		for _, line := range advise(engine) {
			row.Hints = append(row.Hints, remark(line))
		}
		d.Engines = append(d.Engines, row)
		for _, m := range engine.Models {
			if seen[m.Name] || m.Parent != "" {
				continue
			}
			seen[m.Name] = true
			d.Models = append(d.Models, newDraftModel(&m))
		}
	}
	return d
}

func newDraftModel(m *agent.SurveyedModel) draftModel {
	row := draftModel{Name: remark(m.Name), Said: "its prompts are followed exactly"}
	if !m.Exact {
		row.Said = "its prompts are approximate: " + remark(m.Prompts)
		directory := "/models/" + filepath.Base(m.Name)
		row.Hints = []string{
			"To have them exact, name the directory with its tokenizer.json, tokenizer_config.json and chat template:",
			"models: [{name: " + remark(inYAML(m.Name)) + ", tokenizer: " + remark(inYAML(directory)) + "}]",
		}
	}
	return row
}

// describe says what an engine is, a line each.
func describe(e *agent.SurveyedEngine) []string {
	first := e.Engine
	if first == "" {
		first = "an engine"
	}
	var parts []string
	for i, m := range e.Models {
		if i == 5 {
			parts = append(parts, fmt.Sprintf("and %d more", len(e.Models)-i))
			break
		}
		text := m.Name
		switch {
		case m.Parent != "":
			text += " (an adapter of " + m.Parent + ")"
		case m.MaxLen > 0:
			text += fmt.Sprintf(" (at most %d tokens)", m.MaxLen)
		}
		parts = append(parts, text)
	}
	if len(parts) > 0 {
		first += ", serves " + strings.Join(parts, ", ")
	}
	lines := []string{first}
	var cache []string
	if e.Blocks > 0 {
		cache = append(cache, fmt.Sprintf("%d blocks", e.Blocks))
	}
	if e.BlockSize > 0 {
		cache = append(cache, fmt.Sprintf("of %d tokens", e.BlockSize))
	}
	if e.Ranks > 1 {
		cache = append(cache, fmt.Sprintf("at each of %d ranks", e.Ranks))
	}
	if len(cache) > 0 {
		lines = append(lines, "KV cache: "+strings.Join(cache, " "))
	}
	if e.KVEvents != "" {
		lines = append(lines, "KV events: at "+e.KVEvents)
	}
	return lines
}

// The flags that make engines publish their KV events.
var eventFlags = map[string]string{
	"vllm":   `--kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'`,
	"sglang": `--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'`,
}

// advise says what could be better with an engine.
func advise(e *agent.SurveyedEngine) (lines []string) {
	if e.Why != "" {
		lines = append(lines, "It takes no requests now: "+e.Why)
	}
	if flags := eventFlags[e.Engine]; flags != "" && e.KVEvents == "" && e.Why == "" {
		lines = append(lines, "What it has cached is known from its requests only: "+cmp.Or(e.NoKVEvents, "it tells of no KV events"),
			"To have that known exactly, start it with "+flags)
	}
	return lines
}

// report says what was found, and what to do next.
func (c *initCommand) report(w io.Writer, s *agent.Survey) error {
	var b bytes.Buffer
	if len(s.Engines) == 0 {
		fmt.Fprintln(&b, "no engine was found that listens on this node; one that is still loading its model is not known yet")
	} else {
		fmt.Fprintf(&b, "%s found on this node:\n", count(len(s.Engines), "engine"))
	}
	for i := range s.Engines {
		e := &s.Engines[i]
		fmt.Fprintf(&b, "  %s  %s\n", e.ID(), e.URL)
		lines := describe(e)
		for _, m := range e.Models {
			if !m.Exact && m.Parent == "" {
				lines = append(lines, "prompts of "+m.Name+" are approximate: "+m.Prompts)
			}
		}
		for _, line := range slices.Concat(lines, advise(e)) {
			fmt.Fprintf(&b, "    %s\n", plain(line))
		}
	}
	for _, url := range s.Locked {
		fmt.Fprintf(&b, "  %s wants a key before it lists models: if it is an engine, name it with api_key_file\n", url)
	}
	if s.NoBPF != "" {
		fmt.Fprintf(&b, "datapath: copy; the kernel's cannot be had here: %s\n", plain(s.NoBPF))
	} else {
		fmt.Fprintf(&b, "datapath: the kernel's can be had here, on %s\n", strings.Join(s.Interfaces, ", "))
	}
	if c.Output != "-" {
		fmt.Fprintf(&b, "written to %s\n\nnext:  inferrail check %[1]s\n       inferrail agent --config %[1]s\n", c.Output)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// remark is a text for a comment: on one line, whatever it holds.
func remark(text string) string { return strings.Join(strings.Fields(plain(text)), " ") }

// inYAML is a text as YAML has it: in quotes, as JSON has it, unless it can be nothing else.
func inYAML(text string) string {
	const safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:"
	first := strings.TrimLeft(text, "abcdefghijklmnopqrstuvwxyz")
	if first != text && first != "" && strings.Trim(text, safe) == "" && !strings.HasSuffix(text, ":") {
		return text
	}
	quoted, err := json.Marshal(text)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return string(quoted)
}
