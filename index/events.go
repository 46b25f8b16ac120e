package index

import (
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// told is what a slot's engine has told by events: engine hashes to records.
// The mutex of the slot guards it.
type told struct{}

// Apply enters what the events of one batch say of the slot. They must come in
// the order in which the engine has made them.
func (x *Index) Apply(slot int, events []kvevent.Event, now time.Time) {}

// Untell forgets all that events have told of a slot: its publisher has begun
// anew, or what was lost cannot be fetched.
func (x *Index) Untell(slot int) {}
