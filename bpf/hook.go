package bpf

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Attach attaches the programs to an interface through tcx (Linux 6.6). The
// error wraps ErrNotSupported on older kernels. Attaching twice does nothing.
func (s *Splicer) Attach(ifindex int, layer3, loopback bool) error {
	d := newDevice(layer3, loopback)
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.devices[uint32(ifindex)]; ok {
		return nil
	}
	in, out := s.hooks(layer3)
	for name, a := range map[string]link.TCXOptions{
		"ingress": {Program: in, Attach: ebpf.AttachTCXIngress},
		"egress":  {Program: out, Attach: ebpf.AttachTCXEgress},
	} {
		a.Interface = ifindex
		// The programs stand where the wire is: first in, last out.
		a.Anchor = link.Head()
		if name == "egress" {
			a.Anchor = link.Tail()
		}
		l, err := link.AttachTCX(a)
		if err != nil {
			closeLinks(d.links)
			return fmt.Errorf("attach tcx %s to interface %d: %w", name, ifindex, err)
		}
		d.links = append(d.links, l)
		if s.pinDir != "" {
			if err := l.Pin(filepath.Join(s.pinDir, "link_"+strconv.Itoa(ifindex)+"_"+name)); err != nil {
				closeLinks(d.links)
				return fmt.Errorf("pin tcx link of interface %d: %w", ifindex, err)
			}
		}
	}
	s.devices[uint32(ifindex)] = d
	return nil
}

// Programs returns the descriptors of the two programs for an interface, for a
// caller that attaches them itself (clsact filters on kernels before 6.6) and
// then calls Attached. They stay owned by the Splicer.
func (s *Splicer) Programs(layer3 bool) (ingress, egress int) {
	in, out := s.hooks(layer3)
	return in.FD(), out.FD()
}

// Attached notes that the caller has attached the programs to an interface.
func (s *Splicer) Attached(ifindex int, layer3, loopback bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.devices[uint32(ifindex)] = newDevice(layer3, loopback)
}

// Detach detaches the programs from an interface, or notes that it is gone.
func (s *Splicer) Detach(ifindex int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	closeLinks(s.devices[uint32(ifindex)].links)
	delete(s.devices, uint32(ifindex))
}

func newDevice(layer3, loopback bool) (d device) {
	if layer3 {
		d.flags |= connLayer3
	}
	if loopback {
		d.flags |= connLoopback
	}
	return d
}

func (s *Splicer) hooks(layer3 bool) (ingress, egress *ebpf.Program) {
	if layer3 {
		return s.programs[ingressLayer3], s.programs[egressLayer3]
	}
	return s.programs[ingressEthernet], s.programs[egressEthernet]
}

func closeLinks(links []link.Link) {
	for _, l := range links {
		l.Unpin()
		l.Close()
	}
}
