package bench

import (
	"flag"
	"fmt"
	"net/netip"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"
)

// Worker is the main function of the processes that the benchmark starts from
// its own binary:
//
//	inferrail bench worker engine -listen HOST:PORT -rate N
//	inferrail bench worker client -target HOST:PORT -streams N -chunks N
//
// args are those after "worker". It returns when the client has reported, or
// on an error; an engine runs until it is killed.
func Worker(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("bench worker: engine or client expected")
	}
	// See poller: this goroutine's system calls do not yield to the runtime.
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	// A worker has nothing to save: SIGTERM ends it, whatever main had in mind.
	signal.Reset(syscall.SIGTERM)

	flags := flag.NewFlagSet("bench worker "+args[0], flag.ContinueOnError)
	switch args[0] {
	case "engine":
		listen := flags.String("listen", "", "address to serve on")
		rate := flags.Float64("rate", 20, "chunks per second and response")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return runEngine(*listen, *rate)
	case "client":
		target := flags.String("target", "", "address to ask")
		streams := flags.Int("streams", 1, "connections")
		chunks := flags.Int("chunks", 200, "chunks per response")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return runClient(*target, *streams, *chunks)
	}
	return fmt.Errorf("bench worker %q: engine or client expected", args[0])
}

func socketAddr(addr string) (unix.Sockaddr, error) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	if !ap.Addr().Is4() {
		return nil, fmt.Errorf("address %q: an IPv4 address is needed", addr)
	}
	return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}, nil
}
