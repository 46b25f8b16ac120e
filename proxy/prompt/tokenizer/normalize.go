package tokenizer

import (
	"slices"
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
		if r < 0x300 || !composesAnew(r) && (classOf(r)&classNormalizes != 0 || !isNew(r)) {
			continue
		}
		writeComposed(&b, text[from:k])
		b.WriteString(string(r))
		from = k + len(string(r))
	}
	writeComposed(&b, text[from:])
	return b.String()
}

// mostMarks is how many marks norm puts behind one starter. It breaks longer
// runs by a character of its own, which no other library does.
const mostMarks = 30

// writeComposed writes text in the composed form. It cuts it where nothing
// composes with what is before, and leaves to norm the parts that it gets right.
func writeComposed(b *strings.Builder, text string) {
	from, start, marks := 0, 0, 0
	end := func(i int) {
		if marks > mostMarks {
			b.WriteString(norm.NFC.String(text[from:start]))
			b.WriteString(string(composeRun([]rune(text[start:i]))))
			from = i
		}
		start, marks = i, 0
	}
	for i := range text {
		p := norm.NFC.PropertiesString(text[i:])
		if p.BoundaryBefore() {
			end(i)
		}
		marks += max(1, utf8.RuneCount(p.Decomposition()))
	}
	end(len(text))
	b.WriteString(norm.NFC.String(text[from:]))
}

// composeRun is canonical composition as Unicode defines it (D117), by norm's
// knowledge of single characters and pairs.
func composeRun(text []rune) []rune {
	type mark struct {
		r   rune
		ccc uint8
	}
	var run []mark
	for _, r := range text {
		p := norm.NFC.PropertiesString(string(r))
		parts := []rune(string(p.Decomposition()))
		if len(parts) == 0 {
			parts = []rune{r}
		}
		for _, r := range parts {
			run = append(run, mark{r, norm.NFC.PropertiesString(string(r)).CCC()})
		}
	}
	for from := 0; from < len(run); {
		end := from + 1
		if run[from].ccc != 0 {
			for end < len(run) && run[end].ccc != 0 {
				end++
			}
			slices.SortStableFunc(run[from:end], func(a, b mark) int { return int(a.ccc) - int(b.ccc) })
		}
		from = end
	}
	out := make([]rune, 0, len(run))
	starter, last := -1, -1 // where in out the last starter is, and the class of what was kept behind it
	for _, m := range run {
		if starter >= 0 && last < int(m.ccc) {
			if pair := []rune(norm.NFC.String(string(out[starter]) + string(m.r))); len(pair) == 1 {
				out[starter] = pair[0]
				continue
			}
		}
		if last = int(m.ccc); last == 0 {
			starter, last = len(out), -1
		}
		out = append(out, m.r)
	}
	return out
}

// composesAnew tells the letters that compose to norm, and not to the library,
// with a mark that both know.
func composesAnew(r rune) bool { return r == 0x105d2 || r == 0x105da }

// isNew tells whether norm knows how to decompose, reorder or compose a code
// point.
func isNew(r rune) bool {
	p := norm.NFD.PropertiesString(string(r))
	return p.CCC() != 0 || p.Decomposition() != nil || !p.BoundaryBefore()
}
