package simulator

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// form is what an answer must look like: one of some texts, or JSON that a
// schema allows.
type form struct {
	texts  []string
	schema jsontext.Value
	// sample is a value that schema allows.
	sample []byte
}

// fill returns what v says in the form.
func (f *form) fill(v voice) []byte {
	if f.texts != nil {
		return []byte(f.texts[v.at(0)%uint64(len(f.texts))])
	}
	out, err := newExample(f.schema, v).append(nil, f.schema, 0)
	if err != nil {
		// Another voice has gone deeper than the one that newForm tried.
		return f.sample
	}
	return out
}

// newForm returns the form of a schema in the member param, if it can be
// filled.
func newForm(param string, schema jsontext.Value) (*form, error) {
	sample, err := newExample(schema, voice{}).append(nil, schema, 0)
	if err != nil {
		return nil, badParameter(param, "The simulated engine cannot follow the JSON schema: %v.", err)
	}
	return &form{schema: schema, sample: sample}, nil
}

// anyObject is the schema of what json_object gets.
var anyObject = jsontext.Value(`{"properties":{"answer":{"type":"string"},"confidence":{"type":"number","minimum":0,"maximum":1}}}`)

// readForm reads the members response_format and structured_outputs. nil is
// any text.
func readForm(format, structured jsontext.Value) (*form, error) {
	if len(structured) > 0 && structured.Kind() != 'n' {
		if len(format) > 0 && format.Kind() != 'n' {
			return nil, badParameter("structured_outputs", "Cannot specify both structured_outputs and response_format.")
		}
		var b struct {
			JSON   jsontext.Value `json:"json"`
			Choice []string       `json:"choice"`
			Object *bool          `json:"json_object"`
			Others others         `json:",embed"`
		}
		if json.Unmarshal(structured, &b, lenient) != nil {
			return nil, invalid("structured_outputs", "structured_outputs must be an object")
		}
		for name := range b.Others {
			if b.Others.refuse(name) != nil {
				return nil, badParameter("structured_outputs", "The simulated engine does not support `structured_outputs.%s`.", name)
			}
		}
		switch {
		case len(b.JSON) > 0 && b.JSON.Kind() == '"':
			var text string
			if json.Unmarshal(b.JSON, &text) != nil || !jsontext.Value(text).IsValid() {
				return nil, badParameter("structured_outputs", "structured_outputs.json is not a JSON schema.")
			}
			return newForm("structured_outputs", jsontext.Value(text))
		case len(b.JSON) > 0 && b.JSON.Kind() != 'n':
			return newForm("structured_outputs", b.JSON)
		case len(b.Choice) > 0:
			if slices.Contains(b.Choice, "") {
				return nil, badParameter("structured_outputs", "structured_outputs.choice must not hold an empty text.")
			}
			return &form{texts: b.Choice}, nil
		case b.Object != nil && *b.Object:
			return newForm("structured_outputs", anyObject)
		}
		return nil, badParameter("structured_outputs", "structured_outputs must have json, choice or json_object.")
	}
	if len(format) == 0 || format.Kind() == 'n' {
		return nil, nil
	}
	var f struct {
		Type   string `json:"type"`
		Schema *struct {
			Schema jsontext.Value `json:"schema"`
		} `json:"json_schema"`
	}
	if json.Unmarshal(format, &f, lenient) != nil {
		return nil, invalid("response_format", "response_format must be an object with a type")
	}
	if f.Schema == nil {
		return formOf("response_format", f.Type, nil)
	}
	return formOf("response_format", f.Type, f.Schema.Schema)
}

// formOf returns the form of a format by its type.
func formOf(param, kind string, schema jsontext.Value) (*form, error) {
	switch {
	case kind == "text":
		return nil, nil
	case kind == "json_object":
		return newForm(param, anyObject)
	case kind == "json_schema" && len(schema) > 0 && schema.Kind() != 'n':
		return newForm(param, schema)
	case kind == "json_schema":
		return nil, badParameter(param, "When %s type is 'json_schema', a schema must be provided.", param)
	}
	return nil, badParameter(param, "The simulated engine does not support the %s type %q.", param, kind)
}

// example writes JSON that a schema allows. What the schema leaves open is a
// function of the voice. It is used once.
type example struct {
	root jsontext.Value
	v    voice
	// draws counts the random numbers used, steps the schemas followed.
	draws, steps int
}

func newExample(root jsontext.Value, v voice) *example { return &example{root: root, v: v, draws: 1} }

func (e *example) random(n int) int {
	e.draws++
	return int(mix(e.v.at(e.draws)+3) % uint64(n))
}

// Depths of nesting: below leanDepth only what must be there is written, and
// maxExampleDepth ends a schema that never does.
const (
	leanDepth       = 4
	maxExampleDepth = 24
	maxExampleSteps = 10000
	maxExampleItems = 64
	maxExampleRunes = 4096
)

// keywords are those of a schema that append knows or that say nothing of the
// value.
var keywords = []string{"$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default",
	"examples", "deprecated", "readOnly", "writeOnly", "type", "enum", "const", "anyOf", "oneOf", "allOf", "properties",
	"required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "format",
	"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "nullable", "strict", "propertyOrdering",
	"patternProperties", "unevaluatedProperties"}

// member is one of an object, in the order of its text.
type member struct {
	name  string
	value jsontext.Value
}

func members(v jsontext.Value) []member {
	if v.Kind() != '{' {
		return nil
	}
	dec := jsontext.NewDecoder(bytes.NewReader(v), jsontext.AllowDuplicateNames(true))
	if _, err := dec.ReadToken(); err != nil {
		return nil
	}
	var list []member
	for dec.PeekKind() == '"' {
		name, err := dec.ReadToken()
		if err != nil {
			return nil
		}
		m := member{name: name.String()}
		value, err := dec.ReadValue()
		if err != nil {
			return nil
		}
		m.value = value.Clone()
		list = append(list, m)
	}
	return list
}

func (e *example) append(dst []byte, schema jsontext.Value, depth int) ([]byte, error) {
	if depth > maxExampleDepth {
		return nil, fmt.Errorf("it is nested deeper than %d levels", maxExampleDepth)
	}
	if e.steps++; e.steps > maxExampleSteps {
		return nil, fmt.Errorf("it has more than %d parts", maxExampleSteps)
	}
	switch schema.Kind() {
	case 't':
		return appendString(dst, e.words(1)), nil
	case '{':
	default:
		return nil, fmt.Errorf("%.40s is not a schema that a value can satisfy", schema)
	}
	k := map[string]jsontext.Value{}
	for _, m := range members(schema) {
		if !slices.Contains(keywords, m.name) {
			return nil, fmt.Errorf("the keyword %q is not supported", m.name)
		}
		k[m.name] = m.value
	}
	if v, ok := k["$ref"]; ok {
		target, err := e.resolve(v)
		if err != nil {
			return nil, err
		}
		return e.append(dst, target, depth+1)
	}
	if v, ok := k["const"]; ok {
		return append(dst, compact(v)...), nil
	}
	for _, name := range []string{"enum", "anyOf", "oneOf", "allOf"} {
		v, ok := k[name]
		if !ok {
			continue
		}
		var list []jsontext.Value
		if json.Unmarshal(v, &list, lenient) != nil || len(list) == 0 {
			return nil, fmt.Errorf("%s must be a list that is not empty", name)
		}
		switch {
		case name == "enum":
			return append(dst, compact(list[e.random(len(list))])...), nil
		case name == "allOf" && len(list) > 1:
			return nil, errors.New("allOf with several schemas is not supported")
		case depth < leanDepth:
			return e.append(dst, list[e.random(len(list))], depth+1)
		}
		var err error
		for _, option := range list {
			var out []byte
			if out, err = e.append(dst, option, depth+1); err == nil {
				return out, nil
			}
		}
		return nil, err
	}
	kind, err := e.kind(k)
	if err != nil {
		return nil, err
	}
	switch kind {
	case "object":
		return e.appendObject(dst, k, depth)
	case "array":
		return e.appendArray(dst, k, depth)
	case "string":
		return e.appendText(dst, k)
	case "integer", "number":
		return e.appendNumber(dst, k, kind == "integer")
	case "boolean":
		return strconv.AppendBool(dst, e.random(2) == 0), nil
	case "null":
		return append(dst, "null"...), nil
	}
	return nil, fmt.Errorf("the type %q is unknown", kind)
}

// kind returns the type of the value to write.
func (e *example) kind(k map[string]jsontext.Value) (string, error) {
	v, ok := k["type"]
	switch {
	case !ok && k["properties"] != nil:
		return "object", nil
	case !ok && (k["items"] != nil || k["prefixItems"] != nil):
		return "array", nil
	case !ok && (k["minimum"] != nil || k["maximum"] != nil || k["multipleOf"] != nil):
		return "number", nil
	case !ok:
		return "string", nil
	}
	var one string
	if json.Unmarshal(v, &one) == nil {
		return one, nil
	}
	var list []string
	if json.Unmarshal(v, &list) != nil || len(list) == 0 {
		return "", fmt.Errorf("type must be a text or a list of texts, not %.40s", v)
	}
	return list[e.random(len(list))], nil
}

func (e *example) appendObject(dst []byte, k map[string]jsontext.Value, depth int) ([]byte, error) {
	var required []string
	if v, ok := k["required"]; ok && json.Unmarshal(v, &required) != nil {
		return nil, errors.New("required must be a list of names")
	}
	properties := members(k["properties"])
	for _, name := range required {
		if !slices.ContainsFunc(properties, func(m member) bool { return m.name == name }) {
			properties = append(properties, member{name, jsontext.Value("true")})
		}
	}
	dst = append(dst, '{')
	first := true
	for _, p := range properties {
		if depth >= leanDepth && !slices.Contains(required, p.name) {
			continue
		}
		if !first {
			dst = append(dst, ", "...)
		}
		first = false
		dst = append(appendString(dst, p.name), ": "...)
		var err error
		if dst, err = e.append(dst, p.value, depth+1); err != nil {
			return nil, err
		}
	}
	return append(dst, '}'), nil
}

func (e *example) appendArray(dst []byte, k map[string]jsontext.Value, depth int) ([]byte, error) {
	least, most, err := between(k, "minItems", "maxItems", maxExampleItems)
	if err != nil {
		return nil, err
	}
	n := least
	if depth < leanDepth {
		n = min(most, max(least, 1)+e.random(2))
	}
	var prefix []jsontext.Value
	if v, ok := k["prefixItems"]; ok {
		if json.Unmarshal(v, &prefix, lenient) != nil {
			return nil, errors.New("prefixItems must be a list of schemas")
		}
		n = min(most, max(least, len(prefix)))
	}
	items, ok := k["items"]
	if !ok {
		items = jsontext.Value("true")
	}
	dst = append(dst, '[')
	for i := range n {
		if i > 0 {
			dst = append(dst, ", "...)
		}
		item := items
		if i < len(prefix) {
			item = prefix[i]
		}
		if dst, err = e.append(dst, item, depth+1); err != nil {
			return nil, err
		}
	}
	return append(dst, ']'), nil
}

func (e *example) appendText(dst []byte, k map[string]jsontext.Value) ([]byte, error) {
	var format string
	_ = json.Unmarshal(k["format"], &format)
	switch format {
	case "date":
		return fmt.Appendf(dst, `"20%02d-%02d-%02d"`, e.random(100), 1+e.random(12), 1+e.random(28)), nil
	case "time":
		return fmt.Appendf(dst, `"%02d:%02d:%02dZ"`, e.random(24), e.random(60), e.random(60)), nil
	case "date-time":
		return fmt.Appendf(dst, `"20%02d-%02d-%02dT%02d:%02d:%02dZ"`, e.random(100), 1+e.random(12), 1+e.random(28),
			e.random(24), e.random(60), e.random(60)), nil
	case "email":
		return fmt.Appendf(dst, `"user%d@example.com"`, e.random(1000)), nil
	case "uri", "url":
		return fmt.Appendf(dst, `"https://example.com/%d"`, e.random(1000)), nil
	case "uuid":
		return fmt.Appendf(dst, `"%08x-%04x-4%03x-8%03x-%012x"`, e.random(1<<32), e.random(1<<16), e.random(1<<12), e.random(1<<12), e.random(1<<48)), nil
	case "ipv4":
		return fmt.Appendf(dst, `"192.0.2.%d"`, e.random(256)), nil
	case "":
	default:
		return nil, fmt.Errorf("the format %q is not supported", format)
	}
	least, most, err := between(k, "minLength", "maxLength", maxExampleRunes)
	if err != nil {
		return nil, err
	}
	text := []rune(e.words(1 + e.random(3)))
	for len(text) < least {
		text = append(text, []rune(" "+e.words(1))...)
	}
	return appendString(dst, string(text[:min(len(text), most)])), nil
}

func (e *example) appendNumber(dst []byte, k map[string]jsontext.Value, whole bool) ([]byte, error) {
	low, high := math.Inf(-1), math.Inf(1)
	step := 0.0
	for name, value := range k {
		var x float64
		switch name {
		case "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf":
			if json.Unmarshal(value, &x) != nil {
				return nil, fmt.Errorf("%s must be a number", name)
			}
		}
		switch name {
		case "minimum":
			low = max(low, x)
		case "maximum":
			high = min(high, x)
		case "exclusiveMinimum":
			low = max(low, math.Nextafter(x, math.Inf(1)))
		case "exclusiveMaximum":
			high = min(high, math.Nextafter(x, math.Inf(-1)))
		case "multipleOf":
			step = x
		}
	}
	switch {
	case math.IsInf(low, -1) && math.IsInf(high, 1):
		low, high = 0, 100
	case math.IsInf(low, -1):
		low = high - 100
	case math.IsInf(high, 1):
		high = low + 100
	}
	if step == 0 && whole {
		step = 1
	}
	if step <= 0 {
		if low > high {
			return nil, fmt.Errorf("no number is between %v and %v", low, high)
		}
		return strconv.AppendFloat(dst, min(high, low+(high-low)*float64(e.random(1001))/1000), 'g', -1, 64), nil
	}
	from, to := math.Ceil(low/step), math.Floor(high/step)
	if from > to || to-from > 1e15 || whole && step != math.Trunc(step) {
		return nil, fmt.Errorf("no multiple of %v can be found between %v and %v", step, low, high)
	}
	return strconv.AppendFloat(dst, (from+float64(e.random(int(to-from)+1)))*step, 'f', -1, 64), nil
}

// between reads two keywords that bound a length.
func between(k map[string]jsontext.Value, least, most string, limit int) (int, int, error) {
	low, high := 0, limit
	for name, into := range map[string]*int{least: &low, most: &high} {
		if v, ok := k[name]; ok {
			if json.Unmarshal(v, into) != nil || *into < 0 {
				return 0, 0, fmt.Errorf("%s must be a whole number", name)
			}
		}
	}
	if low > min(high, limit) {
		return 0, 0, fmt.Errorf("%s %d is above %s or %d", least, low, most, limit)
	}
	return low, min(high, limit), nil
}

// words returns n words of letters.
func (e *example) words(n int) string {
	var list []string
	for range n {
		w := strings.TrimRight(words[e.random(len(words))].text, " ")
		if len(w) < 2 {
			w = "word"
		}
		list = append(list, w)
	}
	return strings.Join(list, " ")
}

// resolve returns the schema that a reference within the root points to.
func (e *example) resolve(ref jsontext.Value) (jsontext.Value, error) {
	var path string
	if json.Unmarshal(ref, &path) != nil || !strings.HasPrefix(path, "#") {
		return nil, fmt.Errorf("the reference %.80s does not begin with #", ref)
	}
	at := e.root
	for name := range strings.SplitSeq(strings.TrimPrefix(path, "#"), "/") {
		if name == "" {
			continue
		}
		name = strings.NewReplacer("~1", "/", "~0", "~").Replace(name)
		list := members(at)
		i := slices.IndexFunc(list, func(m member) bool { return m.name == name })
		if i < 0 {
			return nil, fmt.Errorf("the reference %q leads nowhere", path)
		}
		at = list[i].value
	}
	return at, nil
}

// compact returns v without white space.
func compact(v jsontext.Value) []byte {
	c := v.Clone()
	if c.Compact(jsontext.AllowDuplicateNames(true)) != nil {
		return v
	}
	return c
}
