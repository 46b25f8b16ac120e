//go:build hftokenizers

package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/daulet/tokenizers"
)

// library is the pipeline of any tokenizer.json, by the Hugging Face tokenizers
// library itself. It may be used from any goroutine until it is closed. Most of
// its memory is the library's, which Go does not see; close frees it.
type library struct {
	hf  *tokenizers.Tokenizer
	ids map[string]uint32 // of added tokens and the vocabulary
	// anchor is an added token that is found in any text, "" for none. It tells
	// a text that has no ids from one that the library has failed on.
	anchor string
}

// The library takes text as a C string, which ends at the first NUL. So a NUL
// goes in as two escapes, and an escape as an escape and a mark; the normalizers
// that loadLibrary puts before the file's own turn them back. Looking from left
// to right finds the same pairs again: each begins with an escape, and one that
// does not begin a pair is the second of two.
//
// Added tokens are looked for in the text before any normalizer has seen it,
// and some look at the characters beside them. There the escapes are as NUL is:
// neither space nor part of a word.
const (
	libraryEscape = "\U0010FFFE"
	libraryMark   = "\U0010FFFF"

	libraryUnescape = `{"type":"Replace","pattern":{"String":"` + libraryEscape + libraryEscape + `"},"content":"\u0000"},` +
		`{"type":"Replace","pattern":{"String":"` + libraryEscape + libraryMark + `"},"content":"` + libraryEscape + `"}`
)

var libraryEscaper = strings.NewReplacer("\x00", libraryEscape+libraryEscape, libraryEscape, libraryEscape+libraryMark)

// loadLibrary loads a tokenizer.json. What it says of truncation and padding is
// left out, as engines do.
func loadLibrary(data []byte) (pipeline, error) {
	// The library gives errors as C strings and ends the process when one holds
	// a NUL, which it can have only from here.
	if bytes.Contains(data, []byte(`\u0000`)) {
		return nil, errors.New("tokenizer.json holds a NUL character: the tokenizers library cannot load it")
	}
	var file map[string]json.RawMessage
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("tokenizer.json: %w", err)
	}
	if file["model"] == nil {
		return nil, errors.New("tokenizer.json has no model")
	}
	l := &library{ids: map[string]uint32{}}
	if err := l.readModel(file["model"]); err != nil {
		return nil, fmt.Errorf("tokenizer.json: model: %w", err)
	}
	if err := l.readAdded(file["added_tokens"]); err != nil {
		return nil, fmt.Errorf("tokenizer.json: added_tokens: %w", err)
	}
	file["truncation"], file["padding"] = json.RawMessage("null"), json.RawMessage("null")
	normalizers := libraryUnescape
	if n := file["normalizer"]; len(n) > 0 && string(n) != "null" {
		normalizers += "," + string(n)
	}
	file["normalizer"] = json.RawMessage(`{"type":"Sequence","normalizers":[` + normalizers + `]}`)
	data, err := json.Marshal(file)
	if err != nil {
		return nil, fmt.Errorf("tokenizer.json: %w", err)
	}
	if l.hf, err = tokenizers.FromBytes(data); err != nil {
		return nil, fmt.Errorf("tokenizer.json: the tokenizers library: %w", err)
	}
	return l, nil
}

// readModel reads the vocabulary. It refuses what would make the library fail
// on some texts only, and what would make it give other ids each time.
func (l *library) readModel(data json.RawMessage) error {
	var model struct {
		Type    string          `json:"type"`
		Vocab   json.RawMessage `json:"vocab"`
		Unk     *string         `json:"unk_token"`
		UnkID   *int            `json:"unk_id"`
		Dropout *float64        `json:"dropout"`
	}
	if err := json.Unmarshal(data, &model); err != nil {
		return err
	}
	if model.Dropout != nil && *model.Dropout != 0 {
		return fmt.Errorf("dropout %v makes its ids random", *model.Dropout)
	}
	if bytes.HasPrefix(model.Vocab, []byte("[")) { // Unigram: pairs of token and score
		var vocab [][]json.RawMessage
		if err := json.Unmarshal(model.Vocab, &vocab); err != nil {
			return fmt.Errorf("vocab: %w", err)
		}
		for i, entry := range vocab {
			var token string
			if len(entry) == 0 || json.Unmarshal(entry[0], &token) != nil {
				return fmt.Errorf("vocab: entry %d is no pair of token and score", i)
			}
			l.ids[token] = uint32(i)
		}
		if model.UnkID == nil || *model.UnkID < 0 || *model.UnkID >= len(vocab) {
			return errors.New("a Unigram without a valid unk_id cannot be followed: the library fails on unknown characters")
		}
		return nil
	}
	if err := json.Unmarshal(model.Vocab, &l.ids); err != nil {
		return fmt.Errorf("vocab: %w", err)
	}
	unk := model.Unk
	if unk == nil && (model.Type == "WordPiece" || model.Type == "WordLevel") {
		return fmt.Errorf("a %s without unk_token cannot be followed", model.Type)
	}
	if unk != nil {
		if _, ok := l.ids[*unk]; !ok {
			return fmt.Errorf("unk_token %q is not in the vocabulary: the library fails on unknown characters", *unk)
		}
	}
	return nil
}

// readAdded reads the added tokens. The library does not use the ids that the
// file gives them: it numbers those that are not in the vocabulary itself, in
// their order.
func (l *library) readAdded(data json.RawMessage) error {
	if data == nil {
		return nil
	}
	var added []struct {
		Content    string `json:"content"`
		SingleWord bool   `json:"single_word"`
		Normalized bool   `json:"normalized"`
	}
	if err := json.Unmarshal(data, &added); err != nil {
		return err
	}
	next := uint32(len(l.ids))
	for _, t := range added {
		if strings.Contains(t.Content, libraryEscape) {
			return fmt.Errorf("%+q holds a character that stands for another here", t.Content)
		}
		if t.Content == "" {
			continue
		}
		if _, ok := l.ids[t.Content]; !ok {
			l.ids[t.Content] = next
			next++
		}
		if l.anchor == "" && !t.SingleWord && !t.Normalized {
			l.anchor = t.Content
		}
	}
	return nil
}

// appendIDs panics when the library does on this text; the library has then
// written why to the standard error. Bytes that are not UTF-8 count as U+FFFD,
// a run of them that could have become one character as one.
func (l *library) appendIDs(dst []uint32, text string, special bool, cached *chunks) []uint32 {
	variant := uint8(0)
	if special {
		variant = 1
	}
	if cached != nil {
		if ids, ok := cached.append(dst, text, variant); ok {
			return ids
		}
	}
	ids := l.encode(text, special)
	if len(ids) == 0 && text != "" && len(l.encode(text+l.anchor, special)) == 0 {
		panic("the tokenizers library has failed on a text")
	}
	if cached != nil {
		cached.put(text, variant, ids)
	}
	return append(dst, ids...)
}

func (l *library) encode(text string, special bool) []uint32 {
	return l.hf.EncodeWithOptions(libraryEscaper.Replace(text), special).IDs
}

func (l *library) token(text string) (uint32, bool) {
	id, ok := l.ids[text]
	return id, ok
}

func (l *library) close() { l.hf.Close() }
