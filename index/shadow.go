package index

// shadow is what a slot's engine is taken to hold, from the requests that were
// sent to it. The mutex of the slot guards it.
type shadow struct{}
