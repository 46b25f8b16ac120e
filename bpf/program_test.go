package bpf

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cockroachdb/datadriven"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestPrograms tells the stories in testdata: packet by packet, what the
// programs make of them. Nothing is attached and there is no socket: the maps
// are set up by hand and the packets go through prog.Run. Commands:
//
//	splice key=value ...   a new pair of connections and the splice between them
//	send                   one packet a line: FROM key=value ...
//	tail                   what AppendTail returns
//
// FROM is who sends: `engine` and `client` are packets that arrive, `E` and
// `C` those of the proxy's own sockets that leave. Numbers of the first two
// are wire numbers, of the last two socket numbers.
//
// The wire of the default splice: the engine's byte 1000 is the client's 5000.
// The engine's socket stands at 960, the client's at 4900.
func TestPrograms(t *testing.T) {
	s := newSplicer(t, Options{MaxSplices: 16})
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no stories: ", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
			w := newWorld(t, s)
			datadriven.RunTest(t, f, func(t *testing.T, d *datadriven.TestData) string {
				w.t = t
				switch d.Cmd {
				case "splice":
					w.begin(d)
					return ""
				case "send":
					var out strings.Builder
					for line := range strings.Lines(d.Input) {
						if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
							fmt.Fprintf(&out, "%s\n", line)
							w.send(line, &out)
						}
					}
					return out.String()
				case "tail":
					p := &Splice{s: s, id: w.id, m: w.m}
					b := p.AppendTail(nil)
					if len(b) > 80 {
						return fmt.Sprintf("%d bytes: %q ... %q\n", len(b), b[:30], b[len(b)-30:])
					}
					return fmt.Sprintf("%d bytes: %q\n", len(b), b)
				}
				d.Fatalf(t, "unknown command %q", d.Cmd)
				return ""
			})
		})
	}
}

// world is one client, one engine and the splice between them, as the
// programs see them.
type world struct {
	t        *testing.T
	s        *Splicer
	cid, eid uint32
	id       uint32
	m        *splice
	v6       bool
}

const testSlot = 7

func newWorld(t *testing.T, s *Splicer) *world {
	s.mu.Lock()
	err := s.countEngineLocked(testSlot)
	s.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	return &world{t: t, s: s, cid: 1, eid: 2, id: 3}
}

// address returns the end point of a name. The layer-3 programs find their
// link-layer protocol, in a test run, in the bytes that would be the end of an
// Ethernet header: with these addresses the source address says IPv4 (0x0800)
// or IPv6 (0x86dd) there.
func address(name string, v6 bool) netip.AddrPort {
	host := map[string]byte{"client": 1, "C": 2, "E": 3, "engine": 4, "stranger": 5}[name]
	port := map[string]uint16{"client": 1111, "C": 80, "E": 2222, "engine": 8000, "stranger": 9}[name]
	if v6 {
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0x86, 0xdd, 15: host}), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, 0, 0, host}), port)
}

var stateNames = []string{"off", "armed", "claimed", "active", "paused", "done", "folding", "ended"}
var stepNames = []string{"size-start", "size", "ext", "data", "data-cr", "data-lf", "trailer", "trailer-line", "trailer-lf", "end"}

func indexOf(t *testing.T, names []string, name string) uint32 {
	for i, n := range names {
		if n == name {
			return uint32(i)
		}
	}
	t.Fatalf("%q is none of %v", name, names)
	return 0
}

// begin lays out a new splice.
func (w *world) begin(d *datadriven.TestData) {
	w.v6 = d.HasArg("v6")
	number := func(key string, otherwise uint32) uint32 {
		var s string
		if !d.MaybeScanArgs(w.t, key, &s) {
			return otherwise
		}
		n, err := strconv.ParseInt(s, 0, 64)
		if err != nil {
			d.Fatalf(w.t, "%s: %v", key, err)
		}
		return uint32(n)
	}
	name := func(key string, names []string, otherwise string) uint32 {
		d.MaybeScanArgs(w.t, key, &otherwise)
		return indexOf(w.t, names, otherwise)
	}
	c := conn{wire: newTuple(address("client", w.v6), address("C", w.v6)), ifindex: number("c-ifindex", 2), splice: w.id}
	e := conn{wire: newTuple(address("engine", w.v6), address("E", w.v6)), ifindex: number("e-ifindex", 2), splice: w.id,
		flags: connEngine, engine: testSlot}
	c.sock, e.sock = c.wire, e.wire
	if w.v6 {
		c.flags |= connV6 | connSockV6
		e.flags |= connV6 | connSockV6
	}
	c.flags |= number("c-flags", 0)
	e.flags |= number("e-flags", 0)
	c.shift, e.shift = number("c-shift", number("c-base", 100)), number("e-shift", number("e-base", 40))
	c.tsFloor, e.tsFloor = number("c-floor", 0), number("e-floor", 0)
	if c.tsFloor != 0 {
		c.tsKnown = 1
	}
	if e.tsFloor != 0 {
		e.tsKnown = 1
	}
	if d.HasArg("unpaired") {
		c.splice, e.splice = 0, 0
	}
	m := splice{client: w.cid, engine: w.eid, generation: 1}
	m.eStart, m.cStart = number("e-start", 1000), number("c-start", 5000)
	next := number("next", m.eStart)
	m.word = word(name("state", stateNames, "active"), name("step", stepNames, "data"), number("left", 100000), next)
	if d.HasArg("fixed") {
		m.fixed = 1
	}
	m.eBase = number("e-base", 40)
	if st := wordState(m.word); st >= stateActive && st <= stateFolding && !d.HasArg("unpaired") || d.HasArg("split") {
		c.split, c.base = 1, number("c-base", 100)
		c.bound = m.cStart - c.base
	}
	m.cRcv, m.eSnd = number("c-rcv", 700), number("e-snd", 300)
	m.una = number("una", m.cStart)
	c.due, m.eDue = number("c-due", 0), number("e-due", 0)
	c.early = number("c-early", 0)
	m.ts, m.tsOut, m.tsBack, m.tsBackKnown = 1, number("ts-out", 50), number("ts-back", 7), 1
	if d.HasArg("no-ts") {
		m.ts = 0
	}
	if d.HasArg("ts-back-unknown") {
		m.tsBackKnown = 0
	}
	m.tsClient, m.eClock = number("ts-client", 900), number("e-clock", 0)
	m.mss, m.sack, m.window = number("mss", 1460), uint8(number("sack", 1)), number("window", 64)
	m.cSndScale, m.cRcvScale = uint8(number("c-snd-scale", 7)), uint8(number("c-rcv-scale", 7))
	m.eSndScale, m.eRcvScale = uint8(number("e-snd-scale", 7)), uint8(number("e-rcv-scale", 7))
	w.enter(c, e)
	*w.m = m
	w.s.tails[w.id] = tail{}
}

// pair lays out two plain connections without a story.
func (w *world) pair() {
	w.enter(conn{wire: newTuple(address("client", w.v6), address("C", w.v6)), ifindex: 2, splice: w.id},
		conn{wire: newTuple(address("engine", w.v6), address("E", w.v6)), ifindex: 2, splice: w.id, flags: connEngine, engine: testSlot})
}

// enter does what Splicer.Enter does, without sockets.
func (w *world) enter(c, e conn) {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	for _, id := range []uint32{w.cid, w.eid} {
		w.s.dropFlowLocked(id)
	}
	w.m = &w.s.splices[w.id]
	w.s.conns[w.cid], w.s.conns[w.eid] = c, e
	for _, id := range []uint32{w.cid, w.eid} {
		if !w.s.putFlowLocked(id) {
			w.t.Fatal("no room for a flow")
		}
	}
}

// field is one line of the state that a packet can change.
type field struct {
	name, value string
}

func (w *world) state() (fs []field) {
	add := func(name string, v any) { fs = append(fs, field{name, fmt.Sprint(v)}) }
	m, c, e := w.m, &w.s.conns[w.cid], &w.s.conns[w.eid]
	add("state", stateNames[wordState(m.word)])
	add("step", stepNames[wordStep(m.word)])
	add("left", wordLeft(m.word))
	add("next", wordNext(m.word))
	add("una", m.una)
	add("c-rcv", m.cRcv)
	add("c-due", c.due)
	add("c-early", c.early)
	add("stale", m.stale)
	add("split", c.split)
	add("e-due", m.eDue)
	add("ts-back", m.tsBack)
	add("ts-back-known", m.tsBackKnown)
	add("window", m.window)
	add("bytes", m.bytes)
	add("packets", m.packets)
	add("chunks", m.chunks)
	add("c-shift", c.shift)
	add("e-shift", e.shift)
	add("c-floor", c.tsFloor)
	add("e-floor", e.tsFloor)
	var per []refusals
	if err := w.s.engines.Lookup(uint32(testSlot), &per); err != nil {
		w.t.Fatal(err)
	}
	var sum refusals
	for _, p := range per {
		for i := range whyMax {
			sum.Refusals[i] += p.Refusals[i]
			sum.Pauses[i] += p.Pauses[i]
		}
	}
	add("splices", m.starts)
	add("ends", m.ends)
	for i := range whyMax {
		add("refusals-"+Why(i).String(), sum.Refusals[i])
		add("pauses-"+Why(i).String(), sum.Pauses[i])
	}
	return fs
}

var option = regexp.MustCompile(`([a-z0-9-]+)(?:=("(?:[^"\\]|\\.)*"|\S+))?`)

// frame is a packet in the making.
type frame struct {
	from, to string
	src, dst netip.AddrPort // instead of from's and to's
	v6       bool
	l3       bool // a device without link-layer header
	mark     uint32
	gso      uint32
	seq, ack uint32
	win      uint16
	flags    byte
	options  []byte
	payload  []byte
	frag     bool
	udp      bool
	ext      bool // IPv6 hop-by-hop header
	doff     byte // header length in words, when it is to be a lie
	ipopt    bool // four bytes of IPv4 options
	short    int  // bytes cut off
	pad      int  // bytes behind the packet
}

const flagLetters = "FSRPAUEC"

func (w *world) parse(line string) frame {
	from, rest, _ := strings.Cut(line, " ")
	f := frame{from: from, v6: w.v6, win: 500, flags: 16}
	f.to = map[string]string{"engine": "E", "client": "C", "C": "client", "E": "engine", "stranger": "C"}[from]
	if f.to == "" {
		w.t.Fatalf("%q: nobody is called %q", line, from)
	}
	ts := []uint32{2000, 3000}
	var blocks, raw []byte
	numbers := func(s string) (n []uint32) {
		for _, p := range strings.FieldsFunc(s, func(r rune) bool { return r == '/' || r == ',' || r == '-' }) {
			v, err := strconv.ParseUint(p, 0, 32)
			if err != nil {
				w.t.Fatalf("%q: %v", line, err)
			}
			n = append(n, uint32(v))
		}
		return n
	}
	for _, o := range option.FindAllStringSubmatch(rest, -1) {
		v := o[2]
		switch o[1] {
		case "seq":
			f.seq = numbers(v)[0]
		case "ack":
			f.ack = numbers(v)[0]
		case "win":
			f.win = uint16(numbers(v)[0])
		case "flags":
			f.flags = 0
			for _, l := range v {
				i := strings.IndexRune(flagLetters, l)
				if i < 0 {
					w.t.Fatalf("%q: no flag %q", line, l)
				}
				f.flags |= 1 << i
			}
		case "ts":
			ts = numbers(v)
		case "no-ts":
			ts = nil
		case "sack":
			for _, n := range numbers(v) {
				blocks = binary.BigEndian.AppendUint32(blocks, n)
			}
		case "opt":
			b, err := hex.DecodeString(v)
			if err != nil {
				w.t.Fatalf("%q: %v", line, err)
			}
			raw = b
		case "data":
			s, err := strconv.Unquote(v)
			if err != nil {
				w.t.Fatalf("%q: %v", line, err)
			}
			f.payload = []byte(s)
		case "len":
			f.payload = bytes.Repeat([]byte{'x'}, int(numbers(v)[0]))
		case "gso":
			f.gso = numbers(v)[0]
		case "marked":
			f.mark = 0x1f5a0001
		case "l3":
			f.l3 = true
		case "frag":
			f.frag = true
		case "udp":
			f.udp = true
		case "ext":
			f.ext = true
		case "short":
			f.short = int(numbers(v)[0])
		case "doff":
			f.doff = byte(numbers(v)[0])
		case "ipopt":
			f.ipopt = true
		case "pad":
			f.pad = int(numbers(v)[0])
		default:
			w.t.Fatalf("%q: unknown %q", line, o[1])
		}
	}
	if ts != nil {
		f.options = append(f.options, 1, 1, 8, 10)
		f.options = binary.BigEndian.AppendUint32(f.options, ts[0])
		f.options = binary.BigEndian.AppendUint32(f.options, ts[1])
	}
	if blocks != nil {
		f.options = append(f.options, 1, 1, 5, byte(2+len(blocks)))
		f.options = append(f.options, blocks...)
	}
	f.options = append(f.options, raw...)
	return f
}

// bytes builds the packet, checksums included.
func (f *frame) bytes() []byte {
	src, dst := address(f.from, f.v6), address(f.to, f.v6)
	if f.src.IsValid() {
		src, dst = f.src, f.dst
	}
	tcp := binary.BigEndian.AppendUint16(nil, src.Port())
	tcp = binary.BigEndian.AppendUint16(tcp, dst.Port())
	tcp = binary.BigEndian.AppendUint32(tcp, f.seq)
	tcp = binary.BigEndian.AppendUint32(tcp, f.ack)
	tcp = append(tcp, byte(20+len(f.options))/4<<4, f.flags)
	tcp = binary.BigEndian.AppendUint16(tcp, f.win)
	tcp = append(tcp, 0, 0, 0, 0)
	tcp = append(tcp, f.options...)
	tcp = append(tcp, f.payload...)
	if f.doff > 0 {
		tcp[12] = f.doff << 4
	}
	proto := byte(6)
	if f.udp {
		proto = 17
	}
	binary.BigEndian.PutUint16(tcp[16:], ^sum16(tcp, pseudo(src.Addr(), dst.Addr(), len(tcp))))
	var b []byte
	if !f.l3 {
		b = append(b, 2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2)
		if f.v6 {
			b = append(b, 0x86, 0xdd)
		} else {
			b = append(b, 0x08, 0x00)
		}
	}
	if f.v6 {
		next := proto
		var ext []byte
		if f.ext {
			ext, next = []byte{proto, 0, 1, 4, 0, 0, 0, 0}, 0
		}
		b = append(b, 0x60, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(len(ext)+len(tcp)))
		b = append(b, next, 64)
		b = append(b, src.Addr().AsSlice()...)
		b = append(b, dst.Addr().AsSlice()...)
		b = append(b, ext...)
	} else {
		ip := []byte{0x45, 0}
		ip = binary.BigEndian.AppendUint16(ip, uint16(20+len(tcp)))
		ip = append(ip, 0, 1, 0x40, 0, 64, proto, 0, 0)
		if f.frag {
			ip[6] = 0x20
		}
		ip = append(ip, src.Addr().AsSlice()...)
		ip = append(ip, dst.Addr().AsSlice()...)
		if f.ipopt {
			ip[0], ip[3] = 0x46, ip[3]+4
			ip = append(ip, 1, 1, 1, 0)
		}
		binary.BigEndian.PutUint16(ip[10:], ^sum16(ip, 0))
		b = append(b, ip...)
	}
	b = append(b, tcp...)
	b = append(b, make([]byte, f.pad)...)
	return b[:len(b)-f.short]
}

func pseudo(src, dst netip.Addr, n int) uint32 {
	b := append(src.AsSlice(), dst.AsSlice()...)
	b = append(b, 0, 6)
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	return uint32(sum16(b, 0))
}

// sum16 is the Internet checksum, not yet inverted.
func sum16(b []byte, sum uint32) uint16 {
	for i, x := range b {
		if i&1 == 0 {
			sum += uint32(x) << 8
		} else {
			sum += uint32(x)
		}
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum&0xffff + sum>>16)
}

// decode turns a packet into one line. Whatever is not as it must be is in
// capitals.
func (f *frame) decode(b []byte) string {
	var out strings.Builder
	bad := ""
	var src, dst netip.Addr
	if f.v6 {
		src, dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		next := b[6]
		b = b[40 : 40+int(binary.BigEndian.Uint16(b[4:]))]
		if next == 0 { // a hop-by-hop header
			b = b[8*(int(b[1])+1):]
		}
	} else {
		ihl := b[0] & 15 * 4
		if sum16(b[:ihl], 0) != 0xffff {
			bad += " IP-CHECKSUM-BAD"
		}
		src, dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		b = b[ihl:binary.BigEndian.Uint16(b[2:])]
	}
	if sum16(b, pseudo(src, dst, len(b))) != 0xffff {
		bad += " TCP-CHECKSUM-BAD"
	}
	who := func(a netip.Addr, port []byte) string {
		ap := netip.AddrPortFrom(a, binary.BigEndian.Uint16(port))
		for _, n := range []string{"client", "C", "E", "engine"} {
			if address(n, f.v6) == ap {
				return n
			}
		}
		return ap.String()
	}
	fmt.Fprintf(&out, "%s>%s ", who(src, b), who(dst, b[2:]))
	for i, l := range flagLetters {
		if b[13]>>i&1 == 1 {
			out.WriteRune(l)
		}
	}
	fmt.Fprintf(&out, " seq=%d ack=%d win=%d", binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint16(b[14:]))
	opts := b[20 : b[12]>>4<<2]
	for len(opts) > 0 {
		switch {
		case opts[0] <= 1:
			opts = opts[1:]
			continue
		case opts[0] == 8:
			fmt.Fprintf(&out, " ts=%d/%d", binary.BigEndian.Uint32(opts[2:]), binary.BigEndian.Uint32(opts[6:]))
		case opts[0] == 5:
			sep := " sack="
			for i := 2; i < int(opts[1]); i += 8 {
				fmt.Fprintf(&out, "%s%d-%d", sep, binary.BigEndian.Uint32(opts[i:]), binary.BigEndian.Uint32(opts[i+4:]))
				sep = ","
			}
		default:
			fmt.Fprintf(&out, " opt=%x", opts[:opts[1]])
		}
		opts = opts[opts[1]:]
	}
	payload := b[b[12]>>4<<2:]
	fmt.Fprintf(&out, " len=%d", len(payload))
	if !bytes.Equal(payload, f.payload) {
		bad += " PAYLOAD-CHANGED"
	}
	if bad == "" {
		return out.String() + " checksums ok"
	}
	return out.String() + bad
}

// skb mirrors the kernel's struct __sk_buff, the context of a test run.
type skb struct {
	Len, PktType, Mark uint32
	_                  [33]uint32
	FlowKeys, Tstamp   uint64
	WireLen, GsoSegs   uint32
	Sk                 uint64
	GsoSize            uint32
	TstampType         uint32
	Hwtstamp           uint64
}

// testChecksumComplete (BPF_F_TEST_SKB_CHECKSUM_COMPLETE) makes the packet one
// whose sum the device has taken, and the kernel compare it afterwards.
const testChecksumComplete = 1 << 2

// run puts a packet through the program of its direction and device.
func (w *world) run(f *frame, b []byte) (verdict int32, out []byte, mark uint32) {
	w.t.Helper()
	hook := egressEthernet
	if f.from == "engine" || f.from == "client" || f.from == "stranger" {
		hook = ingressEthernet
	}
	if f.l3 {
		hook++
	}
	in, back := skb{Mark: f.mark, GsoSize: f.gso}, skb{}
	if f.gso > 0 {
		in.GsoSegs = (uint32(len(f.payload)) + f.gso - 1) / f.gso
	}
	o := ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64), Context: in, ContextOut: &back}
	if !f.l3 {
		o.Flags = testChecksumComplete
	}
	ret, err := w.s.programs[hook].Run(&o)
	if errors.Is(err, unix.EINVAL) && o.Flags != 0 { // before Linux 6.17
		o.Flags = 0
		ret, err = w.s.programs[hook].Run(&o)
	}
	if errors.Is(err, unix.EBADMSG) {
		w.t.Errorf("%s>%s: the sum over the packet, as a device leaves it, is no longer right", f.from, f.to)
		o.Flags = 0
		ret, err = w.s.programs[hook].Run(&o)
	}
	if err != nil {
		w.t.Fatalf("run: %v", err)
	}
	return int32(ret), o.DataOut, back.Mark
}

// send runs one packet and says what became of it and of the splice.
func (w *world) send(line string, out *strings.Builder) {
	f := w.parse(line)
	b := f.bytes()
	before := w.state()
	carried := wordState(w.m.word)
	woken := w.s.wakeups.Load()
	verdict, after, mark := w.run(&f, b)
	what, known := map[int32]string{-1: "next", 7: "redirect"}[verdict]
	if !known {
		what = fmt.Sprintf("VERDICT %d", verdict)
	}
	if bytes.Equal(b, after) {
		if mark != f.mark {
			what += " marked"
		}
		fmt.Fprintf(out, "  %s, as it came\n", what)
	} else {
		l3 := 14
		if f.l3 && len(after) == len(b) {
			l3 = 0
		}
		if mark != 0x1f5a0001 {
			what += " NOT MARKED"
		}
		if l3 > 0 && !bytes.Equal(after[:14], b[:14]) {
			what += fmt.Sprintf(" link=%x", after[:14])
		}
		fmt.Fprintf(out, "  %s %s\n", what, f.decode(after[l3:]))
	}
	now := w.state()
	var changed []string
	for i := range now {
		if now[i] != before[i] {
			v := now[i].value
			if strings.HasPrefix(now[i].name, "refusals-") || strings.HasPrefix(now[i].name, "pauses-") ||
				now[i].name == "splices" || now[i].name == "ends" {
				changed = append(changed, now[i].name+"++")
			} else {
				changed = append(changed, now[i].name+"="+v)
			}
		}
	}
	// A splice that settles tells userspace.
	if st := wordState(w.m.word); (st == stateEnded || st == stateOff) && carried >= stateActive && carried <= stateFolding {
		for i := 0; i < 200 && w.s.wakeups.Load() == woken; i++ {
			time.Sleep(5 * time.Millisecond)
		}
		switch w.s.wakeups.Load() - woken {
		case 1:
			changed = append(changed, "event")
		default:
			changed = append(changed, fmt.Sprintf("%d EVENTS", w.s.wakeups.Load()-woken))
		}
	}
	if len(changed) > 0 {
		fmt.Fprintf(out, "  %s\n", strings.Join(changed, " "))
	}
}

// TestTakeOver offers an armed splice a packet while the proxy's two sockets,
// real ones, are in the states that matter.
func TestTakeOver(t *testing.T) {
	s := newSplicer(t, Options{MaxSplices: 16})
	if os.Getenv("INFERRAIL_IN_NETNS") == "" {
		t.Skip("no network namespace whose loopback device may be changed")
	}
	w := newWorld(t, s)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMTU(lo, 1500); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkSetMTU(lo, lo.Attrs().MTU) })
	ts := []byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2}
	type sockets struct{ client, c, e, engine *net.TCPConn }
	f := func(name, want string, prepare func(t *testing.T, r sockets, f *frame), check func(t *testing.T, m *splice)) {
		t.Run(name, func(t *testing.T) {
			w.t = t
			var r sockets
			r.client, r.c = pair(t, "tcp4", "127.0.0.1:0")
			r.e, r.engine = pair(t, "tcp4", "127.0.0.1:0")
			// Every connection has carried something before.
			c := conn{splice: w.id, shift: 1000, ifindex: 2}
			e := conn{splice: w.id, shift: 2000, ifindex: 2, flags: connEngine, engine: testSlot}
			for _, x := range []struct {
				conn *conn
				sock *net.TCPConn
			}{{&c, r.c}, {&e, r.e}} {
				x.conn.wire = newTuple(x.sock.RemoteAddr().(*net.TCPAddr).AddrPort(), x.sock.LocalAddr().(*net.TCPAddr).AddrPort())
				x.conn.sock = x.conn.wire
			}
			write(t, r.e, "request")
			read(t, r.engine, "request")
			write(t, r.engine, "head")
			read(t, r.e, "head")
			w.enter(c, e)
			*w.m = splice{client: w.cid, engine: w.eid, word: word(stateArmed, 0, 0, 0)}
			_, rcv := queues(t, r.e)
			f := frame{from: "engine", src: r.engine.LocalAddr().(*net.TCPAddr).AddrPort(), dst: r.e.LocalAddr().(*net.TCPAddr).AddrPort(),
				flags: 16, seq: rcv + 2000, win: 100, options: ts, payload: []byte("5\r\nhello\r\n")}
			if prepare != nil {
				prepare(t, r, &f)
			}
			written, _ := queues(t, r.c)
			sent, _ := queues(t, r.e)
			verdict, _, _ := w.run(&f, f.bytes())
			m := w.m
			if want != "" {
				if verdict != -1 || m.word != word(stateArmed, 0, 0, 0) || Why(m.refused).String() != want || m.packets != 0 {
					t.Fatalf("verdict %d, %s, refused %q, want %q", verdict, stateNames[wordState(m.word)], Why(m.refused), want)
				}
				return
			}
			if verdict != 7 || m.refused != 0 || m.packets != 1 {
				t.Fatalf("verdict %d, %s, refused %q", verdict, stateNames[wordState(m.word)], Why(m.refused))
			}
			if m.eStart != f.seq || wordNext(m.word) != f.seq+uint32(len(f.payload)) || m.cStart != written+1000 || m.una != m.cStart ||
				w.s.conns[w.cid].base != 1000 || m.eBase != 2000 || m.eSnd != sent || m.ts != 1 || m.sack != 1 {
				t.Fatalf("%+v; the client's socket has written %d, the engine's %d", *m, written, sent)
			}
			check(t, m)
		})
	}
	down := func(t *testing.T) {
		if err := netlink.LinkSetDown(lo); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { netlink.LinkSetUp(lo) })
	}
	state := func(want uint32, due uint32) func(t *testing.T, m *splice) {
		return func(t *testing.T, m *splice) {
			if wordState(m.word) != want || w.s.conns[w.cid].due != due {
				t.Fatalf("%s, client due %d", stateNames[wordState(m.word)], w.s.conns[w.cid].due)
			}
		}
	}
	f("quiet", "", nil, state(stateActive, 0))
	f("the whole body at once", "", func(t *testing.T, r sockets, f *frame) {
		f.payload = []byte("5\r\nhello\r\n0\r\n\r\n")
	}, state(stateDone, 0))
	f("the client owes acknowledgements", "", func(t *testing.T, r sockets, f *frame) {
		down(t)
		write(t, r.c, "HEAD")
	}, state(stateActive, 1))
	f("bytes not read", "unread", func(t *testing.T, r sockets, f *frame) {
		write(t, r.engine, "more")
		f.seq += 4
		time.Sleep(20 * time.Millisecond)
	}, nil)
	f("a packet the socket has had", "order", func(t *testing.T, r sockets, f *frame) { f.seq -= 4 }, nil)
	f("a gap before the packet", "order", func(t *testing.T, r sockets, f *frame) { f.seq++ }, nil)
	f("bytes out of order", "held", func(t *testing.T, r sockets, f *frame) {
		// With a shift too small by 100 the engine's bytes reach the socket
		// 100 ahead of their place.
		at := s.conns[w.eid].shift
		s.conns[w.eid].shift = ^uint32(99)
		s.conns[w.eid].splice, s.conns[w.cid].splice = 0, 0
		if err := s.Attach(1, false, true); err != nil {
			t.Fatal(err)
		}
		write(t, r.engine, "out of order")
		time.Sleep(20 * time.Millisecond)
		s.Detach(1)
		s.conns[w.eid].shift = at
		s.conns[w.eid].splice, s.conns[w.cid].splice = w.id, w.id
	}, nil)
	f("a segment too large for the client", "mss", func(t *testing.T, r sockets, f *frame) {
		f.payload = append([]byte("1000\r\n"), make([]byte, 1443)...)
	}, nil)
	f("the largest segment for the client", "", func(t *testing.T, r sockets, f *frame) {
		f.payload = append([]byte("1000\r\n"), make([]byte, 1442)...)
	}, state(stateActive, 0))
	f("the request is on its way", "request", func(t *testing.T, r sockets, f *frame) {
		down(t)
		write(t, r.e, "more request")
	}, nil)
	f("no timestamps on the packet", "timestamps", func(t *testing.T, r sockets, f *frame) { f.options = nil }, nil)
	f("an option", "options", func(t *testing.T, r sockets, f *frame) { f.options = append(f.options, 30, 4, 0, 0) }, nil)
	f("a FIN", "flags", func(t *testing.T, r sockets, f *frame) { f.flags |= 1 }, nil)
	f("broken framing", "frames", func(t *testing.T, r sockets, f *frame) { f.payload = []byte("HTTP") }, nil)
	f("more than the body", "surplus", func(t *testing.T, r sockets, f *frame) { f.payload = []byte("0\r\n\r\nHTTP") }, nil)
	f("the engine has closed", "socket", func(t *testing.T, r sockets, f *frame) {
		r.engine.Close()
		time.Sleep(20 * time.Millisecond)
	}, nil)
	f("the client has closed", "socket", func(t *testing.T, r sockets, f *frame) {
		r.client.Close()
		time.Sleep(20 * time.Millisecond)
	}, nil)
	f("the client has been closed", "socket", func(t *testing.T, r sockets, f *frame) {
		r.c.SetLinger(0)
		n, _ := r.c.SyscallConn()
		n.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}, nil)
}

// queues returns the sequence numbers at the ends of a socket's two queues:
// write_seq and rcv_nxt.
func queues(t *testing.T, c *net.TCPConn) (written, received uint32) {
	t.Helper()
	s := fd(t, c)
	if err := unix.SetsockoptInt(s, unix.SOL_TCP, unix.TCP_REPAIR, 1); err != nil {
		return 0, 0 // closed
	}
	defer unix.SetsockoptInt(s, unix.SOL_TCP, unix.TCP_REPAIR, -1)
	for queue, n := range []*uint32{1: &received, 2: &written} {
		if n == nil {
			continue
		}
		unix.SetsockoptInt(s, unix.SOL_TCP, unix.TCP_REPAIR_QUEUE, queue)
		v, err := unix.GetsockoptInt(s, unix.SOL_TCP, unix.TCP_QUEUE_SEQ)
		if err != nil {
			t.Fatal(err)
		}
		*n = uint32(v)
	}
	return written, received
}

// TestClocks: the client's clock continues the engine connection's, whatever
// the client's shows, and an echo comes back in the client's own time.
func TestClocks(t *testing.T) {
	s := newSplicer(t, Options{MaxSplices: 16})
	w := newWorld(t, s)
	const offset = 77 // of the engine's socket
	begin := func(floor uint32) {
		w.pair()
		*w.m = splice{client: w.cid, engine: w.eid, eStart: 1000, cStart: 5000, una: 5000, cRcv: 700, ts: 1, mss: 1460,
			tsBack: offset, word: word(stateActive, uint32(indexOf(t, stepNames, "data")), 1000, 1100)}
		if floor != 0 {
			w.s.conns[w.eid].tsFloor, w.s.conns[w.eid].tsKnown = floor, 1
		}
	}
	stamps := func(line string) (value, echo uint32) {
		f := w.parse(line)
		verdict, b, _ := w.run(&f, f.bytes())
		if verdict != 7 {
			t.Fatalf("%q: verdict %d", line, verdict)
		}
		return binary.BigEndian.Uint32(b[14+20+20+4:]), binary.BigEndian.Uint32(b[14+20+20+8:])
	}
	w.t = t
	for _, client := range []uint32{4000, 0, 0xfffffff0} {
		begin(0)
		var now unix.Timespec
		unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		first, _ := stamps(fmt.Sprintf("client seq=700 ack=5050 ts=%d/1", client))
		if late := first - offset - uint32(now.Nano()/1e6); late > 5000 {
			t.Fatalf("client's clock at %d: the engine gets %d, %d ms off", client, first, int32(late))
		}
		if next, _ := stamps(fmt.Sprintf("client seq=700 ack=5060 ts=%d/1", client+30)); next != first+30 {
			t.Fatalf("30 ms later: %d after %d", next, first)
		}
		if _, echo := stamps(fmt.Sprintf("engine seq=1100 ack=300 len=10 ts=1/%d", first+30)); echo != client+30 {
			t.Fatalf("echo of %d is %d", client+30, echo)
		}
	}
	// The engine's socket has sent something from later than now.
	var now unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	floor := uint32(now.Nano()/1e6) + 1e6
	begin(floor)
	if first, _ := stamps("client seq=700 ack=5050 ts=4000/1"); first != floor {
		t.Fatalf("%d after %d", first, floor)
	}
}

// TestNewConnectionsAreNoted: SYN-ACKs tell how a connection looks on the wire
// and by which interfaces it comes and goes.
func TestNewConnectionsAreNoted(t *testing.T) {
	s := newSplicer(t, Options{MaxSplices: 16})
	for _, v6 := range []bool{false, true} {
		w := newWorld(t, s)
		w.t, w.v6 = t, v6
		in := w.parse("engine seq=1 ack=1 flags=SA")
		w.run(&in, in.bytes())
		arrived := newTuple(address("engine", v6), address("E", v6))
		var ifindex uint32
		if err := s.arrivals.Lookup(unsafe.Pointer(&arrived), unsafe.Pointer(&ifindex)); err != nil || ifindex != 1 {
			t.Fatalf("%s arrived at interface %d, %v", arrived, ifindex, err)
		}
		out := w.parse("C seq=1 ack=1 flags=SA")
		w.run(&out, out.bytes())
		left := newTuple(address("client", v6), address("C", v6))
		var cookie uint64
		var on wire
		seen := 0
		for all := s.wires.Iterate(); all.Next(&cookie, unsafe.Pointer(&on)); {
			if on == (wire{left, 1}) {
				seen++
			}
		}
		if seen != 1 {
			t.Fatalf("%s left %d times", left, seen)
		}
	}
}

// TestTailAfterArmingAgain: what was carried stays known when the splice is
// offered again and userspace takes it back.
func TestTailAfterArmingAgain(t *testing.T) {
	s := newSplicer(t, Options{MaxSplices: 16})
	w := newWorld(t, s)
	w.t = t
	w.pair()
	*w.m = splice{client: w.cid, engine: w.eid, eStart: 1000, cStart: 5000, una: 5000, cRcv: 700, ts: 1, mss: 1460,
		tsBackKnown: 1, word: word(stateActive, uint32(indexOf(t, stepNames, "data")), 1000, 1000)}
	var out strings.Builder
	w.send(`engine seq=1000 ack=300 data="carried"`, &out)
	w.send(`client seq=700 ack=5007`, &out)
	w.send(`engine seq=1007 ack=300 flags=AU data="urgent"`, &out)
	p := &Splice{s: s, id: w.id, m: w.m}
	if b := p.AppendTail(nil); string(b) != "carried" {
		t.Fatalf("%s tail after the pause: %q", out.String(), b)
	}
	if !p.Arm(3, 900, false) {
		t.Fatal("not armed")
	}
	if b := p.AppendTail(nil); string(b) != "carried" {
		t.Errorf("tail of the armed splice: %d bytes, %.40q", len(b), b)
	}
	if _, left, carried, h := p.Take(); h != Here || left != 900 || carried {
		t.Fatalf("taken back: %d left, carried %v, held by %d", left, carried, h)
	}
	if b := p.AppendTail(nil); string(b) != "carried" {
		t.Errorf("tail after taking it back: %d bytes, %.40q", len(b), b)
	}
}
