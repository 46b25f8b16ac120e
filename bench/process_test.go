package bench

import (
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A process on the machine itself is asked for on a thread that ends, as those of hosts
// do. It lives on, and answers, until it is stopped.
func TestProcessOutlivesTheThreadThatAskedForIt(t *testing.T) {
	var p *process
	var err error
	thread, asked := 0, make(chan struct{})
	onNewThread(func() {
		defer close(asked)
		thread = unix.Gettid()
		p, err = startWith(nil, t.TempDir(), "echo", []string{"cat"}, true)
	})
	<-asked
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	// What is left of a thread goes after its children have been told.
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(fmt.Sprint("/proc/self/task/", thread)); os.IsNotExist(err) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the thread does not end")
		}
	}
	if err := p.command("still here"); err != nil {
		t.Fatal(err)
	}
	if line, err := p.line(t.Context(), startTimeout); err != nil || line != "still here" {
		t.Errorf("it said %q, %v", line, err)
	}
}
