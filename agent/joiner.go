package agent

import (
	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/proxy"
)

// joiner is the proxy's view of the Splicer.
type joiner struct {
	s *bpf.Splicer
	d *datapath
}

// Enter implements proxy.Joiner.
func (j joiner) Enter(fd, engine int) (uint32, string) { return j.s.Enter(fd, engine) }

// Leave implements proxy.Joiner.
func (j joiner) Leave(handle uint32) { j.s.Leave(handle) }

// Segment implements proxy.Joiner.
func (j joiner) Segment(v6 bool) int { return j.d.watch.segment(v6) }

// Join implements proxy.Joiner.
func (j joiner) Join(client, engine uint32, changed func()) (proxy.Splice, string) {
	p, why := j.s.Join(client, engine, changed)
	if p == nil {
		return nil, why
	}
	return &joined{p: p}, ""
}

// joined is the proxy's view of one Splice. frames is what the proxy knows of
// the framing, so that Take can give back what it did not move.
type joined struct {
	p      *bpf.Splice
	frames proxy.Frames
}

func (j *joined) Arm(f proxy.Frames) bool {
	j.frames = f
	return j.p.Arm(uint8(f.Step), f.Left, f.Fixed)
}

func (j *joined) Take() (proxy.Frames, proxy.Hold) {
	step, left, carried, h := j.p.Take()
	if carried {
		j.frames.Step, j.frames.Left = proxy.Step(step), left
	}
	switch h {
	case bpf.Kernel:
		return j.frames, proxy.HeldByKernel
	case bpf.Ended:
		return j.frames, proxy.HeldEnded
	}
	return j.frames, proxy.HeldHere
}

func (j *joined) Stop()         { j.p.Stop() }
func (j *joined) Settled() bool { return j.p.Settled() }
func (j *joined) Part()         { j.p.Part() }

func (j *joined) Carried(tail []byte) (proxy.Carried, []byte) {
	st := j.p.Stats()
	return proxy.Carried{
		Bytes: st.Bytes, Packets: st.Packets, Chunks: st.Chunks, Refused: st.Refused.String(), Stale: st.Stale, Stalled: st.Stalled,
	}, j.p.AppendTail(tail)
}
