package prompt

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

// rewriter writes a template anew for the library: see template. compileTemplate
// makes one and is alone in using it. It leaves by panic(refusal), which
// rewrite recovers.
type rewriter struct {
	out     strings.Builder
	helpers map[string]helper
	clock   bool

	// What is assigned anywhere in the template, by name.
	macros     map[string]*node // defined once, and never anything else
	namespaces map[string]bool  // only ever namespace(...)
	assigned   map[string]bool  // by set or as a parameter
	markup     map[string]bool  // a value marked as safe
	// given are the macros' parameters that are given namespaces.
	given map[*node]map[string]bool
	// passed are how many arguments the call blocks of a macro take.
	passed map[string][]int

	// Where the rewriter is.
	bindings []binding // innermost last
	loops    int       // loops around that break and continue may end
	inMacro  *node
	nested   int             // scopes around that are none of the template's own
	soft     bool            // directly in an if: unknown filters fail when they are used
	set      map[string]bool // namespaces that are sure to be assigned
	temps    int
	depth    int
	// mayBeMarkup is whether the expression that is written next may be marked
	// as safe, without its use telling that from a string.
	mayBeMarkup bool
}

// binding is a name that a scope around binds.
type binding struct {
	name string
	// definite is whether it is never undefined; loop whether it is a loop's
	// variable "loop", with weight being what an iteration counts for.
	definite, loop bool
	weight         int
	pairs          int
	// namespace is whether it is a parameter that is always given one.
	namespace bool
}

type refusal string

// helperDict is the helper for dict(), which the library must know.
const helperDict = "__dict"

// libraryGlobals are names that the library knows by itself.
var libraryGlobals = names("namespace raise_exception range joiner dict cycler strftime_now")

// reserved are names that mean something else to Jinja or to the library.
var reserved = names("not and or if else in is for elif recursive self super lipsum cycler joiner kwargs")

// loopFields are those of "loop" that the library has as Jinja has them.
var loopFields = map[string]kindOf{
	"index": kindCount, "index0": kindCount, "revindex": kindCount, "revindex0": kindCount, "length": kindCount,
	"depth": kindCount, "depth0": kindCount, "first": kindBool, "last": kindBool, "previtem": kindAny, "nextitem": kindAny,
}

// kindOf is what is known of an expression's value before it is there.
type kindOf uint8

const (
	kindAny kindOf = iota
	kindText
	kindCount // a small whole number
	kindBool
	kindNone
)

// rename spells a variable so that the library does not take it for a literal.
func rename(name string) string {
	if name == "null" {
		return "null__variable"
	}
	return name
}

func newRewriter(nodes []*node) *rewriter {
	w := &rewriter{
		helpers: map[string]helper{}, macros: map[string]*node{}, namespaces: map[string]bool{},
		assigned: map[string]bool{}, passed: map[string][]int{}, set: map[string]bool{},
		markup: map[string]bool{}, given: map[*node]map[string]bool{},
	}
	others := map[string]bool{} // bound as neither a macro nor a namespace
	twice := map[string]bool{}
	bind := func(e *expr) {
		e.walk(func(e *expr) {
			if e.kind == exprName {
				others[e.name] = true
			}
		})
	}
	walkNodes(nodes, func(n *node) {
		switch n.kind {
		case nodeSet:
			if n.target.kind == exprName && isCallOf(n.expr, "namespace") {
				w.namespaces[n.target.name] = true
			} else {
				bind(n.target)
			}
			n.target.walk(func(e *expr) { w.assigned[e.name] = true })
		case nodeSetBlock, nodeFor:
			bind(n.target)
			if n.kind == nodeSetBlock {
				w.assigned[n.target.name] = true
			}
		case nodeMacro:
			twice[n.name] = twice[n.name] || w.macros[n.name] != nil
			w.macros[n.name] = n
		}
		if n.kind == nodeMacro || n.kind == nodeCall || n.kind == nodeWith {
			for _, p := range n.params {
				w.assigned[p.name] = true
			}
		}
		if n.kind == nodeCall && n.expr.args[0].kind == exprName {
			name := n.expr.args[0].name
			w.passed[name] = append(w.passed[name], len(n.params))
		}
	}, nil)
	for name := range w.namespaces {
		if others[name] || w.macros[name] != nil {
			delete(w.namespaces, name)
			others[name] = true
		}
	}
	for name := range w.macros {
		if others[name] || twice[name] {
			delete(w.macros, name)
			w.assigned[name] = true
		}
	}
	for w.findMarkup(nodes) {
	}
	for w.findGiven(nodes) {
	}
	return w
}

// findMarkup notes the variables that are assigned something marked as safe. It
// reports whether it has found more.
func (w *rewriter) findMarkup(nodes []*node) (more bool) {
	walkNodes(nodes, func(n *node) {
		if n.kind == nodeSet && n.target.kind == exprName && !w.markup[n.target.name] && w.isMarkup(n.expr) {
			w.markup[n.target.name] = true
			more = true
		}
	}, nil)
	return more
}

// isMarkup reports whether e may be marked as safe, where writing it is not
// refused.
func (w *rewriter) isMarkup(e *expr) bool {
	switch e.kind {
	case exprName:
		return w.markup[e.name]
	case exprFilter:
		return e.name == "safe" || e.name == "string" && w.isMarkup(e.args[0])
	case exprCond, exprAnd, exprOr:
		return slices.ContainsFunc(e.args, func(e *expr) bool { return e != nil && w.isMarkup(e) })
	}
	return false
}

// findGiven notes the parameters of macros that a call gives a namespace. It
// reports whether it has found more.
func (w *rewriter) findGiven(nodes []*node) (more bool) {
	visit := func(in *node) func(*expr) {
		return func(e *expr) {
			if e.kind != exprCall || e.args[0].kind != exprName || w.macros[e.args[0].name] == nil {
				return
			}
			macro := w.macros[e.args[0].name]
			for i, a := range e.args[1:] {
				if i >= len(macro.params) || a.kind != exprName {
					continue
				}
				name := macro.params[i].name
				if (w.given[in][a.name] || w.namespaces[a.name] && !isParameter(in, a.name)) && !w.given[macro][name] {
					if w.given[macro] == nil {
						w.given[macro] = map[string]bool{}
					}
					w.given[macro][name] = true
					more = true
				}
			}
		}
	}
	walkNodes(nodes, nil, visit(nil))
	for _, macro := range w.macros {
		walkNodes(macro.body, nil, visit(macro))
	}
	return more
}

func isParameter(macro *node, name string) bool {
	return macro != nil && slices.ContainsFunc(macro.params, func(p keyword) bool { return p.name == name })
}

// find returns the innermost binding of a name, nil for none.
func (w *rewriter) find(name string) *binding {
	for i := len(w.bindings) - 1; i >= 0; i-- {
		if w.bindings[i].name == name {
			return &w.bindings[i]
		}
	}
	return nil
}

// isNamespace reports whether e is a variable that only ever holds a namespace.
func (w *rewriter) isNamespace(e *expr) bool {
	if e.kind != exprName {
		return false
	}
	if b := w.find(e.name); b != nil {
		return b.namespace
	}
	return w.namespaces[e.name]
}

// macro returns the macro that e names, nil for none.
func (w *rewriter) macro(e *expr) *node {
	if e.kind != exprName || w.find(e.name) != nil {
		return nil
	}
	return w.macros[e.name]
}

func isCallOf(e *expr, name string) bool {
	return e.kind == exprCall && e.args[0].kind == exprName && e.args[0].name == name
}

func (w *rewriter) rewrite(nodes []*node) (err error) {
	defer func() {
		if r := recover(); r != nil {
			refused, ok := r.(refusal)
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("%s", string(refused))
		}
	}()
	w.nodes(nodes, true)
	return nil
}

func (w *rewriter) refuse(line int, format string, args ...any) {
	panic(refusal(fmt.Sprintf("line %d: %s is not followed", line, fmt.Sprintf(format, args...))))
}

// helper makes sure that a helper is there and returns its name.
func (w *rewriter) helper(name string, h helper) string {
	name = "__" + name
	w.helpers[name] = h
	return name
}

// tag writes a statement that takes no white space with it.
func (w *rewriter) tag(format string, args ...any) {
	w.out.WriteString("{%+ ")
	fmt.Fprintf(&w.out, format, args...)
	w.out.WriteString(" +%}")
}

// value writes an output whose text is the library's.
func (w *rewriter) value(e string) {
	w.out.WriteString("{{ " + e + " }}")
}

// longText is how much text may stand in a loop's body without being counted
// by itself.
const longText = 512

func (w *rewriter) text(s string) {
	switch {
	case s == "":
	case len(s) > longText && (len(w.bindings) > 0 || w.inMacro != nil):
		v := jinja.NewString(s)
		w.value(w.helper("text"+strconv.Itoa(w.temp()), func(r *rendering, _ []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
			return v, r.grow(len(s))
		}) + "()")
	case strings.Contains(s, "{"):
		w.value(literal(s))
	default:
		w.out.WriteString(s)
	}
}

func (w *rewriter) temp() int {
	w.temps++
	return w.temps
}

// weight is what an iteration over nodes counts for: it may write so much text
// that is not counted by itself.
func weight(nodes []*node) int {
	bytes := 0
	var count func([]*node)
	count = func(nodes []*node) {
		for _, n := range nodes {
			if len(n.text) <= longText {
				bytes += len(n.text)
			}
			bytes += 16
			if n.kind == nodeOutput {
				n.expr.walk(func(e *expr) {
					if s, ok := e.value.(string); ok {
						bytes += min(len(s), longText)
					}
				})
			}
			if n.kind != nodeFor {
				count(n.body)
				count(n.elifs)
				count(n.orElse)
			}
		}
	}
	count(nodes)
	return 1 + bytes/256
}

func (w *rewriter) nodes(nodes []*node, root bool) {
	if w.depth++; w.depth > maxNesting {
		w.refuse(nodes[0].line, "nesting deeper than %d", maxNesting)
	}
	for _, n := range nodes {
		w.node(n, root)
	}
	w.depth--
}

// within writes nodes in a scope with more names. loops is whether break and
// continue may be used in it.
func (w *rewriter) within(nodes []*node, loops bool, bound ...binding) {
	before, soft, outer := len(w.bindings), w.soft, w.loops
	w.bindings = append(w.bindings, bound...)
	w.soft = false
	if !loops {
		w.loops = 0
	}
	w.nodes(nodes, false)
	w.bindings, w.soft, w.loops = w.bindings[:before], soft, outer
}

func (w *rewriter) node(n *node, root bool) {
	switch n.kind {
	case nodeText:
		w.text(n.text)
	case nodeOutput:
		w.output(n.expr)
	case nodeIf:
		w.ifNode(n)
	case nodeFor:
		w.forNode(n)
	case nodeSet:
		w.setNode(n, root)
	case nodeSetBlock:
		w.setBlock(n)
	case nodeMacro:
		w.macroNode(n)
	case nodeCall:
		w.callNode(n)
	case nodeFilter:
		w.capture(n.body, w.filterChain(n.expr))
	case nodeWith:
		var bound []binding
		var targets, values []string
		for _, p := range n.params {
			w.checkName(p.name, n.line)
			targets = append(targets, rename(p.name))
			values = append(values, w.expr(p.value))
			bound = append(bound, binding{name: p.name})
		}
		w.tag("call(%s) %s(%s)", strings.Join(targets, ", "), w.helper("with", helpWith), strings.Join(values, ", "))
		w.nested++
		w.within(n.body, false, bound...)
		w.nested--
		w.tag("endcall")
	case nodeGeneration:
		w.tag("call %s()", w.helper("with", helpWith))
		w.nested++
		w.within(n.body, false)
		w.nested--
		w.tag("endcall")
	case nodeBreak, nodeContinue:
		if w.loops == 0 {
			w.refuse(n.line, "break or continue outside of a loop's own body")
		}
		if n.kind == nodeBreak {
			w.tag("break")
		} else {
			w.tag("continue")
		}
	}
}

// filterChain returns what writes {% filter a|b %}: a function of the name that
// holds the text.
func (w *rewriter) filterChain(e *expr) func(string) string {
	return func(input string) string {
		var apply func(e *expr) string
		apply = func(e *expr) string {
			if e == nil {
				return input
			}
			return w.filterCall(e, apply(e.args[0]))
		}
		return apply(e)
	}
}

// capture writes nodes so that their text, in a scope of their own, goes
// through filters and is then written.
func (w *rewriter) capture(nodes []*node, chain func(string) string) {
	name := fmt.Sprintf("__body%d", w.temp())
	w.tag("set %s", name)
	w.tag("call %s()", w.helper("with", helpWith))
	w.nested++
	w.within(nodes, false)
	w.nested--
	w.tag("endcall")
	w.tag("endset")
	w.value(w.printed(chain(name)))
}

// printed returns what writes a value as Python prints it.
func (w *rewriter) printed(e string) string { return w.helper("print", helpPrint) + "(" + e + ")" }

func (w *rewriter) ifNode(n *node) {
	soft := w.soft
	w.soft = true
	w.tag("if %s", w.markupExpr(n.expr))
	w.nodes(n.body, false)
	for _, elif := range n.elifs {
		w.tag("elif %s", w.expr(elif.expr))
		w.nodes(elif.body, false)
	}
	if n.orElse != nil {
		w.tag("else")
		w.nodes(n.orElse, false)
	}
	w.tag("endif")
	w.soft = soft
}

func (w *rewriter) forNode(n *node) {
	bound := binding{name: "loop", loop: true, definite: true, weight: weight(n.body)}
	var targets []*expr
	switch n.target.kind {
	case exprName:
		targets = []*expr{n.target}
	case exprTuple:
		targets = n.target.args
		bound.pairs = len(targets)
	}
	definite := !w.yieldsUndefined(n.expr)
	names := []binding{bound}
	var spelled []string
	for _, t := range targets {
		if t.kind != exprName {
			w.refuse(n.line, "a loop that unpacks more than one level")
		}
		w.checkName(t.name, n.line)
		if t.name == "loop" {
			w.refuse(n.line, "a loop over a variable named loop")
		}
		names = append(names, binding{name: t.name, definite: definite && !w.assigned[t.name]})
		spelled = append(spelled, rename(t.name))
	}
	if len(targets) == 0 {
		w.refuse(n.line, "a loop without variables")
	}
	soft := w.soft
	w.soft = false
	iterable := w.iterate(n.expr, bound)
	target := strings.Join(spelled, ", ")
	if len(targets) == 1 && n.target.kind == exprTuple || len(targets) > 2 {
		target = fmt.Sprintf("__item%d", w.temp())
	}
	if bound.pairs > 0 && !isPairs(n.expr) {
		for _, b := range n.body {
			walkNodes([]*node{b}, func(n *node) {
				if n.kind == nodeBreak {
					w.refuse(n.line, "a break in a loop that unpacks")
				}
			}, nil)
		}
	}
	test := ""
	if n.test != nil {
		if target != strings.Join(spelled, ", ") {
			w.refuse(n.line, "a condition of a loop that unpacks")
		}
		n.test.walk(func(e *expr) {
			if e.kind == exprName && e.name == "loop" {
				w.refuse(n.line, "a loop's condition that mentions loop")
			}
		})
		before := len(w.bindings)
		w.bindings = append(w.bindings, names[1:]...)
		test = " if " + w.expr(n.test)
		w.bindings = w.bindings[:before]
	}
	recursive := ""
	if n.recursive {
		recursive = " recursive"
	}
	w.tag("for %s in %s%s%s", target, iterable, test, recursive)
	if target != strings.Join(spelled, ", ") {
		for i, name := range spelled {
			w.tag("set %s = %s[%d]", name, target, i)
		}
	}
	w.loops++
	w.within(n.body, true, names...)
	w.loops--
	if n.orElse != nil {
		w.tag("else")
		w.within(n.orElse, true)
	}
	w.tag("endfor")
	w.soft = soft
}

// isPairs reports whether an expression yields pairs only.
func isPairs(e *expr) bool {
	return e.kind == exprCall && e.args[0].kind == exprAttr && e.args[0].name == "items" ||
		e.kind == exprFilter && (e.name == "items" || e.name == "dictsort")
}

// iterate returns an expression for what a loop goes through.
func (w *rewriter) iterate(e *expr, loop binding) string {
	name := fmt.Sprintf("iterate%d", loop.weight)
	if loop.pairs > 0 {
		name += fmt.Sprintf("by%d", loop.pairs)
	}
	return w.helper(name, helpIterate(loop.weight, loop.pairs)) + "(" + w.iterator(e) + ")"
}

// yieldsUndefined reports whether iterating over e may yield undefined values.
// No list or dict holds any: see helpOwn and newList.
func (w *rewriter) yieldsUndefined(e *expr) bool {
	switch e.kind {
	case exprName:
		return e.name == "varargs"
	case exprFilter:
		return filters[e.name].result == iteratorResult && e.name != "items"
	case exprCond, exprOr, exprAnd:
		return slices.ContainsFunc(e.args, func(e *expr) bool { return e != nil && w.yieldsUndefined(e) })
	case exprItem:
		return w.yieldsUndefined(e.args[0])
	case exprTuple, exprList, exprBinary:
		return slices.ContainsFunc(e.args, w.yieldsUndefined)
	}
	return false
}

func (w *rewriter) setNode(n *node, root bool) {
	switch n.target.kind {
	case exprTarget:
		w.checkName(n.target.name, n.line)
		if !w.isNamespace(&expr{kind: exprName, name: n.target.name}) {
			w.refuse(n.line, "an assignment to an attribute of something that may be no namespace")
		}
		w.tag("set %s.%s = %s", rename(n.target.name), n.target.names[0], w.expr(n.expr))
	case exprName:
		name := n.target.name
		w.checkAssigned(name, n.line)
		if b := w.find(name); b != nil && b.namespace {
			w.refuse(n.line, "an assignment to a parameter that holds a namespace")
		}
		if isCallOf(n.expr, "namespace") && w.namespaces[name] {
			call := n.expr
			if len(call.args) > 1 || call.star != nil || call.starStar != nil {
				w.refuse(n.line, "a namespace made of something else")
			}
			w.tag("set %s = %s(%s)", rename(name), w.helper("namespace", helpNamespace), w.arguments(nil, call.kwargs))
			if root {
				w.set[name] = true
			}
			return
		}
		w.tag("set %s = %s", rename(name), w.markupExpr(n.expr))
	case exprTuple:
		var targets []string
		for _, t := range n.target.args {
			if t.kind != exprName {
				w.refuse(n.line, "an assignment that unpacks more than one level")
			}
			w.checkAssigned(t.name, n.line)
			targets = append(targets, rename(t.name))
		}
		if len(targets) < 2 {
			w.refuse(n.line, "an assignment to a tuple of one")
		}
		unpack := w.helper(fmt.Sprintf("unpack%d", len(targets)), helpUnpack(len(targets)))
		w.tag("set %s = %s(%s)", strings.Join(targets, ", "), unpack, w.iterator(n.expr))
	}
}

func (w *rewriter) setBlock(n *node) {
	if n.target.kind != exprName {
		w.refuse(n.line, "a block assigned to something other than a name")
	}
	name := n.target.name
	w.checkAssigned(name, n.line)
	w.tag("set %s", rename(name))
	w.tag("call %s()", w.helper("with", helpWith))
	w.nested++
	w.within(n.body, false)
	w.nested--
	w.tag("endcall")
	w.tag("endset")
	if n.expr != nil {
		w.tag("set %s = %s", rename(name), w.filterChain(n.expr)(rename(name)))
	}
}

func (w *rewriter) macroNode(n *node) {
	w.checkAssigned(n.name, n.line)
	if w.macros[n.name] == nil || n.name == "method" || n.name == hugeName || n.name == "dict" {
		w.refuse(n.line, "a macro whose name has another meaning too")
	}
	if w.inMacro != nil || w.nested > 0 || len(w.bindings) > 0 {
		w.refuse(n.line, "a macro within a loop or another block")
	}
	w.inMacro = n
	soft := w.soft
	w.soft = false
	var params []string
	var bound []binding
	for _, p := range n.params {
		w.checkName(p.name, n.line)
		if w.macros[p.name] != nil || p.name == "varargs" || p.name == "caller" || slices.ContainsFunc(bound, func(b binding) bool { return b.name == p.name }) {
			w.refuse(n.line, "such a parameter of a macro")
		}
		bound = append(bound, binding{name: p.name, namespace: w.given[n][p.name]})
		spelled := rename(p.name)
		if p.value != nil {
			spelled += "=" + w.expr(p.value)
		}
		params = append(params, spelled)
	}
	w.tag("macro %s(%s)", rename(n.name), strings.Join(params, ", "))
	w.value(w.helper("enter", helpEnter) + "()")
	w.within(n.body, false, bound...)
	w.value(w.helper("leave", helpLeave) + "()")
	w.tag("endmacro")
	w.inMacro, w.soft = nil, soft
}

func (w *rewriter) callNode(n *node) {
	macro := w.macro(n.expr.args[0])
	if macro == nil {
		w.refuse(n.line, "a call block of something other than a macro")
	}
	if !mentions(macro.body, "caller") {
		w.refuse(n.line, "a call block of a macro that does not use it")
	}
	var params []string
	var bound []binding
	for _, p := range n.params {
		w.checkName(p.name, n.line)
		if p.value != nil {
			w.refuse(n.line, "a call block with defaults")
		}
		params = append(params, rename(p.name))
		bound = append(bound, binding{name: p.name})
	}
	call := w.macroCall(n.expr, macro)
	if len(params) > 0 {
		w.tag("call(%s) %s", strings.Join(params, ", "), call)
	} else {
		w.tag("call %s", call)
	}
	w.nested++
	w.within(n.body, false, bound...)
	w.nested--
	w.tag("endcall")
}

// checkName refuses names that cannot be told from ours or the library's.
func (w *rewriter) checkName(name string, line int) {
	if strings.HasPrefix(name, "__") || reserved[name] || !isASCII(name) || strings.HasPrefix(name, "null__") {
		w.refuse(line, "the name %q", name)
	}
}

func (w *rewriter) checkAssigned(name string, line int) {
	w.checkName(name, line)
	if libraryGlobals[name] || name == "loop" || name == "caller" || name == "varargs" {
		w.refuse(line, "an assignment to %q", name)
	}
}

// output writes what {{ e }} writes.
func (w *rewriter) output(e *expr) {
	switch e.kind {
	case exprConst:
		switch v := e.value.(type) {
		case string:
			w.text(v)
			return
		case float64:
			w.text(string(appendFloat(nil, v)))
			return
		}
	case exprConcat:
		for _, part := range e.args {
			w.output(part)
		}
		return
	case exprCond:
		soft := w.soft
		w.soft = true
		w.tag("if %s", w.expr(e.args[0]))
		w.output(e.args[1])
		if e.args[2] != nil {
			w.tag("else")
			w.output(e.args[2])
		}
		w.tag("endif")
		w.soft = soft
		return
	case exprBinary:
		if operands := sum(e); operands != nil && w.isText(operands) {
			for _, part := range operands {
				w.textOutput(part)
			}
			return
		}
	case exprFilter:
		if isSafe(e) {
			w.output(e.args[0])
			return
		}
	}
	if w.kind(e) != kindAny {
		w.value(w.markupExpr(e))
		return
	}
	w.value(w.printed(w.markupExpr(e)))
}

// isSafe reports whether e is the filter safe. What it returns is written like
// a string, but does other things when it is added to one.
func isSafe(e *expr) bool {
	return e.kind == exprFilter && e.name == "safe" && len(e.args) == 1 && len(e.kwargs) == 0 && e.star == nil && e.starStar == nil
}

// markupExpr returns e where it does not matter whether it is marked as safe.
func (w *rewriter) markupExpr(e *expr) string {
	w.mayBeMarkup = true
	return w.expr(e)
}

// textOutput writes e, which is an operand of a sum that fails unless e is a
// string.
func (w *rewriter) textOutput(e *expr) {
	switch {
	case e.kind == exprBinary && w.kind(e) == kindText:
		for _, part := range sum(e) {
			w.textOutput(part)
		}
	case w.kind(e) == kindText:
		w.output(e)
	default:
		w.value(w.helper("onlytext", helpText) + "(" + w.expr(e) + ")")
	}
}

// sum returns the operands of a + b + c, nil when e is something else.
func sum(e *expr) []*expr {
	if e.kind != exprBinary || e.name != "+" {
		return nil
	}
	if left := sum(e.args[0]); left != nil {
		return append(left, e.args[1])
	}
	return []*expr{e.args[0], e.args[1]}
}

// isText reports whether a sum is a string if it does not fail: one operand
// is one.
func (w *rewriter) isText(operands []*expr) bool {
	return slices.ContainsFunc(operands, func(e *expr) bool { return w.kind(e) == kindText })
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
		if e.args[2] != nil && w.kind(e.args[1]) == w.kind(e.args[2]) {
			return w.kind(e.args[1])
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
			return w.helper("float"+strconv.Itoa(w.temp()), func(*rendering, []jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
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
				key = w.helper("key", helpKey) + "(" + key + ")"
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
		return w.helper("sign"+map[string]string{"+": "plus", "-": "minus"}[e.name], helpSign(e.name)) + "(" + w.expr(e.args[0]) + ")"
	case exprBinary:
		return w.binary(e)
	case exprConcat:
		return w.helper("concat", helpConcat) + "(" + w.plain(e.args) + ")"
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
			list = append(list, w.helper("own", helpOwn)+"("+rename(a.name)+")")
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
	return w.helper("own", helpOwn) + "(" + w.expr(e) + ")"
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
	return w.helper("attr_"+e.name, helpAttr(e.name)) + "(" + w.expr(object) + ")"
}

func (w *rewriter) namespace(object *expr, name string) string {
	w.checkName(object.name, object.line)
	s := rename(object.name)
	if !w.set[object.name] || w.inMacro != nil {
		s = w.helper("defined", helpDefined) + "(" + s + ")"
	}
	return s + "[" + literal(name) + "]"
}

func (w *rewriter) item(e *expr) string {
	object, key := e.args[0], e.args[1]
	if key.kind == exprSlice {
		bounds := make([]string, 3)
		for i, bound := range key.args {
			bounds[i] = "none"
			if bound != nil {
				bounds[i] = w.expr(bound)
			}
		}
		return w.helper("slice", helpSlice) + "(" + w.expr(object) + ", " + strings.Join(bounds, ", ") + ")"
	}
	if name, ok := key.value.(string); ok && key.kind == exprConst {
		if w.isNamespace(object) {
			w.refuse(e.line, "an item of a namespace")
		}
		if object.kind == exprName && w.definite(object) && !isTypeAttribute(name) {
			return w.expr(object) + "[" + literal(name) + "]"
		}
	}
	if w.isLoop(object) {
		w.refuse(e.line, "an item of loop")
	}
	return w.helper("item", helpItem) + "(" + w.expr(object) + ", " + w.expr(key) + ")"
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
		return w.helper("apply", w.helpApply()) + "(" + strings.TrimSuffix(strings.Join(args, ", "), ", ") + ")"
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
				return w.helper("range", helpRange) + "(" + w.arguments(args, kwargs) + ")"
			case "raise_exception":
				return w.helper("raise", helpRaise) + "(" + w.arguments(args, kwargs) + ")"
			case "strftime_now":
				w.clock = true
				return w.helper("strftime_now", helpStrftimeNow) + "(" + w.arguments(args, kwargs) + ")"
			case "dict":
				list := w.arguments(args, nil)
				for _, k := range kwargs {
					if list != "" {
						list += ", "
					}
					w.checkName(k.name, e.line)
					list += k.name + "=" + w.own(k.value)
				}
				return w.helper("dict", helpDict) + "(" + list + ")"
			case "namespace":
				w.refuse(e.line, "a namespace that is not assigned to a variable of its own")
			case "caller":
				return w.callerCall(e)
			case "loop":
				loop := w.loop()
				if loop == nil || len(args) != 1 || len(kwargs) > 0 {
					w.refuse(e.line, "such a call of loop")
				}
				return w.helper("up", helpUp) + "(loop(" + w.helper("down", helpDown) + "(" + w.iterate(args[0], *loop) + ")))"
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

// helpApply returns the helper that calls a macro which is a value: with the
// arguments that follow, and with what the second one yields.
func (w *rewriter) helpApply() helper {
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
	return w.helper("raise", helpRaise) + "(" + literal(why) + ")"
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
	if w.isNamespace(object) || w.macro(object) != nil {
		w.refuse(e.line, "a call of an attribute of %s", object.name)
	}
	if !isTypeAttribute(name) && (strings.HasPrefix(name, "__") || !isASCII(name)) {
		w.refuse(e.line, "a call of %s", name)
	}
	if args != "" {
		args = ", " + args
	}
	return w.helper("call_"+name, helpCall(name)) + "(" + w.expr(object) + args + ")"
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
	case consuming[e.name], w.iterates(input) == view && (e.name == "length" || e.name == "count" || e.name == "last" || e.name == "reverse"):
		return w.iterator(input)
	}
	w.refuse(e.line, "the filter %s of an iterator", e.name)
	return ""
}

func (w *rewriter) filter(e *expr) string {
	if e.name == "reverse" {
		return w.helper("reversed", helpReversed) + "(" + w.filterCall(e, w.filterInput(e)) + ")"
	}
	if w.iterates(e) != value {
		w.refuse(e.line, "what the filter %s returns, other than in a loop or another filter,", e.name)
	}
	return w.filterCall(e, w.filterInput(e))
}

func (w *rewriter) filterCall(e *expr, input string) string {
	if isSafe(e) {
		return w.helper("filter_string", filterString) + "(" + input + ")"
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
	return w.helper("filter_"+e.name, helper(f.apply)) + "(" + input + args + ")"
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
			return w.helper("test_"+e.name, helpTest(e.name)) + "(" + w.markupExpr(input) + ")"
		}
	}
	if _, ok := comparisons[e.name]; !ok && !plainTests[e.name] && e.name != "divisibleby" && e.name != "sameas" {
		if otherTests[e.name] || !w.soft {
			w.refuse(e.line, "the test %s", e.name)
		}
		return w.raiseCall("No test named '" + e.name + "' found.")
	}
	return w.helper("test_"+e.name, helpTest(e.name)) + "(" + w.plain(e.args) + ")"
}

func (w *rewriter) binary(e *expr) string {
	if operands := sum(e); operands != nil {
		if len(operands) == 2 && w.kind(e.args[0]) == kindCount && w.kind(e.args[1]) == kindCount {
			return "(" + w.expr(e.args[0]) + " + " + w.expr(e.args[1]) + ")"
		}
		return w.helper("add", helpAdd) + "(" + w.plain(operands) + ")"
	}
	if e.name == "-" && w.kind(e.args[0]) == kindCount && w.kind(e.args[1]) == kindCount {
		return "(" + w.expr(e.args[0]) + " - " + w.expr(e.args[1]) + ")"
	}
	spelled := map[string]string{"-": "subtract", "*": "multiply", "/": "divide", "//": "floor", "%": "modulo", "**": "power"}[e.name]
	return w.helper(spelled, helpArithmetic(e.name)) + "(" + w.plain(e.args) + ")"
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
	return w.helper(name, helpChain(e.names)) + "(" + w.plain(e.args) + ")"
}

var comparisonNames = map[string]string{"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "in": "in", "not in": "notin"}

func (w *rewriter) comparison(op string, a, b *expr) string {
	left, right := w.kind(a), w.kind(b)
	native := false
	switch op {
	case "==", "!=":
		native = left != kindAny || right != kindAny
	case "in", "not in":
		native = left == kindText && right == kindText ||
			(b.kind == exprList || b.kind == exprTuple) && !slices.ContainsFunc(b.args, func(e *expr) bool { return e.kind != exprConst })
		if !native {
			return w.helper(comparisonNames[op], helpCompare(op)) + "(" + w.expr(a) + ", " + w.iterator(b) + ")"
		}
	default:
		native = left == kindCount && right == kindCount || left == kindText && right == kindText
	}
	if native {
		return "(" + w.expr(a) + " " + op + " " + w.expr(b) + ")"
	}
	return w.helper(comparisonNames[op], helpCompare(op)) + "(" + w.expr(a) + ", " + w.expr(b) + ")"
}
