package agent

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"net/netip"
	"path"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/bpf"
)

// attacher puts the programs on interfaces: through tcx, or as clsact filters
// on kernels before 6.6.
type attacher struct {
	s    *bpf.Splicer
	hook string
	name string // of the clsact filters
}

// newAttacher decides for a hook by trying it on the loopback device.
func newAttacher(s *bpf.Splicer, hook, id string) (*attacher, error) {
	a := &attacher{s: s, hook: hook, name: filterName(id)}
	if hook != "" && hook != "auto" {
		return a, nil
	}
	a.hook = "tcx"
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find the loopback device: %w", err)
	}
	err = s.Attach(lo.Attrs().Index, false, true)
	s.Detach(lo.Attrs().Index)
	if errors.Is(err, bpf.ErrNotSupported) {
		a.hook = "clsact"
		return a, nil
	}
	return a, err
}

func (a *attacher) attach(l device) error {
	if a.hook == "tcx" {
		return a.s.Attach(l.index, l.layer3, l.loopback)
	}
	link, err := netlink.LinkByIndex(l.index)
	if err != nil {
		return err
	}
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact qdisc to %s: %w", link.Attrs().Name, err)
	}
	in, out := a.s.Programs(l.layer3)
	for _, f := range []struct {
		parent uint32
		fd     int
	}{{netlink.HANDLE_MIN_INGRESS, in}, {netlink.HANDLE_MIN_EGRESS, out}} {
		filter := &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: l.index, Parent: f.parent, Protocol: unix.ETH_P_ALL, Priority: 1,
				// Filters of one priority need different handles.
				Handle: crc32.ChecksumIEEE([]byte(a.name))&0x7fffffff | 1,
			},
			Fd: f.fd, Name: a.name, DirectAction: true,
		}
		if err := netlink.FilterAdd(filter); err != nil {
			removeFiltersFrom(link, a.name) // half a pair is worse than none
			return fmt.Errorf("add clsact filter to %s: %w", link.Attrs().Name, err)
		}
	}
	a.s.Attached(l.index, l.layer3, l.loopback)
	return nil
}

func (a *attacher) detach(index int) {
	a.s.Detach(index)
	if a.hook != "tcx" {
		if l, err := netlink.LinkByIndex(index); err == nil {
			removeFiltersFrom(l, a.name)
		}
	}
}

const filterPrefix = "inferrail-"

func filterName(id string) string { return filterPrefix + id }

// filterIDs lists the agents whose clsact filters are on some interface.
func filterIDs() (ids []string) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil
	}
	for _, l := range links {
		for _, f := range ourFilters(l) {
			if id := strings.TrimPrefix(f.Name, filterPrefix); !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// ourFilters are the clsact filters on an interface that any agent has made.
func ourFilters(l netlink.Link) (ours []*netlink.BpfFilter) {
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := netlink.FilterList(l, parent)
		if err != nil {
			continue // no clsact here
		}
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, filterPrefix) {
				ours = append(ours, b)
			}
		}
	}
	return ours
}

// removeFilters removes the clsact filters of that name from all interfaces.
func removeFilters(name string) error {
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		if e := removeFiltersFrom(l, name); e != nil {
			err = e
		}
	}
	return err
}

func removeFiltersFrom(l netlink.Link, name string) (err error) {
	for _, f := range ourFilters(l) {
		if f.Name == name {
			if e := netlink.FilterDel(f); e != nil {
				err = e
			}
		}
	}
	return err
}

// device is an interface as far as attaching goes.
type device struct {
	index    int
	name     string
	layer3   bool // packets have no link-layer header
	loopback bool
	up       bool
	mtu      int
}

func newDevice(l netlink.Link) device {
	a := l.Attrs()
	return device{
		index: a.Index, name: a.Name,
		loopback: a.EncapType == "loopback",
		layer3:   a.EncapType != "ether" && a.EncapType != "loopback",
		up:       a.Flags&unix.IFF_UP != 0,
		mtu:      a.MTU,
	}
}

// wanted chooses the interfaces to attach to: those whose name matches a
// pattern, or without patterns loopback and those that carry a route.
func wanted(all []device, patterns []string, routed map[int]bool) []device {
	var out []device
	for _, d := range all {
		ok := len(patterns) == 0 && (d.loopback || d.up && routed[d.index])
		for _, p := range patterns {
			if m, err := path.Match(p, d.name); err == nil && m {
				ok = true
			}
		}
		if ok {
			out = append(out, d)
		}
	}
	return out
}

// interfaceWatch keeps the programs attached to the wanted interfaces as these
// come and go. One goroutine of its own; close waits for it.
type interfaceWatch struct {
	a        *attacher
	patterns []string
	log      *slog.Logger
	cancel   context.CancelFunc
	wait     sync.WaitGroup
	kick     chan struct{}

	// mu guards what follows.
	mu       sync.Mutex
	engines  []netip.AddrPort
	attached map[int]device
	failed   map[string]string // interface name -> why it could not be attached
	warned   bool

	mtu atomic.Int32 // the smallest of the attached interfaces, 0 for none but loopback
}

func watchInterfaces(ctx context.Context, a *attacher, patterns []string, log *slog.Logger) (*interfaceWatch, error) {
	w := &interfaceWatch{
		a: a, patterns: patterns, log: log, kick: make(chan struct{}, 1),
		attached: make(map[int]device), failed: make(map[string]string),
	}
	if err := w.update(); err != nil {
		return nil, err
	}
	links, routes := make(chan netlink.LinkUpdate, 64), make(chan netlink.RouteUpdate, 64)
	ctx, w.cancel = context.WithCancel(ctx)
	if err := netlink.LinkSubscribe(links, ctx.Done()); err != nil {
		w.cancel()
		return nil, fmt.Errorf("watch interfaces: %w", err)
	}
	if err := netlink.RouteSubscribe(routes, ctx.Done()); err != nil {
		w.cancel()
		return nil, fmt.Errorf("watch routes: %w", err)
	}
	w.wait.Go(func() { w.run(ctx, links, routes) })
	return w, nil
}

// settle is how long news of interfaces are collected before acting on them;
// rescan makes up for news that were lost.
const (
	settle = 50 * time.Millisecond
	rescan = 10 * time.Second
)

func (w *interfaceWatch) run(ctx context.Context, links chan netlink.LinkUpdate, routes chan netlink.RouteUpdate) {
	tick := time.NewTicker(rescan)
	defer tick.Stop()
	var due <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case _, ok := <-links:
			if !ok {
				links = nil
			}
			w.changed()
			due = time.After(settle)
		case _, ok := <-routes:
			if !ok {
				routes = nil
			}
			w.changed()
			due = time.After(settle)
		case <-w.kick:
			due = time.After(0)
		case <-tick.C:
			due = time.After(0)
		case <-due:
			due = nil
			if err := w.update(); err != nil {
				w.log.Warn("cannot look at interfaces", "err", err)
			}
		}
	}
}

// changed tells the programs at once that packets may have to go elsewhere.
func (w *interfaceWatch) changed() {
	if err := w.a.s.RoutesChanged(); err != nil {
		w.log.Warn("the datapath may send by old routes", "err", err)
	}
}

// update attaches to what is wanted and not attached, and forgets what is gone.
func (w *interfaceWatch) update() error {
	list, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	all := make([]device, 0, len(list))
	for _, l := range list {
		all = append(all, newDevice(l))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	want := make(map[int]device)
	for _, d := range wanted(all, w.patterns, w.routedLocked()) {
		want[d.index] = d
	}
	exists := make(map[int]device, len(all))
	for _, d := range all {
		exists[d.index] = d
	}
	for index, d := range w.attached {
		// Only from what is gone. Connections that were spliced need the
		// programs for as long as they live: without them their sockets send
		// wrong numbers, and a route that is away for a second would cost
		// every client its connection or, worse, bytes.
		if now, ok := exists[index]; !ok || now.layer3 != d.layer3 {
			w.a.detach(index)
			delete(w.attached, index)
			w.log.Info("datapath detached", "interface", d.name)
			continue
		}
		w.attached[index] = exists[index]
	}
	for index, d := range want {
		if _, ok := w.attached[index]; ok {
			continue
		}
		if err := w.a.attach(d); err != nil {
			if w.failed[d.name] != err.Error() {
				w.failed[d.name] = err.Error()
				w.log.Warn("datapath cannot attach", "interface", d.name, "err", err)
			}
			continue
		}
		delete(w.failed, d.name)
		w.attached[index] = d
		w.log.Info("datapath attached", "interface", d.name, "hook", w.a.hook)
	}
	if len(w.attached) == 0 && !w.warned {
		w.warned = true
		w.log.Warn("the datapath has no interface to attach to yet, so responses are copied", "patterns", w.patterns)
	}
	smallest := 0
	for index := range w.attached {
		// The MTU may have changed since.
		d := exists[index]
		if !d.loopback && d.mtu > 0 && (smallest == 0 || d.mtu < smallest) {
			smallest = d.mtu
		}
	}
	w.mtu.Store(int32(smallest))
	return nil
}

// segment is the TCP payload, without options, that fits every attached
// interface; 0 when there is none but loopback.
func (w *interfaceWatch) segment(v6 bool) int {
	mtu := int(w.mtu.Load())
	switch {
	case mtu == 0:
		return 0
	case v6:
		return mtu - 60
	}
	return mtu - 40
}

// routedLocked finds the interfaces that carry a route, and those that lead to
// an engine by whatever rule.
func (w *interfaceWatch) routedLocked() map[int]bool {
	routed := make(map[int]bool)
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		w.log.Warn("cannot list routes", "err", err)
	}
	for _, r := range routes {
		routed[r.LinkIndex] = true
		for _, hop := range r.MultiPath {
			routed[hop.LinkIndex] = true
		}
	}
	for _, e := range w.engines {
		if rs, err := netlink.RouteGet(e.Addr().AsSlice()); err == nil {
			for _, r := range rs {
				routed[r.LinkIndex] = true
			}
		}
	}
	return routed
}

func (w *interfaceWatch) setEngines(addrs []netip.AddrPort) {
	w.mu.Lock()
	same := slices.Equal(w.engines, addrs)
	w.engines = slices.Clone(addrs)
	w.mu.Unlock()
	if !same {
		select {
		case w.kick <- struct{}{}:
		default:
		}
	}
}

// withLoopback calls f with the programs attached to the loopback device.
func (w *interfaceWatch) withLoopback(f func() error) error {
	l, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback device: %w", err)
	}
	d := newDevice(l)
	if !d.up {
		return errors.New("the loopback device is down: run `ip link set lo up`")
	}
	w.mu.Lock()
	_, ok := w.attached[d.index]
	w.mu.Unlock()
	if !ok {
		if err := w.a.attach(d); err != nil {
			return err
		}
		defer w.a.detach(d.index)
	}
	return f()
}

// names lists the interfaces attached to, and those that could not be.
func (w *interfaceWatch) names() (attached []string, failed map[string]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range w.attached {
		attached = append(attached, d.name)
	}
	sort.Strings(attached)
	failed = make(map[string]string, len(w.failed))
	for k, v := range w.failed {
		failed[k] = strings.TrimSpace(v)
	}
	return attached, failed
}

// stop ends the watching. The programs stay attached.
func (w *interfaceWatch) stop() {
	w.cancel()
	w.wait.Wait()
}

// detach takes the programs off all interfaces. Call it after stop.
func (w *interfaceWatch) detach() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for index := range w.attached {
		w.a.detach(index)
	}
	clear(w.attached)
}
