package template

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// rewriter writes a template anew for the library: see template. Compile
// makes one and is alone in using it. It leaves by panic(refusal), which
// rewrite recovers.
type rewriter struct {
	out        strings.Builder
	operations map[string]operation
	clock      bool

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

type refusal string

// operationDict is the operation for dict(), which the library must know.
const operationDict = "__dict"

// libraryGlobals are names that the library knows by itself.
var libraryGlobals = names("namespace raise_exception range joiner dict cycler strftime_now")

// reserved are names that mean something else to Jinja or to the library.
var reserved = names("not and or if else in is for elif recursive self super lipsum cycler joiner kwargs")

// rename spells a variable so that the library does not take it for a literal.
func rename(name string) string {
	if name == "null" {
		return "null__variable"
	}
	return name
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

// operation makes sure that an operation is there and returns its name.
func (w *rewriter) operation(name string, h operation) string {
	name = "__" + name
	w.operations[name] = h
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
	name := w.operation("write", opWrite)
	if w.captured > 0 {
		name = w.operation("text", opText)
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
		w.tag("call(%s) %s(%s)", strings.Join(targets, ", "), w.operation("with", opWith), strings.Join(values, ", "))
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
	w.tag("call %s()", w.operation("with", opWith))
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
	operation := "each"
	if len(targets) > 1 {
		operation += strconv.Itoa(len(targets))
	}
	if len(fields) > 0 {
		slices.Sort(fields)
		targets = append(targets, "loop")
	}
	operation = strings.Join(append([]string{operation}, fields...), "_")
	guard := ""
	namespace, attribute, guarded := w.guard(n)
	if guarded {
		operation += "_while"
		guard = fmt.Sprintf(", %s, %s", rename(namespace), `"`+attribute+`"`)
	}
	operation = w.operation(operation, opEach(bound[0].pairs, fields, guarded))
	w.tag("call(%s) %s(%s%s)", strings.Join(targets, ", "), operation, w.iterator(n.expr), guard)
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
	return w.operation(name, opIterate(loop.pairs)) + "(" + w.iterator(e) + ")"
}

// yieldsUndefined reports whether iterating over e may yield undefined values.
// No list or dict holds any: see opOwn and newList.
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
			w.tag("set %s = %s(%s)", rename(name), w.operation("namespace", opNamespace), w.arguments(nil, call.kwargs))
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
		unpack := w.operation(fmt.Sprintf("unpack%d", len(targets)), opUnpack(len(targets)))
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
	w.evaluate(w.operation("enter", opEnter) + "()")
	w.captured++
	w.within(n.body, false, bound...)
	w.flush()
	w.captured--
	w.evaluate(w.operation("leave", opLeave) + "()")
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
