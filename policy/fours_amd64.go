package policy

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// inFours: the processor has AVX2, and what takes most of a decision is done for four
// numbers at a time, a quarter of the operations. It is in assembly, for the compiler has
// no such operations. What is decided is the same without them. Only tests write it, while
// nothing is decided.
var inFours = cpu.X86.HasAVX2

// scoreFours is scoring.block for n candidates, a multiple of 4, not 0 and at most
// scoredPart: it sets their costs, which are the same to the bit, and adds what it finds to
// s, but the least cost, which lowest finds sooner. Nothing is to be special in s before.
// Of replicas with full caches it does not look who has a queue: all are special.
// scoring.part calls it, from any goroutine, each with its own s.
//
//go:noescape
func scoreFours(s *scoring, candidates *Candidate, costs *float64, n int)

// leastFours is lowest of n costs, a multiple of 4. lowest calls it, from any goroutine.
//
//go:noescape
func leastFours(costs *float64, n int) float64

// nearFours sets the bits in near of those of n costs that are bar at most. n is a multiple
// of 4, not 0, and at most as many as near has bits; words behind the last one's are left
// as they are. finalists.lowestInFours calls it, from any goroutine.
//
//go:noescape
func nearFours(costs *float64, n int, bar float64, near *[nearWords]uint64)

// alikeFours reports that n candidates and costs, a multiple of 4 and not 0, have the same
// bits in all that indifferent looks at, which calls it, from any goroutine.
//
//go:noescape
func alikeFours(candidates *Candidate, costs *float64, n int) bool

// What the assembly takes for granted, or this does not compile: a candidate begins with two
// times four numbers of 32 bits, and four of 64.
var _ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Cached)|
	unsafe.Offsetof(Candidate{}.InFlight)^4|
	unsafe.Offsetof(Candidate{}.CachedGPU)^8|
	unsafe.Offsetof(Candidate{}.Busy)^12|
	unsafe.Offsetof(Candidate{}.Decoding)^16|
	unsafe.Offsetof(Candidate{}.Company)^20|
	unsafe.Offsetof(Candidate{}.Share)^24|
	unsafe.Offsetof(Candidate{}.KV)^28|
	unsafe.Offsetof(Candidate{}.Wait)^32|
	unsafe.Offsetof(Candidate{}.Speed)^40|
	unsafe.Offsetof(Speed{}.A)|
	unsafe.Offsetof(Speed{}.B)^8|
	unsafe.Offsetof(Speed{}.D)^16]
