//go:build !race

package template

import "testing"

func withoutRace(testing.TB) {}

func lessUnderRace(_ testing.TB, whole, race int) int { return whole }
