package proxy

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestScanCall(t *testing.T) {
	f := func(body string, kind memberKind, name string, stream bool) {
		t.Helper()
		c, err := scanCall([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			return
		}
		got := ""
		if c.model == memberString {
			got = string(c.name([]byte(body)))
		}
		if c.model != kind || got != name || c.stream != stream {
			t.Errorf("%s: kind %d, name %q, stream %v", body, c.model, got, c.stream)
		}
	}
	f(`{}`, memberMissing, "", false)
	f(" \t\r\n{ } \n", memberMissing, "", false)
	f(`{"model":"m"}`, memberString, "m", false)
	f(`{ "model" : "m" , "stream" : true }`, memberString, "m", true)
	f(`{"stream":false,"model":"a/b-c"}`, memberString, "a/b-c", false)
	f(`{"model":null}`, memberNull, "", false)
	f(`{"model":""}`, memberString, "", false)
	f(`{"model":7}`, memberOther, "", false)
	f(`{"model":{"model":"x"}}`, memberOther, "", false)
	f(`{"model":["x"]}`, memberOther, "", false)
	f(`{"model":true,"stream":"true"}`, memberOther, "", false)
	f(`{"model":"a","model":"b"}`, memberString, "b", false)
	f(`{"model":"a","model":null}`, memberNull, "", false)
	f(`{"stream":true,"stream":null}`, memberMissing, "", false)
	f(`{"messages":[{"model":"x","stream":true}],"model":"m"}`, memberString, "m", false)
	f(`{"prompt":"\"model\":\"x\"","model":"m"}`, memberString, "m", false)
	f(`{"mod\u0065l":"m"}`, memberString, "m", false)
	f(`{"model":"\u006d\n\"\\"}`, memberString, "m\n\"\\", false)
	f(`{"model":"\ud83d\ude00"}`, memberString, "\U0001F600", false)
	f(`{"\u0073\u0074\u0072\u0065\u0061\u006d":true}`, memberMissing, "", true)
	f(`{"Model":"x","STREAM":true}`, memberMissing, "", false)
	f(`{"a":[[[{}],[],{"b":[1,2,{"c":null}]}]],"model":"m"}`, memberString, "m", false)
	f(`{"a":-0.5e+7,"b":0,"c":1E3,"model":"m"}`, memberString, "m", false)
	f(`{"a":"`+strings.Repeat("long enough for words ", 20)+`","model":"m"}`, memberString, "m", false)
}

func TestScanCallRefuses(t *testing.T) {
	f := func(body string) {
		t.Helper()
		if c, err := scanCall([]byte(body)); err == nil {
			t.Errorf("%q is taken: %+v", body, c)
		}
		if json.Valid([]byte(body)) && strings.HasPrefix(body, "{") && !strings.Contains(body, "[[[[") {
			t.Errorf("%q is a JSON object", body)
		}
	}
	f("")
	f(" ")
	f("{")
	f("{}x")
	f("{}{}")
	f("\xef\xbb\xbf{}")
	f("null")
	f(`"model"`)
	f("[]")
	f("7")
	f(`[{"model":"m"}]`)
	f(`{"model"}`)
	f(`{"model":}`)
	f(`{"model":"m",}`)
	f(`{,"model":"m"}`)
	f(`{model:"m"}`)
	f(`{'model':'m'}`)
	f(`{"model":"m"`)
	f(`{"model":"m`)
	f(`{"model":"m\"}`)
	f("{\"model\":\"a\nb\"}")
	f("{\"model\":\"a\x00b\"}")
	f(`{"model":"\x"}`)
	f(`{"model":"\u12g4"}`)
	f(`{"model":"\u12"}`)
	f(`{"a":01}`)
	f(`{"a":1.}`)
	f(`{"a":.5}`)
	f(`{"a":+1}`)
	f(`{"a":1e}`)
	f(`{"a":-}`)
	f(`{"a":NaN}`)
	f(`{"a":Infinity}`)
	f(`{"a":tru}`)
	f(`{"a":truex}`)
	f(`{"a":nul`)
	f(`{"a":[1,]}`)
	f(`{"a":[1 2]}`)
	f(`{"a":[1}`)
	f(`{"a":{"b":1]}`)
	f(`{"a":{"b" 1}}`)
	f(`{"a":{1:1}}`)
	f(`{"a":1 "b":2}`)
	f(`{"a":` + strings.Repeat("[", 1000000))
	f(`{"a":` + strings.Repeat("[", maxDepth) + strings.Repeat("]", maxDepth) + `}`)
}

func TestScanCallSaysWhere(t *testing.T) {
	f := func(body string, want error) {
		t.Helper()
		if _, err := scanCall([]byte(body)); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", body, err, want)
		}
	}
	f(`[1]`, errNotObject)
	f(``, errNotObject)
	f(`{"a":x}`, syntaxError(5))
	f(`[1`, syntaxError(2))
	f(`{"a":`+strings.Repeat("[", maxDepth)+strings.Repeat("]", maxDepth)+`}`, errDepth)
}

func TestScanCallDoesNotAllocate(t *testing.T) {
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("hello ", 1000) + `"}],"stream":true}`)
	if n := testing.AllocsPerRun(100, func() {
		if c, err := scanCall(body); err != nil || c.model != memberString || !c.stream {
			t.Fatal(c, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzScanCall compares the scanner with encoding/json: what is accepted, the
// model and the stream flag. Where they differ:
//   - a string that is not UTF-8 is passed on as it is; encoding/json replaces
//     what is wrong in it, so a model's name is compared only when it is UTF-8.
//   - the nesting limit is on values here and on parser states there, so deep
//     bodies are not compared.
func FuzzScanCall(f *testing.F) {
	for _, s := range []string{`{}`, `{"model":"m","stream":true}`, `{"a":[1,-2.5e3,{"b":null}],"model":"\u006d"}`,
		`[1]`, `{"model":"a","model":7}`,
		`{"stream_options":{"include_usage":false,"a":[1,{}]},"n":2}`, `{"stream_options":{},"stream_options":null}`, "{\"a\":\"\\ud800\"} \n", `{"mod\u0065l":""}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if strings.Count(string(body), "[")+strings.Count(string(body), "{") > maxDepth-2 {
			t.Skip()
		}
		c, err := scanCall(body)
		var want map[string]json.RawMessage
		jerr := json.Unmarshal(body, &want)
		if jerr == nil && want == nil {
			jerr = errNotObject // the literal null
		}
		if (err == nil) != (jerr == nil) {
			t.Fatalf("%q: we say %v, encoding/json %v", body, err, jerr)
		}
		if err != nil {
			return
		}
		if string(want["stream"]) == "true" != c.stream {
			t.Fatalf("%q: stream %v", body, c.stream)
		}
		if got := string(body[c.optionsStart:c.optionsEnd]); got != string(want["stream_options"]) {
			t.Fatalf("%q: stream_options is %s", body, got)
		}
		var options map[string]json.RawMessage
		if c.options == memberObject {
			_ = json.Unmarshal(want["stream_options"], &options)
		}
		if got := string(body[c.usageStart:c.usageEnd]); got != string(options["include_usage"]) {
			t.Fatalf("%q: include_usage is %s", body, got)
		}
		raw, ok := want["model"]
		var name string
		switch {
		case !ok:
			if c.model != memberMissing {
				t.Fatalf("%q: model kind %d", body, c.model)
			}
			return
		case string(raw) != string(body[c.start:c.end]):
			t.Fatalf("%q: model is %s, want %s", body, body[c.start:c.end], raw)
		case string(raw) == "null":
			if c.model != memberNull {
				t.Fatalf("%q: model kind %d", body, c.model)
			}
		case json.Unmarshal(raw, &name) != nil:
			if c.model != memberOther {
				t.Fatalf("%q: model kind %d", body, c.model)
			}
		case c.model != memberString:
			t.Fatalf("%q: model kind %d", body, c.model)
		case utf8.Valid(raw) && string(c.name(body)) != name:
			t.Fatalf("%q: model %q, want %q", body, c.name(body), name)
		}
	})
}

func TestModelsList(t *testing.T) {
	got := appendModels(nil, []*Model{
		{Name: "a\"b", Created: 7, OwnedBy: "vllm", MaxModelLen: 4096, Aliases: []string{"x"}},
		{Name: "c"},
	}, nil)
	want := `{"object":"list","data":[` +
		`{"id":"a\"b","object":"model","created":7,"owned_by":"vllm","root":"a\"b","parent":null,"max_model_len":4096},` +
		`{"id":"x","object":"model","created":7,"owned_by":"vllm","root":"a\"b","parent":null,"max_model_len":4096},` +
		`{"id":"c","object":"model","created":0,"owned_by":"inferrail","root":"c","parent":null}]}`
	if string(got) != want || !json.Valid(got) {
		t.Errorf("got %s", got)
	}
	if got := string(appendModels(nil, nil, nil)); got != `{"object":"list","data":[]}` {
		t.Errorf("of none: %s", got)
	}
}

func TestErrorBody(t *testing.T) {
	for f := none + 1; f < failures; f++ {
		row := failureTable[f]
		if row.label == "" || row.text == "" || row.blame == byNobody {
			t.Errorf("failure %d is not filled in: %+v", f, row)
		}
		if row.status == 0 {
			continue
		}
		var got struct {
			Error struct {
				Message, Type string
				Param         *string
				Code          int
			}
		}
		body := appendError(nil, f, "", "")
		if err := json.Unmarshal(body, &got); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		if e := got.Error; e.Message != row.text || e.Type != row.kind || e.Code != row.status || e.Param != nil {
			t.Errorf("%s", body)
		}
	}
	if got, want := string(appendError(nil, unknownModel, "The model `\x00\"` does not exist.", "model")),
		`{"error":{"message":"The model `+"`\\u0000\\\"`"+` does not exist.","type":"NotFoundError","param":"model","code":404}}`; got != want {
		t.Errorf("got %s", got)
	}
}

func TestScanCallStreamOptions(t *testing.T) {
	f := func(body string, kind memberKind, options, usage string) {
		t.Helper()
		c, err := scanCall([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			return
		}
		if got := body[c.optionsStart:c.optionsEnd]; c.options != kind || got != options {
			t.Errorf("%s: kind %d, options %q", body, c.options, got)
		}
		if got := body[c.usageStart:c.usageEnd]; got != usage {
			t.Errorf("%s: include_usage %q, want %q", body, got, usage)
		}
	}
	f(`{}`, memberMissing, "", "")
	f(`{"stream_options":null}`, memberNull, "null", "")
	f(`{"stream_options":{}}`, memberObject, "{}", "")
	f(`{"stream_options": { } }`, memberObject, "{ }", "")
	f(`{"stream_options":{"include_usage":true}}`, memberObject, `{"include_usage":true}`, "true")
	f(`{"stream_options":{"a":[{}],"include_usage" : false , "b":{"include_usage":true}}}`, memberObject, `{"a":[{}],"include_usage" : false , "b":{"include_usage":true}}`, "false")
	f(`{"stream_options":{"include_usage":{"x":1}}}`, memberObject, `{"include_usage":{"x":1}}`, `{"x":1}`)
	f(`{"stream_options":{"include_usage":true,"include_usage":null}}`, memberObject, `{"include_usage":true,"include_usage":null}`, "null")
	f(`{"stream_options":{"include\u005fusage":true}}`, memberObject, `{"include\u005fusage":true}`, "true")
	f(`{"stream_options":{"include_usage":true},"stream_options":{}}`, memberObject, "{}", "")
	f(`{"stream_options":{"include_usage":true},"stream_options":null}`, memberNull, "null", "")
	f(`{"stream_options":{"include_usage":true},"stream_options":"x"}`, memberString, `"x"`, "")
	f(`{"stream_options":[{"include_usage":true}]}`, memberOther, `[{"include_usage":true}]`, "")
	f(`{"include_usage":true,"x":{"stream_options":{"include_usage":true}}}`, memberMissing, "", "")
	f(`{"stream_options":{"model":"x","stream":true,"n":3}}`, memberObject, `{"model":"x","stream":true,"n":3}`, "")
}

func TestEstimate(t *testing.T) {
	f := func(body string, input, output int64) {
		t.Helper()
		c, err := scanCall([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			return
		}
		if got := c.estimate(true); got.Input != input || got.Output != output {
			t.Errorf("%s: %+v, want %d and %d", body, got, input, output)
		}
		if got := c.estimate(false); got.Input != input || got.Output != 0 {
			t.Errorf("%s: %+v when nothing is generated", body, got)
		}
	}
	const none = usualAnswer
	f(`{}`, 0, none)
	f(`{"prompt":"`+strings.Repeat("many words ", 40)+`"}`, (440+6)/4, none)
	f(`{"messages":[{"role":"user","content":"abcd"}]}`, (8+4+4+7+4)/4, none)
	f(`{"prompt":[1,22,333,4444]}`, 6/4+4, none)
	f(`{"max_tokens":10}`, 10/4+1, 10)
	f(`{"max_tokens":10,"max_tokens":20}`, 20/4+2, 20)
	f(`{"max_tokens":10,"max_tokens":null}`, 20/4+1, none)
	f(`{"max_completion_tokens":7,"max_tokens":10}`, 31/4+2, 7)
	f(`{"max_tokens":10,"max_completion_tokens":null}`, 31/4+1, 10)
	f(`{"max_output_tokens":30,"n":2}`, 18/4+2, 60)
	f(`{"n":3}`, 1, 3*none)
	f(`{"n":0,"max_tokens":0}`, 11/4+2, none)
	f(`{"n":-2,"max_tokens":-1}`, 11/4+2, none)
	f(`{"max_tokens":"10"}`, 12/4, none)
	f(`{"max_tokens":1e3}`, 10/4+1, 1000)
	f(`{"max_tokens":1000.0}`, 10/4+1, 1000)
	f(`{"max_tokens":1e999}`, 10/4+1, mostTokens)
	f(`{"max_tokens":99999999999999999999999}`, 10/4+1, mostTokens)
	f(`{"max_tokens":99999999999,"n":99999999999}`, 11/4+2, mostTokens*mostTokens)
	f(`{"max\u005ftokens":5}`, 15/4+1, 5)
	f(`{"a":{"max_tokens":5,"n":5}}`, 12/4+2, none)
	// A picture costs what pictures cost, however large its file is.
	f(`{"url":"data:image/png;base64,`+strings.Repeat("iVBORw0KGgo", 1000)+`"}`, mediaTokens, none)
	f(`{"data":"`+strings.Repeat("UklGRiQAAABX", 1000)+`"}`, 1+mediaTokens, none)
	f(`{"url":"http://x/y.png"}`, 17/4, none)
}

func TestEstimateDoesNotAllocate(t *testing.T) {
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("hello ", 1000) +
		`"}],"max_tokens":100,"n":2,"stream":true,"stream_options":{"include_usage":false}}`)
	if n := testing.AllocsPerRun(100, func() {
		c, err := scanCall(body)
		if err != nil || c.estimate(true).Output != 200 {
			t.Fatal(c, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
