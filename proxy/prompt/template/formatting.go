package template

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// format is str.format. Format specifications are not followed.
func (r *rendering) format(s string, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	var b []byte
	next, manual := 0, false
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c != '{' && c != '}' {
			b = append(b, c)
			continue
		}
		if i+1 < len(s) && s[i+1] == c {
			b = append(b, c)
			i++
			continue
		}
		if c == '}' {
			return jinja.None(), raised("Single '}' encountered in format string")
		}
		end := strings.IndexAny(s[i+1:], "{}")
		if end < 0 || s[i+1+end] == '{' {
			if end < 0 {
				return jinja.None(), raised("expected '}' before end of string")
			}
			return jinja.None(), unfollowed("a nested format")
		}
		field := s[i+1 : i+1+end]
		i += end + 1
		if strings.Contains(field, ":") && !strings.HasSuffix(field, ":") {
			return jinja.None(), unfollowed("a format specification")
		}
		field = strings.TrimSuffix(field, ":")
		field, conversion, converted := strings.Cut(field, "!")
		if converted && conversion != "r" && conversion != "s" || strings.ContainsAny(field, ".[") {
			return jinja.None(), unfollowed("the format field %q", field)
		}
		var v jinja.Value
		if n, err := strconv.Atoi(field); field == "" || err == nil && n >= 0 {
			if field == "" {
				if manual {
					return jinja.None(), raised("cannot switch from manual field specification to automatic field numbering")
				}
				n = next
				next++
			} else {
				if next > 0 {
					return jinja.None(), raised("cannot switch from manual field specification to automatic field numbering")
				}
				manual = true
			}
			if n >= len(args) {
				return jinja.None(), raised("Replacement index %d out of range for positional args tuple", n)
			}
			v = args[n]
		} else {
			var ok bool
			if v, ok = kwargs[field]; !ok {
				return jinja.None(), raised("'%s'", field)
			}
		}
		var err error
		switch {
		case conversion == "r":
			b, err = appendRepr(b, v, 0)
		case v.IsUndefined() && !converted:
			// Undefined has no format of its own; it is empty.
		default:
			b, err = appendText(b, v)
		}
		if err == nil {
			err = r.grow(len(b) / 16)
		}
		if err != nil {
			return jinja.None(), err
		}
	}
	if err := r.grow(len(b)); err != nil {
		return jinja.None(), err
	}
	return jinja.NewString(string(b)), nil
}

// printf is s % arg.
func (r *rendering) printf(s string, arg jinja.Value) (jinja.Value, error) {
	args := []jinja.Value{arg}
	if arg.IsList() && isTuple(arg.AsList()) {
		args = arg.AsList().Items
	}
	next := 0
	take := func() (jinja.Value, error) {
		if next >= len(args) {
			return jinja.None(), raised("not enough arguments for format string")
		}
		next++
		return args[next-1], nil
	}
	mapped := false
	var b []byte
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b = append(b, s[i])
			continue
		}
		i++
		var v jinja.Value
		named := false
		if i < len(s) && s[i] == '(' {
			end := strings.IndexByte(s[i:], ')')
			if end < 0 {
				return jinja.None(), raised("incomplete format key")
			}
			if !arg.IsDict() {
				return jinja.None(), raised("format requires a mapping")
			}
			key := s[i+1 : i+end]
			if strings.Contains(key, "(") {
				return jinja.None(), unfollowed("the format key %q", key)
			}
			var ok bool
			if v, ok = arg.AsDict().Get(key); !ok {
				return jinja.None(), raised("'%s'", key)
			}
			i += end + 1
			named, mapped = true, true
		}
		flags := i
		for i < len(s) && strings.IndexByte("-+ 0#", s[i]) >= 0 {
			i++
		}
		flag := s[flags:i]
		number := func() (int, error) {
			start := i
			for i < len(s) && s[i] >= '0' && s[i] <= '9' {
				i++
			}
			if start == i {
				return -1, nil
			}
			n, err := strconv.Atoi(s[start:i])
			if err != nil || n > maxRepeat {
				return 0, unfollowed("the width %s", s[start:i])
			}
			return n, nil
		}
		width, err := number()
		if err != nil {
			return jinja.None(), err
		}
		precision := -1
		if i < len(s) && s[i] == '.' {
			i++
			if precision, err = number(); err != nil {
				return jinja.None(), err
			}
			precision = max(precision, 0)
		}
		if i < len(s) && strings.IndexByte("hlL", s[i]) >= 0 {
			i++
		}
		if i >= len(s) {
			return jinja.None(), raised("incomplete format")
		}
		verb := s[i]
		if verb == '%' {
			if width >= 0 || precision >= 0 || flag != "" || named {
				return jinja.None(), unfollowed("a percent sign with a width")
			}
			b = append(b, '%')
			continue
		}
		if verb == '*' {
			return jinja.None(), unfollowed("a width that is an argument")
		}
		if !named {
			if v, err = take(); err != nil {
				return jinja.None(), err
			}
		}
		text, numeric := "", true
		switch verb {
		case 's', 'r', 'a':
			numeric = false
			switch {
			case verb == 'a':
				return jinja.None(), unfollowed("the format %%a")
			case verb == 's':
				text, err = textOf(v)
			default:
				var repr []byte
				repr, err = appendRepr(nil, v, 0)
				text = string(repr)
			}
			if err != nil {
				return jinja.None(), err
			}
			if precision >= 0 {
				if text, err = sliceText(text, 0, int64(precision), false); err != nil {
					return jinja.None(), err
				}
			}
		case 'd', 'i', 'u':
			switch {
			case isWhole(v):
				text = strconv.FormatInt(whole(v), 10)
			case v.IsFloat():
				f := v.AsFloat()
				if !(f > -1<<62 && f < 1<<62) {
					return jinja.None(), unfollowed("a number beyond 64 bits")
				}
				text = strconv.FormatInt(int64(f), 10)
			case isHuge(v):
				return jinja.None(), unfollowed("a number beyond 64 bits")
			default:
				return jinja.None(), raised("%%%c format: a real number is required, not %s", verb, typeName(v))
			}
			if precision >= 0 {
				return jinja.None(), unfollowed("a precision of a whole number")
			}
		case 'x', 'X', 'o':
			if !isWhole(v) {
				if isHuge(v) {
					return jinja.None(), unfollowed("a number beyond 64 bits")
				}
				return jinja.None(), raised("%%%c format: an integer is required, not %s", verb, typeName(v))
			}
			if precision >= 0 || strings.Contains(flag, "#") {
				return jinja.None(), unfollowed("a precision of a whole number")
			}
			text = fmt.Sprintf("%"+string(rune(verb)), whole(v))
		case 'f', 'F', 'e', 'E':
			if !isNumber(v) {
				if isHuge(v) {
					return jinja.None(), unfollowed("a number beyond 64 bits")
				}
				return jinja.None(), raised("must be real number, not %s", typeName(v))
			}
			if precision < 0 {
				precision = 6
			}
			if precision > 1000 || strings.Contains(flag, "#") {
				return jinja.None(), unfollowed("such a precision")
			}
			f := float(v)
			if f-f != 0 {
				return jinja.None(), unfollowed("a format of a number that is not finite")
			}
			text = strconv.FormatFloat(f, verb|0x20, precision, 64)
			if verb == 'E' {
				text = strings.ToUpper(text)
			}
		default:
			return jinja.None(), unfollowed("the format %%%c", verb)
		}
		if numeric && !strings.HasPrefix(text, "-") {
			if strings.Contains(flag, "+") {
				text = "+" + text
			} else if strings.Contains(flag, " ") {
				text = " " + text
			}
		}
		if missing := width - utf8.RuneCountInString(text); missing > 0 {
			switch {
			case strings.Contains(flag, "-"):
				text += strings.Repeat(" ", missing)
			case strings.Contains(flag, "0") && numeric:
				sign := ""
				if text[0] == '-' || text[0] == '+' || text[0] == ' ' {
					sign, text = text[:1], text[1:]
				}
				text = sign + strings.Repeat("0", missing) + text
			default:
				text = strings.Repeat(" ", missing) + text
			}
		}
		b = append(b, text...)
		if err := r.grow(len(text)); err != nil {
			return jinja.None(), err
		}
	}
	// Anything that has items may be left unused, but for tuples.
	if next < len(args) && !mapped && (!arg.IsDict() && !arg.IsList() && !arg.IsUndefined() || arg.IsList() && isTuple(arg.AsList())) {
		return jinja.None(), raised("not all arguments converted during string formatting")
	}
	return jinja.NewString(string(b)), nil
}
