package simulator

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// socket is a ZeroMQ socket that peers connect to: PUB, ROUTER or REP. It
// speaks the protocol by zmq4's connections, under a listener and queues of its
// own: as with ZeroMQ's PUB, what a slow subscriber cannot take is dropped for
// that one alone, which zmq4's does not do. listenSocket makes one, close ends
// it. The other methods may be called from any goroutine.
type socket struct {
	kind     zmq4.SocketType
	listener net.Listener
	hwm      int // messages that wait for one peer
	// answer returns the messages that follow a request, of a ROUTER or REP.
	answer func(frames [][]byte) [][][]byte

	mu     sync.Mutex // guards peers and closed
	peers  map[*peer]bool
	closed bool
	served sync.WaitGroup // the goroutines
}

// peer is one connection of a socket. topics are guarded by the socket's mutex.
type peer struct {
	conn   net.Conn
	topics map[string]int
	queue  chan [][]byte
	gone   chan struct{}
	once   sync.Once
}

// handshakeTime bounds the handshake with a peer.
const handshakeTime = 10 * time.Second

// listenSocket listens at an address like tcp://127.0.0.1:5557. The host * is
// every one, the port 0 any free one.
func listenSocket(kind zmq4.SocketType, endpoint string, hwm int, answer func([][]byte) [][][]byte) (*socket, error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return nil, fmt.Errorf("endpoint %q must begin with tcp://", endpoint)
	}
	l, err := net.Listen("tcp", strings.Replace(address, "*", "", 1))
	if err != nil {
		return nil, fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	s := &socket{kind: kind, listener: l, hwm: hwm, answer: answer, peers: map[*peer]bool{}}
	s.served.Go(s.accept)
	return s, nil
}

// port is the one that it listens on.
func (s *socket) port() int { return s.listener.Addr().(*net.TCPAddr).Port }

// close ends the connections and waits for the goroutines.
func (s *socket) close() {
	s.mu.Lock()
	s.closed = true
	_ = s.listener.Close()
	for p := range s.peers {
		p.leave()
	}
	s.mu.Unlock()
	s.served.Wait()
}

func (s *socket) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return
		}
		p := &peer{conn: conn, topics: map[string]int{}, queue: make(chan [][]byte, s.hwm), gone: make(chan struct{})}
		s.mu.Lock()
		if s.closed {
			_ = conn.Close()
		} else {
			s.peers[p] = true
			s.served.Go(func() { s.serve(p) })
		}
		s.mu.Unlock()
	}
}

// leave ends a peer's connection, which ends its goroutines.
func (p *peer) leave() {
	p.once.Do(func() {
		close(p.gone)
		_ = p.conn.Close()
	})
}

// serve reads what a peer sends until it is gone.
func (s *socket) serve(p *peer) {
	var written sync.WaitGroup
	defer func() {
		p.leave()
		written.Wait()
		s.mu.Lock()
		delete(s.peers, p)
		s.mu.Unlock()
	}()
	_ = p.conn.SetDeadline(time.Now().Add(handshakeTime))
	z, err := zmq4.Open(p.conn, null.Security(), s.kind, nil, true, nil)
	if err != nil || p.conn.SetDeadline(time.Time{}) != nil {
		return
	}
	written.Go(func() { p.write(z) })
	for {
		m, err := z.RecvMsg()
		if err != nil {
			return
		}
		switch {
		case m.Type == zmq4.CmdMsg:
		case s.kind == zmq4.Pub:
			s.subscribe(p, m.Frames)
		default:
			for _, frames := range s.answer(m.Frames) {
				if !p.send(frames) {
					return
				}
			}
		}
	}
}

// send queues a message for a peer, waiting for room. It reports whether the
// peer is still there.
func (p *peer) send(frames [][]byte) bool {
	select {
	case p.queue <- frames:
		return true
	case <-p.gone:
		return false
	}
}

// write sends what is queued.
func (p *peer) write(z *zmq4.Conn) {
	for {
		select {
		case frames := <-p.queue:
			if z.SendMsg(zmq4.NewMsgFrom(frames...)) != nil {
				p.leave()
				return
			}
		case <-p.gone:
			return
		}
	}
}

// subscribe follows a message of a SUB: 1 and a topic begins, 0 and a topic
// ends a subscription.
func (s *socket) subscribe(p *peer, frames [][]byte) {
	if len(frames) != 1 || len(frames[0]) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	topic := string(frames[0][1:])
	switch frames[0][0] {
	case 1:
		p.topics[topic]++
	case 0:
		if p.topics[topic]--; p.topics[topic] <= 0 {
			delete(p.topics, topic)
		}
	}
}

// publish sends a message to all that have subscribed to the beginning of its
// first frame, and for whom not too much waits already.
func (s *socket) publish(frames [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.peers {
		for topic := range p.topics {
			if strings.HasPrefix(string(frames[0]), topic) {
				select {
				case p.queue <- frames:
				default:
				}
				break
			}
		}
	}
}
