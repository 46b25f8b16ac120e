package simulator

import (
	"errors"
	"fmt"
	"io"
	"net/http"
)

// face is how a kind of engine shows itself over HTTP: which paths it has and
// how it says what went wrong. Config.face makes one for a server, which never
// changes it; its functions may be called from any goroutine.
type face struct {
	// server is the Server header of all answers; empty is none.
	server string
	// parsers are the paths of inference whose answer is a function of the
	// body, all of them by POST.
	parsers map[string]parser
	// mount adds all other paths. What every simulated engine has, under /sim,
	// is not its business.
	mount func(s *Server, on route)
	// appendError appends the body that says e at a path.
	appendError func(dst []byte, path string, e *apiError) []byte
	// failure is the status of an answer that the engine has failed to make.
	failure int
	// refusesInStream: what the engine itself refuses of a stream is told there,
	// under status 200.
	refusesInStream bool
	// noRoute answers a path that there is not, or one that is there for other
	// methods, which are named then.
	noRoute func(w http.ResponseWriter, r *http.Request, allowed []string)
	// authorized reports whether a request may pass where there is a key, and
	// unauthorized answers one that may not.
	authorized   func(r *http.Request, key string) bool
	unauthorized func(w http.ResponseWriter, r *http.Request)
	// gate, when not nil, sees every request to the engine first, and reports
	// whether it has answered it.
	gate func(s *Server, w http.ResponseWriter, r *http.Request) bool
	// admit, when not nil, holds a request back until it may go to the engine.
	// Release is called when the engine has no part in it any more.
	admit func(x *exchange) (release func(), err error)
}

// route adds a path for one method or several.
type route func(method, path string, h http.HandlerFunc, more ...string)

// face returns that of the engine.
func (c *Config) face() *face {
	switch c.Engine {
	case "sglang":
		return sglangFace()
	case "tgi":
		return tgiFace()
	case "llamacpp":
		return llamacppFace()
	case "ollama":
		return ollamaFace()
	}
	return vllmFace()
}

// moment is a part of a stream.
type moment uint8

const (
	// The prelude comes before the engine has begun, the opening right before the
	// first token, then each token, and the closing after the last one. A failure
	// of the engine ends the stream instead; it is the answer's.
	atPrelude moment = iota
	atOpening
	atToken
	atClosing
	atFailure
	// Between any two of them, when nothing else was sent until answer.interim.
	atInterim
)

// opens is when the head of a stream is sent: the zero value is at once.
type opens uint8

const (
	// withStart: when the engine has begun with the request.
	withStart opens = 1 + iota
	withToken
)

// dialect is how the answers of a route are written where it is not as vLLM
// does it. A parser gives one to its request; the exchange calls it, from one
// goroutine at a time. What it needs beside the answer is in the request.
type dialect interface {
	// head sets the headers of an answer with status 200, before anything of it
	// is sent. The Content-Type also decides what ends the events of a stream:
	// one newline for application/x-ndjson, else two.
	head(h http.Header, a *answer)
	// appendPart appends the events of a moment of a stream, none, one or
	// several. At atToken it is the next one of choice i, counted as sent.
	appendPart(dst []byte, a *answer, m moment, i int) []byte
	// appendWhole appends the body of an answer that is not streamed. pad x's
	// lengthen the first choice's text.
	appendWhole(dst []byte, a *answer, pad int) []byte
}

// refuse answers with an error in the engine's words.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	e := asAPIError(err)
	s.current().metrics.refused(e)
	if e.text {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(e.status)
		_, _ = io.WriteString(w, e.message)
		return
	}
	writeJSON(w, e.status, s.face.appendError(nil, r.URL.Path, e))
}

func asAPIError(err error) *apiError {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = &apiError{status: http.StatusInternalServerError, kind: "InternalServerError", message: err.Error()}
	}
	return e
}

// uvicorn makes a face what all engines have that are written in Python: the
// framework's words for what has no route.
func uvicorn(f *face) *face {
	f.server, f.failure = "uvicorn", http.StatusInternalServerError
	f.noRoute = func(w http.ResponseWriter, _ *http.Request, allowed []string) {
		status := http.StatusNotFound
		if allowed != nil {
			status = http.StatusMethodNotAllowed
		}
		writeJSON(w, status, fmt.Appendf(nil, `{"detail":"%s"}`, http.StatusText(status)))
	}
	f.authorized = func(r *http.Request, key string) bool {
		return !versioned(r.URL.Path) || r.Header.Get("Authorization") == "Bearer "+key
	}
	f.unauthorized = func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusUnauthorized, []byte(`{"error":"Unauthorized"}`))
	}
	return f
}

// sign sets the headers that every answer has.
func (f *face) sign(w http.ResponseWriter) {
	if f.server != "" {
		w.Header().Set("Server", f.server)
	}
}
