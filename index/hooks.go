package index

// What Index asks of what events have told a slot. Its mutex is held.

// reset forgets all names; the tree is emptied by the caller.
func (*told) reset(s *slot) {}

// lose forgets the names of a record that is given up.
func (*told) lose(s *slot, r ref) {}

// appendSnapshot appends what a warm restart needs of what events have told.
func (*told) appendSnapshot(dst []byte, s *slot, number func(ref) uint32) []byte { return dst }

// restore reads that again, as the shadow's does.
func (*told) restore(s *slot, data []byte, record func(uint32) ref) error { return nil }
