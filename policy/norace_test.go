//go:build !race

package policy

import "testing"

const raceEnabled = false

func withoutRace(testing.TB) {}
