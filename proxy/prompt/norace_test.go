//go:build !race

package prompt

import "testing"

const raceDetector = false

func withoutRace(testing.TB) {}
