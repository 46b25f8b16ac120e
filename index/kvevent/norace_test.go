//go:build !race

package kvevent

import "testing"

func withoutRace(testing.TB) {}
