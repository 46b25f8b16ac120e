package prompt

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// mistralVariant is a renderer for a variant of testdata/mistral.py, without a
// tokenizer.
func mistralVariant(name string) *mistral {
	version, extra, _ := strings.Cut(name, "-")
	m := new(mistral)
	m.info.Version, _ = strconv.Atoi(version[1:])
	m.thinks = extra == "think" || m.info.Version == 15
	m.info.Settings = m.info.Version == 15 && extra != "none"
	if name == "v15" {
		m.info = tokenizer.Tekken{Version: 15, Settings: true, Efforts: []string{"none", "high"}, DefaultEffort: "none"}
		m.effort = "none"
	}
	return m
}

func TestMistralSpellsChatsAsTheEngineDoes(t *testing.T) {
	for _, c := range renderedCases(t, "testdata/mistral.json.gz") {
		r, reason := chatOf(c.Body)
		var s script
		if reason == Exact {
			reason = mistralVariant(c.Tokenizer).script(&s, r)
		}
		if (reason != Exact) != (c.Refused != "" || c.Unfollowed) {
			t.Errorf("%s: %s:\n reason %v, and the engine says %q", c.Tokenizer, c.Body, reason, c.Refused)
			continue
		}
		if reason != Exact {
			continue
		}
		if got := spelled(&s); !slices.Equal(got, c.Text) {
			at, g, w := difference(got, c.Text)
			t.Errorf("%s: %s:\n piece %d is\n %q, want\n %q", c.Tokenizer, c.Body, at, g, w)
		}
	}
}

// mistralCommon is the package that brings a tekken.json, and the hash of that.
const (
	mistralCommon = "mistral_common==1.13.1"
	tekkenHash    = "eccd1665d2e477697c33cb7f0daa6f6dfefc57a0a6bceb66d4be52952f827516"
)

// tekkenJSON returns a tekken.json of version 3. It is taken out of a package
// of PyPI once, into the user's cache; the test is skipped where it cannot be
// had.
func tekkenJSON(t testing.TB) []byte {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("no tekken.json can be had: %v", err)
	}
	path := filepath.Join(cache, "inferrail", "tekken_240718.json")
	data, err := os.ReadFile(path)
	if hash := sha256.Sum256(data); err == nil && hex.EncodeToString(hash[:]) == tekkenHash {
		return data
	}
	if data, err = fetchTekken(t); err != nil {
		t.Skipf("no tekken.json can be had: %v", err)
	}
	if hash := sha256.Sum256(data); hex.EncodeToString(hash[:]) != tekkenHash {
		t.Fatalf("the tekken.json of %s has another hash", mistralCommon)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	// Another run may do the same: the last whole file stays.
	f, err := os.CreateTemp(filepath.Dir(path), "tekken")
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		t.Fatal(err)
	}
	return data
}

func fetchTekken(t testing.TB) ([]byte, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	dir := t.TempDir()
	cmd := exec.CommandContext(ctx, "python3", "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "-d", dir, mistralCommon)
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		said, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		return nil, fmt.Errorf("pip download %s: %w: %s", mistralCommon, err, said)
	}
	wheels, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return nil, fmt.Errorf("pip download %s has left %q", mistralCommon, wheels)
	}
	z, err := zip.OpenReader(wheels[0])
	if err != nil {
		return nil, err
	}
	defer z.Close()
	f, err := z.Open("mistral_common/data/tekken_240718.json")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// loadV15 makes the file of testdata/mistral.py's variant v15 out of one of
// version 3, and loads it. It has all special tokens that the others have, with
// the same ids.
func loadV15(t testing.TB, data []byte) *mistral {
	t.Helper()
	var file, config map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal(data, &file), json.Unmarshal(file["config"], &config)); err != nil {
		t.Fatal(err)
	}
	raw := func(v any) json.RawMessage {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	config["version"] = raw("v15")
	file["config"] = raw(config)
	type token struct {
		Rank int    `json:"rank"`
		Text string `json:"token_str"`
	}
	var tokens []token
	for i, text := range strings.Fields("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] " +
		"[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] " +
		"[THINK] [/THINK] [MODEL_SETTINGS] [/MODEL_SETTINGS]") {
		tokens = append(tokens, token{i, text})
	}
	file["special_tokens"] = raw(tokens)
	file["model_settings_builder"] = raw(map[string]any{"reasoning_effort": map[string]any{"values": []string{"none", "high"}, "default": "none"}})
	return mustMistral(t, raw(file))
}

func mustMistral(t testing.TB, data []byte) *mistral {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tekken.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(dir, tokenizer.Options{Cache: tokenizer.NewCache(16 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tok.Close)
	m, err := newMistral(tok, jinja.NewDict().AsDict())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMistralGivesTheIDsOfTheEngine(t *testing.T) {
	data := tekkenJSON(t)
	all := loadV15(t, data)
	variants := map[string]*mistral{"v3": mustMistral(t, data), "v15": all}
	for name, m := range variants {
		if want := mistralVariant(name); fmt.Sprint(m.info, m.thinks, m.effort) != fmt.Sprint(want.info, want.thinks, want.effort) {
			t.Errorf("%s: the file says %+v, thinks %v, effort %q; want %+v", name, m.info, m.thinks, m.effort, want)
		}
	}
	exact := 0
	for i, c := range renderedCases(t, "testdata/mistral.json.gz") {
		if testing.Short() && i%5 > 0 {
			continue
		}
		m := variants[c.Tokenizer]
		if m == nil {
			m = mistralVariant(c.Tokenizer)
			m.tokenizer, m.ids = all.tokenizer, all.ids
			variants[c.Tokenizer] = m
		}
		// The second time much comes from the cache.
		for range 2 {
			var p Prompt
			r, reason := chatOf(c.Body)
			if reason == Exact {
				reason = m.render(&p, r, time.Time{})
			}
			if reason != Exact {
				continue // that it must be is the other test's business
			}
			exact++
			if !slices.Equal(p.IDs, c.IDs) {
				at, g, w := difference(p.IDs, c.IDs)
				t.Errorf("%s: %s:\n id %d is\n %v, want\n %v", c.Tokenizer, c.Body, at, g, w)
			}
		}
	}
	if exact < 3000 && !testing.Short() {
		t.Errorf("only %d prompts were compared", exact)
	}
}

func TestMistralHoldsOutAgainstHostileChats(t *testing.T) {
	for _, variant := range []string{"v3", "v11"} {
		for name, body := range hostileChats() {
			began := time.Now()
			r, reason := chatOf([]byte(body))
			if reason != Exact {
				t.Errorf("%s: %v", name, reason)
				continue
			}
			var s script
			if reason := mistralVariant(variant).script(&s, r); reason != Exact && (name != "4 MB of brackets" || variant != "v3") {
				t.Errorf("%s: %s: %v", variant, name, reason)
			}
			if took := time.Since(began); took > hostileTime {
				t.Errorf("%s: %s took %v", variant, name, took)
			}
		}
	}
}

// The engine's default for requests without a reasoning effort comes before the
// file's.
func TestMistralTakesTheEnginesEffort(t *testing.T) {
	tok := loadV15(t, tekkenJSON(t)).tokenizer
	f := func(kwargs, body, want string) {
		t.Helper()
		v, _, _ := decodeLoose(kwargs)
		m, err := newMistral(tok, v.AsDict())
		if err != nil {
			if want != "error" {
				t.Errorf("%s: %v", kwargs, err)
			}
			return
		}
		r, reason := chatOf([]byte(body))
		var s script
		if reason == Exact {
			reason = m.script(&s, r)
		}
		got := reason.String()
		if reason == Exact {
			got = strings.Join(spelled(&s), "")
		}
		if got != want {
			t.Errorf("%s, %s: got %s, want %s", kwargs, body, got, want)
		}
	}
	hi := `{"messages":[{"role":"user","content":"hi"}]}`
	f(`{"reasoning_effort":"high"}`, hi, `<s>[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]hi[/INST]`)
	f(`{"reasoning_effort":"high"}`, `{"reasoning_effort":"none",`+hi[1:], `<s>[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS][INST]hi[/INST]`)
	f(`{"reasoning_effort":"low"}`, hi, "malformed")
	f(`{"reasoning_effort":1}`, hi, "error")
}

func TestAppendPythonJSON(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		v, ok, reason := decodeLoose(in)
		if !ok || reason != Exact {
			t.Errorf("%s: not decoded: %v", in, reason)
			return
		}
		got, ok := appendPythonJSON(nil, v)
		if string(got) != want || !ok {
			t.Errorf("%s: got %s, %v, want %s", in, got, ok, want)
		}
	}
	f(`null`, `null`)
	f(`[true,false,-0,1]`, `[true, false, 0, 1]`)
	f(`[1.0,-0.0,1e5,0.0001,1e-5,1e15,1e16,12345678901234567.0,1e-300]`, `[1.0, -0.0, 100000.0, 0.0001, 1e-05, 1000000000000000.0, 1e+16, 1.2345678901234568e+16, 1e-300]`)
	f(`{"b":1,"a":{},"b":[]}`, `{"b": [], "a": {}}`)
	f(`"\u00e9\u0001\u007f\/\"\\\b\f\n\r\t\ud83e\udd16"`, "\"é\\u0001\u007f/\\\"\\\\\\b\\f\\n\\r\\t🤖\"")
	if got, ok := appendPythonJSON(nil, jinja.Undefined()); ok {
		t.Errorf("undefined is JSON: %s", got)
	}
}
