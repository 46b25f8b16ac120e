package bpf

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestStalled: a client is behind while it owes acknowledgements, whoever holds
// the rest of its answer, and while its window keeps the kernel from going on.
func TestStalled(t *testing.T) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	f := func(name string, state uint32, owed, window uint32, want bool) {
		t.Helper()
		m := splice{word: word(state, 0, 0, 5000), eStart: 4000, cStart: 100, una: 1100 - owed, window: window,
			ackNs: uint64(now.Nano()) - uint64(time.Minute)}
		if got := m.stalled() >= time.Minute; got != want {
			t.Errorf("%s: stalled %v, want %v", name, got, want)
		}
	}
	f("never taken over", stateOff, 0, 0, false)
	f("armed", stateArmed, 0, 0, false)
	f("carried, owed", stateActive, 10, 100, true)
	f("carried, all acknowledged", stateActive, 0, 100, false)
	f("carried, all acknowledged, no window", stateActive, 0, 0, true)
	f("over, owed", stateDone, 10, 100, true)
	f("paused, owed", statePaused, 10, 100, true)
	f("paused, owed, no window", statePaused, 10, 0, true)
	f("paused, all acknowledged, no window", statePaused, 0, 0, false)
	f("settled", stateEnded, 0, 0, false)
}
