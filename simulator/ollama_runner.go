package simulator

import (
	"context"
	"net/http"
	"sync"
	"time"
)

// ollamaRunner is what has the model in memory: it is loaded with the first request
// that needs it, again when a request needs it otherwise, and unloaded when nobody
// has asked for it for a while. A process has one. Its methods may be called from
// any goroutine.
type ollamaRunner struct {
	loadTime, keepAlive time.Duration
	// maxQueue is how many may wait for turn. Who the model is loaded for already
	// waits for the engine alone, where there is always room: so does Ollama.
	maxQueue int
	// turn holds a token while nobody loads the model.
	turn chan struct{}

	mu     sync.Mutex // guards the rest
	queued int
	loaded bool
	// resident model, how many requests have it, and for how long it stays after
	// the last of them, when loaded.
	model   ollamaResident
	using   int
	session time.Duration
	// idle is closed when no request has the model any more, if somebody waits
	// for that.
	idle chan struct{}
}

// ollamaResident is a model in memory.
type ollamaResident struct {
	name    string
	options runnerOptions
	expires time.Time
}

// runnerOptions are those of a request that a model is loaded with. The zero value
// leaves all to Ollama.
type runnerOptions struct {
	context, batch, gpu, thread, draft int
	mainGPU, mmap                      string
	// contextAsked and batchAsked: the request says them.
	contextAsked, batchAsked, noShift bool
}

// fits reports whether a model that was loaded with o is what n asks for.
func (o runnerOptions) fits(n runnerOptions) bool {
	if !o.contextAsked && !n.contextAsked {
		n.context = o.context
	}
	if !o.batchAsked && !n.batchAsked {
		n.batch = o.batch
	}
	if n.mmap == "" {
		n.mmap = o.mmap
	}
	if n.gpu < 0 {
		o.gpu = n.gpu
	}
	o.contextAsked, o.batchAsked = n.contextAsked, n.batchAsked
	return o == n
}

func newOllamaRunner(cfg *Config) *ollamaRunner {
	r := &ollamaRunner{loadTime: cfg.LoadTime, keepAlive: cfg.Ollama.KeepAlive, maxQueue: cfg.Ollama.MaxQueue, turn: make(chan struct{}, 1)}
	r.turn <- struct{}{}
	return r
}

var errOllamaBusy = ollamaRefusal(http.StatusServiceUnavailable, "server busy, please try again.  maximum pending requests exceeded")

// acquire waits until the model is in memory as asked for. empty is called before
// it is loaded, when nobody has it. Whoever gets no error must call release.
func (r *ollamaRunner) acquire(ctx context.Context, name string, options runnerOptions, keepAlive *time.Duration, empty func()) error {
	r.mu.Lock()
	if r.takeLocked(options, keepAlive) {
		r.mu.Unlock()
		return nil
	}
	if r.queued >= r.maxQueue {
		r.mu.Unlock()
		return errOllamaBusy
	}
	r.queued++
	r.mu.Unlock()
	select {
	case <-r.turn:
	case <-ctx.Done():
	}
	r.mu.Lock()
	r.queued--
	r.mu.Unlock()
	if ctx.Err() != nil {
		return errOllamaLeft
	}
	defer func() { r.turn <- struct{}{} }()
	return r.load(ctx, name, options, keepAlive, empty)
}

var errOllamaLeft = ollamaRefusal(499, "request canceled")

// takeLocked lets a request have the model, if it is loaded as asked for.
func (r *ollamaRunner) takeLocked(options runnerOptions, keepAlive *time.Duration) bool {
	if r.expireLocked(); !r.loaded || !r.model.options.fits(options) {
		return false
	}
	if r.using++; keepAlive != nil {
		r.session = *keepAlive
	}
	return true
}

// load loads the model. The caller has the turn.
func (r *ollamaRunner) load(ctx context.Context, name string, options runnerOptions, keepAlive *time.Duration, empty func()) error {
	for {
		r.mu.Lock()
		if r.takeLocked(options, keepAlive) {
			r.mu.Unlock()
			return nil
		}
		if r.using == 0 {
			break
		}
		// Those who have it finish before it is loaded otherwise.
		if r.idle == nil {
			r.idle = make(chan struct{})
		}
		idle := r.idle
		r.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return errOllamaLeft
		}
	}
	r.loaded = false
	r.mu.Unlock()
	empty()
	timer := time.NewTimer(r.loadTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return errOllamaLeft
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.loaded, r.using, r.session = true, 1, r.keepAlive
	if keepAlive != nil {
		r.session = *keepAlive
	}
	r.model = ollamaResident{name: name, options: options}
	return nil
}

// release tells that a request does not need the model any more.
func (r *ollamaRunner) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.using--; r.using > 0 {
		return
	}
	if r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
	r.model.expires = after(time.Now(), r.session)
	if r.session == 0 {
		r.loaded = false
	}
}

// after is when a time from now is over; below 0 is for ever.
func after(now time.Time, d time.Duration) time.Time {
	if d < 0 {
		d = never
	}
	return now.Add(d)
}

// expireLocked unloads a model whose time is over.
func (r *ollamaRunner) expireLocked() {
	if r.loaded && r.using == 0 && !time.Now().Before(r.model.expires) {
		r.loaded = false
	}
}

// unload takes the model out of memory when nobody has it.
func (r *ollamaRunner) unload() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session = 0; r.using == 0 {
		r.loaded = false
	}
}

// resident returns the model that is in memory, if one is.
func (r *ollamaRunner) resident() (ollamaResident, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expireLocked()
	m := r.model
	if r.using > 0 && m.expires.IsZero() {
		m.expires = after(time.Now(), r.session)
	}
	return m, r.loaded
}

// admitOllama holds a request back until the model is loaded.
func admitOllama(x *exchange) (release func(), err error) {
	d, ok := x.req.dialect.(*ollamaDialect)
	if !ok {
		return func() {}, nil
	}
	r := x.s.current().runner
	if d.unloads {
		r.unload()
		return func() {}, nil
	}
	if err := r.acquire(x.ctx, d.name, d.options, d.keepAlive, func() { x.s.reset() }); err != nil {
		return nil, err
	}
	d.loaded = x.s.now()
	return r.release, nil
}
