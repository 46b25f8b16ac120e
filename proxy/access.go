package proxy

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/inferrail/inferrail/policy"
)

// Access says who may send requests. The agent makes one with NewAccess and
// gives it to Server.SetAccess; from then on it is immutable, and any goroutine
// may call its methods. The zero value lets anybody, and no web page's script.
type Access struct {
	// byDigest holds the keys by the first eight bytes of their hash.
	byDigest map[uint64][]*Key
	known    map[string]bool // their names
	// origins are in lower case. any: all of them.
	origins []string
	any     bool
}

// Key is one API key. It is immutable but for its Budget, which lives on when
// the Access is replaced. A nil Key is what a request has whose Access asks for
// none: it may use everything.
type Key struct {
	Name string
	// Hash is the SHA-256 of the key's text, which is nowhere kept. Keys are
	// long and random, so the hash need not be slow.
	Hash [sha256.Size]byte
	// Models the key may be used for; empty is all.
	Models []string
	// Budget is what it may use in a minute; nil is no limit.
	Budget *policy.Budget
	// Class is the name of its requests' class, unless they name a worse one.
	Class string
}

// NewAccess makes an Access of the keys that are known, none of which means
// that no key is asked for, and of the web pages ("https://chat.example.org")
// whose scripts may read answers; "*" is all of them. It keeps neither slice.
func NewAccess(keys []*Key, origins []string) *Access {
	a := &Access{}
	if len(keys) > 0 {
		a.byDigest, a.known = make(map[uint64][]*Key, len(keys)), make(map[string]bool, len(keys))
	}
	for _, k := range keys {
		a.known[k.Name] = true
		p := digestPrefix(&k.Hash)
		a.byDigest[p] = append(a.byDigest[p], k)
	}
	for _, o := range origins {
		if o == "*" {
			a.any = true
			continue
		}
		a.origins = append(a.origins, strings.ToLower(strings.TrimSuffix(o, "/")))
	}
	return a
}

// Scripts reports that scripts of some web page may read answers.
func (a *Access) Scripts() bool { return a.any || len(a.origins) > 0 }

// Open reports that no key is asked for.
func (a *Access) Open() bool { return len(a.byDigest) == 0 }

// Find returns the key that was presented, nil for one that is not known.
//
// How long it takes says nothing of the keys: what is looked up and compared
// are digests. Whoever could measure how much of a digest matches would have to
// find a text for each further bit, which helps no more than guessing keys. So
// a map, whose time does not grow with the number of keys, may choose which key
// to compare with, and the comparison itself takes the same time for all.
func (a *Access) Find(presented []byte) *Key {
	if len(presented) == 0 {
		return nil // though a key may be configured as the hash of nothing
	}
	digest := sha256.Sum256(presented)
	found := a.byDigest[digestPrefix(&digest)]
	for _, k := range found {
		if subtle.ConstantTimeCompare(k.Hash[:], digest[:]) == 1 {
			return k
		}
	}
	return nil
}

func digestPrefix(digest *[sha256.Size]byte) uint64 {
	return binary.LittleEndian.Uint64(digest[:])
}

// Allows reports whether the key may be used for a model, by one of its names.
func (k *Key) Allows(model string) bool {
	return k == nil || len(k.Models) == 0 || slices.Contains(k.Models, model)
}

// caller is what the fields of a request say of who has sent it. It points into
// the request's head.
type caller struct {
	// key is the API key that was presented, nil for none: "Authorization:
	// Bearer" of OpenAI's clients, else the "x-api-key" of Anthropic's.
	key []byte
	// origin is the web page whose script has sent the request; method and
	// headers are what a preflight asks for.
	origin, method, headers []byte
	// twice: two different keys were presented in fields of one name. Whoever
	// stands between could take the other one, so none counts.
	twice bool
}

// readCaller reads a request's field lines. It allocates nothing.
func readCaller(raw []byte) (c caller) {
	var bearer, apiKey []byte
	for f := (fields{rest: raw}); f.next(); {
		switch len(f.name) {
		case len("origin"):
			if c.origin == nil && bytes.EqualFold(f.name, []byte("origin")) {
				c.origin = f.value
			}
		case len("x-api-key"):
			if bytes.EqualFold(f.name, []byte("x-api-key")) {
				apiKey = c.present(apiKey, f.value)
			}
		case len("authorization"):
			const scheme = "bearer"
			if !bytes.EqualFold(f.name, []byte("authorization")) || len(f.value) <= len(scheme) ||
				f.value[len(scheme)] != ' ' && f.value[len(scheme)] != '\t' ||
				!bytes.EqualFold(f.value[:len(scheme)], []byte(scheme)) {
				continue
			}
			bearer = c.present(bearer, bytes.TrimLeft(f.value[len(scheme):], " \t"))
		case len("access-control-request-method"):
			if bytes.EqualFold(f.name, []byte("access-control-request-method")) {
				c.method = f.value
			}
		case len("access-control-request-headers"):
			if bytes.EqualFold(f.name, []byte("access-control-request-headers")) {
				c.headers = f.value
			}
		}
	}
	switch {
	case c.twice:
	case len(bearer) > 0:
		c.key = bearer
	case len(apiKey) > 0:
		c.key = apiKey
	}
	return c
}

// present notes a key beside one that the same field has presented before.
func (c *caller) present(before, key []byte) []byte {
	if before != nil && !bytes.Equal(before, key) {
		c.twice = true
	}
	return key
}

// preflight reports that a request with the method OPTIONS is a browser that
// asks whether a script may send another.
func (c *caller) preflight() bool { return len(c.origin) > 0 && len(c.method) > 0 }
