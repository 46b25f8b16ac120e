//go:build race

package tokenizer

import "testing"

// withoutRace skips a test that the race detector spoils, or has nothing to find in.
// make test runs it without: .ci/testlog.go knows it by what it says here.
func withoutRace(t testing.TB) {
	t.Helper()
	t.Skip("not under the race detector")
}

// lessUnderRace is a size of a test: race of it under the race detector, where it takes
// long, and whole in the run without.
func lessUnderRace(t testing.TB, whole, race int) int {
	t.Helper()
	t.Logf("%d instead of %d under the race detector", race, whole)
	return race
}
