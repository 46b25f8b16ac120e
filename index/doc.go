// Package index knows what blocks of tokens the engines hold in their KV
// caches.
//
// A block is named by the hash of its tokens and of all before them (hash.go),
// so position i of a prompt's chain names the whole prefix up to block i.
//
//	request -> Prompt (chain of hashes) -> Look, Held: leading blocks by slot and tier
//	        -> the caller chooses a slot -> Claim: what the engine will hold
//	        -> Prefilled, Release: it has; or Undo: it refused
//	events  -> kvevent: wire form, order, repair -> Apply: what the engine holds
//
// Each slot has a tree of what its engine holds (tree.go), fed by two sources.
// The exact one is the engine's KV events (events.go), whose token ids are
// hashed anew into the names used here. The approximate one is a shadow of the
// engine's cache (shadow.go): it has the engine's size, is fed by the claims of
// requests and evicts as the engine does. Of an engine whose sequences share no
// cache it is one chain for each of them (sequence.go). What the trees hold is
// entered in one table (table.go), which is built for looking up all slots at once,
// and is read without waiting for those who write.
//
// What a request generates has no hashes until the conversation's next turn shows
// it; until then it is known by its prompt (answer.go). What engines report of
// their caches is compared with what was predicted (audit.go). A snapshot lets a
// slot outlive the process (snapshot.go).
//
// Events tell what was scheduled. Requests that were sent and not told of yet will
// find, in a full cache, what those before them leave there: so of the blocks that
// are told of, those do not count which the engine has to evict for them
// (slot.foresee). That is as exact as the order in which requests begin and end is
// known here. What running requests take for what they generate is known when it
// is told, so that here and there a block is gone when a request is scheduled that
// was there when it was sent.
//
// # Memory
//
// The records of all trees lie in one arena (arena.go) of chunks without
// pointers, 52 bytes each, which go from tree to tree in batches: a slot that
// leaves, forgets or evicts leaves them to the others. A record has its hash, so
// a chain needs no map: the block behind another is the first one below it, and
// only where prompts part are there maps, of 4 bytes in a cell. Together with the
// table's entry that is 88 bytes for a block that one slot holds, and 98 where the
// engine names it in events.
//
// Config.MaxBytes bounds the chunks, the table, and the maps of trees, shadows
// and events together; they are counted as they are allocated. A little below it
// (1/16, as maps grow by half at once) the index is full: for
// each block that comes, one is given up, by the slot that has the most records,
// or by the one that the block is for if that has hardly fewer or the other is
// busy. A slot gives up what its shadow would evict next; if there is nothing, of
// the blocks that events have told the end of the chain that was told of or
// asked for the longest time ago. The slot is not Exact any more then, as it
// holds less than its engine, until it begins anew, and says that max_bytes is
// too small. What requests in flight use is never given up; when there is nothing
// else, blocks that come are left out. Nothing waits for memory, and the bound is
// never passed by more than a chunk.
//
// # Locks
//
// A slot's mutex guards its tree, shadow and what is told. It is held when one of
// the table's, the arena's or the lanes' mutexes is taken, and Index.mu when a
// slot's is. Who holds a slot's mutex only tries another slot's. Look takes none.
// What a slot held that leaves or forgets is dropped when its mutex is free again.
//
// The package has no I/O, no clock and no goroutine. All methods of Index may be
// called from any goroutine.
//
// # Why the table is as it is
//
// Look-ups outnumber changes of any one block, come for all slots at once and
// must not wait. What they ask is where along a chain the set of lanes changes,
// which is at few places: behind a system prompt that all have, and where each
// conversation's holders end. So:
//
//   - Blocks are found by hash, not by walking. Any position of a chain can then
//     be asked for without those before it, and match bisects: seven places at a
//     time, which do not depend on each other, so that what is in no cache is
//     fetched at once. Where a walk would ask for 512 blocks, a conversation
//     takes some 40 to 70 probes, and a prompt that all hold takes two.
//   - A probe says how many lanes there are, or for up to three which. Sets along
//     a chain only shrink, so equal numbers are equal sets, and only those at both
//     ends of a segment are read.
//   - An entry is 24 bytes: the whole hash, as a wrong match would be a wrong
//     answer, and one word for the lanes, which holds up to three of them itself.
//     Most blocks are those of one conversation, on one to three slots. Larger
//     sets are lists or bitmaps in words that the shard has beside its groups.
//   - Five entries and a word that says which are used are two cache lines, which
//     are fetched together: a probe costs one miss, and few go on to another
//     group. Blocks do not move within a part, so readers need no retry for that.
//   - Every change is published by one store, and what is recycled has a version.
//     So readers take no lock and wait for nothing: between the steps of a change
//     they find what was before it or what is after.
//   - Memory has no pointers, so the garbage collector does not walk it. A shard
//     grows by a quarter at a time: 32 to 40 bytes a block, whatever the number,
//     and up to 64 when half of them have left.
//
// Measured beside it (make bench-index, bench/results/index.json):
//
//   - A map in shards with locks, whose values are bitmaps, walked block by
//     block: for conversations 15 to 36 times the time of a look-up, and three
//     times the memory a block.
//   - The same with jumps of 32 blocks, which is how a positional index searches:
//     4 to 7 times. Where the number of lanes changes it walks the whole jump. A
//     position in the key saves nothing here, as a block's hash names its prefix.
//     Both wait for locks: with 12 writers their p99 is ten to a hundred times
//     the median. Where 1,000 slots end at all places of one chain, every block has
//     to be read in any way, and the table is 1.5 times as fast.
//
// Not built: a radix tree of runs. It reads a long chain that one slot holds in
// few nodes. But a lane enters and leaves block by block, which would move the
// end of a run, or split and join one, at each step; an event names a block and
// not its prefix, which takes a map by hash beside it; and nodes that are split
// and joined are what readers cannot walk without a lock.
package index
