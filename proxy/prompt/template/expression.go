package template

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

// kindOf is what is known of an expression's value before it is there.
type kindOf uint8

const (
	kindAny kindOf = iota
	kindText
	kindCount // a small whole number
	kindBool
	kindNone
)

// loopFields are those of "loop" that the library has as Jinja has them.
var loopFields = map[string]kindOf{
	"index": kindCount, "index0": kindCount, "revindex": kindCount, "revindex0": kindCount, "length": kindCount,
	"depth": kindCount, "depth0": kindCount, "first": kindBool, "last": kindBool, "previtem": kindAny, "nextitem": kindAny,
}

// kind returns what is known of e's value.
func (w *rewriter) kind(e *expr) kindOf {
	switch e.kind {
	case exprConst:
		switch v := e.value.(type) {
		case string:
			return kindText
		case int64:
			if v > -1<<31 && v < 1<<31 {
				return kindCount
			}
		case bool:
			return kindBool
		case nil:
			return kindNone
		}
	case exprAttr:
		if w.isLoop(e.args[0]) {
			return loopFields[e.name]
		}
	case exprFilter:
		if f, ok := filters[e.name]; ok && e.star == nil {
			switch f.result {
			case textResult:
				return kindText
			case countResult:
				return kindCount
			}
		}
	case exprConcat:
		return kindText
	case exprBinary:
		if operands := sum(e); operands != nil {
			if w.isText(operands) {
				return kindText
			}
		}
	case exprNot, exprTest, exprCompare:
		return kindBool
	case exprSign:
		if w.kind(e.args[0]) == kindCount {
			return kindCount
		}
	case exprCall:
		if w.macro(e.args[0]) != nil {
			return kindText
		}
	case exprCond:
		if then := w.kind(e.args[1]); then != kindAny && e.args[2] != nil && then == w.kind(e.args[2]) {
			return then
		}
	}
	return kindAny
}

func (w *rewriter) isLoop(e *expr) bool {
	return e.kind == exprName && e.name == "loop" && w.loop() != nil
}

// loop returns the binding of "loop", nil outside of loops.
func (w *rewriter) loop() *binding {
	for i := len(w.bindings) - 1; i >= 0; i-- {
		if w.bindings[i].loop {
			return &w.bindings[i]
		}
	}
	return nil
}

// definite reports whether e is sure not to be undefined.
func (w *rewriter) definite(e *expr) bool {
	if e.kind != exprName {
		return e.kind == exprConst || w.kind(e) != kindAny
	}
	for i := len(w.bindings) - 1; i >= 0; i-- {
		if b := w.bindings[i]; b.name == e.name {
			return b.definite
		}
	}
	return false
}

// expr returns e for the library.
func (w *rewriter) expr(e *expr) string {
	if w.depth++; w.depth > maxNesting*4 {
		w.refuse(e.line, "nesting deeper than %d", maxNesting*4)
	}
	defer func() { w.depth-- }()
	markup := w.mayBeMarkup
	w.mayBeMarkup = false
	if !markup && w.isMarkup(e) && (e.kind != exprName || w.find(e.name) == nil || w.assigned[e.name]) {
		w.refuse(e.line, "a value marked as safe, other than to write it,")
	}
	part := func(e *expr) string {
		w.mayBeMarkup = markup
		return w.expr(e)
	}
	switch e.kind {
	case exprConst:
		switch v := e.value.(type) {
		case string:
			return literal(v)
		case int64:
			return strconv.FormatInt(v, 10)
		case bool:
			return strconv.FormatBool(v)
		case float64:
			f := jinja.NewFloat(v)
			return w.operation("float"+strconv.Itoa(w.temp()), func(*rendering, []jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
				return f, nil
			}) + "()"
		}
		return "none"
	case exprName:
		return w.nameOf(e)
	case exprList:
		return "[" + w.items(e.args) + "]"
	case exprTuple:
		if len(e.args) == 1 {
			return "(" + w.items(e.args) + ",)"
		}
		return "(" + w.items(e.args) + ")"
	case exprDict:
		var pairs []string
		for i := 0; i < len(e.args); i += 2 {
			key := w.expr(e.args[i])
			if w.kind(e.args[i]) != kindText {
				key = w.operation("key", opKey) + "(" + key + ")"
			}
			pairs = append(pairs, key+": "+w.own(e.args[i+1]))
		}
		return "{" + strings.Join(pairs, ", ") + "}"
	case exprAttr:
		return w.attr(e)
	case exprItem:
		return w.item(e)
	case exprCall:
		if w.iterates(e) != value {
			w.refuse(e.line, "what keys, values, items or range return, other than in a loop or a filter,")
		}
		return w.call(e)
	case exprFilter:
		return w.filter(e)
	case exprTest:
		return w.test(e)
	case exprNot:
		return "(not " + w.markupExpr(e.args[0]) + ")"
	case exprSign:
		if e.name == "-" && w.kind(e.args[0]) == kindCount {
			return "(-" + w.expr(e.args[0]) + ")"
		}
		return w.operation("sign"+map[string]string{"+": "plus", "-": "minus"}[e.name], opSign(e.name)) + "(" + w.expr(e.args[0]) + ")"
	case exprBinary:
		return w.binary(e)
	case exprConcat:
		return w.operation("concat", opConcat) + "(" + w.plain(e.args) + ")"
	case exprCompare:
		return w.compare(e)
	case exprAnd:
		return "(" + part(e.args[0]) + " and " + part(e.args[1]) + ")"
	case exprOr:
		return "(" + part(e.args[0]) + " or " + part(e.args[1]) + ")"
	case exprCond:
		soft := w.soft
		w.soft = true
		defer func() { w.soft = soft }()
		s := "(" + part(e.args[1]) + " if " + w.markupExpr(e.args[0])
		if e.args[2] != nil {
			s += " else " + part(e.args[2])
		}
		return s + ")"
	}
	w.refuse(e.line, "this expression")
	return ""
}

// plain returns expressions with commas between them.
func (w *rewriter) plain(args []*expr) string {
	var list []string
	for _, a := range args {
		list = append(list, w.expr(a))
	}
	return strings.Join(list, ", ")
}

// items returns expressions that a list is to hold.
func (w *rewriter) items(args []*expr) string {
	var list []string
	for _, a := range args {
		if w.macro(a) != nil {
			// A list of macros, which call by macro values can use.
			w.checkName(a.name, a.line)
			list = append(list, w.operation("own", opOwn)+"("+rename(a.name)+")")
			continue
		}
		list = append(list, w.own(a))
	}
	return strings.Join(list, ", ")
}

func (w *rewriter) own(e *expr) string {
	if w.definite(e) {
		return w.expr(e)
	}
	return w.operation("own", opOwn) + "(" + w.expr(e) + ")"
}

func (w *rewriter) nameOf(e *expr) string {
	w.checkName(e.name, e.line)
	bound := w.find(e.name) != nil
	switch {
	case w.isNamespace(e):
		w.refuse(e.line, "%s as a value", e.name)
	case bound && e.name != "loop":
	case w.macros[e.name] != nil, e.name == "caller", e.name == "loop" && bound:
		w.refuse(e.line, "%s as a value", e.name)
	case libraryGlobals[e.name]:
		w.refuse(e.line, "%s as a value", e.name)
	case e.name == "varargs":
		w.refuse(e.line, "varargs other than in a loop")
	}
	return rename(e.name)
}

func (w *rewriter) attr(e *expr) string {
	object := e.args[0]
	if strings.HasPrefix(e.name, "__") || !isASCII(e.name) {
		w.refuse(e.line, "the attribute %s", e.name)
	}
	if w.isLoop(object) {
		if _, ok := loopFields[e.name]; !ok {
			w.refuse(e.line, "loop.%s as a value", e.name)
		}
		return "loop." + e.name
	}
	if w.isNamespace(object) {
		return w.namespace(object, e.name)
	}
	if object.kind == exprName && w.definite(object) && !isTypeAttribute(e.name) {
		return w.expr(object) + "." + e.name
	}
	return w.operation("attr", opAttr) + "(" + w.expr(object) + ", " + literal(e.name) + ")"
}

func (w *rewriter) namespace(object *expr, name string) string {
	w.checkName(object.name, object.line)
	s := rename(object.name)
	if !w.set[object.name] || w.inMacro != nil {
		s = w.operation("defined", opDefined) + "(" + s + ")"
	}
	return s + "[" + literal(name) + "]"
}

func (w *rewriter) item(e *expr) string {
	object, key := e.args[0], e.args[1]
	if key.kind == exprSlice {
		// Jinja computes slices of constants beforehand, where errors are
		// undefined values.
		if _, text := object.value.(string); !text && object.kind != exprList && object.kind != exprTuple && isConstant(object) {
			w.refuse(e.line, "a slice of such a constant")
		}
		for _, bound := range key.args {
			if bound != nil && bound.kind == exprConst && bound.value != nil && w.kind(bound) != kindCount && w.kind(bound) != kindBool {
				w.refuse(e.line, "such a slice")
			}
		}
		bounds := make([]string, 3)
		for i, bound := range key.args {
			bounds[i] = "none"
			if bound != nil {
				bounds[i] = w.expr(bound)
			}
		}
		return w.operation("slice", opSlice) + "(" + w.expr(object) + ", " + strings.Join(bounds, ", ") + ")"
	}
	if name, ok := key.value.(string); ok && key.kind == exprConst {
		if w.isNamespace(object) && !strings.HasPrefix(name, "_") {
			return w.namespace(object, name)
		}
		if object.kind == exprName && w.definite(object) && !isTypeAttribute(name) {
			return w.expr(object) + "[" + literal(name) + "]"
		}
	}
	if w.isLoop(object) {
		w.refuse(e.line, "an item of loop")
	}
	return w.operation("item", opItem) + "(" + w.expr(object) + ", " + w.expr(key) + ")"
}

// isConstant reports whether Jinja may compute e when it compiles a template.
func isConstant(e *expr) bool {
	constant := true
	e.walk(func(e *expr) { constant = constant && e.kind != exprName && e.kind != exprCall })
	return constant
}

// arguments returns what stands between a call's parentheses.
func (w *rewriter) arguments(args []*expr, kwargs []keyword) string {
	var list []string
	for _, a := range args {
		list = append(list, w.expr(a))
	}
	for _, k := range kwargs {
		if !isASCII(k.name) || reserved[k.name] {
			w.refuse(k.value.line, "the argument %q", k.name)
		}
		list = append(list, k.name+"="+w.expr(k.value))
	}
	return strings.Join(list, ", ")
}

func (w *rewriter) call(e *expr) string {
	callee := e.args[0]
	macro := w.macro(callee)
	if e.star != nil && e.starStar == nil && len(e.kwargs) == 0 && (macro != nil || callee.kind == exprItem || callee.kind == exprName) || callee.kind == exprItem && e.starStar == nil && len(e.kwargs) == 0 {
		function := ""
		if macro != nil {
			w.checkName(callee.name, e.line)
			function = rename(callee.name)
		} else {
			function = w.expr(callee)
		}
		star := "()"
		if e.star != nil {
			star = w.iterator(e.star)
		}
		args := append([]string{function, star}, w.arguments(e.args[1:], nil))
		return w.operation("apply", w.opApply()) + "(" + strings.TrimSuffix(strings.Join(args, ", "), ", ") + ")"
	}
	if macro != nil {
		return w.macroCall(e, macro)
	}
	if e.star != nil || e.starStar != nil {
		w.refuse(e.line, "a call with * or **")
	}
	args, kwargs := e.args[1:], e.kwargs
	switch callee.kind {
	case exprAttr:
		return w.methodCall(e, callee)
	case exprName:
		if w.find(callee.name) == nil || callee.name == "loop" {
			switch callee.name {
			case "range":
				return w.operation("range", opRange) + "(" + w.arguments(args, kwargs) + ")"
			case "raise_exception":
				return w.operation("raise", opRaise) + "(" + w.arguments(args, kwargs) + ")"
			case "strftime_now":
				w.clock = true
				return w.operation("strftime_now", opStrftimeNow) + "(" + w.arguments(args, kwargs) + ")"
			case "dict":
				list := w.arguments(args, nil)
				for _, k := range kwargs {
					if list != "" {
						list += ", "
					}
					w.checkName(k.name, e.line)
					list += k.name + "=" + w.own(k.value)
				}
				return w.operation("dict", opDict) + "(" + list + ")"
			case "namespace":
				w.refuse(e.line, "a namespace that is not assigned to a variable of its own")
			case "caller":
				return w.callerCall(e)
			case "loop":
				loop := w.loop()
				if loop == nil || len(args) != 1 || len(kwargs) > 0 {
					w.refuse(e.line, "such a call of loop")
				}
				return w.operation("up", opUp) + "(loop(" + w.operation("down", opDown) + "(" + w.iterate(args[0], *loop) + ")))"
			}
		}
		return w.nameOf(callee) + "(" + w.arguments(args, kwargs) + ")"
	}
	w.refuse(e.line, "a call of such an expression")
	return ""
}

func (w *rewriter) callerCall(e *expr) string {
	if w.inMacro == nil || len(e.kwargs) > 0 {
		w.refuse(e.line, "such a call of caller")
	}
	for _, n := range w.passed[w.inMacro.name] {
		if n != len(e.args)-1 {
			w.refuse(e.line, "a call of caller with another number of arguments")
		}
	}
	return "caller(" + w.arguments(e.args[1:], nil) + ")"
}

func (w *rewriter) macroCall(e *expr, macro *node) string {
	if e.star != nil || e.starStar != nil {
		w.refuse(e.line, "a call with * or **")
	}
	args := e.args[1:]
	if len(args) > len(macro.params) && !mentions(macro.body, "varargs") {
		return w.raiseCall(fmt.Sprintf("macro '%s' takes not more than %d argument(s)", macro.name, len(macro.params)))
	}
	for _, k := range e.kwargs {
		if k.name == "caller" {
			w.refuse(e.line, "an argument named caller")
		}
		if w.given[macro][k.name] {
			w.refuse(e.line, "a namespace given by name")
		}
	}
	var list []string
	for i, a := range args {
		switch {
		case i < len(macro.params) && w.given[macro][macro.params[i].name]:
			if !w.isNamespace(a) {
				w.refuse(e.line, "a parameter that is not always a namespace")
			}
			w.checkName(a.name, e.line)
			list = append(list, rename(a.name))
		default:
			list = append(list, w.expr(a))
		}
	}
	if len(e.kwargs) > 0 {
		list = append(list, w.arguments(nil, e.kwargs))
	}
	return rename(macro.name) + "(" + strings.Join(list, ", ") + ")"
}

// opApply returns the operation that calls a macro which is a value: with the
// arguments that follow, and with what the second one yields.
func (w *rewriter) opApply() operation {
	macros := w.macros
	return func(r *rendering, args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		f := args[0]
		if !f.IsCallable() {
			if f.IsUndefined() {
				return f, errUndefined()
			}
			return f, raised("'%s' object is not callable", typeName(f))
		}
		more, err := itemsOf(args[1])
		if err != nil {
			return f, err
		}
		if args[1].IsUndefined() {
			return f, unfollowed("arguments that are undefined")
		}
		given := append(slices.Clone(args[2:]), more...)
		macro := macros[f.AsCallable().Name]
		if macro == nil || len(w.given[macro]) > 0 {
			return f, unfollowed("a call of a method that is a value")
		}
		if len(given) > len(macro.params) && !mentions(macro.body, "varargs") {
			return f, raised("macro '%s' takes not more than %d argument(s)", macro.name, len(macro.params))
		}
		return f.AsCallable().Fn(given, nil)
	}
}

// raiseCall returns an expression that fails when it is evaluated.
func (w *rewriter) raiseCall(why string) string {
	return w.operation("raise", opRaise) + "(" + literal(why) + ")"
}

func (w *rewriter) methodCall(e, callee *expr) string {
	object, name := callee.args[0], callee.name
	args := w.arguments(e.args[1:], e.kwargs)
	if w.isLoop(object) {
		if name != "cycle" && name != "changed" || len(e.args) < 2 || len(e.kwargs) > 0 {
			w.refuse(e.line, "loop.%s", name)
		}
		return "loop." + name + "(" + args + ")"
	}
	if unfollowedMethods[name] {
		w.refuse(e.line, "a call of %s", name)
	}
	if w.isNamespace(object) || w.macro(object) != nil {
		w.refuse(e.line, "a call of an attribute of %s", object.name)
	}
	if !isTypeAttribute(name) && (strings.HasPrefix(name, "__") || !isASCII(name)) {
		w.refuse(e.line, "a call of %s", name)
	}
	if args != "" {
		args = ", " + args
	}
	return w.operation("call", opCall) + "(" + w.expr(object) + ", " + literal(name) + args + ")"
}

// iterates is what can be done with what an expression returns.
type iterates uint8

const (
	value     iterates = iota // anything
	view                      // it can be iterated over, and has a length
	generator                 // it can be iterated over once
)

func (w *rewriter) iterates(e *expr) iterates {
	switch {
	case e.kind == exprCall && e.args[0].kind == exprAttr && slices.Contains([]string{"items", "keys", "values"}, e.args[0].name):
		return view
	case isCallOf(e, "range"):
		return view
	case e.kind == exprFilter && filters[e.name].result == iteratorResult:
		return generator
	}
	return value
}

// iterator returns e where all that is done with it is to iterate over it.
func (w *rewriter) iterator(e *expr) string {
	switch {
	case e.kind == exprFilter && w.iterates(e) != value:
		return w.filterCall(e, w.filterInput(e))
	case e.kind == exprCall && w.iterates(e) != value:
		return w.call(e)
	case e.kind == exprName && e.name == "varargs" && w.inMacro != nil:
		return e.name
	}
	return w.expr(e)
}

func (w *rewriter) filterInput(e *expr) string {
	input := e.args[0]
	switch {
	case w.iterates(input) == value:
		if plain := len(e.args) == 1 && (e.name == "tojson" || e.name == "string" || e.name == "length" || e.name == "count"); plain || isSafe(e) {
			return w.markupExpr(input)
		}
		return w.expr(input)
	case isGroups(input):
	case e.name == "first" && w.iterates(input) == generator && input.name != "reverse" && input.name != "items":
		if w.iterates(input.args[0]) != generator && !isSafe(input) {
			return w.filterCall(input, w.operation("first", opFirst)+"("+w.filterInput(input)+")")
		}
	case consuming[e.name], w.iterates(input) == view && (e.name == "length" || e.name == "count" || e.name == "last" || e.name == "reverse"):
		return w.iterator(input)
	}
	w.refuse(e.line, "the filter %s of an iterator", e.name)
	return ""
}

func (w *rewriter) filter(e *expr) string {
	if e.name == "reverse" {
		return w.operation("reversed", opReversed) + "(" + w.filterCall(e, w.filterInput(e)) + ")"
	}
	if w.iterates(e) != value {
		w.refuse(e.line, "what the filter %s returns, other than in a loop or another filter,", e.name)
	}
	return w.filterCall(e, w.filterInput(e))
}

func (w *rewriter) filterCall(e *expr, input string) string {
	if isSafe(e) {
		return w.operation("filter_string", filterString) + "(" + input + ")"
	}
	f, ok := filters[e.name]
	if e.star != nil || e.starStar != nil {
		w.refuse(e.line, "a filter with * or **")
	}
	if !ok {
		if otherFilters[e.name] || !w.soft {
			w.refuse(e.line, "the filter %s", e.name)
		}
		return w.raiseCall("No filter named '" + e.name + "' found.")
	}
	args := w.arguments(e.args[1:], e.kwargs)
	if args != "" {
		args = ", " + args
	}
	return w.operation("filter_"+e.name, operation(f.apply)) + "(" + input + args + ")"
}

func (w *rewriter) test(e *expr) string {
	if e.star != nil || e.starStar != nil || len(e.kwargs) > 0 {
		w.refuse(e.line, "a test with such arguments")
	}
	input := e.args[0]
	if len(e.args) == 1 {
		switch e.name {
		case "defined", "undefined":
			if w.isNamespace(input) || w.macro(input) != nil || input.kind == exprName && (input.name == "caller" || input.name == "loop") {
				w.checkName(input.name, e.line)
				return "(" + rename(input.name) + " is " + e.name + ")"
			}
			if input.kind == exprName && libraryGlobals[input.name] && w.find(input.name) == nil {
				return strconv.FormatBool(e.name == "defined")
			}
			return "(" + w.markupExpr(input) + " is " + e.name + ")"
		case "none", "string", "boolean", "float", "true", "false", "mapping":
			return "(" + w.markupExpr(input) + " is " + e.name + ")"
		case "sequence", "iterable", "number", "integer":
			return w.operation("test_"+e.name, opTest(e.name)) + "(" + w.markupExpr(input) + ")"
		}
	}
	if _, ok := comparisons[e.name]; !ok && !plainTests[e.name] && e.name != "divisibleby" && e.name != "sameas" {
		if otherTests[e.name] || !w.soft {
			w.refuse(e.line, "the test %s", e.name)
		}
		return w.raiseCall("No test named '" + e.name + "' found.")
	}
	return w.operation("test_"+e.name, opTest(e.name)) + "(" + w.plain(e.args) + ")"
}

func (w *rewriter) binary(e *expr) string {
	if operands := sum(e); operands != nil {
		if w.isMarkup(e) {
			return w.markupSum(operands)
		}
		if len(operands) == 2 && w.kind(e.args[0]) == kindCount && w.kind(e.args[1]) == kindCount {
			return "(" + w.expr(e.args[0]) + " + " + w.expr(e.args[1]) + ")"
		}
		return w.operation("add", opAdd) + "(" + w.plain(operands) + ")"
	}
	if e.name == "-" && w.kind(e.args[0]) == kindCount && w.kind(e.args[1]) == kindCount {
		return "(" + w.expr(e.args[0]) + " - " + w.expr(e.args[1]) + ")"
	}
	spelled := map[string]string{"-": "subtract", "*": "multiply", "/": "divide", "//": "floor", "%": "modulo", "**": "power"}[e.name]
	return w.operation(spelled, opArithmetic(e.name)) + "(" + w.plain(e.args) + ")"
}

// markupSum adds strings of which one may be marked as safe: Python then escapes
// the others for HTML, which changes nothing unless they hold such characters.
func (w *rewriter) markupSum(operands []*expr) string {
	at := slices.IndexFunc(operands, w.isMarkup)
	list := []string{strconv.Itoa(at)}
	for i, e := range operands {
		if i != at && w.isMarkup(e) {
			w.refuse(e.line, "a sum of several values marked as safe")
		}
		list = append(list, w.markupExpr(e))
	}
	return w.operation("add_markup", opAddMarkup) + "(" + strings.Join(list, ", ") + ")"
}

func (w *rewriter) compare(e *expr) string {
	if len(e.names) == 1 {
		return w.comparison(e.names[0], e.args[0], e.args[1])
	}
	// All operands of a chain are evaluated here, which nobody can tell as long
	// as evaluating them cannot fail.
	for _, operand := range e.args[2:] {
		if operand.kind != exprConst && operand.kind != exprName && w.kind(operand) == kindAny {
			w.refuse(e.line, "such a chain of comparisons")
		}
	}
	name := "chain"
	for _, op := range e.names {
		name += "_" + comparisonNames[op]
	}
	return w.operation(name, opChain(e.names)) + "(" + w.plain(e.args) + ")"
}

var comparisonNames = map[string]string{"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "in": "in", "not in": "notin"}

func (w *rewriter) comparison(op string, a, b *expr) string {
	left, right := w.kind(a), w.kind(b)
	native := false
	operand := w.expr
	switch op {
	case "==", "!=":
		operand = w.markupExpr
		native = left != kindAny || right != kindAny
	case "in", "not in":
		native = left == kindText && right == kindText ||
			(b.kind == exprList || b.kind == exprTuple) && !slices.ContainsFunc(b.args, func(e *expr) bool { return e.kind != exprConst })
		if !native {
			if w.iterates(b) == generator {
				w.refuse(b.line, "a search in what a filter computes")
			}
			return w.operation(comparisonNames[op], opCompare(op)) + "(" + w.expr(a) + ", " + w.iterator(b) + ")"
		}
	default:
		native = left == kindCount && right == kindCount || left == kindText && right == kindText
	}
	if native {
		return "(" + operand(a) + " " + op + " " + operand(b) + ")"
	}
	return w.operation(comparisonNames[op], opCompare(op)) + "(" + operand(a) + ", " + operand(b) + ")"
}
