package template

import (
	"fmt"
	"strings"

	"github.com/ardanlabs/jinja"
)

// opWith renders the body of a call block with the arguments: a scope of its
// own for what is in it.
func opWith(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	v, err := kwargs["caller"].AsCallable().Fn(args, nil)
	if err != nil {
		return v, err
	}
	return v, r.grow(len(v.AsString()))
}

// opEnter and opLeave count macros within each other.
func opEnter(r *rendering, _ []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if r.calls++; r.calls > maxCalls {
		return jinja.None(), unfollowed("a recursion deeper than %d", maxCalls)
	}
	return jinja.Undefined(), r.spend(4)
}

func opLeave(r *rendering, _ []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	r.calls--
	return jinja.Undefined(), nil
}

// opDown and opUp count recursive loops within each other.
func opDown(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	_, err := opEnter(r, nil, nil)
	return args[0], err
}

func opUp(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	r.calls--
	return args[0], r.grow(len(args[0].AsString()))
}

// opIterate returns the list that a loop goes through, and counts its
// iterations. pairs is how many variables the loop unpacks an item to, 0 when
// it does not.
func opIterate(pairs int) operation {
	return func(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		items, err := r.loopOver(args[0])
		switch {
		case err != nil:
			return args[0], err
		case pairs == 0 && args[0].IsList():
			return args[0], nil
		case pairs == 0:
			return jinja.NewList(items), nil
		}
		unpacked := make([]jinja.Value, len(items))
		for i, item := range items {
			if unpacked[i], err = unpack(item, pairs); err != nil {
				return args[0], err
			}
		}
		return jinja.NewList(unpacked), nil
	}
}

// loopOver returns what a loop goes through, and counts its iterations.
func (r *rendering) loopOver(v jinja.Value) ([]jinja.Value, error) {
	if v.IsString() && len(v.AsString())/4 > maxSteps {
		return nil, unfollowed("a loop over a string that long")
	}
	items, err := itemsOf(v)
	if err != nil {
		return nil, err
	}
	return items, r.spend(len(items))
}

// opEach goes through a loop whose body is the call block: it is given the
// item, or its parts, and then the fields of "loop" that it uses. guarded is
// whether the arguments behind the items are a namespace and its attribute
// without which no further iteration does anything: see rewriter.guard.
func opEach(pairs int, fields []string, guarded bool) operation {
	return func(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
		items, err := r.loopOver(args[0])
		if err != nil {
			return args[0], err
		}
		body := kwargs["caller"].AsCallable().Fn
		loop := jinja.NewDict()
		set := loop.AsDict().Data
		for i, item := range items {
			for _, field := range fields {
				set[field] = loopField(field, i, items)
			}
			// The library keeps nothing of the arguments beyond the call, but
			// what they hold.
			given := append(r.arguments[:0], item)
			if pairs > 0 {
				if item, err = unpack(item, pairs); err != nil {
					return item, err
				}
				given = append(given[:0], item.AsList().Items...)
			}
			if len(fields) > 0 {
				given = append(given, loop)
			}
			r.arguments = given
			if _, err := body(given, nil); err != nil {
				return item, err
			}
			if err := r.check(0); err != nil {
				return item, err
			}
			if guarded && args[1].IsDict() && !args[1].AsDict().Data[args[2].AsString()].IsTruthy() {
				break
			}
		}
		return jinja.Undefined(), nil
	}
}

func loopField(name string, i int, items []jinja.Value) jinja.Value {
	n := len(items)
	switch name {
	case "index":
		return jinja.NewInt(int64(i + 1))
	case "index0":
		return jinja.NewInt(int64(i))
	case "revindex":
		return jinja.NewInt(int64(n - i))
	case "revindex0":
		return jinja.NewInt(int64(n - i - 1))
	case "length":
		return jinja.NewInt(int64(n))
	case "first":
		return jinja.NewBool(i == 0)
	case "last":
		return jinja.NewBool(i == n-1)
	case "previtem":
		if i > 0 {
			return items[i-1]
		}
	case "nextitem":
		if i < n-1 {
			return items[i+1]
		}
	}
	return jinja.Undefined()
}

// unpack returns a list of n values that item yields.
func unpack(item jinja.Value, n int) (jinja.Value, error) {
	if item.IsList() && item.AsList().Len() == n {
		return item, nil
	}
	if item.IsString() && len(item.AsString()) > 4*n {
		return item, raised("too many values to unpack (expected %d)", n)
	}
	parts, err := itemsOf(item)
	switch {
	case item.IsUndefined():
		return item, raised("not enough values to unpack (expected %d, got 0)", n)
	case err != nil:
		return item, err
	case len(parts) > n:
		return item, raised("too many values to unpack (expected %d)", n)
	case len(parts) < n:
		return item, raised("not enough values to unpack (expected %d, got %d)", n, len(parts))
	}
	return jinja.NewList(parts), nil
}

func opUnpack(n int) operation {
	return func(_ *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		return unpack(args[0], n)
	}
}

// opWrite writes the run that args[0] numbers, with the arguments that
// follow.
func opWrite(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	var err error
	r.out, err = r.appendRun(r.out, args)
	return jinja.Undefined(), err
}

// opText returns what opWrite writes.
func opText(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	b, err := r.appendRun(r.buffer[:0], args)
	r.buffer = b
	return jinja.NewString(r.keep(b)), err
}

func (r *rendering) appendRun(b []byte, args []jinja.Value) (_ []byte, err error) {
	before := len(b)
	run := r.runs[args[0].AsInt()]
	args = args[1:]
	for i := range run {
		s := &run[i]
		if !s.argument {
			b = append(b, s.text...)
			continue
		}
		v := args[0]
		args = args[1:]
		switch {
		case v.IsString():
			b = append(b, v.AsString()...)
		case s.onlyText:
			return b, errOperand("+", jinja.NewString(""), v)
		default:
			if b, err = appendText(b, v); err != nil {
				return b, err
			}
		}
	}
	return b, r.grow(len(b) - before)
}

// opFirst tells the filter that it is the input of that only the first item
// is wanted: Python does not compute more.
func opFirst(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	r.first = true
	return args[0], nil
}

// takeFirst reports whether only the first item is wanted of what a filter
// computes.
func (r *rendering) takeFirst() bool {
	first := r.first
	r.first = false
	return first
}

// opReversed returns what the filter reverse makes of a string. Of anything
// else it makes an iterator.
func opReversed(_ *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if !args[0].IsString() {
		return args[0], unfollowed("what the filter reverse returns, other than in a loop or another filter,")
	}
	return args[0], nil
}

func opAdd(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	size := 0
	for _, v := range args {
		if !v.IsString() {
			size = -1
			break
		}
		size += len(v.AsString())
	}
	if size >= 0 {
		if err := r.grow(size); err != nil {
			return jinja.None(), err
		}
		b := r.room(size)
		for _, v := range args {
			b = append(b, v.AsString()...)
		}
		return jinja.NewString(r.took(b)), nil
	}
	total := args[0]
	for _, v := range args[1:] {
		var err error
		if total, err = add(total, v); err != nil {
			return total, err
		}
		switch {
		case total.IsString():
			err = r.grow(len(total.AsString()))
		case total.IsList():
			err = r.spend(total.AsList().Len())
		}
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// opAddMarkup adds the strings behind args[0], which tells which of them may be
// marked as safe.
func opAddMarkup(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	at := int(args[0].AsInt())
	for i, v := range args[1:] {
		if i != at && (!v.IsString() || strings.ContainsAny(v.AsString(), `&<>'"`)) {
			return v, unfollowed("a sum of a value marked as safe and one that is to be escaped")
		}
	}
	return opAdd(r, args[1:], nil)
}

func opConcat(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	b := r.buffer[:0]
	for _, v := range args {
		var err error
		if b, err = appendText(b, v); err != nil {
			return v, err
		}
	}
	r.buffer = b
	return jinja.NewString(r.keep(b)), r.grow(len(b))
}

func opArithmetic(op string) operation {
	return func(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		if op == "%" && args[0].IsString() {
			return r.printf(args[0].AsString(), args[1])
		}
		v, err := arithmetic(op, args[0], args[1])
		if err != nil {
			return v, err
		}
		switch {
		case v.IsString():
			err = r.grow(len(v.AsString()))
		case v.IsList():
			err = r.spend(v.AsList().Len())
		}
		return v, err
	}
}

func opSign(op string) operation {
	return func(_ *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		v := args[0]
		switch {
		case v.IsFloat():
			if op == "-" {
				return jinja.NewFloat(-v.AsFloat()), nil
			}
			return v, nil
		case isWhole(v):
			if op == "-" {
				return arithmetic("-", jinja.NewInt(0), v)
			}
			return jinja.NewInt(whole(v)), nil
		case isHuge(v):
			return v, unfollowed("arithmetic with a number beyond 64 bits")
		case v.IsUndefined():
			return v, errUndefined()
		}
		return v, raised("bad operand type for unary %s: '%s'", op, typeName(v))
	}
}

// opOwn returns a value that a list or dict is to hold. They hold no
// undefined values: what loops over them relies on that.
func opOwn(_ *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if args[0].IsUndefined() {
		return args[0], unfollowed("a list or dict that holds undefined values")
	}
	return args[0], nil
}

func opKey(_ *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if !args[0].IsString() {
		return args[0], unfollowed("a dict with keys that are no strings")
	}
	return args[0], nil
}

func opDefined(_ *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if args[0].IsUndefined() {
		return args[0], errUndefined()
	}
	return args[0], nil
}

func opAttr(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	return r.attribute(args[0], args[1].AsString())
}

func opItem(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	return r.item(args[0], args[1])
}

func opSlice(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	v, err := slice(args[0], args[1], args[2], args[3])
	if err != nil {
		return v, err
	}
	if v.IsList() {
		return v, r.spend(v.AsList().Len() / 8)
	}
	return v, r.grow(len(v.AsString()))
}

func opCall(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	return r.call(args[0], args[1].AsString(), args[2:], kwargs)
}

func opTest(name string) operation {
	return func(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		is, err := r.test(name, args[0], args[1:])
		return jinja.NewBool(is), err
	}
}

func opCompare(op string) operation {
	return func(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		if args[1].IsList() {
			if err := r.spend(args[1].AsList().Len() / 8); err != nil {
				return args[0], err
			}
		}
		is, err := compare(op, args[0], args[1])
		return jinja.NewBool(is), err
	}
}

func opChain(ops []string) operation {
	return func(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		for i, op := range ops {
			if is, err := compare(op, args[i], args[i+1]); err != nil || !is {
				return jinja.NewBool(false), err
			}
		}
		return jinja.NewBool(true), nil
	}
}

func opNamespace(_ *rendering, _ []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	v := jinja.NewDict()
	for name, value := range kwargs {
		v.AsDict().Set(name, value)
	}
	return v, nil
}

func opDict(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	switch {
	case len(args) > 1:
		return jinja.None(), raised("dict expected at most 1 argument, got %d", len(args))
	case len(args) == 0:
		return jinja.NewDict(), nil
	case args[0].IsDict():
		return copyDict(args[0].AsDict()), r.spend(args[0].AsDict().Len())
	}
	items, err := itemsOf(args[0])
	if err != nil {
		return jinja.None(), err
	}
	v := jinja.NewDict()
	for _, item := range items {
		pair, err := unpack(item, 2)
		if err != nil {
			return v, err
		}
		key := pair.AsList().Items[0]
		if !key.IsString() {
			return v, unfollowed("a dict with keys that are no strings")
		}
		v.AsDict().Set(key.AsString(), pair.AsList().Items[1])
	}
	return v, r.spend(len(items))
}

// maxRange is the sandbox's.
const maxRange = 100_000

func opRange(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) == 0 || len(args) > 3 || len(kwargs) > 0 {
		return jinja.None(), raised("range expected 1 to 3 arguments, got %d", len(args))
	}
	bounds := []int64{0, 0, 1}
	for i, v := range args {
		switch {
		case isHuge(v):
			return v, unfollowed("a number beyond 64 bits")
		case !isWhole(v):
			return v, raised("'%s' object cannot be interpreted as an integer", typeName(v))
		}
		bounds[i] = whole(v)
	}
	start, stop, step := bounds[0], bounds[1], bounds[2]
	if len(args) == 1 {
		start, stop = 0, bounds[0]
	}
	const far = 1 << 60
	if start > far || start < -far || stop > far || stop < -far || step > far || step < -far {
		return jinja.None(), unfollowed("a range of such numbers")
	}
	count := int64(0)
	switch {
	case step == 0:
		return jinja.None(), raised("range() arg 3 must not be zero")
	case step > 0 && stop > start:
		count = (stop-start-1)/step + 1
	case step < 0 && start > stop:
		count = (start-stop-1)/-step + 1
	}
	if count > maxRange {
		return jinja.None(), raised("Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
	}
	if err := r.spend(int(count)); err != nil {
		return jinja.None(), err
	}
	items := make([]jinja.Value, count)
	for i := range items {
		items[i] = jinja.NewInt(start + int64(i)*step)
	}
	return jinja.NewList(items), nil
}

func opRaise(_ *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if v, ok := kwargs["message"]; ok && len(args) == 0 && len(kwargs) == 1 {
		args, kwargs = []jinja.Value{v}, nil
	}
	if len(args) != 1 || len(kwargs) > 0 {
		return jinja.None(), raised("raise_exception() takes 1 positional argument but %d were given", len(args))
	}
	why, err := textOf(args[0])
	if err != nil {
		why = fmt.Sprintf("a value of type %s", typeName(args[0]))
	}
	return jinja.None(), raised("%s", why)
}

func opStrftimeNow(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if v, ok := kwargs["format"]; ok && len(args) == 0 && len(kwargs) == 1 {
		args, kwargs = []jinja.Value{v}, nil
	}
	if len(args) != 1 || len(kwargs) > 0 || !args[0].IsString() {
		return jinja.None(), raised("strftime_now() takes one format")
	}
	s, err := strftime(r.now, args[0].AsString())
	return jinja.NewString(s), err
}
