package agent

import (
	"encoding/json"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The page and all that it asks for are served with their types, are asked for again
// only when they are others, and may do nothing but ask this agent.
func TestConsoleIsServed(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	f := func(path, kind string) {
		t.Helper()
		resp := adminAnswer(t, a, path)
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != kind || len(body) == 0 {
			t.Errorf("%s: status %d, type %q, %d bytes", path, resp.StatusCode, resp.Header.Get("Content-Type"), len(body))
		}
		tag := resp.Header.Get("ETag")
		if got := resp.Header.Get("Cache-Control"); got != "no-cache" || tag == "" {
			t.Errorf("%s: Cache-Control %q, ETag %q", path, got, tag)
		}
		policy := resp.Header.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} {
			if !strings.Contains(policy, want) {
				t.Errorf("%s: policy %q has no %s", path, policy, want)
			}
		}
		if strings.Contains(policy, "unsafe") || resp.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: head %v", path, resp.Header)
		}
		again := adminAnswer(t, a, path, "If-None-Match: "+tag)
		if body, _ := io.ReadAll(again.Body); again.StatusCode != 304 || len(body) != 0 {
			t.Errorf("%s again: status %d, %d bytes", path, again.StatusCode, len(body))
		}
	}
	f("/", "text/html; charset=utf-8")
	for path := range consoleFiles() {
		_, ext, _ := strings.Cut(path, ".")
		switch ext {
		case "css":
			f(path, "text/css; charset=utf-8")
		case "js":
			f(path, "text/javascript; charset=utf-8")
		case "svg":
			f(path, "image/svg+xml")
		}
	}
	for _, path := range []string{"/console/", "/console/index.html", "/console/nothing.js", "/console/../admin.go", "/console/%2e%2e/admin.go", "/index.html", "/console.js"} {
		if resp := adminAnswer(t, a, path); resp.StatusCode != 404 {
			t.Errorf("%s: status %d", path, resp.StatusCode)
		}
	}
	if resp := adminAnswer(t, a, "/", "Host: evil.example.com"); resp.StatusCode != 403 {
		t.Errorf("by a name that leads here: status %d", resp.StatusCode)
	}
}

// The files need no token: they are the same everywhere. All that they ask for does.
func TestConsoleNeedsNoToken(t *testing.T) {
	c := testConfig(startEngine(t, 0, "m"))
	c.AdminTokenSHA256 = hashOf("right")
	a := startAgent(t, c)
	defer stopped(t, a)
	for path := range consoleFiles() {
		if resp := adminAnswer(t, a, path); resp.StatusCode != 200 {
			t.Errorf("%s: status %d", path, resp.StatusCode)
		}
		if resp := adminAnswer(t, a, path, "Origin: http://evil.example.com"); resp.StatusCode != 403 {
			t.Errorf("%s of another site: status %d", path, resp.StatusCode)
		}
	}
	for _, path := range []string{"/console/nothing.js", "//", "/console/../metrics", "/console/console.js/../../debug/fleet", "/debug/fleet", "/debug/decisions", "/debug/overview", "/explain"} {
		resp := adminAnswer(t, a, path)
		if resp.StatusCode != 401 {
			t.Errorf("%s: status %d without a token", path, resp.StatusCode)
		}
	}
}

// The console asks for nothing that is not this agent's, runs no script but its files,
// makes nothing into HTML, and all that the page and the files name is there.
func TestConsoleSources(t *testing.T) {
	files := consoleFiles()
	forbidden := regexp.MustCompile(`(?i)https?://|//[a-z0-9-]+\.[a-z]{2,}|\bon[a-z]+\s*=\s*["']|<script>|<style|\sstyle=|javascript:|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment|srcdoc`)
	namespace := regexp.MustCompile(`http://www\.w3\.org/2000/svg`)
	for path, f := range files {
		text := namespace.ReplaceAllString(string(f.text), "")
		for _, bad := range forbidden.FindAllString(text, -1) {
			t.Errorf("%s has %q", path, bad)
		}
		for _, m := range regexp.MustCompile(`from "\./([^"]+)"`).FindAllStringSubmatch(text, -1) {
			if _, ok := files["/console/"+m[1]]; !ok {
				t.Errorf("%s imports %s, which is not there", path, m[1])
			}
		}
	}
	page := string(files["/"].text)
	asked := 0
	for _, m := range regexp.MustCompile(`(?:src|href)="(console/[^"]+)"`).FindAllStringSubmatch(page, -1) {
		if asked++; files["/"+m[1]].text == nil {
			t.Errorf("the page asks for %s, which is not there", m[1])
		}
	}
	if asked < 4 {
		t.Errorf("the page asks for %d files", asked)
	}
	// What the scripts look for in the page is there.
	for path, f := range files {
		for _, m := range regexp.MustCompile(`byID\("([^"]+)"\)`).FindAllStringSubmatch(string(f.text), -1) {
			if !strings.Contains(page, `id="`+m[1]+`"`) {
				t.Errorf("%s looks for #%s, which the page does not have", path, m[1])
			}
		}
	}
}

// What the console asks for when one replica is looked at is of that one alone: a fleet
// may have a thousand.
func TestFleetOfOneReplica(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "m")))
	defer stopped(t, a)
	f := func(query string, want ...string) {
		t.Helper()
		var page struct {
			Replicas []struct {
				ID string `json:"id"`
			} `json:"replicas"`
			Models []any `json:"models"`
		}
		if err := json.NewDecoder(adminAnswer(t, a, "/debug/fleet"+query).Body).Decode(&page); err != nil {
			t.Fatal(err)
		}
		got := []string{}
		for _, r := range page.Replicas {
			got = append(got, r.ID)
		}
		if !slices.Equal(got, want) || len(page.Models) != 1 {
			t.Errorf("%q: replicas %q and %d models, want %q", query, got, len(page.Models), want)
		}
	}
	f("", "r0", "r1")
	f("?replica=", "r0", "r1")
	f("?replica=r1", "r1")
	f("?replica=nobody", []string{}...)
}
