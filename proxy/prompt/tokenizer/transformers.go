package tokenizer

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// settings are what lies beside a tokenizer.json and bears on what transformers
// 5, and so vLLM, makes of that file while it loads it. The zero value changes
// nothing.
type settings struct {
	// class is "" for the general one, which keeps the file's pipeline.
	class          string
	legacy         bool
	addPrefixSpace *bool
	// refused is a setting that is not followed, "" for none.
	refused string
	// added are added tokens by their ids, and decoder tells that they are all
	// that a class which builds its own pipeline begins with. early are those of
	// added_tokens.json, which come before the file's.
	added   []fileToken
	decoder bool
	early   map[string]uint32
	// named are the special tokens that have a name, such as eos_token, and
	// extra those without, which are all added unless they are there.
	named []namedToken
	extra []settingsToken
}

// namedToken is a special token by its name; token is nil for none.
type namedToken struct {
	name  string
	token *settingsToken
}

// namedTokens are the names of special tokens that all classes know, in
// transformers' order.
var namedTokens = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// classTokens are the special tokens that a class has unless it is told others.
var classTokens = map[string]map[string]string{
	"GPT2Tokenizer":    {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
	"LlamaTokenizer":   {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
	"GemmaTokenizer":   {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
	"Qwen2Tokenizer":   {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
	"Qwen3_5Tokenizer": {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}

// readSettings reads the files beside a tokenizer.json.
func readSettings(dir, repository string) (s settings, err error) {
	var model struct {
		ModelType      string  `json:"model_type"`
		TokenizerClass *string `json:"tokenizer_class"`
	}
	if _, err := readJSON(filepath.Join(dir, "config.json"), &model); err != nil {
		return settings{}, err
	}
	var members objectMembers
	if _, err := readJSON(filepath.Join(dir, "tokenizer_config.json"), &members); err != nil {
		return settings{}, err
	}
	if _, decoder := members.get("added_tokens_decoder"); !decoder {
		// The older files count more than tokenizer_config.json then.
		var legacy objectMembers
		if _, err := readJSON(filepath.Join(dir, "special_tokens_map.json"), &legacy); err != nil {
			return settings{}, err
		}
		for _, m := range legacy {
			members.set(m.name, m.value)
		}
		if _, err := readJSON(filepath.Join(dir, "added_tokens.json"), &s.early); err != nil {
			return settings{}, err
		}
	}
	var tokenizer struct {
		TokenizerClass     *string                   `json:"tokenizer_class"`
		AutoMap            jsontext.Value            `json:"auto_map"`
		Legacy             jsontext.Value            `json:"legacy"`
		AddPrefixSpace     *bool                     `json:"add_prefix_space"`
		SplitSpecial       jsontext.Value            `json:"split_special_tokens"`
		FixMistral         jsontext.Value            `json:"fix_mistral_regex"`
		AddedTokensDecoder map[string]*settingsToken `json:"added_tokens_decoder"`
		Additional         jsontext.Value            `json:"additional_special_tokens"`
		Extra              jsontext.Value            `json:"extra_special_tokens"`
	}
	for _, m := range members {
		// One by one: what one of them holds is not to hide the others.
		one := append(append(append([]byte("{"), quoted(m.name)...), ':'), m.value...)
		if err := json.Unmarshal(append(one, '}'), &tokenizer); err != nil {
			s.refused = m.name
		}
	}
	named := ""
	for _, class := range []*string{model.TokenizerClass, tokenizer.TokenizerClass} {
		if class != nil && *class != "" {
			named = *class
		}
	}
	s.class = Class(model.ModelType, named, repository)
	if hasCode(tokenizer.AutoMap) {
		// The engine runs it if it was told to trust it.
		if slices.Contains(generalTypes, model.ModelType) {
			s.class = ""
		} else {
			s.refused = "auto_map"
		}
	}
	s.legacy = isTrue(tokenizer.Legacy)
	s.addPrefixSpace = tokenizer.AddPrefixSpace
	for name, v := range map[string]jsontext.Value{"split_special_tokens": tokenizer.SplitSpecial, "fix_mistral_regex": tokenizer.FixMistral} {
		if isTrue(v) {
			s.refused = name
		}
	}
	s.readAdded(tokenizer.AddedTokensDecoder)
	s.decoder = tokenizer.AddedTokensDecoder != nil
	if extra := tokenizer.Extra; !isTrue(extra) || extra.Kind() == '{' {
		// The old name of the list counts where the new one has none.
		tokenizer.Extra = tokenizer.Additional
		if err := s.readNamed(members, extra); err != nil {
			return s, err
		}
	} else if err := s.readNamed(members, nil); err != nil {
		return s, err
	}
	return s, s.readExtra(tokenizer.Extra)
}

// hasCode tells whether auto_map names code beside the model for its tokenizer.
func hasCode(autoMap jsontext.Value) bool {
	var byName map[string]jsontext.Value
	if autoMap.Kind() != '{' || json.Unmarshal(autoMap, &byName) != nil {
		return isTrue(autoMap)
	}
	return isTrue(byName["AutoTokenizer"])
}

// isTrue tells whether Python takes a JSON value for true.
func isTrue(v jsontext.Value) bool {
	v = bytes.Trim(v, " \t\r\n")
	switch string(v) {
	case "", "null", "false", "0", "0.0", `""`, "[]", "{}":
		return false
	}
	return true
}

func quoted(s string) []byte {
	b, err := jsontext.AppendQuote(nil, s)
	if err != nil {
		return []byte(`""`)
	}
	return b
}

// objectMembers are those of a JSON object, in its order.
type objectMembers []objectMember

type objectMember struct {
	name  string
	value jsontext.Value
}

func (o *objectMembers) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	return readObject(d, func(name string) error {
		v, err := d.ReadValue()
		o.set(name, v.Clone())
		return err
	})
}

func (o *objectMembers) set(name string, v jsontext.Value) {
	for i := range *o {
		if (*o)[i].name == name {
			(*o)[i].value = v
			return
		}
	}
	*o = append(*o, objectMember{name, v})
}

func (o objectMembers) get(name string) (v jsontext.Value, ok bool) {
	for _, m := range o {
		if m.name == name {
			return m.value, true
		}
	}
	return nil, false
}

func (s *settings) readAdded(decoder map[string]*settingsToken) {
	ids := make([]string, 0, len(decoder))
	for id := range decoder {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b string) int { // as numbers
		if len(a) != len(b) {
			return len(a) - len(b)
		}
		return strings.Compare(a, b)
	})
	for _, id := range ids {
		if t := decoder[id]; t != nil {
			s.added = append(s.added, t.fileToken)
		}
	}
}

// readNamed reads the special tokens that have names: those that all classes
// know, those that the model's files add, and those in byName.
func (s *settings) readNamed(members objectMembers, byName jsontext.Value) error {
	for _, name := range namedTokens {
		token := &settingsToken{fileToken{Content: classTokens[s.class][name], Special: true}}
		if v, ok := members.get(name); ok {
			token = tokenIn(v)
		}
		s.named = append(s.named, namedToken{name, token})
	}
	var texts []namedToken
	for _, m := range members {
		if !strings.HasSuffix(m.name, "_token") || slices.Contains(namedTokens, m.name) {
			continue
		}
		switch m.value.Kind() {
		case '"':
			texts = append(texts, namedToken{m.name, tokenIn(m.value)})
		case '{':
			s.named = append(s.named, namedToken{m.name, tokenIn(m.value)})
		}
	}
	s.named = append(s.named, texts...)
	if byName.Kind() != '{' {
		return nil
	}
	var more objectMembers
	if err := json.Unmarshal(byName, &more); err != nil {
		return fmt.Errorf("tokenizer: extra_special_tokens: %w", err)
	}
	for _, m := range more {
		s.named = append(s.named, namedToken{m.name, tokenIn(m.value)})
	}
	return nil
}

func (s *settings) readExtra(list jsontext.Value) error {
	if list.Kind() != '[' {
		return nil
	}
	var values []jsontext.Value
	if err := json.Unmarshal(list, &values); err != nil {
		return fmt.Errorf("tokenizer: extra special tokens: %w", err)
	}
	for _, v := range values {
		if token := tokenIn(v); token != nil {
			s.extra = append(s.extra, *token)
		}
	}
	return nil
}

// tokenIn is the token that a JSON value holds, nil for none.
func tokenIn(v jsontext.Value) *settingsToken {
	var token settingsToken
	if v.Kind() != '"' && v.Kind() != '{' || json.Unmarshal(v, &token) != nil {
		return nil
	}
	return &token
}

// settingsToken is a token of tokenizer_config.json: an object, or its text.
type settingsToken struct{ fileToken }

func (t *settingsToken) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	if d.PeekKind() == '"' {
		t.Special = true
		return json.UnmarshalDecode(d, &t.Content)
	}
	return json.UnmarshalDecode(d, &t.fileToken)
}

// notNumbers are what Python writes into JSON for numbers that JSON does not
// have.
var notNumbers = regexp.MustCompile(`([:\[,]\s*)-?(?:Infinity|NaN)\b`)

// readJSON reads a file that may be missing.
func readJSON(path string, to any) (ok bool, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("tokenizer: %w", err)
	}
	if err := json.Unmarshal(notNumbers.ReplaceAll(data, []byte("${1}null")), to, jsontext.AllowDuplicateNames(true)); err != nil {
		return false, fmt.Errorf("tokenizer: %s: %w", path, err)
	}
	return true, nil
}

// apply changes a tokenizer.json as transformers does. changed says that the
// file as it is would be another tokenizer.
func (s settings) apply(f *file) (changed bool, err error) {
	if s.refused != "" {
		return true, unrecognised("%s beside the file", s.refused)
	}
	rebuilt, followed := builds(s.class)
	if rebuilt && !followed {
		return true, unrecognised("the class %s, which builds a pipeline of its own", s.class)
	}
	if rebuilt {
		s.rebuild(f)
	}
	before := slices.Clone(f.added)
	decoder := s.added
	if !s.decoder {
		decoder = s.legacyAdded(f.added)
	}
	if rebuilt {
		f.added = nil // the class starts without the file's
	}
	at := make(map[string]int, len(f.added))
	for i, t := range f.added {
		at[t.Content] = i
	}
	add := func(t fileToken) {
		if t.Content == "" {
			return
		}
		if i, ok := at[t.Content]; ok {
			f.added[i] = t
			return
		}
		at[t.Content] = len(f.added)
		f.added = append(f.added, t)
	}
	for _, t := range decoder {
		add(t)
	}
	there := func(t settingsToken) bool { _, ok := at[t.Content]; return ok }
	var more []settingsToken
	for _, n := range s.named {
		if n.token != nil && !there(*n.token) {
			more = append(more, *n.token)
		}
	}
	for _, t := range s.extra {
		if !there(t) {
			more = append(more, t)
		}
	}
	for _, t := range more {
		add(t.fileToken)
	}
	if s.class == "Qwen2Tokenizer" {
		for _, n := range s.named {
			if n.token != nil {
				add(fileToken{Content: n.token.Content, Special: true})
			}
		}
		for _, t := range s.extra {
			add(fileToken{Content: t.Content, Special: true})
		}
	}
	return rebuilt || !slices.EqualFunc(before, f.added, func(a, b fileToken) bool {
		a.ID, b.ID = 0, 0
		return a == b
	}), nil
}

// legacyAdded are the added tokens by their ids where tokenizer_config.json has
// none: those of added_tokens.json, and the file's.
func (s settings) legacyAdded(file []fileToken) []fileToken {
	byID := make(map[uint32]fileToken, len(file)+len(s.early))
	for text, id := range s.early {
		special := slices.ContainsFunc(s.extra, func(t settingsToken) bool { return t.Content == text }) ||
			slices.ContainsFunc(s.named, func(n namedToken) bool { return n.token != nil && n.token.Content == text })
		byID[id] = fileToken{Content: text, Special: special, Normalized: !special}
	}
	for _, t := range file {
		byID[t.ID] = t
	}
	list := make([]fileToken, 0, len(byID))
	for _, id := range slices.Sorted(maps.Keys(byID)) {
		list = append(list, byID[id])
	}
	return list
}

// rebuild puts the pipeline of the class in the place of the file's.
func (s settings) rebuild(f *file) {
	no := false
	prefix := s.addPrefixSpace != nil && *s.addPrefixSpace
	bytes := func(p pieces) {
		f.normalizer = &fileNormalizer{Type: "NFC"}
		f.preTokenizer = &filePreTokenizer{Type: "Sequence", PreTokenizers: []*filePreTokenizer{
			{Type: "Split", Pattern: pattern{Regex: new(p.pattern())}, Behavior: "Isolated"},
			{Type: "ByteLevel", AddPrefixSpace: &prefix, UseRegex: &no},
		}}
	}
	f.model.ByteFallback, f.model.IgnoreMerges = false, false
	switch s.class {
	case "LlamaTokenizer":
		scheme := "first"
		switch {
		case s.addPrefixSpace != nil && !*s.addPrefixSpace:
			scheme = "never"
		case s.legacy:
			scheme = "always"
		}
		f.normalizer = nil
		f.preTokenizer = &filePreTokenizer{Type: "Metaspace", Replacement: spaceText, PrependScheme: scheme, Split: &no}
		f.model.ByteFallback = true
	case "GemmaTokenizer":
		space := " "
		f.normalizer = &fileNormalizer{Type: "Replace", Pattern: pattern{String: &space}, Content: spaceText}
		f.preTokenizer = &filePreTokenizer{Type: "Split", Pattern: pattern{String: &space}, Behavior: "MergedWithPrevious"}
		f.model.ByteFallback = true
	case "GPT2Tokenizer":
		f.normalizer = nil
		f.preTokenizer = &filePreTokenizer{Type: "ByteLevel", AddPrefixSpace: &prefix}
	case "Qwen2Tokenizer":
		bytes(pieces{rule: plainWords, digits: 1})
	case "Qwen3_5Tokenizer":
		bytes(pieces{rule: plainWords, digits: 1, marks: true})
	}
}

// pattern is the regular expression that p follows.
func (p pieces) pattern() string {
	for pattern, other := range knownPatterns {
		if other == p {
			return pattern
		}
	}
	panic("tokenizer: no pattern is followed by these rules")
}
