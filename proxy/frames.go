package proxy

import (
	"bytes"
	"errors"
)

// errFraming: the bytes are not the framing that the head announced.
var errFraming = errors.New("malformed chunked framing")

// maxChunk bounds one chunk's size, so that no arithmetic on it overflows.
const maxChunk = 1 << 56

// fixedFrames is the framing state at the start of a body of n bytes.
func fixedFrames(n uint64) Frames {
	f := Frames{Step: StepData, Fixed: true, Left: n}
	if n == 0 {
		f.Step = StepEnd
	}
	return f
}

// Ended reports that the body is over.
func (f *Frames) Ended() bool { return f.Step == StepEnd }

// Advance reads p as the body's next bytes and returns how many of them belong
// to it: len(p), or less when the body ends before. After an error the state
// stands at the offending byte and n counts the bytes before it.
func (f *Frames) Advance(p []byte) (n int, err error) {
	for n < len(p) && f.Step != StepEnd {
		k, _, err := f.run(p[n:])
		n += k
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// Decode is Advance for a reader that wants the body without its framing: it
// appends the data bytes to dst.
func (f *Frames) Decode(dst, p []byte) (_ []byte, n int, err error) {
	for n < len(p) && f.Step != StepEnd {
		k, data, err := f.run(p[n:])
		if data {
			dst = append(dst, p[n:n+k]...)
		}
		n += k
		if err != nil {
			return dst, n, err
		}
	}
	return dst, n, nil
}

// run consumes the bytes at the start of p that belong to one step. p is not
// empty and the body has not ended. data says that they are body data.
func (f *Frames) run(p []byte) (n int, data bool, err error) {
	b := p[0]
	switch f.Step {
	case StepSizeStart, StepSize:
		d, ok := hexDigit(b)
		switch {
		case ok && f.Step == StepSizeStart:
			f.Left, f.Step = uint64(d), StepSize
		case ok && f.Left < maxChunk>>4:
			f.Left = f.Left<<4 | uint64(d)
		case !ok && f.Step == StepSize && (b == '\r' || b == ';' || b == ' ' || b == '\t'):
			f.Step = StepExt
		default:
			return 0, false, errFraming
		}
		return 1, false, nil
	case StepExt:
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			return len(p), false, nil
		}
		f.Chunks++
		f.Step = StepData
		if f.Left == 0 {
			f.Step = StepTrailer
		}
		return i + 1, false, nil
	case StepData:
		k := min(f.Left, uint64(len(p)))
		f.Left -= k
		if f.Left == 0 {
			f.Step = StepDataCR
			if f.Fixed {
				f.Step = StepEnd
			}
		}
		return int(k), true, nil
	case StepDataCR:
		return f.expect(b, '\r', StepDataLF)
	case StepDataLF:
		return f.expect(b, '\n', StepSizeStart)
	case StepTrailer:
		switch b {
		case '\r':
			f.Step = StepTrailerLF
		case '\n':
			return 0, false, errFraming
		default:
			f.Step = StepTrailerLine
		}
		return 1, false, nil
	case StepTrailerLine:
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			return len(p), false, nil
		}
		f.Step = StepTrailer
		return i + 1, false, nil
	case StepTrailerLF:
		return f.expect(b, '\n', StepEnd)
	}
	return 0, false, errFraming
}

func (f *Frames) expect(b, want byte, next Step) (int, bool, error) {
	if b != want {
		return 0, false, errFraming
	}
	f.Step = next
	return 1, false, nil
}

func hexDigit(b byte) (d byte, ok bool) {
	switch {
	case b >= '0' && b <= '9':
		return b - '0', true
	case b|0x20 >= 'a' && b|0x20 <= 'f':
		return b | 0x20 - 'a' + 10, true
	}
	return 0, false
}
