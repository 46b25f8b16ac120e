package bench

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Worker is the main function of the processes that the benchmark starts from
// its own binary:
//
//	inferrail bench worker engine -listen HOST:PORT,... -rate N
//	inferrail bench worker client -target HOST:PORT -streams N -chunks N
//	inferrail bench worker caller -target HOST:PORT -rate N -connections N -seed N
//	inferrail bench worker simulators CONFIG
//
// args are those after "worker". It returns when a client or caller has
// reported, when the standard input of simulators ends, or on an error; an
// engine runs until it is killed.
func Worker(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("bench worker: engine, client, caller or simulators expected")
	}
	if args[0] == "simulators" {
		return runSimulators(args[1:], os.Stdin, os.Stdout)
	}
	// See poller: this goroutine's system calls do not yield to the runtime.
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	// A worker has nothing to save: SIGTERM ends it, whatever main had in mind.
	signal.Reset(syscall.SIGTERM)

	flags := flag.NewFlagSet("bench worker "+args[0], flag.ContinueOnError)
	switch args[0] {
	case "engine":
		listen := flags.String("listen", "", "addresses to serve on")
		rate := flags.Float64("rate", 20, "chunks per second and response")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return runEngine(strings.Split(*listen, ","), *rate)
	case "client":
		target := flags.String("target", "", "address to ask")
		streams := flags.Int("streams", 1, "connections")
		chunks := flags.Int("chunks", 200, "chunks per response")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return runClient(*target, *streams, *chunks)
	case "caller":
		target := flags.String("target", "", "address to call")
		rate := flags.Float64("rate", 0, "calls a second; 0 calls again whenever an answer has arrived")
		connections := flags.Int("connections", 64, "connections at most")
		seed := flags.Uint64("seed", 0, "of the arrivals")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return runCaller(*target, *rate, *connections, *seed)
	}
	return fmt.Errorf("bench worker %q: engine, client, caller or simulators expected", args[0])
}

// readCommand reads one line from a worker's standard input.
func readCommand() (string, error) {
	var b [64]byte
	n, err := unix.Read(0, b[:])
	if err != nil {
		return "", fmt.Errorf("standard input: %w", err)
	}
	if n == 0 {
		return "", fmt.Errorf("standard input ended before a stop")
	}
	return string(bytes.TrimSpace(b[:n])), nil
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
