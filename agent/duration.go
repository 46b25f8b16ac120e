package agent

import (
	"math"
	"reflect"
	"time"
)

// DurationOrOff is a part of a Config that is a duration, or off. It is a value, read by
// any goroutine. The zero value is that nothing was said: a model is as RoutingConfig says
// then, and that is off.
type DurationOrOff time.Duration

// durationOff is what off says, and a duration of 0.
const durationOff DurationOrOff = math.MinInt64

// String is as it is written.
func (d DurationOrOff) String() string {
	switch d {
	case 0:
		return ""
	case durationOff:
		return "off"
	}
	return time.Duration(d).String()
}

// seconds is how long it is, 0 when it is off.
func (d DurationOrOff) seconds() float64 { return max(time.Duration(d), 0).Seconds() }

func (p *problems) fillDurationOrOff(path string, v reflect.Value, in any) {
	if off, ok := in.(bool); ok && !off || in == "off" { // as YAML 1.1 reads off, and as it is
		v.Set(reflect.ValueOf(durationOff))
		return
	}
	if n, ok := integer(in); ok && n == 0 { // of what unit makes no difference
		v.Set(reflect.ValueOf(durationOff))
		return
	}
	s, ok := in.(string)
	d, err := time.ParseDuration(s)
	switch {
	case !ok || err != nil:
		p.add(path, "is %s; want a duration such as 50ms, or off", kind(path, in))
	case d == 0:
		v.Set(reflect.ValueOf(durationOff))
	default:
		v.SetInt(int64(d))
	}
}

// within checks that d, if it is a duration, is of these bounds; off says what off does.
func (p *problems) within(path string, d, least, most DurationOrOff, off string) {
	if d != 0 && d != durationOff && (d < least || d > most) {
		p.add(path, "%v is outside %v to %v; off %s", d, least, most, off)
	}
}
