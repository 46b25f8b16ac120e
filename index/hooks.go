package index

// What Index asks of a slot's shadow and of what events have told. The mutex of
// the slot is held, save for beyond.

// resize follows s.config: a smaller capacity evicts.
func (*shadow) resize(s *slot) {}

// reset forgets everything; the tree is emptied by the caller.
func (*shadow) reset() {}

// abandon gives up what was guessed: the slot is Exact now.
func (*shadow) abandon(s *slot) { s.tree.clear(guessed) }

// adopt takes what events have told as guesses: the slot is not Exact any more.
func (*shadow) adopt(s *slot) {}

// giveUp evicts the block that is next in turn, and reports whether there was
// one.
func (*shadow) giveUp(s *slot) bool { return false }

// beyond adds to what a slot holds of a prompt's full blocks what was
// generated behind them. It takes no lock.
func (*shadow) beyond(p *Prompt, h Held) Held { return h }

// reset forgets all names; the tree is emptied by the caller.
func (*told) reset(s *slot) {}

// lose forgets the names of a record that is given up.
func (*told) lose(s *slot, r ref) {}

// appendOrder appends the records that the shadow may evict, the next first.
// They are guessed or spare.
func (*shadow) appendOrder(dst []ref, s *slot) []ref { return dst }

// appendSnapshot appends what else a warm restart needs of the shadow. number
// names a record in the snapshot, 0 one that is not in it.
func (*shadow) appendSnapshot(dst []byte, s *slot, number func(ref) uint32) []byte { return dst }

// restore takes over the records of a snapshot, all that are guessed or spare,
// in the order of appendOrder; those that it lacked are behind. record is what
// number was: 0 for a record that there was no memory for, and for numbers that
// never were. After an error the shadow is reset and the tree emptied. Bytes that
// appendSnapshot never wrote must do no harm.
func (*shadow) restore(s *slot, order []ref, data []byte, record func(uint32) ref) error { return nil }

// appendSnapshot appends what a warm restart needs of what events have told.
func (*told) appendSnapshot(dst []byte, s *slot, number func(ref) uint32) []byte { return dst }

// restore reads that again, as the shadow's does.
func (*told) restore(s *slot, data []byte, record func(uint32) ref) error { return nil }
