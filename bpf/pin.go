package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf/link"
)

// Pin pins programs and maps below dir, and every link made later by Attach,
// so that they outlive a killed agent until its sockets are closed. dir must
// be on a BPF file system. Call it before Attach.
func (s *Splicer) Pin(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("pin directory: %w", err)
	}
	for _, c := range s.colls {
		for name, p := range c.Programs {
			if err := p.Pin(filepath.Join(dir, "program_"+name)); err != nil {
				return fmt.Errorf("pin program %s: %w", name, err)
			}
		}
	}
	for name, m := range s.colls[0].Maps {
		if name[0] == '.' {
			continue
		}
		if err := m.Pin(filepath.Join(dir, "map_"+name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	s.pinDir = dir
	return nil
}

// Unpin removes what Pin left in dir, this agent's or an earlier one's. Links
// that were pinned there detach.
func Unpin(dir string) error {
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := os.Remove(filepath.Join(dir, n.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return os.Remove(dir)
}

// Defunct reports whether dir holds links that Pin's Splicer has made and none
// of them is attached any more, because their network namespace is gone.
func Defunct(dir string) bool {
	names, err := filepath.Glob(filepath.Join(dir, "link_*"))
	if err != nil || len(names) == 0 {
		return false
	}
	for _, name := range names {
		l, err := link.LoadPinnedLink(name, nil)
		if err != nil {
			return false
		}
		info, err := l.Info()
		l.Close()
		if err != nil || info.TCX() == nil || info.TCX().Ifindex != 0 {
			return false
		}
	}
	return true
}
