//go:build hftokenizers

package prompt

import (
	"testing"
	"time"

	"github.com/daulet/tokenizers"
)

// timedLibrary adds the tokenizers library, called from Go.
func timedLibrary(t *testing.T, file string, contestants map[string]func(string) (int, time.Duration)) {
	k, err := tokenizers.FromFile(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	contestants["daulet/tokenizers"] = func(text string) (int, time.Duration) {
		began := time.Now()
		ids := k.EncodeWithOptions(text, false).IDs
		return len(ids), time.Since(began)
	}
}
