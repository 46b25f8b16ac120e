package proxy

import (
	"bufio"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
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

// agent/TROUBLESHOOTING.md tells of every failure, under the status that it has.
func TestTroubleshootingHasEveryFailure(t *testing.T) {
	page, err := os.ReadFile("../agent/TROUBLESHOOTING.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, _ := strings.Cut(string(page), "\n## Why 503")
	part, _, ok := strings.Cut(part, "\n## ")
	if !ok {
		t.Fatal("there is no section of statuses")
	}
	told := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| ([^|]+) \\| (`[^|]+`) \\|").FindAllStringSubmatch(part, -1) {
		if row[1] == "status" {
			continue
		}
		for _, word := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[2], -1) {
			told[word[1]] = row[1]
		}
	}
	for f := none; f < failures; f++ {
		statuses, ok := told[f.label()]
		want := "none"
		if status := failureTable[f].status; status != 0 {
			want = strconv.Itoa(status)
		}
		if !ok {
			t.Errorf("the failure %s is not told of", f.label())
		} else if !slices.Contains(strings.Split(statuses, ", "), want) {
			t.Errorf("the failure %s is told of under status %s, and has %s", f.label(), statuses, want)
		}
		delete(told, f.label())
	}
	for word := range told {
		t.Errorf("there is no failure %s", word)
	}
}
