package tokenizer

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/text/unicode/norm"
)

// Runs of marks that norm would break are composed as short ones are.
func TestLongRunsCompose(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		if got := nfc(text); got != want {
			t.Errorf("%+.80q: got %+.80q, want %+.80q", text, got, want)
		}
	}
	acute, below := strings.Repeat("\u0301", 40), strings.Repeat("\u0323", 40)
	f(acute, acute)
	f("e"+acute, "\u00e9"+acute[2:])
	f("xe"+acute+"e\u0301", "x\u00e9"+acute[2:]+"\u00e9")
	f("a"+acute+below, "\u1ea1"+below[2:]+acute)
	f("a\u0315"+acute+"\u0323", "\u1ea1"+acute+"\u0315")
	f("\u0344"+acute, "\u0308\u0301"+acute)
	f("\u1100\u1161\u11a8"+acute, "\uac01"+acute)
	f("\u212b"+acute, "\u01fa"+acute[2:])
	// Letters of Unicode 16 compose with an old mark, but not to the library.
	f("e\u0301\U000105d2\u0307e\u0301", "\u00e9\U000105d2\u0307\u00e9")
	f("\U000105da\u0307\u032a", "\U000105da\u032a\u0307")
	f("\U000105c9\u0307", "\U000105c9\u0307")
}

// Where norm is right, composeRun and it agree.
func TestComposeRunAgainstNorm(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	pool := []rune("aeoAqxΩωι가각각sſ\u0301\u0308\u0300\u0323\u0331\u0327\u0328\u0345\u0342\u0344\u0f71\u0f72\u0f73\u0958\u093c\u0915\u09c7\u09be\u1ea1\u00c5\u212b\u1e69\u0307\u3099\u304b\u0340\u2126\ufb2c\u05bc\u05c1\u05e9")
	for range 100_000 {
		text := make([]rune, 1+r.IntN(12))
		for i := range text {
			text[i] = pool[r.IntN(len(pool))]
		}
		if got, want := string(composeRun(text)), norm.NFC.String(string(text)); got != want {
			t.Fatalf("%+q: got %+q, want %+q", string(text), got, want)
		}
	}
}

func TestLongRunsTakeNoSquare(t *testing.T) {
	began := time.Now()
	nfc("e" + strings.Repeat("\u0301\u0323", 1<<20))
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("%v", took)
	}
}
