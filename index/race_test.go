//go:build race

package index

import "testing"

// withoutRace skips a test that the race detector spoils, or has nothing to find in.
// make test runs it without: .ci/testlog.go knows it by what it says here.
func withoutRace(t testing.TB) {
	t.Helper()
	t.Skip("not under the race detector")
}

// lessUnderRace is a size of a test that has one goroutine: race of it under the race
// detector, which is slow and can find nothing there, and whole in the run without.
func lessUnderRace(t testing.TB, whole, race int) int {
	t.Helper()
	t.Logf("%d instead of %d under the race detector", race, whole)
	return race
}
