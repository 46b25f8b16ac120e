package template

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"reflect"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// ErrUnfollowed marks that a template did something that is not followed
// exactly, or too much. What the engine makes of it is unknown.
var ErrUnfollowed = errors.New("is not followed")

// ErrLong is RenderBriefly's: Render may give an answer.
var ErrLong = errors.New("rendering takes longer than it may")

func unfollowed(format string, args ...any) error {
	return fmt.Errorf("%s %w", fmt.Sprintf(format, args...), ErrUnfollowed)
}

// raised returns an error as Python raises it.
func raised(format string, args ...any) error {
	return fmt.Errorf(format, args...)
}

// maxDepth is how deep values may contain each other where they are written
// or compared. Python gives up at about twice that.
const maxDepth = 400

// A whole number that does not fit an int64 is a callable of this name: the
// library has no kind for it. Calling it returns its digits.
const hugeName = "int"

// hugeInt returns a value for digits, a whole number as JSON spells it.
func hugeInt(digits string) jinja.Value {
	text := jinja.NewString(digits)
	return jinja.NewCallable(hugeName, func([]jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
		return text, nil
	})
}

// Number returns the value of a number as JSON spells it: what Python's
// json.loads makes of it.
func Number(text string) jinja.Value {
	if !strings.ContainsAny(text, ".eE") {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			return jinja.NewInt(n)
		}
		if n, ok := new(big.Int).SetString(text, 10); ok {
			return hugeInt(n.String())
		}
	}
	f, _ := strconv.ParseFloat(text, 64)
	return jinja.NewFloat(f)
}

// Digits are those of a whole number that does not fit an int64, as Number has
// made it.
func Digits(v jinja.Value) (digits string, ok bool) { return hugeDigits(v) }

func hugeDigits(v jinja.Value) (string, bool) {
	if !v.IsCallable() {
		return "", false
	}
	c := v.AsCallable()
	if c.Name != hugeName {
		return "", false
	}
	digits, _ := c.Fn(nil, nil)
	return digits.AsString(), true
}

// aTuple is a tuple of the library's, which has no constructor for them.
var aTuple = func() *jinja.List {
	var list *jinja.List
	t, err := jinja.Compile("{{ take((1,)) }}")
	if err == nil {
		_, err = t.RenderValues(map[string]jinja.Value{
			"take": jinja.NewCallable("take", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
				list = args[0].AsList()
				return jinja.None(), nil
			}),
		})
	}
	if err != nil || list == nil || !isTuple(list) {
		panic(fmt.Sprintf("BUG: the template library makes no tuples: %v", err))
	}
	return list
}()

func newTuple(items ...jinja.Value) jinja.Value {
	v := jinja.NewList(nil)
	l := v.AsList()
	*l = *aTuple
	l.Items = items
	return v
}

func isTuple(l *jinja.List) bool {
	return reflect.ValueOf(l).Elem().FieldByName("tuple").Bool()
}

// sequenceLike returns items as a value of l's type.
func sequenceLike(l *jinja.List, items []jinja.Value) jinja.Value {
	if isTuple(l) {
		return newTuple(items...)
	}
	return jinja.NewList(items)
}

// typeName is Python's name of v's type.
func typeName(v jinja.Value) string {
	switch {
	case v.IsUndefined():
		return "Undefined"
	case v.IsNone():
		return "NoneType"
	case v.IsBool():
		return "bool"
	case v.IsInt():
		return "int"
	case v.IsFloat():
		return "float"
	case v.IsString():
		return "str"
	case v.IsDict():
		return "dict"
	case v.IsList():
		if isTuple(v.AsList()) {
			return "tuple"
		}
		return "list"
	}
	if _, ok := hugeDigits(v); ok {
		return "int"
	}
	return "builtin_function_or_method"
}

func errUndefined() error { return raised("a value is undefined") }

// appendText appends str(v).
func appendText(b []byte, v jinja.Value) ([]byte, error) {
	switch {
	case v.IsString():
		return append(b, v.AsString()...), nil
	case v.IsUndefined():
		return b, nil
	}
	return appendRepr(b, v, 0)
}

func textOf(v jinja.Value) (string, error) {
	if v.IsString() {
		return v.AsString(), nil
	}
	b, err := appendText(nil, v)
	return string(b), err
}

// appendRepr appends repr(v).
func appendRepr(b []byte, v jinja.Value, depth int) (_ []byte, err error) {
	if depth > maxDepth || len(b) > maxOutput/2 {
		return b, unfollowed("a value that deep or large")
	}
	switch {
	case v.IsUndefined():
		return append(b, "Undefined"...), nil
	case v.IsNone():
		return append(b, "None"...), nil
	case v.IsBool():
		if v.AsBool() {
			return append(b, "True"...), nil
		}
		return append(b, "False"...), nil
	case v.IsInt():
		return strconv.AppendInt(b, v.AsInt(), 10), nil
	case v.IsFloat():
		return appendFloat(b, v.AsFloat()), nil
	case v.IsString():
		return appendQuoted(b, v.AsString()), nil
	case v.IsList():
		l := v.AsList()
		open, end := byte('['), "]"
		if isTuple(l) {
			open, end = '(', ")"
			if len(l.Items) == 1 {
				end = ",)"
			}
		}
		b = append(b, open)
		for i, item := range l.Items {
			if i > 0 {
				b = append(b, ", "...)
			}
			if b, err = appendRepr(b, item, depth+1); err != nil {
				return b, err
			}
		}
		return append(b, end...), nil
	case v.IsDict():
		d := v.AsDict()
		b = append(b, '{')
		for i, key := range d.Keys {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(appendQuoted(b, key), ": "...)
			if b, err = appendRepr(b, d.Data[key], depth+1); err != nil {
				return b, err
			}
		}
		return append(b, '}'), nil
	}
	if digits, ok := hugeDigits(v); ok {
		return append(b, digits...), nil
	}
	return b, unfollowed("printing a method")
}

// appendFloat appends repr(f).
func appendFloat(b []byte, f float64) []byte {
	switch {
	case math.IsNaN(f):
		return append(b, "nan"...)
	case math.IsInf(f, 1):
		return append(b, "inf"...)
	case math.IsInf(f, -1):
		return append(b, "-inf"...)
	}
	format := byte('f')
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		format = 'e'
	}
	start := len(b)
	b = strconv.AppendFloat(b, f, format, -1, 64)
	for _, c := range b[start:] {
		if c == '.' || c == 'e' {
			return b
		}
	}
	return append(b, ".0"...)
}

// appendQuoted appends repr(s).
func appendQuoted(b []byte, s string) []byte {
	quote := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	b = append(b, quote)
	for _, r := range s {
		switch {
		case r == rune(quote) || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case unicode.IsPrint(r):
			b = utf8.AppendRune(b, r)
		case r < 0x100:
			b = fmt.Appendf(b, `\x%02x`, r)
		case r < 0x10000:
			b = fmt.Appendf(b, `\u%04x`, r)
		default:
			b = fmt.Appendf(b, `\U%08x`, r)
		}
	}
	return append(b, quote)
}

// isNumber reports whether v is an int, a bool or a float that arithmetic here
// covers.
func isNumber(v jinja.Value) bool { return v.IsInt() || v.IsFloat() || v.IsBool() }

func isWhole(v jinja.Value) bool { return v.IsInt() || v.IsBool() }

func whole(v jinja.Value) int64 {
	if v.IsBool() {
		if v.AsBool() {
			return 1
		}
		return 0
	}
	return v.AsInt()
}

func float(v jinja.Value) float64 {
	if v.IsFloat() {
		return v.AsFloat()
	}
	return float64(whole(v))
}

func isHuge(v jinja.Value) bool {
	_, ok := hugeDigits(v)
	return ok
}

func errOperand(op string, a, b jinja.Value) error {
	switch {
	case a.IsUndefined(), b.IsUndefined():
		return errUndefined()
	case isHuge(a), isHuge(b):
		return unfollowed("arithmetic with a number beyond 64 bits")
	}
	return raised("unsupported operand type(s) for %s: '%s' and '%s'", op, typeName(a), typeName(b))
}

// arithmetic returns a op b for the operators - * / // % **, but for strings
// on the left of %.
func arithmetic(op string, a, b jinja.Value) (jinja.Value, error) {
	if op == "*" && (a.IsString() || a.IsList()) && isWhole(b) {
		return repeat(a, whole(b))
	}
	if op == "*" && (b.IsString() || b.IsList()) && isWhole(a) {
		return repeat(b, whole(a))
	}
	if !isNumber(a) || !isNumber(b) {
		return jinja.None(), errOperand(op, a, b)
	}
	if a.IsFloat() || b.IsFloat() {
		return floatArithmetic(op, float(a), float(b))
	}
	x, y := whole(a), whole(b)
	if y == 0 && (op == "/" || op == "//" || op == "%") {
		return jinja.None(), raised("division by zero")
	}
	var n *big.Int
	switch op {
	case "-":
		n = new(big.Int).Sub(big.NewInt(x), big.NewInt(y))
	case "*":
		n = new(big.Int).Mul(big.NewInt(x), big.NewInt(y))
	case "/":
		const exact = 1 << 53
		if x > exact || x < -exact || y > exact || y < -exact {
			return jinja.None(), unfollowed("a division of numbers beyond 53 bits")
		}
		return jinja.NewFloat(float64(x) / float64(y)), nil
	case "//", "%":
		quotient, rest := new(big.Int).DivMod(big.NewInt(x), big.NewInt(y), new(big.Int))
		if y < 0 && rest.Sign() != 0 { // DivMod's rest is never negative, Python's has y's sign
			quotient.Sub(quotient, big.NewInt(1))
			rest.Add(rest, big.NewInt(y))
		}
		n = quotient
		if op == "%" {
			n = rest
		}
	case "**":
		if y < 0 {
			if x == 0 {
				return jinja.None(), raised("0.0 cannot be raised to a negative power")
			}
			return jinja.None(), unfollowed("a negative power")
		}
		if y > 64 && x != 0 && x != 1 && x != -1 {
			return jinja.None(), unfollowed("a number beyond 64 bits")
		}
		if y > 64 {
			y = 64 + y%2
		}
		n = new(big.Int).Exp(big.NewInt(x), big.NewInt(y), nil)
	}
	if !n.IsInt64() {
		return jinja.None(), unfollowed("a number beyond 64 bits")
	}
	return jinja.NewInt(n.Int64()), nil
}

func floatArithmetic(op string, x, y float64) (jinja.Value, error) {
	if y == 0 && (op == "/" || op == "//" || op == "%") {
		return jinja.None(), raised("float division by zero")
	}
	switch op {
	case "-":
		return jinja.NewFloat(x - y), nil
	case "*":
		return jinja.NewFloat(x * y), nil
	case "/":
		return jinja.NewFloat(x / y), nil
	case "//", "%":
		rest := math.Mod(x, y)
		quotient := (x - rest) / y
		if rest != 0 {
			if (y < 0) != (rest < 0) {
				rest += y
				quotient--
			}
		} else {
			rest = math.Copysign(0, y)
		}
		if op == "%" {
			return jinja.NewFloat(rest), nil
		}
		if quotient == 0 {
			return jinja.NewFloat(math.Copysign(0, x/y)), nil
		}
		floor := math.Floor(quotient)
		if quotient-floor > 0.5 {
			floor++
		}
		return jinja.NewFloat(floor), nil
	}
	return jinja.None(), unfollowed("a power of a number with a fraction")
}

// maxRepeat bounds what one expression may repeat: bytes, or items.
const maxRepeat = 1 << 24

func repeat(v jinja.Value, n int64) (jinja.Value, error) {
	length := 0
	if v.IsString() {
		length = len(v.AsString())
	} else {
		length = len(v.AsList().Items)
	}
	n = max(n, 0)
	if length > 0 && n > int64(maxRepeat/length) {
		return v, unfollowed("a repetition beyond %d", maxRepeat)
	}
	if v.IsString() {
		if length == 0 {
			n = 0
		}
		return jinja.NewString(strings.Repeat(v.AsString(), int(n))), nil
	}
	items := make([]jinja.Value, 0, length*int(n))
	for range n {
		if length == 0 {
			break
		}
		items = append(items, v.AsList().Items...)
	}
	return sequenceLike(v.AsList(), items), nil
}

// add returns a + b.
func add(a, b jinja.Value) (jinja.Value, error) {
	switch {
	case a.IsString() && b.IsString():
		return jinja.NewString(a.AsString() + b.AsString()), nil
	case isWhole(a) && isWhole(b):
		x, y := whole(a), whole(b)
		if sum := x + y; (sum > x) == (y > 0) {
			return jinja.NewInt(sum), nil
		}
		return a, unfollowed("a number beyond 64 bits")
	case isNumber(a) && isNumber(b):
		return jinja.NewFloat(float(a) + float(b)), nil
	case a.IsList() && b.IsList() && isTuple(a.AsList()) == isTuple(b.AsList()):
		x, y := a.AsList().Items, b.AsList().Items
		items := make([]jinja.Value, 0, len(x)+len(y))
		return sequenceLike(a.AsList(), append(append(items, x...), y...)), nil
	}
	return a, errOperand("+", a, b)
}

// equal returns a == b. The library's comparison is Python's, but for numbers
// that it has no kind for, and has no bounds.
func equal(a, b jinja.Value) (bool, error) {
	left := maxSteps / 8
	return equalWithin(a, b, &left, 0)
}

// equalWithin takes what it compares from left.
func equalWithin(a, b jinja.Value, left *int, depth int) (bool, error) {
	if *left--; *left < 0 || depth > maxDepth {
		return false, unfollowed("a comparison of values that deep or large")
	}
	if a.IsCallable() || b.IsCallable() {
		if isHuge(a) && isHuge(b) {
			x, _ := hugeDigits(a)
			y, _ := hugeDigits(b)
			return x == y, nil
		}
		if a.IsCallable() && b.IsCallable() || isHuge(a) && b.IsFloat() || a.IsFloat() && isHuge(b) {
			return false, unfollowed("a comparison of methods")
		}
		return false, nil
	}
	switch {
	case a.IsList() && b.IsList():
		x, y := a.AsList(), b.AsList()
		if x == y || len(x.Items) != len(y.Items) || isTuple(x) != isTuple(y) {
			return x == y, nil
		}
		for i := range x.Items {
			if same, err := equalWithin(x.Items[i], y.Items[i], left, depth+1); !same || err != nil {
				return same, err
			}
		}
		return true, nil
	case a.IsDict() && b.IsDict():
		x, y := a.AsDict(), b.AsDict()
		if x == y || len(x.Keys) != len(y.Keys) {
			return x == y, nil
		}
		for _, key := range x.Keys {
			other, ok := y.Get(key)
			if !ok {
				return false, nil
			}
			if same, err := equalWithin(x.Data[key], other, left, depth+1); !same || err != nil {
				return same, err
			}
		}
		return true, nil
	}
	return a.Equals(b), nil
}

// order returns how a compares to b: negative, 0 or positive, or unordered for
// NaN. It fails where Python has no order.
func order(op string, a, b jinja.Value, depth int) (int, bool, error) {
	if depth > maxDepth {
		return 0, false, unfollowed("a value nested deeper than %d", maxDepth)
	}
	switch {
	case a.IsString() && b.IsString():
		return strings.Compare(a.AsString(), b.AsString()), true, nil
	case isWhole(a) && isWhole(b):
		x, y := whole(a), whole(b)
		switch {
		case x < y:
			return -1, true, nil
		case x > y:
			return 1, true, nil
		}
		return 0, true, nil
	case isNumber(a) && isNumber(b):
		x, y := bigFloat(a), bigFloat(b)
		if x == nil || y == nil {
			return 0, false, nil
		}
		return x.Cmp(y), true, nil
	case a.IsList() && b.IsList() && isTuple(a.AsList()) == isTuple(b.AsList()):
		x, y := a.AsList().Items, b.AsList().Items
		for i := range min(len(x), len(y)) {
			same, err := equal(x[i], y[i])
			if err != nil {
				return 0, false, err
			}
			if !same {
				return order(op, x[i], y[i], depth+1)
			}
		}
		return len(x) - len(y), true, nil
	case a.IsUndefined(), b.IsUndefined():
		return 0, false, errUndefined()
	case isHuge(a), isHuge(b):
		return 0, false, unfollowed("a comparison with a number beyond 64 bits")
	}
	return 0, false, raised("'%s' not supported between instances of '%s' and '%s'", op, typeName(a), typeName(b))
}

// bigFloat returns a number exactly, nil for NaN.
func bigFloat(v jinja.Value) *big.Float {
	if v.IsFloat() {
		if math.IsNaN(v.AsFloat()) {
			return nil
		}
		return new(big.Float).SetFloat64(v.AsFloat())
	}
	return new(big.Float).SetInt64(whole(v))
}

// compare returns a op b for the operators < <= > >= == != in and not in.
func compare(op string, a, b jinja.Value) (bool, error) {
	switch op {
	case "==", "!=":
		same, err := equal(a, b)
		return same == (op == "=="), err
	case "in", "not in":
		found, err := contains(b, a)
		return found == (op == "in"), err
	}
	n, ordered, err := order(op, a, b, 0)
	if err != nil || !ordered {
		return false, err
	}
	switch op {
	case "<":
		return n < 0, nil
	case "<=":
		return n <= 0, nil
	case ">":
		return n > 0, nil
	default:
		return n >= 0, nil
	}
}

// contains returns item in container.
func contains(container, item jinja.Value) (bool, error) {
	switch {
	case container.IsString():
		if !item.IsString() {
			return false, raised("'in <string>' requires string as left operand, not %s", typeName(item))
		}
		return strings.Contains(container.AsString(), item.AsString()), nil
	case container.IsDict():
		switch {
		case item.IsString():
			return container.AsDict().Has(item.AsString()), nil
		case item.IsDict(), item.IsList() && !isTuple(item.AsList()):
			return false, raised("unhashable type: '%s'", typeName(item))
		}
		return false, nil
	case container.IsList():
		for _, v := range container.AsList().Items {
			same, err := equal(v, item)
			if same || err != nil {
				return same, err
			}
		}
		return false, nil
	case container.IsUndefined():
		return false, nil
	}
	return false, raised("argument of type '%s' is not iterable", typeName(container))
}

// itemsOf returns what iterating over v yields.
func itemsOf(v jinja.Value) ([]jinja.Value, error) {
	switch {
	case v.IsList():
		return v.AsList().Items, nil
	case v.IsDict():
		keys := v.AsDict().Keys
		items := make([]jinja.Value, len(keys))
		for i, key := range keys {
			items[i] = jinja.NewString(key)
		}
		return items, nil
	case v.IsString():
		s := v.AsString()
		items := make([]jinja.Value, 0, len(s))
		for i := 0; i < len(s); {
			_, size := utf8.DecodeRuneInString(s[i:])
			items = append(items, jinja.NewString(s[i:i+size]))
			i += size
		}
		return items, nil
	case v.IsUndefined():
		return nil, nil
	}
	return nil, raised("'%s' object is not iterable", typeName(v))
}

// lengthOf returns len(v).
func lengthOf(v jinja.Value) (int, error) {
	switch {
	case v.IsList():
		return v.AsList().Len(), nil
	case v.IsDict():
		return v.AsDict().Len(), nil
	case v.IsString():
		return utf8.RuneCountInString(v.AsString()), nil
	case v.IsUndefined():
		return 0, nil
	}
	return 0, raised("object of type '%s' has no len()", typeName(v))
}

// attribute returns v.name as the sandbox gives it out: first the attributes of
// v's type, then what v holds under the name.
func (r *rendering) attribute(v jinja.Value, name string) (jinja.Value, error) {
	if v.IsUndefined() {
		return v, errUndefined()
	}
	if value, ok, err := r.method(v, name); ok || err != nil {
		return value, err
	}
	if v.IsDict() {
		if value, ok := v.AsDict().Get(name); ok {
			return value, nil
		}
	}
	return jinja.Undefined(), nil
}

// item returns v[key] as the sandbox gives it out: first what v holds, then the
// attributes of v's type.
func (r *rendering) item(v, key jinja.Value) (jinja.Value, error) {
	switch {
	case v.IsUndefined():
		return v, errUndefined()
	case v.IsDict():
		if key.IsString() {
			if value, ok := v.AsDict().Get(key.AsString()); ok {
				return value, nil
			}
		}
	case (v.IsList() || v.IsString()) && isWhole(key):
		i := whole(key)
		if v.IsList() {
			items := v.AsList().Items
			if i < 0 {
				i += int64(len(items))
			}
			if i >= 0 && i < int64(len(items)) {
				return items[i], nil
			}
			return jinja.Undefined(), nil
		}
		s, err := sliceText(v.AsString(), i, i+1, i == -1)
		if err != nil || s == "" {
			return jinja.Undefined(), err
		}
		return jinja.NewString(s), nil
	}
	if key.IsString() {
		value, _, err := r.method(v, key.AsString())
		return value, err
	}
	return jinja.Undefined(), nil
}

// sliceText returns s[from:to] in characters, where negative numbers count from
// the end. toEnd is for the last character, whose to would be 0.
func sliceText(s string, from, to int64, toEnd bool) (string, error) {
	n := int64(-1)
	if from < 0 || to < 0 || toEnd {
		n = int64(utf8.RuneCountInString(s))
		if from < 0 {
			from += n
		}
		if to < 0 {
			to += n
		}
		if toEnd {
			to = n
		}
		if from < 0 {
			if to == from+1 { // one character that is not there
				return "", nil
			}
			from = 0
		}
	}
	if to <= from {
		return "", nil
	}
	start, end, at := len(s), len(s), int64(0)
	for i := range s {
		if at == from {
			start = i
		}
		if at == to {
			end = i
			break
		}
		at++
	}
	if start > end {
		return "", nil
	}
	return s[start:end], nil
}

// slice returns v[start:stop:step], where None stands for what is left out.
func slice(v, start, stop, step jinja.Value) (jinja.Value, error) {
	if v.IsUndefined() {
		return v, errUndefined()
	}
	if !v.IsList() && !v.IsString() {
		return v, raised("'%s' object is not subscriptable by a slice", typeName(v))
	}
	for _, bound := range []jinja.Value{start, stop, step} {
		if isHuge(bound) {
			return v, unfollowed("a slice with a number beyond 64 bits")
		}
		if !bound.IsNone() && !isWhole(bound) {
			return v, raised("slice indices must be integers or None or have an __index__ method")
		}
	}
	by := int64(1)
	if !step.IsNone() {
		by = whole(step)
	}
	if by == 0 {
		return v, raised("slice step cannot be zero")
	}
	var runes []rune
	length := int64(0)
	s := ""
	ascii := false
	if v.IsString() {
		s = v.AsString()
		if ascii = isASCII(s); ascii {
			length = int64(len(s))
		} else {
			runes = []rune(s)
			length = int64(len(runes))
		}
	} else {
		length = int64(v.AsList().Len())
	}
	low, high := int64(0), length
	if by < 0 {
		low, high = -1, length-1
	}
	by = min(max(by, -length-1), length+1)
	bound := func(b jinja.Value, missing int64) int64 {
		if b.IsNone() {
			return missing
		}
		n := whole(b)
		if n < 0 {
			n = max(n, -length-1) + length
		}
		return min(max(n, low), high)
	}
	from, to := bound(start, low), bound(stop, high)
	if by < 0 {
		from, to = bound(start, high), bound(stop, low)
	}
	count := int64(0)
	switch {
	case by > 0 && to > from:
		count = (to-from-1)/by + 1
	case by < 0 && from > to:
		count = (from-to-1)/-by + 1
	}
	switch {
	case v.IsString() && ascii && by == 1:
		return jinja.NewString(s[min(from, to):to]), nil
	case v.IsString() && ascii:
		b := make([]byte, 0, count)
		for i := int64(0); i < count; i++ {
			b = append(b, s[from+i*by])
		}
		return jinja.NewString(string(b)), nil
	case v.IsString():
		picked := make([]rune, 0, count)
		for i := int64(0); i < count; i++ {
			picked = append(picked, runes[from+i*by])
		}
		return jinja.NewString(string(picked)), nil
	}
	items := v.AsList().Items
	picked := make([]jinja.Value, 0, count)
	for i := int64(0); i < count; i++ {
		picked = append(picked, items[from+i*by])
	}
	return sequenceLike(v.AsList(), picked), nil
}

func isASCII(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}
