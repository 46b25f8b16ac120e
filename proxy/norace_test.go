//go:build !race

package proxy

import "testing"

const raceDetector = false

func withoutRace(testing.TB) {}
