package template

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ardanlabs/jinja"
)

// hostileTime is far more than a render may take, for machines under load.
const hostileTime = 20 * time.Second

// What would take forever, or all memory, ends soon and is not followed, or
// fails as in Python's sandbox.
func TestTemplateBounds(t *testing.T) {
	big := jinja.NewString(strings.Repeat("x", 4<<20))
	many := make([]jinja.Value, 50_000)
	for i := range many {
		many[i] = jinja.NewInt(int64(i))
	}
	deep := jinja.NewList(nil)
	for range 5000 {
		deep = jinja.NewList([]jinja.Value{deep})
	}
	vars := map[string]jinja.Value{"big": big, "many": jinja.NewList(many), "deep": deep, "s": jinja.NewString("s")}
	f := func(source string) {
		t.Helper()
		start := time.Now()
		tmpl, err := Compile(source)
		if err == nil {
			var text string
			if text, err = tmpl.Render(vars, corpusNow); err == nil {
				t.Errorf("%q rendered %d bytes", source, len(text))
			}
			if strings.Contains(fmt.Sprint(err), "panics") {
				t.Errorf("%q: %v", source, err)
			}
		}
		took := time.Since(start)
		if testing.Verbose() {
			t.Logf("%.60q: %v %.100v", source, took, err)
		}
		if took > hostileTime {
			t.Errorf("%.60q took %v", source, took)
		}
	}
	f("{% for i in range(10 ** 9) %}x{% endfor %}")
	f("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}")
	f("{% for i in many %}{% for j in many %}{% endfor %}{% endfor %}")
	f("{% for i in many %}{% if i in many and i == 'x' %}{% endif %}{{ many[::-1] }}{% endfor %}")
	f("{% for i in many %}{{ many|sort|length }}{% endfor %}")
	f("{% for i in many %}{{ many }}{% endfor %}")
	f("{% for i in many %}{{ big }}{% endfor %}")
	f("{% for i in many %}{% set x = big|upper %}{% endfor %}")
	f("{% for c in big %}{% for d in big %}{% endfor %}{% endfor %}")
	f("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
	f("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}")
	f("{% macro m() %}{{ caller() }}{% endmacro %}{% macro r() %}{% call m() %}{{ r() }}{% endcall %}{% endmacro %}{{ r() }}")
	f("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}")
	f("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}")
	f("{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}")
	f("{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}")
	f("{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}")
	f("{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}{{ ns.s|length }}")
	f("{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}")
	f("{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s|replace('x', 'xx') %}{% endfor %}{{ ns.s|length }}")
	f("{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = [ns.s, ns.s]|tojson %}{% endfor %}{{ ns.s|length }}")
	f("{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|length }}{{ ns.s }}")
	f("{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}")
	f("{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(100) %}{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}")
	f("{{ 'x' * 10 ** 12 }}")
	f("{{ [1] * 10 ** 12 }}")
	f("{{ 'x'.ljust(10 ** 12) }}{{ 'x'.center(10 ** 10) }}")
	f("{{ '%1000000000d' % 1 }}")
	f("{{ '%.1000000000f' % 1 }}")
	f("{{ 'a\nb'|indent(10 ** 10) }}")
	f("{{ {'a': 1}|tojson(indent=10 ** 10) }}")
	f("{{ 9 ** 9 ** 9 ** 9 }}")
	f("{{ deep }}")
	f("{{ deep|tojson }}")
	f("{{ " + strings.Repeat("(", 50_000) + "1" + strings.Repeat(")", 50_000) + " }}")
	f("{{ " + strings.Repeat("[", 50_000) + strings.Repeat("]", 50_000) + " }}")
	f("{{ " + strings.Repeat("not ", 100_000) + "1 }}")
	f("{{ " + strings.Repeat("-", 100_000) + "1 }}")
	f("{{ 1" + strings.Repeat(" + 1", 200_000) + " }}")
	f("{{ s" + strings.Repeat(".a", 200_000) + " }}")
	f("{{ s" + strings.Repeat("|upper", 200_000) + " }}")
	f("{{ 1" + strings.Repeat(" if 1 else 1", 80_000) + " }}")
	f("{{ " + strings.Repeat("(", 300) + "s" + strings.Repeat(" if s else s)", 300) + " }}" + "{{ raise_exception('end') }}")
	f(strings.Repeat("{% if s %}", 90_000))
	f(strings.Repeat("{% for x in s %}", 60_000))
	f(strings.Repeat("{% if s %}", 5000) + strings.Repeat("{% endif %}", 5000))
	f(strings.Repeat("{% for x in range(10) %}", 40) + strings.Repeat("{% endfor %}", 40))
	f(strings.Repeat("x", 2<<20))
}

// What takes little is rendered briefly, what takes more is not, and leaves
// nothing behind for the next render.
func TestTemplateBriefly(t *testing.T) {
	numbers := func(n int) jinja.Value {
		items := make([]jinja.Value, n)
		for i := range items {
			items[i] = jinja.NewInt(1)
		}
		return jinja.NewList(items)
	}
	nested := numbers(2000)
	for range 200 {
		nested = jinja.NewList([]jinja.Value{nested})
	}
	vars := map[string]jinja.Value{"few": numbers(20), "many": numbers(400), "nested": nested,
		"text": jinja.NewString(strings.Repeat("x", 32<<10))}
	f := func(source string, long bool) {
		t.Helper()
		tmpl, err := Compile(source)
		if err != nil {
			t.Fatal(err)
		}
		want, err := tmpl.Render(vars, corpusNow)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			switch got, err := tmpl.AppendBriefly(nil, vars, corpusNow); {
			case long && !errors.Is(err, ErrLong):
				t.Errorf("%s: %d bytes, %v", source, len(got), err)
			case !long && (err != nil || string(got) != want):
				t.Errorf("%s: %d of %d bytes, %v", source, len(got), len(want), err)
			}
			if again, err := tmpl.Render(vars, corpusNow); err != nil || again != want {
				t.Errorf("%s afterwards: %d of %d bytes, %v", source, len(again), len(want), err)
			}
		}
	}
	f("{% for x in many %}{{ x }}{% endfor %}", false)
	f("{% for x in few %}{% for y in few %}{{ x }}{% endfor %}{% endfor %}", false)
	f("{% for x in many %}{% for y in many %}{% endfor %}{% endfor %}", true)
	f("{% for x in many %}{{ x in many and 'a' in few }}{% endfor %}", true)
	f("{{ text }}{{ text }}{{ many|tojson(indent=4) }}", false)
	f("{{ nested|tojson }}", false)
	f("{{ nested|tojson(indent=4) }}", true)
	f("{% for x in few %}{{ text }}{% endfor %}", true)
	f("{% for x in few %}{% set y = text|upper %}{% endfor %}", true)
}

// Real templates bear chats of any size within a second or say that they do
// not.
func TestTemplateLargeChats(t *testing.T) {
	folder, _ := corpus(t)
	all, _ := filepath.Glob(filepath.Join(folder, "*.jinja"))
	var paths []string
	for i, path := range all {
		if i%6 == 0 || testing.Verbose() {
			paths = append(paths, path)
		}
	}
	huge := chat(1, 4<<20)
	long := chat(50_000, 4<<20)
	followed := 0
	for _, path := range paths {
		source, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		tmpl, err := Compile(string(source))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		for _, vars := range []map[string]jinja.Value{huge, long} {
			start := time.Now()
			_, err := tmpl.Render(vars, corpusNow)
			if took := time.Since(start); took > hostileTime {
				t.Errorf("%s took %v", path, took)
			}
			if err == nil {
				followed++
			} else if errors.Is(err, ErrUnfollowed) {
				t.Logf("%s: %v", filepath.Base(path), err)
			}
		}
	}
	t.Logf("%d of %d large chats rendered", followed, 2*len(paths))
	want := lessUnderRace(t, len(paths), len(paths)/4) // the rest may take longer than templates may, then
	if followed < want {
		t.Errorf("only %d large chats rendered", followed)
	}
}

// Any goroutine may render, and none sees what another is given.
func TestTemplateConcurrently(t *testing.T) {
	tmpl, err := Compile("{% macro m(x) %}<{{ x }}>{% endmacro %}{% for m_ in messages %}{{ m(m_.role + '!') }}{{ loop.index }}{% endfor %}{{ n }}")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	for i := range 4 {
		go func() {
			v := jinja.NewDict()
			v.AsDict().Set("role", jinja.NewString(fmt.Sprint(i)))
			vars := map[string]jinja.Value{"messages": jinja.NewList([]jinja.Value{v, v}), "n": jinja.NewInt(int64(i))}
			want := fmt.Sprintf("<%d!>1<%d!>2%d", i, i, i)
			for range 200 {
				if text, err := tmpl.Render(vars, corpusNow); err != nil || text != want {
					done <- fmt.Errorf("got %q, %v, want %q", text, err, want)
					return
				}
			}
			done <- nil
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// No template and no chat makes it panic, or takes long.
func FuzzTemplate(f *testing.F) {
	_, cases := snippets(f)
	for i, c := range cases {
		if i%7 == 0 {
			f.Add(c.Source)
		}
	}
	vars, _ := snippets(f)
	f.Fuzz(func(t *testing.T, source string) {
		defer time.AfterFunc(hostileTime, func() { panic(fmt.Sprintf("%q takes forever", source)) }).Stop()
		tmpl, err := Compile(source)
		if err != nil {
			return
		}
		if _, err := tmpl.Render(vars, corpusNow); err != nil && (strings.Contains(err.Error(), "panics") || strings.Contains(err.Error(), "BUG")) {
			t.Errorf("%q: %v", source, err)
		}
	})
}
