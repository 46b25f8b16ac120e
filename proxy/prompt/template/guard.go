package template

import (
	"math"
	"strings"
)

// guard returns the attribute of a namespace without which an iteration of the
// loop n does nothing: templates look for the last message of a kind so, and
// note in the namespace that they have found it. ok is false when there is none.
//
// When an iteration has ended and the attribute is false, no later iteration
// does anything, for
//
//   - the body is assignments to names, which end with the iteration, and behind
//     them one if that has no else. Its condition is the attribute, or a
//     conjunction that begins with it: neither the rest of the condition nor the
//     body of the if is looked at once it is false;
//   - so nothing in a later iteration can make it true again: the assignments
//     are to names, and the namespace is a variable from outside of the loop,
//     which no assignment within the loop reaches;
//   - the assignments cannot fail where those of the iteration before did not.
//     They add up numbers of loop, lengths of variables from outside of the loop,
//     and constants, all far from the bounds of numbers.
func (w *rewriter) guard(n *node) (namespace, attribute string, ok bool) {
	if n.target.kind != exprName {
		return "", "", false
	}
	inner := map[string]bool{n.target.name: true, "loop": true}
	walkNodes(n.body, func(n *node) {
		if n.kind == nodeSet || n.kind == nodeSetBlock {
			n.target.walk(func(e *expr) {
				if e.kind == exprName {
					inner[e.name] = true
				}
			})
		}
	}, nil)
	var condition *node
	for _, n := range n.body {
		switch {
		case n.kind == nodeText && n.text == "":
		case condition != nil:
			return "", "", false
		case n.kind == nodeSet && n.target.kind == exprName && cannotFailLater(n.expr, inner):
		case n.kind == nodeIf && n.elifs == nil && n.orElse == nil:
			condition = n
		default:
			return "", "", false
		}
	}
	if condition == nil {
		return "", "", false
	}
	e := condition.expr
	for e.kind == exprAnd {
		e = e.args[0]
	}
	if e.kind != exprAttr || strings.HasPrefix(e.name, "_") || !w.isNamespace(e.args[0]) || inner[e.args[0].name] {
		return "", "", false
	}
	return e.args[0].name, e.name, true
}

// cannotFailLater reports whether an expression in a loop's body fails in no
// iteration but the first, and does nothing. inner are the names that the loop
// binds.
func cannotFailLater(e *expr, inner map[string]bool) bool {
	switch e.kind {
	case exprConst:
		n, ok := e.value.(int64)
		return ok && n >= math.MinInt32 && n <= math.MaxInt32
	case exprAttr:
		if e.args[0].kind != exprName || e.args[0].name != "loop" {
			return false
		}
		switch e.name {
		case "index", "index0", "revindex", "revindex0", "length":
			return true
		}
	case exprFilter:
		return (e.name == "length" || e.name == "count") && len(e.args) == 1 && len(e.kwargs) == 0 &&
			e.star == nil && e.starStar == nil && e.args[0].kind == exprName && !inner[e.args[0].name]
	case exprBinary:
		return (e.name == "+" || e.name == "-") && cannotFailLater(e.args[0], inner) && cannotFailLater(e.args[1], inner)
	}
	return false
}
