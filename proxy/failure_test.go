package proxy

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestMessagesErrors: a client of Anthropic's API gets errors in its shape, in
// a stream as an event that its library heeds.
func TestMessagesErrors(t *testing.T) {
	const piece = "event: ping\ndata: {}\n\n"
	e := newRawEngine(t, func(c *engineSide) {
		c.request()
		io.WriteString(c, chunkedHead+chunk(piece))
	})
	r := newRig(t, Limits{}, nil, e.url())
	ask := func(body string) *client {
		c := r.dial()
		c.send(strings.Replace(post(body), "/v1/chat/completions", "/v1/messages", 1))
		return c
	}
	resp, body := ask(`{"model":"nope"}`).answer()
	if want := "{\"type\":\"error\",\"error\":{\"type\":\"NotFoundError\",\"message\":\"The model `nope` does not exist.\"}}"; resp.StatusCode != 404 || body != want {
		t.Errorf("got %d %s\nwant %s", resp.StatusCode, body, want)
	}
	resp, err := http.ReadResponse(bufio.NewReader(ask(hello)), nil)
	if err != nil {
		t.Fatal(err)
	}
	told, err := io.ReadAll(resp.Body)
	if want := piece + "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"BadGatewayError\",\"message\":\"The engine's answer broke off.\"}}\n\n"; err == nil || string(told) != want {
		t.Errorf("%v: got\n%s\nwant\n%s", err, told, want)
	}
}
