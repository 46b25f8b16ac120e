package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/valyala/fasthttp"
)

// fields walks over the field lines of a head: everything after its first
// line, each line ended by CRLF. It yields slices of that memory. The heads it
// is given have passed fasthttp's parser and checkLines.
type fields struct {
	rest        []byte
	name, value []byte
}

func (f *fields) next() bool {
	end := bytes.Index(f.rest, crlf)
	if end <= 0 {
		return false
	}
	line := f.rest[:end]
	f.rest = f.rest[end+2:]
	name, value, _ := bytes.Cut(line, colon)
	f.name, f.value = name, bytes.Trim(value, " \t")
	return true
}

var (
	crlf     = []byte("\r\n")
	crlfcrlf = []byte("\r\n\r\n")
	colon    = []byte(":")
)

// field is a field name that a proxy treats specially.
type field uint8

const (
	fieldOther field = iota
	fieldHop         // concerns one connection only
	fieldConnection
	fieldTransferEncoding
	fieldContentLength
	fieldTrailer
	fieldHost
	fieldExpect
	fieldRequestID
	fieldOwn // x-inferrail-*, which are the agent's own to give and to take
	fieldBudget
	fieldPriority
	fieldAuthorization
	fieldAPIKey
	fieldContentEncoding
	fieldContentType
	fieldCORS  // access-control-*
	fieldLimit // x-ratelimit-*
	fieldRank  // the data-parallel rank that is to compute a request
	fieldTraceparent
	fieldTracestate
	fieldIdempotency // names a request, so that it is not done twice
)

// fieldOf classifies a field name, whatever its case.
func fieldOf(name []byte) field {
	var lower [24]byte // longer than the longest: of a longer one the beginning tells
	known := lower[:min(len(name), len(lower))]
	for i := range known {
		c := name[i]
		if c >= 'A' && c <= 'Z' {
			c |= 0x20
		}
		known[i] = c
	}
	switch string(known) {
	case "connection":
		return fieldConnection
	case "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te", "upgrade", "http2-settings":
		return fieldHop
	case "transfer-encoding":
		return fieldTransferEncoding
	case "content-length":
		return fieldContentLength
	case "trailer":
		return fieldTrailer
	case "host":
		return fieldHost
	case "expect":
		return fieldExpect
	case "x-request-id":
		return fieldRequestID
	case "x-inferrail-budget-ms":
		return fieldBudget
	case "x-inferrail-priority":
		return fieldPriority
	case "authorization":
		return fieldAuthorization
	case "x-api-key":
		return fieldAPIKey
	case "content-encoding":
		return fieldContentEncoding
	case "content-type":
		return fieldContentType
	case "x-data-parallel-rank":
		return fieldRank
	case "traceparent":
		return fieldTraceparent
	case "tracestate":
		return fieldTracestate
	case "idempotency-key":
		return fieldIdempotency
	}
	switch known := string(known); {
	case strings.HasPrefix(known, "access-control-"):
		return fieldCORS
	case strings.HasPrefix(known, "x-inferrail-"):
		return fieldOwn
	case strings.HasPrefix(known, "x-ratelimit-"):
		return fieldLimit
	}
	return fieldOther
}

// checkLines returns why a head cannot be trusted to be read the same way by
// everyone, or "": every line ends in CRLF, no CR stands elsewhere, and no
// line is folded. head ends with its empty line.
func checkLines(head []byte) string {
	for i := 0; i < len(head); {
		k := bytes.IndexAny(head[i:], "\r\n")
		if k < 0 {
			break
		}
		i += k
		if head[i] == '\n' {
			return "a line of the request's head does not end in CRLF"
		}
		if i+1 == len(head) || head[i+1] != '\n' {
			return "the request's head holds a CR without LF"
		}
		i += 2
		if i < len(head) && (head[i] == ' ' || head[i] == '\t') {
			return "a field of the request's head is folded"
		}
	}
	return ""
}

// connectionOptions are the values of a head's Connection fields: the names of
// fields that are not to be passed on.
type connectionOptions struct {
	values [4][]byte
	n      int
}

// add remembers one Connection field; false when there are too many.
func (o *connectionOptions) add(value []byte) bool {
	if o.n == len(o.values) {
		return false
	}
	o.values[o.n] = value
	o.n++
	return true
}

func (o *connectionOptions) has(name []byte) bool {
	for _, value := range o.values[:o.n] {
		for option := range bytes.SplitSeq(value, []byte(",")) {
			if bytes.EqualFold(bytes.Trim(option, " \t"), name) {
				return true
			}
		}
	}
	return false
}

// requestHead is what forwarding needs of a request's head beside what
// fasthttp parses. It points into the header's memory.
type requestHead struct {
	raw         []byte // the field lines
	options     connectionOptions
	id          []byte // the client's x-request-id when it is well formed
	expect      []byte // nil when nothing is expected
	contentType []byte
	// encoding is a Content-Encoding other than identity.
	encoding []byte
	// budget is x-inferrail-budget-ms, nil when it is missing, and priority
	// x-inferrail-priority. budgetTwice: there are two of different values.
	budget, priority []byte
	budgetTwice      bool
	// traceparent is nil where there is none, or more than one.
	traceparent []byte
}

// read checks and fills h from the field lines raw. why is not empty when the
// request must be refused.
func (h *requestHead) read(raw []byte) (why string) {
	*h = requestHead{raw: raw}
	lengths, encodings, parents := 0, 0, 0
	for f := (fields{rest: raw}); f.next(); {
		if bytes.IndexByte(f.name, ' ') >= 0 {
			return fmt.Sprintf("the field name %q holds a space", f.name)
		}
		switch fieldOf(f.name) {
		case fieldConnection:
			if !h.options.add(f.value) {
				return "the request has too many Connection fields"
			}
		case fieldContentLength:
			lengths++
		case fieldTransferEncoding:
			encodings++
			if !bytes.EqualFold(f.value, []byte("chunked")) {
				return fmt.Sprintf("the transfer encoding %q is not supported", f.value)
			}
		case fieldExpect:
			if h.expect != nil {
				return "the request has two Expect fields"
			}
			h.expect = f.value
		case fieldRequestID:
			if h.id == nil && wellFormedID(f.value) {
				h.id = f.value
			}
		case fieldContentType:
			h.contentType = f.value
		case fieldContentEncoding:
			if !bytes.EqualFold(f.value, []byte("identity")) && len(f.value) > 0 {
				h.encoding = f.value
			}
		case fieldBudget:
			h.budgetTwice = h.budgetTwice || h.budget != nil && !bytes.Equal(h.budget, f.value)
			if h.budget = f.value; h.budget == nil {
				h.budget = []byte{} // it is there, and empty
			}
		case fieldPriority:
			h.priority = f.value
		case fieldTraceparent:
			h.traceparent = f.value
			parents++
		}
	}
	if parents > 1 {
		h.traceparent = nil
	}
	if lengths+encodings > 1 {
		return "the request says more than once how long its body is"
	}
	return ""
}

// wellFormedID reports whether id matches ^[A-Za-z0-9._:-]{1,128}$.
func wellFormedID(id []byte) bool {
	for _, c := range id {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9',
			c == '.', c == '_', c == ':', c == '-':
		default:
			return false
		}
	}
	return len(id) >= 1 && len(id) <= 128
}

// asEngine says how the head is told to the engine.
type asEngine struct {
	method, target []byte // target is path and query
	replica        *Replica
	id             []byte
	length         int // the body's
	// hideKey: the client's key is the agent's own and stays here.
	hideKey bool
	// piece: it is a piece of a prompt, and not the request.
	piece bool
	// trace, if not nil, is what the engine's spans are to belong to: to its last attempt.
	trace *Trace
}

// appendTo appends the head to be sent to an engine. A key that the replica
// wants takes the place of the client's.
//
// So does the rank that the replica is: it was chosen for what is cached and
// queued there, and a rank of the client's would take the request to where it is
// not accounted for. Where the replica is a whole engine, whose ranks the agent
// does not tell apart, a client that knows them may choose.
func (h *requestHead) appendTo(dst []byte, to asEngine) []byte {
	r := to.replica
	auth := r.auth.Load()
	own := auth != nil && *auth != ""
	rank := r.rank.Load() - 1
	dst = append(append(dst, to.method...), ' ')
	dst = append(append(dst, r.BasePath...), to.target...)
	dst = append(dst, " HTTP/1.1\r\nHost: "...)
	dst = append(append(dst, r.Host...), crlf...)
	for f := (fields{rest: h.raw}); f.next(); {
		switch fieldOf(f.name) {
		case fieldAuthorization, fieldAPIKey:
			if own || to.hideKey {
				continue
			}
		case fieldRank:
			if rank >= 0 {
				continue
			}
		case fieldTraceparent:
			if to.trace != nil {
				continue
			}
		case fieldTracestate:
			if to.trace != nil && to.trace.Parent == (SpanID{}) {
				continue // it belongs to what was no traceparent
			}
		case fieldIdempotency:
			if to.piece {
				continue // who keeps answers by it would take one for the other
			}
		case fieldOther, fieldContentType, fieldContentEncoding, fieldCORS, fieldLimit:
		default:
			continue
		}
		if h.options.has(f.name) {
			continue
		}
		dst = appendField(dst, f.name, f.value)
	}
	if own {
		dst = append(append(append(dst, "Authorization: "...), *auth...), crlf...)
	}
	if rank >= 0 {
		dst = append(dst, "X-data-parallel-rank: "...)
		dst = append(strconv.AppendInt(dst, int64(rank), 10), crlf...)
	}
	if t := to.trace; t != nil {
		dst = t.appendTraceparent(dst)
	}
	dst = appendField(dst, []byte("x-request-id"), to.id)
	dst = append(dst, "Content-Length: "...)
	dst = strconv.AppendInt(dst, int64(to.length), 10)
	return append(dst, crlfcrlf...)
}

func appendField(dst, name, value []byte) []byte {
	dst = append(append(dst, name...), ':', ' ')
	return append(append(dst, value...), crlf...)
}

// originForm returns the path and query of a request target, which may be in
// absolute form, and the path alone.
func originForm(uri []byte) (target, path []byte) {
	target = uri
	if len(uri) > 0 && uri[0] != '/' {
		if _, rest, ok := bytes.Cut(uri, []byte("://")); ok {
			target = []byte("/")
			if i := bytes.IndexByte(rest, '/'); i >= 0 {
				target = rest[i:]
			}
		}
	}
	if i := bytes.IndexByte(target, '#'); i >= 0 {
		target = target[:i]
	}
	path, _, _ = bytes.Cut(target, []byte("?"))
	return target, path
}

// bodyKind is how the end of a response's body is found.
type bodyKind uint8

const (
	bodyNone bodyKind = iota
	bodyFixed
	bodyChunked
	bodyUntilClose
)

// responseHead is an engine's response head. Its slices point into the bytes
// it was read from.
type responseHead struct {
	status  int
	reason  []byte
	raw     []byte // the field lines
	body    bodyKind
	length  uint64 // of bodyFixed
	close   bool   // the engine will close the connection
	events  bool   // the body is a stream of server-sent events
	options connectionOptions
}

// maxEngineHead bounds an engine's response head.
const maxEngineHead = 64 << 10

// headParser lets fasthttp's parser, which reads from a bufio.Reader, read
// bytes that are at hand.
type headParser struct {
	src bytes.Reader
	br  *bufio.Reader
	h   fasthttp.ResponseHeader
}

var headParsers = sync.Pool{New: func() any {
	return &headParser{br: bufio.NewReaderSize(nil, maxEngineHead)}
}}

var errEngineHead = errors.New("malformed response head")

// read parses head, which ends with its empty line.
func (h *responseHead) read(head []byte) error {
	if checkLines(head) != "" {
		return errEngineHead
	}
	p := headParsers.Get().(*headParser)
	defer headParsers.Put(p)
	p.src.Reset(head)
	p.br.Reset(&p.src)
	p.h.Reset()
	p.h.DisableNormalizing()
	p.h.SetNoDefaultContentType(true)
	if p.h.Read(p.br) != nil {
		// The parser's error quotes the bytes, which may be of an answer: that
		// is not for the log.
		return errEngineHead
	}
	if p.br.Buffered() > 0 {
		return errEngineHead
	}
	first, fieldLines, _ := bytes.Cut(head, crlf)
	*h = responseHead{status: p.h.StatusCode(), raw: fieldLines, close: p.h.ConnectionClose()}
	const start = len("HTTP/1.1 200")
	if len(first) < start || !bytes.HasPrefix(first, []byte("HTTP/1.")) || first[start-3] < '1' || first[start-4] != ' ' || first[start-3] == ' ' || len(first) > start && first[start] != ' ' {
		return errEngineHead
	}
	if len(first) > start {
		h.reason = first[start+1:]
	}
	lengths := 0
	for f := (fields{rest: h.raw}); f.next(); {
		if bytes.IndexByte(f.name, ' ') >= 0 {
			return errEngineHead
		}
		switch fieldOf(f.name) {
		case fieldContentType:
			kind, _, _ := bytes.Cut(f.value, []byte(";"))
			h.events = bytes.EqualFold(bytes.TrimRight(kind, " \t"), []byte("text/event-stream"))
		case fieldConnection:
			if !h.options.add(f.value) {
				return errEngineHead
			}
		case fieldContentLength:
			lengths++
		}
	}
	n := p.h.ContentLength()
	switch {
	case h.status < 200 || h.status == 204 || h.status == 304:
		h.body = bodyNone
	case n >= 0:
		h.body, h.length = bodyFixed, uint64(n)
	case n == -1:
		h.body = bodyChunked
		// Both framings at once is how a response is smuggled: the body is
		// read as chunked and the connection is not used again.
		h.close = h.close || lengths > 0
	default:
		h.body, h.close = bodyUntilClose, true
	}
	return nil
}

// asClient says how the head is told to the client.
type asClient struct {
	http10, keepAlive bool
	id                []byte
	replica           string
	// extra are whole field lines of the agent's own. They replace the
	// engine's of the kinds CORS and limits, where dropCORS and dropLimits say so.
	extra                []byte
	dropCORS, dropLimits bool
	// reframed: the agent changes the body, so it is sent in chunks of its own.
	reframed bool
}

// appendTo appends the head to be sent to the client. A chunked body reaches
// an HTTP/1.0 client decoded and ended by the close of the connection.
func (h *responseHead) appendTo(dst []byte, to asClient) []byte {
	dst = append(dst, "HTTP/1.1 "...)
	dst = strconv.AppendInt(dst, int64(h.status), 10)
	dst = append(append(append(dst, ' '), h.reason...), crlf...)
	for f := (fields{rest: h.raw}); f.next(); {
		switch fieldOf(f.name) {
		case fieldCORS:
			if to.dropCORS {
				continue
			}
		case fieldLimit:
			if to.dropLimits {
				continue
			}
		case fieldTrailer:
			if to.http10 || h.body != bodyChunked || to.reframed {
				continue
			}
		case fieldHop, fieldConnection, fieldTransferEncoding, fieldContentLength, fieldRequestID,
			fieldOwn, fieldBudget, fieldPriority:
			continue
		}
		if h.options.has(f.name) {
			continue
		}
		dst = appendField(dst, f.name, f.value)
	}
	dst = appendField(dst, []byte("x-request-id"), to.id)
	if to.replica != "" {
		dst = append(append(append(dst, "x-inferrail-replica: "...), to.replica...), crlf...)
	}
	dst = append(dst, to.extra...)
	switch {
	case (h.body == bodyChunked || to.reframed) && !to.http10:
		dst = append(dst, "Transfer-Encoding: chunked\r\n"...)
	case h.body == bodyFixed && !to.reframed:
		dst = append(dst, "Content-Length: "...)
		dst = append(strconv.AppendUint(dst, h.length, 10), crlf...)
	}
	return append(appendConnection(dst, to), crlf...)
}

func appendConnection(dst []byte, to asClient) []byte {
	switch {
	case !to.keepAlive:
		return append(dst, "Connection: close\r\n"...)
	case to.http10:
		return append(dst, "Connection: keep-alive\r\n"...)
	}
	return dst
}
