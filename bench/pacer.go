package bench

import (
	"context"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// pacer waits for instants. A load's scheduler makes one and uses it on its own
// goroutine, which has a thread for itself until close: the runtime's timers may be a
// millisecond late where nothing else runs, a thread that sleeps in the kernel is not.
type pacer struct{}

// newPacer binds the calling goroutine to its thread and makes the thread's sleeps
// exact: by default they may take 50 us longer.
func newPacer() *pacer {
	runtime.LockOSThread()
	// Where that is not allowed, sleeps are 50 us less exact.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	return &pacer{}
}

// until returns at t, at once when that is over, and false when ctx has ended before.
func (p *pacer) until(ctx context.Context, t time.Time) bool {
	// Long sleeps are the runtime's, which ctx can end.
	if d := time.Until(t) - coarse; d > 0 {
		timer := time.NewTimer(d)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
		}
	}
	for d := time.Until(t); d > 0; d = time.Until(t) {
		ts := unix.NsecToTimespec(int64(d))
		_ = unix.Nanosleep(&ts, nil) // a signal ends it early
	}
	return ctx.Err() == nil
}

// coarse is by how much a timer of the runtime may be late.
const coarse = 3 * time.Millisecond

func (p *pacer) close() {
	// The slack of a thread that others will use is the usual one again.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0)
	runtime.UnlockOSThread()
}
