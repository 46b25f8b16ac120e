package proxy

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"
)

// TestRoutes: every path that computes something for a model is routed by the
// model that its body names, under its own name, and counted as load while it
// lasts; the rest of the body arrives byte for byte.
func TestRoutes(t *testing.T) {
	var r *rig
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			body, _ := io.ReadAll(req.Body)
			answer := fmt.Sprintf("%d in flight; %s %s %s", r.replicas[0].InFlight(), req.Method, req.URL, body)
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(answer), answer)
		}
	})
	r = newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	f := func(path, kind, body, want string) {
		t.Helper()
		c.send(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", path, kind, len(body), body))
		resp, got := c.answer()
		if want = "1 in flight; POST " + path + " " + want; resp.StatusCode != 200 || got != want {
			t.Errorf("%s: %d\ngot  %q\nwant %q", path, resp.StatusCode, got, want)
		}
	}
	for _, path := range []string{
		"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
		"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
		"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/chat/completions/render", "/v1/completions/render",
		"/v1/messages/render", "/v1/responses/render",
		"/inference/v1/generate", "/generate", "/invocations", "/v1/chat/completions?beta=true",
	} {
		f(path, "application/json", `{"input":"x","model":"alias" , "odd":[1e400,{"é":null}]}`, `{"input":"x","model":"m" , "odd":[1e400,{"é":null}]}`)
		f(path, "application/json", `{"model":"m"}`, `{"model":"m"}`)
		f(path, "application/json", `{"model":null,"messages":[{"role":"user","content":null},{"content":[{"type":"text"}]}]}`,
			`{"model":null,"messages":[{"role":"user","content":null},{"content":[{"type":"text"}]}]}`)
	}
	form := func(model string) string {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		w.SetBoundary("frontier")
		part, _ := w.CreateFormFile("file", "a.wav")
		part.Write([]byte("RIFF\r\n--frontie\x00\xff"))
		w.WriteField("model", model)
		w.WriteField("language", "alias")
		w.Close()
		return b.String()
	}
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		f(path, `multipart/form-data; boundary="frontier"`, form("alias"), form("m"))
		f(path, `multipart/form-data; boundary=frontier`, form("m"), form("m"))
	}

	refused := func(path, kind, body string, status int, text string) {
		t.Helper()
		c.send(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", path, kind, len(body), body))
		if resp, got := c.answer(); resp.StatusCode != status || !strings.Contains(got, text) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, got)
		}
	}
	refused("/v1/audio/transcriptions", "application/json", `{"model":"m"}`, 400, "not multipart/form-data")
	refused("/v1/audio/transcriptions", "multipart/form-data; boundary=frontier", form("nope"), 404, "The model `nope` does not exist.")
	refused("/v1/audio/transcriptions", "multipart/form-data; boundary=frontier", "--frontier\r\n", 400, "parts that its boundary announces")
	refused("/v1/embeddings", "application/json", `{"model":"nope"}`, 404, "The model `nope` does not exist.")
	for _, path := range []string{"/", "/v1", "/v1/", "/v1/chat", "/v1/load_lora_adapter", "/sleep", "/metrics", "/reset_prefix_cache", "/v1/responses/resp_1", "/V1/embeddings", "/v1//embeddings"} {
		refused(path, "application/json", `{"model":"m"}`, http.StatusNotFound, "NotFoundError")
	}
}
