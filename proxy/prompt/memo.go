package prompt

import (
	"encoding/binary"
	"hash/maphash"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// memo remembers the ids of whole prompts, so that one that comes again is
// neither decoded nor rendered. The key are the bytes of all members of the
// body that bear on the prompt, but for the salt, which only sets prompts
// apart. A Model has one, from its loading on; it may be used from any
// goroutine. A nil memo remembers nothing.
//
// Only what comes a second time is remembered: a conversation that goes on is a
// new prompt with each turn, and its pieces are in the same cache already.
type memo struct {
	cache  *tokenizer.Cache
	number uint32
	seed   maphash.Seed
	// seen holds hashes of prompts that were followed lately, each where its
	// hash says, so that a later one takes the place of an earlier one.
	seen [4096]atomic.Uint64
}

// memoBytes is the size up to which a body is looked up, which its caller does
// before the workers have it.
const memoBytes = 256 << 10

// memoVariant sets prompts apart from the pieces of texts in the cache. The
// kind is added.
const memoVariant = 128

// memos counts them: each has a number of its own in the cache.
var memos atomic.Uint32

func newMemo(cache *tokenizer.Cache) *memo {
	if cache == nil {
		return nil
	}
	return &memo{cache: cache, number: memos.Add(1), seed: maphash.MakeSeed()}
}

// recall sets the ids of p, which must have none, if the prompt is known.
// Otherwise note may be called for the same p and o once it is followed. day,
// if it is not zero, is a time of which the prompt depends on the date.
func (m *memo) recall(p *Prompt, o *outline, day time.Time) bool {
	p.scratch.key = p.scratch.key[:0]
	if m == nil || len(o.body) > memoBytes {
		return false
	}
	p.scratch.key = o.appendKey(p.scratch.key, day)
	ids, ok := m.cache.Append(p.IDs, m.number, memoVariant+uint8(o.kind), keyText(p.scratch.key))
	p.IDs = ids
	if !ok {
		return false
	}
	// The number of ends is last, the ends are before it.
	n := len(ids) - 1
	at := n - int(ids[n])
	for _, end := range ids[at:n] {
		p.Ends = append(p.Ends, int(end))
	}
	p.IDs = ids[:at]
	return true
}

// recall sets the ids of p if the prompt of a body is known, and reports that.
// Otherwise p is of no use. It is Follow without anything that takes long.
func (m *Model) recall(p *Prompt, kind Kind, body []byte, now time.Time) (known bool) {
	p.reset()
	if m == nil || m.memo == nil || len(body) > memoBytes {
		return false
	}
	var o outline
	if o.scan(kind, body) != Exact {
		return false
	}
	var reason Reason
	if p.Salt, reason = o.salt(p.Salt); reason != Exact {
		return false
	}
	day, same := m.day(&o, now)
	return same && m.memo.recall(p, &o, day)
}

// note remembers the ids of a prompt for which recall has said no, if it has
// come before.
func (m *memo) note(p *Prompt, o *outline) {
	key := p.scratch.key
	if m == nil || len(key) == 0 {
		return
	}
	hash := maphash.Bytes(m.seed, key) | 1
	if place := &m.seen[hash>>32%uint64(len(m.seen))]; place.Swap(hash) != hash {
		return
	}
	n := len(p.IDs)
	for _, end := range p.Ends {
		p.IDs = append(p.IDs, uint32(end))
	}
	p.IDs = append(p.IDs, uint32(len(p.Ends)))
	m.cache.Put(m.number, memoVariant+uint8(o.kind), keyText(key), p.IDs)
	p.IDs = p.IDs[:n]
}

// appendKey appends what tells prompts of one kind and one model apart. Each
// part follows its length, so no two lists of parts have the same bytes.
func (o *outline) appendKey(dst []byte, day time.Time) []byte {
	if !day.IsZero() {
		dst = day.AppendFormat(dst, time.DateOnly)
	}
	for m := range members {
		if o.has(m) && m != memberCacheSalt {
			raw := o.raw(m)
			dst = append(dst, byte(m)+1)
			dst = binary.AppendUvarint(dst, uint64(len(raw)))
			dst = append(dst, raw...)
		}
	}
	return dst
}

// keyText returns a text that is valid until b changes.
func keyText(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
