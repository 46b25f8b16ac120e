package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"slices"

	"github.com/inferrail/inferrail/policy"
)

// Access says who may send requests. It is immutable once given to
// Server.SetAccess. The zero value lets anybody, and no web page's script.
type Access struct {
	// Keys are the API keys that are known. With none, no key is asked for.
	Keys []*Key
	// Origins are the web pages whose scripts may read answers; "*" is all.
	Origins []string
}

// Key is one API key. It is immutable but for its Budget, which lives on when
// the Access is replaced.
type Key struct {
	Name string
	Hash [sha256.Size]byte
	// Models the key may be used for; empty is all.
	Models []string
	// Budget is what it may use in a minute.
	Budget *policy.Budget
}

// Find returns the key that is presented, nil when it is not known.
func (a *Access) Find(presented []byte) (found *Key) {
	hash := sha256.Sum256(presented)
	for _, k := range a.Keys {
		if subtle.ConstantTimeCompare(hash[:], k.Hash[:]) == 1 {
			found = k
		}
	}
	return found
}

// Allows reports whether the key may be used for a model. Without a key,
// because none is asked for, all may.
func (k *Key) Allows(model string) bool {
	return k == nil || len(k.Models) == 0 || slices.Contains(k.Models, model)
}
