package simulator

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// tool is a function that the model may call.
type tool struct {
	Name       string         `json:"name"`
	Parameters jsontext.Value `json:"parameters"`
}

// call is that a choice calls one of some tools.
type call struct{ tools []tool }

// pick returns the tool that v calls.
func (c *call) pick(v voice) *tool { return &c.tools[v.at(0)%uint64(len(c.tools))] }

// arguments returns what v calls t with: a JSON text. Where the parameters ask
// for what cannot be made it is an empty object: a model is free to err.
func (t *tool) arguments(v voice) []byte {
	if len(t.Parameters) == 0 || t.Parameters.Kind() != '{' {
		return []byte("{}")
	}
	out, err := newExample(t.Parameters, v).append(nil, t.Parameters, 0)
	if err != nil || out[0] != '{' {
		return []byte("{}")
	}
	return out
}

// toolID names the one call that a choice makes.
func (c *choice) toolID() string { return fmt.Sprintf("chatcmpl-tool-%016x", mix(c.voice.seed+2)) }

// readTools reads the member tools of a chat.
func readTools(v jsontext.Value) ([]tool, error) {
	if v.Kind() == jsontext.KindInvalid || v.Kind() == 'n' {
		return nil, nil
	}
	var list []struct {
		Type     string `json:"type"`
		Function *tool  `json:"function"`
	}
	if json.Unmarshal(v, &list, lenient) != nil {
		return nil, invalid("tools", "tools must be a list of objects with a type and a function")
	}
	if len(list) == 0 {
		return nil, badParameter("tools", "`tools` must not be an empty list.")
	}
	var tools []tool
	for i, t := range list {
		if t.Type != "function" || t.Function == nil || t.Function.Name == "" {
			return nil, invalid("tools."+strconv.Itoa(i), "a tool must have the type function and a function with a name")
		}
		tools = append(tools, *t.Function)
	}
	return tools, nil
}

// chooseTool reads the member tool_choice and returns what the choices may
// call, or nil when they say something. answered: the last message is what a
// tool has answered, to which a model that is free says something.
func chooseTool(tools []tool, v jsontext.Value, answered bool) (*call, error) {
	mode := "auto"
	switch v.Kind() {
	case jsontext.KindInvalid, 'n':
	case '"':
		if json.Unmarshal(v, &mode) != nil || !slices.Contains([]string{"none", "auto", "required"}, mode) {
			return nil, badParameter("tool_choice", "Invalid value for `tool_choice`: %s. Only named tools, \"none\", \"auto\" or \"required\" are supported.", v)
		}
	default:
		var named struct {
			Function *struct {
				Name string `json:"name"`
			} `json:"function"`
		}
		if json.Unmarshal(v, &named, lenient) != nil || named.Function == nil {
			return nil, badParameter("tool_choice", "Invalid value for `tool_choice`: %s. A named tool is an object with a function and its name.", v)
		}
		i := slices.IndexFunc(tools, func(t tool) bool { return t.Name == named.Function.Name })
		if i < 0 {
			return nil, badParameter("tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`.")
		}
		return &call{tools[i : i+1]}, nil
	}
	switch {
	case mode == "none":
		return nil, nil
	case len(tools) == 0 && len(v) > 0 && v.Kind() != 'n':
		return nil, badParameter("tool_choice", "When using `tool_choice`, `tools` must be set.")
	case len(tools) == 0 || mode == "auto" && answered:
		return nil, nil
	}
	return &call{tools}, nil
}

// appendCalls appends the member tool_calls of a message.
func (c *choice) appendCalls(dst []byte) []byte {
	dst = append(dst, `,"tool_calls":[{"id":`...)
	dst = appendString(dst, c.toolID())
	dst = append(dst, `,"type":"function","function":{"name":`...)
	dst = appendString(dst, c.call.Name)
	dst = append(dst, `,"arguments":`...)
	dst = appendString(dst, c.text())
	return append(dst, "}}]"...)
}

// appendCallDelta appends the member delta of the next chunk: with the first
// token what is called, with each further one a piece of the arguments.
func (c *choice) appendCallDelta(dst []byte) []byte {
	dst = append(dst, `,"delta":{"tool_calls":[{`...)
	if c.sent == 0 {
		dst = append(dst, `"id":`...)
		dst = appendString(dst, c.toolID())
		dst = append(dst, `,"type":"function","index":0,"function":{"name":`...)
		dst = appendString(dst, c.call.Name)
		return append(dst, `,"arguments":""}}]}`...)
	}
	dst = append(dst, `"index":0,"function":{"arguments":"`...)
	dst = c.appendEscaped(dst, c.sent)
	return append(dst, `"}}]}`...)
}

// invalid is a refusal of a value's type, as vLLM's validation words it.
func invalid(param, problem string) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "Bad Request", param: strings.TrimSuffix("body."+param, "."), message: "1 validation error: " + problem}
}
