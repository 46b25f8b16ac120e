package simulator

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"slices"
	"strings"
)

// messagesBody is the body of a request to Anthropic's Messages API as far as
// it is understood.
type messagesBody struct {
	Model    string         `json:"model"`
	System   jsontext.Value `json:"system"`
	Messages *[]struct {
		Role    string         `json:"role"`
		Content jsontext.Value `json:"content"`
	} `json:"messages"`
	MaxTokens  *int           `json:"max_tokens"`
	Stop       jsontext.Value `json:"stop_sequences"`
	Stream     *bool          `json:"stream"`
	Tools      jsontext.Value `json:"tools"`
	ToolChoice *struct {
		Type string `json:"type"`
		Name string `json:"name"`
	} `json:"tool_choice"`
	OutputConfig *struct {
		Format *struct {
			Type   string         `json:"type"`
			Schema jsontext.Value `json:"schema"`
		} `json:"format"`
	} `json:"output_config"`
	xargs
}

// readMessages reads what a request to messages and one that counts tokens
// have in common, and returns the prompt as well.
func readMessages(cfg *Config, body []byte) (*messagesBody, prompt, bool, error) {
	b := &messagesBody{}
	if err := unmarshal(body, b); err != nil {
		return nil, prompt{}, false, err
	}
	if b.Model == "" {
		return nil, prompt{}, false, missing("model")
	}
	if b.Messages == nil {
		return nil, prompt{}, false, missing("messages")
	}
	if err := checkModel(cfg, &b.Model); err != nil {
		return nil, prompt{}, false, err
	}
	text, answered, err := b.render()
	return b, textPrompt(text), answered, err
}

// parseMessages reads the body of POST /v1/messages.
func parseMessages(cfg *Config, body []byte) (*request, error) {
	b, p, answered, err := readMessages(cfg, body)
	if err != nil {
		return nil, err
	}
	if b.MaxTokens == nil {
		return nil, missing("max_tokens")
	}
	if *b.MaxTokens < 1 {
		return nil, invalid("max_tokens", "max_tokens must be positive")
	}
	r := &request{api: messages, n: 1, usage: true, adapter: cfg.adapter(&b.Model), prompts: []prompt{p}, stream: b.Stream != nil && *b.Stream}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	if r.stop, err = readStop("stop_sequences", b.Stop); err != nil {
		return nil, err
	}
	tools, err := b.tools()
	if err != nil {
		return nil, err
	}
	choice, err := b.choice()
	if err != nil {
		return nil, err
	}
	if r.call, err = chooseTool(tools, choice, answered); err != nil {
		return nil, err
	}
	if b.OutputConfig != nil && b.OutputConfig.Format != nil {
		f := b.OutputConfig.Format
		if r.form, err = formOf("output_config.format", f.Type, f.Schema); err != nil {
			return nil, err
		}
	}
	if err := r.limitOutput(cfg, "max_tokens", b.MaxTokens, nil); err != nil {
		return nil, err
	}
	// A model that has said all it has to ends its turn before a generous limit.
	if r.output > cfg.DefaultOutputTokens && r.call == nil && r.form == nil {
		r.output, r.finish = cfg.DefaultOutputTokens, "stop"
	}
	return r, nil
}

// parseCountTokens reads the body of POST /v1/messages/count_tokens.
func parseCountTokens(cfg *Config, body []byte) (*request, error) {
	b, p, _, err := readMessages(cfg, body)
	if err != nil {
		return nil, err
	}
	r := &request{api: plain}
	r.body = fmt.Appendf(nil, `{"input_tokens":%d,"context_management":{"original_input_tokens":%d}}`, p.tokens, p.tokens)
	return r, b.xargs.apply(cfg, r)
}

func (b *messagesBody) tools() ([]tool, error) {
	if len(b.Tools) == 0 || b.Tools.Kind() == 'n' {
		return nil, nil
	}
	var list []struct {
		Name   string         `json:"name"`
		Schema jsontext.Value `json:"input_schema"`
	}
	if json.Unmarshal(b.Tools, &list, lenient) != nil {
		return nil, invalid("tools", "tools must be a list of objects with a name and an input_schema")
	}
	var tools []tool
	for i, t := range list {
		if t.Name == "" || t.Schema.Kind() != '{' {
			return nil, invalid(fmt.Sprintf("tools.%d", i), "a tool must have a name and an input_schema that is an object")
		}
		tools = append(tools, tool{t.Name, t.Schema})
	}
	return tools, nil
}

// choice returns tool_choice in the form that a chat has.
func (b *messagesBody) choice() (jsontext.Value, error) {
	if b.ToolChoice == nil {
		return nil, nil
	}
	switch b.ToolChoice.Type {
	case "auto", "none":
		return jsontext.Value(`"` + b.ToolChoice.Type + `"`), nil
	case "any":
		return jsontext.Value(`"required"`), nil
	case "tool":
		if b.ToolChoice.Name == "" {
			return nil, invalid("tool_choice", "tool_choice.name is required when type is 'tool'")
		}
		return jsontext.Value(`{"function":{"name":` + string(appendString(nil, b.ToolChoice.Name)) + `}}`), nil
	}
	return nil, invalid("tool_choice.type", "tool_choice.type must be auto, any, tool or none")
}

// block is a part of a message's content.
type block struct {
	Type    string         `json:"type"`
	Text    string         `json:"text"`
	Name    string         `json:"name"`
	Input   jsontext.Value `json:"input"`
	Content jsontext.Value `json:"content"`
}

var blockTypes = []string{"text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"}

// render renders the messages as a chat and reports whether the last holds
// what a tool has answered.
func (b *messagesBody) render() (string, bool, error) {
	var text strings.Builder
	if len(b.Tools) > len("[]") && b.Tools.Kind() != 'n' {
		text.WriteString("<|tools|>\n" + string(b.Tools) + "\n")
	}
	answered := false
	say := func(param, role string, content jsontext.Value) error {
		answered = false
		if content.Kind() == '"' {
			said, err := contentText(content)
			text.WriteString("<|" + role + "|>\n" + said + "\n")
			return err
		}
		var blocks []block
		if json.Unmarshal(content, &blocks, lenient) != nil {
			return invalid(param, "content must be a string or a list of blocks")
		}
		for i, b := range blocks {
			switch b.Type {
			case "text":
				text.WriteString("<|" + role + "|>\n" + b.Text + "\n")
			case "tool_use":
				text.WriteString("<|tool_calls|>\n" + b.Name + " " + string(b.Input) + "\n")
			case "tool_result":
				answered = true
				said, err := contentText(b.Content)
				if err != nil {
					return invalid(fmt.Sprintf("%s.%d.content", param, i), err.Error())
				}
				text.WriteString("<|tool|>\n" + said + "\n")
			default:
				if !slices.Contains(blockTypes, b.Type) {
					return invalid(fmt.Sprintf("%s.%d.type", param, i), "a block's type must be one of "+strings.Join(blockTypes, ", "))
				}
				text.WriteString("<|" + b.Type + "|>\n")
			}
		}
		return nil
	}
	if len(b.System) > 0 && b.System.Kind() != 'n' {
		if err := say("system", "system", b.System); err != nil {
			return "", false, err
		}
	}
	for i, m := range *b.Messages {
		if !slices.Contains([]string{"user", "assistant", "system"}, m.Role) {
			return "", false, invalid(fmt.Sprintf("messages.%d.role", i), "role must be user, assistant or system")
		}
		if err := say(fmt.Sprintf("messages.%d.content", i), m.Role, m.Content); err != nil {
			return "", false, err
		}
	}
	text.WriteString("<|assistant|>\n")
	return text.String(), answered, nil
}

// messageUsage counts tokens. The input is without what was cached, or came
// into the cache, where that is told.
type messageUsage struct {
	Input   int  `json:"input_tokens"`
	Output  int  `json:"output_tokens"`
	Created *int `json:"cache_creation_input_tokens,omitzero"`
	Cached  *int `json:"cache_read_input_tokens,omitzero"`
}

func (a *answer) messageUsage(c *choice) messageUsage {
	u := messageUsage{Input: c.tokens, Output: c.seq.Output}
	if a.details {
		u.Cached, u.Created = new(c.cached), new(c.created())
		u.Input -= *u.Cached + *u.Created
	}
	return u
}

// contentBlock is a part of an answer.
type contentBlock struct {
	Type  string         `json:"type"`
	Text  *string        `json:"text,omitzero"`
	ID    string         `json:"id,omitempty"`
	Name  string         `json:"name,omitempty"`
	Input jsontext.Value `json:"input,omitzero"`
}

// stopReason is why the choice ended in this API's words.
func (c *choice) stopReason() string {
	switch c.finish {
	case "length":
		return "max_tokens"
	case "tool_calls":
		return "tool_use"
	}
	return "end_turn"
}

// appendMessage appends the body of an answer that is not streamed.
func (a *answer) appendMessage(dst []byte, pad int) []byte {
	c := &a.choices[0]
	b := contentBlock{Type: "text", Text: new(c.text() + string(appendX(nil, pad)))}
	if c.call != nil {
		input := jsontext.Value(c.text())
		if !input.IsValid() {
			input = jsontext.Value("{}") // the limit has cut it
		}
		b = contentBlock{Type: "tool_use", ID: c.toolID(), Name: c.call.Name, Input: input}
	}
	return appendJSON(dst, struct {
		ID         string         `json:"id"`
		Type       string         `json:"type"`
		Role       string         `json:"role"`
		Content    []contentBlock `json:"content"`
		Model      string         `json:"model"`
		StopReason string         `json:"stop_reason"`
		Usage      messageUsage   `json:"usage"`
	}{"chatcmpl-" + a.id, "message", "assistant", []contentBlock{b}, a.model, c.stopReason(), a.messageUsage(c)})
}

// messageDelta is what an event adds.
type messageDelta struct {
	Type string `json:"type,omitempty"`
	Text string `json:"text,omitempty"`
	JSON string `json:"partial_json,omitempty"`
	*messageStop
}

// messageStop is what an event says of the end.
type messageStop struct {
	Reason   string  `json:"stop_reason"`
	Sequence *string `json:"stop_sequence"`
}

// messageEvent is any event of the stream; members that are not there are left
// out.
type messageEvent struct {
	Type    string        `json:"type"`
	Message any           `json:"message,omitempty"`
	Delta   *messageDelta `json:"delta,omitzero"`
	Block   *contentBlock `json:"content_block,omitzero"`
	Index   *int          `json:"index,omitzero"`
	Usage   *messageUsage `json:"usage,omitzero"`
}

func appendMessageEvent(dst []byte, e messageEvent) []byte {
	dst = append(append(dst, "event: "...), e.Type...)
	dst = appendJSON(append(dst, "\ndata: "...), e)
	return append(dst, "\n\n"...)
}

// appendMessageStart appends the events that open the message and its block.
func (a *answer) appendMessageStart(dst []byte) []byte {
	c := &a.choices[0]
	dst = appendMessageEvent(dst, messageEvent{Type: "message_start", Message: struct {
		ID           string       `json:"id"`
		Type         string       `json:"type"`
		Role         string       `json:"role"`
		Content      []int        `json:"content"`
		Model        string       `json:"model"`
		StopReason   *string      `json:"stop_reason"`
		StopSequence *string      `json:"stop_sequence"`
		Usage        messageUsage `json:"usage"`
	}{ID: "chatcmpl-" + a.id, Type: "message", Role: "assistant", Model: a.model, Usage: messageUsage{Input: c.tokens}}})
	b := &contentBlock{Type: "text", Text: new("")}
	if c.call != nil {
		b = &contentBlock{Type: "tool_use", ID: c.toolID(), Name: c.call.Name, Input: jsontext.Value("{}")}
	}
	return appendMessageEvent(dst, messageEvent{Type: "content_block_start", Block: b, Index: new(0)})
}

func (a *answer) appendMessageDelta(dst []byte) []byte {
	c := &a.choices[0]
	k := c.sent
	c.sent++
	d := &messageDelta{Type: "text_delta", Text: c.token(k)}
	if c.call != nil {
		d = &messageDelta{Type: "input_json_delta", JSON: c.token(k)}
	}
	if d.Text == "" && d.JSON == "" {
		return dst
	}
	return appendMessageEvent(dst, messageEvent{Type: "content_block_delta", Delta: d, Index: new(0)})
}

func (a *answer) appendMessageStop(dst []byte) []byte {
	c := &a.choices[0]
	dst = appendMessageEvent(dst, messageEvent{Type: "content_block_stop", Index: new(0)})
	dst = appendMessageEvent(dst, messageEvent{Type: "message_delta", Delta: &messageDelta{messageStop: &messageStop{Reason: c.stopReason()}},
		Usage: new(a.messageUsage(c))})
	return appendMessageEvent(dst, messageEvent{Type: "message_stop"})
}
