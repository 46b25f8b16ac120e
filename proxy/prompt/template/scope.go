package template

import "maps"

// load is where a name in a scope comes from when the scope is entered, as
// Jinja's compiler finds it out.
type load uint8

const (
	loadParameter load = iota
	loadResolve        // from the variables given to the template
	loadAlias          // from a scope around it
	loadUndefined
)

// scope tells which names a scope of a template refers to. undeclared makes
// them; the zero value is not usable.
type scope struct {
	parent *scope
	loads  map[string]load // of the names it refers to
	stores map[string]bool
}

func newScope(parent *scope) *scope {
	return &scope{parent: parent, loads: map[string]load{}, stores: map[string]bool{}}
}

func (s *scope) knows(name string) bool {
	for ; s != nil; s = s.parent {
		if _, ok := s.loads[name]; ok {
			return true
		}
	}
	return false
}

func (s *scope) load(name string) {
	if !s.knows(name) {
		s.loads[name] = loadResolve
	}
}

func (s *scope) parameter(name string) {
	s.stores[name] = true
	s.loads[name] = loadParameter
}

func (s *scope) store(name string) {
	s.stores[name] = true
	if _, ok := s.loads[name]; ok {
		return
	}
	s.loads[name] = loadUndefined
	if s.parent.knows(name) {
		s.loads[name] = loadAlias
	}
}

func (s *scope) copy() *scope {
	return &scope{s.parent, maps.Clone(s.loads), maps.Clone(s.stores)}
}

// merge adds what the branches of an if refer to. A name that only branches
// assign may come from outside.
func (s *scope) merge(branches ...*scope) {
	before := maps.Clone(s.stores)
	for _, b := range branches {
		maps.Copy(s.loads, b.loads)
		maps.Copy(s.stores, b.stores)
	}
	for name := range s.stores {
		if before[name] {
			continue
		}
		s.loads[name] = loadResolve
		if s.parent.knows(name) {
			s.loads[name] = loadAlias
		}
	}
}

// undeclared returns the names that a template may look up in the variables it
// is given, as jinja2.meta.find_undeclared_variables does, but for globals
// being among them.
func undeclared(nodes []*node) map[string]bool {
	names := map[string]bool{}
	root := newScope(nil)
	root.loads["self"] = loadParameter
	u := undeclaredNames{names}
	root.visit(nodes)
	u.enter(root, nodes)
	return names
}

type undeclaredNames struct{ names map[string]bool }

// enter notes what s resolves, and goes into the scopes within it, which see
// its names.
func (u undeclaredNames) enter(s *scope, nodes []*node) {
	for name, from := range s.loads {
		if from == loadResolve {
			u.names[name] = true
		}
	}
	delete(u.names, "self")
	u.inner(s, nodes)
}

func (u undeclaredNames) inner(s *scope, nodes []*node) {
	for _, n := range nodes {
		switch n.kind {
		case nodeIf:
			u.inner(s, n.body)
			u.inner(s, n.elifs)
			u.inner(s, n.orElse)
		case nodeFor:
			if n.test != nil {
				test := newScope(s)
				test.assign(n.target, true)
				test.expr(n.test)
				u.enter(test, nil)
			}
			body := newScope(s)
			if n.recursive || usesLoop(n.body) {
				body.parameter("loop")
			}
			body.assign(n.target, true)
			body.visit(n.body)
			u.enter(body, n.body)
			otherwise := newScope(s)
			otherwise.visit(n.orElse)
			u.enter(otherwise, n.orElse)
		case nodeMacro, nodeCall:
			body := newScope(s)
			for _, special := range []string{"caller", "kwargs", "varargs"} {
				if mentions(n.body, special) {
					body.parameter(special)
				}
			}
			for _, p := range n.params {
				body.parameter(p.name)
			}
			for _, p := range n.params {
				body.expr(p.value)
			}
			body.visit(n.body)
			u.enter(body, n.body)
		case nodeWith:
			body := newScope(s)
			for _, p := range n.params {
				body.parameter(p.name)
			}
			body.visit(n.body)
			u.enter(body, n.body)
		case nodeSetBlock, nodeFilter, nodeGeneration:
			body := newScope(s)
			body.visit(n.body)
			u.enter(body, n.body)
		}
	}
}

// visit notes the names in nodes, but not in the scopes within them.
func (s *scope) visit(nodes []*node) {
	for _, n := range nodes {
		switch n.kind {
		case nodeOutput, nodeFor, nodeCall, nodeFilter:
			s.expr(n.expr)
		case nodeIf:
			s.expr(n.expr)
			body, elifs, otherwise := s.copy(), s.copy(), s.copy()
			body.visit(n.body)
			elifs.visit(n.elifs)
			otherwise.visit(n.orElse)
			s.merge(body, elifs, otherwise)
		case nodeSet:
			s.expr(n.expr)
			s.assign(n.target, false)
		case nodeSetBlock:
			s.assign(n.target, false)
		case nodeMacro:
			s.store(n.name)
		case nodeWith:
			for _, p := range n.params {
				s.expr(p.value)
			}
		}
	}
}

func (s *scope) expr(e *expr) {
	e.walk(func(e *expr) {
		if e.kind == exprName {
			s.load(e.name)
		}
	})
}

func (s *scope) assign(target *expr, parameter bool) {
	target.walk(func(e *expr) {
		switch {
		case e.kind == exprTarget:
			s.load(e.name)
		case e.kind == exprName && parameter:
			s.parameter(e.name)
		case e.kind == exprName:
			s.store(e.name)
		}
	})
}

// mentions reports whether nodes refer to a name anywhere, scopes within them
// included.
func mentions(nodes []*node, name string) bool {
	found := false
	walkNodes(nodes, nil, func(e *expr) { found = found || e.kind == exprName && e.name == name })
	return found
}

func usesLoop(nodes []*node) bool { return mentions(nodes, "loop") }
