package kvevent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
	"github.com/zeebo/xxh3"
)

// MaxPayload is the largest payload that is decoded. A step of an engine stores
// some ten thousand tokens, of up to 5 bytes; what is decoded takes at most 25
// times the memory of its payload.
const MaxPayload = 64 << 20

// Decoder decodes the payloads of a publisher. It belongs to one goroutine. The
// zero value is ready. It allocates nothing once it has seen payloads of the
// size and with the names that come; what it decodes is valid until the next
// call.
type Decoder struct {
	cursor cursor
	msg    *msgpack.Decoder // of the cursor, without a buffer of its own
	names  map[string]string
	lower  []byte // for lowerName

	// What the events of a batch hold. When one of these grows, the events so
	// far keep what lies in its former memory.
	events []Event
	hashes []uint64
	tokens []uint32
	keys   []Key
	extra  [][]Key
}

// Batch decodes the payload of one message into b. After an error b holds
// nothing that may be used.
func (d *Decoder) Batch(b *Batch, payload []byte) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("a payload of %d bytes is larger than %d", len(payload), MaxPayload)
	}
	if d.msg == nil {
		d.msg = msgpack.NewDecoder(&d.cursor)
		d.names = make(map[string]string)
	}
	d.cursor = cursor{data: payload}
	d.events, d.hashes, d.tokens = again(d.events), again(d.hashes), again(d.tokens)
	d.keys, d.extra = again(d.keys), again(d.extra)
	*b = Batch{Rank: -1}
	if err := d.batch(b); err != nil {
		if errors.Is(err, io.EOF) {
			err = errShort
		}
		return fmt.Errorf("batch of %d bytes, at byte %d: %w", len(payload), d.cursor.at, err)
	}
	b.Events = d.events
	return nil
}

// again returns s without its elements. Memory of which the last batch has used
// only a small part is given up, so that one large batch does not bind it.
func again[E any](s []E) []E {
	if cap(s) > 1<<16 && cap(s) > 8*len(s) {
		return nil
	}
	clear(s) // of strings and slices that would keep what they point to
	return s[:0]
}

var errShort = errors.New("it ends too early")

func (d *Decoder) batch(b *Batch) error {
	n, err := d.arrayLen()
	if err != nil {
		return err
	}
	if n < 2 {
		return fmt.Errorf("an array of %d, want a time and events", n)
	}
	if b.Time, err = d.msg.DecodeFloat64(); err != nil {
		return fmt.Errorf("time: %w", err)
	}
	events, err := d.arrayLen()
	if err != nil {
		return fmt.Errorf("events: %w", err)
	}
	for i := range max(events, 0) {
		known, err := d.event()
		if err != nil {
			return fmt.Errorf("event %d: %w", i, err)
		}
		if !known {
			b.Passed++
		}
	}
	if n > 2 {
		rank, ok, err := d.number()
		if err != nil {
			return fmt.Errorf("rank: %w", err)
		}
		if ok {
			b.Rank = int(rank)
		}
	}
	if n > 3 {
		id, ok, err := d.text()
		if err != nil {
			return fmt.Errorf("publisher id: %w", err)
		}
		if ok && len(id) == len(b.Publisher) {
			copy(b.Publisher[:], id)
		}
	}
	if n > 4 {
		if err := d.cursor.skip(n - 4); err != nil {
			return err
		}
	}
	if left := len(d.cursor.data) - d.cursor.at; left > 0 {
		return fmt.Errorf("%d bytes follow it", left)
	}
	return nil
}

// member is one of an event's, as maps name it and arrays have it by its place.
type member uint8

const (
	passed member = iota
	blockHashes
	parentBlockHash
	tokenIDs
	blockSize
	loraID
	medium
	loraName
	extraKeys
	groupIdx
	specKind
	locality
	ownership
	cacheSalt
)

// The members of arrays behind the tag. Older engines have fewer. The 8th of a
// store of SGLang's is a map of further members.
var (
	storedOrder  = [...]member{blockHashes, parentBlockHash, tokenIDs, blockSize, loraID, medium, loraName, extraKeys, groupIdx, specKind, passed, locality, ownership}
	removedOrder = [...]member{blockHashes, medium, groupIdx, locality, ownership}
)

func memberOf(name []byte) member {
	switch string(name) {
	case "block_hashes":
		return blockHashes
	case "parent_block_hash":
		return parentBlockHash
	case "token_ids":
		return tokenIDs
	case "block_size":
		return blockSize
	case "lora_id":
		return loraID
	case "medium":
		return medium
	case "lora_name":
		return loraName
	case "extra_keys":
		return extraKeys
	case "group_idx":
		return groupIdx
	case "kv_cache_spec_kind":
		return specKind
	case "locality":
		return locality
	case "ownership":
		return ownership
	case "cache_salt":
		return cacheSalt
	}
	return passed
}

func (m member) String() string {
	return [...]string{"member", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
		"extra_keys", "group_idx", "kv_cache_spec_kind", "locality", "ownership", "cache_salt"}[m]
}

func kindOf(tag []byte) Kind {
	switch string(tag) {
	case "BlockStored":
		return Stored
	case "BlockRemoved":
		return Removed
	case "AllBlocksCleared":
		return Cleared
	}
	return Unknown
}

// event decodes one event, and reports whether it is of a known kind. One of a
// later engine is skipped.
func (d *Decoder) event() (known bool, err error) {
	code, err := d.peek()
	if err != nil {
		return false, err
	}
	hashes, tokens := len(d.hashes), len(d.tokens)
	e := Event{AdapterID: -1, Group: -1}
	extra := 0 // where the extra keys lie; they are read when all else is known
	switch {
	case isArray(code):
		extra, err = d.arrayEvent(&e)
	case isMap(code):
		extra, err = d.mapEvent(&e)
	default:
		return false, fmt.Errorf("neither an array nor a map: code %#x", code)
	}
	if err != nil {
		return false, err
	}
	if e.Kind == Unknown {
		d.hashes, d.tokens = d.hashes[:hashes], d.tokens[:tokens]
		return false, nil
	}
	if extra > 0 && e.Kind == Stored {
		end := d.cursor.at
		d.cursor.at = extra
		if err := d.extraKeys(&e); err != nil {
			return false, fmt.Errorf("extra_keys: %w", err)
		}
		d.cursor.at = end
	}
	if e.Medium == "" {
		e.Medium = "gpu"
	}
	d.events = append(d.events, e)
	return true, nil
}

func (d *Decoder) arrayEvent(e *Event) (extra int, err error) {
	n, err := d.arrayLen()
	if err != nil {
		return 0, err
	}
	if n < 1 {
		return 0, errors.New("an empty array, want a tag")
	}
	code, err := d.peek()
	if err != nil {
		return 0, err
	}
	if !isText(code) {
		e.Kind = Unknown
		return 0, d.cursor.skip(n)
	}
	tag, _, err := d.text()
	if err != nil {
		return 0, fmt.Errorf("tag: %w", err)
	}
	e.Kind = kindOf(tag)
	var order []member
	switch e.Kind {
	case Stored:
		order = storedOrder[:]
	case Removed:
		order = removedOrder[:]
	}
	for i := range n - 1 {
		if i >= len(order) {
			return extra, d.cursor.skip(n - 1 - i)
		}
		code, err := d.peek()
		if err != nil {
			return 0, err
		}
		if e.Kind == Stored && isMap(code) {
			err = d.members(e, &extra)
		} else {
			err = d.member(e, order[i], &extra)
		}
		if err != nil {
			return 0, err
		}
	}
	return extra, nil
}

func (d *Decoder) mapEvent(e *Event) (extra int, err error) {
	e.Kind = Unknown // without a type
	err = d.members(e, &extra)
	return extra, err
}

// members decodes a map of members, of which the type is one.
func (d *Decoder) members(e *Event, extra *int) error {
	n, err := d.mapLen()
	if err != nil {
		return err
	}
	for range n {
		code, err := d.peek()
		if err != nil {
			return err
		}
		if !isText(code) {
			if err := d.cursor.skip(2); err != nil {
				return err
			}
			continue
		}
		name, _, err := d.text()
		if err != nil {
			return err
		}
		if string(name) == "type" {
			tag, _, err := d.text()
			if err != nil {
				return fmt.Errorf("type: %w", err)
			}
			e.Kind = kindOf(tag)
			continue
		}
		if err := d.member(e, memberOf(name), extra); err != nil {
			return err
		}
	}
	return nil
}

func (d *Decoder) member(e *Event, m member, extra *int) (err error) {
	switch m {
	case blockHashes:
		e.Hashes, err = d.hashList()
	case parentBlockHash:
		e.Parent, e.HasParent, err = d.hash()
	case tokenIDs:
		e.Tokens, err = d.tokenList()
	case blockSize:
		var size uint64
		size, _, err = d.number()
		if int64(size) < 0 || int64(size) > MaxPayload {
			err = fmt.Errorf("%d is none", int64(size))
		}
		e.BlockSize = int(size)
	case loraID:
		err = d.loraID(e)
	case medium:
		var name []byte
		name, _, err = d.text()
		e.Medium = d.lowerName(name)
	case loraName:
		e.Adapter, err = d.name(e.Adapter)
	case extraKeys:
		*extra = d.cursor.at
		err = d.cursor.skip(1)
	case groupIdx:
		group, ok, numberErr := d.number()
		if err = numberErr; ok {
			e.Group = int(group)
		}
	case specKind:
		e.Spec, err = d.name("")
	case locality:
		e.Locality, err = d.name("")
	case ownership:
		e.Ownership, err = d.name("")
	case cacheSalt:
		e.Salt, err = d.name("")
	default:
		err = d.cursor.skip(1)
	}
	if err != nil {
		return fmt.Errorf("%v: %w", m, err)
	}
	return nil
}

// loraID decodes what engines give as the number of an adapter, or as a text.
func (d *Decoder) loraID(e *Event) error {
	code, err := d.peek()
	if err != nil {
		return err
	}
	if isText(code) {
		name, err := d.name("")
		if e.Adapter == "" {
			e.Adapter = name
		}
		return err
	}
	id, ok, err := d.number()
	if ok {
		e.AdapterID = int64(id)
	}
	return err
}

// hashList decodes the names of blocks.
func (d *Decoder) hashList() ([]uint64, error) {
	n, err := d.arrayLen()
	if err != nil {
		return nil, err
	}
	start := len(d.hashes)
	for i := range max(n, 0) {
		h, ok, err := d.hash()
		if err == nil && !ok {
			err = errors.New("is null")
		}
		if err != nil {
			return nil, fmt.Errorf("number %d: %w", i, err)
		}
		d.hashes = append(d.hashes, h)
	}
	return d.hashes[start:len(d.hashes):len(d.hashes)], nil
}

// hash decodes the name of a block: a number, signed or not, or bytes.
func (d *Decoder) hash() (h uint64, ok bool, err error) {
	code, err := d.peek()
	if err != nil {
		return 0, false, err
	}
	if !isText(code) {
		return d.number()
	}
	text, _, err := d.text()
	if err != nil {
		return 0, false, err
	}
	for _, b := range text[max(0, len(text)-8):] {
		h = h<<8 | uint64(b)
	}
	return h, true, nil
}

// tokenList decodes token ids.
//
// With EAGLE, SGLang's cache has a pair for each token but the last: the token
// and the one behind it. The first of each are the tokens of the blocks, so
// they stand for the pair.
func (d *Decoder) tokenList() ([]uint32, error) {
	n, err := d.arrayLen()
	if err != nil {
		return nil, err
	}
	start := len(d.tokens)
	for i := 0; i < n; i++ {
		// Nearly all that a payload has are these, so they are read without the
		// decoder's three calls for each: first those that have no special form.
		i += d.plainTokens(n - i)
		if i == n {
			break
		}
		code, err := d.peek()
		if err != nil {
			return nil, err
		}
		var pair int
		if isArray(code) {
			if pair, err = d.arrayLen(); err != nil {
				return nil, fmt.Errorf("number %d: %w", i, err)
			}
			if pair == 0 {
				return nil, fmt.Errorf("number %d: an empty array", i)
			}
		}
		at := d.cursor.at
		id, ok, err := d.number()
		if err == nil && !ok {
			err = errors.New("is null")
		}
		if err == nil && pair > 1 {
			err = d.cursor.skip(pair - 1)
		}
		if err != nil {
			return nil, fmt.Errorf("number %d: %w", i, err)
		}
		if id>>32 != 0 {
			// No token's id: it stands for an image or the like. What it is
			// taken as has a bit that ids of tokens have not.
			id = xxh3.Hash(d.cursor.data[at:d.cursor.at])&(1<<32-1) | 1<<31
		}
		d.tokens = append(d.tokens, uint32(id))
	}
	return d.tokens[start:len(d.tokens):len(d.tokens)], nil
}

// plainTokens decodes up to n unsigned numbers of at most 32 bits, and returns
// how many it has found.
func (d *Decoder) plainTokens(n int) int {
	data, at, tokens := d.cursor.data, d.cursor.at, d.tokens
	i := 0
loop:
	for ; i < n && at < len(data); i++ {
		var id uint32
		switch code := data[at]; {
		case code <= msgpcode.PosFixedNumHigh:
			id = uint32(code)
			at++
		case code == msgpcode.Uint16 && at+3 <= len(data):
			id = uint32(binary.BigEndian.Uint16(data[at+1:]))
			at += 3
		case code == msgpcode.Uint32 && at+5 <= len(data):
			id = binary.BigEndian.Uint32(data[at+1:])
			at += 5
		case code == msgpcode.Uint8 && at+2 <= len(data):
			id = uint32(data[at+1])
			at += 2
		default:
			break loop
		}
		tokens = append(tokens, id)
	}
	d.cursor.at, d.tokens = at, tokens
	return i
}

// extraKeys decodes what the content of the blocks depends on beside their
// tokens: for each block nothing, or a list. vLLM has in it the adapter's name,
// then what stands for images, in the first block of a prompt the cache_salt,
// and what stands for embeddings.
func (d *Decoder) extraKeys(e *Event) error {
	n, err := d.arrayLen()
	if err != nil {
		return err
	}
	if n > len(e.Hashes) {
		return fmt.Errorf("%d for %d blocks", n, len(e.Hashes))
	}
	start := len(d.extra)
	for i := range max(n, 0) {
		keys, err := d.blockKeys(e, i == 0 && !e.HasParent)
		if err != nil {
			return fmt.Errorf("block %d: %w", i, err)
		}
		if len(keys) == 0 {
			continue
		}
		for len(d.extra) < start+i {
			d.extra = append(d.extra, nil)
		}
		d.extra = append(d.extra, keys)
	}
	e.Extra = d.extra[start:len(d.extra):len(d.extra)]
	return nil
}

// blockKeys decodes the keys of one block. first is the first of a prompt.
func (d *Decoder) blockKeys(e *Event, first bool) ([]Key, error) {
	code, err := d.peek()
	if err != nil {
		return nil, err
	}
	n := 1
	if code == msgpcode.Nil || isArray(code) {
		if n, err = d.arrayLen(); err != nil {
			return nil, err
		}
	}
	start, salt := len(d.keys), -1
	for i := range max(n, 0) {
		code, err := d.peek()
		if err != nil {
			return nil, err
		}
		if isString(code) {
			text, err := d.name("")
			if err != nil {
				return nil, err
			}
			if i == 0 && text == e.Adapter && text != "" {
				continue
			}
			salt = len(d.keys)
			d.keys = append(d.keys, Key{Text: text})
			continue
		}
		at := d.cursor.at
		if err := d.cursor.skip(1); err != nil {
			return nil, err
		}
		d.keys = append(d.keys, Key{Digest: xxh3.Hash(d.cursor.data[at:d.cursor.at])})
	}
	if first && salt >= 0 {
		// Older engines have images as texts, too. One that is taken as the salt
		// names a prompt that nobody can ask for, as it would have without.
		e.Salt = d.keys[salt].Text
		d.keys = append(d.keys[:salt], d.keys[salt+1:]...)
	}
	return d.keys[start:len(d.keys):len(d.keys)], nil
}

// What follows reads the short forms, which nearly all of a payload has, where
// they lie, and leaves the others to the msgpack decoder: its calls take three
// quarters of the time.

// peek returns the code of the next value.
func (d *Decoder) peek() (byte, error) {
	c := &d.cursor
	if c.at == len(c.data) {
		return 0, io.EOF
	}
	return c.data[c.at], nil
}

// arrayLen and mapLen decode how much is in an array or a map; null has -1.
func (d *Decoder) arrayLen() (int, error) {
	if code, _ := d.peek(); msgpcode.IsFixedArray(code) {
		d.cursor.at++
		return int(code & msgpcode.FixedArrayMask), nil
	}
	return d.msg.DecodeArrayLen()
}

func (d *Decoder) mapLen() (int, error) {
	if code, _ := d.peek(); msgpcode.IsFixedMap(code) {
		d.cursor.at++
		return int(code & msgpcode.FixedMapMask), nil
	}
	return d.msg.DecodeMapLen()
}

// number decodes an integer; null is none. Signed ones are cast.
func (d *Decoder) number() (n uint64, ok bool, err error) {
	code, err := d.peek()
	if err != nil {
		return 0, false, err
	}
	c := &d.cursor
	rest := c.data[c.at+1:]
	switch {
	case code <= msgpcode.PosFixedNumHigh:
		c.at++
		return uint64(code), true, nil
	case code == msgpcode.Nil:
		c.at++
		return 0, false, nil
	case (code == msgpcode.Uint64 || code == msgpcode.Int64) && len(rest) >= 8:
		c.at += 9
		return binary.BigEndian.Uint64(rest), true, nil
	}
	n, err = d.msg.DecodeUint64()
	return n, true, err
}

// text decodes a string or bytes, as they lie in the payload; null is none.
func (d *Decoder) text() (text []byte, ok bool, err error) {
	if code, _ := d.peek(); msgpcode.IsFixedString(code) {
		d.cursor.at++
		text, err = d.cursor.take(int(code & msgpcode.FixedStrMask))
		return text, true, err
	}
	n, err := d.msg.DecodeBytesLen()
	if err != nil || n < 0 {
		return nil, false, err
	}
	text, err = d.cursor.take(n)
	return text, true, err
}

// name decodes a text that occurs again and again; null is what was before.
func (d *Decoder) name(before string) (string, error) {
	text, ok, err := d.text()
	if err != nil || !ok {
		return before, err
	}
	return d.kept(text), nil
}

// kept returns the text as a string, the same one each time.
func (d *Decoder) kept(text []byte) string {
	if s, ok := d.names[string(text)]; ok {
		return s
	}
	s := string(text)
	if len(s) > 256 {
		return s
	}
	// Salts may differ in each prompt. Those that do not come back soon.
	if len(d.names) >= 1024 {
		clear(d.names)
	}
	d.names[s] = s
	return s
}

// lowerName is kept in lower case.
func (d *Decoder) lowerName(text []byte) string {
	for _, b := range text {
		if b >= 0x80 {
			return strings.ToLower(string(text))
		}
	}
	d.lower = append(d.lower[:0], text...)
	for i, b := range d.lower {
		if 'A' <= b && b <= 'Z' {
			d.lower[i] = b + 'a' - 'A'
		}
	}
	return d.kept(d.lower)
}

func isArray(code byte) bool {
	return msgpcode.IsFixedArray(code) || code == msgpcode.Array16 || code == msgpcode.Array32
}

func isMap(code byte) bool {
	return msgpcode.IsFixedMap(code) || code == msgpcode.Map16 || code == msgpcode.Map32
}

func isString(code byte) bool { return msgpcode.IsString(code) }

func isText(code byte) bool { return msgpcode.IsString(code) || msgpcode.IsBin(code) }

// cursor reads a payload where it lies. As it can unread, the msgpack decoder
// above it buffers nothing, and both may read in turn.
type cursor struct {
	data []byte
	at   int
}

func (c *cursor) Read(p []byte) (int, error) {
	if c.at == len(c.data) {
		return 0, io.EOF
	}
	n := copy(p, c.data[c.at:])
	c.at += n
	return n, nil
}

func (c *cursor) ReadByte() (byte, error) {
	if c.at == len(c.data) {
		return 0, io.EOF
	}
	c.at++
	return c.data[c.at-1], nil
}

func (c *cursor) UnreadByte() error {
	c.at--
	return nil
}

func (c *cursor) take(n int) ([]byte, error) {
	if n > len(c.data)-c.at {
		return nil, errShort
	}
	c.at += n
	return c.data[c.at-n : c.at], nil
}

// skip passes over n values with all that is in them. It needs no stack, how
// deep they may be.
func (c *cursor) skip(n int) error {
	for left := int64(n); left > 0; left-- {
		// Each value that is left has a byte at least.
		if left > int64(len(c.data)-c.at) {
			return errShort
		}
		code := c.data[c.at]
		c.at++
		size, length := 0, 0
		switch {
		case msgpcode.IsFixedNum(code), code == msgpcode.Nil, code == msgpcode.True, code == msgpcode.False:
		case msgpcode.IsFixedString(code):
			size = int(code & msgpcode.FixedStrMask)
		case msgpcode.IsFixedArray(code):
			left += int64(code & msgpcode.FixedArrayMask)
		case msgpcode.IsFixedMap(code):
			left += 2 * int64(code&msgpcode.FixedMapMask)
		case code == msgpcode.Uint8, code == msgpcode.Int8:
			size = 1
		case code == msgpcode.Uint16, code == msgpcode.Int16:
			size = 2
		case code == msgpcode.Uint32, code == msgpcode.Int32, code == msgpcode.Float:
			size = 4
		case code == msgpcode.Uint64, code == msgpcode.Int64, code == msgpcode.Double:
			size = 8
		case code == msgpcode.FixExt1, code == msgpcode.FixExt2, code == msgpcode.FixExt4, code == msgpcode.FixExt8, code == msgpcode.FixExt16:
			size = 1 + 1<<(code-msgpcode.FixExt1)
		case code == msgpcode.Str8, code == msgpcode.Bin8, code == msgpcode.Ext8:
			length = 1
		case code == msgpcode.Str16, code == msgpcode.Bin16, code == msgpcode.Ext16, code == msgpcode.Array16, code == msgpcode.Map16:
			length = 2
		case code == msgpcode.Str32, code == msgpcode.Bin32, code == msgpcode.Ext32, code == msgpcode.Array32, code == msgpcode.Map32:
			length = 4
		default:
			return fmt.Errorf("code %#x is none of msgpack", code)
		}
		if length > 0 {
			b, err := c.take(length)
			if err != nil {
				return err
			}
			n := 0
			for _, b := range b {
				n = n<<8 | int(b)
			}
			switch code {
			case msgpcode.Array16, msgpcode.Array32:
				left += int64(n)
			case msgpcode.Map16, msgpcode.Map32:
				left += 2 * int64(n)
			case msgpcode.Ext8, msgpcode.Ext16, msgpcode.Ext32:
				size = n + 1
			default:
				size = n
			}
		}
		if _, err := c.take(size); err != nil {
			return err
		}
	}
	return nil
}

// Form is how an engine writes its events.
type Form uint8

const (
	// VLLM is vLLM's since v0.24, maps.
	VLLM Form = iota
	// VLLMArrays is vLLM's before that.
	VLLMArrays
	// SGLang is SGLang's since v0.5.20, maps. Its hashes are signed.
	SGLang
	// SGLangArrays is SGLang's before that.
	SGLangArrays
)

// AppendBatch appends the payload of a batch. hashBytes, when it is not 0, is
// the length of the hashes as bytes, which vLLM can have, for numbers; their
// last 8 bytes are the number.
//
// Events of an unknown kind are left out. A key without a text is written as
// vLLM writes an image: a pair of its name and its place.
func AppendBatch(dst []byte, f Form, hashBytes int, b *Batch) []byte {
	w := writer{buf: dst, form: f, hashBytes: hashBytes}
	e := msgpack.GetEncoder()
	defer msgpack.PutEncoder(e)
	e.Reset(&w)
	w.msg = e
	w.batch(b)
	return w.buf
}

// writer is the memory under the msgpack encoder, which it never fails.
type writer struct {
	buf       []byte
	msg       *msgpack.Encoder
	form      Form
	hashBytes int
}

func (w *writer) Write(p []byte) (int, error) {
	w.buf = append(w.buf, p...)
	return len(p), nil
}

func (w *writer) WriteByte(b byte) error {
	w.buf = append(w.buf, b)
	return nil
}

func (w *writer) batch(b *Batch) {
	n := 0
	for i := range b.Events {
		if b.Events[i].Kind != Unknown {
			n++
		}
	}
	if b.Publisher != [16]byte{} {
		w.array(4)
	} else {
		w.array(3)
	}
	_ = w.msg.EncodeFloat64(b.Time)
	w.array(n)
	for i := range b.Events {
		if w.form == VLLM || w.form == SGLang {
			w.mapEvent(&b.Events[i])
		} else {
			w.arrayEvent(&b.Events[i])
		}
	}
	w.numberOrNil(int64(b.Rank), b.Rank >= 0)
	if b.Publisher != [16]byte{} {
		_ = w.msg.EncodeBytes(b.Publisher[:])
	}
}

func (w *writer) mapEvent(e *Event) {
	vllm := w.form == VLLM
	key := func(name string) { _ = w.msg.EncodeString(name) }
	count := func(has ...bool) (n int) {
		for _, h := range has {
			if h {
				n++
			}
		}
		return n
	}
	group, spec := vllm && e.Group >= 0, vllm && e.Spec != ""
	local, owned := vllm && e.Locality != "", vllm && e.Ownership != ""
	switch e.Kind {
	case Stored:
		extra := vllm && len(e.Tokens) > 0
		salt := !vllm && e.Salt != ""
		_ = w.msg.EncodeMapLen(7 + count(vllm, extra, group, spec, local, owned, salt))
		key("type")
		key("BlockStored")
		key("block_hashes")
		w.hashes(e.Hashes)
		key("parent_block_hash")
		w.parent(e)
		key("token_ids")
		w.tokens(e.Tokens)
		key("block_size")
		_ = w.msg.EncodeInt(int64(e.BlockSize))
		key("lora_id")
		w.numberOrNil(e.AdapterID, e.AdapterID >= 0)
		key("medium")
		w.medium(e)
		if vllm {
			key("lora_name")
			w.stringOrNil(e.Adapter)
		}
		if extra {
			key("extra_keys")
			w.extra(e)
		}
		if salt {
			key("cache_salt")
			w.stringOrNil(e.Salt)
		}
	case Removed:
		_ = w.msg.EncodeMapLen(3 + count(group, local, owned))
		key("type")
		key("BlockRemoved")
		key("block_hashes")
		w.hashes(e.Hashes)
		key("medium")
		w.medium(e)
		spec = false
	case Cleared:
		_ = w.msg.EncodeMapLen(1)
		key("type")
		key("AllBlocksCleared")
		return
	default:
		return
	}
	if group {
		key("group_idx")
		_ = w.msg.EncodeInt(int64(e.Group))
	}
	if spec {
		key("kv_cache_spec_kind")
		_ = w.msg.EncodeString(e.Spec)
	}
	if local {
		key("locality")
		_ = w.msg.EncodeString(e.Locality)
	}
	if owned {
		key("ownership")
		_ = w.msg.EncodeString(e.Ownership)
	}
}

func (w *writer) arrayEvent(e *Event) {
	vllm := w.form == VLLMArrays
	switch e.Kind {
	case Stored:
		switch {
		case vllm:
			w.array(12)
		case e.Salt != "":
			w.array(8)
		default:
			w.array(7)
		}
		_ = w.msg.EncodeString("BlockStored")
		w.hashes(e.Hashes)
		w.parent(e)
		w.tokens(e.Tokens)
		_ = w.msg.EncodeInt(int64(e.BlockSize))
		w.numberOrNil(e.AdapterID, e.AdapterID >= 0)
		w.medium(e)
		if vllm {
			w.stringOrNil(e.Adapter)
			if len(e.Tokens) > 0 {
				w.extra(e)
			} else {
				_ = w.msg.EncodeNil()
			}
			w.numberOrNil(int64(e.Group), e.Group >= 0)
			w.stringOrNil(e.Spec)
			_ = w.msg.EncodeNil() // the window
		} else if e.Salt != "" {
			_ = w.msg.EncodeMapLen(1)
			_ = w.msg.EncodeString("cache_salt")
			_ = w.msg.EncodeString(e.Salt)
		}
	case Removed:
		if vllm {
			w.array(4)
		} else {
			w.array(3)
		}
		_ = w.msg.EncodeString("BlockRemoved")
		w.hashes(e.Hashes)
		w.medium(e)
		if vllm {
			w.numberOrNil(int64(e.Group), e.Group >= 0)
		}
	case Cleared:
		w.array(1)
		_ = w.msg.EncodeString("AllBlocksCleared")
	}
}

func (w *writer) array(n int) { _ = w.msg.EncodeArrayLen(n) }

func (w *writer) numberOrNil(n int64, ok bool) {
	if ok {
		_ = w.msg.EncodeInt(n)
	} else {
		_ = w.msg.EncodeNil()
	}
}

func (w *writer) stringOrNil(s string) {
	if s != "" {
		_ = w.msg.EncodeString(s)
	} else {
		_ = w.msg.EncodeNil()
	}
}

func (w *writer) medium(e *Event) { w.stringOrNil(strings.ToUpper(e.Medium)) }

func (w *writer) parent(e *Event) {
	if e.HasParent {
		w.hash(e.Parent)
	} else {
		_ = w.msg.EncodeNil()
	}
}

func (w *writer) hashes(hashes []uint64) {
	w.array(len(hashes))
	for _, h := range hashes {
		w.hash(h)
	}
}

func (w *writer) hash(h uint64) {
	switch {
	case w.form == SGLang || w.form == SGLangArrays:
		_ = w.msg.EncodeInt(int64(h))
	case w.hashBytes > 0:
		b := make([]byte, 64+8)
		b = binary.BigEndian.AppendUint64(b[:64], h)
		_ = w.msg.EncodeBytes(b[max(0, len(b)-w.hashBytes):])
	default:
		_ = w.msg.EncodeUint(h)
	}
}

func (w *writer) tokens(ids []uint32) {
	w.array(len(ids))
	for _, id := range ids {
		_ = w.msg.EncodeUint(uint64(id))
	}
}

// extra writes the keys of each block in vLLM's order.
func (w *writer) extra(e *Event) {
	w.array(len(e.Hashes))
	for i := range e.Hashes {
		var keys []Key
		if i < len(e.Extra) {
			keys = e.Extra[i]
		}
		salted := i == 0 && !e.HasParent && e.Salt != ""
		n := len(keys)
		if e.Adapter != "" {
			n++
		}
		if salted {
			n++
		}
		if n == 0 {
			_ = w.msg.EncodeNil()
			continue
		}
		w.array(n)
		if e.Adapter != "" {
			_ = w.msg.EncodeString(e.Adapter)
		}
		for _, k := range keys {
			if k.Text != "" {
				_ = w.msg.EncodeString(k.Text)
				continue
			}
			w.array(2)
			_ = w.msg.EncodeString(fmt.Sprintf("%016x", k.Digest))
			_ = w.msg.EncodeInt(0)
		}
		if salted {
			_ = w.msg.EncodeString(e.Salt)
		}
	}
}

// Message is one message of a publisher. Its payload is the frame's memory.
type Message struct {
	Seq     uint64
	Payload []byte
}

// ParseMessage takes apart a live message: topic, sequence and payload.
func ParseMessage(frames [][]byte) (Message, error) {
	if len(frames) != 3 {
		return Message{}, fmt.Errorf("a message of %d frames, want topic, sequence and payload", len(frames))
	}
	return message(frames[1], frames[2])
}

// AppendMessage appends the frames of a live message.
func AppendMessage(dst [][]byte, topic string, m Message) [][]byte {
	return append(dst, []byte(topic), binary.BigEndian.AppendUint64(nil, m.Seq), m.Payload)
}

func message(seq, payload []byte) (Message, error) {
	if len(seq) != 8 {
		return Message{}, fmt.Errorf("a sequence of %d bytes, want 8", len(seq))
	}
	return Message{Seq: binary.BigEndian.Uint64(seq), Payload: payload}, nil
}

// endSeq is the sequence of the reply behind the last one of a replay.
const endSeq = 1<<64 - 1

// ReplayRequest returns the frames by which a DEALER asks for all messages from
// a sequence on. A REQ sends the last of them, and gets the first reply only.
func ReplayRequest(from uint64) [][]byte {
	return [][]byte{{}, binary.BigEndian.AppendUint64(nil, from)}
}

// ParseReplayRequest takes apart what a ROUTER has got: the frames by which the
// one who asks is known, an empty one and the sequence. It returns the first of
// them, which replies begin with.
func ParseReplayRequest(frames [][]byte) (who []byte, from uint64, err error) {
	if len(frames) != 3 || len(frames[1]) != 0 || len(frames[2]) != 8 {
		return nil, 0, fmt.Errorf("a request for a replay of %d frames, want who asks, an empty one and a sequence of 8 bytes", len(frames))
	}
	return frames[0], binary.BigEndian.Uint64(frames[2]), nil
}

// AppendReplay appends the frames of one reply behind those of who has asked.
// vLLM has the topic in it since July 2026, SGLang has not.
func AppendReplay(dst [][]byte, topic string, withTopic bool, m Message) [][]byte {
	dst = append(dst, []byte{})
	if withTopic {
		dst = append(dst, []byte(topic))
	}
	return append(dst, binary.BigEndian.AppendUint64(nil, m.Seq), m.Payload)
}

// AppendReplayEnd appends the frames of the reply behind the last one.
func AppendReplayEnd(dst [][]byte, withTopic bool) [][]byte {
	return AppendReplay(dst, "", withTopic, Message{Seq: endSeq, Payload: []byte{}})
}

// ParseReplay takes apart one reply to a replay as a DEALER gets it: an empty
// frame, a topic where the engine has it, a sequence and a payload. end is the
// reply behind the last message.
func ParseReplay(frames [][]byte) (m Message, end bool, err error) {
	if len(frames) > 0 && len(frames[0]) == 0 {
		frames = frames[1:]
	}
	switch len(frames) {
	case 2:
	case 3:
		frames = frames[1:]
	default:
		return Message{}, false, fmt.Errorf("a reply of %d frames to a replay, want sequence and payload, behind an empty one and perhaps a topic", len(frames))
	}
	m, err = message(frames[0], frames[1])
	return m, err == nil && m.Seq == endSeq, err
}

// Snapshot is all that a publisher's engine holds, as of one message.
type Snapshot struct {
	Seq       int64 // of the last message that is in it
	Publisher [16]byte
	Chunks    [][]byte // payloads
}

// The sequences of replies without a snapshot.
const (
	nothingRecorded = -1
	unavailable     = -2
)

// ErrNoSnapshot is that the publisher has answered that it has none.
var ErrNoSnapshot = errors.New("the publisher has no snapshot")

// SnapshotRequest returns the frames by which a REQ asks for a snapshot. A
// DEALER sends an empty one before them.
func SnapshotRequest() [][]byte { return [][]byte{[]byte("snapshot")} }

// IsSnapshotRequest tells whether a REP has got that.
func IsSnapshotRequest(frames [][]byte) bool {
	return len(frames) == 1 && bytes.Equal(frames[0], []byte("snapshot"))
}

// AppendSnapshot appends the frames of a snapshot.
func AppendSnapshot(dst [][]byte, s *Snapshot) [][]byte {
	dst = append(dst, binary.BigEndian.AppendUint64(nil, uint64(s.Seq)), s.Publisher[:])
	return append(dst, s.Chunks...)
}

// ParseSnapshot takes apart the reply to a request for a snapshot. A publisher
// that has sent nothing yet has an empty one, of sequence -1.
func ParseSnapshot(frames [][]byte) (Snapshot, error) {
	if len(frames) > 0 && len(frames[0]) == 0 {
		frames = frames[1:]
	}
	if len(frames) == 0 || len(frames[0]) != 8 {
		return Snapshot{}, errors.New("a snapshot without a sequence of 8 bytes")
	}
	s := Snapshot{Seq: int64(binary.BigEndian.Uint64(frames[0]))}
	if s.Seq == unavailable {
		return Snapshot{}, ErrNoSnapshot
	}
	if s.Seq < nothingRecorded {
		return Snapshot{}, fmt.Errorf("a snapshot of sequence %d", s.Seq)
	}
	if len(frames) < 2 || len(frames[1]) != len(s.Publisher) {
		return Snapshot{}, errors.New("a snapshot without a publisher's id of 16 bytes")
	}
	copy(s.Publisher[:], frames[1])
	s.Chunks = frames[2:]
	return s, nil
}
