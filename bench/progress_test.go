package bench

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

func TestProgress(t *testing.T) {
	f := func(done, of int64, terminal bool, want string) {
		t.Helper()
		var out bytes.Buffer
		p := progress{w: &out, terminal: terminal, name: "load", began: time.Now(), state: func() (int64, int64, string) { return done, of, "3 on their way" }}
		p.show()
		if got := out.String(); got != want {
			t.Errorf("%d of %d: %q, want %q", done, of, got, want)
		}
	}
	bar := func(full int) string {
		return "\r\x1b[Kload [" + strings.Repeat("=", full) + strings.Repeat(" ", 30-full) + "] "
	}
	f(0, 10, false, "load: 0 of 10  0s  3 on their way\n")
	f(0, 10, true, bar(0)+"0 of 10  0s  3 on their way")
	f(5, 10, true, bar(15)+"5 of 10  0s  3 on their way")
	f(10, 10, true, bar(30)+"10 of 10  0s  3 on their way")
	f(11, 10, true, bar(30)+"11 of 10  0s  3 on their way") // what is over may be counted first
	f(0, 0, true, bar(0)+"0 of 0  0s  3 on their way")
}

// What is over before the first line says nothing, and a file is no terminal.
func TestProgressStops(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	startProgress(file, "load", func() (int64, int64, string) { return 0, 0, "" }).stop()
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(file); err != nil || len(b) > 0 {
		t.Errorf("%q, %v", b, err)
	}
}
