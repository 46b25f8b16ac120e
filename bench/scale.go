package bench

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// scale maps values to a length. The zero value is not one; newScale makes it.
type scale struct {
	from, to float64
	log      bool
	ticks    []float64
}

// newScale returns a scale that has room for all values, of which those that are not
// finite, and on a logarithmic one those that are not above 0, do not count. A linear
// one begins at 0. It is one decade or more wide when it is logarithmic, and never
// empty, whatever the values.
func newScale(u unit, log bool, values ...float64) scale {
	const least, most = 1e-12, 1e15 // beyond it no label is readable
	low, high := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if finite(v) && (!log || v > 0) {
			v = min(max(v, least), most)
			low, high = min(low, v), max(high, v)
		}
	}
	if low > high {
		low, high = 1, 1
	}
	s := scale{log: log}
	if !log {
		step := niceStep(max(high, 0) / 5)
		if u == inSeconds {
			step = clockStep(step)
		}
		s.to = step
		for s.to < high {
			s.to += step
		}
		for i := 0; float64(i)*step <= s.to*1.0001; i++ {
			s.ticks = append(s.ticks, float64(i)*step)
		}
		return s
	}
	s.from, s.to = floorNice(low), -floorNice(-high)
	for s.to/s.from < 9.99 {
		if s.to/high < low/s.from {
			s.to = -floorNice(-s.to * 1.01)
		} else {
			s.from = floorNice(s.from * 0.99)
		}
	}
	steps := []float64{1, 2, 5}
	if s.to/s.from > 500 {
		steps = steps[:1]
	}
	for e := math.Floor(math.Log10(s.from)); e <= math.Log10(s.to)+1e-9; e++ {
		for _, m := range steps {
			if v := m * math.Pow(10, e); v >= s.from*0.9999 && v <= s.to*1.0001 {
				s.ticks = append(s.ticks, v)
			}
		}
	}
	return s
}

// at is where a value is, from 0 to 1. What is outside the scale is at its end.
func (s *scale) at(v float64) float64 {
	p := 0.0
	switch {
	case !s.log:
		p = (v - s.from) / (s.to - s.from)
	case v > 0:
		p = math.Log(v/s.from) / math.Log(s.to/s.from)
	}
	if math.IsNaN(p) {
		return 0
	}
	return min(max(p, 0), 1)
}

// niceStep is the least of 1, 2 and 5 times a power of ten that is not below v.
func niceStep(v float64) float64 {
	if v < 1e-12 {
		return 0.2
	}
	e := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*e >= v*0.9999 {
			return m * e
		}
	}
	return 10 * e
}

// clockStep is like a step of so many seconds, but whole on a clock.
func clockStep(step float64) float64 {
	if step < 10 {
		return step
	}
	for _, s := range []float64{10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 4 * 3600, 6 * 3600, 12 * 3600, 24 * 3600} {
		if s >= step*0.9 {
			return s
		}
	}
	return 24 * 3600 * niceStep(step/24/3600)
}

// floorNice is the greatest of 1, 2 and 5 times a power of ten that is not above v,
// and of a negative v the negative of the least that is not below -v.
func floorNice(v float64) float64 {
	if v < 0 {
		return -niceStep(-v)
	}
	e := math.Pow(10, math.Floor(math.Log10(v)+1e-12))
	for _, m := range []float64{5, 2} {
		if m*e <= v*1.0001 {
			return m * e
		}
	}
	return e
}

// unit says how an axis or a bar writes its numbers.
type unit int

const (
	bare      unit = iota
	inMS           // milliseconds, written in ms, s or min
	inPercent      // of 1, written in per cent
	inSeconds      // written in s, min or h
)

// write is a value as labels have it, with three digits.
func (u unit) write(v float64) string {
	switch u {
	case inMS:
		switch {
		case v >= 600_000:
			return digits(v/60_000) + " min"
		case v >= 999.5:
			return digits(v/1000) + " s"
		}
		return digits(v) + " ms"
	case inPercent:
		return digits(v*100) + " %"
	case inSeconds:
		switch {
		case v >= 3600 && v == math.Trunc(v/1800)*1800:
			return digits(v/3600) + " h"
		case v >= 300 || v >= 60 && v == math.Trunc(v/60)*60:
			return digits(v/60) + " min"
		}
		return digits(v) + " s"
	}
	return digits(v)
}

// digits is v with three digits and no zeros at its end behind the point; from a
// thousand on, groups have commas.
func digits(v float64) string {
	if !finite(v) {
		return "-"
	}
	places := 0
	if a := math.Abs(v); a > 0 && a < 100 {
		places = min(max(2-int(math.Floor(math.Log10(a)+1e-9)), 0), 4)
	}
	s := strconv.FormatFloat(v, 'f', places, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	if s == "-0" {
		s = "0"
	}
	if math.Abs(v) >= 999.5 {
		n := int64(math.Round(v))
		s = fmt.Sprintf("%d", n)
		for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
			s = s[:i] + "," + s[i:]
		}
	}
	return s
}
