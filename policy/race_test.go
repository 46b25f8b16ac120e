//go:build race

package policy

import "testing"

// withoutRace skips a test that the race detector spoils, or has nothing to find in.
// make test runs it without: .ci/testlog.go knows it by what it says here.
func withoutRace(t testing.TB) {
	t.Helper()
	t.Skip("not under the race detector")
}
