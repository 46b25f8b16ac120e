package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/inferrail/inferrail/simulator"
)

var names = strings.Fields("wordL wordH client engine fixed gen cBase eBase cStart eStart cRcv eSnd una cDue eDue ts tsOut tsBack tsBackKnown tsClient mss sack window cs1 cs2 es1 es2 refused pad bytesL bytesH packetsL packetsH chunksL chunksH")

func TestDbg(t *testing.T) {
	l := newLab(t, labOptions{loss: 0.02, reorder: 0, noOffload: true})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	var pcap *exec.Cmd
	l.in(l.proxy, func() { pcap = exec.Command("tcpdump", "-i", "any", "-s", "100", "-w", "/tmp/dbg.pcap", "tcp"); pcap.Start() })
	defer pcap.Process.Kill()
	time.Sleep(500*time.Millisecond)
	c, err := l.dial(n.addr)
	if err != nil { t.Fatal(err) }
	br := bufio.NewReader(c)
	for i := range 200 {
		r := simulator.Raw{Seed: uint64(i), Chunks: 60, Max: 800, IntervalUS: 1000}
		c.SetDeadline(time.Now().Add(5 * time.Second))
		ask(c, r)
		if err := receive(br, r); err != nil {
			fmt.Println(i, c.LocalAddr(), err)
			ms, _ := filepath.Glob("/sys/fs/bpf/inferrail/*/*/map_splices")
			for _, p := range ms {
				m, err := ebpf.LoadPinnedMap(p, nil)
				if err != nil { continue }
				b := make([]byte, m.ValueSize())
				for k := uint32(1); k < 300; k++ {
					m.Lookup(k, b)
					if w := binary.LittleEndian.Uint32(b) & 7; w != 0 {
						fmt.Print("splice ", k, " state ", w, " ")
						for j, nme := range names { fmt.Printf("%s=%d ", nme, binary.LittleEndian.Uint32(b[4*j:])) }
						fmt.Println()
					}
				}
			}
			for _, h := range []struct{n string; f func(func())}{{"client", func(f func()){l.in(l.client,f)}},{"proxy", func(f func()){l.in(l.proxy,f)}},{"engine", func(f func()){l.in(l.engine,f)}}} {
				h.f(func(){ o,_ := exec.Command("ss","-tino").CombinedOutput(); fmt.Println(h.n, string(o)) })
			}
			os.Stdout.Sync()
			return
		}
	}
}
