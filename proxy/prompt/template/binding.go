package template

import "slices"

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

func newRewriter(nodes []*node) *rewriter {
	w := &rewriter{
		operations: map[string]operation{}, macros: map[string]*node{}, namespaces: map[*node]map[string]bool{},
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
