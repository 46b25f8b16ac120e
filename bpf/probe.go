package bpf

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
)

// probeSpec is the smallest program of the kind the splice is made of.
func probeSpec() *ebpf.ProgramSpec {
	return &ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		License:      "Dual MIT/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	}
}

// Probe reports whether this process may load a trivial TC program. The error
// says what is missing.
func Probe() error {
	p, err := ebpf.NewProgram(probeSpec())
	if err != nil {
		return fmt.Errorf("cannot load a BPF program (CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON are needed): %w", err)
	}
	return p.Close()
}

// HaveLoop reports whether the kernel has bpf_loop (5.17).
func HaveLoop() bool {
	return features.HaveProgramHelper(ebpf.SchedCLS, asm.FnLoop) == nil
}
