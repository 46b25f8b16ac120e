package prompt

import (
	"fmt"
	"strings"
	"testing"
)

// turns is a chat of so many turns with tools, about 1,300 bytes a message.
func turns(messages int) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"m","stream":true,"messages":[{"role":"system","content":"You are careful."}`)
	for i := range messages {
		fmt.Fprintf(&b, `,{"role":%q,"content":"%d: %s"}`, []string{"user", "assistant"}[i%2], i, strings.Repeat(`Some words, a line\nand \"quotes\" of it. `, 30))
	}
	b.WriteString(`],"tools":[{"type":"function","function":{"name":"weather","description":"Tells the weather.","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]}`)
	return []byte(b.String())
}

// BenchmarkFollowText: a chat of 24 messages from its body to the rendered text.
func BenchmarkFollowText(b *testing.B) {
	m := setups(b)["keeps"]
	body := turns(24)
	var p Prompt
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		m.Follow(&p, Chat, body, epoch)
	}
}

// BenchmarkScan is the part of that which also a prompt takes that is known.
func BenchmarkScan(b *testing.B) {
	body := turns(24)
	var o outline
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		o.scan(Chat, body)
	}
}
