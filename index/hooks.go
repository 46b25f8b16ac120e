package index

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
