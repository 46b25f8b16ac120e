package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// addresses are where the engine of one replica can be dialled. A name is
// looked up when a connection is needed first, and again after some time, while
// connections are opened to where it was: a name server that does not answer
// keeps nobody waiting then. Exchanges ask it on their connections' goroutines;
// the replica's Close stops it. Make it with newAddresses.
type addresses struct {
	host     string
	port     uint16
	resolver *net.Resolver
	ctx      context.Context // of look-ups
	cancel   context.CancelFunc
	runs     sync.WaitGroup // of look-ups

	mu     sync.Mutex // guards the rest
	known  []netip.AddrPort
	until  time.Time // known is looked up again after it; zero: never
	asking *lookup   // the one that runs, or nil
	closed bool
}

// lookup is one look-up of a name, which any number of exchanges may wait for.
// The mu of its addresses guards it.
type lookup struct {
	waiting []*conn
	over    bool
	err     error
}

const (
	// lookupEvery is how long an address is used before its name is looked up
	// again, lookupAgain how long after a look-up that has failed.
	lookupEvery = 10 * time.Second
	lookupAgain = time.Second
	// lookupTime bounds one look-up.
	lookupTime = 10 * time.Second
	// mostAddresses bounds how many addresses are tried for one connection.
	mostAddresses = 3
)

func newAddresses(host string, port uint16) *addresses {
	a := &addresses{host: host, port: port, resolver: net.DefaultResolver}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	if ip, err := netip.ParseAddr(host); err == nil {
		a.known = []netip.AddrPort{netip.AddrPortFrom(ip, port)}
	}
	return a
}

// close ends a look-up that runs. What is known can be asked for further on.
func (a *addresses) close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.cancel()
	a.runs.Wait()
}

// get returns what is known. When nothing is, it returns the look-up that is
// under way, which wakes c when it is over.
func (a *addresses) get(c *conn) ([]netip.AddrPort, *lookup) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.known) > 0 && (a.until.IsZero() || a.closed || time.Now().Before(a.until)) {
		return a.known, nil
	}
	l := a.asking
	switch {
	case l != nil:
	case a.closed:
		l = &lookup{over: true, err: errors.New("the replica has left")}
	default:
		l = &lookup{}
		a.asking = l
		a.runs.Go(func() { a.lookUp(l) })
	}
	if len(a.known) > 0 {
		return a.known, nil
	}
	l.waiting = append(l.waiting, c)
	return nil, l
}

// result returns what a look-up has come to, if it is over.
func (a *addresses) result(l *lookup) (known []netip.AddrPort, err error, over bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.known, l.err, l.over
}

func (a *addresses) lookUp(l *lookup) {
	ctx, cancel := context.WithTimeout(a.ctx, lookupTime)
	ips, err := a.resolver.LookupNetIP(ctx, "ip", a.host)
	cancel()
	if err == nil && len(ips) == 0 {
		err = fmt.Errorf("look up %s: the name has no address", a.host)
	}
	a.mu.Lock()
	a.asking = nil
	if err == nil {
		a.known = nil
		for _, ip := range ips[:min(len(ips), mostAddresses)] {
			a.known = append(a.known, netip.AddrPortFrom(ip.Unmap(), a.port))
		}
		a.until = time.Now().Add(lookupEvery)
	} else {
		// Where the engine was is better than nowhere.
		a.until = time.Now().Add(lookupAgain)
	}
	l.over, l.err = true, err
	waiting := slices.Clip(l.waiting)
	l.waiting = nil
	a.mu.Unlock()
	for _, c := range waiting {
		c.wake()
	}
}

// find returns where to dial r for the exchange of c, which watches its client
// meanwhile.
func (c *conn) find(r *Replica, limit time.Time) ([]netip.AddrPort, failure, error) {
	c.expect(limit)
	known, l := r.addresses.get(c)
	for known == nil {
		var err error
		var over bool
		if known, err, over = r.addresses.result(l); over && err != nil {
			return nil, connectFailed, err
		}
		if over {
			break
		}
		if c.x.sentAway() {
			return nil, engineDown, nil
		}
		switch f := c.wait(connectTimeout); f {
		case none:
			// After expect no news is lost; what came before it is looked for.
			c.expect(limit)
		case connectTimeout:
			return nil, f, fmt.Errorf("look up %s: no answer in time", r.addresses.host)
		default:
			return nil, f, nil
		}
	}
	return known, none, nil
}
