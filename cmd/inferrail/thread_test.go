package main

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// More goroutines than there are threads take one each, as labs take them to enter other
// network namespaces. None gets the first: what is said to listen, of which /proc/net
// tells by that thread, is what listens at home.
func TestNoGoroutineGetsTheFirstThread(t *testing.T) {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	n := len(threads) + 20
	taken, let := make(chan int, n), make(chan struct{})
	for range n {
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			taken <- unix.Gettid()
			<-let
		}()
	}
	for range n {
		if <-taken == unix.Getpid() {
			t.Error("a goroutine got the first thread")
		}
	}
	close(let)
	first, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if here, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || here != first {
		t.Errorf("the first thread is in %s, this one in %s, %v", first, here, err)
	}
}
