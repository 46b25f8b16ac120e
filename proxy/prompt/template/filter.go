package template

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/ardanlabs/jinja"
)

// filter is one of Jinja's filters. args[0] is what it is applied to.
type filter func(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error)

// filterResult tells the rewriter what a filter returns.
type filterResult uint8

const (
	anyResult filterResult = iota
	textResult
	countResult    // a small whole number
	iteratorResult // something that can only be iterated over, once
)

// filters are those that are followed. It is filled by init because map looks
// filters up by name.
var filters map[string]struct {
	apply  filter
	result filterResult
}

func init() {
	filters = map[string]struct {
		apply  filter
		result filterResult
	}{
		"abs":        {filterAbs, anyResult},
		"batch":      {filterBatch, iteratorResult},
		"capitalize": {caseFilter("capitalize"), textResult},
		"center":     {filterCenter, textResult},
		"count":      {filterLength, countResult},
		"d":          {filterDefault, anyResult},
		"default":    {filterDefault, anyResult},
		"dictsort":   {filterDictsort, anyResult},
		"first":      {filterFirst, anyResult},
		"float":      {filterFloat, anyResult},
		"format":     {filterFormat, textResult},
		"groupby":    {filterGroupby, iteratorResult},
		"indent":     {filterIndent, textResult},
		"int":        {filterInt, anyResult},
		"items":      {filterItems, iteratorResult},
		"join":       {filterJoin, textResult},
		"last":       {filterLast, anyResult},
		"length":     {filterLength, countResult},
		"list":       {filterList, anyResult},
		"lower":      {caseFilter("lower"), textResult},
		"map":        {filterMap, iteratorResult},
		"max":        {extremum(1), anyResult},
		"min":        {extremum(-1), anyResult},
		"reject":     {picker(false, false), iteratorResult},
		"rejectattr": {picker(true, false), iteratorResult},
		"replace":    {filterReplace, textResult},
		"reverse":    {filterReverse, iteratorResult},
		"round":      {filterRound, anyResult},
		"select":     {picker(false, true), iteratorResult},
		"selectattr": {picker(true, true), iteratorResult},
		"slice":      {filterSlice, iteratorResult},
		"sort":       {filterSort, anyResult},
		"string":     {filterString, textResult},
		"sum":        {filterSum, anyResult},
		"title":      {filterTitle, textResult},
		"tojson":     {(*rendering).toJSON, textResult},
		"trim":       {filterTrim, textResult},
		"truncate":   {filterTruncate, textResult},
		"unique":     {filterUnique, iteratorResult},
		"upper":      {caseFilter("upper"), textResult},
		"wordcount":  {filterWordcount, anyResult},
	}
}

// consuming are the filters that take an iterator and see what a list would
// show them.
var consuming = names("list join first map select reject selectattr rejectattr sort unique min max sum batch slice groupby")

// otherFilters are those of Jinja that are not followed.
var otherFilters = names("attr e escape filesizeformat forceescape pprint random safe striptags urlencode urlize wordwrap xmlattr")

// textFilter returns a filter's parameters, and its input as a string.
func textFilter(name string, args []jinja.Value, kwargs map[string]jinja.Value, parameters ...string) (string, arguments, error) {
	a, err := bind(name, args, kwargs, append([]string{"s"}, parameters...)...)
	if err != nil {
		return "", nil, err
	}
	s, err := textOf(a["s"])
	return s, a, err
}

func caseFilter(name string) filter {
	return func(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
		s, _, err := textFilter(name, args, kwargs)
		if err != nil {
			return jinja.None(), err
		}
		return r.plainText(s, name)
	}
}

// filterTitle makes the first letter of each word upper case and the others
// lower case, where words are separated by white space and opening brackets.
func filterTitle(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, _, err := textFilter("title", args, kwargs)
	if err != nil {
		return jinja.None(), err
	}
	if err := r.grow(len(s)); err != nil {
		return jinja.None(), err
	}
	if strings.IndexFunc(s, hasSpecialCase) >= 0 {
		return jinja.None(), unfollowed("the case of an unusual letter")
	}
	start := true
	return jinja.NewString(strings.Map(func(c rune) rune {
		switch {
		case isSpace(c), strings.ContainsRune("-({[<", c):
			start = true
			return c
		case start:
			start = false
			return unicode.ToUpper(c)
		}
		return unicode.ToLower(c)
	}, s)), nil
}

func filterTrim(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, a, err := textFilter("trim", args, kwargs, "chars")
	if err != nil {
		return jinja.None(), err
	}
	if !a.given("chars") {
		return jinja.NewString(strip(s, "", true, true)), nil
	}
	chars, err := a.text("chars", "")
	if err != nil || chars == "" {
		return jinja.NewString(s), err
	}
	return jinja.NewString(strip(s, chars, true, true)), nil
}

func filterString(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, _, err := textFilter("string", args, kwargs)
	if err != nil {
		return jinja.None(), err
	}
	return jinja.NewString(s), r.grow(len(s))
}

func filterCenter(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, a, err := textFilter("center", args, kwargs, "width")
	if err != nil {
		return jinja.None(), err
	}
	if _, ok := a["width"]; !ok {
		a["width"] = jinja.NewInt(80)
	}
	return r.pad(s, "center", a)
}

func filterReplace(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, a, err := textFilter("replace", args, kwargs, "old", "new", "count")
	if err != nil {
		return jinja.None(), err
	}
	if _, ok := a["new"]; !ok {
		return jinja.None(), raised("do_replace() misses arguments")
	}
	old, err := textOf(a["old"])
	if err != nil {
		return jinja.None(), err
	}
	with, err := textOf(a["new"])
	if err != nil {
		return jinja.None(), err
	}
	count := int64(-1)
	if a.given("count") {
		if count, err = a.integer("count", -1); err != nil {
			return jinja.None(), err
		}
	}
	return r.replace(s, old, with, count)
}

func filterFormat(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, err := textOf(args[0])
	if err != nil {
		return jinja.None(), err
	}
	if len(args) > 1 && len(kwargs) > 0 {
		return jinja.None(), raised("can't handle positional and keyword arguments at the same time")
	}
	if len(kwargs) > 0 {
		d := jinja.NewDict()
		for key, v := range kwargs {
			d.AsDict().Set(key, v)
		}
		if strings.Contains(strings.ReplaceAll(strings.ReplaceAll(s, "%%", ""), "%(", ""), "%") {
			return jinja.None(), unfollowed("a format that writes all its arguments")
		}
		return r.printf(s, d)
	}
	return r.printf(s, newTuple(args[1:]...))
}

func filterIndent(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	a, err := bind("indent", args, kwargs, "s", "width", "first", "blank")
	if err != nil {
		return jinja.None(), err
	}
	if !a["s"].IsString() {
		if a["s"].IsUndefined() {
			return jinja.None(), errUndefined()
		}
		return jinja.None(), raised("'%s' object cannot be indented", typeName(a["s"]))
	}
	pad := "    "
	if v, ok := a["width"]; ok {
		switch {
		case v.IsString():
			pad = v.AsString()
		case isWhole(v):
			if whole(v) > 10000 {
				return jinja.None(), unfollowed("such an indent")
			}
			pad = strings.Repeat(" ", int(max(whole(v), 0)))
		default:
			return jinja.None(), raised("can't multiply sequence by non-int of type '%s'", typeName(v))
		}
	}
	s := a["s"].AsString()
	lines := splitLines(s+"\n", false)
	if err := r.grow(len(s) + len(lines)*(len(pad)+1)); err != nil {
		return jinja.None(), err
	}
	var b strings.Builder
	if a.flag("first") {
		b.WriteString(pad)
	}
	for i, line := range lines {
		if i > 0 {
			b.WriteByte('\n')
			if line != "" || a.flag("blank") {
				b.WriteString(pad)
			}
		}
		b.WriteString(line)
	}
	return jinja.NewString(b.String()), nil
}

func filterTruncate(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	a, err := bind("truncate", args, kwargs, "s", "length", "killwords", "end", "leeway")
	if err != nil {
		return jinja.None(), err
	}
	if !a["s"].IsString() {
		return jinja.None(), unfollowed("truncate of something that is no string")
	}
	s := a["s"].AsString()
	length, err := a.integer("length", 255)
	if err != nil {
		return jinja.None(), err
	}
	end, err := a.text("end", "...")
	if err != nil {
		return jinja.None(), err
	}
	leeway := int64(5)
	if a.given("leeway") {
		if leeway, err = a.integer("leeway", 5); err != nil {
			return jinja.None(), err
		}
	}
	ends, _ := lengthOf(jinja.NewString(end))
	if length < int64(ends) || leeway < 0 {
		return jinja.None(), raised("expected length >= %d, got %d", ends, length)
	}
	if n, _ := lengthOf(a["s"]); int64(n) <= length+leeway {
		return a["s"], nil
	}
	cut, err := sliceText(s, 0, length-int64(ends), false)
	if err != nil {
		return jinja.None(), err
	}
	if !a.flag("killwords") {
		if at := strings.LastIndexByte(cut, ' '); at >= 0 {
			cut = cut[:at]
		}
	}
	return jinja.NewString(cut + end), nil
}

func filterWordcount(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, _, err := textFilter("wordcount", args, kwargs)
	if err != nil {
		return jinja.None(), err
	}
	if !isASCII(s) {
		return jinja.None(), unfollowed("wordcount of a string beyond ASCII")
	}
	return jinja.NewInt(int64(len(strings.FieldsFunc(s, func(c rune) bool {
		return c != '_' && !unicode.IsLetter(c) && !unicode.IsDigit(c)
	})))), nil
}

func filterLength(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) != 1 || len(kwargs) > 0 {
		return jinja.None(), raised("len() takes exactly one argument")
	}
	n, err := lengthOf(args[0])
	return jinja.NewInt(int64(n)), err
}

func filterAbs(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	v := args[0]
	switch {
	case len(args) != 1 || len(kwargs) > 0:
		return jinja.None(), raised("abs() takes exactly one argument")
	case isWhole(v):
		n := whole(v)
		if n == math.MinInt64 {
			return v, unfollowed("a number beyond 64 bits")
		}
		return jinja.NewInt(max(n, -n)), nil
	case v.IsFloat():
		return jinja.NewFloat(math.Abs(v.AsFloat())), nil
	case isHuge(v):
		return v, unfollowed("a number beyond 64 bits")
	}
	return v, raised("bad operand type for abs(): '%s'", typeName(v))
}

func filterDefault(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	a, err := bind("default", args, kwargs, "value", "default_value", "boolean")
	if err != nil {
		return jinja.None(), err
	}
	if a["value"].IsUndefined() || a.flag("boolean") && !a["value"].IsTruthy() {
		if v, ok := a["default_value"]; ok {
			return v, nil
		}
		return jinja.NewString(""), nil
	}
	return a["value"], nil
}

func filterInt(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	a, err := bind("int", args, kwargs, "value", "default", "base")
	if err != nil {
		return jinja.None(), err
	}
	missing, ok := a["default"]
	if !ok {
		missing = jinja.NewInt(0)
	}
	v := a["value"]
	f := 0.0
	switch {
	case v.IsUndefined():
		return v, errUndefined()
	case isWhole(v):
		return jinja.NewInt(whole(v)), nil
	case isHuge(v):
		return v, nil
	case v.IsFloat():
		f = v.AsFloat()
		if math.IsInf(f, 0) {
			return v, raised("cannot convert float infinity to integer")
		}
	case v.IsString():
		base, err := a.integer("base", 10)
		if err != nil {
			return v, err
		}
		if base != 10 {
			return v, unfollowed("int with a base")
		}
		s := strip(v.AsString(), "", true, true)
		if !isASCII(s) {
			if strings.IndexFunc(s, unicode.IsDigit) >= 0 {
				return v, unfollowed("int of unusual digits")
			}
			return missing, nil
		}
		digits := s
		if digits != "" && (digits[0] == '+' || digits[0] == '-') {
			digits = digits[1:]
		}
		if validDigits(digits) {
			n, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64)
			if err != nil {
				return v, unfollowed("a number beyond 64 bits")
			}
			return jinja.NewInt(n), nil
		}
		if f, ok = pythonFloat(s); !ok || math.IsInf(f, 0) {
			return missing, nil
		}
	default:
		return missing, nil
	}
	if math.IsNaN(f) {
		return missing, nil
	}
	if f >= 1<<62 || f <= -1<<62 {
		return v, unfollowed("a number beyond 64 bits")
	}
	return jinja.NewInt(int64(f)), nil
}

// validDigits reports whether s is digits with single underscores between
// them.
func validDigits(s string) bool {
	for i := range len(s) {
		if s[i] == '_' && i > 0 && i+1 < len(s) && s[i-1] != '_' {
			continue
		}
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

// pythonFloat is float(s) for a string without white space around it.
func pythonFloat(s string) (float64, bool) {
	unsigned := strings.TrimLeft(s, "+-")
	if len(s)-len(unsigned) > 1 {
		return 0, false
	}
	switch strings.ToLower(unsigned) {
	case "inf", "infinity", "nan":
		f, err := strconv.ParseFloat(s, 64)
		return f, err == nil
	}
	mantissa, exponent, scientific := strings.Cut(strings.ToLower(unsigned), "e")
	before, after, _ := strings.Cut(mantissa, ".")
	if before == "" && after == "" || before != "" && !validDigits(before) || after != "" && !validDigits(after) {
		return 0, false
	}
	if scientific {
		if exponent != "" && (exponent[0] == '+' || exponent[0] == '-') {
			exponent = exponent[1:]
		}
		if !validDigits(exponent) {
			return 0, false
		}
	}
	f, _ := strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), 64)
	return f, true
}

func filterFloat(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	a, err := bind("float", args, kwargs, "value", "default")
	if err != nil {
		return jinja.None(), err
	}
	missing, ok := a["default"]
	if !ok {
		missing = jinja.NewFloat(0)
	}
	v := a["value"]
	switch {
	case v.IsUndefined():
		return v, errUndefined()
	case isNumber(v):
		return jinja.NewFloat(float(v)), nil
	case isHuge(v):
		return v, unfollowed("a number beyond 64 bits")
	case v.IsString():
		s := strip(v.AsString(), "", true, true)
		if !isASCII(s) && strings.IndexFunc(s, unicode.IsDigit) >= 0 {
			return v, unfollowed("float of unusual digits")
		}
		if f, ok := pythonFloat(s); ok {
			return jinja.NewFloat(f), nil
		}
	}
	return missing, nil
}

func filterRound(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	a, err := bind("round", args, kwargs, "value", "precision", "method")
	if err != nil {
		return jinja.None(), err
	}
	v := a["value"]
	if v.IsUndefined() {
		return v, errUndefined()
	}
	method, err := a.text("method", "common")
	if err != nil {
		return v, err
	}
	precision, err := a.integer("precision", 0)
	switch {
	case err != nil:
		return v, err
	case method != "common" && method != "ceil" && method != "floor":
		return v, raised("method must be common, ceil or floor")
	case method != "common" || precision < 0 || precision > 300:
		return v, unfollowed("such a rounding")
	case isHuge(v):
		return v, unfollowed("a number beyond 64 bits")
	case !isNumber(v):
		return v, raised("type %s doesn't define __round__ method", typeName(v))
	case isWhole(v):
		return jinja.NewInt(whole(v)), nil
	}
	f := v.AsFloat()
	if math.IsInf(f, 0) || math.IsNaN(f) {
		return v, unfollowed("rounding a number that is not finite")
	}
	n, _ := strconv.ParseFloat(strconv.FormatFloat(f, 'f', int(precision), 64), 64)
	return jinja.NewFloat(n), nil
}

// iterable returns a filter's parameters, and what its input yields.
func (r *rendering) iterable(name string, args []jinja.Value, kwargs map[string]jinja.Value, parameters ...string) ([]jinja.Value, arguments, error) {
	a, err := bind(name, args, kwargs, append([]string{"value"}, parameters...)...)
	if err != nil {
		return nil, nil, err
	}
	items, err := itemsOf(a["value"])
	if err != nil {
		return nil, nil, err
	}
	return items, a, r.spend(len(items))
}

func filterList(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	items, _, err := r.iterable("list", args, kwargs)
	if err != nil {
		return jinja.None(), err
	}
	return newList(slices.Clone(items))
}

// newList returns a list that a template may keep. None holds undefined
// values: what loops over it relies on that.
func newList(items []jinja.Value) (jinja.Value, error) {
	if slices.ContainsFunc(items, jinja.Value.IsUndefined) {
		return jinja.None(), unfollowed("a list that holds undefined values")
	}
	return jinja.NewList(items), nil
}

func filterItems(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	switch {
	case len(args) != 1 || len(kwargs) > 0:
		return jinja.None(), raised("do_items() takes 1 argument")
	case args[0].IsUndefined():
		return jinja.NewList(nil), nil
	case !args[0].IsDict():
		return jinja.None(), raised("Can only get item pairs from a mapping.")
	}
	return jinja.NewList(pairs(args[0].AsDict())), r.spend(args[0].AsDict().Len())
}

func filterFirst(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) != 1 || len(kwargs) > 0 {
		return jinja.None(), raised("do_first() takes 1 argument")
	}
	if args[0].IsString() {
		s, err := sliceText(args[0].AsString(), 0, 1, false)
		if s == "" {
			return jinja.Undefined(), err
		}
		return jinja.NewString(s), err
	}
	items, err := itemsOf(args[0])
	if err != nil || len(items) == 0 {
		return jinja.Undefined(), err
	}
	return items[0], nil
}

func filterLast(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	v := args[0]
	switch {
	case len(args) != 1 || len(kwargs) > 0:
		return jinja.None(), raised("do_last() takes 1 argument")
	case v.IsString():
		s, err := sliceText(v.AsString(), -1, 0, true)
		if s == "" {
			return jinja.Undefined(), err
		}
		return jinja.NewString(s), err
	case v.IsUndefined():
		// Undefined has neither length nor items that reversed accepts.
		return v, unfollowed("the last of an undefined value")
	}
	items, err := itemsOf(v)
	if err != nil || len(items) == 0 {
		return jinja.Undefined(), err
	}
	return items[len(items)-1], nil
}

// filterReverse returns a string for a string, else an iterator.
func filterReverse(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) == 1 && args[0].IsString() {
		if err := r.grow(len(args[0].AsString())); err != nil {
			return jinja.None(), err
		}
		return slice(args[0], jinja.None(), jinja.None(), jinja.NewInt(-1))
	}
	items, _, err := r.iterable("reverse", args, kwargs)
	if err != nil {
		return jinja.None(), err
	}
	if args[0].IsUndefined() {
		return jinja.None(), unfollowed("the reverse of an undefined value")
	}
	items = slices.Clone(items)
	slices.Reverse(items)
	return jinja.NewList(items), nil
}

// path is an attribute as filters take it: a.b.0 or a number.
func (r *rendering) path(v jinja.Value, path jinja.Value, missing jinja.Value) (_ jinja.Value, err error) {
	switch {
	case path.IsNone():
		return v, nil
	case isWhole(path):
		if v, err = r.item(v, path); err == nil && v.IsUndefined() && !missing.IsNone() {
			v = missing
		}
		return v, err
	case !path.IsString():
		return v, unfollowed("an attribute that is no string")
	}
	for part := range strings.SplitSeq(path.AsString(), ".") {
		key := jinja.NewString(part)
		if n, err := strconv.ParseInt(part, 10, 64); err == nil && part[0] != '-' && part[0] != '+' {
			key = jinja.NewInt(n)
		} else if strings.HasPrefix(part, "__") || !isASCII(part) {
			return v, unfollowed("the attribute %q", part)
		}
		if v, err = r.item(v, key); err != nil {
			return v, err
		}
		if v.IsUndefined() && !missing.IsNone() {
			v = missing
		}
	}
	return v, nil
}

// keyOf is what sorting and comparing filters look at in an item.
func (r *rendering) keyOf(v jinja.Value, a arguments) (jinja.Value, error) {
	attribute, ok := a["attribute"]
	if !ok {
		attribute = jinja.None()
	}
	v, err := r.path(v, attribute, jinja.None())
	if err == nil && v.IsString() && !a.flag("case_sensitive") {
		var s string
		s, err = changeCase(v.AsString(), "lower")
		v = jinja.NewString(s)
	}
	return v, err
}

// sorted returns items in the order of their keys.
func sorted(items, keys []jinja.Value, reverse bool) (_ []jinja.Value, err error) {
	if len(items) == 0 {
		return nil, nil
	}
	at := make([]int, len(items))
	for i := range at {
		at[i] = i
	}
	slices.SortStableFunc(at, func(i, j int) int {
		if err != nil {
			return 0
		}
		n, ordered, failed := order("<", keys[i], keys[j], 0)
		if failed != nil {
			err = failed
		} else if !ordered {
			err = unfollowed("sorting numbers that are NaN")
		}
		if reverse {
			n = -n
		}
		return n
	})
	out := make([]jinja.Value, len(items))
	for i, from := range at {
		out[i] = items[from]
	}
	return out, err
}

func filterSort(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	items, a, err := r.iterable("sort", args, kwargs, "reverse", "case_sensitive", "attribute")
	if err != nil {
		return jinja.None(), err
	}
	if v := a["attribute"]; v.IsString() && strings.Contains(v.AsString(), ",") {
		return jinja.None(), unfollowed("sorting by several attributes")
	}
	keys := make([]jinja.Value, len(items))
	for i, item := range items {
		key, err := r.keyOf(item, a)
		if err != nil {
			return jinja.None(), err
		}
		// Jinja sorts by lists of keys, where equal ones need no order.
		keys[i] = jinja.NewList([]jinja.Value{key})
	}
	if items, err = sorted(items, keys, a.flag("reverse")); err != nil {
		return jinja.None(), err
	}
	return newList(items)
}

func filterDictsort(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	a, err := bind("dictsort", args, kwargs, "value", "case_sensitive", "by", "reverse")
	if err != nil {
		return jinja.None(), err
	}
	by, err := a.text("by", "key")
	if err != nil {
		return jinja.None(), err
	}
	if by != "key" && by != "value" {
		return jinja.None(), raised(`You can only sort by either "key" or "value"`)
	}
	if !a["value"].IsDict() {
		return jinja.None(), raised("'%s' object has no attribute 'items'", typeName(a["value"]))
	}
	items := pairs(a["value"].AsDict())
	if err := r.spend(len(items)); err != nil {
		return jinja.None(), err
	}
	keys := make([]jinja.Value, len(items))
	for i, item := range items {
		key := item.AsList().Items[0]
		if by == "value" {
			key = item.AsList().Items[1]
		}
		if keys[i], err = r.keyOf(key, arguments{"case_sensitive": a["case_sensitive"]}); err != nil {
			return jinja.None(), err
		}
	}
	if items, err = sorted(items, keys, a.flag("reverse")); err != nil {
		return jinja.None(), err
	}
	return jinja.NewList(items), nil
}

func filterUnique(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	items, a, err := r.iterable("unique", args, kwargs, "case_sensitive", "attribute")
	if err != nil {
		return jinja.None(), err
	}
	var out, keys []jinja.Value
	seen := map[string]bool{}
	if r.takeFirst() {
		items = items[:min(1, len(items))]
	}
items:
	for _, item := range items {
		key, err := r.keyOf(item, a)
		if err != nil {
			return jinja.None(), err
		}
		switch {
		case key.IsDict(), key.IsList() && !isTuple(key.AsList()):
			return jinja.None(), raised("unhashable type: '%s'", typeName(key))
		case key.IsList():
			return jinja.None(), unfollowed("unique of tuples")
		case key.IsString():
			if seen[key.AsString()] {
				continue
			}
			seen[key.AsString()] = true
		default:
			if err := r.spend(len(keys)); err != nil {
				return jinja.None(), err
			}
			for _, k := range keys {
				same, err := equal(k, key)
				if err != nil {
					return jinja.None(), err
				}
				if same {
					continue items
				}
			}
			keys = append(keys, key)
		}
		out = append(out, item)
	}
	return jinja.NewList(out), nil
}

func extremum(sign int) filter {
	return func(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
		items, a, err := r.iterable("min or max", args, kwargs, "case_sensitive", "attribute")
		if err != nil || len(items) == 0 {
			return jinja.Undefined(), err
		}
		best := items[0]
		bestKey, err := r.keyOf(best, a)
		if err != nil {
			return best, err
		}
		for _, item := range items[1:] {
			key, err := r.keyOf(item, a)
			if err != nil {
				return item, err
			}
			op := "<"
			if sign > 0 {
				op = ">"
			}
			n, _, err := order(op, key, bestKey, 0)
			if err != nil {
				return item, err
			}
			if n*sign > 0 {
				best, bestKey = item, key
			}
		}
		return best, nil
	}
}

func filterSum(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	items, a, err := r.iterable("sum", args, kwargs, "attribute", "start")
	if err != nil {
		return jinja.None(), err
	}
	total, ok := a["start"]
	if !ok {
		total = jinja.NewInt(0)
	}
	if total.IsString() {
		return total, raised("sum() can't sum strings [use ''.join(seq) instead]")
	}
	attribute, ok := a["attribute"]
	if !ok {
		attribute = jinja.None()
	}
	floats := false
	for _, item := range items {
		if item, err = r.path(item, attribute, jinja.None()); err != nil {
			return item, err
		}
		if item.IsFloat() {
			if floats { // newer versions of Python compensate the rounding
				return item, unfollowed("a sum of numbers with fractions")
			}
			floats = true
		}
		if total, err = add(total, item); err != nil {
			return total, err
		}
		if total.IsList() {
			if err := r.spend(total.AsList().Len()); err != nil {
				return total, err
			}
		}
	}
	return total, nil
}

func filterBatch(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	r.takeFirst()
	items, a, err := r.iterable("batch", args, kwargs, "linecount", "fill_with")
	if err != nil {
		return jinja.None(), err
	}
	if v, ok := a["linecount"]; !ok || !isWhole(v) || whole(v) <= 0 || whole(v) > maxRepeat {
		return jinja.None(), unfollowed("such a batch")
	}
	n := int(whole(a["linecount"]))
	var out []jinja.Value
	for len(items) > 0 {
		batch := slices.Clone(items[:min(n, len(items))])
		items = items[len(batch):]
		for a.given("fill_with") && len(batch) < n {
			if err := r.spend(1); err != nil {
				return jinja.None(), err
			}
			batch = append(batch, a["fill_with"])
		}
		list, err := newList(batch)
		if err != nil {
			return jinja.None(), err
		}
		out = append(out, list)
	}
	return jinja.NewList(out), nil
}

func filterSlice(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	r.takeFirst()
	items, a, err := r.iterable("slice", args, kwargs, "slices", "fill_with")
	if err != nil {
		return jinja.None(), err
	}
	if v, ok := a["slices"]; !ok || !isWhole(v) || whole(v) <= 0 || whole(v) > 1000 {
		return jinja.None(), unfollowed("such a slice")
	}
	slices_ := int(whole(a["slices"]))
	each, extra := len(items)/slices_, len(items)%slices_
	var out []jinja.Value
	for i := range slices_ {
		n := each
		if i < extra {
			n++
		}
		part := slices.Clone(items[:n])
		items = items[n:]
		if a.given("fill_with") && i >= extra {
			part = append(part, a["fill_with"])
		}
		list, err := newList(part)
		if err != nil {
			return jinja.None(), err
		}
		out = append(out, list)
	}
	return jinja.NewList(out), nil
}

func filterGroupby(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	items, a, err := r.iterable("groupby", args, kwargs, "attribute", "default", "case_sensitive")
	if err != nil {
		return jinja.None(), err
	}
	attribute, ok := a["attribute"]
	missing, hasMissing := a["default"]
	if !ok || attribute.IsNone() {
		return jinja.None(), unfollowed("groupby without an attribute")
	}
	if !hasMissing {
		missing = jinja.None()
	}
	real := make([]jinja.Value, len(items))
	keys := make([]jinja.Value, len(items))
	for i, item := range items {
		if real[i], err = r.path(item, attribute, missing); err != nil {
			return jinja.None(), err
		}
		if real[i].IsUndefined() {
			if len(items) > 1 {
				return jinja.None(), errUndefined()
			}
			return jinja.None(), unfollowed("groupby of an undefined value")
		}
		if keys[i], err = r.keyOf(real[i], arguments{"case_sensitive": a["case_sensitive"]}); err != nil {
			return jinja.None(), err
		}
	}
	at := make([]jinja.Value, len(items))
	for i := range at {
		at[i] = jinja.NewInt(int64(i))
	}
	if at, err = sorted(at, keys, false); err != nil {
		return jinja.None(), err
	}
	var out []jinja.Value
	for i := 0; i < len(at); {
		first := whole(at[i])
		var group []jinja.Value
		for ; i < len(at); i++ {
			same, err := equal(keys[whole(at[i])], keys[first])
			if err != nil {
				return jinja.None(), err
			}
			if !same {
				break
			}
			group = append(group, items[whole(at[i])])
		}
		list, err := newList(group)
		if err != nil {
			return jinja.None(), err
		}
		out = append(out, newTuple(real[first], list))
	}
	return jinja.NewList(out), nil
}

func filterJoin(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	items, a, err := r.iterable("join", args, kwargs, "d", "attribute")
	if err != nil {
		return jinja.None(), err
	}
	separator := ""
	if v, ok := a["d"]; ok {
		if separator, err = textOf(v); err != nil {
			return jinja.None(), err
		}
	}
	attribute, ok := a["attribute"]
	if !ok {
		attribute = jinja.None()
	}
	var b []byte
	for i, item := range items {
		if i > 0 {
			b = append(b, separator...)
		}
		before := len(b)
		if item, err = r.path(item, attribute, jinja.None()); err == nil {
			b, err = appendText(b, item)
		}
		if err == nil {
			err = r.grow(len(b) - before + len(separator))
		}
		if err != nil {
			return jinja.None(), err
		}
	}
	return jinja.NewString(string(b)), nil
}

func filterMap(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	first := r.takeFirst()
	if !args[0].IsTruthy() {
		return jinja.NewList(nil), nil
	}
	items, err := itemsOf(args[0])
	if err != nil {
		return jinja.None(), err
	}
	if err := r.spend(len(items)); err != nil {
		return jinja.None(), err
	}
	out := make([]jinja.Value, len(items))
	if _, ok := kwargs["attribute"]; ok && len(args) == 1 {
		a, err := bind("map", nil, kwargs, "attribute", "default")
		if err != nil {
			return jinja.None(), err
		}
		missing, ok := a["default"]
		if !ok {
			missing = jinja.None()
		}
		for i, item := range items {
			if out[i], err = r.path(item, a["attribute"], missing); err != nil {
				return jinja.None(), err
			}
			if first {
				return jinja.NewList(out[:1]), nil
			}
		}
		return jinja.NewList(out), nil
	}
	if len(args) < 2 {
		return jinja.None(), raised("map requires a filter argument")
	}
	if !args[1].IsString() {
		return jinja.None(), raised("no filter named %s", typeName(args[1]))
	}
	name := args[1].AsString()
	f, ok := filters[name]
	if !ok {
		if otherFilters[name] {
			return jinja.None(), unfollowed("the filter %s", name)
		}
		return jinja.None(), raised("No filter named %q.", name)
	}
	if f.result == iteratorResult {
		return jinja.None(), unfollowed("map of the filter %s", name)
	}
	for i, item := range items {
		if out[i], err = f.apply(r, append([]jinja.Value{item}, args[2:]...), kwargs); err != nil {
			return jinja.None(), err
		}
		if first {
			return jinja.NewList(out[:1]), nil
		}
	}
	return jinja.NewList(out), nil
}

// picker is for select, reject, selectattr and rejectattr.
func picker(byAttribute, want bool) filter {
	return func(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
		first := r.takeFirst()
		if !args[0].IsTruthy() {
			return jinja.NewList(nil), nil
		}
		items, err := itemsOf(args[0])
		if err != nil {
			return jinja.None(), err
		}
		if err := r.spend(len(items)); err != nil {
			return jinja.None(), err
		}
		attribute := jinja.None()
		rest := args[1:]
		if byAttribute {
			if len(rest) == 0 {
				return jinja.None(), raised("Missing parameter for attribute name")
			}
			attribute, rest = rest[0], rest[1:]
		}
		if len(kwargs) > 0 {
			return jinja.None(), unfollowed("a test with keyword arguments")
		}
		if len(rest) > 0 && !rest[0].IsString() {
			return jinja.None(), raised("no test named %s", typeName(rest[0]))
		}
		var out []jinja.Value
		for _, item := range items {
			v, err := r.path(item, attribute, jinja.None())
			if err != nil {
				return v, err
			}
			passed := v.IsTruthy()
			if len(rest) > 0 {
				if passed, err = r.test(rest[0].AsString(), v, rest[1:]); err != nil {
					return v, err
				}
			}
			if passed == want {
				out = append(out, item)
				if first {
					break
				}
			}
		}
		return jinja.NewList(out), nil
	}
}
