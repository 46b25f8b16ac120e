package proxy

import (
	"math"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// appendQuotas appends the fields that tell a client what its key has left, in
// OpenAI's names and formats, for the limits that there are. OpenAI has one
// limit of tokens: x-ratelimit-*-tokens are those of input or output, whichever
// has the smaller share left. Names with input-tokens and output-tokens, formed
// after Anthropic's, tell them apart.
func appendQuotas(dst []byte, q *policy.Quotas) []byte {
	dst = appendQuota(dst, "requests", &q.Requests)
	tighter := &q.Input
	if q.Input.Limit == 0 || q.Output.Limit > 0 && left(&q.Output) < left(&q.Input) {
		tighter = &q.Output
	}
	dst = appendQuota(dst, "tokens", tighter)
	dst = appendQuota(dst, "input-tokens", &q.Input)
	return appendQuota(dst, "output-tokens", &q.Output)
}

func left(q *policy.Quota) float64 { return float64(q.Remaining) / float64(q.Limit) }

func appendQuota(dst []byte, what string, q *policy.Quota) []byte {
	if q.Limit == 0 {
		return dst
	}
	dst = append(append(append(dst, "x-ratelimit-limit-"...), what...), ": "...)
	dst = append(strconv.AppendInt(dst, q.Limit, 10), crlf...)
	dst = append(append(append(dst, "x-ratelimit-remaining-"...), what...), ": "...)
	dst = append(strconv.AppendInt(dst, q.Remaining, 10), crlf...)
	dst = append(append(append(dst, "x-ratelimit-reset-"...), what...), ": "...)
	return append(appendReset(dst, q.Reset), crlf...)
}

// appendReset appends a time as OpenAI writes it: "0s", "20ms", "1.5s",
// "6m0s". It is rounded up to milliseconds, so that who waits that long has
// waited long enough.
func appendReset(dst []byte, d time.Duration) []byte {
	if up := d.Truncate(time.Millisecond); up < d && up <= math.MaxInt64-time.Millisecond {
		d = up + time.Millisecond
	} else {
		d = up
	}
	return append(dst, max(d, 0).String()...)
}

// appendRetryAfter appends the fields that tell a client how long to wait:
// Retry-After, which takes whole seconds (RFC 9110 section 10.2.3), and
// retry-after-ms, which the clients of OpenAI and Anthropic prefer. They heed
// neither when it is 0 or more than a minute, and then wait as they see fit.
func appendRetryAfter(dst []byte, d time.Duration) []byte {
	up := func(unit time.Duration) int64 {
		n := int64(d / unit)
		if d%unit > 0 {
			n++
		}
		return max(n, 1)
	}
	dst = append(dst, "Retry-After: "...)
	dst = append(strconv.AppendInt(dst, up(time.Second), 10), "\r\nretry-after-ms: "...)
	return append(strconv.AppendInt(dst, up(time.Millisecond), 10), crlf...)
}
