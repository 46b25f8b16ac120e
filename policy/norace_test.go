//go:build !race

package policy

import "testing"

func withoutRace(testing.TB) {}
