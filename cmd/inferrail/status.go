package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/inferrail/inferrail/agent"
)

type statusCommand struct {
	adminPort
	Watch bool          `short:"w" help:"Draw it anew until q or ctrl-C."`
	Every time.Duration `placeholder:"TIME" default:"2s" help:"How often, by default each 2s."`
	JSON  bool          `name:"json" help:"Print what the agent tells, for programs: one line each time."`
}

// Help is shown below the flags.
func (*statusCommand) Help() string {
	return `One screen of what an operator asks first: is it well, who carries the answers, what do the replicas do, and what has failed.

The exit status is 0 when the agent serves requests and lacks nothing, 1 when it serves them and is degraded, and 2 when it serves
none: it is not ready, drains, or cannot be asked. With --watch it is that of what was seen last.`
}

// statusTimeout bounds one look at the agent.
const statusTimeout = 20 * time.Second

// The exit statuses of inferrail status.
const (
	statusWell     verdict = 0
	statusDegraded verdict = 1
	statusServes0  verdict = 2
)

// agentStatus is what one look at an agent has shown, and what --json prints.
type agentStatus struct {
	Admin string `json:"admin"`
	// Health is ok, degraded, not ready or draining, as /readyz says, and Exit the exit
	// status that stands for it.
	Health string  `json:"health"`
	Exit   verdict `json:"exit_status"`
	// Overview, Datapath and Failures are of the pages /debug/overview, /debug/datapath
	// and /debug/decisions: the last requests that have failed, the newest first.
	Overview agent.Overview   `json:"overview"`
	Datapath carriedAnswers   `json:"datapath"`
	Failures []recentDecision `json:"failures"`
}

// carriedAnswers is what is read of /debug/datapath.
type carriedAnswers struct {
	Interfaces []string          `json:"interfaces"`
	Failed     map[string]string `json:"interfaces_failed,omitempty"`
	Responses  []carriedBy       `json:"responses"`
	Copied     uint64            `json:"copied_chunks"`
	Kernel     uint64            `json:"kernel_chunks"`
	// Wakeups is nil before the first chunk.
	Wakeups *float64 `json:"wakeups_per_1000_chunks"`
}

// carriedBy are the answers that one tier has carried, for one reason.
type carriedBy struct {
	Tier   string `json:"tier"`
	Reason string `json:"reason"`
	Count  uint64 `json:"count"`
}

// recentDecisions is /debug/decisions.
type recentDecisions struct {
	Kept      uint64           `json:"kept"`
	Made      uint64           `json:"made"`
	Decisions []recentDecision `json:"decisions"`
}

// recentDecision is a row of it, as far as it is read.
type recentDecision struct {
	Time         time.Time `json:"time"`
	RequestID    string    `json:"request_id"`
	Model        string    `json:"model"`
	Policy       string    `json:"policy"`
	Winner       string    `json:"winner"`
	Reason       string    `json:"reason"`
	PromptTokens int       `json:"prompt_tokens"`
	CachedTokens int       `json:"cached_tokens"`
	PredictedMS  *float64  `json:"predicted_ms"`
	Disagreed    []string  `json:"disagreed,omitempty"`
	// Outcome is nil as long as the request is not over.
	Outcome *struct {
		Outcome      string   `json:"outcome"`
		Status       int      `json:"status"`
		Attempts     int      `json:"attempts"`
		FirstTokenMS *float64 `json:"first_token_ms"`
	} `json:"outcome"`
}

// failed reports that the request is over, and that its client has not left by itself
// and has got no answer that is right.
func (r *recentDecision) failed() bool {
	return r.Outcome != nil && (r.Outcome.Status >= 500 || r.Outcome.Status == http.StatusTooManyRequests || r.Outcome.Outcome == "aborted")
}

// line tells of one that has failed.
func (r *recentDecision) line() string {
	at := r.Winner
	if at == "" {
		at = "no replica"
	}
	return fmt.Sprintf("%s  %d %s, %s at %s (request %s)", r.Time.Local().Format("15:04:05"), r.Outcome.Status, r.Outcome.Outcome, r.Model, at, r.RequestID)
}

// mostFailures bounds those that are shown.
const mostFailures = 3

// Run shows the state of a running agent.
func (c *statusCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	if c.Every < 100*time.Millisecond {
		return fmt.Errorf("--every %v is too often; want 100ms or more", c.Every)
	}
	if c.Watch {
		return c.watch(ctx, e)
	}
	s, err := c.look(ctx)
	if err != nil {
		fmt.Fprintf(e.stderr, "inferrail: %v\n", err)
		return statusServes0
	}
	if err := c.print(e.stdout, s, screenOf(e.stdout)); err != nil {
		return err
	}
	return s.Exit.err()
}

// print prints one state.
func (c *statusCommand) print(w io.Writer, s *agentStatus, size screen) error {
	if c.JSON {
		return json.NewEncoder(w).Encode(s)
	}
	_, err := w.Write(size.text(s.lines(size)))
	return err
}

// look asks the agent once.
func (c *statusCommand) look(ctx context.Context) (*agentStatus, error) {
	ctx, end := context.WithTimeout(ctx, statusTimeout)
	defer end()
	s := &agentStatus{Admin: c.Admin}
	if err := c.read(ctx, inquiry{path: "debug/overview"}, &s.Overview); err != nil {
		return nil, err
	}
	ready, _, err := c.ask(ctx, inquiry{path: "readyz", answers: []int{http.StatusServiceUnavailable}})
	if err != nil {
		return nil, err
	}
	s.Health, _, _ = strings.Cut(strings.TrimSpace(string(ready)), ":")
	switch s.Health {
	case "ok":
	case "degraded":
		s.Exit = statusDegraded
	default:
		s.Exit = statusServes0
	}
	if err := c.read(ctx, inquiry{path: "debug/datapath"}, &s.Datapath); err != nil {
		return nil, err
	}
	var recent recentDecisions
	if err := c.read(ctx, inquiry{path: "debug/decisions"}, &recent); err != nil {
		return nil, err
	}
	s.Failures = []recentDecision{}
	for _, r := range slices.Backward(recent.Decisions) {
		if r.failed() && len(s.Failures) < mostFailures {
			s.Failures = append(s.Failures, r)
		}
	}
	return s, nil
}

// traffic is what the last minute of the history comes to. A number that is not known
// is NaN.
type traffic struct {
	requests, failed, refused, retries float64 // a second
	tokens, kernel                     float64 // likewise
	firstToken, worst, hits            float64
}

// lately is how much of the history that is.
const lately = time.Minute

// traffic reads the history by the names of its columns: an agent of another version may
// have others.
func (s *agentStatus) traffic() traffic {
	o := &s.Overview
	column := func(row []*float64, name string) float64 {
		if i := slices.Index(o.Columns, name); i >= 0 && i < len(row) && row[i] != nil {
			return *row[i]
		}
		return math.NaN()
	}
	t := traffic{firstToken: math.NaN(), worst: math.NaN(), hits: math.NaN()}
	rows := o.History
	if steps := int(lately.Seconds() / max(o.StepS, .1)); len(rows) > steps {
		rows = rows[len(rows)-steps:]
	}
	type median struct{ at, weight float64 }
	var medians []median
	var hit, asked, weights float64
	for _, row := range rows {
		t.requests += column(row, "requests_per_s")
		t.failed += column(row, "failed_per_s")
		t.refused += column(row, "refused_per_s")
		t.retries += column(row, "retries_per_s")
		t.tokens += column(row, "tokens_per_s")
		t.kernel += column(row, "kernel_tokens_per_s")
		if p50 := column(row, "first_token_p50_ms"); !math.IsNaN(p50) {
			w := column(row, "first_tokens_per_s")
			medians = append(medians, median{p50, w})
			weights += w
		}
		if p99 := column(row, "first_token_p99_ms"); !math.IsNaN(p99) && !(p99 <= t.worst) {
			t.worst = p99
		}
		// What the agent expects, where it tells that: engines tell of few streams.
		rate, of := column(row, "expected_hit_rate"), column(row, "asked_tokens_per_s")
		if !slices.Contains(o.Columns, "expected_hit_rate") {
			rate, of = column(row, "hit_rate"), column(row, "prompt_tokens_per_s")
		}
		if !math.IsNaN(rate) && of > 0 {
			hit += rate * of
			asked += of
		}
	}
	n := float64(max(len(rows), 1))
	for _, sum := range []*float64{&t.requests, &t.failed, &t.refused, &t.retries, &t.tokens, &t.kernel} {
		*sum /= n
	}
	slices.SortFunc(medians, func(a, b median) int { return cmp.Compare(a.at, b.at) })
	for sum, i := 0.0, 0; i < len(medians); i++ {
		if sum += medians[i].weight; sum >= weights/2 {
			t.firstToken = medians[i].at
			break
		}
	}
	if asked > 0 {
		t.hits = hit / asked
	}
	return t
}

// lines are the state as people read it, for a screen: what is said in words first, and
// then a table of as many replicas as there is room for, those first that want looking at.
func (s *agentStatus) lines(size screen) []line {
	o := &s.Overview
	var out []line
	say := func(head, format string, args ...any) {
		out = append(out, line{text: fmt.Sprintf("%-10s", head) + fmt.Sprintf(format, args...)})
	}
	colour := green
	switch s.Exit {
	case statusDegraded:
		colour = yellow
	case statusServes0:
		colour = red
	}
	title := fmt.Sprintf("%-10s%s", "agent", strings.ToUpper(s.Health))
	from := len("agent     ")
	out = append(out, line{text: fmt.Sprintf("%s  %s, inferrail %s, up %s (since %s)", title, s.Admin, o.Version, inWords(o.Time.Sub(o.Started)), o.Started.Local().Format("Jan 2 15:04:05")),
		colour: colour, from: from, to: from + len([]rune(s.Health))})
	for i, why := range o.Degraded {
		if room := max(size.height/5, 2); i == room && len(o.Degraded) > room+1 {
			say("", "and %d more", len(o.Degraded)-i)
			break
		}
		head := ""
		if i == 0 {
			head = "because"
		}
		say(head, "%s", why)
	}
	say("datapath", "%s", s.datapathLine())
	say("answers", "%s", s.Datapath.line())
	t := s.traffic()
	say("traffic", "%s requests/s, %d running, %d waiting, %s tokens/s, hit rate %s", short(t.requests), o.Running, o.Waiting, short(t.tokens), percent(t.hits))
	say("", "first token p50 %s, p99 %s; %s refused, %s failed, %s retried /s", inMilliseconds(t.firstToken), inMilliseconds(t.worst), short(t.refused), short(t.failed), short(t.retries))
	say("caches", "%s", s.cacheLine())
	for i, m := range o.Models {
		if i == 3 && len(o.Models) > 4 {
			say("", "and %d more models", len(o.Models)-i)
			break
		}
		head := ""
		if i == 0 {
			head = "models"
		}
		waiting := ""
		if m.Waiting > 0 {
			waiting = fmt.Sprintf(", %d waiting", m.Waiting)
		}
		say(head, "%s: %s, %s%s", m.Name, count(m.Replicas, "replica"), m.Policy, waiting)
	}
	for i, r := range s.Failures {
		head := ""
		if i == 0 {
			head = "failures"
		}
		say(head, "%s", r.line())
	}
	say("replicas", "%s", standingsOf(o.States))
	if len(o.Replicas) > 0 {
		out = append(out, line{})
		out = append(out, s.table(size, max(size.height-len(out)-1, 4))...)
	}
	return out
}

func (s *agentStatus) datapathLine() string {
	text := s.Overview.Tier
	if why := s.Overview.TierWhy; why != "" {
		text += " (" + why + ")"
	}
	if len(s.Datapath.Interfaces) > 0 {
		text += " on " + strings.Join(s.Datapath.Interfaces, ", ")
	}
	for _, name := range slices.Sorted(maps.Keys(s.Datapath.Failed)) {
		text += "; not on " + name + ": " + s.Datapath.Failed[name]
	}
	return text
}

// line tells which tier has carried answers, and why the most of those that were copied
// were.
func (d *carriedAnswers) line() string {
	tiers := map[string]uint64{}
	var all uint64
	var most carriedBy
	for _, r := range d.Responses {
		tiers[r.Tier] += r.Count
		all += r.Count
		if r.Tier == "copy" && r.Count > most.Count {
			most = r
		}
	}
	if all == 0 {
		return "none yet"
	}
	text := fmt.Sprintf("%s, %s by the kernel", count(int(all), "answer"), percent(float64(tiers["packet"])/float64(all)))
	if most.Count > 0 {
		text += fmt.Sprintf(", %s copied (most: %s)", percent(float64(tiers["copy"])/float64(all)), most.Reason)
	}
	if chunks := d.Kernel + d.Copied; chunks > 0 {
		text += fmt.Sprintf("; %s of %s", percent(float64(d.Kernel)/float64(chunks)), count(int(chunks), "chunk"))
	}
	return text
}

// cacheLine tells of how many replicas it is known how well what they have cached.
func (s *agentStatus) cacheLine() string {
	n, of := map[string]int{}, 0
	for _, r := range s.Overview.Replicas {
		if r.Cache != "" {
			n[r.Cache]++
			of++
		}
	}
	var parts []string
	for _, state := range []string{"exact", "approximate", "repairing", "mismatched"} {
		if n[state] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[state], state))
		}
	}
	switch {
	case len(parts) == 0:
		return "none is known"
	case n["exact"] == of:
		return "all known exactly, by events or by accounting"
	}
	return strings.Join(parts, ", ") + " (/debug/index says why)"
}

// standingsOf counts replicas by state, the good first.
func standingsOf(states map[string]int) string {
	all := 0
	for _, n := range states {
		all += n
	}
	text := fmt.Sprintf("%d of %d up", states["up"], all)
	for _, state := range slices.Sorted(maps.Keys(states)) {
		if n := states[state]; n > 0 && state != "up" {
			text += fmt.Sprintf(", %d %s", n, state)
		}
	}
	return text
}

// urgency orders replicas: those that want looking at first.
func urgency(state, cache string) int {
	rank := slices.Index([]string{"ejected", "down", "joining", "leaving"}, state)
	switch {
	case rank >= 0:
		return rank
	case cache == "mismatched":
		return 4
	case cache == "repairing":
		return 5
	}
	return 6
}

// byUrgency are the replicas in that order, and of those alike the busiest first.
func byUrgency(replicas []agent.ReplicaOverview) []agent.ReplicaOverview {
	replicas = slices.Clone(replicas)
	slices.SortStableFunc(replicas, func(a, b agent.ReplicaOverview) int {
		return cmp.Or(cmp.Compare(urgency(a.State, a.Cache), urgency(b.State, b.Cache)),
			cmp.Compare(b.Running+b.Pending, a.Running+a.Pending), cmp.Compare(b.BacklogMS, a.BacklogMS), cmp.Compare(a.ID, b.ID))
	})
	return replicas
}

// statusColumn is a column of the table of replicas. Those of a lower rank stay when the
// screen is narrow.
type statusColumn struct {
	name  string
	width int
	rank  int
	cell  func(i int) string
}

// table is the rows for replicas, at most so many lines.
func (s *agentStatus) table(size screen, most int) []line {
	replicas := byUrgency(s.Overview.Replicas)
	ratio := func(v *float64) string {
		if v == nil {
			return "-"
		}
		return percent(*v)
	}
	ms := func(v *float64) string {
		if v == nil {
			return "-"
		}
		return inMilliseconds(*v)
	}
	rate := func(v float64) string {
		if v == 0 {
			return "-"
		}
		return short(v)
	}
	columns := []statusColumn{
		{"RUN", 4, 0, func(i int) string { return strconv.Itoa(replicas[i].Running) }},
		{"WAIT", 4, 1, func(i int) string {
			n := replicas[i].Pending
			if w := replicas[i].EngineWaiting; w != nil {
				n += *w
			}
			return strconv.Itoa(n)
		}},
		{"KV", 4, 2, func(i int) string { return ratio(replicas[i].KV) }},
		{"HIT", 4, 3, func(i int) string { return ratio(replicas[i].HitRate) }},
		{"TTFT P50", 8, 4, func(i int) string { return ms(replicas[i].FirstTokenP50MS) }},
		{"P99", 8, 6, func(i int) string { return ms(replicas[i].FirstTokenP99MS) }},
		{"TOKENS/S", 8, 5, func(i int) string { return rate(replicas[i].TokensPerS) }},
		{"PREFILL/S", 9, 7, func(i int) string { return rate(replicas[i].PrefillTokensPerS) }},
		{"BACKLOG", 8, 9, func(i int) string { return inMilliseconds(replicas[i].BacklogMS) }},
		{"KERNEL", 6, 10, func(i int) string { return ratio(replicas[i].KernelShare) }},
		{"ENGINE", 8, 11, func(i int) string { return replicas[i].Engine }},
		{"CACHE", 11, 8, func(i int) string { return replicas[i].Cache }},
	}
	const stateWidth = 8
	widest := len("REPLICA")
	for i := range replicas {
		widest = max(widest, len([]rune(plain(replicas[i].ID))))
	}
	name := min(widest, max(size.width/4, 16))
	left := size.width - name - 1 - stateWidth
	wanted := slices.SortedFunc(slices.Values(columns), func(a, b statusColumn) int { return cmp.Compare(a.rank, b.rank) })
	lowest := -1
	for _, c := range wanted {
		if left -= c.width + 1; left < 0 {
			break
		}
		lowest = c.rank
	}
	columns = slices.DeleteFunc(columns, func(c statusColumn) bool { return c.rank > lowest })

	heading := fmt.Sprintf("%-*s %-*s", name, "REPLICA", stateWidth, "STATE")
	for _, c := range columns {
		heading += fmt.Sprintf(" %*s", c.width, c.name)
	}
	out := []line{{text: heading, colour: bold, to: len(heading)}}
	shown := len(replicas)
	if shown > most-1 {
		shown = max(most-2, 1)
	}
	for i := range replicas[:shown] {
		r := &replicas[i]
		l := line{text: fmt.Sprintf("%-*s %-*s", name, cut(plain(r.ID), name), stateWidth, r.State), from: name + 1, to: name + 1 + len(r.State)}
		switch {
		case r.State == "up" && urgency(r.State, r.Cache) < 6:
			l.colour = yellow
		case r.State == "up":
			l.colour = green
		case r.State == "ejected" || r.State == "down":
			l.colour = red
		default:
			l.colour = yellow
		}
		if r.State != "up" && r.Why != "" {
			l.text += " " + r.Why
		} else {
			for _, c := range columns {
				l.text += fmt.Sprintf(" %*s", c.width, c.cell(i))
			}
		}
		out = append(out, l)
	}
	if rest := replicas[shown:]; len(rest) > 0 {
		states := map[string]int{}
		for i := range rest {
			states[rest[i].State]++
		}
		text := fmt.Sprintf("and %d more, ", len(rest))
		if states["up"] == len(rest) {
			text += "all up"
		} else {
			text += standingsOf(states)
		}
		out = append(out, line{text: text})
	}
	return out
}

// short is a number of at most five characters.
func short(v float64) string {
	switch {
	case math.IsNaN(v):
		return "-"
	case v >= 9_999_500:
		return strconv.FormatFloat(v/1e6, 'f', 0, 64) + "M"
	case v >= 9_999.5:
		return strconv.FormatFloat(v/1e3, 'f', 0, 64) + "k"
	case v >= 99.5 || v == math.Trunc(v):
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 9.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

func percent(v float64) string {
	if math.IsNaN(v) {
		return "-"
	}
	return strconv.FormatFloat(100*v, 'f', 0, 64) + "%"
}

// inWords is a time that has passed, as people say it.
func inWords(d time.Duration) string {
	switch d = d.Round(time.Second); {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
	case d >= time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return d.String()
}

// watch shows the state again and again, until it is interrupted.
func (c *statusCommand) watch(ctx context.Context, e *env) error {
	show := func(_ []line) error { return nil }
	last := statusServes0
	w, done := e.stdout, func() {}
	t, err := openTerminal(e.stdout)
	if err != nil {
		return err
	}
	if t != nil && !c.JSON {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		done = t.begin(cancel)
		show = t.draw
	} else {
		t = nil
	}
	defer func() { done() }()
	var seen *agentStatus
	var gone time.Time
	for {
		s, err := c.look(ctx)
		if ctx.Err() != nil {
			break
		}
		size := screenOf(w)
		switch {
		case err == nil:
			seen, last, gone = s, s.Exit, time.Time{}
			if t == nil {
				err = c.print(w, s, size)
			} else {
				err = show(s.lines(size))
			}
			if err != nil {
				return err
			}
		default:
			if gone.IsZero() {
				gone = time.Now()
			}
			last = statusServes0
			// The agent may be started anew: it is asked again, and what was seen of it
			// last stays on the screen.
			text := fmt.Sprintf("%-10s%s", "agent", "DOES NOT ANSWER")
			lines := []line{{text: fmt.Sprintf("%s since %s: %v", text, gone.Local().Format("15:04:05"), err), colour: red, from: 10, to: len(text)}}
			if t == nil {
				if !c.JSON {
					_, err = w.Write(size.text(lines))
				} else {
					err = json.NewEncoder(w).Encode(map[string]any{"admin": c.Admin, "health": "unreachable", "exit_status": statusServes0, "error": err.Error()})
				}
				if err != nil {
					return err
				}
				break
			}
			if seen != nil {
				lines = append(lines, line{text: fmt.Sprintf("%-10s%s ago:", "it was so", inWords(time.Since(gone))), colour: yellow, to: 9}, line{})
				size.height -= len(lines)
				for _, l := range seen.lines(size) {
					l.colour = "" // it is no news
					lines = append(lines, l)
				}
			}
			if err := show(lines); err != nil {
				return err
			}
		}
		if t == nil && !c.JSON {
			fmt.Fprintln(w)
		}
		select {
		case <-ctx.Done():
		case <-time.After(c.Every):
		}
		if ctx.Err() != nil {
			break
		}
	}
	return last.err()
}

// screenOf is how large a screen w is, or how much is printed where it is none.
func screenOf(w io.Writer) screen {
	s := screen{width: 400, height: 60}
	f, ok := w.(*os.File)
	if !ok {
		return s
	}
	if width, height, ok := windowSize(f); ok {
		s = screen{width: width, height: height, terminal: true, colours: os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
	}
	return s
}

// text is the lines as bytes, the last one with its end.
func (s screen) text(lines []line) []byte {
	var b bytes.Buffer
	for _, l := range lines {
		b.WriteString(l.on(s))
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// verdict is an exit status that says more than that a command has failed. As an error it
// is that of a command that has told already what there is to tell.
type verdict int

// Error implements error.
func (v verdict) Error() string { return "exit status " + strconv.Itoa(int(v)) }

func (v verdict) err() error {
	if v == 0 {
		return nil
	}
	return v
}
