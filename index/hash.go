package index

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// Hash names a block: its tokens and every token before it, under a salt. It
// is a key inside one process and its snapshots, no promise to others. The
// zero value names nothing.
type Hash struct{ Hi, Lo uint64 }

// Root is what a chain begins with: prompts that differ in the model, the
// LoRA adapter or the cache_salt share no block.
func Root(model, adapter string, salt []byte) Hash {
	// Each part follows its length, so no two triples have the same bytes.
	buf := make([]byte, 0, 256)
	buf = append(binary.LittleEndian.AppendUint64(buf, uint64(len(model))), model...)
	buf = append(binary.LittleEndian.AppendUint64(buf, uint64(len(adapter))), adapter...)
	buf = append(binary.LittleEndian.AppendUint64(buf, uint64(len(salt))), salt...)
	h := xxh3.Hash128Seed(buf, rootSeed)
	return Hash{h.Hi, h.Lo}
}

// Seeds that set apart what has other rules.
const (
	rootSeed = 0x696e66657272616c
	textSeed = 0x7465787474657874
)

// spread is an odd number with its bits all over, the golden ratio's.
const spread = 0x9e3779b97f4a7c15

// next returns the hash of a block, given its bytes and the hash of what is
// before it: XXH3-128 seeded with the parent's lower half, to whose upper half
// the parent's upper half is added, multiplied by an odd number.
//
// So all 128 bits of the parent bear on the result. Chains of which only the
// lower halves have met keep different upper halves for as long as the same
// blocks follow: they meet only if both halves do. This is the way with the
// fewest instructions: a block is hashed where it lies, with nothing copied in
// front of it.
func next(parent Hash, block []byte) Hash {
	h := xxh3.Hash128Seed(block, parent.Lo)
	return Hash{h.Hi + parent.Hi*spread, h.Lo}
}

// Next returns the hash of one block of token ids behind its parent, which is
// the Root for the first block.
func Next(parent Hash, block []uint32) Hash {
	if !littleEndian {
		return next(parent, appendLittleEndian(nil, block))
	}
	return next(parent, bytesOf(block))
}

// AppendTokens appends the hashes of the full blocks of ids: the tokens behind
// the last full block have none, as engines reuse no part of a block. A block
// below 1 has no full ones. It allocates nothing where dst has room.
func AppendTokens(dst []Hash, root Hash, ids []uint32, block int) []Hash {
	if block < 1 || len(ids) < block {
		return dst
	}
	ids = ids[:len(ids)-len(ids)%block]
	if !littleEndian {
		return appendChain(dst, root, appendLittleEndian(nil, ids), 4*block)
	}
	return appendChain(dst, root, bytesOf(ids), 4*block)
}

// TextBlock is the size in bytes of the blocks of a prompt of which the tokens
// are not known.
const TextBlock = 256

// AppendText appends the hashes of the full blocks of TextBlock bytes of text.
// They are never equal to hashes of tokens. It allocates nothing where dst has
// room.
func AppendText(dst []Hash, root Hash, text []byte) []Hash {
	var parent [16]byte
	binary.LittleEndian.PutUint64(parent[:8], root.Lo)
	binary.LittleEndian.PutUint64(parent[8:], root.Hi)
	h := xxh3.Hash128Seed(parent[:], textSeed)
	return appendChain(dst, Hash{h.Hi, h.Lo}, text, TextBlock)
}

// appendChain appends the hashes of the full blocks of size bytes.
func appendChain(dst []Hash, parent Hash, data []byte, size int) []Hash {
	n := len(data) / size
	dst = slices.Grow(dst, n)
	chain := dst[len(dst) : len(dst)+n]
	for i := range chain {
		// As next has it, which is too large for the compiler to put here.
		h := xxh3.Hash128Seed(data[:size], parent.Lo)
		parent = Hash{h.Hi + parent.Hi*spread, h.Lo}
		chain[i], data = parent, data[size:]
	}
	return dst[:len(dst)+n]
}

// littleEndian: this machine keeps numbers as the hashes want them.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// bytesOf returns the memory of ids.
func bytesOf(ids []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ids))), 4*len(ids))
}

// appendLittleEndian appends what bytesOf returns on a little-endian machine.
func appendLittleEndian(dst []byte, ids []uint32) []byte {
	for _, id := range ids {
		dst = binary.LittleEndian.AppendUint32(dst, id)
	}
	return dst
}
