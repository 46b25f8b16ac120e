package proxy

import "bytes"

// usage is what an engine counted for one request.
type usage struct {
	prompt, completion, cached uint64
}

// findUsage looks for the usage object in the last bytes of a response: the
// last one that holds token counts. Reading the tail only costs the same for a
// stream of any length.
func findUsage(tail []byte) (u usage, ok bool) {
	for {
		i := bytes.LastIndex(tail, []byte(`"usage"`))
		if i < 0 {
			return usage{}, false
		}
		object := skipSpace(tail[i+len(`"usage"`):])
		if len(object) > 0 && object[0] == ':' {
			object = skipSpace(object[1:])
			if len(object) > 0 && object[0] == '{' {
				object = object[:objectEnd(object)]
				var p, c bool
				u.prompt, p = findNumber(object, `"prompt_tokens"`)
				u.completion, c = findNumber(object, `"completion_tokens"`)
				u.cached, _ = findNumber(object, `"cached_tokens"`)
				if p && c {
					return u, true
				}
			}
		}
		tail = tail[:i]
	}
}

// objectEnd returns where the JSON object at the start of b ends. Usage holds
// no strings with braces.
func objectEnd(b []byte) int {
	depth := 0
	for i, c := range b {
		switch c {
		case '{':
			depth++
		case '}':
			depth--
			if depth == 0 {
				return i + 1
			}
		}
	}
	return len(b)
}

// findNumber returns the non-negative integer that follows key and a colon.
func findNumber(b []byte, key string) (n uint64, ok bool) {
	i := bytes.Index(b, []byte(key))
	if i < 0 {
		return 0, false
	}
	b = skipSpace(b[i+len(key):])
	if len(b) == 0 || b[0] != ':' {
		return 0, false
	}
	b = skipSpace(b[1:])
	for i = 0; i < len(b) && i < 18 && b[i] >= '0' && b[i] <= '9'; i++ {
		n = n*10 + uint64(b[i]-'0')
	}
	return n, i > 0 && i < len(b)
}

func skipSpace(b []byte) []byte {
	return bytes.TrimLeft(b, " \t\r\n")
}
