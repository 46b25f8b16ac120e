package prompt

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestOutline: which members of a body bear on its prompt, and where they are.
func TestOutline(t *testing.T) {
	f := func(kind Kind, body string, want string) {
		t.Helper()
		var o outline
		got := ""
		if reason := o.scan(kind, []byte(body)); reason != Exact {
			got = reason.String()
		} else {
			var all []string
			for m := range members {
				if o.has(m) {
					all = append(all, memberNames[m]+"="+string(o.raw(m)))
				}
			}
			got = strings.Join(all, " ")
		}
		if got != want {
			t.Errorf("%s: got %s, want %s", body, got, want)
		}
	}
	f(Chat, `{}`, ``)
	f(Chat, ` { "model" : "m" , "messages" : [ { } ] } `, `messages=[ { } ]`)
	f(Chat, `{"messages":[1],"temperature":0.5,"stop":["\"]}"],"tools":null}`, `messages=[1] tools=null`)
	f(Chat, `{"messages":1,"messages":2}`, `messages=2`)
	f(Chat, `{"mess\u0061ges":"a\\\"b"}`, `messages="a\\\"b"`)
	f(Chat, "\ufeff{\"tools\":[]}", `tools=[]`)
	f(Chat, `{"prompt":"x","suffix":"y"}`, ``)
	f(Completion, `{"prompt":"x","suffix":"y","messages":[]}`, `prompt="x" suffix="y"`)
	f(Tokenize, `{"messages":[],"cache_salt":"a","truncate_prompt_tokens":1,"prompt":5}`, `messages=[] prompt=5`)
	f(Other, `{"instructions":"i","input":[],"metadata":{}}`, `instructions="i" input=[]`)
	for _, body := range []string{``, ` `, `[]`, `"x"`, `{`, `{"`, `{"a`, `{"a"`, `{"a":`, `{"a":}`, `{"a":1`, `{"a":1,`, `{"a":1,}`,
		`{"a":1}x`, `{a:1}`, `{"a" 1}`, `{"a":[}`, `{"a":"x`, `{"a":"x\"}`, `{"a":tru}`, `{"a":1.}`, `{"a":01}`, "{\"a\":\"\xff\"}", `{"a":1;}`} {
		f(Chat, body, "malformed")
	}
}

// TestOtherMembersDoNotMatter: a body's prompt is that of its outline.
func TestOtherMembersDoNotMatter(t *testing.T) {
	models := setups(t)
	base := `"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"f"}}]`
	var want Prompt
	models["all"].Follow(&want, Chat, []byte("{"+base+"}"), epoch)
	others := map[string]any{"model": "m", "stream": true, "temperature": 0, "n": 3, "max_tokens": 5, "user": "u",
		"prompt": "p", "suffix": "s", "echo": true, "input": "i", "stop": []string{"messages"}, "logprobs": true,
		"response_format": map[string]any{"type": "json_object"}, "priority": 1, "unknown": map[string]any{"tools": 1}}
	for name, v := range others {
		value, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var p Prompt
		models["all"].Follow(&p, Chat, []byte(`{"`+name+`":`+string(value)+`,`+base+`}`), epoch)
		if p.Reason != want.Reason || string(p.Text) != string(want.Text) {
			t.Errorf("%s: got %v %s, want %v %s", name, p.Reason, p.Text, want.Reason, want.Text)
		}
	}
}

// FuzzFollow: no body makes Follow panic, and none is left without a text that
// stands for it.
func FuzzFollow(f *testing.F) {
	f.Add(uint8(Chat), `{"messages":[{"role":"user","content":[{"type":"text","text":"\ud83d\ude00"},"b"]},{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]}],"continue_final_message":true,"add_generation_prompt":false}`)
	f.Add(uint8(Chat), `{"messages":[{"role":"developer","content":"x","tools":[{"type":"function","function":{"name":"f"}}]},{"role":"system","content":"x-anthropic-billing-header"}],"tools":[{"function":{"name":"f","strict":null}}],"tool_choice":{"function":{"name":"f"}},"documents":[{"a":"b"}]}`)
	f.Add(uint8(Completion), `{"prompt":[[1,2],[3]],"cache_salt":"s"}`)
	f.Add(uint8(Completion), `{"prompt":["a","b"],"add_special_tokens":"no"}`)
	f.Add(uint8(Tokenize), `{"prompt":"a","add_special_tokens":0}`)
	f.Add(uint8(Other), `{"input":[{"role":"user","content":"x"}],"instructions":"i"}`)
	models := setups(f)
	f.Fuzz(func(t *testing.T, kind uint8, body string) {
		for _, name := range []string{"all", "parts", "developer", "trims"} {
			m := models[name]
			var p Prompt
			m.Follow(&p, Kind(kind%4), []byte(body), epoch)
			if p.Reason == Failed {
				t.Fatal(m.Defect())
			}
			check(t, &p)
			p.reset()
			m.Approximate(&p, Kind(kind%4), []byte(body), Late)
			check(t, &p)
		}
	})
}

// check reports a Prompt that contradicts itself.
func check(t *testing.T, p *Prompt) {
	t.Helper()
	if p.Reason >= countReasons {
		t.Fatalf("reason %d", p.Reason)
	}
	if p.Reason == Exact != (len(p.Ends) > 0) || len(p.Ends) > 0 && len(p.TextEnds) > 0 {
		t.Fatalf("%v with %d ends of ids and %d of texts", p.Reason, len(p.Ends), len(p.TextEnds))
	}
	for _, ends := range []struct {
		ends []int
		n    int
	}{{p.Ends, len(p.IDs)}, {p.TextEnds, len(p.Text)}} {
		last := 0
		for _, end := range ends.ends {
			if end < last {
				t.Fatalf("ends %v go back", ends.ends)
			}
			last = end
		}
		if last != ends.n {
			t.Fatalf("ends %v of %d", ends.ends, ends.n)
		}
	}
}
