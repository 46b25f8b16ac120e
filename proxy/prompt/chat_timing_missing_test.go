//go:build !hftokenizers

package prompt

import (
	"testing"
	"time"
)

// timedLibrary is for tests with the library.
func timedLibrary(t *testing.T, _ string, _ map[string]func(string) (int, time.Duration)) {
	t.Log("without the tag hftokenizers the library is left out")
}
