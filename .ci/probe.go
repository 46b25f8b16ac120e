//go:build ignore

// probe exits 0 when this process may load a BPF program, whatever the
// product's own programs look like.
package main

import (
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

func main() {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		License:      "Dual MIT/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		fmt.Println("BPF programs cannot be loaded here:", err)
		os.Exit(1)
	}
	prog.Close()
	fmt.Println("BPF programs can be loaded here")
}
