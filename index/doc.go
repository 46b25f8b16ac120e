// Package index knows what blocks of tokens the engines hold in their KV
// caches.
//
// A block is named by the hash of its tokens and of all before them (hash.go),
// so position i of a prompt's chain names the whole prefix up to block i.
//
//	request -> Prompt (chain of hashes) -> Match: leading blocks by slot and tier
//	        -> the caller chooses a slot -> Claim: what the engine will hold
//	        -> Prefilled, Release: it has; or Undo: it refused
//	events  -> kvevent: wire form, order, repair -> Apply: what the engine holds
//
// Each slot has a tree of what its engine holds (tree.go), fed by two sources.
// The exact one is the engine's KV events (events.go), whose token ids are
// hashed anew into the names used here. The approximate one is a shadow of the
// engine's cache (shadow.go): it has the engine's size, is fed by the claims of
// requests and evicts as the engine does. What the trees hold is entered in one
// table (table.go), which is built for looking up all slots at once, and is
// read without waiting for those who write.
//
// The package has no I/O, no clock and no goroutine. All methods of Index may be
// called from any goroutine.
package index
