package template

import (
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"
)

// exprKind is what an expression of a template is.
type exprKind uint8

const (
	exprConst   exprKind = iota // value
	exprName                    // name
	exprList                    // args
	exprTuple                   // args
	exprDict                    // args: key, value, key, value
	exprAttr                    // args[0].name
	exprItem                    // args[0][args[1]]
	exprSlice                   // args: start, stop, step, each may be nil; only within exprItem
	exprCall                    // args[0](args[1:], kwargs)
	exprFilter                  // args[0]|name(args[1:], kwargs); args[0] is nil in {% filter %}
	exprTest                    // args[0] is name(args[1:], kwargs)
	exprNot                     // not args[0]
	exprSign                    // name is + or -
	exprBinary                  // name is + - * / // % **
	exprConcat                  // args joined by ~
	exprCompare                 // args[0] names[0] args[1] names[1] args[2] ...
	exprAnd                     // args[0] and args[1]
	exprOr                      // args[0] or args[1]
	exprCond                    // args: condition, then, else, which may be nil
	exprTarget                  // name.names[0], as a target of {% set %}
)

// expr is an expression of a template. The parser makes it; nobody changes it.
type expr struct {
	kind  exprKind
	name  string
	names []string
	args  []*expr
	// kwargs are keyword arguments; star and starStar what follows * and **.
	kwargs         []keyword
	star, starStar *expr
	value          constant
	line           int
}

type keyword struct {
	name  string
	value *expr
}

// constant is a literal: a string, int64, float64, bool or nil.
type constant any

// nodeKind is what a statement of a template is.
type nodeKind uint8

const (
	nodeText       nodeKind = iota // text
	nodeOutput                     // {{ expr }}
	nodeIf                         // expr, body, elifs, orElse
	nodeFor                        // target, expr, test, recursive, body, orElse
	nodeSet                        // target, expr
	nodeSetBlock                   // target, expr is the filters or nil, body
	nodeMacro                      // name, params, body
	nodeCall                       // params, expr, body
	nodeFilter                     // expr, body
	nodeWith                       // targets, values, body
	nodeGeneration                 // body
	nodeBreak
	nodeContinue
)

// node is a statement of a template. The parser makes it; nobody changes it.
type node struct {
	kind         nodeKind
	text, name   string
	target, expr *expr
	test         *expr
	recursive    bool
	params       []keyword // value is nil without a default
	body, orElse []*node
	elifs        []*node // nodeIf without elifs and orElse
	line         int
}

// maxNesting bounds how deep a template's brackets, operators and blocks may
// be nested, and so what recursion over it needs.
const maxNesting = 100

// parser builds a template's tree as Jinja's parser does. Compile makes
// one and is alone in using it. It leaves by panic(syntaxError), which parse
// recovers.
type parser struct {
	tokens []token
	pos    int
	depth  int
}

type syntaxError string

// parse returns the statements of a template.
func parse(source string) (nodes []*node, err error) {
	tokens, err := lex(source)
	if err != nil {
		return nil, err
	}
	defer func() {
		if r := recover(); r != nil {
			failed, ok := r.(syntaxError)
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("%s", string(failed))
		}
	}()
	p := &parser{tokens: tokens}
	nodes = p.statements()
	return nodes, nil
}

func (p *parser) fail(format string, args ...any) {
	panic(syntaxError(fmt.Sprintf("line %d: %s", p.line(), fmt.Sprintf(format, args...))))
}

func (p *parser) line() int {
	if len(p.tokens) == 0 {
		return 1
	}
	return p.tokens[min(p.pos, len(p.tokens)-1)].line
}

func (p *parser) enter() {
	if p.depth++; p.depth > maxNesting*8 {
		p.fail("nested too deep")
	}
}

func (p *parser) leave() { p.depth-- }

func (p *parser) look(ahead int) token {
	if p.pos+ahead < len(p.tokens) {
		return p.tokens[p.pos+ahead]
	}
	return token{}
}

func (p *parser) is(kind tokenKind, texts ...string) bool {
	t := p.look(0)
	return t.kind == kind && (len(texts) == 0 || slices.Contains(texts, t.text))
}

func (p *parser) operator(texts ...string) bool { return p.is(tokenOperator, texts...) }

func (p *parser) skip(kind tokenKind, text string) bool {
	if p.is(kind, text) {
		p.pos++
		return true
	}
	return false
}

func (p *parser) expect(kind tokenKind, texts ...string) token {
	if !p.is(kind, texts...) {
		p.fail("unexpected %q, expected %q", p.look(0).text, texts)
	}
	p.pos++
	return p.tokens[p.pos-1]
}

// statements reads up to a block tag that begins with one of the words, which
// it leaves to the caller, or up to the end if there are none.
func (p *parser) statements(words ...string) (nodes []*node) {
	p.enter()
	defer p.leave()
	for p.pos < len(p.tokens) {
		line := p.line()
		switch p.look(0).kind {
		case tokenData:
			nodes = append(nodes, &node{kind: nodeText, text: p.look(0).text, line: line})
			p.pos++
		case tokenOutput:
			p.pos++
			nodes = append(nodes, &node{kind: nodeOutput, expr: p.tuple(true, false), line: line})
			p.expect(tokenOutputEnd)
		default:
			p.expect(tokenBlock)
			if len(words) > 0 && p.is(tokenName, words...) {
				return nodes
			}
			nodes = append(nodes, p.statement()...)
			p.expect(tokenBlockEnd)
		}
	}
	if len(words) > 0 {
		p.fail("the template ends where %q is expected", words)
	}
	return nodes
}

// body reads a block's statements, from the end of its opening tag up to one
// of the words, which is taken.
func (p *parser) body(words ...string) ([]*node, string) {
	p.skip(tokenOperator, ":")
	p.expect(tokenBlockEnd)
	nodes := p.statements(words...)
	return nodes, p.expect(tokenName).text
}

func (p *parser) statement() []*node {
	line := p.line()
	word := p.expect(tokenName).text
	n := &node{line: line}
	switch word {
	case "if":
		return []*node{p.ifStatement()}
	case "for":
		n.kind = nodeFor
		n.target = p.target(false)
		p.expect(tokenName, "in")
		n.expr = p.tuple(false, false, "recursive")
		if p.skip(tokenName, "if") {
			n.test = p.expression()
		}
		n.recursive = p.skip(tokenName, "recursive")
		end := ""
		if n.body, end = p.body("endfor", "else"); end == "else" {
			n.orElse, _ = p.body("endfor")
		}
	case "set":
		n.target = p.target(true)
		if p.skip(tokenOperator, "=") {
			n.kind = nodeSet
			n.expr = p.tuple(true, false)
		} else {
			n.kind = nodeSetBlock
			n.expr = p.filters(nil)
			n.body, _ = p.body("endset")
		}
	case "macro":
		n.kind = nodeMacro
		n.name = p.expect(tokenName).text
		n.params = p.signature()
		n.body, _ = p.body("endmacro")
	case "call":
		n.kind = nodeCall
		if p.operator("(") {
			n.params = p.signature()
		}
		if n.expr = p.expression(); n.expr.kind != exprCall {
			p.fail("expected a call")
		}
		n.body, _ = p.body("endcall")
	case "filter":
		n.kind = nodeFilter
		n.expr = p.filters(p.filter(nil))
		n.body, _ = p.body("endfilter")
	case "with":
		n.kind = nodeWith
		for !p.is(tokenBlockEnd) {
			if len(n.params) > 0 {
				p.expect(tokenOperator, ",")
			}
			target := p.target(false)
			if target.kind != exprName {
				p.fail("a with block that unpacks is not followed")
			}
			p.expect(tokenOperator, "=")
			n.params = append(n.params, keyword{target.name, p.expression()})
		}
		n.body, _ = p.body("endwith")
	case "print":
		var nodes []*node
		for !p.is(tokenBlockEnd) {
			if len(nodes) > 0 {
				p.expect(tokenOperator, ",")
			}
			nodes = append(nodes, &node{kind: nodeOutput, expr: p.expression(), line: line})
		}
		return nodes
	case "generation":
		n.kind = nodeGeneration
		n.body, _ = p.body("endgeneration")
	case "break":
		n.kind = nodeBreak
	case "continue":
		n.kind = nodeContinue
	default:
		p.fail("the statement %q is not followed", word)
	}
	return []*node{n}
}

func (p *parser) ifStatement() *node {
	first := &node{kind: nodeIf, line: p.line(), expr: p.tuple(false, false)}
	branch := first
	for {
		end := ""
		branch.body, end = p.body("elif", "else", "endif")
		switch end {
		case "elif":
			branch = &node{kind: nodeIf, line: p.line(), expr: p.tuple(false, false)}
			first.elifs = append(first.elifs, branch)
			continue
		case "else":
			first.orElse, _ = p.body("endif")
		}
		return first
	}
}

// signature reads the parameters of a macro or of a call block.
func (p *parser) signature() (params []keyword) {
	p.expect(tokenOperator, "(")
	defaults := false
	for !p.operator(")") {
		if len(params) > 0 {
			p.expect(tokenOperator, ",")
		}
		param := keyword{name: p.expect(tokenName).text}
		if p.skip(tokenOperator, "=") {
			param.value = p.expression()
			defaults = true
		} else if defaults {
			p.fail("a parameter without a default follows one that has it")
		}
		params = append(params, param)
	}
	p.expect(tokenOperator, ")")
	return params
}

// target reads what {% set %} or {% for %} assigns to: a name, a tuple of
// names or, for set, an attribute of a namespace.
func (p *parser) target(set bool) *expr {
	e := p.tuple(false, true, "in")
	if e.kind == exprName && set && p.operator(".") {
		p.pos++
		return &expr{kind: exprTarget, name: e.name, names: []string{p.expect(tokenName).text}, line: e.line}
	}
	var check func(*expr)
	check = func(e *expr) {
		switch e.kind {
		case exprName:
		case exprTuple:
			for _, item := range e.args {
				check(item)
			}
		default:
			p.fail("cannot assign to this")
		}
	}
	check(e)
	return e
}

// tuple reads expressions with commas between them. simple allows only names
// and literals. An empty tuple needs parentheses around it: see primary.
func (p *parser) tuple(conditional, simple bool, ends ...string) *expr {
	line := p.line()
	var args []*expr
	isTuple := false
	for {
		if len(args) > 0 {
			p.expect(tokenOperator, ",")
		}
		if p.is(tokenOutputEnd) || p.is(tokenBlockEnd) || p.operator(")") || len(ends) > 0 && p.is(tokenName, ends...) {
			break
		}
		switch {
		case simple:
			args = append(args, p.primary())
		case conditional:
			args = append(args, p.expression())
		default:
			args = append(args, p.or())
		}
		if !p.operator(",") {
			break
		}
		isTuple = true
	}
	if !isTuple {
		if len(args) == 1 {
			return args[0]
		}
		p.fail("expected an expression")
	}
	return &expr{kind: exprTuple, args: args, line: line}
}

func (p *parser) expression() *expr {
	p.enter()
	defer p.leave()
	line := p.line()
	e := p.or()
	for p.skip(tokenName, "if") {
		condition := p.or()
		var otherwise *expr
		if p.skip(tokenName, "else") {
			otherwise = p.expression()
		}
		e = &expr{kind: exprCond, args: []*expr{condition, e, otherwise}, line: line}
	}
	return e
}

// left reads operands with operators between them that bind to the left.
func (p *parser) left(kind exprKind, tokens tokenKind, operators []string, operand func() *expr) *expr {
	line := p.line()
	e := operand()
	for n := 0; p.is(tokens, operators...); n++ {
		if n > maxNesting*4 {
			p.fail("too many operators in one expression")
		}
		name := p.look(0).text
		p.pos++
		e = &expr{kind: kind, name: name, args: []*expr{e, operand()}, line: line}
	}
	return e
}

func (p *parser) or() *expr  { return p.left(exprOr, tokenName, []string{"or"}, p.and) }
func (p *parser) and() *expr { return p.left(exprAnd, tokenName, []string{"and"}, p.not) }

func (p *parser) not() *expr {
	line := p.line()
	if p.skip(tokenName, "not") {
		p.enter()
		defer p.leave()
		return &expr{kind: exprNot, args: []*expr{p.not()}, line: line}
	}
	return p.compare()
}

func (p *parser) compare() *expr {
	e := &expr{kind: exprCompare, args: []*expr{p.sum()}, line: p.line()}
	for {
		switch {
		case p.operator("==", "!=", "<", "<=", ">", ">="):
			e.names = append(e.names, p.look(0).text)
			p.pos++
		case p.skip(tokenName, "in"):
			e.names = append(e.names, "in")
		case p.is(tokenName, "not") && p.look(1).kind == tokenName && p.look(1).text == "in":
			p.pos += 2
			e.names = append(e.names, "not in")
		default:
			if len(e.names) == 0 {
				return e.args[0]
			}
			return e
		}
		e.args = append(e.args, p.sum())
	}
}

func (p *parser) sum() *expr {
	return p.left(exprBinary, tokenOperator, []string{"+", "-"}, p.concat)
}

func (p *parser) concat() *expr {
	e := &expr{kind: exprConcat, args: []*expr{p.product()}, line: p.line()}
	for p.skip(tokenOperator, "~") {
		e.args = append(e.args, p.product())
	}
	if len(e.args) == 1 {
		return e.args[0]
	}
	return e
}

func (p *parser) product() *expr {
	return p.left(exprBinary, tokenOperator, []string{"*", "/", "//", "%"}, p.power)
}

func (p *parser) power() *expr {
	return p.left(exprBinary, tokenOperator, []string{"**"}, func() *expr { return p.unary(true) })
}

func (p *parser) unary(filters bool) *expr {
	p.enter()
	defer p.leave()
	var e *expr
	if line := p.line(); p.operator("-", "+") {
		name := p.look(0).text
		p.pos++
		e = &expr{kind: exprSign, name: name, args: []*expr{p.unary(false)}, line: line}
	} else {
		e = p.primary()
	}
	e = p.postfix(e)
	for filters {
		switch {
		case p.operator("|"):
			e = p.filters(e)
		case p.is(tokenName, "is"):
			e = p.testOf(e)
		case p.operator("("):
			e = p.call(e)
		default:
			return e
		}
	}
	return e
}

func (p *parser) primary() *expr {
	p.enter()
	defer p.leave()
	t := p.look(0)
	e := &expr{line: t.line}
	p.pos++
	switch t.kind {
	case tokenName:
		switch t.text {
		case "true", "True":
			e.value = true
		case "false", "False":
			e.value = false
		case "none", "None":
		default:
			e.kind, e.name = exprName, t.text
		}
		return e
	case tokenString:
		text := t.text
		for p.is(tokenString) {
			text += p.look(0).text
			p.pos++
		}
		e.value = text
		return e
	case tokenInteger:
		n, ok := new(big.Int).SetString(t.text, 0)
		if !ok || !n.IsInt64() {
			p.fail("the number %s is not followed", t.text)
		}
		e.value = n.Int64()
		return e
	case tokenFloat:
		f, err := strconv.ParseFloat(t.text, 64)
		if err != nil {
			p.fail("the number %s is not followed", t.text)
		}
		e.value = f
		return e
	case tokenOperator:
		switch t.text {
		case "(":
			if p.skip(tokenOperator, ")") {
				e.kind = exprTuple
				return e
			}
			e = p.tuple(true, false)
			p.expect(tokenOperator, ")")
			return e
		case "[":
			e.kind = exprList
			for !p.operator("]") {
				if len(e.args) > 0 {
					p.expect(tokenOperator, ",")
				}
				if p.operator("]") {
					break
				}
				e.args = append(e.args, p.expression())
			}
			p.expect(tokenOperator, "]")
			return e
		case "{":
			e.kind = exprDict
			for !p.operator("}") {
				if len(e.args) > 0 {
					p.expect(tokenOperator, ",")
				}
				if p.operator("}") {
					break
				}
				key := p.expression()
				p.expect(tokenOperator, ":")
				e.args = append(e.args, key, p.expression())
			}
			p.expect(tokenOperator, "}")
			return e
		}
	}
	p.pos--
	p.fail("unexpected %q", t.text)
	return nil
}

func (p *parser) postfix(e *expr) *expr {
	for n := 0; ; n++ {
		if n > maxNesting*4 {
			p.fail("nested too deep")
		}
		line := p.line()
		switch {
		case p.skip(tokenOperator, "."):
			t := p.look(0)
			p.pos++
			switch t.kind {
			case tokenName:
				e = &expr{kind: exprAttr, name: t.text, args: []*expr{e}, line: line}
			case tokenInteger:
				n, err := strconv.ParseInt(t.text, 0, 64)
				if err != nil {
					p.fail("the number %s is not followed", t.text)
				}
				e = &expr{kind: exprItem, args: []*expr{e, {value: n, line: line}}, line: line}
			default:
				p.fail("expected a name or a number behind the dot")
			}
		case p.skip(tokenOperator, "["):
			var keys []*expr
			for !p.operator("]") {
				if len(keys) > 0 {
					p.expect(tokenOperator, ",")
				}
				keys = append(keys, p.subscript())
			}
			p.expect(tokenOperator, "]")
			key := &expr{kind: exprTuple, args: keys, line: line}
			if len(keys) == 1 {
				key = keys[0]
			}
			e = &expr{kind: exprItem, args: []*expr{e, key}, line: line}
		case p.operator("("):
			e = p.call(e)
		default:
			return e
		}
	}
}

func (p *parser) subscript() *expr {
	e := &expr{kind: exprSlice, args: make([]*expr, 3), line: p.line()}
	if !p.operator(":") {
		e.args[0] = p.expression()
		if !p.operator(":") {
			return e.args[0]
		}
	}
	for i := 1; i < 3 && p.skip(tokenOperator, ":"); i++ {
		if !p.operator(":", "]", ",") {
			e.args[i] = p.expression()
		}
	}
	return e
}

func (p *parser) call(callee *expr) *expr {
	e := &expr{kind: exprCall, args: []*expr{callee}, line: p.line()}
	p.arguments(e)
	return e
}

// arguments reads a call's arguments and appends them to e's.
func (p *parser) arguments(e *expr) {
	p.expect(tokenOperator, "(")
	for first := true; !p.operator(")"); first = false {
		if !first {
			p.expect(tokenOperator, ",")
			if p.operator(")") {
				break
			}
		}
		next := p.look(1)
		switch {
		case p.operator("*"):
			if e.star != nil || e.starStar != nil {
				p.fail("invalid arguments")
			}
			p.pos++
			e.star = p.expression()
		case p.operator("**"):
			if e.starStar != nil {
				p.fail("invalid arguments")
			}
			p.pos++
			e.starStar = p.expression()
		case p.is(tokenName) && next.kind == tokenOperator && next.text == "=":
			if e.starStar != nil {
				p.fail("invalid arguments")
			}
			name := p.expect(tokenName).text
			p.pos++
			for _, k := range e.kwargs {
				if k.name == name {
					p.fail("the argument %s is given twice", name)
				}
			}
			e.kwargs = append(e.kwargs, keyword{name, p.expression()})
		default:
			if e.star != nil || e.starStar != nil || len(e.kwargs) > 0 {
				p.fail("invalid arguments")
			}
			e.args = append(e.args, p.expression())
		}
	}
	p.expect(tokenOperator, ")")
}

// filters reads all of |a|b(c) that follow.
func (p *parser) filters(e *expr) *expr {
	for n := 0; p.skip(tokenOperator, "|"); n++ {
		if n > maxNesting {
			p.fail("too many filters in one expression")
		}
		e = p.filter(e)
	}
	return e
}

func (p *parser) filter(input *expr) *expr {
	e := &expr{kind: exprFilter, args: []*expr{input}, line: p.line()}
	e.name = p.dotted()
	if p.operator("(") {
		p.arguments(e)
	}
	return e
}

func (p *parser) dotted() string {
	name := p.expect(tokenName).text
	for p.skip(tokenOperator, ".") {
		name += "." + p.expect(tokenName).text
	}
	return name
}

func (p *parser) testOf(input *expr) *expr {
	e := &expr{kind: exprTest, args: []*expr{input}, line: p.line()}
	p.pos++ // is
	negated := p.skip(tokenName, "not")
	e.name = p.dotted()
	switch t := p.look(0); {
	case p.operator("("):
		p.arguments(e)
	case t.kind == tokenString, t.kind == tokenInteger, t.kind == tokenFloat, p.operator("[", "{"),
		t.kind == tokenName && t.text != "else" && t.text != "or" && t.text != "and":
		if t.kind == tokenName && t.text == "is" {
			p.fail("tests cannot be chained")
		}
		e.args = append(e.args, p.postfix(p.primary()))
	}
	if negated {
		return &expr{kind: exprNot, args: []*expr{e}, line: e.line}
	}
	return e
}

// walk calls visit for e and all expressions in it, from the outside.
func (e *expr) walk(visit func(*expr)) {
	if e == nil {
		return
	}
	visit(e)
	for _, a := range e.args {
		a.walk(visit)
	}
	for _, k := range e.kwargs {
		k.value.walk(visit)
	}
	e.star.walk(visit)
	e.starStar.walk(visit)
}

// walkNodes calls statement for all nodes, and expression for all expressions
// in them. Either may be nil.
func walkNodes(nodes []*node, statement func(*node), expression func(*expr)) {
	for _, n := range nodes {
		if statement != nil {
			statement(n)
		}
		if expression != nil {
			for _, e := range []*expr{n.target, n.expr, n.test} {
				e.walk(expression)
			}
			for _, p := range n.params {
				p.value.walk(expression)
			}
		}
		walkNodes(n.body, statement, expression)
		walkNodes(n.elifs, statement, expression)
		walkNodes(n.orElse, statement, expression)
	}
}

// literal spells a string so that the library reads it back.
func literal(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}
