package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// scanEvery is the time between two looks at the listening sockets.
	scanEvery = 2 * time.Second
	// keepGone is longer than an engine takes to load a large model.
	keepGone = 15 * time.Minute
	// A socket that is nobody known is asked again after firstPause, and after
	// a pause that doubles each time up to lastPause: an engine listens
	// minutes before it answers, and other services should not be bothered.
	firstPause, lastPause = 2 * time.Second, time.Minute
	// asked bounds how many sockets are asked at one time, pageTimeout and
	// maxPage what each page may take.
	asked       = 8
	pageTimeout = 500 * time.Millisecond
	maxPage     = 64 << 10
)

// sockets finds the engines among the sockets that listen in this network
// namespace. Its fields are set once; watch keeps what it knows to itself.
type sockets struct {
	// tables are files like /proc/net/tcp.
	tables []string
	// own returns the inodes of the agent's own sockets.
	own func() map[uint64]bool
	// mine, when not nil, tells which sockets to look at: others are in tests
	// not there.
	mine func(listening) bool
	// every is the time between two looks. keep is how long an engine whose
	// socket is gone stays a member, a dead one: its clients are told to try
	// again, not that its model is unknown, while it is started anew.
	every, keep time.Duration
}

func systemSockets() sockets {
	return sockets{tables: []string{"/proc/net/tcp", "/proc/net/tcp6"}, own: ownInodes, every: scanEvery, keep: keepGone}
}

// listening is a listening socket.
type listening struct {
	addr  netip.AddrPort
	inode uint64
}

// door is an address at which somebody listens, and who that is.
type door struct {
	inodes []uint64 // of the last look; several with SO_REUSEPORT
	own    bool
	engine string // "" is nobody known
	url    string
	next   time.Time // when it is asked again
	pause  time.Duration
	gone   time.Time // when nobody listened any more; zero while somebody does
}

// watch looks again and again, until ctx is done.
func (s *sockets) watch(ctx context.Context, c localConfig, report func([]finding, error)) {
	client := &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	doors := map[netip.AddrPort]*door{}
	for {
		found, err := s.look(ctx, client, c, doors)
		if ctx.Err() != nil {
			return
		}
		report(found, err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(s.every):
		}
	}
}

// look brings doors up to date and returns the engines behind them, in order.
func (s *sockets) look(ctx context.Context, client *http.Client, c localConfig, doors map[netip.AddrPort]*door) ([]finding, error) {
	list, err := s.list()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	present := map[netip.AddrPort][]uint64{}
	for _, l := range list {
		if !c.has(l.addr.Port()) {
			present[l.addr] = append(present[l.addr], l.inode)
		}
	}
	var own map[uint64]bool
	for addr, inodes := range present {
		d := doors[addr]
		// Another socket at an address may be another process.
		if d == nil || !slices.ContainsFunc(inodes, func(n uint64) bool { return slices.Contains(d.inodes, n) }) {
			if own == nil {
				own = s.own()
			}
			d = &door{next: now, own: slices.ContainsFunc(inodes, func(n uint64) bool { return own[n] })}
			doors[addr] = d
		}
		d.inodes = inodes
	}
	var group sync.WaitGroup
	room := make(chan struct{}, asked)
	for addr, d := range doors {
		if present[addr] == nil {
			if d.gone.IsZero() {
				d.gone = now
			}
			if d.engine == "" || now.Sub(d.gone) >= s.keep {
				delete(doors, addr)
			}
			continue
		}
		if d.own || d.engine != "" || now.Before(d.next) {
			continue
		}
		group.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			d.url, d.engine = identify(ctx, client, addr)
			d.pause = min(max(2*d.pause, firstPause), lastPause)
			d.next = time.Now().Add(d.pause)
		})
	}
	group.Wait()

	found := []finding{}
	for addr, d := range doors {
		if d.engine != "" {
			host := strings.TrimPrefix(d.url, "http://")
			found = append(found, finding{
				ReplicaConfig: ReplicaConfig{ID: "local/" + host, URL: d.url, Engine: d.engine},
				also:          alsoAt(addr),
			})
		}
	}
	slices.SortFunc(found, func(a, b finding) int { return strings.Compare(a.ID, b.ID) })
	// One that listens for IPv4 and for IPv6 is the same.
	return slices.CompactFunc(found, func(a, b finding) bool { return a.ID == b.ID }), nil
}

// has: the port is one that the agent is configured to listen on. Another agent
// that takes over from this one shares it.
func (c *localConfig) has(port uint16) bool {
	for _, address := range []string{c.listen, c.admin, c.tls} {
		if _, p, err := net.SplitHostPort(address); err == nil && p == strconv.Itoa(int(port)) {
			return true
		}
	}
	return false
}

// list reads the tables. One that is not there, without IPv6, is empty.
func (s *sockets) list() ([]listening, error) {
	var all []listening
	read := 0
	for _, name := range s.tables {
		file, err := os.Open(name)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		list, err := readListening(file)
		file.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		read++
		all = append(all, list...)
	}
	if read == 0 {
		return nil, fmt.Errorf("none of %s is there", strings.Join(s.tables, " and "))
	}
	if s.mine != nil {
		all = slices.DeleteFunc(all, func(l listening) bool { return !s.mine(l) })
	}
	return all, nil
}

// readListening reads the listening sockets from a table in the form of
// /proc/net/tcp. The kernel writes them before all others, of which there may
// be many: reading ends at the first of those.
func readListening(in io.Reader) ([]listening, error) {
	const stateListen = "0A"
	var list []listening
	lines := bufio.NewScanner(in)
	for first := true; lines.Scan(); first = false {
		fields := strings.Fields(lines.Text())
		if first || len(fields) == 0 {
			continue // the heading
		}
		if len(fields) < 10 {
			return nil, fmt.Errorf("the line %q is too short", lines.Text())
		}
		if fields[3] != stateListen {
			break
		}
		addr, err := parseHexAddr(fields[1])
		if err != nil {
			return nil, err
		}
		inode, err := strconv.ParseUint(fields[9], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("the inode %q is not a number", fields[9])
		}
		list = append(list, listening{addr, inode})
	}
	return list, lines.Err()
}

// parseHexAddr reads an address as /proc/net/tcp has it: words of 32 bits in
// the byte order of the machine, a colon, and the port.
func parseHexAddr(text string) (netip.AddrPort, error) {
	bad := fmt.Errorf("the address %q is not one", text)
	host, port, ok := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	if !ok || err != nil || len(raw) != 4 && len(raw) != 16 {
		return netip.AddrPort{}, bad
	}
	for word := range slices.Chunk(raw, 4) {
		binary.NativeEndian.PutUint32(word, binary.BigEndian.Uint32(word))
	}
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, bad
	}
	addr, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), nil
}

// ownInodes are the inodes of this process's sockets.
func ownInodes() map[uint64]bool {
	own := map[uint64]bool{}
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return own
	}
	for _, e := range entries {
		// One that was closed meanwhile has no target.
		target, _ := os.Readlink(filepath.Join(dir, e.Name()))
		if number, ok := strings.CutPrefix(target, "socket:["); ok {
			if inode, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64); err == nil {
				own[inode] = true
			}
		}
	}
	return own
}

// reachedAt returns the addresses to try for what listens at addr.
func reachedAt(addr netip.AddrPort) []netip.AddrPort {
	at := func(ip netip.Addr) netip.AddrPort { return netip.AddrPortFrom(ip, addr.Port()) }
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	switch ip := addr.Addr(); {
	case !ip.IsUnspecified():
		return []netip.AddrPort{addr}
	case ip.Is4():
		return []netip.AddrPort{at(loopback)}
	default: // and IPv4, unless that is turned off for the socket
		return []netip.AddrPort{at(loopback), at(netip.IPv6Loopback())}
	}
}

// alsoAt returns where else a socket that listens everywhere is reached.
func alsoAt(addr netip.AddrPort) []string {
	if !addr.Addr().IsUnspecified() {
		return nil
	}
	ifaces, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var also []string
	for _, a := range ifaces {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			also = append(also, netip.AddrPortFrom(prefix.Addr().Unmap(), addr.Port()).String())
		}
	}
	slices.Sort(also)
	return also
}

// reply is an engine's answer to a GET.
type reply struct {
	status int
	server string // its Server header
	body   []byte // up to maxPage
}

// pages are what is asked for, in this order, until who answers is recognised.
var pages = []string{"/v1/models", "/version", "/get_model_info", "/server_info", "/info", "/props", "/", "/api/version"}

// identify asks who listens at addr. It gives up at the first page that brings
// no answer of HTTP.
func identify(ctx context.Context, client *http.Client, addr netip.AddrPort) (url, engine string) {
	for _, at := range reachedAt(addr) {
		url = "http://" + at.String()
		answers := map[string]reply{}
		for _, path := range pages {
			p, err := getPage(ctx, client, url+path)
			if err != nil {
				break
			}
			answers[path] = p
			if engine = recognise(answers); engine != "" {
				return url, engine
			}
		}
		if len(answers) > 0 {
			break
		}
	}
	return "", ""
}

func getPage(ctx context.Context, client *http.Client, url string) (reply, error) {
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("User-Agent", "inferrail")
	resp, err := client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPage))
	if err != nil {
		return reply{}, err
	}
	return reply{resp.StatusCode, resp.Header.Get("Server"), body}, nil
}

var ownedBy = regexp.MustCompile(`"owned_by"\s*:\s*"([^"]*)"`)

// recognise tells from an engine's pages which one it is, or "". Each is known
// by two signs: routers and agents list the models of engines as their own, but
// have not all of the engines' other pages. A page may be cut off, so it is
// searched, not parsed.
func recognise(answers map[string]reply) string {
	has := func(path string, members ...string) bool {
		p := answers[path]
		if p.status != http.StatusOK {
			return false
		}
		for _, m := range members {
			if !bytes.Contains(p.body, []byte(`"`+m+`"`)) {
				return false
			}
		}
		return true
	}
	owner := ""
	if models := answers["/v1/models"]; models.status == http.StatusOK {
		if m := ownedBy.FindSubmatch(models.body); m != nil {
			owner = string(m[1])
		}
	}
	for _, p := range answers {
		if strings.HasPrefix(p.server, "inferrail") {
			return ""
		}
	}
	switch {
	case owner == "vllm" && has("/version", "version"):
		return "vllm"
	case owner == "sglang" && (has("/get_model_info", "model_path") || has("/server_info", "model_path")):
		return "sglang"
	case has("/info", "model_id", "router"), has("/info", "model_id", "max_total_tokens", "version"):
		return "tgi"
	case has("/props", "default_generation_settings"), owner == "llamacpp" && answers["/v1/models"].server == "llama.cpp":
		return "llamacpp"
	case has("/api/version", "version") && string(bytes.TrimSpace(answers["/"].body)) == "Ollama is running":
		return "ollama"
	}
	return ""
}
