package workload

import (
	"testing"
	"time"
)

// Throttles of one engine that overlap are multiplied.
func TestFactorAt(t *testing.T) {
	throttles := []Throttle{
		{Engine: 0, At: 10 * time.Second, Until: 20 * time.Second, Factor: 4},
		{Engine: 0, At: 15 * time.Second, Factor: 2},
		{Engine: 1, At: 0, Until: time.Second, Factor: 3},
	}
	f := func(engine int, at time.Duration, want float64) {
		t.Helper()
		if got := FactorAt(throttles, engine, at); got != want {
			t.Errorf("engine %d at %v: %v, want %v", engine, at, got, want)
		}
	}
	f(0, 0, 1)
	f(0, 10*time.Second, 4)
	f(0, 15*time.Second, 8)
	f(0, 20*time.Second, 2)
	f(0, time.Hour, 2)
	f(1, 0, 3)
	f(1, time.Second, 1)
	f(2, time.Second, 1)
}
