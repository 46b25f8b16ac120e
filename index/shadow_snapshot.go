package index

import (
	"encoding/binary"
	"errors"
	"slices"
)

// A shadow in a snapshot is, beside its records and their order,
//
//	how far answers are believed
//	the records that are text, and those that nodes of a radix tree end with:
//	        how many, and numbers
//	how many blocks have copies, and of each
//	        its number, 1 if its own copy is gone, else 0, and the copies
//	how many answers there are, and of each
//	        the hash of the block before, the sum and length of the tokens behind,
//	        and its blocks, the last first; older ones before newer ones
//	instead of answers, 0 and the sequences, if the engine has some (sequence.go)
//
// in varints, save for hashes and sums. Copies and blocks are numbers of spare
// records, after how many there are.

// appendOrder appends the records that the shadow may evict, the next first.
// They are guessed or spare.
func (sh *shadow) appendOrder(dst []ref, s *slot) []ref {
	for x := sh.queue.first; x != 0; x = s.tree.after(x) {
		dst = append(dst, x)
	}
	return dst
}

// appendSnapshot appends what else a warm restart needs of the shadow. number
// names a record in the snapshot, 0 one that is not in it.
func (sh *shadow) appendSnapshot(dst []byte, s *slot, number func(ref) uint32) []byte {
	t := &s.tree
	num := func(n int) { dst = binary.AppendUvarint(dst, uint64(n)) }
	records := func(refs []ref) {
		num(len(refs))
		for _, r := range refs {
			num(int(number(r)))
		}
	}
	num(2*(int(sh.answers.score)+doubt) + oneIf(sh.answers.doubted.Load()))
	var text, ends []ref
	for r := t.following(t.top); r != t.top; r = t.following(r) {
		if !t.isSpare(r) && t.holds(r, guessed) > 0 {
			if t.at(r).state&textBit != 0 {
				text = append(text, r)
			}
			if _, ok := sh.ends[r]; ok {
				ends = append(ends, r)
			}
		}
	}
	records(text)
	records(ends)
	num(len(sh.copies))
	for r, c := range sh.copies {
		num(int(number(r)))
		num(oneIf(c.evicted))
		var all []ref
		for x := c.first; x != 0; x = ref(t.hash(x).Lo) {
			all = append(all, x)
		}
		records(all)
	}
	if sh.sequences.some() {
		num(0)
		return sh.sequences.appendSnapshot(dst, sh, number)
	}
	num(len(sh.answers.all) - len(sh.answers.free))
	var same []uint32 // that follow one prompt
	for i := range sh.answers.all {
		if a := &sh.answers.all[i]; a.blocks == 0 || a.newer != 0 {
			continue
		}
		same = same[:0]
		for n := uint32(i + 1); n != 0; n = sh.answers.all[n-1].older {
			same = append(same, n)
		}
		for _, n := range slices.Backward(same) {
			a := &sh.answers.all[n-1]
			dst = binary.LittleEndian.AppendUint64(dst, a.parent.Hi)
			dst = binary.LittleEndian.AppendUint64(dst, a.parent.Lo)
			dst = binary.LittleEndian.AppendUint64(dst, a.sum)
			num(int(a.rest))
			var all []ref
			for x := a.last; len(all) < int(a.blocks); x = t.after(x) {
				all = append(all, x)
			}
			records(all)
		}
	}
	return dst
}

func oneIf(b bool) int {
	if b {
		return 1
	}
	return 0
}

// fixed reads eight bytes.
func (d *snapshotReader) fixed() uint64 {
	if len(d.rest) < 8 {
		d.fail()
		return 0
	}
	n := binary.LittleEndian.Uint64(d.rest)
	d.rest = d.rest[8:]
	return n
}

var errShadow = errors.New("what the engine is taken to hold is cut short, or makes no sense")

// restore takes over the records of a snapshot, all that are guessed or spare,
// in the order of appendOrder; those that it lacked are behind. record is what
// number was: 0 for a record that there was no memory for, and for numbers that
// never were. After an error the shadow is reset and the tree emptied. Bytes that
// appendSnapshot never wrote must do no harm.
func (sh *shadow) restore(s *slot, order []ref, data []byte, record func(uint32) ref) error {
	t := &s.tree
	d := snapshotReader{rest: data}
	if len(data) == 0 {
		// There was no shadow.
		d.rest = []byte{2 * doubt, 0, 0, 0, 0}
	}
	records := func() (refs []ref) {
		// Each takes a byte at least.
		for range d.number(uint64(len(d.rest))) {
			refs = append(refs, record(uint32(d.number(1<<32-1))))
		}
		return refs
	}
	isGuessed := func(r ref) bool { return r != 0 && !t.isSpare(r) && t.holds(r, guessed) > 0 }
	// A spare record is what it is first said to be, and only that.
	known := map[ref]bool{}
	fresh := func(r ref) bool {
		if r == 0 || !t.isSpare(r) || known[r] {
			return false
		}
		known[r] = true
		return true
	}

	score := int(d.number(4*doubt + 1))
	for _, r := range records() {
		if isGuessed(r) {
			t.at(r).state |= textBit
		}
	}
	for _, r := range records() {
		if isGuessed(r) && sh.radix {
			sh.end(r)
		}
	}
	for range d.number(uint64(len(d.rest))) {
		r := record(uint32(d.number(1<<32 - 1)))
		evicted := d.number(1) == 1
		n := 0
		for _, x := range records() {
			if isGuessed(r) && t.parent(x) == r && fresh(x) {
				sh.linkCopy(t, r, x)
				n++
			}
		}
		if n > 0 && evicted {
			c := sh.copies[r]
			c.evicted = true
			sh.copies[r] = c
		}
	}
	type restored struct {
		answer
		all []ref
	}
	var found []restored
	for range d.number(uint64(len(d.rest))) {
		a := restored{answer: answer{parent: Hash{d.fixed(), d.fixed()}, sum: d.fixed(), rest: int32(d.number(1<<31 - 1))}}
		for _, x := range records() {
			if fresh(x) {
				t.at(x).setHash(Hash{Hi: kindAnswer})
				a.all = append(a.all, x)
			}
		}
		found = append(found, a)
	}
	var sequences []restoredSequence
	if sh.sequences.some() && len(d.rest) > 0 {
		sequences = readSequences(&d, t, record, isGuessed)
	}
	if d.err != nil || len(d.rest) > 0 {
		return errShadow
	}

	sh.answers.score = int8(score/2 - doubt)
	sh.answers.doubted.Store(score%2 == 1)
	if sh.sequences.some() {
		sh.sequences.restore(sh, t, sequences, order)
		sh.account(t)
		return nil
	}
	var strange []ref
	for _, r := range order {
		switch c, ok := sh.copies[r]; {
		case t.linked(&sh.queue, r) || ok && c.evicted:
			// It is there already, or only stands for its copies.
		case t.isSpare(r) && t.hash(r) != (Hash{}):
			t.push(&sh.queue, r)
			sh.free -= sh.block
		case t.isSpare(r):
			// It kept a block that a request was to compute.
			if !known[r] {
				known[r] = true
				strange = append(strange, r)
			}
		default:
			t.push(&sh.queue, r)
			sh.free -= sh.cost(t, r)
		}
	}
	for _, r := range strange {
		t.drop(r)
	}
	for _, a := range found {
		// The first of them may be missing.
		for n, x := range a.all {
			if n > 0 && t.after(a.all[n-1]) != x || !t.linked(&sh.queue, x) {
				a.all = nil
				break
			}
		}
		if len(a.all) == 0 {
			continue
		}
		a.blocks, a.last = int32(len(a.all)), a.all[0]
		number := sh.answers.add(a.answer)
		for _, x := range a.all {
			t.at(x).setHash(Hash{kindAnswer, uint64(number)})
		}
	}
	sh.account(t)
	return nil
}
