package tokenizer

import (
	"encoding/binary"
	"unicode/utf8"
)

// class is a set of classes that a code point is in, as the tokenizers library
// has them: its Unicode version is older than that of Go.
type class uint16

// classes are the classes of all code points in two steps, so that they stay
// in the processor's caches: the block of a code point's upper bits, and in
// the block its lower 8 bits. They never change.
var classes = expandClasses()

type classTable struct {
	// ascii is the first half of the first block again, without the step.
	ascii  [utf8.RuneSelf]class
	block  [0x110000 >> 8]uint16
	blocks [][256]class
}

func expandClasses() *classTable {
	t := new(classTable)
	seen := make(map[[256]class]uint16)
	var block [256]class
	at := 0
	for runs := []byte(classRuns); len(runs) > 0; {
		n, size := binary.Uvarint(runs)
		of := class(binary.LittleEndian.Uint16(runs[size:]))
		runs = runs[size+2:]
		for range n {
			block[at&0xff] = of
			at++
			if at&0xff != 0 {
				continue
			}
			i, ok := seen[block]
			if !ok {
				i = uint16(len(t.blocks))
				seen[block] = i
				t.blocks = append(t.blocks, block)
			}
			t.block[at>>8-1] = i
		}
	}
	copy(t.ascii[:], t.blocks[t.block[0]][:])
	return t
}

func classOf(r rune) class {
	return classes.blocks[classes.block[uint32(r)>>8]][r&0xff]
}

// classAt returns the classes of the code point at s[i:] and its length, 0 at
// the end of s.
func classAt(s string, i int) (class, int) {
	if i >= len(s) {
		return 0, 0
	}
	if b := s[i]; b < utf8.RuneSelf {
		return classes.ascii[b], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	return classOf(r), n
}

// skip returns the end of the run of code points from s[i:] on that are in any
// of the classes.
func skip(s string, i int, of class) int {
	for i < len(s) {
		if b := s[i]; b < utf8.RuneSelf {
			if classes.ascii[b]&of == 0 {
				return i
			}
			i++
			continue
		}
		c, n := classAt(s, i)
		if c&of == 0 {
			return i
		}
		i += n
	}
	return i
}

// skipNot returns the end of the run of code points from s[i:] on that are in
// none of the classes.
func skipNot(s string, i int, of class) int {
	for i < len(s) {
		if b := s[i]; b < utf8.RuneSelf {
			if classes.ascii[b]&of != 0 {
				return i
			}
			i++
			continue
		}
		c, n := classAt(s, i)
		if c&of != 0 {
			return i
		}
		i += n
	}
	return i
}

// skipBut is skip that ends at what is in any of the classes but.
func skipBut(s string, i int, of, but class) int {
	for i < len(s) {
		c, n := classAt(s, i)
		if c&of == 0 || c&but != 0 {
			return i
		}
		i += n
	}
	return i
}
