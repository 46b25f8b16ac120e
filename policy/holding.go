package policy

import "slices"

// Holding is the requests that an agent holds back until a replica is nearly free: which
// one gets them, and in what order, is decided late, when more is known of who waits and
// of what is cached. Its owner is one goroutine, or has a lock; what it keeps is reused,
// so that holding allocates nothing once it has held as many before. The zero value, but
// for Lead, is empty.
//
// The order is by the time at which a request came and ageing times its prefill: the
// shortest first, but one that takes so many seconds lets nobody pass who comes more
// than ageing times as many later. So nobody waits for ever.
//
// In each round those that are held are looked at in their order, mostLooked of them at
// most. Each is chosen a replica for, with what the replica has before it and what was
// planned for it in this round. One whose replica has less than Lead before it goes
// there; of the others it is planned that they will, and those behind them know of that.
// Where replicas idle nobody is held.
//
// What it gives was measured in virtual time with one seed, against sending at once, with
// a Lead of 100 ms. Before engines that are soon full of long prompts the mean time to
// first token is less: 836 instead of 989 ms of the conversations before 4 H100, 761
// instead of 798 of the synthetic trace, 1,052 instead of 1,164 of Azure's code. With 4
// agents, each of which holds its own, it is 1,082 instead of 1,163 ms. Drawn workloads
// that share prefixes have 2 % less to 8 % less, or the same. Of the reference fleet the
// conversations have 1.15 times the bound instead of 1.17, and 1.18 instead of 1.24 at 1.8
// times their speed; the synthetic trace is within noise. The 99th percentile is 18 % less
// to 3 % more; that of the time to the end is 19 % more of the synthetic trace before 4
// H100, and 26 % less of Azure's code. So the target of 1.15 at 1.8 times is not met by
// order either: what is left is recomputed at one replica because another that has it is
// busy, and neither other weights, nor keeping long prompts apart, nor delaying them, nor
// sparing replicas that much was sent to lately gave less than 1.16 of the conversations. The
// weights here were tried on the traces they are reported on. With a Lead of 20 ms,
// and an ageing of 50, the mean of W1 was five times as long before engines in steps.
//
//	h.Hold(request, came, prefill)
//	h.Begin(replicas)
//	for {
//		request, ok := h.Next()
//		... choose among replicas that wait Planned(i) longer than they say
//		if h.Place(i, wait, prefill) { send it }
//	}
type Holding[T any] struct {
	// Lead is how many seconds of work a replica has before it when it gets more: as
	// much as it needs not to idle before what is sent has come, and an engine that
	// works in steps to fill its next ones.
	Lead float64

	list    []held[T] // in their order
	planned []float64 // seconds, by replica, in this round
	next    int       // of list, to be looked at in this round
	looked  int
}

// held is one request in a Holding.
type held[T any] struct {
	value T
	key   float64
}

const (
	// ageing is how many times its own prefill a request lets later ones pass.
	ageing = 5
	// mostLooked bounds a round when very many are held: so many fill all replicas that
	// are nearly free, and more would take time for nothing.
	mostLooked = 64
)

// Len is how many are held.
func (h *Holding[T]) Len() int { return len(h.list) }

// Hold takes a request that came at so many seconds, and takes prefill where it takes
// least. Not within a round.
func (h *Holding[T]) Hold(value T, came, prefill float64) {
	key := came + ageing*max(prefill, 0)
	i, _ := slices.BinarySearchFunc(h.list, key, func(e held[T], key float64) int {
		if e.key <= key {
			return -1
		}
		return 1
	})
	h.list = slices.Insert(h.list, i, held[T]{value, key})
}

// Begin begins a round with so many replicas, of which nothing is planned.
func (h *Holding[T]) Begin(replicas int) {
	h.planned = slices.Grow(h.planned[:0], replicas)[:replicas]
	clear(h.planned)
	h.next, h.looked = 0, 0
}

// Planned is how many seconds of work were planned for replica i in this round.
func (h *Holding[T]) Planned(i int) float64 { return h.planned[i] }

// Next is who is looked at next, and false when the round is over.
func (h *Holding[T]) Next() (value T, ok bool) {
	if h.next == len(h.list) || h.looked == mostLooked {
		return value, false
	}
	h.next++
	return h.list[h.next-1].value, true
}

// Place reports that what Next has returned is to be sent to replica i, which was chosen
// for it, and then holds it no longer. wait is what the replica has before it, Planned
// included, and prefill what the request takes there.
func (h *Holding[T]) Place(i int, wait, prefill float64) bool {
	if wait < h.Lead {
		h.next--
		h.list = slices.Delete(h.list, h.next, h.next+1)
		return true
	}
	h.looked++
	h.planned[i] += max(prefill, 0)
	return false
}
