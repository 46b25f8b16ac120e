package template

import (
	"runtime"
	"testing"
)

// TestAppendAlloc: what a template adds up or gathers is not copied to memory
// of its own, nor is the text that comes out. What is left is the library's, a
// few hundred bytes a loop's iteration.
func TestAppendAlloc(t *testing.T) {
	withoutRace(t)
	const messages, size = 24, 64 << 10
	vars := chat(messages, size)
	f := func(source string) {
		t.Helper()
		tmpl, err := Compile(source)
		if err != nil {
			t.Fatal(err)
		}
		var dst []byte
		var before, after runtime.MemStats
		const runs = 50
		for i := range runs + 1 {
			if i == 1 {
				runtime.ReadMemStats(&before)
			}
			if dst, err = tmpl.Append(dst[:0], vars, corpusNow); err != nil {
				t.Fatal(err)
			}
		}
		runtime.ReadMemStats(&after)
		if len(dst) < size/2 {
			t.Errorf("%s: %d bytes are rendered", source, len(dst))
		}
		if n := (after.TotalAlloc - before.TotalAlloc) / runs; n > size*2/3 {
			t.Errorf("%s: %d bytes are allocated", source, n)
		}
	}
	f(`{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}`)
	f(`{% for m in messages %}{% set text = '<' + m.role + '>' + m['content'] | trim %}{{ text }}{% endfor %}`)
	f(`{% for m in messages %}{% set text = m.role ~ m.content %}{{ text }}{% endfor %}`)
}
