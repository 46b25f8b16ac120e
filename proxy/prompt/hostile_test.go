package prompt

import (
	"runtime"
	"strings"
	"testing"
	"time"
)

// hostileTime is far more than a prompt may take, for machines under load; what
// is quadratic takes minutes.
const hostileTime = 20 * time.Second

// TestHostileRequests: no body takes long, crashes or is left without a text.
// The bound is far above what is needed, for machines that are busy.
func TestHostileRequests(t *testing.T) {
	models := setups(t)
	scale := 1
	if raceDetector {
		scale = 16
	}
	user := func(content string) string { return `{"messages":[{"role":"user","content":` + content + `}]}` }
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	list := func(n int, item string) string {
		return "[" + strings.TrimSuffix(strings.Repeat(item+",", n), ",") + "]"
	}
	bodies := map[string]string{
		"4 MB of text":            user(`"` + strings.Repeat("text and ", 4<<20/9/scale) + `"`),
		"4 MB of escapes":         user(`"` + strings.Repeat(`\u00e9`, 4<<20/6/scale) + `"`),
		"4 MB of quotes":          user(`"` + strings.Repeat(`\"`, 4<<20/2/scale) + `"`),
		"4 MB of backslashes":     user(`"` + strings.Repeat(`\`, 4<<20/scale) + `"`),
		"4 MB of brackets":        user(deep(2 << 20 / scale)),
		"4 MB of open brackets":   user(strings.Repeat("[", 4<<20/scale)),
		"4 MB of open objects":    user(strings.Repeat(`{"a":`, 4<<20/5/scale)),
		"50,000 messages":         `{"messages":` + list(50_000/scale, `{"role":"user","content":"hi"}`) + `}`,
		"50,000 developers":       `{"messages":` + list(50_000/scale, `{"role":"developer","content":"hi"}`) + `}`,
		"50,000 parts":            user(list(50_000/scale, `{"type":"text","text":"hi","x":1}`)),
		"500,000 empty parts":     user(list(500_000/scale, `""`)),
		"1,000 tools":             `{"messages":[{"role":"user","content":"x"}],"tools":` + list(1000, `{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"number"}}}}}`) + `}`,
		"1,000 choices":           `{"messages":[{"role":"user","content":"x"}],"tool_choice":{"function":{"name":"g"}},"tools":` + list(1000, `{"function":{"name":"f"}}`) + `}`,
		"10,000 calls":            `{"messages":[{"role":"assistant","tool_calls":` + list(10_000/scale, `{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":[1,2,{\"b\":null}]}"}}`) + `}]}`,
		"deep arguments":          `{"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"` + deep(1<<20/scale) + `"}}]}]}`,
		"200,000 members":         `{"messages":[{"role":"user","content":"x"}],` + strings.Repeat(`"tools":null,`, 200_000/scale) + `"a":1}`,
		"200,000 fields":          user(`"x",` + strings.TrimSuffix(strings.Repeat(`"reasoning_content":"a",`, 200_000/scale), ",")),
		"200,000 other fields":    user(`[{"type":"text","text":"x"` + strings.Repeat(`,"k":1`, 200_000/scale) + `}]`),
		"a million numbers":       user(`[{"type":"text","text":"x","n":` + list(1_000_000/scale, "1") + `}]`),
		"a long number":           user(`[{"type":"text","text":"x","n":` + strings.Repeat("9", 4<<20/scale) + `}]`),
		"a long fraction":         user(`[{"type":"text","text":"x","n":0.` + strings.Repeat("9", 4<<20/scale) + `}]`),
		"kwargs of all kinds":     `{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{` + strings.Repeat(`"custom":`+deep(200)+`,`, 1000) + `"custom":1}}`,
		"one prompt of a id":      `{"prompt":` + list(1_000_000/scale, "1") + `}`,
		"1,024 prompts":           `{"prompt":` + list(1024, `"x"`) + `}`,
		"one prompt too many":     `{"prompt":` + list(1025, `"x"`) + `}`,
		"100,000 lists of ids":    `{"prompt":` + list(100_000/scale, `[1]`) + `}`,
		"a million spaces":        strings.Repeat(" ", 1<<20/scale) + user(strings.Repeat(" ", 1<<20/scale)+`"x"`),
		"lists in lists":          user(`[{"type":"text","text":"x","n":` + list(4<<20/3/scale, "[]") + `}]`),
		"objects":                 `{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":` + list(4<<20/7/scale, `{"":1}`) + `}}`,
		"objects in arguments":    `{"messages":[` + strings.Repeat(`{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":`+list(300_000/scale, `[]`)+`}"}}]},`, 4) + `{"role":"user","content":"x"}]}`,
		"a message of many roles": `{"messages":[{` + strings.Repeat(`"role":"user",`, 100_000/scale) + `"content":"x"}]}`,
	}
	for name, body := range bodies {
		t.Run(name, func(t *testing.T) {
			for _, setup := range []string{"parts", "developer"} {
				for _, kind := range []Kind{Chat, Completion} {
					m := models[setup]
					var p Prompt
					started := time.Now()
					m.Follow(&p, kind, []byte(body), epoch)
					if took := time.Since(started); took > hostileTime {
						t.Errorf("%s, kind %d: took %v", setup, kind, took)
					} else if took > time.Second/4 {
						t.Logf("%s, kind %d: %v: took %v", setup, kind, p.Reason, took)
					}
					if p.Reason == Failed {
						t.Error(m.Defect())
					}
					check(t, &p)
				}
			}
		})
	}
}

// TestHostileMemory: what a body of the largest size has the agent hold while it
// is followed is bounded: it does not grow with the number of values in it.
func TestHostileMemory(t *testing.T) {
	withoutRace(t)
	m, err := Load(Source{Tokenizer: "builtin:sim"})
	if err != nil {
		t.Fatal(err)
	}
	const most = 512 << 20 // ten times that without the bounds
	f := func(name, open, each, end string, want Reason) {
		body := open + strings.Repeat(each, (maxFollowed-len(open)-len(end))/len(each)) + end
		var p Prompt
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		m.Follow(&p, Chat, []byte(body), epoch)
		runtime.ReadMemStats(&after)
		if p.Reason != want {
			t.Errorf("%s: %v", name, p.Reason)
		}
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > most {
			t.Errorf("%s: %d MiB were allocated", name, allocated>>20)
		}
		check(t, &p)
	}
	const start = `{"messages":[{"role":"user","content":"`
	f("lists", start+`","x":[`, "[],", "1]}]}", TooLarge)
	f("objects", start+`","x":[`, `{"":1},`, "1]}]}", TooLarge)
	f("arguments", `{"messages":[`, `{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":[`+strings.Repeat("[],", 100_000)+`1]}"}}]},`, `{"role":"user","content":"x"}]}`, TooLarge)
	f("messages", `{"messages":[`, `{"role":"user","content":"x"},`, `{"role":"user","content":"x"}]}`, TooLarge)
	f("text", start, "a b, ", `"}]}`, Exact)
}
