package agent

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/proxy"
)

// DatapathConfig says which datapath tier to use and how.
type DatapathConfig struct {
	// Mode is auto, packet or copy. A forced packet tier that cannot be had is
	// an error; auto falls back to copy and says why.
	Mode string `yaml:"mode"`
	// Interfaces to attach to, names and globs; by default loopback and every
	// interface that carries a route to an engine or a client.
	Interfaces []string `yaml:"interfaces"`
	// Hook is auto, tcx (Linux 6.6) or clsact.
	Hook string `yaml:"hook"`
	// Loop is auto, bpf_loop (Linux 5.17) or bounded.
	Loop string `yaml:"loop"`
	// MaxSplices bounds the responses the kernel carries at one time.
	MaxSplices int `yaml:"max_splices"`
	// PinDir is a directory on a BPF file system; "" is /sys/fs/bpf, mounted
	// if it is not.
	PinDir string `yaml:"pin_dir"`
}

// grace is how long the programs of an agent that was killed stay attached,
// for its sockets to be closed with the right numbers: as long as TIME_WAIT. A
// client that has not taken what was left for it by then loses it.
const grace = 60 * time.Second

// datapath is the tier in use, and in the packet tier the life of the BPF
// programs: loaded, pinned, proven by a self-test, attached to interfaces as
// they come, detached at the end. Its methods may be called from any goroutine.
type datapath struct {
	cfg    DatapathConfig
	log    *slog.Logger
	tier   string
	reason string

	// What follows is nil or zero in the copy tier.
	splicer *bpf.Splicer
	hook    string
	loop    string
	id      string   // names this agent's pins and filters
	claim   net.Conn // holds the name while the agent lives
	pins    string
	watch   *interfaceWatch
	old     sync.WaitGroup // removal of what killed agents left
	cancel  context.CancelFunc

	// replicas tells whose slots are whose, and what was copied of their streams, for
	// metrics. Set by the agent.
	replicas func() []streams
}

// openDatapath finds the best tier the machine and cfg.Mode allow.
func openDatapath(ctx context.Context, cfg DatapathConfig, log *slog.Logger) (*datapath, error) {
	d := &datapath{cfg: cfg, log: log}
	if cfg.Mode == "copy" {
		d.tier, d.reason = "copy", "forced by configuration"
		return d, nil
	}
	err := d.openPacket(ctx)
	if err == nil {
		d.tier = "packet"
		d.reason = fmt.Sprintf("self-test passed; %s, %s", d.hook, d.loop)
		return d, nil
	}
	d.Close()
	if cfg.Mode == "packet" {
		return nil, fmt.Errorf("datapath packet cannot be had: %w", err)
	}
	return &datapath{cfg: cfg, log: log, tier: "copy", reason: err.Error()}, nil
}

func (d *datapath) openPacket(ctx context.Context) error {
	if err := bpf.Probe(); err != nil {
		return err
	}
	o := bpf.Options{MaxSplices: d.cfg.MaxSplices}
	d.loop = "bpf_loop"
	switch haveLoop := bpf.HaveLoop(); {
	case d.cfg.Loop == "bounded" || d.cfg.Loop != "bpf_loop" && !haveLoop:
		d.loop, o.BoundedLoop = "bounded loop", true
	case !haveLoop:
		return errors.New("datapath.loop bpf_loop: this kernel has no bpf_loop (5.17)")
	}
	var random [4]byte
	rand.Read(random[:])
	d.id = hex.EncodeToString(random[:])
	// The lower half stays clear: kube-proxy drops (0x8000) and masquerades
	// (0x4000) by bits there, and other network plugins have theirs.
	o.Mark = 0x10000000 | uint32(binary.LittleEndian.Uint16(random[:]))<<12&^0xf000 | 1

	root, err := pinRoot(d.cfg.PinDir)
	if err != nil {
		return err
	}
	if d.claim, err = claimName(d.id); err != nil {
		return fmt.Errorf("claim a name for the pins: %w", err)
	}
	ctx, d.cancel = context.WithCancel(ctx)
	d.clearRemains(ctx, root)
	if d.splicer, err = bpf.Load(o); err != nil {
		return fmt.Errorf("load BPF programs: %w", err)
	}
	a, err := newAttacher(d.splicer, d.cfg.Hook, d.id)
	if err != nil {
		return err
	}
	d.hook = a.hook
	if d.hook == "tcx" {
		// clsact filters stay by themselves when the agent is killed.
		d.pins = filepath.Join(root, d.id)
		if err := d.splicer.Pin(d.pins); err != nil {
			return err
		}
	}
	openLoopback(d.log)
	if d.watch, err = watchInterfaces(ctx, a, d.cfg.Interfaces, d.log); err != nil {
		return err
	}
	if err := d.watch.withLoopback(d.splicer.SelfTest); err != nil {
		return err
	}
	return nil
}

// Close detaches and frees everything.
func (d *datapath) Close() error {
	if d.cancel != nil {
		d.cancel()
	}
	closed := d.splicer == nil || d.splicer.LetClose()
	if d.watch != nil {
		d.watch.stop()
		if closed {
			d.watch.detach()
		}
	}
	var err error
	switch {
	case d.splicer == nil:
	case closed:
		err = d.splicer.Close()
	default:
		d.log.Warn("clients are still receiving; the programs stay attached for their sake, until the next start",
			"agent", d.id)
		d.splicer.Abandon()
		d.pins = ""
	}
	d.old.Wait()
	if d.pins != "" {
		os.Remove(filepath.Dir(d.pins)) // if no other agent has pins there
	}
	if d.claim != nil {
		d.claim.Close()
	}
	return err
}

// Tier is packet or copy; Reason says why it is that one.
func (d *datapath) Tier() string   { return d.tier }
func (d *datapath) Reason() string { return d.reason }

// What word says of the copy tier.
const (
	copyForced      = "forced"
	copyUnavailable = "unavailable"
)

// word is the reason for the copy tier as a metric label.
func (d *datapath) word() string {
	if d.cfg.Mode == "copy" {
		return copyForced
	}
	return copyUnavailable
}

// Engines tells the datapath where engines are, so that the interfaces that
// lead to them are watched.
func (d *datapath) Engines(addrs []netip.AddrPort) {
	if d.watch != nil {
		d.watch.setEngines(addrs)
	}
}

// Joiner is what the proxy joins responses with; nil in the copy tier.
func (d *datapath) Joiner() proxy.Joiner {
	if d.splicer == nil {
		return nil
	}
	return joiner{d.splicer, d}
}

// pinRoot returns the directory for the pins of all agents in this network
// namespace, on a BPF file system.
func pinRoot(dir string) (string, error) {
	var ns unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &ns); err != nil {
		return "", fmt.Errorf("stat the network namespace: %w", err)
	}
	if dir == "" {
		dir = "/sys/fs/bpf"
		if !isBPFFS(dir) {
			if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
				return "", fmt.Errorf("no BPF file system at %s and it cannot be mounted (mount one, or set datapath.pin_dir): %w", dir, err)
			}
		}
	} else if !isBPFFS(dir) {
		return "", fmt.Errorf("datapath.pin_dir %s is not on a BPF file system", dir)
	}
	root := filepath.Join(dir, "inferrail", fmt.Sprintf("net-%d", ns.Ino))
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", fmt.Errorf("pin directory: %w", err)
	}
	return root, nil
}

func isBPFFS(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == unix.BPF_FS_MAGIC
}

// claimName binds an abstract socket, which lives in the network namespace as
// the programs do and vanishes with the process.
func claimName(id string) (net.Conn, error) {
	return net.ListenUnixgram("unixgram", &net.UnixAddr{Name: "@inferrail-" + id, Net: "unixgram"})
}

// clearRemains finds what agents that were killed have left. What belongs to
// this network namespace stays until grace has passed, or this agent ends: the
// kernel may still be closing their sockets. A living agent's is left alone.
// What belongs to a namespace that is gone is removed at once.
func (d *datapath) clearRemains(ctx context.Context, root string) {
	others, _ := filepath.Glob(filepath.Join(filepath.Dir(root), "net-*", "*"))
	ids := filterIDs()
	for _, dir := range others {
		if filepath.Dir(dir) == root {
			ids = append(ids, filepath.Base(dir))
		} else if bpf.Defunct(dir) {
			if err := bpf.Unpin(dir); err != nil {
				d.log.Warn("cannot remove the pins of a killed agent", "dir", dir, "err", err)
			}
		}
	}
	namespaces, _ := filepath.Glob(filepath.Join(filepath.Dir(root), "net-*"))
	for _, dir := range namespaces {
		if dir != root {
			os.Remove(dir) // if it is empty
		}
	}
	ids = slices.DeleteFunc(ids, func(id string) bool {
		c, err := claimName(id)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	if len(ids) == 0 {
		return
	}
	d.log.Info("programs of a killed agent found; they are removed when its connections are closed", "agents", ids, "after", grace)
	d.old.Go(func() {
		select {
		case <-ctx.Done():
		case <-time.After(grace):
		}
		for _, id := range ids {
			if err := bpf.Unpin(filepath.Join(root, id)); err != nil {
				d.log.Warn("cannot remove the pins of a killed agent", "agent", id, "err", err)
			}
			if err := removeFilters(filterName(id)); err != nil {
				d.log.Warn("cannot remove the filters of a killed agent", "agent", id, "err", err)
			}
		}
	})
}

// openLoopback lets packets that the programs redirect to the loopback device
// be routed to local sockets. Only packets on that device are concerned, and
// only this host can put any there. Where it cannot be set, a packet is still
// delivered by the socket's cached route; the self-test tells.
func openLoopback(log *slog.Logger) {
	for _, name := range []string{"route_localnet", "accept_local"} {
		path := "/proc/sys/net/ipv4/conf/lo/" + name
		if err := os.WriteFile(path, []byte("1"), 0o644); err != nil {
			log.Debug("cannot set a sysctl of the loopback device", "path", path, "err", err)
		}
	}
}
