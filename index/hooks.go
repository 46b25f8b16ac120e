package index

// What Index asks of what events have told a slot. Its mutex is held.

// reset forgets all names; the tree is emptied by the caller.
func (*told) reset(s *slot) {}

// lose forgets the names of a record that is given up.
func (*told) lose(s *slot, r ref) {}
