package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"
)

// The structs in this file mirror those of splice.h; checkMirrors compares
// their sizes with the maps of the loaded object.

type tuple struct {
	remote, local [16]byte // IPv4 as ::ffff:a.b.c.d
	rport, lport  [2]byte  // network byte order
}

func newTuple(remote, local netip.AddrPort) (t tuple) {
	t.remote, t.local = remote.Addr().As16(), local.Addr().As16()
	binary.BigEndian.PutUint16(t.rport[:], remote.Port())
	binary.BigEndian.PutUint16(t.lport[:], local.Port())
	return t
}

func (t *tuple) v6() bool { return !netip.AddrFrom16(t.remote).Is4In6() }

func (t tuple) String() string {
	r := netip.AddrPortFrom(netip.AddrFrom16(t.remote).Unmap(), binary.BigEndian.Uint16(t.rport[:]))
	l := netip.AddrPortFrom(netip.AddrFrom16(t.local).Unmap(), binary.BigEndian.Uint16(t.lport[:]))
	return r.String() + ">" + l.String()
}

const (
	connEngine = 1 << iota
	connV6
	connLoopback
	connLayer3
	connClosed
	connSockV6
)

type conn struct {
	wire    tuple
	flags   uint32
	ifindex uint32
	engine  uint32
	splice  uint32
	shift   uint32
	split   uint32
	_       [4]byte

	sock        tuple
	bound, base uint32
	due, early  uint32
	_           [12]byte

	tsFloor, tsKnown uint32
	_                [56]byte // the next hop, which only programs use
}

// The states of a splice's word (enum state).
const (
	stateOff = iota
	stateArmed
	stateClaimed
	stateActive
	statePaused
	stateDone
	stateFolding
	stateEnded
)

const maxLeft = 1<<25 - 1

func word(state, step, left, next uint32) uint64 {
	return uint64(state) | uint64(step)<<3 | uint64(left)<<7 | uint64(next)<<32
}
func withState(w, state uint64) uint64 { return w&^7 | state }

func wordState(w uint64) uint32 { return uint32(w) & 7 }
func wordStep(w uint64) uint32  { return uint32(w) >> 3 & 15 }
func wordLeft(w uint64) uint32  { return uint32(w) >> 7 }
func wordNext(w uint64) uint32  { return uint32(w >> 32) }

type splice struct {
	client, engine       uint32
	fixed, generation    uint32
	eBase                uint32
	cStart, eStart       uint32
	eSnd, cRcv           uint32
	mss                  uint32
	tsOut, tsBack        uint32
	tsClient, eClock     uint32
	ts, tsBackKnown      uint8
	sack, _              uint8
	cSndScale, cRcvScale uint8
	eSndScale, eRcvScale uint8

	word                   uint64
	bytes, packets, chunks uint64
	firstNs, lastNs        uint64
	gapNs                  uint64
	starts, ends           uint32
	gaps                   [32]uint32

	ackNs          uint64
	una, window    uint32
	eDue           uint32
	refused, stale uint32
	_              [36]byte
}

type wire struct {
	tuple   tuple
	ifindex uint32
}

type event struct {
	splice, generation uint32
	word               uint64
}

const (
	gapBuckets = 24
	whyMax     = 24
	tailBytes  = 1024
)

type refusals struct {
	Refusals, Pauses [whyMax]uint64
}

type tail struct {
	bytes [2 * tailBytes]byte
}

// checkMirrors fails when a Go struct and its C original differ in size.
func checkMirrors(maps map[string]*ebpf.MapSpec) error {
	for _, m := range []struct {
		name       string
		key, value uintptr
	}{
		{"conns", 4, unsafe.Sizeof(conn{})},
		{"splices", 4, unsafe.Sizeof(splice{})},
		{"tails", 4, unsafe.Sizeof(tail{})},
		{"flows", 4, unsafe.Sizeof(bucket{})},
		{"wires", 8, unsafe.Sizeof(wire{})},
		{"arrivals", unsafe.Sizeof(tuple{}), 4},
		{"engines", 4, unsafe.Sizeof(refusals{})},
	} {
		s, ok := maps[m.name]
		if !ok {
			return fmt.Errorf("bpf object has no map %s", m.name)
		}
		if uintptr(s.KeySize) != m.key || uintptr(s.ValueSize) != m.value {
			return fmt.Errorf("map %s has key and value of %d and %d bytes, the Go mirror %d and %d: run make generate",
				m.name, s.KeySize, s.ValueSize, m.key, m.value)
		}
	}
	return nil
}
