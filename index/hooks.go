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
