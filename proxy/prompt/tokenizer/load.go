package tokenizer

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
)

// ErrUnrecognised is what Load's error wraps when the file is well, but has
// a part that is not followed here. Load then tries the library of hf.go.
var ErrUnrecognised = errors.New("not followed natively")

// unrecognised names the part of a tokenizer.json that is not followed.
func unrecognised(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrUnrecognised)
}

// numbers numbers the tokenizers of the process.
var numbers atomic.Uint32

func newTokenizer(p pipeline, kind string, o Options) *Tokenizer {
	t := &Tokenizer{pipeline: p, kind: kind, number: numbers.Add(1)}
	if o.Cache != nil {
		t.cached = &chunks{cache: o.Cache, of: t.number}
	}
	return t
}

// Load loads the tokenizer in a model's directory: tokenizer.json, as transformers
// 5 does with the other files there, or else tekken.json. An error says what to
// change.
func Load(dir string, o Options) (*Tokenizer, error) {
	if o.Tekken {
		return loadTekkenIn(dir, o)
	}
	path := filepath.Join(dir, "tokenizer.json")
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return loadTekkenIn(dir, o)
	} else if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	beside, err := readSettings(dir, o.Repository)
	if err != nil {
		return nil, err
	}
	t, changed, err := fromJSON(data, beside, o)
	switch {
	case err == nil:
		return t, nil
	case !errors.Is(err, ErrUnrecognised), changed:
		return nil, fmt.Errorf("tokenizer: %s: %w", path, err)
	}
	p, libraryErr := loadLibrary(data)
	if libraryErr != nil {
		return nil, fmt.Errorf("tokenizer: %s: %w; %w", path, err, libraryErr)
	}
	t = newTokenizer(p, "by the tokenizers library ("+err.Error()+")", o)
	t.most = libraryMost
	return t, nil
}

// libraryMost is the longest text that the library is given. It takes two seconds
// for 4 MB of one letter.
const libraryMost = 1 << 20

func loadTekkenIn(dir string, o Options) (*Tokenizer, error) {
	path := filepath.Join(dir, "tekken.json")
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("tokenizer: %s has neither tokenizer.json nor tekken.json: name the directory that the engine loads the model from", dir)
	} else if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	p, err := loadTekken(data)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %s: %w", path, err)
	}
	return newTokenizer(p, "tekken, native", o), nil
}

// fromJSON builds a tokenizer from the content of a tokenizer.json, which it does not
// keep, and what lies beside the file. It takes only what it follows exactly: the error
// wraps ErrUnrecognised when a part of it is of another form. changed says that the
// engine does not use the file as it is, so that an error is not to be helped by
// what reads only the file.
func fromJSON(data []byte, beside settings, o Options) (t *Tokenizer, changed bool, err error) {
	var f file
	err = f.read(data)
	changed, refused := beside.apply(&f)
	if err == nil {
		err = refused
	}
	if err != nil {
		return nil, changed, err
	}
	n := new(native)
	kind, err := n.build(&f)
	if err != nil {
		return nil, changed, err
	}
	return newTokenizer(n, kind+", native", o), changed, nil
}

// file is a tokenizer.json. It lives while a tokenizer is built from it.
type file struct {
	version             string
	truncation, padding jsontext.Value
	added               []fileToken
	normalizer          *fileNormalizer
	preTokenizer        *filePreTokenizer
	postProcessor       *filePostProcessor
	model               fileModel
}

type fileToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// pattern is {"String": ...} or {"Regex": ...}.
type pattern struct {
	String *string
	Regex  *string
}

func (p pattern) is(text string) bool { return p.String != nil && p.Regex == nil && *p.String == text }

type fileNormalizer struct {
	Type        string            `json:"type"`
	Normalizers []*fileNormalizer `json:"normalizers"`
	Prepend     string            `json:"prepend"`
	Pattern     pattern           `json:"pattern"`
	Content     string            `json:"content"`
}

type filePreTokenizer struct {
	Type          string              `json:"type"`
	PreTokenizers []*filePreTokenizer `json:"pretokenizers"`
	// Split.
	Pattern  pattern `json:"pattern"`
	Behavior string  `json:"behavior"`
	Invert   bool    `json:"invert"`
	// ByteLevel and Metaspace. Offsets are not followed.
	AddPrefixSpace *bool `json:"add_prefix_space"`
	TrimOffsets    bool  `json:"trim_offsets"`
	UseRegex       *bool `json:"use_regex"`
	// Metaspace.
	Replacement   string `json:"replacement"`
	StrRep        string `json:"str_rep"`
	PrependScheme string `json:"prepend_scheme"`
	Split         *bool  `json:"split"`
	// Digits.
	IndividualDigits bool `json:"individual_digits"`
}

type filePostProcessor struct {
	Type       string               `json:"type"`
	Processors []*filePostProcessor `json:"processors"`
	// ByteLevel, which changes offsets only.
	AddPrefixSpace bool `json:"add_prefix_space"`
	TrimOffsets    bool `json:"trim_offsets"`
	UseRegex       bool `json:"use_regex"`
	// TemplateProcessing.
	Single        []templatePiece            `json:"single"`
	Pair          jsontext.Value             `json:"pair"`
	SpecialTokens map[string]templateSpecial `json:"special_tokens"`
}

type templatePiece struct {
	SpecialToken *templateID
	Sequence     *templateID
}

type templateID struct {
	ID     string `json:"id"`
	TypeID int    `json:"type_id"`
}

type templateSpecial struct {
	ID     string   `json:"id"`
	IDs    []uint32 `json:"ids"`
	Tokens []string `json:"tokens"`
}

// fileModel is the model without its vocabulary and merges.
type fileModel struct {
	Type                    string   `json:"type"`
	Dropout                 *float64 `json:"dropout"`
	UnkToken                *string  `json:"unk_token"`
	ContinuingSubwordPrefix *string  `json:"continuing_subword_prefix"`
	EndOfWordSuffix         *string  `json:"end_of_word_suffix"`
	FuseUnk                 bool     `json:"fuse_unk"`
	ByteFallback            bool     `json:"byte_fallback"`
	IgnoreMerges            bool     `json:"ignore_merges"`

	// vocabulary holds texts as they are in the file.
	vocabulary *vocabulary
	merges     merges
}

// read reads a tokenizer.json. A member that it does not know may change what
// the library does, so it is an error.
func (f *file) read(data []byte) error {
	d := jsontext.NewDecoder(bytes.NewBuffer(data), jsontext.AllowDuplicateNames(true))
	err := readObject(d, func(name string) error {
		switch name {
		case "version":
			return readMember(d, name, &f.version)
		case "truncation":
			return readMember(d, name, &f.truncation)
		case "padding":
			return readMember(d, name, &f.padding)
		case "added_tokens":
			return readMember(d, name, &f.added)
		case "normalizer":
			return readMember(d, name, &f.normalizer)
		case "pre_tokenizer":
			return readMember(d, name, &f.preTokenizer)
		case "post_processor":
			return readMember(d, name, &f.postProcessor)
		case "decoder":
			return d.SkipValue()
		case "model":
			return f.model.read(d)
		}
		return unrecognised("member %q", name)
	})
	if err != nil {
		return err
	}
	if _, err := d.ReadToken(); err == nil {
		return errors.New("there is more after the JSON object")
	}
	switch {
	case f.version != "1.0":
		return unrecognised("version %q", f.version)
	case f.model.vocabulary == nil:
		return errors.New("there is no model with a vocabulary: the file is not whole")
	case !isNull(f.truncation):
		return unrecognised("truncation")
	case !isNull(f.padding):
		return unrecognised("padding")
	}
	return nil
}

func isNull(v jsontext.Value) bool { return len(v) == 0 || v.Kind() == 'n' }

// readObject calls member for each member of an object, whose value it reads.
func readObject(d *jsontext.Decoder, member func(name string) error) error {
	if t, err := d.ReadToken(); err != nil {
		return err
	} else if t.Kind() != '{' {
		return fmt.Errorf("at byte %d there is no JSON object", d.InputOffset())
	}
	for d.PeekKind() != '}' {
		t, err := d.ReadToken()
		if err != nil {
			return err
		}
		if err := member(t.String()); err != nil {
			return err
		}
	}
	_, err := d.ReadToken()
	return err
}

// readMember reads a small member, strictly.
func readMember(d *jsontext.Decoder, name string, to any) error {
	v, err := d.ReadValue()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(v, to, json.RejectUnknownMembers(true)); err != nil {
		// What it is, is in the library's hands: it may be of a later form.
		var kind struct{ Type string }
		if json.Unmarshal(v, &kind, json.MatchCaseInsensitiveNames(true)) == nil && kind.Type != "" {
			name += " " + kind.Type
		}
		if inner := (*json.SemanticError)(nil); errors.As(err, &inner) && inner.Err != nil {
			err = fmt.Errorf("%w %s", inner.Err, inner.JSONPointer.LastToken())
		}
		return unrecognised("%s: %v", name, err)
	}
	return nil
}

func (m *fileModel) read(d *jsontext.Decoder) error {
	var early []byte // merges that come before the vocabulary
	seen := make(map[string]bool)
	err := readObject(d, func(name string) error {
		if seen[name] {
			return fmt.Errorf("the model has two members %q", name)
		}
		seen[name] = true
		switch name {
		case "vocab":
			return m.readVocabulary(d)
		case "merges":
			if m.vocabulary != nil {
				return m.readMerges(d)
			}
			v, err := d.ReadValue()
			early = bytes.Clone(v)
			return err
		case "type":
			return readMember(d, name, &m.Type)
		case "dropout":
			return readMember(d, name, &m.Dropout)
		case "unk_token":
			return readMember(d, name, &m.UnkToken)
		case "continuing_subword_prefix":
			return readMember(d, name, &m.ContinuingSubwordPrefix)
		case "end_of_word_suffix":
			return readMember(d, name, &m.EndOfWordSuffix)
		case "fuse_unk":
			return readMember(d, name, &m.FuseUnk)
		case "byte_fallback":
			return readMember(d, name, &m.ByteFallback)
		case "ignore_merges":
			return readMember(d, name, &m.IgnoreMerges)
		}
		return unrecognised("model member %q", name)
	})
	switch {
	case err != nil:
		return err
	case m.Type != "BPE":
		return unrecognised("model type %q", m.Type)
	case m.Dropout != nil && *m.Dropout != 0:
		return unrecognised("model dropout %v", *m.Dropout)
	case m.ContinuingSubwordPrefix != nil && *m.ContinuingSubwordPrefix != "":
		return unrecognised("model continuing_subword_prefix %q", *m.ContinuingSubwordPrefix)
	case m.EndOfWordSuffix != nil && *m.EndOfWordSuffix != "":
		return unrecognised("model end_of_word_suffix %q", *m.EndOfWordSuffix)
	case m.vocabulary == nil || !seen["merges"]:
		return errors.New("the model has no vocab, or no merges")
	case early != nil:
		return m.readMerges(jsontext.NewDecoder(bytes.NewBuffer(early)))
	}
	return nil
}

// readVocabulary reads {"text": id, ...}.
func (m *fileModel) readVocabulary(d *jsontext.Decoder) error {
	if kind := d.PeekKind(); kind != '{' {
		return unrecognised("model vocab that is no object")
	}
	if _, err := d.ReadToken(); err != nil {
		return err
	}
	v := newVocabulary(200_000, 2<<20)
	var text []byte
	for d.PeekKind() == '"' {
		raw, err := d.ReadValue()
		if err != nil {
			return err
		}
		if text, err = jsontext.AppendUnquote(text[:0], raw); err != nil {
			return fmt.Errorf("model vocab: %w", err)
		}
		t, err := d.ReadToken()
		if err != nil {
			return err
		}
		id := uint64(math.MaxUint64)
		if t.Kind() == '0' {
			if id, err = t.Uint(); err != nil {
				id = math.MaxUint64
			}
		}
		if id > math.MaxUint32-1 {
			return fmt.Errorf("model vocab: the id of %q is %s", text, t)
		}
		if len(v.texts)+len(text) > math.MaxInt32 {
			return errors.New("model vocab: more than 2 GiB of tokens")
		}
		if !v.add(text, uint32(id)) {
			return fmt.Errorf("model vocab: %q is there twice", text)
		}
	}
	_, err := d.ReadToken()
	m.vocabulary = v
	return err
}

// readMerges reads ["a b", ...] or [["a", "b"], ...].
func (m *fileModel) readMerges(d *jsontext.Decoder) error {
	if kind := d.PeekKind(); kind != '[' {
		return unrecognised("model merges that are no array")
	}
	if _, err := d.ReadToken(); err != nil {
		return err
	}
	sides := make([]uint32, 0, 2*2*m.vocabulary.len())
	results := make([]uint32, 0, 2*m.vocabulary.len())
	var joined []byte
	part := func() error {
		raw, err := d.ReadValue()
		if err != nil {
			return err
		}
		if raw.Kind() != '"' {
			return fmt.Errorf("model merges: %d is no pair of strings", len(results))
		}
		joined, err = jsontext.AppendUnquote(joined, raw)
		return err
	}
	for d.PeekKind() != ']' {
		joined = joined[:0]
		var middle int
		switch d.PeekKind() {
		case '"':
			if err := part(); err != nil {
				return err
			}
			middle = bytes.IndexByte(joined, ' ')
			if middle < 0 || bytes.IndexByte(joined[middle+1:], ' ') >= 0 {
				return fmt.Errorf("model merges: %d is %q, which are not two tokens", len(results), joined)
			}
			joined = append(joined[:middle], joined[middle+1:]...)
		case '[':
			if _, err := d.ReadToken(); err != nil {
				return err
			}
			if err := part(); err != nil {
				return err
			}
			middle = len(joined)
			if err := part(); err != nil {
				return err
			}
			if t, err := d.ReadToken(); err != nil {
				return err
			} else if t.Kind() != ']' {
				return fmt.Errorf("model merges: %d has more than two tokens", len(results))
			}
		default:
			if _, err := d.ReadValue(); err != nil {
				return err
			}
			return fmt.Errorf("model merges: %d is no pair of strings", len(results))
		}
		a, ok := m.vocabulary.lookupBytes(joined[:middle])
		b, ok2 := m.vocabulary.lookupBytes(joined[middle:])
		result, ok3 := m.vocabulary.lookupBytes(joined)
		if !ok || !ok2 || !ok3 {
			return fmt.Errorf("model merges: %d is %q and %q: one of them, or what they become, is not in the vocabulary", len(results), joined[:middle], joined[middle:])
		}
		sides = append(sides, a, b)
		results = append(results, result)
	}
	m.merges = newMerges(len(results))
	for i, result := range results {
		m.merges.add(sides[2*i], sides[2*i+1], result)
	}
	_, err := d.ReadToken()
	return err
}

// build follows a file. kind tells people what it is.
func (n *native) build(f *file) (kind string, err error) {
	if err := n.recogniseNormalizer(f.normalizer); err != nil {
		return "", err
	}
	if kind, err = n.recognisePreTokenizer(f.preTokenizer); err != nil {
		return "", err
	}
	if err := n.recognisePostProcessor(f.postProcessor); err != nil {
		return "", err
	}
	if n.pieces.rule != 0 {
		err = n.buildBytes(&f.model)
	} else {
		err = n.buildSentence(&f.model)
	}
	if err != nil {
		return "", err
	}
	return kind, n.buildAdded(f)
}

func (n *native) recogniseNormalizer(f *fileNormalizer) error {
	var steps []*fileNormalizer
	switch {
	case f == nil:
	case f.Type == "Sequence":
		steps = f.Normalizers
	default:
		steps = []*fileNormalizer{f}
	}
	for _, s := range steps {
		switch {
		case s != nil && s.Type == "NFC" && n.normalizer == asIs:
			n.normalizer = composed
		case s != nil && s.Type == "Prepend" && s.Prepend == spaceText && n.normalizer == asIs && len(steps) == 2:
			n.normalizer = spacesReplacedAndPrefixed
		case s != nil && s.Type == "Replace" && s.Pattern.is(" ") && s.Content == spaceText && s == steps[len(steps)-1] &&
			(n.normalizer == asIs || n.normalizer == spacesReplacedAndPrefixed):
			if n.normalizer == asIs {
				n.normalizer = spacesReplaced
			}
		default:
			return unrecognised("normalizer %s", describe(f))
		}
	}
	return nil
}

// describe writes a part of the file for people, in a line of bounded length.
func describe(part any) string {
	text, err := json.Marshal(part)
	if err != nil {
		return "?"
	}
	if len(text) > 300 {
		text = append(text[:300], "..."...)
	}
	return strings.ToValidUTF8(string(text), "")
}

// deepseekSplits are the three splits of deepseekWords.
var deepseekSplits = [3]string{
	`\p{N}{1,3}`,
	`[一-龥぀-ゟ゠-ヿ]+`,
	"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
}

func (n *native) recognisePreTokenizer(f *filePreTokenizer) (kind string, err error) {
	other := unrecognised("pre_tokenizer %s", describe(f))
	var steps []*filePreTokenizer
	switch {
	case f == nil:
	case f.Type == "Sequence":
		steps = f.PreTokenizers
	default:
		steps = []*filePreTokenizer{f}
	}
	for _, s := range steps {
		if s == nil {
			return "", other
		}
	}
	if len(steps) > 0 && steps[len(steps)-1].Type == "ByteLevel" {
		last := steps[len(steps)-1]
		steps = steps[:len(steps)-1]
		regex := last.UseRegex == nil || *last.UseRegex
		switch {
		case last.AddPrefixSpace == nil || *last.AddPrefixSpace:
			return "", other
		case n.normalizer != asIs && n.normalizer != composed:
			return "", unrecognised("normalizer before a pre_tokenizer of bytes")
		case len(steps) == 0 && regex:
			n.pieces = pieces{rule: gpt2Words}
		case len(steps) == 1 && steps[0].Type == "Digits" && steps[0].IndividualDigits && regex:
			n.pieces = pieces{rule: gpt2Words, digits: 1}
		case len(steps) == 1 && !regex && steps[0].splitsAll():
			p, ok := knownPatterns[*steps[0].Pattern.Regex]
			if !ok {
				return "", unrecognised("pre_tokenizer pattern %q", *steps[0].Pattern.Regex)
			}
			n.pieces = p
		case len(steps) == 3 && !regex:
			for i, s := range steps {
				if s.Type != "Split" || s.Behavior != "Isolated" || s.Invert || s.Pattern.Regex == nil || *s.Pattern.Regex != deepseekSplits[i] {
					return "", other
				}
			}
			n.pieces = pieces{rule: deepseekWords}
		default:
			return "", other
		}
		n.cuts = true
		return "byte-level BPE (" + n.pieces.String() + ")", nil
	}
	n.cuts = true
	switch {
	case len(steps) == 0:
		if n.normalizer != spacesReplaced && n.normalizer != spacesReplacedAndPrefixed {
			return "", unrecognised("no pre_tokenizer, and a normalizer that leaves spaces in place")
		}
	case len(steps) > 1:
		return "", other
	case steps[0].Type == "Split":
		// It splits at spaces, of which the normalizer has left none.
		if n.normalizer != spacesReplaced && n.normalizer != spacesReplacedAndPrefixed || !steps[0].Pattern.is(" ") {
			return "", other
		}
	case steps[0].Type == "Metaspace":
		s := steps[0]
		if n.normalizer != asIs || s.Replacement != spaceText || s.Split == nil || *s.Split {
			return "", other
		}
		switch s.PrependScheme {
		case "first":
			n.prefix = firstPrefix
		case "always", "":
			n.prefix = everyPrefix
		case "never":
		default:
			return "", other
		}
		if s.AddPrefixSpace != nil && *s.AddPrefixSpace != (n.prefix != noPrefix) {
			return "", other
		}
	default:
		return "", other
	}
	return "SentencePiece BPE", nil
}

// splitsAll tells whether s keeps every match of a regular expression as a
// piece. All that are followed leave nothing between matches, so it does not
// matter what becomes of that.
func (s *filePreTokenizer) splitsAll() bool {
	return s.Type == "Split" && s.Pattern.Regex != nil && s.Pattern.String == nil &&
		(s.Behavior == "Isolated" && !s.Invert || s.Behavior == "Removed" && s.Invert)
}

// templates are the post-processors that are more than sequences of others and
// change more than offsets.
func (f *filePostProcessor) templates() (list []*filePostProcessor) {
	switch {
	case f == nil || f.Type == "ByteLevel":
	case f.Type == "Sequence":
		for _, p := range f.Processors {
			list = append(list, p.templates()...)
		}
	default:
		list = append(list, f)
	}
	return list
}

func (n *native) recognisePostProcessor(f *filePostProcessor) error {
	list := f.templates()
	switch {
	case len(list) == 0:
		return nil
	case len(list) > 1:
		// To the second one, what the first has added are texts of their own.
		return unrecognised("post_processor that is several in a row")
	case list[0].Type != "TemplateProcessing":
		return unrecognised("post_processor %q", list[0].Type)
	}
	f = list[0]
	var before, after []uint32
	sequences := 0
	for _, p := range f.Single {
		switch {
		case p.Sequence != nil && p.SpecialToken == nil && p.Sequence.ID == "A":
			sequences++
		case p.SpecialToken != nil && p.Sequence == nil:
			special, ok := f.SpecialTokens[p.SpecialToken.ID]
			if !ok {
				return fmt.Errorf("post_processor: %q is not among its special tokens", p.SpecialToken.ID)
			}
			if sequences == 0 {
				before = append(before, special.IDs...)
			} else {
				after = append(after, special.IDs...)
			}
		default:
			return unrecognised("post_processor %s", describe(f.Single))
		}
	}
	if sequences != 1 {
		return unrecognised("post_processor %s", describe(f.Single))
	}
	n.before, n.after = before, after
	return nil
}

// buildBytes builds the model of a pipeline of bytes. In the file a token's
// text has a letter for each byte.
func (n *native) buildBytes(f *fileModel) error {
	v := newVocabulary(f.vocabulary.len(), len(f.vocabulary.texts))
	n.ids = make(map[string]uint32)
	var raw []byte
	for i, id := range f.vocabulary.ids {
		text := f.vocabulary.text(i)
		var ok bool
		if raw, ok = fromByteAlphabet(raw[:0], text); ok {
			v.add(raw, id)
		} else {
			// No text becomes this token, but an added token may have its id.
			n.ids[string(text)] = id
		}
	}
	n.bytes = &byteLevel{merges: f.merges, vocabulary: v, whole: f.IgnoreMerges, words: newWords()}
	if err := n.bytes.findBytes(); err != nil {
		return unrecognised("%v", err)
	}
	return nil
}

func (n *native) buildSentence(f *fileModel) error {
	switch {
	case f.IgnoreMerges:
		return unrecognised("model ignore_merges without a pre_tokenizer of bytes")
	case !f.ByteFallback:
		return unrecognised("model without byte_fallback and without a pre_tokenizer of bytes")
	}
	n.ids = make(map[string]uint32)
	n.sentence = &sentence{merges: f.merges, vocabulary: f.vocabulary, words: newWords()}
	if err := n.sentence.prepare(); err != nil {
		return unrecognised("%v", err)
	}
	return nil
}

// buildAdded gives the added tokens ids as the library does: that of the
// vocabulary if it has the text, or else the next one.
func (n *native) buildAdded(f *file) error {
	next := uint32(f.model.vocabulary.len())
	var before, normalized []addedToken
	seen := make(map[string]bool, len(f.added))
	for _, t := range f.added {
		if t.Content == "" {
			continue
		}
		if seen[t.Content] {
			return unrecognised("added token %q, which is there twice", t.Content)
		}
		seen[t.Content] = true
		id, ok := f.model.vocabulary.lookup(t.Content)
		if !ok {
			id = next
			next++
		}
		n.ids[t.Content] = id
		a := addedToken{id: id, text: t.Content, singleWord: t.SingleWord, leftSpace: t.LStrip, rightSpace: t.RStrip}
		if !t.Normalized {
			before = append(before, a)
			continue
		}
		a.text = n.normalize(a.text)
		normalized = append(normalized, a)
	}
	for i, a := range normalized {
		for _, b := range normalized[:i] {
			if a.text == b.text {
				return unrecognised("added tokens that are both %q once they are normalized", a.text)
			}
		}
	}
	separate, within := n.divide(before, len(normalized) > 0)
	n.separate, n.within, n.normalized = newAddedTokens(separate), newAddedTokens(within), newAddedTokens(normalized)
	return nil
}

// divide takes the tokens that are only spaces and newlines out, if it makes no
// difference whether they are found with the others or after them. normalized
// says that there are tokens to be found in normalized text.
func (n *native) divide(tokens []addedToken, normalized bool) (separate, within []addedToken) {
	if n.prefix != noPrefix || n.normalizer == spacesReplacedAndPrefixed {
		return tokens, nil // a part begins after each of them
	}
	if normalized {
		return tokens, nil // and they are found before the text is normalized
	}
	var uses strings.Builder
	for _, t := range tokens {
		if t.plain() && strings.Trim(t.text, " \t\r\n"+spaceText) == "" {
			within = append(within, t)
			uses.WriteString(t.text)
		} else {
			separate = append(separate, t)
		}
	}
	for _, t := range separate {
		if !t.plain() || strings.ContainsAny(t.text, uses.String()) {
			return tokens, nil
		}
	}
	return separate, within
}
