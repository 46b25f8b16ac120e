// Package index knows what blocks of tokens the engines hold in their KV
// caches.
//
// A block is named by the hash of its tokens and of all before them (hash.go),
// so position i of a prompt's chain names the whole prefix up to block i.
//
// The package has no I/O, no clock and no goroutine.
package index
