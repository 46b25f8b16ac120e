package policy

import (
	"sync"
	"testing"
)

// Readers see numbers that were written together.
func TestBoard(t *testing.T) {
	var b board
	var readers sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		readers.Go(func() {
			last := uint64(0)
			for {
				var got [len(boardNumbers{})]uint64
				b.read(got[:])
				for i, n := range got {
					if n != got[0]*uint64(i+1) {
						t.Errorf("read %v", got)
						return
					}
				}
				if got[0] < last {
					t.Errorf("read %d after %d", got[0], last)
					return
				}
				last = got[0]
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for n := range uint64(20000) {
		to := b.begin()
		for i := range to {
			to[i].Store(n * uint64(i+1))
		}
		b.end()
	}
	close(stop)
	readers.Wait()
}
