package proxy

import (
	"crypto/sha256"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
)

func TestAccessFindsKeys(t *testing.T) {
	var keys []*Key
	for i := range 1000 {
		name := fmt.Sprintf("key-%d", i)
		keys = append(keys, &Key{Name: name, Hash: sha256.Sum256([]byte("sk-" + name))})
	}
	// A digest that differs only where the index does not look.
	twin := &Key{Name: "twin", Hash: keys[7].Hash}
	twin.Hash[31] ^= 1
	// A key that somebody has made of an unset variable opens nothing.
	nothing := &Key{Name: "nothing", Hash: sha256.Sum256(nil)}
	a := NewAccess(append([]*Key{twin, nothing}, keys...), nil)
	if a.Open() {
		t.Error("a thousand keys, and none is asked for")
	}
	for _, k := range keys {
		if got := a.Find([]byte("sk-" + k.Name)); got != k {
			t.Fatalf("%s: found %v", k.Name, got)
		}
	}
	for _, presented := range []string{"", "sk-", "sk-key-1000", "SK-KEY-1", "sk-key-1 ", string(keys[1].Hash[:])} {
		if got := a.Find([]byte(presented)); got != nil {
			t.Errorf("%q: found %s", presented, got.Name)
		}
	}
	for _, open := range []*Access{{}, NewAccess(nil, []string{"*"})} {
		if !open.Open() || open.Find(nil) != nil || open.Find([]byte("x")) != nil {
			t.Error("no keys, and one is asked for or found")
		}
	}
}

func TestKeyAllows(t *testing.T) {
	f := func(k *Key, model string, want bool) {
		t.Helper()
		if k.Allows(model) != want {
			t.Errorf("%+v, %s: %v", k, model, !want)
		}
	}
	f(nil, "a", true)
	f(&Key{}, "a", true)
	f(&Key{Models: []string{"a", "b"}}, "b", true)
	f(&Key{Models: []string{"a", "b"}}, "A", false)
	f(&Key{Models: []string{"a"}}, "", false)
}

func TestReadCaller(t *testing.T) {
	f := func(raw, key string, twice bool) {
		t.Helper()
		c := readCaller([]byte(raw + "\r\n"))
		if string(c.key) != key || c.twice != twice {
			t.Errorf("%q: key %q, twice %v", raw, c.key, c.twice)
		}
	}
	f("", "", false)
	f("Authorization: Bearer sk-1\r\n", "sk-1", false)
	f("authorization:bearer \t sk-1 \r\n", "sk-1", false)
	f("AUTHORIZATION: BEARER sk-1\r\n", "sk-1", false)
	f("X-Api-Key: sk-2\r\n", "sk-2", false)
	f("X-Api-Key: sk-2\r\nAuthorization: Bearer sk-1\r\n", "sk-1", false)
	f("Authorization: Basic eDp5\r\nx-api-key: sk-2\r\n", "sk-2", false)
	f("Authorization: Bearer sk-1\r\nAuthorization: Bearer sk-1\r\n", "sk-1", false)
	f("Authorization: Bearer sk-1\r\nAuthorization: Bearer sk-2\r\n", "", true)
	f("x-api-key: sk-1\r\nHost: x\r\nx-api-key: sk-2\r\n", "", true)
	f("Authorization: Bearer\r\n", "", false)
	f("Authorization: Bearer \r\n", "", false)
	f("Authorization: Bearersk-1\r\n", "", false)
	f("Authorization: sk-1\r\n", "", false)
	f("x-api-key:\r\n", "", false)
	f("x-api-keys: sk-1\r\nAuthorizations: Bearer sk-1\r\n", "", false)
}

func TestCORS(t *testing.T) {
	none := &Access{}
	all := NewAccess(nil, []string{"*"})
	some := NewAccess(nil, []string{"https://Chat.example.org/", "http://localhost:3000"})

	f := func(a *Access, raw string, wantAnswer, wantPreflight string) {
		t.Helper()
		c := readCaller([]byte(raw + "\r\n"))
		answer := string(a.appendOrigin(nil, &c))
		answer = strings.Replace(answer, "Access-Control-Expose-Headers: "+readable+"\r\n", "+readable\r\n", 1)
		if answer != wantAnswer {
			t.Errorf("%q: answered with %q", raw, answer)
		}
		if got := string(a.appendPreflight(nil, &c, "POST")); c.preflight() && got != wantPreflight {
			t.Errorf("%q: preflight answered with %q", raw, got)
		}
		if c.preflight() != (wantPreflight != "-") {
			t.Errorf("%q: preflight %v", raw, c.preflight())
		}
	}
	const (
		chat  = "Origin: https://chat.example.org\r\n"
		evil  = "Origin: https://chat.example.org.evil.net\r\n"
		ask   = "Access-Control-Request-Method: POST\r\n"
		with  = "access-control-request-headers: authorization,content-type\r\n"
		rest  = "Access-Control-Max-Age: 7200\r\n"
		posts = "Access-Control-Allow-Methods: POST\r\n"
		any   = "Access-Control-Allow-Origin: *\r\n"
		named = "Vary: Origin\r\nAccess-Control-Allow-Origin: https://chat.example.org\r\n"
	)
	f(none, "", "", "-")
	f(none, chat, "", "-")
	f(none, chat+ask, "", "")
	f(all, "", "", "-")
	f(all, ask, "", "-")
	f(all, chat, any+"+readable\r\n", "-")
	f(all, chat+ask, any+"+readable\r\n", any+posts+"Access-Control-Allow-Headers: *\r\n"+rest)
	f(all, "Origin: null\r\n"+ask+with, any+"+readable\r\n", any+posts+"Access-Control-Allow-Headers: authorization,content-type\r\n"+rest)
	f(some, "", "", "-")
	f(some, chat+ask+with, named+"+readable\r\n", named+posts+"Access-Control-Allow-Headers: authorization,content-type\r\n"+rest)
	f(some, evil+ask, "Vary: Origin\r\n", "Vary: Origin\r\n")
	f(some, "Origin: null\r\n", "Vary: Origin\r\n", "-")
	f(some, "Origin: http://localhost:3000\r\n", "Vary: Origin\r\nAccess-Control-Allow-Origin: http://localhost:3000\r\n+readable\r\n", "-")
	f(some, "Origin: http://localhost\r\n", "Vary: Origin\r\n", "-")
	f(some, "Origin:\r\n"+ask, "", "-")
}

func TestQuotaFields(t *testing.T) {
	f := func(q policy.Quotas, want ...string) {
		t.Helper()
		if got := string(appendQuotas(nil, &q)); got != strings.Join(append(want, ""), "\r\n") {
			t.Errorf("%+v:\n%s", q, got)
		}
	}
	quota := func(limit, remaining int64, reset time.Duration) policy.Quota {
		return policy.Quota{Limit: limit, Remaining: remaining, Reset: reset}
	}
	f(policy.Quotas{})
	f(policy.Quotas{Requests: quota(60, 59, time.Second)},
		"x-ratelimit-limit-requests: 60", "x-ratelimit-remaining-requests: 59", "x-ratelimit-reset-requests: 1s")
	f(policy.Quotas{Output: quota(100, 0, 6*time.Minute)},
		"x-ratelimit-limit-tokens: 100", "x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 6m0s",
		"x-ratelimit-limit-output-tokens: 100", "x-ratelimit-remaining-output-tokens: 0", "x-ratelimit-reset-output-tokens: 6m0s")
	// Half of the input is left, and nine tenths of the output.
	f(policy.Quotas{Input: quota(1000, 500, 30*time.Second), Output: quota(100, 90, 6*time.Second)},
		"x-ratelimit-limit-tokens: 1000", "x-ratelimit-remaining-tokens: 500", "x-ratelimit-reset-tokens: 30s",
		"x-ratelimit-limit-input-tokens: 1000", "x-ratelimit-remaining-input-tokens: 500", "x-ratelimit-reset-input-tokens: 30s",
		"x-ratelimit-limit-output-tokens: 100", "x-ratelimit-remaining-output-tokens: 90", "x-ratelimit-reset-output-tokens: 6s")
	f(policy.Quotas{Input: quota(1000, 500, 30*time.Second), Output: quota(100, 10, 54*time.Second)},
		"x-ratelimit-limit-tokens: 100", "x-ratelimit-remaining-tokens: 10", "x-ratelimit-reset-tokens: 54s",
		"x-ratelimit-limit-input-tokens: 1000", "x-ratelimit-remaining-input-tokens: 500", "x-ratelimit-reset-input-tokens: 30s",
		"x-ratelimit-limit-output-tokens: 100", "x-ratelimit-remaining-output-tokens: 10", "x-ratelimit-reset-output-tokens: 54s")
}

func TestResetAndRetryAfter(t *testing.T) {
	f := func(d time.Duration, reset, seconds, ms string) {
		t.Helper()
		if got := string(appendReset(nil, d)); got != reset {
			t.Errorf("%v: reset %q, want %q", d, got, reset)
		}
		if got, want := string(appendRetryAfter(nil, d)), "Retry-After: "+seconds+"\r\nretry-after-ms: "+ms+"\r\n"; got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
	// A wait of 0 would be no wait: clients heed only what is more.
	f(0, "0s", "1", "1")
	f(1, "1ms", "1", "1")
	f(20*time.Millisecond, "20ms", "1", "20")
	f(time.Second, "1s", "1", "1000")
	f(time.Second+1, "1.001s", "2", "1001")
	f(8640*time.Millisecond, "8.64s", "9", "8640")
	f(6*time.Minute, "6m0s", "360", "360000")
	f(time.Hour+30*time.Second, "1h0m30s", "3630", "3630000")
	f(math.MaxInt64, "2562047h47m16.854s", "9223372037", "9223372036855")
}

func TestAccessDoesNotAllocate(t *testing.T) {
	a := NewAccess([]*Key{{Hash: sha256.Sum256([]byte("sk-1"))}}, []string{"https://chat.example.org"})
	raw := []byte("Host: x\r\nAuthorization: Bearer sk-1\r\nUser-Agent: y\r\nOrigin: https://chat.example.org\r\n\r\n")
	dst := make([]byte, 0, 4096)
	if n := testing.AllocsPerRun(100, func() {
		c := readCaller(raw)
		if a.Find(c.key) == nil {
			t.Fatal("not found")
		}
		dst = a.appendOrigin(dst[:0], &c)
		dst = a.appendPreflight(dst, &c, "POST")
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
