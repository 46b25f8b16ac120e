package simulator

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// Faults is misbehaviour that a test asks for: of a whole server through
// Config, or of one request through the body member
// "vllm_xargs":{"sim":{…}}, which then replaces the server's. The zero value
// behaves well.
type Faults struct {
	// TokenBytes lengthens each token's text to at least so many bytes with
	// x's; with TokenBytesMax above it, to a random length between the two. A
	// lengthened text does not have as many tokens as were generated.
	TokenBytes    int `json:"token_bytes" yaml:"token_bytes" name:"token-bytes" help:"Pad each token's text to this many bytes."`
	TokenBytesMax int `json:"token_bytes_max" yaml:"token_bytes_max" name:"token-bytes-max" help:"Pad each token's text to a random length up to this."`
	// BodyBytes lengthens a body that is not streamed to exactly so many
	// bytes, if it is shorter.
	BodyBytes int `json:"body_bytes" yaml:"body_bytes" name:"body-bytes" help:"Pad bodies that are not streamed to this many bytes."`
	// HeadDelayUS is how many microseconds pass before anything is sent.
	HeadDelayUS int64 `json:"head_delay_us" yaml:"head_delay_us" name:"head-delay-us" help:"Microseconds before the head of a response."`
	// HeadWithToken holds the head of a stream back until the first token is
	// ready. vLLM sends it at once; some engines do not.
	HeadWithToken bool `json:"head_with_token" yaml:"head_with_token" name:"head-with-token" help:"Send a stream's head with its first token."`
	// SplitWrites cuts what is written to the socket at random places and
	// after anything that looks like the end of a chunked body.
	SplitWrites bool `json:"split_writes" yaml:"split_writes" name:"split-writes" help:"Cut writes to the socket at random places."`
	// Break is what happens after BreakAfter tokens of a stream, or bytes of
	// a body that is not streamed: "stall" sends nothing more and waits for
	// the client to leave, "fin" closes the connection, "rst" resets it.
	Break      string `json:"break" yaml:"break" name:"break" enum:",stall,fin,rst" default:"" help:"stall, fin or rst after --fault-break-after."`
	BreakAfter int    `json:"break_after" yaml:"break_after" name:"break-after" help:"Tokens of a stream, or bytes of another body, before --fault-break."`
}

// Limits that keep a request from asking for more than a process has.
const (
	maxTokenBytes = 1 << 20
	maxBodyBytes  = 1 << 30
	maxRawBytes   = 1 << 36
)

func (f *Faults) check() error {
	switch {
	case f.TokenBytes < 0 || f.TokenBytes > maxTokenBytes || f.TokenBytesMax < 0 || f.TokenBytesMax > maxTokenBytes:
		return fmt.Errorf("token_bytes and token_bytes_max must be between 0 and %d", maxTokenBytes)
	case f.BodyBytes < 0 || f.BodyBytes > maxBodyBytes:
		return fmt.Errorf("body_bytes must be between 0 and %d", maxBodyBytes)
	case f.HeadDelayUS < 0 || f.HeadDelayUS > int64(time.Hour/time.Microsecond):
		return errors.New("head_delay_us must be between 0 and one hour")
	case f.BreakAfter < 0:
		return errors.New("break_after must not be negative")
	}
	switch f.Break {
	case "", "stall", "fin", "rst":
		return nil
	}
	return fmt.Errorf("break must be stall, fin or rst, not %q", f.Break)
}

// Raw asks for a body of deterministic random bytes instead of an answer:
// POST /sim/raw?seed=1&chunks=100&max=400&interval_us=50&length=chunked, or
// "vllm_xargs":{"sim_raw":{…}} in a request to either API route. AppendRaw
// returns the bytes that must arrive.
type Raw struct {
	Seed uint64 `json:"seed"`
	// Chunks pieces of 1 to Max bytes are written and flushed one by one,
	// IntervalUS microseconds apart. Many hold or end in bytes that look like
	// the end of a chunked body.
	Chunks     int   `json:"chunks"`
	Max        int   `json:"max"`
	IntervalUS int64 `json:"interval_us"`
	// Length is "chunked", also when empty, or "fixed": with a Content-Length.
	Length string `json:"length"`
	// Split cuts the writes as Faults.SplitWrites does.
	Split bool `json:"split"`
	// Break and BreakAfter are as in Faults, counted in pieces.
	Break      string `json:"break"`
	BreakAfter int    `json:"break_after"`
}

func (r *Raw) check() error {
	f := Faults{Break: r.Break, BreakAfter: r.BreakAfter}
	switch {
	case r.Chunks < 0 || r.Max < 1:
		return fmt.Errorf("raw: chunks must not be negative and max at least 1, got %d and %d", r.Chunks, r.Max)
	case r.Chunks > 0 && r.Max > maxRawBytes/r.Chunks:
		return fmt.Errorf("raw: chunks times max must be at most %d", int64(maxRawBytes))
	case r.IntervalUS < 0 || r.IntervalUS > int64(time.Hour/time.Microsecond):
		return errors.New("raw: interval_us must be between 0 and one hour")
	case r.Length != "" && r.Length != "chunked" && r.Length != "fixed":
		return fmt.Errorf("raw: length must be chunked or fixed, not %q", r.Length)
	}
	return f.check()
}

// AppendRaw appends the body that r asks for, whole and without its framing.
func AppendRaw(dst []byte, r Raw) []byte {
	for i := range r.Chunks {
		dst = r.appendPiece(dst, i)
	}
	return dst
}

// size returns the length of piece i.
func (r *Raw) size(i int) int {
	return 1 + int(mix(r.Seed+uint64(i)*golden)%uint64(r.Max))
}

// fakeEnds look like the end of a chunked body, or like a whole one.
var fakeEnds = []string{"\r\n0\r\n\r\n", "0\r\n\r\n", "\r\n0\r\n", "5\r\nhello\r\n0\r\n\r\n"}

// appendPiece appends piece i. Two in three hold one of fakeEnds, half of
// those as their end.
func (r *Raw) appendPiece(dst []byte, i int) []byte {
	start, size := len(dst), r.size(i)
	state := mix(r.Seed ^ mix(uint64(i)))
	fate := mix(state + 1)
	for n := 0; n < size; n += 8 {
		state += golden
		dst = binary.LittleEndian.AppendUint64(dst, mix(state))
	}
	dst = dst[:start+size]
	fake := fakeEnds[fate>>8%uint64(len(fakeEnds))]
	if room := size - len(fake); room >= 0 {
		switch fate % 3 {
		case 0:
			copy(dst[start+room:], fake)
		case 1:
			copy(dst[start+int(fate>>16%uint64(room+1)):], fake)
		}
	}
	return dst
}

// Expect returns the text of each choice of the answer that a server with this
// Config gives to body at path ("/v1/chat/completions" or "/v1/completions").
// An error is the refusal that the server would answer.
func Expect(cfg Config, path string, body []byte) ([]string, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	a, ok := routes[path]
	if !ok {
		return nil, fmt.Errorf("no generating route %q", path)
	}
	r, err := parseRequest(&cfg, a, body)
	if err != nil {
		return nil, err
	}
	var texts []string
	for _, c := range newAnswer(&cfg, r, "", 0).choices {
		texts = append(texts, c.voice.text(r.output))
	}
	return texts, nil
}

// ExpectBody returns the whole body, without its framing, of the answer that a
// server with this Config gives to body at path, byte for byte. Config.Created
// must be set, the request must carry the header X-Request-Id with id, and
// must either not be streamed, or have one choice or a server without latency.
func ExpectBody(cfg Config, path, id string, body []byte) ([]byte, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	route, ok := routes[path]
	if !ok {
		return nil, fmt.Errorf("no generating route %q", path)
	}
	r, err := parseRequest(&cfg, route, body)
	if err != nil {
		return nil, err
	}
	if r.raw != nil {
		return AppendRaw(nil, *r.raw), nil
	}
	a := newAnswer(&cfg, r, id, cfg.Created)
	if !r.stream {
		return a.appendPaddedBody(nil), nil
	}
	var out []byte
	if r.api == chat {
		for i := range a.choices {
			out = a.appendRole(out, i)
		}
	}
	for range r.output {
		for i := range a.choices {
			out = a.appendToken(out, i)
		}
	}
	if r.usage {
		out = a.appendUsageEvent(out)
	}
	return append(out, done...), nil
}

// appendPaddedBody appends the body of an answer that is not streamed,
// lengthened to BodyBytes.
func (a *answer) appendPaddedBody(dst []byte) []byte {
	start := len(dst)
	dst = a.appendBody(dst, 0)
	if pad := a.req.faults.BodyBytes - (len(dst) - start); pad > 0 {
		dst = a.appendBody(dst[:start], pad)
	}
	return dst
}
