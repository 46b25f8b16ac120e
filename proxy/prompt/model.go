package prompt

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/template"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// Source says where a model's files are and how its engines were started. The
// zero value is a model without a tokenizer: its prompts are approximate.
type Source struct {
	// Tokenizer is a model's directory, a name org/name[@revision] in the
	// Hugging Face cache, or builtin:sim. Empty is none.
	Tokenizer string
	// HubCache is the Hugging Face cache; empty is where its environment
	// variables say, else where it is by default.
	HubCache string
	// Template is a file that replaces the tokenizer's chat template, as
	// vLLM's --chat-template does.
	Template string
	// ContentFormat is what messages' contents become for the template:
	// "auto" or "" to find out as vLLM does, "string" or "openai".
	ContentFormat string
	// TemplateKwargs is a JSON object, as vLLM's
	// --default-chat-template-kwargs.
	TemplateKwargs string
	// Cache is shared by all models; nil caches nothing.
	Cache *tokenizer.Cache
}

// Model follows the prompts of one served model. The agent loads it, the proxy
// uses it from any goroutine until it is closed. A nil Model has no tokenizer.
type Model struct {
	tokenizer *tokenizer.Tokenizer // nil for none
	// lacking is why no prompt, and chatLacking why no chat can be followed;
	// Exact when they can. why and chatWhy tell people.
	lacking, chatLacking Reason
	why, chatWhy         string
	// plain renders chats without tools, withTools those with; they are often
	// the same one. Nil where chatLacking says why.
	plain, withTools *chatTemplate
	// code renders chats instead of the templates, save those of /tokenize
	// when codeTokenizes is false; nil for none.
	code          renderer
	codeTokenizes bool
	memo          *memo
	// kwargs are the engine's default template variables.
	kwargs *jinja.Dict

	demoted atomic.Pointer[string]
	defect  atomic.Pointer[string]
}

// chatTemplate is a template and what goes with it. It is immutable.
type chatTemplate struct {
	*template.Template
	source string
	// format is what contents are: "string", or "openai" for lists of parts.
	format string
	// foldsDeveloper is set when the template does not know the developer's
	// role: the engine makes system messages of them then.
	foldsDeveloper bool
	// special are the special tokens that the template uses.
	special map[string]jinja.Value
	clock   clock
}

// clock is how finely a template tells the time.
type clock uint8

const (
	clockUnused clock = iota
	clockDay
	clockSecond
)

// clockOf finds how finely a template tells the time: by the day when all its
// formats are literals that print no more.
func clockOf(t *template.Template, source string) clock {
	if !t.UsesClock() {
		return clockUnused
	}
	for _, use := range strings.Split(source, "strftime_now")[1:] {
		format, ok := strings.CutPrefix(strings.TrimLeft(use, " "), "(")
		if !ok || format == "" || format[0] != '"' && format[0] != '\'' {
			return clockSecond
		}
		format, rest, ok := strings.Cut(format[1:], format[:1])
		if !ok || !strings.HasPrefix(strings.TrimLeft(rest, " "), ")") {
			return clockSecond
		}
		for _, directive := range strings.Split(format, "%")[1:] {
			directive = strings.TrimLeft(directive, "-")
			if directive == "" || !strings.Contains("dmbBaAyYjeDFuw", directive[:1]) {
				return clockSecond
			}
		}
	}
	return clockDay
}

// Load loads what source names. An error says what to change; a model that is
// there but cannot be followed is no error: Describe tells why.
func Load(source Source) (*Model, error) {
	m := &Model{}
	if err := m.readKwargs(source.TemplateKwargs); err != nil {
		return nil, err
	}
	switch source.ContentFormat {
	case "", "auto", "string", "openai":
	default:
		return nil, fmt.Errorf("content format %q: use auto, string or openai", source.ContentFormat)
	}
	override := ""
	if source.Template != "" {
		text, err := os.ReadFile(source.Template)
		if err != nil {
			return nil, fmt.Errorf("chat template: %w", err)
		}
		if override = string(text); override == "" {
			return nil, fmt.Errorf("chat template %s is empty", source.Template)
		}
	}
	m.memo = newMemo(source.Cache)
	f := &files{}
	switch source.Tokenizer {
	case "":
		m.lacking, m.why = NoTokenizer, "no tokenizer is configured"
	case simulated:
		m.tokenizer = tokenizer.Sim()
		f.templates = map[string]string{"default": simulatedTemplate}
	default:
		dir, err := resolve(source.Tokenizer, source.HubCache)
		if err != nil {
			return nil, err
		}
		repository := ""
		if dir != expand(source.Tokenizer) {
			repository, _, _ = strings.Cut(source.Tokenizer, "@")
		}
		if f, err = readFiles(dir, repository); err != nil {
			return nil, err
		}
		if err := m.loadTokenizer(f, source.Cache); err != nil {
			return nil, err
		}
	}
	m.loadRenderer(f, override, source.ContentFormat)
	return m, nil
}

// keptFromKwargs are names that mean something to the engine's own code.
var keptFromKwargs = []string{"chat_template", "tokenize", "conversation", "messages", "model_config", "tokenizer", "self", "continue_final_message", "add_generation_prompt"}

func (m *Model) readKwargs(text string) error {
	m.kwargs = jinja.NewDict().AsDict()
	if strings.TrimSpace(text) == "" {
		return nil
	}
	d := decoder{text: text}
	v, ok := d.decode()
	if !ok || !v.IsDict() {
		return fmt.Errorf("template kwargs %.80q are no JSON object (wrong at byte %d)", text, d.pos)
	}
	if d.odd != Exact {
		return fmt.Errorf("template kwargs %.80q hold half of a surrogate pair or nest too deeply", text)
	}
	for _, name := range keptFromKwargs {
		if v.AsDict().Has(name) {
			return fmt.Errorf("template kwargs: %s is not for templates; remove it", name)
		}
	}
	m.kwargs = v.AsDict()
	return nil
}

func (m *Model) loadTokenizer(f *files, cache *tokenizer.Cache) error {
	switch {
	case f.is(tokenizes):
		m.lacking, m.why = BadTokenizer, "the engine tokenizes this model by code of its own"
		return nil
	case !f.has("tokenizer.json") && !f.has("tekken.json"):
		m.lacking, m.why = NoTokenizer, "there is neither tokenizer.json nor tekken.json in "+f.dir
		return nil
	case f.form() == formUnsure:
		m.lacking, m.why = BadTokenizer, "the files in "+f.dir+" do not tell whether the engine uses Mistral's tokenizer, which is in tekken.json there, or that of transformers"
		return nil
	case f.form() == formMistral && !f.has("tekken.json"):
		m.lacking, m.why = BadTokenizer, "the engine uses a SentencePiece model of Mistral's, which is not followed"
		return nil
	}
	t, err := tokenizer.Load(f.dir, tokenizer.Options{Cache: cache, Repository: f.repository, Tekken: f.form() == formMistral})
	switch {
	case err == nil:
		m.tokenizer = t
	case errors.Is(err, tokenizer.ErrUnrecognised), f.form() == formMistral:
		m.lacking, m.why = BadTokenizer, err.Error()
	default:
		return err
	}
	return nil
}

func (m *Model) loadRenderer(f *files, override, format string) {
	switch {
	case f.is(renders):
		m.chatLacking, m.chatWhy = EngineRenders, "the engine renders chats of "+strings.Join(f.architectures, ", ")+" by code of its own"
		return
	case m.tokenizer == nil:
		// Nothing is rendered by code without the ids of its markup.
	case f.form() == formMistral:
		m.codeTokenizes = true
		code, err := newMistral(m.tokenizer, m.kwargs)
		if err != nil {
			m.chatLacking, m.chatWhy = EngineRenders, err.Error()
			return
		}
		m.code = code
		return
	case f.modelType == "gpt_oss":
		// Its /tokenize renders with the template nevertheless.
		code, err := newHarmony(m.tokenizer)
		if err != nil {
			m.chatLacking, m.chatWhy = EngineRenders, err.Error()
		} else {
			m.code = code
		}
	}
	if override == "" && f.processor != "" && !f.hasProcessor && f.processor != f.templates["default"] {
		m.noTemplate(BadTemplate, "chat_template.json is for a processor, and no file tells whether the model has one")
		return
	}
	for _, tools := range []bool{false, true} {
		source := override
		if named, ok := f.templates[override]; ok {
			source = named
		} else if override == "" {
			source = f.template(tools)
		}
		if source == "" {
			switch {
			case slices.Contains(engineTemplates, f.modelType):
				m.noTemplate(NoTemplate, "the engine uses a template of its own for "+f.modelType+", name a copy of it as the chat template")
			case m.plain == nil:
				m.noTemplate(NoTemplate, "the model's files have no chat template")
			}
			return
		}
		if tools && m.plain != nil && m.plain.source == source {
			m.withTools = m.plain
			return
		}
		compiled, err := newChatTemplate(source, format, f)
		if err != nil {
			m.noTemplate(BadTemplate, err.Error())
			return
		}
		if tools {
			m.withTools = compiled
		} else {
			m.plain = compiled
		}
	}
}

// noTemplate notes why there is none, unless chats are rendered by code.
func (m *Model) noTemplate(reason Reason, why string) {
	if m.chatLacking == Exact && m.code == nil {
		m.chatLacking, m.chatWhy = reason, why
	}
	m.plain, m.withTools = nil, nil
}

func newChatTemplate(source, format string, f *files) (*chatTemplate, error) {
	compiled, err := template.Compile(source)
	if err != nil {
		return nil, err
	}
	t := &chatTemplate{Template: compiled, source: source, format: format, special: map[string]jinja.Value{}}
	if format == "" || format == "auto" {
		t.format = compiled.ContentFormat()
	}
	t.clock = clockOf(compiled, source)
	t.foldsDeveloper = !strings.Contains(source, `"developer"`) && !strings.Contains(source, `'developer'`)
	for _, name := range f.unsure {
		if compiled.Uses(name) {
			return nil, fmt.Errorf("the chat template uses %s, which tokenizer_config.json does not give", name)
		}
	}
	for name, token := range f.special {
		if compiled.Uses(name) {
			t.special[name] = token
		}
	}
	return t, nil
}

// maxFollowed is the largest body, and the longest text that a template makes
// of one, that is followed. It bounds the memory of the ids: no engine has a
// context of so many tokens.
const maxFollowed = 16 << 20

// Follow reads a prompt from a request body. It never fails: what cannot be
// followed is marked with the Reason. p keeps nothing of body.
func (m *Model) Follow(p *Prompt, kind Kind, body []byte, now time.Time) {
	m.follow(p, kind, body, now, effort{})
}

// followBriefly is Follow for who has little time: a prompt that a template
// takes more than a few milliseconds for is TooLarge.
func (m *Model) followBriefly(p *Prompt, kind Kind, body []byte, now time.Time) {
	m.follow(p, kind, body, now, effort{brief: true})
}

// Verify is Follow as if the model was not demoted: for who compares it with an
// engine, so as to demote it or to take that back.
func (m *Model) Verify(p *Prompt, kind Kind, body []byte, now time.Time) {
	m.follow(p, kind, body, now, effort{verify: true})
}

// effort is how a prompt is followed: verify, as if the model was not demoted;
// brief, only if that takes little time.
type effort struct{ verify, brief bool }

func (m *Model) follow(p *Prompt, kind Kind, body []byte, now time.Time, how effort) {
	p.reset()
	defer func() {
		if what := recover(); what != nil {
			if m != nil {
				text := fmt.Sprintf("following a prompt panicked: %v\n%s", what, debug.Stack())
				m.defect.CompareAndSwap(nil, &text)
			}
			p.scratch.values = values{} // may be in any state
			m.Approximate(p, Other, nil, Failed)
			return
		}
		p.scratch.values.release()
	}()
	var o outline
	if reason := o.scan(kind, body); reason != Exact {
		m.Approximate(p, kind, body, reason)
		return
	}
	o.effort = how
	o.memory = &p.scratch.values
	p.scratch.made = 0
	o.made = &p.scratch.made
	var reason Reason
	if p.Salt, reason = o.salt(p.Salt); reason == Exact {
		if reason = TooLarge; len(body) <= maxFollowed {
			reason = o.refusal()
		}
	}
	switch {
	case reason != Exact:
	case kind == Other:
		reason = Route
	default:
		day, same := m.day(&o, now)
		if same && m.memo.recall(p, &o, day) {
			return
		}
		// No text is longer than the body.
		p.scratch.values.room(len(body) + 8)
		if o.isChat() {
			reason = m.followChat(p, &o, now)
		} else {
			reason = m.followCompletion(p, &o)
		}
		if same && reason == Exact {
			m.memo.note(p, &o)
		}
	}
	if reason != Exact {
		p.IDs, p.Ends = p.IDs[:0], p.Ends[:0]
		p.Reason = reason
		if len(p.Text) == 0 {
			o.approximate(p)
		}
	}
}

// day tells on which day's date the prompt depends, none when it depends on no
// date. same is false when another prompt of the same bytes may have other ids.
func (m *Model) day(o *outline, now time.Time) (day time.Time, same bool) {
	switch {
	case m.lacks(o) != Exact:
		return day, false
	case !o.isChat():
		return day, true
	case m.code != nil:
		return now, true
	}
	for _, t := range []*chatTemplate{m.plain, m.withTools} {
		switch {
		case t == nil || t.clock == clockUnused:
		case t.clock == clockDay:
			day = now
		default:
			return day, false
		}
	}
	return day, true
}

// lacks is why the model's prompts are not followed now.
func (m *Model) lacks(o *outline) Reason {
	switch {
	case m == nil:
		return NoTokenizer
	case m.lacking != Exact:
		return m.lacking
	case !o.effort.verify && m.demoted.Load() != nil:
		return Demoted
	}
	return Exact
}

func (m *Model) followCompletion(p *Prompt, o *outline) Reason {
	c, reason := o.completion()
	if reason != Exact {
		return reason
	}
	if c.ends != nil {
		p.IDs, p.Ends = append(p.IDs, c.ids...), append(p.Ends, c.ends...)
		return Exact
	}
	if reason := m.lacks(o); reason != Exact {
		return reason
	}
	for _, text := range c.texts {
		if !m.tokenizer.Takes(len(text)) {
			return TooLarge
		}
		p.IDs = m.tokenizer.Append(p.IDs, text, c.addSpecialTokens)
		p.Ends = append(p.Ends, len(p.IDs))
	}
	return Exact
}

func (m *Model) followChat(p *Prompt, o *outline, now time.Time) Reason {
	if m == nil {
		return NoTokenizer
	}
	byCode := m.code != nil && (o.kind == Chat || m.codeTokenizes)
	if !byCode && m.plain == nil {
		switch {
		case m.lacking != Exact:
			return m.lacking
		case m.chatLacking != Exact:
			return m.chatLacking
		}
		return NoTemplate
	}
	r, reason := o.chat()
	if reason != Exact {
		return reason
	}
	if byCode {
		if reason := m.lacks(o); reason != Exact {
			return reason
		}
		if o.kind == Tokenize && r.calls() {
			return Unfollowed // /tokenize does not shorten the ids of calls
		}
		if reason := m.code.render(p, r, now); reason != Exact {
			return reason
		}
		p.Ends = append(p.Ends, len(p.IDs))
		return Exact
	}
	text, reason := m.render(p, r, now)
	if reason != Exact {
		return reason
	}
	reason = m.lacks(o)
	if reason == Exact && o.kind == Chat {
		reason = m.chatLacking
	}
	if reason != Exact {
		p.Text = append(p.Text, text[:min(len(text), maxApproximate)]...)
		p.TextEnds = append(p.TextEnds, len(p.Text))
		return reason
	}
	if !m.tokenizer.Takes(len(text)) || len(text) > maxFollowed {
		p.Text = append(p.Text, text[:min(len(text), maxApproximate)]...)
		p.TextEnds = append(p.TextEnds, len(p.Text))
		return TooLarge
	}
	p.IDs = m.tokenizer.Append(p.IDs, text, r.addSpecialTokens)
	p.Ends = append(p.Ends, len(p.IDs))
	return Exact
}

// Demote makes every further prompt approximate: why tells people what the
// engine has counted otherwise. "" takes it back.
func (m *Model) Demote(why string) {
	if why == "" {
		m.demoted.Store(nil)
		return
	}
	m.demoted.Store(&why)
}

// Defect is the first panic that Follow has caught, with its stack, "" for none.
func (m *Model) Defect() string {
	if m == nil {
		return ""
	}
	if text := m.defect.Load(); text != nil {
		return *text
	}
	return ""
}

// Describe tells people how the model's prompts are followed, and whether
// chats are followed exactly.
func (m *Model) Describe() (how string, exact bool) {
	if m == nil {
		return "approximate: no tokenizer", false
	}
	if why := m.demoted.Load(); why != nil {
		return "approximate: " + *why, false
	}
	if m.lacking != Exact {
		return "approximate: " + m.why, false
	}
	how = "exact: " + m.tokenizer.Kind()
	if m.chatLacking != Exact {
		return "completions " + how + "; chats approximate: " + m.chatWhy, false
	}
	switch {
	case m.code != nil:
		how += ", chats rendered natively"
	case m.withTools == nil:
		how += ", chat template for chats without tools, contents as " + m.plain.format
	case m.withTools != m.plain:
		how += ", chat templates with and without tools, contents as " + m.plain.format
	default:
		how += ", chat template, contents as " + m.plain.format
	}
	if m.Defect() != "" {
		how += "; a prompt has failed, see the log"
	}
	return how, true
}

// Close releases what the tokenizer holds. No prompt may be followed after it.
func (m *Model) Close() {
	if m != nil && m.tokenizer != nil {
		m.tokenizer.Close()
	}
}
