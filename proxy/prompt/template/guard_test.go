package template

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/ardanlabs/jinja"
)

// TestGuards: which loops may end early, and that they then render what the
// same loop renders that may not. Behind each template's if, an empty one keeps
// the other from being guarded.
func TestGuards(t *testing.T) {
	var chats []map[string]jinja.Value
	r := rand.New(rand.NewPCG(5, 5))
	for range 60 {
		items := make([]jinja.Value, r.IntN(6))
		for i := range items {
			items[i] = jinja.NewDict()
			if r.IntN(8) > 0 {
				items[i].AsDict().Set("role", jinja.NewString([]string{"user", "assistant", "tool"}[r.IntN(3)]))
			}
			items[i].AsDict().Set("content", jinja.NewString(fmt.Sprint(r.IntN(3))))
		}
		vars := map[string]jinja.Value{"messages": jinja.NewList(items)}
		switch r.IntN(3) {
		case 0:
			vars["other"] = jinja.NewList(items)
		case 1:
			vars["other"] = jinja.NewInt(1)
		}
		chats = append(chats, vars)
	}
	f := func(before, sets, condition, body string, want bool) {
		t.Helper()
		const after = `{% endfor %}[{{ ns.go }} {{ ns.at }} {{ ns.n }}]{{ index }}`
		source := before + `{% for m in messages[::-1] %}` + sets + `{% if ` + condition + ` %}` + body + `{% endif %}`
		guarded, err := Compile(source + after)
		if err != nil {
			t.Fatalf("%s: %v", source, err)
		}
		plain, err := Compile(source + `{% if false %}{% endif %}` + after)
		if err != nil {
			t.Fatalf("%s: %v", source, err)
		}
		if got := strings.Contains(guarded.rewritten, "_while"); got != want || strings.Contains(plain.rewritten, "_while") {
			t.Errorf("%s: guarded %v, want %v", source, got, want)
		}
		for _, vars := range chats {
			got, err := guarded.Render(vars, corpusNow)
			all, failed := plain.Render(vars, corpusNow)
			if got != all || (err == nil) != (failed == nil) || errors.Is(err, ErrUnfollowed) != errors.Is(failed, ErrUnfollowed) {
				t.Fatalf("%s with %v: %q, %v, want %q, %v", source, vars["messages"], got, err, all, failed)
			}
		}
	}
	const (
		ns    = `{% set ns = namespace(go=true, at=messages|length - 1, n=0) %}`
		index = `{% set index = (messages|length - 1) - loop.index0 %}`
		user  = `ns.go and m.role == "user"`
		found = `{% set ns.go = false %}{% set ns.at = index %}<{{ m.content }}>`
	)
	f(ns, index, user, found, true)
	f(ns, index, `ns.go and m.role == "user" and not(m.content.startswith("1") and m.content.endswith("1"))`, found, true)
	f(ns, index, `ns.go`, found, true)
	f(ns, ``, user, `{% set ns.go = false %}`, true)
	f(ns, `{% set k = loop.revindex %}{% set index = other|length + loop.index %}`, user, found, true)
	f(`{% set ns = namespace(go=false) %}`, index, user, found, true)
	f(`{% set ns = namespace(n=0) %}`, index, user, found, true)
	// A namespace of the loop's own is not the one outside.
	f(ns, index, user, `{% set ns = namespace(go=false) %}{{ ns.go }}`, false)
	// What goes on in every iteration.
	f(ns, index+`{{ m.content }}`, user, found, false)
	f(ns, index+`{% set ns.n = ns.n + 1 %}`, user, found, false)
	f(ns, index+`{% if m.role == "tool" %}{% set ns.go = true %}{% endif %}`, user, found, false)
	f(ns, index, `m.role == "user" and ns.go`, found, false)
	f(ns, index, `ns.go or m.role == "user"`, found, false)
	f(ns, index, `not ns.go`, found, false)
	f(ns, index, user, found+`{% else %}{% set ns.n = ns.n + 1 %}`, false)
	f(ns, index, user, found+`{% elif true %}{% set ns.n = ns.n + 1 %}`, false)
	// Assignments that may fail later than at first.
	f(ns, `{% set index = m.content + m.role %}`, user, found, false)
	f(ns, `{% set index = m|length %}`, user, found, false)
	f(ns, `{% set index = 9223372036854775800 + loop.index0 %}`, user, found, false)
	f(ns, `{% set k = 0 %}{% set index = k + 1 %}`, user, found, false)
}
