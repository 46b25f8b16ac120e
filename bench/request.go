package bench

import (
	"bytes"
	"fmt"
	"strconv"
)

// request is one HTTP request as the engine reads it. Its slices point into
// the buffer it was parsed from.
type request struct {
	method, path, body []byte
}

// maxRequest bounds what the engine buffers of a connection.
const maxRequest = 64 << 10

// parseRequest reads the first request in b. n is its length, or 0 when more
// bytes are needed.
func parseRequest(b []byte) (r request, n int, err error) {
	end := bytes.Index(b, []byte("\r\n\r\n"))
	if end < 0 {
		if len(b) > maxRequest {
			return request{}, 0, fmt.Errorf("request head over %d bytes", maxRequest)
		}
		return request{}, 0, nil
	}
	head := b[:end+2]
	line, _, _ := bytes.Cut(head, []byte("\r\n"))
	method, rest, ok1 := bytes.Cut(line, []byte(" "))
	path, version, ok2 := bytes.Cut(rest, []byte(" "))
	if !ok1 || !ok2 || string(version) != "HTTP/1.1" {
		return request{}, 0, fmt.Errorf("not an HTTP/1.1 request: %.100q", line)
	}
	if _, ok := field(head, "transfer-encoding"); ok {
		return request{}, 0, fmt.Errorf("the benchmark's engine reads bodies with Content-Length only")
	}
	length := 0
	if v, ok := field(head, "content-length"); ok {
		if length, ok = decimal(v); !ok || length > maxRequest {
			return request{}, 0, fmt.Errorf("content-length %.40q", v)
		}
	}
	n = end + 4 + length
	if len(b) < n {
		return request{}, 0, nil
	}
	return request{method: method, path: path, body: b[end+4 : n]}, n, nil
}

// field returns a field of a head, of which name is the lower-case name.
func field(head []byte, name string) (value []byte, ok bool) {
	for {
		_, rest, more := bytes.Cut(head, []byte("\r\n"))
		if !more || len(rest) == 0 {
			return nil, false
		}
		head = rest
		if len(head) > len(name) && head[len(name)] == ':' && bytes.EqualFold(head[:len(name)], []byte(name)) {
			value, _, _ = bytes.Cut(head[len(name)+1:], []byte("\r\n"))
			return bytes.TrimSpace(value), true
		}
	}
}

// decimal reads the number that is all of b.
func decimal(b []byte) (int, bool) {
	if len(b) == 0 || len(b) > 9 {
		return 0, false
	}
	v := 0
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		v = v*10 + int(c-'0')
	}
	return v, true
}

// member returns the number after a JSON member's name in body. It knows only
// the bodies that appendRequest writes.
func member(body []byte, name string) (int, bool) {
	i := bytes.Index(body, []byte(name))
	if i < 0 {
		return 0, false
	}
	b := body[i+len(name):]
	end := 0
	for end < len(b) && '0' <= b[end] && b[end] <= '9' {
		end++
	}
	return decimal(b[:end])
}

// model is the one model the engine serves.
const model = "bench-model"

// appendRequest appends the request for a response of want chunks to stream id.
func appendRequest(dst []byte, id, want uint32) []byte {
	var space [256]byte
	body := append(space[:0], `{"model":"`+model+`","stream":true,"messages":[{"role":"user","content":"Count."}],"seed":`...)
	body = strconv.AppendUint(body, uint64(id), 10)
	body = append(body, `,"max_tokens":`...)
	body = strconv.AppendUint(body, uint64(want), 10)
	body = append(body, '}')
	dst = append(dst, "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: "...)
	dst = strconv.AppendUint(dst, uint64(len(body)), 10)
	dst = append(dst, "\r\n\r\n"...)
	return append(dst, body...)
}
