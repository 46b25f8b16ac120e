//go:build !amd64

package policy

// inFours: see fours_amd64.go. Nothing is done in fours here, and none of these is called.
var inFours = false

func scoreFours(*scoring, *Candidate, *float64, int) { panic("not on this processor") }

func leastFours(*float64, int) float64 { panic("not on this processor") }

func nearFours(*float64, int, float64, *[nearWords]uint64) { panic("not on this processor") }

func alikeFours(*Candidate, *float64, int) bool { panic("not on this processor") }
