package agent

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"net/http"
	"path"
	"sync"
	"time"
)

// consoleSources are the files of the web console, which browsers get as they are.
//
//go:embed console/*.html console/*.css console/*.js console/*.svg
var consoleSources embed.FS

// consoleFile is one of them as it is served. Immutable.
type consoleFile struct {
	kind string // its Content-Type
	tag  string // its ETag
	text []byte
}

// consoleFiles are all of them by the path at which they are served: / is the page,
// which asks for the others. They live as long as the process and are the same for
// whoever asks: what they show, the page fetches from the other admin pages.
var consoleFiles = sync.OnceValue(func() map[string]consoleFile {
	kinds := map[string]string{
		".html": "text/html; charset=utf-8",
		".css":  "text/css; charset=utf-8",
		".js":   "text/javascript; charset=utf-8",
		".svg":  "image/svg+xml",
	}
	entries, err := consoleSources.ReadDir("console")
	if err != nil {
		panic("BUG: the console is not embedded: " + err.Error())
	}
	files := map[string]consoleFile{}
	for _, e := range entries {
		text, err := consoleSources.ReadFile("console/" + e.Name())
		if err != nil {
			panic("BUG: the console is not embedded: " + err.Error())
		}
		at := "/console/" + e.Name()
		if e.Name() == "index.html" {
			at = "/"
		}
		sum := sha256.Sum256(text)
		files[at] = consoleFile{kinds[path.Ext(e.Name())], `"` + hex.EncodeToString(sum[:12]) + `"`, text}
	}
	return files
})

// consolePolicy is what a browser lets the console do: run and show what this agent
// serves as files, and ask this agent. Text that engines or clients have chosen, such
// as the names of models, is never read as HTML: trusted types have the browser refuse
// every way to do so.
const consolePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// console serves one file of the web console. Browsers keep it, and ask each time
// whether it is still the same, which after an update of the agent it is not.
func (*admin) console(w http.ResponseWriter, r *http.Request) {
	f, ok := consoleFiles()[r.URL.Path]
	if !ok {
		http.Error(w, "the console has no such file", http.StatusNotFound)
		return
	}
	h := w.Header()
	h.Set("Content-Security-Policy", consolePolicy)
	h.Set("Cache-Control", "no-cache")
	h.Set("Content-Type", f.kind)
	h.Set("ETag", f.tag)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.text))
}
