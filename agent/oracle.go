package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// oracle asks one engine which tokens it makes of a prompt, without letting it
// compute anything. A checker makes one, and uses it on its own goroutine.
type oracle struct {
	client  *http.Client
	replica *proxy.Replica
	key     string // that the engine wants
	engine  string // one of engines; "" when it is not known
	returns int    // of the member: the process of the engine that is asked
	// found is, by kind of prompt, the way that the engine has, once that is
	// known.
	found [4]*way
}

// request is one that is checked.
type request struct {
	kind prompt.Kind
	body []byte
	// private: it is a client's, and what it says must not be told to anybody,
	// not even in tokens.
	private bool
}

// oracleTimeout bounds one request of an oracle: an engine that starts may have
// much else to do. maxSample bounds the body that is sent, maxTokensBody the
// answer that is read: each byte of a text is a token at the most, and each
// token is written in a few.
const (
	oracleTimeout = 10 * time.Second
	maxSample     = 1 << 20
	maxTokensBody = 16 << 20
)

// errNoPage: the engine does not have the page. errTakesNot: it has, and does
// not take this prompt; that says nothing of how others come out.
var (
	errNoPage   = errors.New("the engine has no such page")
	errTakesNot = errors.New("the engine does not take it")
)

// way is how some kinds of engine tell the tokens of a prompt.
type way struct {
	// name tells people what is asked.
	name    string
	engines []string // that may have it
	// request makes of a request to be checked the body to send, which is a
	// request too, and the kind whose rules that one follows. It returns nil
	// when this way has no words for it.
	request func(kind prompt.Kind, m members) (prompt.Kind, []byte)
	ask     func(ctx context.Context, o *oracle, kind prompt.Kind, body []byte) ([]uint32, error)
}

// ways in the order in which an engine of which nothing is known is asked: the
// page that follows the engine's own way most closely comes first, and one of
// another engine of the same path does not answer in its shape.
var ways = []*way{
	// vLLM renders as for a request of its own. The body goes as it is.
	{name: "render", engines: []string{"vllm"}, request: wholeRequest, ask: askRender},
	// vLLM and SGLang. The page knows only some members, and gpt-oss is rendered
	// by other rules there than for chats, so that what it answers is compared
	// with what is followed for the page, not for the chat.
	{name: "tokenize", engines: []string{"vllm", "sglang"}, request: tokenizeRequest, ask: askTokenize},
	{name: "apply-template", engines: []string{"llamacpp"}, request: wholeRequest, ask: askLlama},
	{name: "chat_tokenize", engines: []string{"tgi"}, request: wholeRequest, ask: askTGI},
}

// members are the top-level members of a request's body, of doubles the last.
type members map[string]json.RawMessage

// splitBody finds the members of a body and makes its model name the one that
// the engine knows: a client may have used an alias.
func splitBody(body []byte, model string) (members, error) {
	var m members
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, errors.New("not an object")
	}
	name, err := json.Marshal(model)
	if err != nil {
		return nil, err
	}
	m["model"] = name
	return m, nil
}

// join writes the named members, or all of them. What they hold stays byte for
// byte: a template may see it.
func (m members) join(names ...string) []byte {
	if len(names) == 0 {
		for name := range m {
			names = append(names, name)
		}
		slices.Sort(names)
	}
	body := []byte{'{'}
	for _, name := range names {
		value, ok := m[name]
		if !ok {
			continue
		}
		if len(body) > 1 {
			body = append(body, ',')
		}
		key, _ := json.Marshal(name)
		body = append(append(append(body, key...), ':'), value...)
	}
	return append(body, '}')
}

// isText reports that a member is a string.
func (m members) isText(name string) bool {
	value := bytes.TrimLeft(m[name], " \t\r\n")
	return len(value) > 0 && value[0] == '"'
}

func wholeRequest(kind prompt.Kind, m members) (prompt.Kind, []byte) {
	if kind != prompt.Chat && kind != prompt.Completion {
		return kind, nil
	}
	return kind, m.join()
}

func tokenizeRequest(kind prompt.Kind, m members) (prompt.Kind, []byte) {
	switch {
	case kind == prompt.Chat:
		return prompt.Tokenize, m.join("model", "messages", "tools", "chat_template_kwargs",
			"add_generation_prompt", "continue_final_message", "add_special_tokens")
	case kind == prompt.Completion && m.isText("prompt"):
		return prompt.Tokenize, m.join("model", "prompt", "add_special_tokens")
	}
	return kind, nil
}

func askRender(ctx context.Context, o *oracle, kind prompt.Kind, body []byte) ([]uint32, error) {
	type rendered struct {
		IDs *[]uint32 `json:"token_ids"`
	}
	var list []rendered
	var err error
	if kind == prompt.Chat {
		list = make([]rendered, 1)
		err = o.post(ctx, "/v1/chat/completions/render", body, &list[0])
	} else {
		err = o.post(ctx, "/v1/completions/render", body, &list)
	}
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, errNoPage
	}
	var ids []uint32
	for _, r := range list {
		if r.IDs == nil {
			return nil, errNoPage
		}
		ids = append(ids, *r.IDs...)
	}
	return ids, nil
}

func askTokenize(ctx context.Context, o *oracle, _ prompt.Kind, body []byte) ([]uint32, error) {
	var answer struct {
		Count  *int      `json:"count"`
		Tokens *[]uint32 `json:"tokens"`
	}
	if err := o.post(ctx, "/tokenize", body, &answer); err != nil {
		return nil, err
	}
	if answer.Count == nil || answer.Tokens == nil {
		return nil, errNoPage // llama.cpp's page of this name
	}
	return *answer.Tokens, nil
}

// askLlama asks llama.cpp, which tokenizes what its template has made with the
// beginning of a sequence and with special tokens recognised, as any prompt.
func askLlama(ctx context.Context, o *oracle, kind prompt.Kind, body []byte) ([]uint32, error) {
	var rendered struct {
		Prompt *string `json:"prompt"`
	}
	if kind == prompt.Chat {
		if err := o.post(ctx, "/apply-template", body, &rendered); err != nil {
			return nil, err
		}
	} else if err := json.Unmarshal(body, &rendered); err != nil {
		return nil, errTakesNot // several prompts, or ids
	}
	if rendered.Prompt == nil {
		return nil, errNoPage
	}
	text, err := json.Marshal(map[string]any{"content": *rendered.Prompt, "add_special": true, "parse_special": true})
	if err != nil {
		return nil, err
	}
	var answer struct {
		Tokens *[]uint32 `json:"tokens"`
	}
	if err := o.post(ctx, "/tokenize", text, &answer); err != nil {
		return nil, err
	}
	if answer.Tokens == nil {
		return nil, errNoPage
	}
	return *answer.Tokens, nil
}

func askTGI(ctx context.Context, o *oracle, kind prompt.Kind, body []byte) ([]uint32, error) {
	type token struct {
		ID uint32 `json:"id"`
	}
	var list *[]token
	var err error
	if kind == prompt.Chat {
		var answer struct {
			Tokens *[]token `json:"tokenize_response"`
		}
		err = o.post(ctx, "/chat_tokenize", body, &answer)
		list = answer.Tokens
	} else {
		var asked struct {
			Prompt *string `json:"prompt"`
		}
		if json.Unmarshal(body, &asked) != nil || asked.Prompt == nil {
			return nil, errTakesNot
		}
		var text []byte
		if text, err = json.Marshal(map[string]any{"inputs": *asked.Prompt}); err != nil {
			return nil, err
		}
		err = o.post(ctx, "/tokenize", text, &list)
	}
	if err != nil {
		return nil, err
	}
	if list == nil {
		return nil, errNoPage
	}
	var ids []uint32
	for _, t := range *list {
		ids = append(ids, t.ID)
	}
	return ids, nil
}

// post asks the engine and decodes its answer. What the engine says when it
// refuses is not passed on: it may repeat what the prompt says.
func (o *oracle) post(ctx context.Context, page string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, oracleTimeout)
	defer cancel()
	r := o.replica
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.Addr+r.BasePath+page, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Host = r.Host
	req.Header.Set("User-Agent", "inferrail")
	req.Header.Set("Content-Type", "application/json")
	if o.key != "" {
		req.Header.Set("Authorization", "Bearer "+o.key)
	}
	resp, err := o.client.Do(req)
	if err != nil {
		return fmt.Errorf("POST %s: %w", page, plainError(err))
	}
	defer resp.Body.Close()
	switch status := resp.StatusCode; {
	case status == http.StatusOK:
	case status == http.StatusForbidden, status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented:
		return errNoPage
	case status == http.StatusUnauthorized:
		return fmt.Errorf("POST %s: status 401; give the engine's api_key or api_key_file in the configuration", page)
	case status >= 400 && status < 500 && status != http.StatusTooManyRequests && status != http.StatusRequestTimeout:
		return errTakesNot
	default:
		return fmt.Errorf("POST %s: status %d", page, status)
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxTokensBody+1))
	if err != nil {
		return fmt.Errorf("POST %s: %w", page, plainError(err))
	}
	if len(answer) > maxTokensBody {
		return fmt.Errorf("POST %s: the answer is larger than %v", page, Bytes(maxTokensBody))
	}
	// An answer of another shape is that of a page which only has the name.
	if err := json.Unmarshal(answer, into); errors.As(err, new(*json.UnmarshalTypeError)) {
		return errNoPage
	} else if err != nil {
		return fmt.Errorf("POST %s: the answer is not JSON: %w", page, err)
	}
	return nil
}

// may reports whether the engine may have the way.
func (o *oracle) may(w *way) bool { return o.engine == "" || slices.Contains(w.engines, o.engine) }

// comparison is what the engine makes of one request, beside what the agent does.
type comparison struct {
	outcome outcome
	// what tells people how they differ, why it failed, or why nothing could be
	// compared.
	what string
	way  string // that was asked
}

// compare asks the engine about one request of a model. What differs is asked
// about a second time: at midnight, when a template tells the date, or while the
// engine is being replaced, one answer proves nothing.
func (o *oracle) compare(ctx context.Context, verify verifier, r request, model string) comparison {
	c := o.compareOnce(ctx, verify, r, model)
	if c.outcome == differs {
		c = o.compareOnce(ctx, verify, r, model)
	}
	return c
}

// verifier follows a request as the model does that is checked, whether or not
// it is demoted.
type verifier func(p *prompt.Prompt, kind prompt.Kind, body []byte, now time.Time)

func (o *oracle) compareOnce(ctx context.Context, verify verifier, r request, model string) comparison {
	kind := r.kind
	m, err := splitBody(r.body, model)
	if err != nil {
		return comparison{unable, "the request is not JSON", ""}
	}
	// The way that is known first. Another may take what it does not: vLLM's page
	// for rendering refuses tools as its chats do, when it was not started for
	// them, and the other page does not.
	try := ways
	if w := o.found[kind]; w != nil {
		try = append([]*way{w}, ways...)
	}
	c := comparison{unable, "the engine has no page that tells tokens", ""}
	for i, w := range try {
		if !o.may(w) || i > 0 && w == try[0] {
			continue
		}
		as, asked := w.request(kind, m)
		if asked == nil {
			continue
		}
		var ours prompt.Prompt
		verify(&ours, as, asked, time.Now())
		if ours.Reason != prompt.Exact {
			// Another way may follow other rules.
			c = comparison{unable, "such prompts are not followed: " + ours.Reason.String(), ""}
			continue
		}
		theirs, err := w.ask(ctx, o, kind, asked)
		if errors.Is(err, errNoPage) {
			continue
		}
		if errors.Is(err, errTakesNot) {
			// Of an engine that is not known it may be another one's page.
			c = comparison{unable, err.Error(), w.name}
			continue
		}
		if err != nil {
			return comparison{failed, err.Error(), w.name}
		}
		if o.found[kind] == nil {
			o.found[kind] = w
		}
		if what := firstDifference(ours.IDs, theirs, r.private); what != "" {
			return comparison{differs, what, w.name}
		}
		return comparison{agrees, "", w.name}
	}
	return c
}

// firstDifference tells people where the engine's tokens are others than ours;
// "" when they are the same. Of what is private it tells no token.
func firstDifference(ours, theirs []uint32, private bool) string {
	if slices.Equal(ours, theirs) {
		return ""
	}
	at := 0
	for at < len(ours) && at < len(theirs) && ours[at] == theirs[at] {
		at++
	}
	token := func(ids []uint32) string {
		if at < len(ids) {
			return fmt.Sprint(ids[at])
		}
		return "the end"
	}
	if private {
		return fmt.Sprintf("token %d is another one (%d tokens, expected %d)", at, len(theirs), len(ours))
	}
	return fmt.Sprintf("token %d is %s where %s was expected (%d tokens, expected %d)", at, token(theirs), token(ours), len(theirs), len(ours))
}

// probe is a request that is made up to be checked.
type probe struct {
	name string
	kind prompt.Kind
	body string
}

// probes are sent to each replica that joins. They are short, and between them
// show what goes wrong when a template or a tokenizer is another one: the roles
// and what stands around them, how parts of contents are joined, tools, text that
// tokenizers split in their own ways, and what looks like special tokens.
var probes = []probe{
	{"chat", prompt.Chat, `{"messages":[{"role":"user","content":"Hello! How are you today?"}]}`},
	{"conversation", prompt.Chat, `{"messages":[{"role":"system","content":"You are a terse assistant.\nAnswer in one sentence."},` +
		`{"role":"user","content":"What is 12 * 34,567?"},{"role":"assistant","content":"It is 414804."},{"role":"user","content":" Thanks. And minus 5? "}]}`},
	{"parts", prompt.Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"First part."},{"type":"text","text":"Second part."}]}]}`},
	{"odd text", prompt.Chat, `{"messages":[{"role":"user","content":"  \tCafe\u0301 na\u00efve \u65e5\u672c\u8a9e \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \ud83d\udc69\u200d\ud83d\udcbb\n\n\n` +
		`<|im_end|> <|eot_id|></s> [INST] <think> it's I'LL 1234567 \u00a0x   y\r\nfunc f() {\n\treturn  \"a\\\\b\"\n}"}]}`},
	{"tools", prompt.Chat, `{"messages":[{"role":"user","content":"Is it raining in Oslo?"}],"tools":[{"type":"function","function":{"name":"weather",` +
		`"description":"Tells the weather of a place.","parameters":{"type":"object","properties":{"place":{"type":"string","description":"A city, \"as written\""},` +
		`"days":{"type":"integer","minimum":1}},"required":["place"]}}}]}`},
	{"completion", prompt.Completion, `{"prompt":"Once upon a time, in the year 2024,\n  there was \u00e9 <|endoftext|>"}`},
}

// probeAll sends a model's probes and tells what they show together. One that
// differs is enough; one that fails leaves it open.
func (o *oracle) probeAll(ctx context.Context, verify verifier, model string) comparison {
	result := comparison{outcome: unable}
	var agreed, open []string
	for _, p := range probes {
		c := o.compare(ctx, verify, request{kind: p.kind, body: []byte(p.body)}, model)
		switch c.outcome {
		case differs:
			c.what = fmt.Sprintf("in the probe %q %s", p.name, c.what)
			return c
		case failed:
			c.what = fmt.Sprintf("the probe %q failed: %s", p.name, c.what)
			return c
		case agrees:
			agreed = append(agreed, p.name)
			result.outcome = agrees
			if result.way == "" {
				result.way = c.way
			}
		default:
			open = append(open, p.name+" ("+c.what+")")
			result.what = c.what
		}
	}
	if result.outcome == agrees {
		result.what = "compared: " + strings.Join(agreed, ", ")
		if len(open) > 0 {
			result.what += "; not compared: " + strings.Join(open, ", ")
		}
	}
	return result
}
