package prompt

import (
	"strings"
	"testing"
)

// TestNumbersInTools: numbers of any size, as Python's json and as Rust's
// serde_json write what they have read.
func TestNumbersInTools(t *testing.T) {
	f := func(number, python, serde string) {
		t.Helper()
		d := decoder{text: number}
		v, ok := d.decode()
		if !ok || d.odd != Exact {
			t.Errorf("%.40s: ok is %v, %v", number, ok, d.odd)
			return
		}
		if got, ok := appendPythonJSON(nil, v); !ok || string(got) != python {
			t.Errorf("%.40s: Python writes %s, got %s", number, python, got)
		}
		var ts typeScript
		ts.json(v, 0)
		got := string(ts.b)
		if ts.reason != Exact {
			got = ts.reason.String()
		}
		if got != serde {
			t.Errorf("%.40s: Rust writes %s, got %s", number, serde, got)
		}
	}
	f("1.0", "1.0", "1.0")
	f("-0", "0", "0")
	f("1e16", "1e+16", "1e+16")
	f("9223372036854775807", "9223372036854775807", "9223372036854775807")
	f("18446744073709551615", "18446744073709551615", "18446744073709551615")
	f("18446744073709551616", "18446744073709551616", "1.8446744073709552e+19")
	f("-9223372036854775809", "-9223372036854775809", "-9.223372036854776e+18")
	f("123456789012345678901234567890", "123456789012345678901234567890", "1.2345678901234568e+29")
	f("1e400", "Infinity", "unfollowed")
	f("-Infinity", "-Infinity", "unfollowed")
	f("NaN", "NaN", "unfollowed")

	// Python refuses to read more digits than these.
	for _, sign := range []string{"", "-"} {
		d := decoder{text: sign + strings.Repeat("9", 4300)}
		if _, ok := d.decode(); !ok || d.odd != Exact {
			t.Errorf("4,300 digits: ok is %v, %v", ok, d.odd)
		}
		d = decoder{text: sign + strings.Repeat("9", 4301)}
		if d.decode(); d.odd != Malformed {
			t.Errorf("4,301 digits: %v", d.odd)
		}
	}
}
