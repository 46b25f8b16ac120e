package bpf

import (
	"fmt"
	"io"
	"net"
	"time"
)

// SelfTest sends a small response through the programs on the loopback
// device, which must be attached, and fails if it does not arrive whole or
// not through the kernel. What the probes say about features, this says about
// the machine.
func (s *Splicer) SelfTest() error {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			if addr[0] == '[' {
				continue // no IPv6 here
			}
			return fmt.Errorf("self-test: %w", err)
		}
		err = s.selfTest(ln)
		ln.Close()
		if err != nil {
			return fmt.Errorf("self-test on %s: %w", ln.Addr(), err)
		}
	}
	return nil
}

func (s *Splicer) selfTest(ln net.Listener) error {
	var socks [4]*net.TCPConn // client's, proxy's to it, proxy's to the engine, engine's
	deadline := time.Now().Add(3 * time.Second)
	for i := 0; i < 4; i += 2 {
		d, err := net.DialTimeout("tcp", ln.Addr().String(), time.Second)
		if err != nil {
			return err
		}
		defer d.Close()
		a, err := ln.Accept()
		if err != nil {
			return err
		}
		defer a.Close()
		d.SetDeadline(deadline)
		a.SetDeadline(deadline)
		socks[i], socks[i+1] = d.(*net.TCPConn), a.(*net.TCPConn)
	}
	client, c, e, engine := socks[0], socks[1], socks[2], socks[3]
	cid, why := s.enterConn(c, -1)
	if cid == 0 {
		return fmt.Errorf("client connection not entered: %s", why)
	}
	defer s.Leave(cid)
	eid, why := s.enterConn(e, selfTestSlot)
	if eid == 0 {
		return fmt.Errorf("engine connection not entered: %s", why)
	}
	defer s.Leave(eid)
	settled := make(chan bool, 4)
	p, why := s.Join(cid, eid, func() {
		select {
		case settled <- true:
		default:
		}
	})
	if p == nil {
		return fmt.Errorf("not joined: %s", why)
	}
	defer p.Part()
	p.Arm(0, 0, false)
	const body = "5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
	for i := 0; i < len(body); i += 8 {
		if _, err := io.WriteString(engine, body[i:min(i+8, len(body))]); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	got := make([]byte, len(body))
	if n, err := io.ReadFull(client, got); err != nil {
		return fmt.Errorf("client received %d of %d bytes: %w", n, len(body), err)
	}
	if string(got) != body {
		return fmt.Errorf("client received %q", got)
	}
	select {
	case <-settled:
	case <-time.After(time.Until(deadline)):
		return fmt.Errorf("no event from the kernel")
	}
	if st := p.Stats(); st.Bytes != uint64(len(body)) {
		return fmt.Errorf("the kernel carried %d of %d bytes, last refusal %q", st.Bytes, len(body), st.Refused)
	}
	if _, err := io.WriteString(c, "after"); err != nil {
		return err
	}
	if _, err := io.ReadFull(client, got[:5]); err != nil || string(got[:5]) != "after" {
		return fmt.Errorf("client received %q after the response: %w", got[:5], err)
	}
	return nil
}

// selfTestSlot is no engine's slot.
const selfTestSlot = 1 << 30

func (s *Splicer) enterConn(c *net.TCPConn, engine int) (id uint32, why string) {
	rc, err := c.SyscallConn()
	if err != nil {
		return 0, WhySystem
	}
	rc.Control(func(fd uintptr) { id, why = s.Enter(int(fd), engine) })
	return id, why
}
