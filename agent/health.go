package agent

import "time"

// standing is what the checks of a member and the requests sent to it add up
// to.
type standing uint8

const (
	// joining: no check has succeeded yet.
	joining standing = iota
	// up: it takes requests.
	up
	// ejected: requests have failed there. It is left alone for a while,
	// whatever its checks say, unless they find it down.
	ejected
	// down: its checks fail.
	down
)

var standings = []standing{joining, up, ejected, down}

func (s standing) String() string {
	return [...]string{"joining", "up", "ejected", "down"}[s]
}

// maxBackoff bounds the doubling of HealthConfig.EjectionBackoff.
const maxBackoff = 5 * time.Minute

// health decides which members take requests. It is told of checks, requests
// and the passing of time, and changes the members' standings; it does no I/O
// and reads no clock. Its owner, the fleet, lets one call run at a time. The
// zero value has no members and ejects none.
//
//   - A member is up once a check has succeeded.
//   - It is down after UnhealthyThreshold failed checks in a row, or after one
//     that began when EjectionFailures requests in a row had failed already,
//     and none was answered since, or it was ejected for them. One good check
//     ends that.
//   - It is ejected when EjectionFailures requests in a row have failed, unless
//     more than MaxEjectionPercent of the replicas of one of its models would
//     then be down, ejected or not there yet; a model's only replica never is.
//     What was refused for that reason is looked at again when others return.
//   - An ejection lasts EjectionBackoff, and twice as long each further time,
//     up to maxBackoff. Each time that the member has stayed up for as long as
//     its last ejection, or what is left of its length, one doubling is taken
//     back.
type health struct {
	HealthConfig
	members []*vitals
}

// vitals is the health of one member. The zero value is a member that has just
// joined.
type vitals struct {
	standing standing
	// models it serves, as far as they are known.
	models []string

	failedChecks   int // in a row
	failedRequests int // in a row, as told last
	// suspect is since when failedRequests has been enough to eject, or was
	// when it was ejected.
	suspect time.Time
	// refused: it would be ejected, were that not too many.
	refused bool

	until     time.Time // when the ejection ends
	ejections int       // of all time
	doublings int       // of the next ejection's length
	calm      time.Time // while up: from when on doublings are taken back
}

// checked tells of a check that began then and is over now.
func (h *health) checked(v *vitals, began, now time.Time, ok bool) {
	if ok {
		v.failedChecks = 0
		if v.standing == joining || v.standing == down {
			h.returned(v, now)
		}
		return
	}
	v.failedChecks++
	if v.standing != up && v.standing != ejected {
		return
	}
	confirmed := !v.suspect.IsZero() && !began.Before(v.suspect)
	if confirmed || v.failedChecks >= h.UnhealthyThreshold {
		h.forgive(v, now)
		v.standing, v.refused, v.until = down, false, time.Time{}
	}
}

// requests tells how many requests in a row have failed at the member.
func (h *health) requests(v *vitals, inARow int, now time.Time) {
	v.failedRequests = inARow
	if h.EjectionFailures <= 0 || inARow < h.EjectionFailures {
		v.refused = false
		if v.standing != ejected { // an answer that comes late acquits nobody
			v.suspect = time.Time{}
		}
		return
	}
	if v.suspect.IsZero() {
		v.suspect = now
	}
	if v.standing != up {
		return
	}
	if v.refused = !h.mayEject(v); !v.refused {
		h.eject(v, now)
	}
}

// passed ends the member's ejection when it is over, and takes doublings back.
func (h *health) passed(v *vitals, now time.Time) {
	if v.standing == ejected && !now.Before(v.until) {
		h.returned(v, now)
	}
	h.forgive(v, now)
}

// left takes the member out of what counts; joined adds it, or adds it again.
func (h *health) left(v *vitals, now time.Time) {
	h.forgive(v, now)
	for i, other := range h.members {
		if other == v {
			h.members = append(h.members[:i], h.members[i+1:]...)
			return
		}
	}
}

// joined adds a member. Of one that comes back only what counts towards the
// length of ejections is remembered.
func (h *health) joined(v *vitals) {
	*v = vitals{models: v.models, ejections: v.ejections, doublings: v.doublings}
	h.members = append(h.members, v)
}

// returned lets the member take requests, and whoever else may go now, go.
func (h *health) returned(v *vitals, now time.Time) {
	v.standing, v.until, v.calm = up, time.Time{}, now
	v.failedRequests, v.suspect, v.refused = 0, time.Time{}, false
	h.reconsider(now)
}

// reconsider ejects members for which there was no room before.
func (h *health) reconsider(now time.Time) {
	for _, v := range h.members {
		if v.refused && h.mayEject(v) {
			h.eject(v, now)
		}
	}
}

func (h *health) eject(v *vitals, now time.Time) {
	h.forgive(v, now)
	length := h.backoff(v.doublings)
	v.standing, v.refused, v.until = ejected, false, now.Add(length)
	v.ejections++
	if length < h.longest() {
		v.doublings++
	}
}

// mayEject tells whether each of the member's models can spare it.
func (h *health) mayEject(v *vitals) bool {
	replicas, out := map[string]int{}, map[string]int{}
	for _, other := range h.members {
		for _, model := range other.models {
			replicas[model]++
			if other.standing != up {
				out[model]++
			}
		}
	}
	for _, model := range v.models {
		if replicas[model] < 2 || (out[model]+1)*100 > replicas[model]*h.MaxEjectionPercent {
			return false
		}
	}
	return len(v.models) > 0
}

// forgive takes back a doubling for each stretch of good behaviour.
func (h *health) forgive(v *vitals, now time.Time) {
	if v.standing != up {
		return
	}
	for v.doublings > 0 {
		stretch := h.backoff(v.doublings - 1)
		if now.Sub(v.calm) < stretch {
			return
		}
		v.calm = v.calm.Add(stretch)
		v.doublings--
	}
}

// longest is the longest time that an ejection lasts.
func (h *health) longest() time.Duration { return max(maxBackoff, h.EjectionBackoff) }

// backoff is the length of an ejection.
func (h *health) backoff(doublings int) time.Duration {
	d := h.EjectionBackoff
	for ; doublings > 0 && d < h.longest(); doublings-- {
		d *= 2
	}
	return min(d, h.longest())
}
