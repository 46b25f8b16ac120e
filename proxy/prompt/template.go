package prompt

import (
	"strings"
	"time"

	"github.com/ardanlabs/jinja"
)

type template struct {
	source string
	t      *jinja.Template
}

func compileTemplate(source string) (*template, error) {
	t, err := jinja.Compile(source)
	return &template{source, t}, err
}

func (t *template) render(vars map[string]jinja.Value, now time.Time) (string, error) {
	return t.t.RenderValues(vars)
}

func (t *template) contentFormat() string {
	if strings.Contains(t.source, " in message.content") {
		return "openai"
	}
	return "string"
}

func (t *template) uses(name string) bool { return strings.Contains(t.source, name) }

func (t *template) usesClock() bool { return strings.Contains(t.source, "strftime_now") }
