package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Tekken is what a tekken.json says beyond its vocabulary. Whoever renders the
// chats of its models needs it. The zero value is of no file.
type Tekken struct {
	// Version is how chats are rendered: 1, 2, 3, 7, 11, 13 or 15.
	Version int
	// Settings says that the file has a builder for the settings of the model,
	// Efforts are the reasoning efforts it takes, with DefaultEffort for
	// requests that have none. Without efforts it takes no notice of them.
	Settings      bool
	Efforts       []string
	DefaultEffort string
}

// Tekken returns what the tokenizer's tekken.json says; ok is false for
// tokenizers of another kind.
func (t *Tokenizer) Tekken() (info Tekken, ok bool) {
	p, ok := t.pipeline.(*tekken)
	if !ok {
		return Tekken{}, false
	}
	return p.info, true
}

// tekken is the tokenizer of Mistral's models as mistral_common reads it from a
// tekken.json: tiktoken's encoding with the special tokens below its ids. No
// text in a prompt is ever a special token. loadTekken makes it, and nothing
// changes it after that but the cache of its encoding.
type tekken struct {
	// native is the encoding; the ids it gives and keeps in the cache are
	// ranks.
	native native
	info   Tekken
	// special are the special tokens' ids; those of the encoding are shifted by
	// their number.
	special map[string]uint32
	shift   uint32
	bos     uint32
}

// tekkenFile mirrors the parts of a tekken.json that bear on text.
type tekkenFile struct {
	Vocab []struct {
		Rank  int    `json:"rank"`
		Bytes []byte `json:"token_bytes"`
	} `json:"vocab"`
	Special []struct {
		Rank int    `json:"rank"`
		Text string `json:"token_str"`
	} `json:"special_tokens"`
	Config struct {
		Pattern string `json:"pattern"`
		Size    int    `json:"default_vocab_size"`
		Special int    `json:"default_num_special_tokens"`
		Version string `json:"version"`
	} `json:"config"`
	Settings *struct {
		Effort *struct {
			Values  []string `json:"values"`
			Default string   `json:"default"`
		} `json:"reasoning_effort"`
	} `json:"model_settings_builder"`
}

// oldSpecial are the special tokens of files that list none, by id.
var oldSpecial = strings.Fields("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] " +
	"[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]")

// loadTekken reads a tekken.json. An error says which part of it is not as
// mistral_common would take it, or is not followed.
func loadTekken(data []byte) (pipeline, error) {
	var file tekkenFile
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("tekken.json: %v", err)
	}
	t := &tekken{native: native{cuts: true}, special: make(map[string]uint32)}
	version := file.Config.Version
	t.info.Version, _ = strconv.Atoi(strings.TrimPrefix(version, "v"))
	if !slices.Contains([]string{"v1", "v2", "v3", "v7", "v11", "v13", "v15"}, version) {
		return nil, fmt.Errorf("tekken.json: unknown version %q; this one follows those up to v15", version)
	}
	var ok bool
	if t.native.pieces, ok = knownPatterns[file.Config.Pattern]; !ok {
		return nil, fmt.Errorf("tekken.json: unknown pattern %q", file.Config.Pattern)
	}
	if err := t.readSpecial(&file); err != nil {
		return nil, err
	}

	n := file.Config.Size - file.Config.Special
	if n < 256 || n > len(file.Vocab) {
		return nil, fmt.Errorf("tekken.json: default_vocab_size %d does not fit %d special tokens and a vocab of %d",
			file.Config.Size, file.Config.Special, len(file.Vocab))
	}
	ranks := make([]string, n)
	for i, token := range file.Vocab[:n] {
		if token.Rank != i {
			return nil, fmt.Errorf("tekken.json: token %d of vocab has rank %d", i, token.Rank)
		}
		ranks[i] = string(token.Bytes)
		if i < 256 && ranks[i] != string([]byte{byte(i)}) {
			return nil, fmt.Errorf("tekken.json: token %d of vocab is %q, not that byte", i, ranks[i])
		}
	}
	var err error
	if t.native.bytes, err = newRankedBytes(ranks); err != nil {
		return nil, fmt.Errorf("tekken.json: vocab: %v", err)
	}

	if s := file.Settings; s != nil {
		if t.info.Version < 15 {
			return nil, fmt.Errorf("tekken.json: model_settings_builder in version %s", version)
		}
		t.info.Settings = true
		if s.Effort != nil {
			if !slices.Contains(s.Effort.Values, s.Effort.Default) {
				return nil, fmt.Errorf("tekken.json: the default reasoning_effort %q is none of its values %q", s.Effort.Default, s.Effort.Values)
			}
			t.info.Efforts, t.info.DefaultEffort = s.Effort.Values, s.Effort.Default
		}
	}
	return t, nil
}

// readSpecial reads the special tokens. Ids below their number that no token
// has belong to fillers.
func (t *tekken) readSpecial(file *tekkenFile) error {
	count := file.Config.Special
	if len(file.Special) > count || count > 1<<20 {
		return fmt.Errorf("tekken.json: %d special_tokens of %d", len(file.Special), count)
	}
	t.shift = uint32(count)
	named := 0
	if file.Special == nil {
		if t.info.Version > 7 {
			return errors.New("tekken.json: it has no special_tokens, which this version needs")
		}
		for i, text := range oldSpecial {
			t.special[text] = uint32(i)
		}
		named = len(oldSpecial)
	} else {
		for _, token := range file.Special {
			if _, ok := t.special[token.Text]; ok || token.Rank < 0 || token.Rank >= count {
				return fmt.Errorf("tekken.json: special token %q of rank %d: twice, or out of bounds", token.Text, token.Rank)
			}
			t.special[token.Text] = uint32(token.Rank)
		}
		named = len(file.Special)
	}
	for i := named; i < count; i++ {
		t.special["<SPECIAL_"+strconv.Itoa(i)+">"] = uint32(i)
	}
	var ok bool
	if t.bos, ok = t.special["<s>"]; !ok {
		return errors.New("tekken.json: there is no special token <s>")
	}
	return nil
}

func (t *tekken) appendIDs(dst []uint32, text string, special bool, cached *chunks) []uint32 {
	if special {
		dst = append(dst, t.bos)
	}
	dst, _ = t.appendPlain(dst, text, cached)
	return dst
}

func (t *tekken) appendPlain(dst []uint32, text string, cached *chunks) (_ []uint32, ok bool) {
	start := len(dst)
	dst, ok = t.native.appendPlain(dst, text, cached)
	for i := range dst[start:] {
		dst[start+i] += t.shift
	}
	return dst, ok
}

// token returns the id of a special token, or of a token of the vocabulary by
// its bytes.
func (t *tekken) token(text string) (uint32, bool) {
	if id, ok := t.special[text]; ok {
		return id, true
	}
	id, ok := t.native.bytes.vocabulary.lookup(text)
	return id + t.shift, ok
}

func (t *tekken) close() {}
