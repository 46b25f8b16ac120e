package agent

import (
	"fmt"
	"slices"
)

// How much has to differ before prompts are no longer believed to be exact. To
// stop believing costs every cache hit that exact tokens would have told of,
// until the engine is started anew; to go on for a few requests more costs those
// few. So it is not done for a request of an odd kind now and then, and yet at
// once for a template that is wrong:
//
//   - Of responses' counts, 8 of the last 64. If all differ, that is the eighth
//     response. If one in a hundred does, which is not worth the loss, it comes
//     about by chance once in some thirty million responses; at one in ten, within
//     the first hundred or so.
//   - Of samples, 3 of the last 32. They are one in a thousand responses, so
//     that to wait for eight would take long, and each has been asked about
//     twice, which rules out what chance or midnight has done.
//   - Of probes, one, which was asked about twice too: the agent has chosen what
//     they say, and no engine of the same template differs there.
const (
	usageMost, usageOf   = 8, 64
	sampleMost, sampleOf = 3, 32
)

// trust decides whether the prompts of a model are still believed to be followed
// exactly. It is told of every comparison with an engine that found a
// difference, and of what becomes of the replicas; it does no I/O and reads no
// clock. Its owner lets one call run at a time. The zero value trusts.
//
// One replica that differs is enough: tokens that are right at one and wrong at
// another engine cannot be compared between them. Its accusation stands until
//
//   - its probes agree, which they are asked to when it has come back from
//     having been away: an engine that was started anew may have another
//     template, and one that was not tells the same as before;
//   - it has come back and cannot be probed, so that only its responses can
//     tell: it gets another trial, of usageMost responses;
//   - it has left.
//
// It is never lifted by time alone. Nothing can agree while prompts are not
// followed, so that a model that differs would be believed and accused in turns,
// and requests be routed by wrong tokens each time.
type trust struct {
	// replicas in the order in which they were first heard of.
	replicas []*accused
}

// accused is what is known against one replica. The zero value is nothing.
type accused struct {
	slot           int
	why            string // it is accused of; "" when it is not
	usage, samples window
}

// window holds the places of the last comparisons that differed, each counted
// among all of its kind from 1 on. The zero value is none.
type window struct{ places []uint64 }

// add notes that the place-th comparison differs. It reports whether most of the
// last of have, and over how many comparisons the last most are spread.
func (w *window) add(place uint64, most, of int) (enough bool, spread uint64) {
	// Requests end at the same time, and tell so in any order.
	at, _ := slices.BinarySearch(w.places, place)
	w.places = slices.Insert(w.places, at, place)
	if extra := len(w.places) - most; extra > 0 {
		w.places = slices.Delete(w.places, 0, extra)
	}
	spread = w.places[len(w.places)-1] - w.places[0] + 1
	return len(w.places) == most && spread <= uint64(of), spread
}

func (t *trust) replica(slot int) *accused {
	for _, a := range t.replicas {
		if a.slot == slot {
			return a
		}
	}
	a := &accused{slot: slot}
	t.replicas = append(t.replicas, a)
	return a
}

// counted tells that the place-th response of the replica has counted another
// number of tokens; what says so to people.
func (t *trust) counted(slot int, place uint64, what string) {
	a := t.replica(slot)
	if enough, spread := a.usage.add(place, usageMost, usageOf); enough && a.why == "" {
		a.why = fmt.Sprintf("%s; so did %d of its last %d responses", what, usageMost, spread)
	}
}

// sampled tells that the place-th sample of the replica has other tokens.
func (t *trust) sampled(slot int, place uint64, what string) {
	a := t.replica(slot)
	if enough, spread := a.samples.add(place, sampleMost, sampleOf); enough && a.why == "" {
		a.why = fmt.Sprintf("%s; so it was with %d of the last %d requests that were looked at", what, sampleMost, spread)
	}
}

// outcome is what became of a replica's probes.
type outcome uint8

const (
	// unasked: none has been asked yet, or none can be.
	unasked outcome = iota
	// agrees and differs: the engine has the same tokens, or others.
	agrees
	differs
	// unable: the engine has no page that would tell, or takes none of the
	// probes.
	unable
	// failed: it did not answer as it should. It is asked again.
	failed
)

func (o outcome) String() string {
	return [...]string{"not yet", "agrees", "differs", "cannot be checked", "failed"}[o]
}

// probed tells what became of probes that were sent because the replica has
// joined, has come back, or because the model was loaded anew.
func (t *trust) probed(slot int, o outcome, what string) {
	a := t.replica(slot)
	switch o {
	case agrees, unable:
		*a = accused{slot: slot}
	case differs:
		a.why = what
	}
}

// renewed tells that the model was loaded anew: what was compared with the one
// before says nothing of it. Who is accused stays so until its probes tell.
func (t *trust) renewed() {
	for _, a := range t.replicas {
		a.usage, a.samples = window{}, window{}
	}
}

// left forgets the replica.
func (t *trust) left(slot int) {
	t.replicas = slices.DeleteFunc(t.replicas, func(a *accused) bool { return a.slot == slot })
}

// verdict is why the prompts are not believed to be exact, for people; "" when
// they are.
func (t *trust) verdict() string {
	why, more := "", 0
	for _, a := range t.replicas {
		switch {
		case a.why == "":
		case why == "":
			why = a.why
		default:
			more++
		}
	}
	if more > 0 {
		why += fmt.Sprintf("; %d more of its replicas differ", more)
	}
	return why
}
