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

// responsesBody is the body of a request to the Responses API as far as it is
// understood; an answer repeats much of it.
type responsesBody struct {
	Model           *string        `json:"model"`
	Input           jsontext.Value `json:"input"`
	Instructions    *string        `json:"instructions"`
	MaxOutputTokens *int           `json:"max_output_tokens"`
	MaxToolCalls    jsontext.Value `json:"max_tool_calls"`
	Metadata        jsontext.Value `json:"metadata"`
	Parallel        *bool          `json:"parallel_tool_calls"`
	Temperature     jsontext.Value `json:"temperature"`
	TopP            jsontext.Value `json:"top_p"`
	ToolChoice      jsontext.Value `json:"tool_choice"`
	Tools           jsontext.Value `json:"tools"`
	Reasoning       jsontext.Value `json:"reasoning"`
	ServiceTier     *string        `json:"service_tier"`
	Text            jsontext.Value `json:"text"`
	Truncation      *string        `json:"truncation"`
	User            jsontext.Value `json:"user"`
	Stop            jsontext.Value `json:"stop"`
	Structured      jsontext.Value `json:"structured_outputs"`
	Stream          *bool          `json:"stream"`
	Background      *bool          `json:"background"`
	Previous        *string        `json:"previous_response_id"`
	RequestID       *string        `json:"request_id"`
	CacheSalt       *string        `json:"cache_salt"`
	xargs
	Others others `json:",embed"`

	// limit is the most tokens of the answer.
	limit int
}

// parseResponses reads the body of POST /v1/responses.
func parseResponses(cfg *Config, body []byte) (*request, error) {
	b := &responsesBody{}
	if err := unmarshal(body, b); err != nil {
		return nil, err
	}
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	r := &request{api: responses, n: 1, usage: true, responses: b, adapter: cfg.adapter(b.Model), salt: b.CacheSalt, stream: b.Stream != nil && *b.Stream}
	if b.Background != nil && *b.Background || b.Previous != nil && *b.Previous != "" {
		return nil, badParameter("store", "The simulated engine stores no responses: "+
			"`background` and `previous_response_id` are not supported.")
	}
	if err := b.Others.refuse("prompt", "top_logprobs", "include", "previous_response", "previous_input_messages", "conversation",
		"enable_response_messages", "include_stop_str_in_output"); err != nil {
		return nil, err
	}
	if b.Truncation != nil && *b.Truncation != "disabled" {
		return nil, badParameter("truncation", "The simulated engine does not support `truncation` %q.", *b.Truncation)
	}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	tools, err := b.tools()
	if err != nil {
		return nil, err
	}
	text, answered, err := b.render()
	if err != nil {
		return nil, err
	}
	r.prompts = []prompt{textPrompt(text)}
	if r.call, err = chooseTool(tools, b.choice(), answered); err != nil {
		return nil, err
	}
	if r.stop, err = readStop("stop", b.Stop); err != nil {
		return nil, err
	}
	if r.form, err = b.form(); err != nil {
		return nil, err
	}
	left, err := r.room(cfg)
	if err != nil {
		return nil, err
	}
	// What is asked beyond the context is cut.
	if b.MaxOutputTokens != nil && *b.MaxOutputTokens > left {
		b.MaxOutputTokens = &left
	}
	if err := r.limitOutput(cfg, "max_output_tokens", b.MaxOutputTokens, nil); err != nil {
		return nil, err
	}
	b.limit = left
	if b.MaxOutputTokens != nil {
		b.limit = *b.MaxOutputTokens
	}
	return r, nil
}

// tools reads the tools, whose function is not an object of its own here.
func (b *responsesBody) tools() ([]tool, error) {
	if len(b.Tools) == 0 || b.Tools.Kind() == 'n' {
		return nil, nil
	}
	var list []struct {
		Type string `json:"type"`
		tool
	}
	if json.Unmarshal(b.Tools, &list, lenient) != nil {
		return nil, invalid("tools", "tools must be a list of objects with a type")
	}
	var tools []tool
	for i, t := range list {
		if t.Type != "function" {
			return nil, badParameter("tools", "The simulated engine does not support tools of the type %q.", t.Type)
		}
		if t.Name == "" {
			return nil, invalid("tools."+strconv.Itoa(i)+".name", "field required: name")
		}
		tools = append(tools, t.tool)
	}
	return tools, nil
}

// choice returns tool_choice in the form that a chat has.
func (b *responsesBody) choice() jsontext.Value {
	if b.ToolChoice.Kind() != '{' {
		if len(b.Tools) <= len("[]") {
			return nil // "auto" is what it is when nothing is sent
		}
		return b.ToolChoice
	}
	var named struct {
		Name string `json:"name"`
	}
	_ = json.Unmarshal(b.ToolChoice, &named, lenient)
	return jsontext.Value(`{"function":{"name":` + string(appendString(nil, named.Name)) + `}}`)
}

// form reads text.format.
func (b *responsesBody) form() (*form, error) {
	if len(b.Text) == 0 || b.Text.Kind() == 'n' {
		return readForm(nil, b.Structured)
	}
	var text struct {
		Format *struct {
			Type   string         `json:"type"`
			Schema jsontext.Value `json:"schema"`
		} `json:"format"`
	}
	if json.Unmarshal(b.Text, &text, lenient) != nil {
		return nil, invalid("text", "text must be an object")
	}
	if text.Format == nil {
		return readForm(nil, b.Structured)
	}
	if len(b.Structured) > 0 && b.Structured.Kind() != 'n' {
		return nil, badParameter("structured_outputs", "Cannot specify both structured_outputs and text.format")
	}
	return formOf("text.format", text.Format.Type, text.Format.Schema)
}

// render renders the input as a chat and reports whether it ends in what a
// tool has answered.
func (b *responsesBody) render() (string, bool, error) {
	wrong := invalid("input", "input must be a string or a list of items")
	var text strings.Builder
	if len(b.Tools) > len("[]") && b.Tools.Kind() != 'n' {
		text.WriteString("<|tools|>\n" + string(b.Tools) + "\n")
	}
	if b.Instructions != nil {
		text.WriteString("<|system|>\n" + *b.Instructions + "\n")
	}
	answered := false
	switch b.Input.Kind() {
	case jsontext.KindInvalid, 'n':
		return "", false, missing("input")
	case '"':
		var s string
		if json.Unmarshal(b.Input, &s) != nil {
			return "", false, wrong
		}
		text.WriteString("<|user|>\n" + s + "\n")
	case '[':
		var items []struct {
			Type      string         `json:"type"`
			Role      string         `json:"role"`
			Content   jsontext.Value `json:"content"`
			Name      string         `json:"name"`
			Arguments string         `json:"arguments"`
			Output    jsontext.Value `json:"output"`
		}
		if json.Unmarshal(b.Input, &items, lenient) != nil {
			return "", false, wrong
		}
		for i, item := range items {
			answered = false
			role, content := item.Role, item.Content
			switch item.Type {
			case "", "message":
				if role == "" {
					return "", false, missing(fmt.Sprintf("input.%d.role", i))
				}
			case "function_call":
				text.WriteString("<|tool_calls|>\n" + item.Name + " " + item.Arguments + "\n")
				continue
			case "function_call_output":
				role, content, answered = "tool", item.Output, true
			case "reasoning":
				role = "reasoning"
			default:
				return "", false, badParameter("input", "The simulated engine does not support input items of the type %q.", item.Type)
			}
			said, err := contentText(content)
			if err != nil {
				return "", false, invalid(fmt.Sprintf("input.%d.content", i), err.Error())
			}
			text.WriteString("<|" + role + "|>\n" + said + "\n")
		}
	default:
		return "", false, wrong
	}
	text.WriteString("<|assistant|>\n")
	return text.String(), answered, nil
}

// getResponse serves GET /v1/responses/{id} and POST …/{id}/cancel of an
// engine that stores none.
func getResponse(w http.ResponseWriter, r *http.Request) {
	writeError(w, &apiError{status: http.StatusNotFound, kind: "invalid_request_error", param: "response_id", message: fmt.Sprintf("Response with id '%s' not found.", r.PathValue("id"))})
}

// response is the object that answers. The order of its members is vLLM's.
type response struct {
	ID           string         `json:"id"`
	CreatedAt    int64          `json:"created_at"`
	Incomplete   any            `json:"incomplete_details"`
	Instructions *string        `json:"instructions"`
	Metadata     jsontext.Value `json:"metadata"`
	Model        string         `json:"model"`
	Object       string         `json:"object"`
	Output       []any          `json:"output"`
	Parallel     bool           `json:"parallel_tool_calls"`
	Temperature  jsontext.Value `json:"temperature"`
	ToolChoice   jsontext.Value `json:"tool_choice"`
	Tools        jsontext.Value `json:"tools"`
	TopP         jsontext.Value `json:"top_p"`
	Background   bool           `json:"background"`
	MaxOutput    int            `json:"max_output_tokens"`
	MaxToolCalls jsontext.Value `json:"max_tool_calls"`
	Previous     *string        `json:"previous_response_id"`
	Prompt       *string        `json:"prompt"`
	Reasoning    jsontext.Value `json:"reasoning"`
	ServiceTier  string         `json:"service_tier"`
	Status       string         `json:"status"`
	Text         jsontext.Value `json:"text"`
	TopLogprobs  *int           `json:"top_logprobs"`
	Truncation   string         `json:"truncation"`
	Usage        any            `json:"usage"`
	User         jsontext.Value `json:"user"`
	Presence     jsontext.Value `json:"presence_penalty"`
	Frequency    jsontext.Value `json:"frequency_penalty"`
	KVTransfer   *int           `json:"kv_transfer_params"`
	ECTransfer   *int           `json:"ec_transfer_params"`
	In           *string        `json:"input_messages"`
	Out          *string        `json:"output_messages"`
}

type responseUsage struct {
	Input        int `json:"input_tokens"`
	InputDetails struct {
		Cached        int   `json:"cached_tokens"`
		Written       int   `json:"cache_write_tokens"`
		PerTurn       []int `json:"input_tokens_per_turn"`
		CachedPerTurn []int `json:"cached_tokens_per_turn"`
	} `json:"input_tokens_details"`
	Output        int `json:"output_tokens"`
	OutputDetails struct {
		Reasoning   int   `json:"reasoning_tokens"`
		Tool        int   `json:"tool_output_tokens"`
		PerTurn     []int `json:"output_tokens_per_turn"`
		ToolPerTurn []int `json:"tool_output_tokens_per_turn"`
	} `json:"output_tokens_details"`
	Total int `json:"total_tokens"`
}

type outputText struct {
	Annotations []int  `json:"annotations"`
	Text        string `json:"text"`
	Type        string `json:"type"`
	Logprobs    *[]int `json:"logprobs"`
}

type outputMessage struct {
	ID      string       `json:"id"`
	Content []outputText `json:"content"`
	Role    string       `json:"role"`
	Status  string       `json:"status"`
	Type    string       `json:"type"`
	Phase   *string      `json:"phase"`
}

type functionCall struct {
	Arguments string `json:"arguments"`
	CallID    string `json:"call_id"`
	Name      string `json:"name"`
	Type      string `json:"type"`
	ID        string `json:"id"`
	Status    string `json:"status"`
}

func (a *answer) responseID() string {
	if id := a.req.responses.RequestID; id != nil && *id != "" {
		return *id
	}
	return "resp_" + a.id
}

// itemID names the one item of the output.
func (a *answer) itemID() string {
	kind := "msg_"
	if a.choices[0].call != nil {
		kind = "fc_"
	}
	return fmt.Sprintf("%s%016x", kind, mix(a.choices[0].voice.seed+1))
}

// response returns the object in one of its states.
func (a *answer) response(status string, output []any, usage any) response {
	b := a.req.responses
	or := func(v jsontext.Value, otherwise string) jsontext.Value {
		if len(v) == 0 || v.Kind() == 'n' {
			return jsontext.Value(otherwise)
		}
		return v
	}
	// vLLM reads numbers as floats, and has no choice where there is no tool.
	float := func(v jsontext.Value, otherwise string) jsontext.Value {
		if v = or(v, otherwise); !strings.ContainsAny(string(v), ".eE") {
			v = append(slices.Clone(v), ".0"...)
		}
		return v
	}
	choice := or(b.ToolChoice, `"auto"`)
	if tools := or(b.Tools, "[]"); string(tools) == "[]" {
		choice = jsontext.Value(`"none"`)
	}
	r := response{
		ID: a.responseID(), CreatedAt: a.created, Instructions: b.Instructions, Metadata: or(b.Metadata, "null"), Model: a.model,
		Object: "response", Output: output, Parallel: b.Parallel == nil || *b.Parallel, Temperature: float(b.Temperature, "1.0"),
		ToolChoice: choice, Tools: or(b.Tools, "[]"), TopP: float(b.TopP, "1.0"), MaxOutput: b.limit,
		MaxToolCalls: or(b.MaxToolCalls, "null"), Reasoning: or(b.Reasoning, "null"), ServiceTier: "auto", Status: status,
		Text: or(b.Text, "null"), Truncation: "disabled", Usage: usage, User: or(b.User, "null"),
		Presence: float(b.Others["presence_penalty"], "0.0"), Frequency: float(b.Others["frequency_penalty"], "0.0"),
	}
	if b.ServiceTier != nil {
		r.ServiceTier = *b.ServiceTier
	}
	if status == "incomplete" {
		r.Incomplete = map[string]string{"reason": "max_output_tokens"}
	}
	return r
}

// item returns the item of the output with what it holds so far.
func (a *answer) item(status string, text string) any {
	c := &a.choices[0]
	if c.call != nil {
		return functionCall{text, c.toolID(), c.call.Name, "function_call", a.itemID(), status}
	}
	m := outputMessage{ID: a.itemID(), Role: "assistant", Status: status, Type: "message", Content: []outputText{}}
	if status == "completed" {
		m.Content = append(m.Content, outputText{Text: text, Type: "output_text"})
	}
	return m
}

// finished returns the object at the end. pad x's lengthen a text.
func (a *answer) finished(pad int) response {
	c := &a.choices[0]
	status, text := "completed", c.text()
	if c.finish == "length" {
		status = "incomplete"
	}
	if c.call == nil {
		text += string(appendX(nil, pad))
	}
	var u responseUsage
	u.Input, u.Output, u.Total = c.tokens, c.seq.Output, c.tokens+c.seq.Output
	u.InputDetails.Cached, u.InputDetails.Written = c.cached, c.created()
	return a.response(status, []any{a.item("completed", text)}, u)
}

// appendResponse appends the body of an answer that is not streamed.
func (a *answer) appendResponse(dst []byte, pad int) []byte {
	return appendJSON(dst, a.finished(pad))
}

// responseEvent is any event of the stream: members that are not there are
// left out. They are in the order of their names, as the client library that
// vLLM writes them with has them.
type responseEvent struct {
	Arguments    *string     `json:"arguments,omitzero"`
	ContentIndex *int        `json:"content_index,omitzero"`
	Delta        string      `json:"delta,omitempty"`
	Item         any         `json:"item,omitempty"`
	ItemID       string      `json:"item_id,omitempty"`
	Logprobs     *[]int      `json:"logprobs,omitzero"`
	Name         string      `json:"name,omitempty"`
	OutputIndex  *int        `json:"output_index,omitzero"`
	Part         *outputText `json:"part,omitzero"`
	Response     *response   `json:"response,omitzero"`
	Sequence     int         `json:"sequence_number"`
	Text         *string     `json:"text,omitzero"`
	Type         string      `json:"type"`
}

// appendResponseEvent appends an event with the next number.
func (a *answer) appendResponseEvent(dst []byte, kind string, e responseEvent) []byte {
	e.Type, e.Sequence = kind, a.events
	a.events++
	dst = append(append(dst, "event: "...), kind...)
	dst = appendJSON(append(dst, "\ndata: "...), e)
	return append(dst, "\n\n"...)
}

func (a *answer) appendResponseCreated(dst []byte) []byte {
	r := a.response("in_progress", []any{}, nil)
	dst = a.appendResponseEvent(dst, "response.created", responseEvent{Response: &r})
	return a.appendResponseEvent(dst, "response.in_progress", responseEvent{Response: &r})
}

// appendResponseItem appends the events that open the one item of the output.
func (a *answer) appendResponseItem(dst []byte) []byte {
	dst = a.appendResponseEvent(dst, "response.output_item.added",
		responseEvent{OutputIndex: new(0), Item: a.item("in_progress", "")})
	if a.choices[0].call != nil {
		return dst
	}
	return a.appendResponseEvent(dst, "response.content_part.added", responseEvent{ContentIndex: new(0), ItemID: a.itemID(),
		OutputIndex: new(0), Part: &outputText{Type: "output_text", Logprobs: &[]int{}}})
}

func (a *answer) appendResponseDelta(dst []byte) []byte {
	c := &a.choices[0]
	k := c.sent
	c.sent++
	e := responseEvent{OutputIndex: new(0), ItemID: a.itemID(), Delta: c.token(k)}
	switch {
	case e.Delta == "": // such as the name of a call, which came with the item
		return dst
	case c.call == nil:
		e.ContentIndex, e.Logprobs = new(0), &[]int{}
		return a.appendResponseEvent(dst, "response.output_text.delta", e)
	}
	return a.appendResponseEvent(dst, "response.function_call_arguments.delta", e)
}

func (a *answer) appendResponseDone(dst []byte) []byte {
	c := &a.choices[0]
	text := c.text()
	e := responseEvent{OutputIndex: new(0), ItemID: a.itemID()}
	if c.call != nil {
		e.Arguments, e.Name = &text, c.call.Name
		dst = a.appendResponseEvent(dst, "response.function_call_arguments.done", e)
	} else {
		e.ContentIndex = new(0)
		part := e
		e.Text, e.Logprobs = &text, &[]int{}
		dst = a.appendResponseEvent(dst, "response.output_text.done", e)
		part.Part = &outputText{Text: text, Type: "output_text"}
		dst = a.appendResponseEvent(dst, "response.content_part.done", part)
	}
	dst = a.appendResponseEvent(dst, "response.output_item.done",
		responseEvent{OutputIndex: new(0), Item: a.item("completed", text)})
	r := a.finished(0)
	return a.appendResponseEvent(dst, "response.completed", responseEvent{Response: &r})
}

// appendJSON appends v, one of this package's own types.
func appendJSON(dst []byte, v any) []byte {
	out, err := json.Marshal(v, json.Deterministic(true), jsontext.AllowInvalidUTF8(true), jsontext.AllowDuplicateNames(true))
	if err != nil {
		panic("BUG: cannot write an answer: " + err.Error())
	}
	return append(dst, out...)
}
