//go:build !race

package agent

import "testing"

func withoutRace(testing.TB) {}
