package tokenizer

import (
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// nfc returns text in the composed form, as the tokenizers library makes it. It
// allocates only when text is in another form.
//
// The library's tables are older than those of norm: code points that it does
// not know stay where they are, and what is on both sides of them is normalized
// on its own. What is composed to norm is so to the library: to it such code
// points only keep more others from composing.
func nfc(text string) string {
	// Without this much care, norm allocates even for text in that form.
	ascii := 0
	for ascii < len(text) && text[ascii] < utf8.RuneSelf {
		ascii++
	}
	if ascii == len(text) || norm.NFC.QuickSpanString(text) == len(text) || norm.NFC.IsNormalString(text) {
		return text
	}
	from := 0
	var b strings.Builder
	for k, r := range text {
		if r < 0x300 || classOf(r)&classNormalizes != 0 || !isNew(r) {
			continue
		}
		b.WriteString(norm.NFC.String(text[from:k]))
		b.WriteString(string(r))
		from = k + len(string(r))
	}
	b.WriteString(norm.NFC.String(text[from:]))
	return b.String()
}

// isNew tells whether norm knows how to decompose, reorder or compose a code
// point.
func isNew(r rune) bool {
	p := norm.NFD.PropertiesString(string(r))
	return p.CCC() != 0 || p.Decomposition() != nil || !p.BoundaryBefore()
}
