package template

import "slices"

// contentFormat tells what vLLM makes of messages' contents for a template:
// "openai", a list of parts, when the template loops over the contents of
// messages, otherwise "string". As in vLLM, an assignment that the search cannot
// read ends it.
func contentFormat(nodes []*node) string {
	messages, ok := aliases(nodes, "messages")
	if !ok {
		return "string"
	}
	var message []string
	loops := loopsIn(nodes)
	for _, n := range loops {
		if slices.ContainsFunc(messages, func(name string) bool { return reaches(n.expr, name, "") }) {
			if n.target.kind != exprName {
				return "string"
			}
			message = append(message, n.target.name)
		}
	}
	content := func(e *expr) bool {
		return slices.ContainsFunc(message, func(name string) bool { return reaches(e, name, "content") })
	}

	// A macro's parameter holds contents when a call passes them to it.
	inMacro := map[*node]map[string]bool{}
	walkNodes(nodes, func(macro *node) {
		if macro.kind != nodeMacro {
			return
		}
		params := map[string]bool{}
		walkNodes(nodes, nil, func(call *expr) {
			if call.kind != exprCall || call.args[0].kind != exprName || call.args[0].name != macro.name {
				return
			}
			for i, arg := range call.args[1:] {
				if i < len(macro.params) && content(arg) {
					params[macro.params[i].name] = true
				}
			}
			for _, k := range call.kwargs {
				if content(k.value) && slices.ContainsFunc(macro.params, func(p keyword) bool { return p.name == k.name }) {
					params[k.name] = true
				}
			}
		})
		for _, n := range loopsIn(macro.body) {
			if inMacro[n] == nil || len(params) > 0 {
				inMacro[n] = params
			}
		}
	}, nil)

	for _, n := range loops {
		params, macro := inMacro[n]
		name := ""
		if n.expr.kind == exprName {
			name = n.expr.name
		}
		if content(n.expr) || params[name] || !macro && name == "content" {
			if n.target.kind != exprName {
				return "string"
			}
			return "openai"
		}
	}
	return "string"
}

// aliases returns name and the names that are assigned its value or part of
// it. ok is false when something other than a name is assigned that.
func aliases(nodes []*node, name string) (names []string, ok bool) {
	names = []string{name}
	ok = true
	for i := 0; i < len(names); i++ {
		walkNodes(nodes, func(n *node) {
			if n.kind != nodeSet || !reaches(n.expr, names[i], "") {
				return
			}
			if n.target.kind != exprName {
				ok = false
			} else if !slices.Contains(names, n.target.name) {
				names = append(names, n.target.name)
			}
		}, nil)
	}
	return names, ok
}

// reaches reports whether e is the variable, or its attribute if one is named,
// or a slice, a filter or a test of that.
func reaches(e *expr, name, attr string) bool {
	switch {
	case e == nil:
		return false
	case e.kind == exprFilter, e.kind == exprTest, e.kind == exprItem && e.args[1].kind == exprSlice:
		return reaches(e.args[0], name, attr)
	case attr == "":
		return e.kind == exprName && e.name == name
	case e.kind == exprItem:
		return e.args[1].kind == exprConst && e.args[1].value == constant(attr) && reaches(e.args[0], name, "") && e.args[0].kind == exprName
	case e.kind == exprAttr:
		return e.name == attr && e.args[0].kind == exprName && e.args[0].name == name
	}
	return false
}

// loopsIn returns all loops in nodes, outer ones first.
func loopsIn(nodes []*node) (loops []*node) {
	walkNodes(nodes, func(n *node) {
		if n.kind == nodeFor {
			loops = append(loops, n)
		}
	}, nil)
	return loops
}
