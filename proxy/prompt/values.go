package prompt

import "github.com/ardanlabs/jinja"

// values is memory for what a decoder makes of a body, so that following one
// prompt after another leaves little to the garbage collector. It belongs to
// one Prompt. What is made in it is valid until release. The zero value is
// ready.
type values struct {
	// text holds strings that had escapes.
	text []byte
	// dicts are objects; the first used of them are in use, the others empty.
	dicts []jinja.Value
	used  int
	// items are those of arrays whose end has not been reached yet.
	items []jinja.Value
}

// What values keeps from one prompt to the next.
const (
	mostDicts    = 512
	mostDictKeys = 8 // up to so many a map of Go's is small
	dictBytes    = 600
)

// room returns memory of at least n bytes; took says how much of it was used.
func (v *values) room(n int) []byte {
	if cap(v.text)-len(v.text) < n {
		v.text = make([]byte, 0, n)
	}
	return v.text[len(v.text):cap(v.text)]
}

func (v *values) took(n int) { v.text = v.text[:len(v.text)+n] }

// dict returns an empty dict.
func (v *values) dict() jinja.Value {
	if v.used == len(v.dicts) {
		if v.used == mostDicts {
			return jinja.NewDict()
		}
		v.dicts = append(v.dicts, jinja.NewDict())
	}
	v.used++
	return v.dicts[v.used-1]
}

// release ends the use of all that was made. Nothing of a body is kept.
func (v *values) release() {
	v.text = v.text[:0]
	clear(v.items[:cap(v.items)])
	v.items = v.items[:0]
	for i, value := range v.dicts[:v.used] {
		d := value.AsDict()
		if len(d.Data) > mostDictKeys || cap(d.Keys) > 2*mostDictKeys {
			v.dicts[i] = jinja.NewDict()
			continue
		}
		clear(d.Data)
		clear(d.Keys[:cap(d.Keys)])
		d.Keys = d.Keys[:0]
	}
	v.used = 0
}

// memory is how much is kept.
func (v *values) memory() int { return cap(v.text) + dictBytes*len(v.dicts) + 24*cap(v.items) }
