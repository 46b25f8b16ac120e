package proxy

import (
	"crypto/sha256"

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
