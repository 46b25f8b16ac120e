package prompt

import "time"

// renderer renders the chats of a model that its engine renders by code, not by
// a template. Model.Follow calls it from any goroutine.
type renderer interface {
	// render appends the ids of the chat to dst.IDs, and leaves Ends to its
	// caller, or says why it cannot. now is the engine's local time. It may
	// change the values of r.
	render(dst *Prompt, r *chatRequest, now time.Time) Reason
}
