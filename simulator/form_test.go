package simulator

import (
	"encoding/json"
	"encoding/json/jsontext"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"unicode/utf8"
)

// TestFormFollowsSchema: for random schemas every voice says what a plain
// reading of the schema allows, and the tokens of a choice make up that text.
func TestFormFollowsSchema(t *testing.T) {
	filled := 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 1))
		schema := randomSchema(r, 0)
		text, err := json.Marshal(schema)
		if err != nil {
			t.Fatal(err)
		}
		f, err := newForm("response_format", jsontext.Value(text))
		if err != nil {
			continue
		}
		filled++
		for voiceSeed := range uint64(5) {
			out := f.fill(voice{seed: mix(voiceSeed)})
			var v any
			if err := json.Unmarshal(out, &v); err != nil || !allows(schema, v) {
				t.Fatalf("seed %d: %s says %s, %v", seed, text, out, err)
			}
			said := ""
			for _, token := range tokensOf(string(out)) {
				said += token
			}
			if said != string(out) || len(tokensOf(said)) != countTokens(said) {
				t.Fatalf("%q in tokens is %q", out, said)
			}
		}
	}
	if filled < 300 {
		t.Errorf("only %d schemas of 400 were followed", filled)
	}
}

func randomSchema(r *rand.Rand, depth int) map[string]any {
	kinds := []string{"string", "integer", "number", "boolean", "null", "enum", "const", "object", "array", "anyOf"}
	if depth > 3 {
		kinds = kinds[:7]
	}
	switch kind := kinds[r.IntN(len(kinds))]; kind {
	case "string":
		s := map[string]any{"type": "string"}
		if r.IntN(2) == 0 {
			s["minLength"] = float64(r.IntN(5))
			s["maxLength"] = float64(5 + r.IntN(30))
		}
		return s
	case "integer", "number":
		s := map[string]any{"type": kind}
		if r.IntN(2) == 0 {
			s["minimum"] = float64(r.IntN(20) - 10)
		}
		if r.IntN(2) == 0 {
			s["exclusiveMaximum"] = float64(12 + r.IntN(20))
		}
		if r.IntN(3) == 0 {
			s["multipleOf"] = float64(1 + r.IntN(5))
		}
		return s
	case "enum":
		return map[string]any{"enum": []any{"a", 1.0, nil, map[string]any{"x": true}}[:1+r.IntN(4)]}
	case "const":
		return map[string]any{"const": fmt.Sprint(r.IntN(9))}
	case "object":
		properties, required := map[string]any{}, []any{}
		for i := range r.IntN(4) {
			name := fmt.Sprintf("p%d", i)
			properties[name] = randomSchema(r, depth+1)
			if r.IntN(2) == 0 {
				required = append(required, name)
			}
		}
		return map[string]any{"type": "object", "properties": properties, "required": required, "additionalProperties": false}
	case "array":
		return map[string]any{"type": "array", "items": randomSchema(r, depth+1), "minItems": float64(r.IntN(3)), "maxItems": float64(3 + r.IntN(3))}
	case "anyOf":
		return map[string]any{"anyOf": []any{randomSchema(r, depth+1), randomSchema(r, depth+1)}}
	default:
		return map[string]any{"type": kind}
	}
}

// allows is what the keywords that randomSchema uses mean.
func allows(schema map[string]any, v any) bool {
	number := func(name string, otherwise float64) float64 {
		if x, ok := schema[name].(float64); ok {
			return x
		}
		return otherwise
	}
	same := func(a, b any) bool { return fmt.Sprintf("%#v", a) == fmt.Sprintf("%#v", b) }
	if options, ok := schema["anyOf"].([]any); ok {
		return slices.ContainsFunc(options, func(o any) bool { return allows(o.(map[string]any), v) })
	}
	if options, ok := schema["enum"].([]any); ok {
		return slices.ContainsFunc(options, func(o any) bool { return same(o, v) })
	}
	if c, ok := schema["const"]; ok {
		return same(c, v)
	}
	switch x := v.(type) {
	case string:
		n := float64(utf8.RuneCountInString(x))
		return schema["type"] == "string" && n >= number("minLength", 0) && n <= number("maxLength", 1e9)
	case float64:
		whole := x == float64(int64(x))
		step := number("multipleOf", 0)
		return (schema["type"] == "number" || schema["type"] == "integer" && whole) &&
			x >= number("minimum", -1e9) && x < number("exclusiveMaximum", 1e9) &&
			(step == 0 || x/step == float64(int64(x/step)))
	case bool:
		return schema["type"] == "boolean"
	case nil:
		return schema["type"] == "null"
	case []any:
		n := float64(len(x))
		return schema["type"] == "array" && n >= number("minItems", 0) && n <= number("maxItems", 1e9) &&
			!slices.ContainsFunc(x, func(item any) bool { return !allows(schema["items"].(map[string]any), item) })
	case map[string]any:
		properties, _ := schema["properties"].(map[string]any)
		for name, value := range x {
			p, ok := properties[name].(map[string]any)
			if !ok || !allows(p, value) {
				return false
			}
		}
		required, _ := schema["required"].([]any)
		for _, name := range required {
			if _, ok := x[name.(string)]; !ok {
				return false
			}
		}
		return schema["type"] == "object"
	}
	return false
}

func TestFormFailure(t *testing.T) {
	f := func(schema string) {
		t.Helper()
		if form, err := newForm("response_format", jsontext.Value(schema)); err == nil {
			t.Errorf("%s is said to allow %s", schema, form.sample)
		}
	}
	f(`false`)
	f(`7`)
	f(`{"type":"thing"}`)
	f(`{"type":[]}`)
	f(`{"enum":[]}`)
	f(`{"$ref":"#/$defs/none"}`)
	f(`{"$ref":"http://example.com/schema"}`)
	f(`{"$ref":"#"}`)
	f(`{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}`)
	f(`{"type":"object","properties":{"a":{"$ref":"#"},"b":{"$ref":"#"}},"required":["b","a"]}`)
	f(`{"type":"array","items":{"anyOf":[{"$ref":"#"},{"$ref":"#"}]},"minItems":2}`)
	f(`{"type":"integer","minimum":3,"maximum":2}`)
	f(`{"type":"integer","minimum":1,"maximum":4,"multipleOf":5}`)
	f(`{"type":"string","minLength":9,"maxLength":2}`)
	f(`{"type":"string","format":"sonnet"}`)
	f(`{"not":{"type":"string"}}`)
	f(`{"allOf":[{"type":"string"},{"minLength":2}]}`)
	f(`{"type":"object","required":"a"}`)
}
