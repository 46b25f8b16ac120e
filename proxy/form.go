package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"mime"
)

var (
	errNotForm = errors.New("the body is not multipart/form-data with a boundary")
	errForm    = errors.New("the body does not hold the parts that its boundary announces")
	errParts   = fmt.Errorf("the form has more than %d parts", maxParts)
)

// maxParts bounds the parts of a form. It is the bound of Go's mime/multipart and
// of the engines' Starlette.
const maxParts = 1000

// scanForm finds the fields "model" and "stream" of a multipart/form-data body
// (RFC 7578) without copying or decoding anything else: the rest may be an
// hour of sound. Of several fields of a name the last counts, as for engines.
func scanForm(contentType, body []byte) (call, error) {
	c := call{form: true}
	kind, params, err := mime.ParseMediaType(string(contentType))
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return call{}, errNotForm
	}
	// A delimiter is CRLF, two hyphens and the boundary; the first may stand at
	// the start of the body (RFC 2046 section 5.1.1).
	delimiter := []byte("\r\n--" + params["boundary"])
	at := 0
	if !bytes.HasPrefix(body, delimiter[2:]) {
		if at = bytes.Index(body, delimiter); at < 0 {
			return call{}, errForm
		}
		at += 2
	}
	at += len(delimiter) - 2
	for parts := 0; ; parts++ {
		if bytes.HasPrefix(body[at:], []byte("--")) {
			return c, nil
		}
		if parts == maxParts {
			return call{}, errParts
		}
		line := bytes.Index(body[at:], crlf)
		if line < 0 || len(bytes.Trim(body[at:at+line], " \t")) > 0 {
			return call{}, errForm
		}
		head := at + line // the CRLF before the part's head
		gap := bytes.Index(body[head:], crlfcrlf)
		if gap < 0 {
			return call{}, errForm
		}
		start := head + gap + len(crlfcrlf)
		length := bytes.Index(body[start-2:], delimiter)
		if length < 0 {
			return call{}, errForm
		}
		end := max(start-2+length, start)
		switch partName(body[head+2 : head+gap+2]) {
		case "model":
			c.model, c.start, c.end = memberString, start, end
		case "stream":
			c.stream = bytes.EqualFold(bytes.TrimSpace(body[start:end]), []byte("true"))
		}
		at = start - 2 + length + len(delimiter)
	}
}

// partName returns the name of a form field from its head.
func partName(head []byte) string {
	for f := (fields{rest: head}); f.next(); {
		if bytes.EqualFold(f.name, []byte("content-disposition")) {
			kind, params, err := mime.ParseMediaType(string(f.value))
			if err != nil || kind != "form-data" {
				return ""
			}
			return params["name"]
		}
	}
	return ""
}
