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
	macros     map[string]*node          // defined once, and never anything else
	namespaces map[*node]map[string]bool // only ever namespace(...), by macro
	assigned   map[string]bool           // by set or as a parameter
	markup     map[string]bool           // a value marked as safe
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
	// run is what is to be written next, with the arguments printed; runs are
	// those before. captured counts the blocks around whose text the library
	// gathers.
	run      []segment
	printed  []string
	runs     [][]segment
	captured int
	// mayBeMarkup is whether the expression that is written next may be marked
	// as safe, without its use telling that from a string.
	mayBeMarkup bool
}

// binding is a name that a scope around binds.
type binding struct {
	name string
	// definite is whether it is never undefined; loop whether it is a loop's
	// variable "loop", whose items are unpacked to so many variables.
	definite, loop bool
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
		helpers: map[string]helper{}, macros: map[string]*node{}, namespaces: map[*node]map[string]bool{},
		assigned: map[string]bool{}, passed: map[string][]int{}, set: map[string]bool{},
		markup: map[string]bool{}, given: map[*node]map[string]bool{},
	}
	twice := map[string]bool{}
	walkNodes(nodes, func(n *node) {
		switch n.kind {
		case nodeSet, nodeSetBlock:
			n.target.walk(func(e *expr) {
				if e.kind == exprName {
					w.assigned[e.name] = true
				}
			})
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
	for name := range w.macros {
		if w.assigned[name] || twice[name] {
			delete(w.macros, name)
			w.assigned[name] = true
		}
	}
	w.findNamespaces(nil, nodes)
	for w.findMarkup(nodes) {
	}
	for w.findGiven(nodes) {
	}
	return w
}

// findNamespaces notes the variables that nodes, which are in a macro or
// outside of all, only ever assign a namespace. What is assigned in a macro is
// its own.
func (w *rewriter) findNamespaces(in *node, nodes []*node) {
	found, others := map[string]bool{}, map[string]bool{}
	var collect func([]*node)
	collect = func(nodes []*node) {
		for _, n := range nodes {
			switch {
			case n.kind == nodeMacro:
				w.findNamespaces(n, n.body)
				continue
			case n.kind == nodeSet && n.target.kind == exprName && isCallOf(n.expr, "namespace"):
				found[n.target.name] = true
			case n.kind == nodeSet, n.kind == nodeSetBlock:
				n.target.walk(func(e *expr) {
					if e.kind == exprName {
						others[e.name] = true
					}
				})
			}
			collect(n.body)
			collect(n.elifs)
			collect(n.orElse)
		}
	}
	collect(nodes)
	own := map[string]bool{} // false for what is something else here
	for name := range found {
		own[name] = !others[name] && !isParameter(in, name)
	}
	for name := range others {
		own[name] = false
	}
	w.namespaces[in] = own
}

// holdsNamespace reports whether a variable that no loop binds holds a
// namespace in a macro, or outside of all.
func (w *rewriter) holdsNamespace(in *node, name string) bool {
	if own, ok := w.namespaces[in][name]; ok {
		return own
	}
	return !isParameter(in, name) && w.namespaces[nil][name]
}

func isCallOf(e *expr, name string) bool {
	return e.kind == exprCall && e.args[0].kind == exprName && e.args[0].name == name
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
	case exprBinary:
		return e.name == "+" && slices.ContainsFunc(e.args, w.isMarkup)
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
				if (w.given[in][a.name] || w.holdsNamespace(in, a.name)) && !w.given[macro][name] {
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
	return w.holdsNamespace(w.inMacro, e.name)
}

// macro returns the macro that e names, nil for none.
func (w *rewriter) macro(e *expr) *node {
	if e.kind != exprName || w.find(e.name) != nil {
		return nil
	}
	return w.macros[e.name]
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
	w.flush()
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
	w.flush()
	w.out.WriteString("{%+ ")
	fmt.Fprintf(&w.out, format, args...)
	w.out.WriteString(" +%}")
}

// evaluate writes an expression whose value is of no interest.
func (w *rewriter) evaluate(e string) {
	w.flush()
	w.out.WriteString("{{ " + e + " }}")
}

// segment is part of a run: what a template writes in one go.
type segment struct {
	text string // what is written, unless it is an argument
	// argument is whether the next argument is written instead; onlyText
	// whether that must be a string, as it is added to one.
	argument, onlyText bool
}

// text writes s.
func (w *rewriter) text(s string) {
	if s == "" {
		return
	}
	if n := len(w.run); n > 0 && !w.run[n-1].argument {
		w.run[n-1].text += s
		return
	}
	w.run = append(w.run, segment{text: s})
}

// print writes what an expression of the library's yields.
func (w *rewriter) print(e string, onlyText bool) {
	w.run = append(w.run, segment{argument: true, onlyText: onlyText})
	w.printed = append(w.printed, e)
}

// flush writes the run that has been gathered. Outside of what is captured the
// text goes straight to the rendering, and the library writes nothing.
func (w *rewriter) flush() {
	if len(w.run) == 0 {
		return
	}
	name := w.helper("write", helpWrite)
	if w.captured > 0 {
		name = w.helper("text", helpText)
	}
	w.out.WriteString("{{ " + strings.Join(append([]string{name + "(" + strconv.Itoa(len(w.runs))}, w.printed...), ", ") + ") }}")
	w.runs = append(w.runs, w.run)
	w.run, w.printed = nil, nil
}

func (w *rewriter) temp() int {
	w.temps++
	return w.temps
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
		w.scoped(n.body)
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
	name := w.gather(func() { w.scoped(nodes) })
	w.print(chain(name), true)
}

// gather writes a block whose text the library gathers in a variable, and
// returns its name.
func (w *rewriter) gather(write func()) string {
	name := fmt.Sprintf("__body%d", w.temp())
	w.gatherTo(name, write)
	return name
}

func (w *rewriter) gatherTo(name string, write func()) {
	w.tag("set %s", name)
	w.captured++
	write()
	w.flush()
	w.captured--
	w.tag("endset")
}

// scoped writes nodes in a scope of their own.
func (w *rewriter) scoped(nodes []*node) {
	w.tag("call %s()", w.helper("with", helpWith))
	w.nested++
	w.within(nodes, false)
	w.nested--
	w.tag("endcall")
}

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
	bound := binding{name: "loop", loop: true, definite: true}
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
	if len(targets) == 0 || len(targets) == 1 && n.target.kind == exprTuple {
		w.refuse(n.line, "a loop that unpacks to one variable")
	}
	if isGroups(n.expr) && len(targets) != 2 {
		w.refuse(n.line, "a group that is not unpacked")
	}
	soft := w.soft
	w.soft = false
	iterable := w.iterate(n.expr, bound)
	target := strings.Join(spelled, ", ")
	if len(targets) > 2 {
		target = fmt.Sprintf("__item%d", w.temp())
	}
	if bound.pairs > 0 && !isPairs(n.expr) || w.iterates(n.expr) == generator {
		// Python would not see what is wrong with an item behind the break.
		walkNodes(n.body, func(n *node) {
			if n.kind == nodeBreak {
				w.refuse(n.line, "a break in a loop that unpacks or computes its items")
			}
		}, nil)
	}
	if n.orElse != nil {
		// Jinja takes a loop for empty unless an iteration comes to its end.
		walkNodes(n.body, func(n *node) {
			if n.kind == nodeBreak || n.kind == nodeContinue {
				w.refuse(n.line, "a break or continue in a loop with an else")
			}
		}, nil)
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
	if fields, ok := w.loopFields(n); ok {
		w.each(n, spelled, fields, names)
		w.soft = soft
		return
	}
	write := func() {
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
	}
	if n.recursive {
		w.print(w.gather(write), true)
	} else {
		write()
	}
	w.soft = soft
}

// loopFields returns which fields of "loop" a loop's body uses. ok is false
// when the loop must be one of the library's: it does more, or the library
// gathers its text.
func (w *rewriter) loopFields(n *node) (fields []string, ok bool) {
	if w.captured > 0 || n.recursive || n.test != nil || n.orElse != nil {
		return nil, false
	}
	ok = true
	mentioned, asField := 0, 0
	walkNodes(n.body, func(n *node) {
		ok = ok && n.kind != nodeBreak && n.kind != nodeContinue
	}, func(e *expr) {
		if e.kind == exprName && e.name == "loop" {
			mentioned++
		}
		if e.kind == exprAttr && e.args[0].kind == exprName && e.args[0].name == "loop" {
			if _, known := loopFields[e.name]; known && e.name != "depth" && e.name != "depth0" {
				asField++
				if !slices.Contains(fields, e.name) {
					fields = append(fields, e.name)
				}
			}
		}
	})
	return fields, ok && mentioned == asField
}

// each writes a loop as a call block, which does less for each item than a loop
// of the library's.
func (w *rewriter) each(n *node, targets, fields []string, bound []binding) {
	helper := "each"
	if len(targets) > 1 {
		helper += strconv.Itoa(len(targets))
	}
	if len(fields) > 0 {
		slices.Sort(fields)
		targets = append(targets, "loop")
	}
	helper = w.helper(strings.Join(append([]string{helper}, fields...), "_"), helpEach(bound[0].pairs, fields))
	w.tag("call(%s) %s(%s)", strings.Join(targets, ", "), helper, w.iterator(n.expr))
	w.nested++
	w.within(n.body, false, bound...)
	w.nested--
	w.tag("endcall")
}

// isPairs reports whether an expression yields pairs only.
func isPairs(e *expr) bool {
	return e.kind == exprCall && e.args[0].kind == exprAttr && e.args[0].name == "items" ||
		e.kind == exprFilter && (e.name == "items" || e.name == "dictsort")
}

// isGroups reports whether e yields what groupby returns: pairs that have
// names for their parts.
func isGroups(e *expr) bool { return e.kind == exprFilter && e.name == "groupby" }

// iterate returns an expression for what a loop goes through.
func (w *rewriter) iterate(e *expr, loop binding) string {
	name := "iterate"
	if loop.pairs > 0 {
		name += strconv.Itoa(loop.pairs)
	}
	return w.helper(name, helpIterate(loop.pairs)) + "(" + w.iterator(e) + ")"
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
		if isCallOf(n.expr, "namespace") && w.find(name) == nil && w.holdsNamespace(w.inMacro, name) {
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
	w.gatherTo(rename(name), func() { w.scoped(n.body) })
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
	w.evaluate(w.helper("enter", helpEnter) + "()")
	w.captured++
	w.within(n.body, false, bound...)
	w.flush()
	w.captured--
	w.evaluate(w.helper("leave", helpLeave) + "()")
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
		call = "(" + strings.Join(params, ", ") + ") " + call
	}
	w.print(w.gather(func() {
		w.tag("call %s", call)
		w.nested++
		w.within(n.body, false, bound...)
		w.nested--
		w.tag("endcall")
	}), true)
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
		if operands := sum(e); operands != nil && w.isText(operands) && !w.isMarkup(e) {
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
	w.print(w.markupExpr(e), false)
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
	case e.kind == exprBinary && w.kind(e) == kindText && !w.isMarkup(e):
		for _, part := range sum(e) {
			w.textOutput(part)
		}
	case w.kind(e) == kindText:
		w.output(e)
	default:
		w.print(w.expr(e), true)
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
	return w.helper("attr", helpAttr) + "(" + w.expr(object) + ", " + literal(e.name) + ")"
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
		return w.helper("slice", helpSlice) + "(" + w.expr(object) + ", " + strings.Join(bounds, ", ") + ")"
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
	return w.helper("item", helpItem) + "(" + w.expr(object) + ", " + w.expr(key) + ")"
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
	return w.helper("call", helpCall) + "(" + w.expr(object) + ", " + literal(name) + args + ")"
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
			return w.filterCall(input, w.helper("first", helpFirst)+"("+w.filterInput(input)+")")
		}
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
		if w.isMarkup(e) {
			return w.markupSum(operands)
		}
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
	return w.helper("add_markup", helpAddMarkup) + "(" + strings.Join(list, ", ") + ")"
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
			return w.helper(comparisonNames[op], helpCompare(op)) + "(" + w.expr(a) + ", " + w.iterator(b) + ")"
		}
	default:
		native = left == kindCount && right == kindCount || left == kindText && right == kindText
	}
	if native {
		return "(" + operand(a) + " " + op + " " + operand(b) + ")"
	}
	return w.helper(comparisonNames[op], helpCompare(op)) + "(" + operand(a) + ", " + operand(b) + ")"
}
