package proxy

import (
	"bytes"
	"net"
	"testing"

	"github.com/inferrail/inferrail/policy"
)

// BenchmarkShortAnswer is one client fetching small answers over one kept
// connection: what an exchange costs beside its relaying. The client and the
// engine allocate nothing, so allocations are the proxy's.
//
//	go test -bench ShortAnswer -run xxx ./proxy
func BenchmarkShortAnswer(b *testing.B) {
	el, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer el.Close()
	response := []byte(fixed(`{"ok":true}`))
	go func() {
		for {
			c, err := el.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 4096)
				for n := 0; ; {
					k, err := c.Read(buf[n:])
					if err != nil {
						return
					}
					// A request ends with the body's brace.
					if n += k; buf[n-1] == '}' {
						n = 0
						c.Write(response)
					}
				}
			}()
		}
	}()
	replica, err := NewReplica(0, "e", "http://"+el.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	s := New(Limits{}, nil, nil)
	m := &Model{Name: "m", Policy: policy.LeastRequest{}, Replicas: []*Replica{replica}}
	s.SetFleet(&Fleet{Models: map[string]*Model{"m": m}, Listed: []*Model{m}})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go s.Serve(l)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	request, buf := []byte(post(hello)), make([]byte, 4096)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Write(request); err != nil {
			b.Fatal(err)
		}
		for n := 0; !bytes.HasSuffix(buf[:n], []byte(`{"ok":true}`)); {
			k, err := c.Read(buf[n:])
			if err != nil {
				b.Fatal(err)
			}
			n += k
		}
	}
	c.Close()
	s.Shutdown(b.Context())
	replica.Close()
}
