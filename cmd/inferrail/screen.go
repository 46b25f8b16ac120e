package main

import (
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"
)

// screen is what lines are printed for. It is a value.
type screen struct {
	width, height     int
	terminal, colours bool
}

// line is a line of a screen, of which the characters from..to have a colour. It is a
// value; the zero value is empty.
type line struct {
	text     string
	colour   string
	from, to int
}

// The colours are those that SGR numbers.
const (
	bold   = "1"
	red    = "31"
	green  = "32"
	yellow = "33"
)

// on is the line as it is printed: no wider than a terminal, and without anything that a
// terminal would obey: engines and clients have had a say in what is told of them.
func (l line) on(s screen) string {
	text := []rune(plain(l.text))
	if s.terminal {
		text = []rune(cut(string(text), s.width))
	}
	from, to := min(l.from, len(text)), min(l.to, len(text))
	if !s.colours || l.colour == "" || from >= to {
		return strings.TrimRight(string(text), " ")
	}
	return string(text[:from]) + "\x1b[" + l.colour + "m" + string(text[from:to]) + "\x1b[0m" + strings.TrimRight(string(text[to:]), " ")
}

// plain is a text on one line, without control characters.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) {
			return ' '
		}
		return r
	}, text)
}

// cut is a text of at most so many characters.
func cut(text string, most int) string {
	if runes := []rune(text); len(runes) > most {
		return string(runes[:max(most-1, 0)]) + "…"
	}
	return text
}

// windowSize is the size of the terminal that f is; ok is false for anything else.
func windowSize(f *os.File) (width, height int, ok bool) {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	if size.Col == 0 || size.Row == 0 {
		return 80, 24, true // it does not know
	}
	return int(size.Col), int(size.Row), true
}

// terminal is one on which a screen is drawn again and again, by one goroutine.
type terminal struct {
	out *os.File
	// keys is the terminal opened anew, so that reading can be ended; nil when it cannot
	// be had.
	keys *os.File
	// last is what was drawn last.
	last []line
}

// openTerminal returns the terminal that w is, or nil when it is none that can be drawn
// on. begin must be called if it is one.
func openTerminal(w io.Writer) (*terminal, error) {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return nil, nil
	}
	if _, _, ok := windowSize(f); !ok {
		return nil, nil
	}
	t := &terminal{out: f}
	// Not blocking, so that Close ends a Read.
	if keys, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
		t.keys = keys
	}
	return t, nil
}

// begin takes the screen; quit is called when q is typed. What it returns gives the screen
// back, with what was drawn last on it, and waits for the goroutine that reads.
func (t *terminal) begin(quit func()) (end func()) {
	// The other screen, without a cursor.
	_, _ = t.out.WriteString("\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J")
	var group sync.WaitGroup
	restore := func() {}
	if t.keys != nil {
		// Not by Fd, which would make it blocking.
		if raw, err := t.keys.SyscallConn(); err == nil {
			restore = unbuffered(raw)
		}
		group.Go(func() {
			var key [16]byte
			for {
				n, err := t.keys.Read(key[:])
				if err != nil {
					return
				}
				if strings.ContainsAny(string(key[:n]), "qQ\x04") {
					quit()
					return
				}
			}
		})
	}
	return func() {
		restore()
		if t.keys != nil {
			_ = t.keys.Close()
		}
		group.Wait()
		_, _ = t.out.WriteString("\x1b[?25h\x1b[?1049l")
		_, _ = t.out.Write(screenOf(t.out).text(t.last))
	}
}

// unbuffered lets a terminal give each key at once, and show none; ctrl-C stays a signal.
// What it returns undoes that.
func unbuffered(raw syscall.RawConn) (restore func()) {
	var was *unix.Termios
	_ = raw.Control(func(fd uintptr) {
		now, err := unix.IoctlGetTermios(int(fd), unix.TCGETS)
		if err != nil {
			return
		}
		is := *now
		is.Lflag &^= unix.ICANON | unix.ECHO
		is.Cc[unix.VMIN], is.Cc[unix.VTIME] = 1, 0
		if unix.IoctlSetTermios(int(fd), unix.TCSETS, &is) == nil {
			was = now
		}
	})
	return func() {
		if was != nil {
			_ = raw.Control(func(fd uintptr) { _ = unix.IoctlSetTermios(int(fd), unix.TCSETS, was) })
		}
	}
}

// draw shows the lines in place of what was there, in one write and without clearing the
// screen first, so that nothing flickers.
func (t *terminal) draw(lines []line) error {
	t.last = lines
	size := screenOf(t.out)
	var b strings.Builder
	b.WriteString("\x1b[?2026h\x1b[H") // terminals that can hold the frame back until it is whole
	for i, l := range lines {
		if i >= size.height {
			break
		}
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(l.on(size))
		b.WriteString("\x1b[K")
	}
	b.WriteString("\x1b[J\x1b[?2026l")
	_, err := t.out.WriteString(b.String())
	return err
}
