package index

import "time"

// Claim is what one request has made of a slot's blocks. It lies in the
// request, and is used by one goroutine at a time. The zero value claims
// nothing; the methods do nothing with it then.
type Claim struct {
	slot  int32 // +1
	epoch uint32
	tail  ref
	parts int32
}

// Claim says that the prompt has been sent to a slot: its blocks are about to
// be there. h is what Held has said of it. A claim on a slot that is not known
// is void.
func (x *Index) Claim(c *Claim, slot int, p *Prompt, h Held, now time.Time) {}

// Prefilled says that the engine has begun to answer.
func (x *Index) Prefilled(c *Claim, now time.Time) {}

// Release says that the request has ended, after the engine has generated so
// many tokens; -1 when that is not known. It voids the claim.
func (x *Index) Release(c *Claim, generated int, now time.Time) {}

// Undo takes the claim back: the engine has refused the request, or failed
// before it answered. It voids the claim.
func (x *Index) Undo(c *Claim) {}
