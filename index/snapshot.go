package index

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"
)

// A snapshot of a slot is its records, parents first, and what the shadow and
// the events have beside them:
//
//	magic, of which the last byte is the version
//	model, why: length and bytes
//	block size, capacity, state, records: numbers
//	of each record: how far before it its parent is, its own number if it has none
//	                which reasons there are, and spareBit
//	                its hash, if it is no spare one; the count of each reason
//	the order of the shadow: length, and numbers of records, from 1 on
//	the rest of the shadow, what is told: length and bytes
//	XXH3-64 of all that
//
// Numbers are varints. Requests in flight are not in it: nobody would end them.
const (
	snapshotMagic = "inferrail index \x01"
	snapshotSpare = 1 << 7
	// maxCount is more than any block is held, and few enough to be believed.
	maxCount = 1 << 24
)

// AppendSnapshot appends what a warm restart needs of a slot, and nothing when
// the slot is not known.
func (x *Index) AppendSnapshot(dst []byte, number int) []byte {
	s := x.lock(number)
	if s == nil {
		return dst
	}
	defer s.unlock()
	t, start := &s.tree, len(dst)
	dst = append(dst, snapshotMagic...)
	dst = appendString(dst, s.config.Model)
	dst = appendString(dst, s.why)
	dst = binary.AppendUvarint(dst, uint64(s.config.BlockSize))
	dst = binary.AppendUvarint(dst, uint64(s.config.Capacity))
	dst = binary.AppendUvarint(dst, uint64(s.state))

	numbers, n := make(refNumbers, len(t.chunks)), uint32(0)
	for r := t.following(t.top); r != t.top; r = t.following(r) {
		if t.saved(r) {
			n++
			numbers.set(r, n)
		}
	}
	dst = slices.Grow(binary.AppendUvarint(dst, uint64(n)), 32*int(n))
	for r := t.following(t.top); r != t.top; r = t.following(r) {
		n := numbers.of(r)
		if n == 0 {
			continue
		}
		rec := t.at(r)
		dst = binary.AppendUvarint(dst, uint64(n-numbers.of(rec.parent)))
		if rec.state&spareBit != 0 {
			dst = append(dst, snapshotSpare)
			continue
		}
		what := byte(0)
		for why := range guessed + 1 {
			if t.holds(r, why) > 0 {
				what |= 1 << why
			}
		}
		h := rec.hash()
		dst = append(dst, what)
		dst = binary.LittleEndian.AppendUint64(dst, h.Hi)
		dst = binary.LittleEndian.AppendUint64(dst, h.Lo)
		for why := range guessed + 1 {
			if n := t.holds(r, why); n > 0 {
				dst = binary.AppendUvarint(dst, uint64(n))
			}
		}
	}

	order := s.shadow.appendOrder(nil, s)
	dst = binary.AppendUvarint(dst, uint64(len(order)))
	for _, r := range order {
		dst = binary.AppendUvarint(dst, uint64(numbers.of(r)))
	}
	dst = appendString(dst, s.shadow.appendSnapshot(nil, s, numbers.of))
	dst = appendString(dst, s.told.appendSnapshot(nil, s, numbers.of))
	return binary.LittleEndian.AppendUint64(dst, xxh3.Hash(dst[start:]))
}

// saved: the record means something when no request is in flight, or one below
// it does.
func (t *tree) saved(r ref) bool {
	rec := t.at(r)
	return rec.state&(toldBits|spareBit) != 0 || t.holds(r, guessed) > 0 || rec.child != 0
}

// refNumbers are the numbers that records have in a snapshot, by the chunks that
// the records lie in. Those that are not in it have 0.
type refNumbers []*[chunkRecords]uint32

func (n refNumbers) set(r ref, number uint32) {
	if n[r/chunkRecords] == nil {
		n[r/chunkRecords] = new([chunkRecords]uint32)
	}
	n[r/chunkRecords][r%chunkRecords] = number
}

func (n refNumbers) of(r ref) uint32 {
	if c := n[r/chunkRecords]; c != nil {
		return c[r%chunkRecords]
	}
	return 0
}

func appendString[S string | []byte](dst []byte, s S) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(s))), s...)
}

// Restore enters what AppendSnapshot has written of a slot that has the same
// model and block size. The slot must have joined and hold nothing. It is
// Repairing then, if its events were followed. Of blocks for which there is no
// memory, it holds none. After an error it is as it was.
func (x *Index) Restore(number int, data []byte) error {
	s := x.lock(number)
	if s == nil {
		return fmt.Errorf("snapshot for slot %d: there is no such slot", number)
	}
	defer s.unlock()
	if s.tree.records != 0 {
		return fmt.Errorf("snapshot for slot %d: the slot holds blocks already", number)
	}
	if err := s.restore(data); err != nil {
		return fmt.Errorf("snapshot for slot %d: %w", number, err)
	}
	return nil
}

func (s *slot) restore(data []byte) error {
	const sum = 8
	if len(data) < len(snapshotMagic)+sum || string(data[:len(snapshotMagic)]) != snapshotMagic {
		return errors.New("not a snapshot of this version")
	}
	body := data[:len(data)-sum]
	if xxh3.Hash(body) != binary.LittleEndian.Uint64(data[len(body):]) {
		return errors.New("damaged: the checksum is wrong")
	}
	// Once to see that all of it is right, and once to enter it.
	d := snapshotReader{rest: body[len(snapshotMagic):]}
	model, why := string(d.bytes()), string(d.bytes())
	block, _ := d.number(1<<31), d.number(1<<40) // the capacity is that of now
	state := State(d.number(uint64(Mismatched)))
	if d.err == nil && (model != s.config.Model || block != uint64(s.config.BlockSize)) {
		return fmt.Errorf("of model %q with blocks of %d tokens, and this is %q with %d",
			model, block, s.config.Model, s.config.BlockSize)
	}
	n := int(d.number(uint64(len(d.rest) / 2)))
	records := d
	var hashes []Hash
	spares := make([]uint64, n/64+1)
	order := make([]bool, n+1) // may it be in the order?
	for i := range n {
		parent, what, h, _ := d.record(i)
		if d.err != nil {
			break
		}
		if parent > 0 && what&snapshotSpare == 0 && spares[(parent-1)/64]>>((parent-1)%64)&1 != 0 {
			return fmt.Errorf("record %d is below a spare one", i+1)
		}
		if what&snapshotSpare != 0 {
			spares[i/64] |= 1 << (i % 64)
		} else {
			hashes = append(hashes, h)
		}
		order[i+1] = what&(snapshotSpare|1<<guessed) != 0
	}
	slices.SortFunc(hashes, func(a, b Hash) int {
		if a.Hi != b.Hi {
			return cmp.Compare(a.Hi, b.Hi)
		}
		return cmp.Compare(a.Lo, b.Lo)
	})
	for i := 1; i < len(hashes); i++ {
		if hashes[i] == hashes[i-1] {
			return errors.New("two records are of the same block")
		}
	}
	ordered := make([]uint32, d.number(uint64(len(d.rest))))
	for i := range ordered {
		k := d.number(uint64(n))
		if d.err == nil && !order[k] {
			return fmt.Errorf("record %d cannot be in the shadow's order, or not twice", k)
		}
		ordered[i] = uint32(k)
		order[k] = false
	}
	shadowed, told := d.bytes(), d.bytes()
	if d.err != nil {
		return d.err
	}
	if len(d.rest) != 0 {
		return errors.New("there is something behind its end")
	}

	// Nothing may be given up meanwhile: it could be one of refs.
	t := &s.tree
	makeRoom := t.makeRoom
	t.makeRoom = nil
	defer func() { t.makeRoom = makeRoom }()
	refs := make([]ref, n+1)
	ahead := records
	for i := range n {
		if i%fetchAtOnce == 0 {
			for j := i; j < min(i+fetchAtOnce, n); j++ {
				_, _, h, _ := ahead.record(j)
				t.fetch(h)
			}
		}
		parent, what, h, counts := records.record(i)
		if parent > 0 && refs[parent] == 0 {
			s.short = true
			continue
		}
		var r ref
		if what&snapshotSpare != 0 {
			r = t.spareRecord(refs[parent])
		} else {
			r = t.add(refs[parent], h)
		}
		if refs[i+1] = r; r == 0 {
			s.short = true
			continue
		}
		for why, n := range counts {
			if n > 0 {
				t.hold(r, reason(why))
				t.raiseMore(r, reason(why), uint32(n-1))
			}
		}
	}
	// Of a record without a reason there may be nothing left below.
	for k := n; k > 0; k-- {
		r := refs[k]
		if r != 0 && t.at(r).state>>reasonsShift == 0 && t.at(r).child == 0 && !t.isSpare(r) {
			t.unhang(r)
			refs[k] = 0
		}
	}
	var refsInOrder []ref
	for _, k := range ordered {
		if refs[k] != 0 {
			refsInOrder = append(refsInOrder, refs[k])
		}
	}
	// What was in use is behind what was not, the ends before the beginnings.
	for k := n; k > 0; k-- {
		if order[k] && refs[k] != 0 {
			refsInOrder = append(refsInOrder, refs[k])
		}
	}
	at := func(k uint32) ref {
		if int64(k) >= int64(len(refs)) {
			return 0
		}
		return refs[k]
	}
	err := s.shadow.restore(s, refsInOrder, shadowed, at)
	if err == nil {
		err = s.told.restore(s, told, at)
	}
	if err != nil {
		s.short = false
		s.shadow.reset(s)
		s.told.reset(s)
		t.empty()
		return err
	}
	s.state, s.why = state, why
	if state == Exact || state == Repairing {
		s.state, s.why = Repairing, "restored from a snapshot; the events since are not known"
	}
	s.shadow.resize(s)
	return nil
}

// snapshotReader takes a snapshot apart. After an error everything is zero.
type snapshotReader struct {
	rest []byte
	err  error
}

func (d *snapshotReader) fail() {
	if d.err == nil {
		d.err = errors.New("cut short, or with a number that cannot be")
	}
	d.rest = nil
}

// number reads one up to a limit.
func (d *snapshotReader) number(limit uint64) uint64 {
	n, size := binary.Uvarint(d.rest)
	if size <= 0 || n > limit {
		d.fail()
		return 0
	}
	d.rest = d.rest[size:]
	return n
}

func (d *snapshotReader) bytes() []byte {
	n := d.number(uint64(len(d.rest)))
	if n > uint64(len(d.rest)) {
		d.fail()
		return nil
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

// record reads the one behind i others. parent is the number of its parent, 0
// for none.
func (d *snapshotReader) record(i int) (parent int, what byte, h Hash, counts [guessed + 1]uint64) {
	parent = i + 1 - int(d.number(uint64(i+1)))
	if parent == i+1 || len(d.rest) == 0 {
		d.fail()
		return 0, 0, h, counts
	}
	what = d.rest[0]
	d.rest = d.rest[1:]
	if what == snapshotSpare {
		return parent, what, h, counts
	}
	if what>>(guessed+1) != 0 || len(d.rest) < 16 {
		d.fail()
		return 0, 0, h, counts
	}
	h = Hash{binary.LittleEndian.Uint64(d.rest), binary.LittleEndian.Uint64(d.rest[8:])}
	d.rest = d.rest[16:]
	for why := range counts {
		if what>>why&1 == 0 {
			continue
		}
		if counts[why] = d.number(maxCount); counts[why] == 0 {
			d.fail()
		}
	}
	return parent, what, h, counts
}
