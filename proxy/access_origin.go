package proxy

import "slices"

// readable are the fields of answers that scripts may read beside those that
// they always may. Field names cannot be given by their beginning.
const readable = "x-request-id, x-inferrail-replica, x-inferrail-policy, " +
	"x-inferrail-prompt-tokens, x-inferrail-cached-tokens, " +
	"x-inferrail-budget-ms, x-inferrail-predicted-ms, x-inferrail-over-budget, " +
	"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, " +
	"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, " +
	"x-ratelimit-limit-input-tokens, x-ratelimit-remaining-input-tokens, x-ratelimit-reset-input-tokens, " +
	"x-ratelimit-limit-output-tokens, x-ratelimit-remaining-output-tokens, x-ratelimit-reset-output-tokens, " +
	"retry-after, retry-after-ms"

// allowOrigin reports whether scripts of a web page may read answers. Browsers
// send origins in lower case.
func (a *Access) allowOrigin(origin []byte) bool {
	return len(origin) > 0 && (a.any || slices.Contains(a.origins, string(origin)))
}

// appendOrigin appends the fields of an answer that let the script of c.origin
// read it (the CORS protocol of the Fetch standard): none when there is no
// origin or it is not allowed. It allocates nothing.
//
// Credentials, that is cookies, are never allowed: an API key is not one.
func (a *Access) appendOrigin(dst []byte, c *caller) []byte {
	if len(c.origin) == 0 || !a.Scripts() {
		return dst
	}
	dst = a.appendAllowOrigin(dst, c.origin)
	if a.allowOrigin(c.origin) {
		dst = append(dst, "Access-Control-Expose-Headers: "+readable+"\r\n"...)
	}
	return dst
}

// appendPreflight appends the fields of the answer to a preflight, whose status
// is 204. A page that is not allowed is told nothing, which the browser takes
// for a no. methods is what the route takes: "GET, HEAD".
//
// The fields that the script wants to send are all allowed: what is forwarded
// is decided when they come. The request's head has been checked, so what is
// repeated of it holds no CR or LF.
func (a *Access) appendPreflight(dst []byte, c *caller, methods string) []byte {
	if !a.Scripts() {
		return dst
	}
	dst = a.appendAllowOrigin(dst, c.origin)
	if !a.allowOrigin(c.origin) {
		return dst
	}
	dst = append(append(append(dst, "Access-Control-Allow-Methods: "...), methods...), crlf...)
	dst = append(dst, "Access-Control-Allow-Headers: "...)
	if len(c.headers) > 0 {
		dst = append(dst, c.headers...)
	} else {
		dst = append(dst, '*')
	}
	// Two hours is the longest that Chromium keeps it.
	return append(dst, "\r\nAccess-Control-Max-Age: 7200\r\n"...)
}

// appendAllowOrigin names the page, if it is allowed. Unless all are, a cache
// must know that the next page may not be.
func (a *Access) appendAllowOrigin(dst, origin []byte) []byte {
	if a.any {
		return append(dst, "Access-Control-Allow-Origin: *\r\n"...)
	}
	dst = append(dst, "Vary: Origin\r\n"...)
	if a.allowOrigin(origin) {
		dst = appendField(dst, []byte("Access-Control-Allow-Origin"), origin)
	}
	return dst
}
