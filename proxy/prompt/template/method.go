package template

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// What the types have in Python. Names that begin with two underscores are
// refused when a template is compiled.
var (
	textAttributes  = names("capitalize casefold center count encode endswith expandtabs find format format_map index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip maketrans partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title translate upper zfill")
	listAttributes  = names("append clear copy count extend index insert pop remove reverse sort")
	tupleAttributes = names("count index")
	dictAttributes  = names("clear copy fromkeys get items keys pop popitem setdefault update values")
	intAttributes   = names("as_integer_ratio bit_count bit_length conjugate denominator from_bytes imag is_integer numerator real to_bytes")
	floatAttributes = names("as_integer_ratio conjugate from_number fromhex hex imag is_integer real")
	// changing are the methods that the sandbox does not give out.
	changingList = names("append clear pop reverse insert sort extend remove")
	changingDict = names("clear pop popitem setdefault update")
)

func names(list string) map[string]bool {
	set := map[string]bool{}
	for name := range strings.FieldsSeq(list) {
		set[name] = true
	}
	return set
}

// unfollowedMethods are refused when a template is compiled.
var unfollowedMethods = names("encode expandtabs format_map fromkeys maketrans translate")

// isTypeAttribute reports whether values of some type have the attribute, so
// that value.name may be something other than what value holds.
func isTypeAttribute(name string) bool {
	return textAttributes[name] || listAttributes[name] || dictAttributes[name] || intAttributes[name] || floatAttributes[name]
}

// method returns the attribute of v's type. ok is false when it has none.
func (r *rendering) method(v jinja.Value, name string) (_ jinja.Value, ok bool, err error) {
	switch {
	case v.IsString():
		ok = textAttributes[name]
	case v.IsDict():
		if changingDict[name] {
			return jinja.Undefined(), true, nil
		}
		ok = dictAttributes[name]
	case v.IsList() && isTuple(v.AsList()):
		ok = tupleAttributes[name]
	case v.IsList():
		if changingList[name] {
			return jinja.Undefined(), true, nil
		}
		ok = listAttributes[name]
	case v.IsFloat():
		if floatAttributes[name] {
			return v, true, unfollowed("the attribute %s of a number", name)
		}
	case isWhole(v), isHuge(v):
		if intAttributes[name] {
			return v, true, unfollowed("the attribute %s of a number", name)
		}
	}
	if !ok {
		return jinja.Undefined(), false, nil
	}
	return jinja.NewCallable("method", func([]jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
		return jinja.None(), unfollowed("calling the method %s by another name", name)
	}), true, nil
}

// call returns v.name(args, kwargs). What keys, values and items return may
// only be iterated over.
func (r *rendering) call(v jinja.Value, name string, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	method, ok, err := r.method(v, name)
	switch {
	case err != nil:
		return method, err
	case v.IsUndefined(), ok && method.IsUndefined():
		return method, errUndefined()
	case !ok:
		if v.IsDict() && v.AsDict().Has(name) {
			return method, raised("'%s' object is not callable", typeName(v.AsDict().Data[name]))
		}
		return method, errUndefined()
	case v.IsString():
		return r.callText(v.AsString(), name, args, kwargs)
	case v.IsDict():
		return r.callDict(v.AsDict(), name, args, kwargs)
	}
	if len(kwargs) > 0 {
		return v, raised("%s() takes no keyword arguments", name)
	}
	l := v.AsList()
	switch {
	case name == "copy" && len(args) == 0:
		return jinja.NewList(slices.Clone(l.Items)), nil
	case name == "count" && len(args) == 1:
		n := 0
		for _, item := range l.Items {
			same, err := equal(item, args[0])
			if err != nil {
				return v, err
			}
			if same {
				n++
			}
		}
		return jinja.NewInt(int64(n)), nil
	case name == "index" && len(args) == 1:
		for i, item := range l.Items {
			if same, err := equal(item, args[0]); same || err != nil {
				return jinja.NewInt(int64(i)), err
			}
		}
		return v, raised("a value is not in list")
	}
	return v, unfollowed("the call of %s", name)
}

func (r *rendering) callDict(d *jinja.Dict, name string, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	switch name {
	case "get":
		if len(kwargs) > 0 || len(args) == 0 || len(args) > 2 {
			return jinja.None(), raised("get expected 1 or 2 arguments")
		}
		if args[0].IsDict() || args[0].IsList() && !isTuple(args[0].AsList()) {
			return jinja.None(), raised("unhashable type: '%s'", typeName(args[0]))
		}
		if args[0].IsString() {
			if v, ok := d.Get(args[0].AsString()); ok {
				return v, nil
			}
		}
		if len(args) == 2 {
			return args[1], nil
		}
		return jinja.None(), nil
	case "fromkeys":
		return jinja.None(), unfollowed("the call of %s", name)
	}
	if len(args) > 0 || len(kwargs) > 0 {
		return jinja.None(), raised("%s() takes no arguments", name)
	}
	if err := r.spend(len(d.Keys)); err != nil {
		return jinja.None(), err
	}
	switch name {
	case "items":
		return jinja.NewList(pairs(d)), nil
	case "keys":
		items := make([]jinja.Value, len(d.Keys))
		for i, key := range d.Keys {
			items[i] = jinja.NewString(key)
		}
		return jinja.NewList(items), nil
	case "values":
		items := make([]jinja.Value, len(d.Keys))
		for i, key := range d.Keys {
			items[i] = d.Data[key]
		}
		return jinja.NewList(items), nil
	default: // copy
		return copyDict(d), nil
	}
}

func pairs(d *jinja.Dict) []jinja.Value {
	items := make([]jinja.Value, len(d.Keys))
	for i, key := range d.Keys {
		items[i] = newTuple(jinja.NewString(key), d.Data[key])
	}
	return items
}

func copyDict(d *jinja.Dict) jinja.Value {
	v := jinja.NewDict()
	for _, key := range d.Keys {
		v.AsDict().Set(key, d.Data[key])
	}
	return v
}

// arguments are what a method or filter was called with, by its parameters'
// names. What was not given is not among them.
type arguments map[string]jinja.Value

// bind gives the arguments the names of parameters.
func bind(name string, args []jinja.Value, kwargs map[string]jinja.Value, parameters ...string) (arguments, error) {
	if len(args) > len(parameters) {
		return nil, raised("%s() takes at most %d arguments (%d given)", name, len(parameters), len(args))
	}
	if len(args)+len(kwargs) == 0 {
		return nil, nil
	}
	bound := make(arguments, len(args)+len(kwargs))
	for i, v := range args {
		bound[parameters[i]] = v
	}
	for key, v := range kwargs {
		if _, twice := bound[key]; twice || !slices.Contains(parameters, key) {
			return nil, raised("%s() got an unexpected keyword argument '%s'", name, key)
		}
		bound[key] = v
	}
	return bound, nil
}

// given reports whether a parameter was given and is not None.
func (a arguments) given(name string) bool {
	v, ok := a[name]
	return ok && !v.IsNone()
}

func (a arguments) flag(name string) bool { return a[name].IsTruthy() }

// integer returns a parameter that must be a whole number.
func (a arguments) integer(name string, missing int64) (int64, error) {
	v, ok := a[name]
	switch {
	case !ok:
		return missing, nil
	case isWhole(v):
		return whole(v), nil
	case isHuge(v):
		return 0, unfollowed("a number beyond 64 bits")
	}
	return 0, raised("'%s' object cannot be interpreted as an integer", typeName(v))
}

// text returns a parameter that must be a string.
func (a arguments) text(name, missing string) (string, error) {
	v, ok := a[name]
	switch {
	case !ok:
		return missing, nil
	case v.IsString():
		return v.AsString(), nil
	}
	return "", raised("must be str, not %s", typeName(v))
}

// keywordMethods take keyword arguments.
var keywordMethods = map[string][]string{
	"split": {"sep", "maxsplit"}, "rsplit": {"sep", "maxsplit"},
	"splitlines": {"keepends"}, "expandtabs": {"tabsize"},
}

// positionalMethods take these, of which the first so many are required.
var positionalMethods = map[string]struct {
	required   int
	parameters []string
}{
	"startswith": {1, []string{"part", "start", "end"}}, "endswith": {1, []string{"part", "start", "end"}},
	"find": {1, []string{"part", "start", "end"}}, "rfind": {1, []string{"part", "start", "end"}},
	"index": {1, []string{"part", "start", "end"}}, "rindex": {1, []string{"part", "start", "end"}},
	"count": {1, []string{"part", "start", "end"}},
	"strip": {0, []string{"chars"}}, "lstrip": {0, []string{"chars"}}, "rstrip": {0, []string{"chars"}},
	"replace": {2, []string{"old", "new", "count"}}, "join": {1, []string{"items"}},
	"removeprefix": {1, []string{"part"}}, "removesuffix": {1, []string{"part"}},
	"partition": {1, []string{"part"}}, "rpartition": {1, []string{"part"}},
	"zfill": {1, []string{"width"}},
	"ljust": {1, []string{"width", "fill"}}, "rjust": {1, []string{"width", "fill"}}, "center": {1, []string{"width", "fill"}},
}

func (r *rendering) callText(s, name string, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if name == "format" || name == "format_map" {
		if name == "format_map" {
			return jinja.None(), unfollowed("the call of %s", name)
		}
		return r.format(s, args, kwargs)
	}
	for _, v := range args {
		if v.IsUndefined() {
			return v, raised("%s() got an undefined value", name)
		}
	}
	if parameters, ok := keywordMethods[name]; ok {
		a, err := bind(name, args, kwargs, parameters...)
		if err != nil {
			return jinja.None(), err
		}
		return r.split(s, name, a)
	}
	if len(kwargs) > 0 {
		if name == "replace" {
			return jinja.None(), unfollowed("replace with keyword arguments")
		}
		return jinja.None(), raised("%s() takes no keyword arguments", name)
	}
	signature := positionalMethods[name]
	if len(args) < signature.required {
		return jinja.None(), raised("%s() misses arguments", name)
	}
	a, err := bind(name, args, nil, signature.parameters...)
	if err != nil {
		return jinja.None(), err
	}
	switch name {
	case "startswith", "endswith", "find", "rfind", "index", "rindex", "count":
		return search(s, name, a)
	case "strip", "lstrip", "rstrip":
		chars := ""
		if a.given("chars") {
			if chars, err = a.text("chars", ""); err != nil {
				return jinja.None(), err
			}
			if chars == "" {
				return jinja.NewString(s), nil
			}
		}
		return jinja.NewString(strip(s, chars, name != "rstrip", name != "lstrip")), nil
	case "replace":
		old, err := a.text("old", "")
		if err != nil {
			return jinja.None(), err
		}
		with, err := a.text("new", "")
		if err != nil {
			return jinja.None(), err
		}
		count, err := a.integer("count", -1)
		if err != nil {
			return jinja.None(), err
		}
		return r.replace(s, old, with, count)
	case "join":
		items, err := itemsOf(a["items"])
		if err != nil {
			return jinja.None(), err
		}
		var b strings.Builder
		for i, item := range items {
			if !item.IsString() {
				return jinja.None(), raised("sequence item %d: expected str instance, %s found", i, typeName(item))
			}
			if i > 0 {
				b.WriteString(s)
			}
			b.WriteString(item.AsString())
			if err := r.grow(len(s) + len(item.AsString())); err != nil {
				return jinja.None(), err
			}
		}
		return jinja.NewString(b.String()), nil
	case "removeprefix", "removesuffix", "partition", "rpartition":
		part, err := a.text("part", "")
		if err != nil {
			return jinja.None(), err
		}
		switch name {
		case "removeprefix":
			return jinja.NewString(strings.TrimPrefix(s, part)), nil
		case "removesuffix":
			return jinja.NewString(strings.TrimSuffix(s, part)), nil
		}
		if part == "" {
			return jinja.None(), raised("empty separator")
		}
		at, before, middle, after := strings.Index(s, part), s, "", ""
		if name == "rpartition" {
			at, before, after = strings.LastIndex(s, part), "", s
		}
		if at >= 0 {
			before, middle, after = s[:at], part, s[at+len(part):]
		}
		return newTuple(jinja.NewString(before), jinja.NewString(middle), jinja.NewString(after)), nil
	case "zfill", "ljust", "rjust", "center":
		return r.pad(s, name, a)
	}
	return r.plainText(s, name)
}

// plainText are the methods without arguments.
func (r *rendering) plainText(s, name string) (jinja.Value, error) {
	if err := r.grow(len(s)); err != nil {
		return jinja.None(), err
	}
	var text string
	var err error
	switch name {
	case "upper", "lower", "title", "capitalize", "swapcase", "casefold":
		text, err = changeCase(s, name)
		return jinja.NewString(text), err
	}
	is := func(nonEmpty bool, f func(rune) bool) (jinja.Value, error) {
		return jinja.NewBool((s != "" || !nonEmpty) && strings.IndexFunc(s, func(c rune) bool { return !f(c) }) < 0), nil
	}
	switch name {
	case "isspace":
		return is(true, isSpace)
	case "isascii":
		return jinja.NewBool(isASCII(s)), nil
	case "isprintable":
		return is(false, unicode.IsPrint)
	case "isalpha":
		return is(true, unicode.IsLetter)
	case "isdecimal":
		return is(true, unicode.IsDigit)
	case "isdigit":
		if strings.IndexFunc(s, func(c rune) bool { return unicode.Is(unicode.No, c) }) >= 0 {
			return jinja.None(), unfollowed("isdigit of an unusual digit")
		}
		return is(true, unicode.IsDigit)
	case "isnumeric":
		if strings.IndexFunc(s, func(c rune) bool { return unicode.Is(unicode.Lo, c) }) >= 0 {
			return jinja.None(), unfollowed("isnumeric of an ideograph")
		}
		return is(true, unicode.IsNumber)
	case "isalnum":
		return is(true, func(c rune) bool { return unicode.IsLetter(c) || unicode.IsNumber(c) })
	case "isidentifier":
		if !isASCII(s) {
			return jinja.None(), unfollowed("isidentifier of a string beyond ASCII")
		}
		return jinja.NewBool(s != "" && identifier(s) == len(s)), nil
	case "isupper", "islower":
		cased, ok := false, true
		for _, c := range s {
			up, low := isUpper(c), isLower(c)
			cased = cased || up || low
			ok = ok && !unicode.IsTitle(c) && (name == "isupper" && !low || name == "islower" && !up)
		}
		return jinja.NewBool(cased && ok), nil
	case "istitle":
		cased, inWord := false, false
		for _, c := range s {
			switch {
			case isUpper(c) || unicode.IsTitle(c):
				if inWord {
					return jinja.NewBool(false), nil
				}
				cased, inWord = true, true
			case isLower(c):
				if !inWord {
					return jinja.NewBool(false), nil
				}
				cased = true
			default:
				inWord = false
			}
		}
		return jinja.NewBool(cased), nil
	}
	return jinja.None(), unfollowed("the call of %s", name)
}

func isUpper(c rune) bool { return unicode.IsUpper(c) || unicode.Is(unicode.Other_Uppercase, c) }
func isLower(c rune) bool { return unicode.IsLower(c) || unicode.Is(unicode.Other_Lowercase, c) }

// hasSpecialCase reports whether c's upper, lower or title case is more than
// one character, or depends on what is around it.
func hasSpecialCase(c rune) bool {
	switch {
	case c < utf8.RuneSelf:
		return false
	case c == 0xb5, c == 0xdf, c == 0x130, c == 0x131, c == 0x149, c == 0x17f, c == 0x1f0, c == 0x345, c == 0x390, c == 0x3a3, c == 0x3b0, c == 0x3c2, c == 0x587,
		c >= 0x1c4 && c <= 0x1cc, c >= 0x1f1 && c <= 0x1f3, c >= 0x10a0 && c <= 0x10ff, c >= 0x13a0 && c <= 0x13ff, c >= 0x1c80 && c <= 0x1cbf,
		c >= 0x1e96 && c <= 0x1e9e, c >= 0x1f00 && c <= 0x1fff, c >= 0xa640 && c <= 0xabff, c >= 0xfb00 && c <= 0xfb17, c > 0x10400 && unicode.ToUpper(c) != unicode.ToLower(c):
		return true
	}
	return false
}

// hasSpecialLower is hasSpecialCase for lower case alone.
func hasSpecialLower(c rune) bool {
	return c == 0x130 || c == 0x3a3 || unicode.ToLower(c) != c && c >= 0x370 && hasSpecialCase(c)
}

// changeCase is for upper, lower, title, capitalize, swapcase and casefold.
func changeCase(s, name string) (string, error) {
	special := hasSpecialCase
	if name == "lower" {
		special = hasSpecialLower
	}
	if strings.IndexFunc(s, special) >= 0 || name == "casefold" && !isASCII(s) {
		return "", unfollowed("the case of an unusual letter")
	}
	switch name {
	case "upper":
		return strings.ToUpper(s), nil
	case "lower", "casefold":
		return strings.ToLower(s), nil
	}
	out := make([]byte, 0, len(s))
	inWord := false
	for i, c := range s {
		switch name {
		case "title":
			cased := isUpper(c) || isLower(c) || unicode.IsTitle(c)
			if inWord {
				c = unicode.ToLower(c)
			} else {
				c = unicode.ToTitle(c)
			}
			inWord = cased
		case "capitalize":
			if i == 0 {
				c = unicode.ToTitle(c)
			} else {
				c = unicode.ToLower(c)
			}
		case "swapcase":
			if isUpper(c) {
				c = unicode.ToLower(c)
			} else if isLower(c) {
				c = unicode.ToUpper(c)
			}
		}
		out = utf8.AppendRune(out, c)
	}
	return string(out), nil
}

// strip removes characters from the ends of s: those in chars, or white space
// if chars is empty.
func strip(s, chars string, left, right bool) string {
	remove := isSpace
	if chars != "" {
		remove = func(c rune) bool { return strings.ContainsRune(chars, c) }
	}
	if left {
		s = strings.TrimLeftFunc(s, remove)
	}
	if right {
		s = strings.TrimRightFunc(s, remove)
	}
	return s
}

func (r *rendering) replace(s, old, with string, count int64) (jinja.Value, error) {
	n := int64(strings.Count(s, old))
	if count >= 0 {
		n = min(n, count)
	}
	if n == 0 {
		return jinja.NewString(s), nil
	}
	if err := r.grow(len(s) + int(n)*len(with)); err != nil {
		return jinja.None(), err
	}
	return jinja.NewString(strings.Replace(s, old, with, int(n))), nil
}

// search is for the methods that look for a part of s.
func search(s, name string, a arguments) (jinja.Value, error) {
	parts := []jinja.Value{a["part"]}
	if prefix := name == "startswith" || name == "endswith"; prefix && parts[0].IsList() && isTuple(parts[0].AsList()) {
		parts = parts[0].AsList().Items
	}
	for _, p := range parts {
		if !p.IsString() {
			return p, raised("must be str, not %s", typeName(p))
		}
	}
	// The part of s that start and end name, and how many characters are
	// before it.
	within, before, valid := s, 0, true
	if a.given("start") || a.given("end") {
		n := utf8.RuneCountInString(s)
		start, end := int64(0), int64(n)
		for name, bound := range map[string]*int64{"start": &start, "end": &end} {
			if !a.given(name) {
				continue
			}
			v, err := a.integer(name, 0)
			if err != nil {
				return jinja.None(), err
			}
			if v < 0 {
				v = max(v+int64(n), 0)
			}
			*bound = v
		}
		end = min(end, int64(n))
		valid = start <= end
		if valid {
			runes := []rune(s)
			within, before = string(runes[start:end]), int(start)
		}
	}
	if name == "startswith" || name == "endswith" {
		for _, p := range parts {
			if valid && (name == "startswith" && strings.HasPrefix(within, p.AsString()) || name == "endswith" && strings.HasSuffix(within, p.AsString())) {
				return jinja.NewBool(true), nil
			}
		}
		return jinja.NewBool(false), nil
	}
	part := parts[0].AsString()
	if name == "count" {
		if !valid {
			return jinja.NewInt(0), nil
		}
		return jinja.NewInt(int64(strings.Count(within, part))), nil
	}
	at := -1
	if valid {
		if strings.HasPrefix(name, "r") {
			at = strings.LastIndex(within, part)
		} else {
			at = strings.Index(within, part)
		}
	}
	if at < 0 {
		if strings.HasSuffix(name, "index") {
			return jinja.None(), raised("substring not found")
		}
		return jinja.NewInt(-1), nil
	}
	return jinja.NewInt(int64(before + utf8.RuneCountInString(within[:at]))), nil
}

// split is for split, rsplit, splitlines and expandtabs.
func (r *rendering) split(s, name string, a arguments) (jinja.Value, error) {
	var parts []string
	switch name {
	case "expandtabs":
		return jinja.None(), unfollowed("the call of %s", name)
	case "splitlines":
		if v, ok := a["keepends"]; ok && !isWhole(v) {
			return jinja.None(), unfollowed("keepends that is no number")
		}
		parts = splitLines(s, a.flag("keepends"))
	default:
		limit, err := a.integer("maxsplit", -1)
		if err != nil {
			return jinja.None(), err
		}
		if limit < 0 {
			limit = int64(len(s)) + 1
		}
		if !a.given("sep") {
			parts = splitSpace(s, int(limit), name == "rsplit")
			break
		}
		sep, err := a.text("sep", "")
		if err != nil {
			return jinja.None(), err
		}
		if sep == "" {
			return jinja.None(), raised("empty separator")
		}
		if name == "split" {
			parts = strings.SplitN(s, sep, int(min(limit, int64(len(s))+1))+1)
			break
		}
		for limit > 0 {
			at := strings.LastIndex(s, sep)
			if at < 0 {
				break
			}
			parts = append(parts, s[at+len(sep):])
			s = s[:at]
			limit--
		}
		parts = append(parts, s)
		slices.Reverse(parts)
	}
	if err := r.spend(len(parts)); err != nil {
		return jinja.None(), err
	}
	items := make([]jinja.Value, len(parts))
	for i, p := range parts {
		items[i] = jinja.NewString(p)
	}
	return jinja.NewList(items), nil
}

func splitSpace(s string, limit int, fromRight bool) (parts []string) {
	if fromRight {
		s = strings.TrimRightFunc(s, isSpace)
		for s != "" {
			at := strings.LastIndexFunc(s, isSpace)
			if at < 0 || limit == 0 {
				parts = append(parts, strings.TrimRightFunc(s, isSpace))
				break
			}
			_, size := utf8.DecodeRuneInString(s[at:])
			parts = append(parts, s[at+size:])
			s = strings.TrimRightFunc(s[:at], isSpace)
			limit--
		}
		slices.Reverse(parts)
		return parts
	}
	s = strings.TrimLeftFunc(s, isSpace)
	for s != "" {
		at := strings.IndexFunc(s, isSpace)
		if at < 0 || limit == 0 {
			return append(parts, s)
		}
		parts = append(parts, s[:at])
		s = strings.TrimLeftFunc(s[at:], isSpace)
		limit--
	}
	return parts
}

func splitLines(s string, keep bool) (lines []string) {
	for s != "" {
		at := strings.IndexFunc(s, func(c rune) bool {
			return c >= '\n' && c <= '\r' || c >= 0x1c && c <= 0x1e || c == 0x85 || c == 0x2028 || c == 0x2029
		})
		if at < 0 {
			return append(lines, s)
		}
		_, size := utf8.DecodeRuneInString(s[at:])
		if strings.HasPrefix(s[at:], "\r\n") {
			size = 2
		}
		if keep {
			lines = append(lines, s[:at+size])
		} else {
			lines = append(lines, s[:at])
		}
		s = s[at+size:]
	}
	return lines
}

// pad is for zfill, ljust, rjust and center.
func (r *rendering) pad(s, name string, a arguments) (jinja.Value, error) {
	width, err := a.integer("width", 0)
	if err != nil {
		return jinja.None(), err
	}
	fill, err := a.text("fill", " ")
	if err != nil {
		return jinja.None(), err
	}
	if utf8.RuneCountInString(fill) != 1 {
		return jinja.None(), raised("The fill character must be exactly one character long")
	}
	n := int64(utf8.RuneCountInString(s))
	if width <= n {
		return jinja.NewString(s), nil
	}
	if width > maxRepeat {
		return jinja.None(), unfollowed("a width beyond %d", maxRepeat)
	}
	missing := int(width - n)
	if err := r.grow(missing*len(fill) + len(s)); err != nil {
		return jinja.None(), err
	}
	switch name {
	case "ljust":
		return jinja.NewString(s + strings.Repeat(fill, missing)), nil
	case "rjust":
		return jinja.NewString(strings.Repeat(fill, missing) + s), nil
	case "center":
		left := missing/2 + missing&int(width)&1
		return jinja.NewString(strings.Repeat(fill, left) + s + strings.Repeat(fill, missing-left)), nil
	}
	sign := ""
	if s != "" && (s[0] == '+' || s[0] == '-') {
		sign, s = s[:1], s[1:]
	}
	return jinja.NewString(sign + strings.Repeat("0", missing) + s), nil
}
