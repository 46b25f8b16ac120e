package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// INFERRAIL_HOSTILE="dir url n seed [template [kwargs [format]]]"
func TestZZHostile(t *testing.T) {
	env := os.Getenv("INFERRAIL_HOSTILE")
	if env == "" {
		t.Skip()
	}
	f := strings.Fields(env)
	var n int
	var seed uint64
	fmt.Sscan(f[2], &n)
	fmt.Sscan(f[3], &seed)
	src := Source{Tokenizer: f[0], Cache: tokenizer.NewCache(64 << 20)}
	for i, to := range []*string{&src.Template, &src.TemplateKwargs, &src.ContentFormat} {
		if len(f) > 4+i && f[4+i] != "-" {
			*to = f[4+i]
		}
	}
	templates := []string{src.Template}
	if src.Template != "" && strings.HasSuffix(src.Template, "/") {
		templates, _ = filepath.Glob(src.Template + "*.jinja")
	}
	for _, path := range templates {
		seed++
		t.Run(filepath.Base(path), func(t *testing.T) { hostile(t, src, path, f[1], n, seed*1000) })
	}
}

func hostile(t *testing.T, src Source, path, url string, n int, seed uint64) {
	src.Template = path
	given := ""
	if path != "" && os.Getenv("INFERRAIL_TRUST") != "" {
		text, _ := os.ReadFile(path)
		quoted, _ := json.Marshal(string(text))
		given = `,"chat_template":` + string(quoted) + "}"
	}
	m, err := Load(src)
	if err != nil {
		t.Fatal(err)
	}
	how, _ := m.Describe()
	b := newBodies(seed)
	var g growing
	outcomes := map[string]int{}
	wrong := 0
	var p Prompt
	modes := os.Getenv("INFERRAIL_MODES")
	if modes == "" {
		modes = "chatcomplgrowtok"
	}
	for i := range n {
		var kind Kind
		var body []byte
		switch k := b.IntN(20); {
		case k < 10:
			kind, body = Chat, b.oddly(b.chatObject("m"))
		case k < 13:
			kind, body = Completion, b.oddly(b.completionObject("m"))
		case k < 16:
			if len(g.messages) > 30 {
				g = growing{}
			}
			kind, body = Chat, b.turn(&g)
		case k < 19:
			kind, body = Tokenize, b.oddly(b.chatObject("m"))
		default:
			kind, body = Tokenize, b.oddly(b.completionObject("m"))
		}
		path := map[Kind]string{Chat: "/v1/chat/completions/render", Completion: "/v1/completions/render", Tokenize: "/tokenize"}[kind]
		var resp *http.Response
		sent := body
		if given != "" {
			if kind == Completion {
				continue
			}
			sent = append(body[:len(body)-1:len(body)-1], given...)
		}
		for range 3 {
			if resp, err = http.Post(url+path, "application/json", bytes.NewReader(sent)); err == nil {
				break
			}
		}
		var want [][]uint32
		refused := ""
		if err != nil {
			refused = err.Error()
		} else {
			answer, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 200 {
				refused = fmt.Sprintf("%d %.600s", resp.StatusCode, answer)
			} else {
				var one struct {
					IDs    []uint32 `json:"token_ids"`
					Tokens []uint32 `json:"tokens"`
				}
				switch kind {
				case Chat:
					err = json.Unmarshal(answer, &one)
					want = [][]uint32{one.IDs}
				case Tokenize:
					err = json.Unmarshal(answer, &one)
					want = [][]uint32{one.Tokens}
				default:
					var list []struct {
						IDs []uint32 `json:"token_ids"`
					}
					err = json.Unmarshal(answer, &list)
					for _, l := range list {
						want = append(want, l.IDs)
					}
				}
				if err != nil {
					t.Errorf("answer %.300s: %v", answer, err)
				}
			}
		}
		for round := range 3 {
			m.Follow(&p, kind, body, time.Now())
			label := fmt.Sprint(kind, " ", p.Reason)
			if refused != "" {
				label += ", refused"
			}
			if round == 0 {
				outcomes[label]++
			}
			if p.Reason == Exact && refused != "" && round == 0 && os.Getenv("INFERRAIL_VERBOSE") != "" {
				t.Logf("EXACTBUTREFUSED kind %d: %s\n%s", kind, body, refused)
			}
			if p.Reason != Exact && p.Reason != RequestTemplate && refused == "" && round == 0 {
				t.Logf("NOTEXACT kind %d %s: %s", kind, p.Reason, body)
			}
			if p.Reason != Exact || refused != "" {
				continue
			}
			var got [][]uint32
			start := 0
			for _, end := range p.Ends {
				got = append(got, p.IDs[start:end])
				start = end
			}
			if !slices.EqualFunc(got, want, slices.Equal) {
				if wrong++; wrong <= 30 {
					t.Errorf("WRONG %d round %d kind %d: %s\n%s", i, round, kind, body, firstDifference(got, want))
				}
			}
		}
	}
	t.Logf("%s: %v; %d wrong of %d", how, outcomes, wrong, n)
	if d := m.Defect(); d != "" {
		t.Error(d)
	}
}
