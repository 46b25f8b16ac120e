package prompt

import (
	"slices"
	"testing"
	"time"
)

// harmonyDay is the date that testdata/harmony.py pins.
var harmonyDay = time.Date(2026, 1, 15, 23, 59, 0, 0, time.FixedZone("far east", 14*3600))

func TestHarmonySpellsChatsAsTheEngineDoes(t *testing.T) {
	for _, c := range renderedCases(t, "testdata/harmony.json.gz") {
		r, reason := chatOf(c.Body)
		var s script
		if reason == Exact {
			reason = new(harmony).script(&s, r, harmonyDay)
		}
		if (reason != Exact) != (c.Refused != "" || c.Unfollowed) {
			t.Errorf("%s:\n reason %v, and the engine says %q", c.Body, reason, c.Refused)
			continue
		}
		if reason != Exact {
			continue
		}
		if got := spelled(&s); !slices.Equal(got, c.Text) {
			at, g, w := difference(got, c.Text)
			t.Errorf("%s:\n piece %d is\n %q, want\n %q", c.Body, at, g, w)
		}
	}
}
