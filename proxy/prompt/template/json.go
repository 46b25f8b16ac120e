package template

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// jsonStyle is how json.dumps writes a value.
type jsonStyle struct {
	indent        string // of each level
	lines         bool   // whether there are lines to indent
	item, key     string // separators
	ascii, sorted bool
	// most is how many bytes it writes; over says that there were more.
	most int
	over bool
}

var plainJSON = jsonStyle{item: ", ", key: ": ", most: maxOutput / 2}

// toJSON is transformers' tojson filter.
func (r *rendering) toJSON(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	style := plainJSON
	a, err := bind("tojson", args, kwargs, "x", "ensure_ascii", "indent", "separators", "sort_keys")
	if err != nil {
		return jinja.None(), err
	}
	if a.given("indent") {
		style.lines = true
		style.item = ","
		switch indent := a["indent"]; {
		case indent.IsString():
			style.indent = indent.AsString()
		case isWhole(indent):
			if whole(indent) > 1000 {
				return jinja.None(), unfollowed("such an indent")
			}
			style.indent = strings.Repeat(" ", int(max(whole(indent), 0)))
		default:
			return jinja.None(), raised("an indent must be a number or a string")
		}
	}
	if a.given("separators") {
		items, err := itemsOf(a["separators"])
		if err != nil {
			return jinja.None(), err
		}
		if len(items) != 2 || !items[0].IsString() || !items[1].IsString() {
			return jinja.None(), raised("separators must be two strings")
		}
		style.item, style.key = items[0].AsString(), items[1].AsString()
	}
	style.ascii, style.sorted = a.flag("ensure_ascii"), a.flag("sort_keys")
	style.most = r.effort.bytes / 2
	b, err := style.append(r.buffer[:0], a["x"], 0)
	r.buffer = b
	r.long = r.long || style.over && r.effort != most
	if err != nil {
		return jinja.None(), err
	}
	return jinja.NewString(r.keep(b)), r.grow(len(b))
}

func (s *jsonStyle) newline(b []byte, depth int) []byte {
	if s.lines {
		b = append(b, '\n')
		for range depth {
			b = append(b, s.indent...)
		}
	}
	return b
}

func (s *jsonStyle) append(b []byte, v jinja.Value, depth int) (_ []byte, err error) {
	if depth > maxDepth || len(b) > s.most {
		s.over = len(b) > s.most
		return b, unfollowed("a value that deep or large")
	}
	switch {
	case v.IsNone():
		return append(b, "null"...), nil
	case v.IsBool():
		return strconv.AppendBool(b, v.AsBool()), nil
	case v.IsInt():
		return strconv.AppendInt(b, v.AsInt(), 10), nil
	case v.IsFloat():
		f := v.AsFloat()
		switch {
		case math.IsNaN(f):
			return append(b, "NaN"...), nil
		case math.IsInf(f, 1):
			return append(b, "Infinity"...), nil
		case math.IsInf(f, -1):
			return append(b, "-Infinity"...), nil
		}
		return appendFloat(b, f), nil
	case v.IsString():
		return appendJSONString(b, v.AsString(), s.ascii), nil
	case v.IsList():
		items := v.AsList().Items
		b = append(b, '[')
		for i, item := range items {
			if i > 0 {
				b = append(b, s.item...)
			}
			b = s.newline(b, depth+1)
			if b, err = s.append(b, item, depth+1); err != nil {
				return b, err
			}
		}
		if len(items) > 0 {
			b = s.newline(b, depth)
		}
		return append(b, ']'), nil
	case v.IsDict():
		d := v.AsDict()
		keys := d.Keys
		if s.sorted {
			keys = slices.Sorted(slices.Values(keys))
		}
		b = append(b, '{')
		for i, key := range keys {
			if i > 0 {
				b = append(b, s.item...)
			}
			b = s.newline(b, depth+1)
			b = append(appendJSONString(b, key, s.ascii), s.key...)
			if b, err = s.append(b, d.Data[key], depth+1); err != nil {
				return b, err
			}
		}
		if len(keys) > 0 {
			b = s.newline(b, depth)
		}
		return append(b, '}'), nil
	}
	if digits, ok := hugeDigits(v); ok {
		return append(b, digits...), nil
	}
	return b, raised("Object of type %s is not JSON serializable", typeName(v))
}

// appendJSONString appends s as json.dumps writes it.
func appendJSONString(b []byte, s string, ascii bool) []byte {
	b = append(b, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && (c < 0x7f || !ascii) {
			i++
			continue
		}
		b = append(b, s[start:i]...)
		size := 1
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\n':
			b = append(b, `\n`...)
		case '\r':
			b = append(b, `\r`...)
		case '\t':
			b = append(b, `\t`...)
		case '\b':
			b = append(b, `\b`...)
		case '\f':
			b = append(b, `\f`...)
		default:
			var r rune
			r, size = utf8.DecodeRuneInString(s[i:])
			if r > 0xffff {
				r -= 0x10000
				b = fmt.Appendf(b, `\u%04x\u%04x`, 0xd800+(r>>10), 0xdc00+r&0x3ff)
			} else {
				b = fmt.Appendf(b, `\u%04x`, r)
			}
		}
		i += size
		start = i
	}
	return append(append(b, s[start:]...), '"')
}
