package template

import "github.com/ardanlabs/jinja"

// comparisons are the tests that are operators.
var comparisons = map[string]string{
	"==": "==", "eq": "==", "equalto": "==", "!=": "!=", "ne": "!=",
	">": ">", "gt": ">", "greaterthan": ">", ">=": ">=", "ge": ">=",
	"<": "<", "lt": "<", "lessthan": "<", "<=": "<=", "le": "<=", "in": "in",
}

// plainTests are those without arguments, but for defined and undefined.
var plainTests = names("odd even none boolean false true integer float lower upper string mapping number sequence iterable callable")

// otherTests are those of Jinja that are not followed.
var otherTests = names("filter test escaped")

// test is Jinja's: v is name(args).
func (r *rendering) test(name string, v jinja.Value, args []jinja.Value) (bool, error) {
	op, comparison := comparisons[name]
	want := 0
	if comparison || name == "divisibleby" || name == "sameas" {
		want = 1
	}
	if len(args) != want {
		return false, raised("the test %s takes %d arguments, %d given", name, want, len(args))
	}
	if comparison {
		return compare(op, v, args[0])
	}
	switch name {
	case "defined":
		return !v.IsUndefined(), nil
	case "undefined":
		return v.IsUndefined(), nil
	case "none":
		return v.IsNone(), nil
	case "boolean":
		return v.IsBool(), nil
	case "true":
		return v.IsBool() && v.AsBool(), nil
	case "false":
		return v.IsBool() && !v.AsBool(), nil
	case "integer":
		return v.IsInt() || isHuge(v), nil
	case "float":
		return v.IsFloat(), nil
	case "number":
		return isNumber(v) || isHuge(v), nil
	case "string":
		return v.IsString(), nil
	case "mapping":
		return v.IsDict(), nil
	case "sequence", "iterable":
		return v.IsString() || v.IsList() || v.IsDict() || v.IsUndefined(), nil
	case "callable":
		// Undefined has a __call__, which fails when it is called.
		return v.IsCallable() && !isHuge(v) || v.IsUndefined(), nil
	case "lower", "upper":
		s, err := textOf(v)
		if err != nil {
			return false, err
		}
		is, err := r.plainText(s, "is"+name)
		return is.IsTruthy(), err
	case "odd", "even", "divisibleby":
		by := jinja.NewInt(2)
		if name == "divisibleby" {
			by = args[0]
		}
		if v.IsString() || v.IsUndefined() {
			if v.IsUndefined() {
				return false, errUndefined()
			}
			return false, unfollowed("a string that is divided")
		}
		rest, err := arithmetic("%", v, by)
		if err != nil {
			return false, err
		}
		zero := rest.Equals(jinja.NewInt(0))
		if name == "odd" {
			return rest.Equals(jinja.NewInt(1)), nil
		}
		return zero, nil
	case "sameas":
		if v.IsBool() && args[0].IsBool() || v.IsNone() && args[0].IsNone() {
			return v.Equals(args[0]), nil
		}
		if (v.IsBool() || v.IsNone()) != (args[0].IsBool() || args[0].IsNone()) || typeName(v) != typeName(args[0]) {
			return false, nil
		}
		return false, unfollowed("whether two values are the same object")
	}
	if otherTests[name] {
		return false, unfollowed("the test %s", name)
	}
	return false, raised("No test named %q.", name)
}
