package proxy

import "time"

// This file is the contract between the relay and the kernel datapath. The
// agent implements it over package bpf; a nil Joiner means that every response
// is copied.

// Joiner lets the kernel carry responses. Its methods may be called from any
// goroutine.
type Joiner interface {
	// Enter makes a connected TCP socket known to the kernel programs. engine
	// is the slot of the replica at the other end, or -1 for a client. The
	// handle is 0 when the socket can never be spliced; why then says so in
	// one word, which is a metric label. Enter is called once per socket: for
	// an engine right after connect, for a client before its first request
	// that may be spliced is sent on. It costs a few system calls.
	Enter(fd, engine int) (handle uint32, why string)

	// Leave is called just before the socket is closed, with every splice on
	// it stopped. The programs go on correcting the socket's segments until
	// the kernel has forgotten it. Leave(0) does nothing.
	Leave(handle uint32)

	// Segment is the most bytes an engine may send in one segment so that it
	// fits the path to the clients, 0 for any. An engine is told when it is
	// connected to.
	Segment(v6 bool) int

	// Join pairs two sockets for one response. changed is called, from the
	// Joiner's own goroutine and possibly just after Part still, when
	// the kernel's hold on the response changed: what it carried is
	// acknowledged to its end and the response is over, or paused. It must
	// not block. Join does no system call. The Splice is nil when the sockets
	// cannot be joined; why then says so in one word.
	Join(client, engine uint32, changed func()) (s Splice, why string)
}

// Hold says who has the rest of a response.
type Hold uint8

const (
	// HeldHere: userspace may read from the engine and write to the client.
	HeldHere Hold = iota
	// HeldByKernel: the kernel carries it; the engine's socket must not be read.
	HeldByKernel
	// HeldEnded: the kernel has carried it to its end. Nothing is left to read.
	HeldEnded
)

// Splice is one response's use of the kernel. It is owned by the relay that
// joined it and used by one goroutine at a time.
//
// The rule that keeps bytes in order: userspace calls Arm only when it has
// written all it has read to the client's socket, and calls Take, and sees
// HeldHere, before it reads from the engine again.
type Splice interface {
	// Arm offers the rest of the response to the kernel: it takes over with
	// the next packet that finds the engine's socket quiet. Until then packets
	// arrive at the socket as ever. f is the framing state after the last byte
	// read. Arm reports false, and does nothing, when the rest cannot be
	// offered now: an earlier splice is not settled, or f.Left is too large.
	Arm(f Frames) bool

	// Take takes an armed response back, and tells who holds the rest. When
	// it returns HeldHere, f is the framing state from which to read on; it
	// differs from what was armed when the kernel carried a part of the
	// response and paused.
	Take() (f Frames, hold Hold)

	// Stop freezes the splice, whoever holds it: the kernel carries no new
	// byte afterwards. For a response that is given up.
	Stop()

	// Settled reports that the client has acknowledged every byte the kernel
	// carried, so that the engine's connection may serve another request.
	// True before the first byte is carried.
	Settled() bool

	// Carried returns what the kernel has carried of this response so far,
	// and appends the last bytes of it (at most TailBytes) to tail.
	Carried(tail []byte) (Carried, []byte)

	// Part ends the pairing. The caller has seen Settled, or closes both
	// sockets. The Splice must not be used afterwards.
	Part()
}

// TailBytes is how much of a response's end the kernel remembers: room for the
// usage chunk, the [DONE] line and the last chunk of any known engine.
const TailBytes = 1024

// Carried counts what the kernel carried of one response.
type Carried struct {
	Bytes, Packets, Chunks uint64
	// Refused says why the last packet that could have started or continued
	// the splice did not: one word, empty when none was refused.
	Refused string
	// Stale: the engine's socket may hold bytes that were carried as well. It
	// must neither be read nor used for another response.
	Stale bool
	// Stalled is for how long the client has kept the kernel from going on.
	Stalled time.Duration
}

// Frames is the state of a response body's framing between two bytes. The BPF
// programs keep the same state under the same numbers (bpf/frames.h).
// The zero value is the start of a chunked body.
type Frames struct {
	// Step is where in the framing the next byte stands.
	Step Step
	// Fixed: the body has a Content-Length; Step is StepData and Left counts
	// the whole rest.
	Fixed bool
	// Left is the number of data bytes left in this chunk (or body), or the
	// chunk size read so far.
	Left uint64
	// Chunks counts the chunks whose size line was read in userspace.
	Chunks uint64
}

// Step is a position in chunked framing (RFC 9112 section 7.1).
type Step uint8

const (
	StepSizeStart   Step = iota // first digit of a chunk size
	StepSize                    // further digits
	StepExt                     // after the digits, up to the line's LF
	StepData                    // chunk data, Left bytes
	StepDataCR                  // CR after the data
	StepDataLF                  // LF after that CR
	StepTrailer                 // first byte of a trailer line
	StepTrailerLine             // inside a trailer line
	StepTrailerLF               // LF of the empty line that ends the body
	StepEnd                     // the body is over
)
