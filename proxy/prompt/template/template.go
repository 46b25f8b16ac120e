package template

import (
	"fmt"
	"sync"
	"time"
	"unsafe"

	"github.com/ardanlabs/jinja"
)

// Template is a model's chat template. It renders what Jinja in Python renders,
// set up as transformers sets it up, or fails where that fails, or says that
// it cannot tell (ErrUnfollowed). It is immutable but for a pool of memory and
// may be used from any goroutine. The zero value is not usable.
//
// The library that renders it differs from Jinja in many details. So a
// template is parsed and written anew for the library: its statements, names,
// conditions and calls stay, while white space is resolved and whatever Python
// would do in another way is a call of one of our operations (see rewriter). What
// cannot be written so is refused when it is compiled.
type Template struct {
	library    *jinja.Template
	operations map[string]operation
	runs       [][]segment
	format     string
	names      map[string]bool
	clock      bool
	// rewritten is the library's source, for tests and people.
	rewritten string
	renders   sync.Pool // of *rendering
}

// Compile reads a template's source. An error means that the template
// cannot be followed: it says what in it.
func Compile(source string) (t *Template, err error) {
	if len(source) > 1<<20 {
		return nil, fmt.Errorf("the template is larger than 1 MiB")
	}
	nodes, err := parse(source)
	if err != nil {
		return nil, fmt.Errorf("the template cannot be followed: %w", err)
	}
	w := newRewriter(nodes)
	if err := w.rewrite(nodes); err != nil {
		return nil, fmt.Errorf("the template cannot be followed: %w", err)
	}
	t = &Template{
		operations: w.operations,
		runs:       w.runs,
		format:     contentFormat(nodes),
		names:      undeclared(nodes),
		clock:      w.clock,
		rewritten:  w.out.String(),
	}
	if t.library, err = jinja.Compile(t.rewritten); err != nil {
		return nil, fmt.Errorf("the template cannot be followed: %w", err)
	}
	return t, nil
}

// ContentFormat is what vLLM makes of messages' contents for the template when
// it is not told: "string" or "openai".
func (t *Template) ContentFormat() string { return t.format }

// Uses reports whether the template may look a variable up.
func (t *Template) Uses(name string) bool { return t.names[name] }

// UsesClock reports whether the template may ask for the time: what it renders
// is then not to be remembered.
func (t *Template) UsesClock() bool { return t.clock }

// Append renders the template with the variables and appends the text to dst.
// now is what strftime_now tells. An error is what transformers would raise, or
// ErrUnfollowed; dst is then returned as it was. Neither vars nor what is in
// them is changed or kept.
func (t *Template) Append(dst []byte, vars map[string]jinja.Value, now time.Time) (out []byte, err error) {
	return t.append(dst, vars, now, most)
}

// AppendBriefly is Append for who has little time: what takes more than a few
// milliseconds is given up with ErrLong. Some templates go through all messages
// for each message, so that a small request can take long.
func (t *Template) AppendBriefly(dst []byte, vars map[string]jinja.Value, now time.Time) (out []byte, err error) {
	return t.append(dst, vars, now, brief)
}

func (t *Template) append(dst []byte, vars map[string]jinja.Value, now time.Time, e effort) (out []byte, err error) {
	before := len(dst)
	defer func() {
		if p := recover(); p != nil {
			// r may be in any state: it is not put back.
			out, err = dst[:before], unfollowed("a template that panics (%v)", p)
		}
	}()
	for name := range vars {
		if libraryGlobals[name] {
			// Python would call it in place of the function.
			return dst, unfollowed("the variable %s", name)
		}
	}
	r, _ := t.renders.Get().(*rendering)
	if r == nil {
		r = newRendering(t.operations, t.runs)
	}
	r.begin(dst, now, e)
	for name, v := range vars {
		if _, taken := t.operations[name]; !taken {
			r.vars[rename(name)] = v
		}
	}
	rest, err := t.library.RenderValues(r.vars)
	if err == nil && rest != "" {
		err = unfollowed("BUG: text that the library writes by itself")
	}
	if r.long {
		err = ErrLong
	}
	dst, r.out = r.out, nil
	if err != nil {
		dst = dst[:before]
	}
	r.texts = r.texts[:0]
	for name := range vars {
		if _, taken := t.operations[name]; !taken {
			delete(r.vars, rename(name))
		}
	}
	if cap(r.buffer) <= maxKept && cap(r.texts) <= maxKept {
		clear(r.arguments[:cap(r.arguments)])
		t.renders.Put(r)
	}
	return dst, err
}

// operation is what a rewritten template calls in place of what the library does
// in another way than Python.
type operation func(r *rendering, args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error)

// maxKept is how large a buffer is kept for the next render.
const maxKept = 1 << 20

// effort is what one render may take: steps, and bytes written on the way.
type effort struct{ steps, bytes int }

var (
	// most is for any chat: one of 50,000 messages stays well below it.
	most = effort{maxSteps, maxOutput}
	// brief is some milliseconds, of which a chat of 32 KiB takes a tenth.
	brief = effort{16 << 10, 512 << 10}
)

// What bounds a render.
const (
	maxSteps  = 8 << 20
	maxOutput = 64 << 20
	maxCalls  = 100 // macros and recursive loops within each other
	maxTime   = time.Second
)

// rendering is one render of a template: what it has taken so far. One
// goroutine uses it at a time; Template.Append begins and ends it.
type rendering struct {
	// vars are the operations, and during a render the request's variables.
	vars    map[string]jinja.Value
	runs    [][]segment
	out     []byte // where the text is appended to
	now     time.Time
	started time.Time
	effort  effort
	long    bool // effort is brief, and was not enough
	checks  int
	steps   int
	bytes   int
	calls   int
	buffer  []byte
	// texts holds strings that operations have made. They are valid until the
	// render ends.
	texts []byte
	// arguments is memory for opEach.
	arguments []jinja.Value
	first     bool // see opFirst
}

func newRendering(operations map[string]operation, runs [][]segment) *rendering {
	r := &rendering{runs: runs, vars: make(map[string]jinja.Value, len(operations)+16)}
	for name, h := range operations {
		callable := name
		if name == operationDict {
			callable = "dict" // the library then keeps the order of keywords
		}
		r.vars[name] = jinja.NewCallable(callable, func(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
			return h(r, args, kwargs)
		})
	}
	return r
}

func (r *rendering) begin(dst []byte, now time.Time, e effort) {
	r.effort, r.long = e, false
	r.now, r.started = now, time.Now()
	r.out = dst
	r.checks, r.steps, r.bytes, r.calls, r.first = 0, 0, 0, 0, false
}

// room returns memory for a string of n bytes, which took makes of it.
func (r *rendering) room(n int) []byte {
	if cap(r.texts)-len(r.texts) < n {
		// The strings before keep their memory. The next one will have more room.
		r.texts = make([]byte, 0, max(n, min(2*cap(r.texts), maxKept), 4<<10))
	}
	return r.texts[len(r.texts):]
}

// took returns b, which was appended to what room has returned, as a string.
func (r *rendering) took(b []byte) string {
	r.texts = r.texts[:len(r.texts)+len(b)]
	return unsafe.String(unsafe.SliceData(b), len(b))
}

// keep returns b as a string that is valid until the render ends.
func (r *rendering) keep(b []byte) string {
	return r.took(append(r.room(len(b)), b...))
}

// spend counts steps that are about to be taken.
func (r *rendering) spend(n int) error {
	if r.steps += n + 1; r.steps > r.effort.steps {
		r.long = r.effort != most
		return unfollowed("a template that takes more than %d steps", r.effort.steps)
	}
	return r.check(n / 16)
}

// grow counts bytes that are about to be written.
func (r *rendering) grow(n int) error {
	if r.bytes += n; r.bytes > r.effort.bytes {
		r.long = r.effort != most
		return unfollowed("a template that writes more than %d bytes", r.effort.bytes)
	}
	return r.check(n / 1024)
}

// check looks at the clock once in a while: after so much work.
func (r *rendering) check(work int) error {
	if r.checks += 1 + work; r.checks < 512 {
		return nil
	}
	r.checks = 0
	if time.Since(r.started) > maxTime {
		return unfollowed("a template that takes longer than %v", maxTime)
	}
	return nil
}
