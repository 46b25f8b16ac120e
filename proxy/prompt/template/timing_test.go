package template

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ardanlabs/jinja"
)

// chat returns the variables of a chat of so many messages and about so many
// bytes.
func chat(messages, bytes int) map[string]jinja.Value {
	text := strings.Repeat("All work and no play makes <Jack> a \"dull\" boy.\n", bytes/messages/48+1)[:bytes/messages]
	items := make([]jinja.Value, messages)
	for i := range items {
		role := "user"
		switch {
		case i == 0:
			role = "system"
		case i%2 == 0:
			role = "assistant"
		}
		v := jinja.NewDict()
		v.AsDict().Set("role", jinja.NewString(role))
		v.AsDict().Set("content", jinja.NewString(text))
		items[i] = v
	}
	return map[string]jinja.Value{
		"messages": jinja.NewList(items), "tools": jinja.None(), "documents": jinja.None(), "add_generation_prompt": jinja.NewBool(true),
		"bos_token": jinja.NewString("<s>"), "eos_token": jinja.NewString("</s>"),
	}
}

// BenchmarkTemplate renders a chat of 24 messages and 32 KiB by real templates,
// and by the library alone what Qwen3's template makes of it:
//
//	go test -bench Template -run '^$' ./proxy/prompt
func BenchmarkTemplate(b *testing.B) {
	folder, _ := corpus(b)
	vars := chat(24, 32<<10)
	for _, name := range []string{"npm-qwen3", "npm-llama3_1", "npm-deepseek_v3", "npm-gemma3", "hfjs-Qwen_Qwen2.5-7B-Instruct"} {
		source, err := os.ReadFile(filepath.Join(folder, name+".jinja"))
		if err != nil {
			b.Fatal(err)
		}
		tmpl, err := Compile(string(source))
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var dst []byte
			for b.Loop() {
				if dst, err = tmpl.Append(dst[:0], vars, corpusNow); err != nil {
					b.Fatal(err)
				}
			}
		})
		library, err := jinja.Compile(string(source))
		if err != nil {
			continue
		}
		b.Run(fmt.Sprintf("%s/library", name), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := library.RenderValues(vars); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
