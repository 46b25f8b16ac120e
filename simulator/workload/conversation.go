package workload

import (
	"cmp"
	"slices"
	"time"
)

// conversation is somebody's requests one after the other, each with all that was said
// before. It is used by the generator that has begun it.
type conversation struct {
	g       *generator
	at      time.Duration // of the next request
	head    []Part        // what every prompt of it begins with
	history []Part
	number  int
	tenant  int
}

// conversations come in a Poisson process, begin with one of heads, and go on as step
// says, which makes one request and sets the time of the next; it may make others
// beside it, others on average, unless it is the last. gap draws the time from one
// request to the next. They are in full course from the beginning on: those that have
// begun before go on at their next request, but as if it were the first, so that
// nobody's history is of answers that were never asked for.
func (g *generator) conversations(heads [][]Part, others float64, gap func() time.Duration, step func(c *conversation, last bool)) {
	popular := newZipf(len(heads), g.Zipf)
	every := (g.Turns + (g.Turns-1)*others) / g.Rate
	start, checked := g.longBefore(gap), 0
	for n := 1; ; n++ {
		if start += g.wait(every); g.Duration > 0 && start >= g.Duration || start > longestTime {
			return
		}
		if more := len(g.requests) - checked; g.Requests > 0 && start > 0 && more > g.Requests/16 {
			if checked = len(g.requests); g.madeBefore(start) >= g.Requests {
				return
			}
		}
		at, over := start, false
		for at < 0 && !over {
			over = g.isLast()
			at += gap()
		}
		if over {
			continue
		}
		c := &conversation{g: g, at: at, head: heads[popular.draw(g.random)], number: n, tenant: g.random.IntN(g.Tenants)}
		c.begin()
		for last := false; !last && c.at <= longestTime && (g.Duration == 0 || c.at < g.Duration); {
			last = g.isLast()
			step(c, last)
		}
	}
}

// isLast draws whether a request is its conversation's last, of which there are so that
// their number is Turns on average, and geometric.
func (g *generator) isLast() bool { return g.random.Float64() < 1/g.Turns }

// longBefore is so long before the beginning that hardly any conversation is from
// before that: one of eight times the usual length.
func (g *generator) longBefore(gap func() time.Duration) time.Duration {
	const draws = 1000
	sum := 0.0
	for range draws {
		sum += gap().Seconds()
	}
	return -time.Duration(min(8*(g.Turns-1)*sum/draws, longestTime.Seconds()) * float64(time.Second))
}

// madeBefore is how many of the requests that there are come before a time.
func (g *generator) madeBefore(at time.Duration) (n int) {
	for i := range g.requests {
		if g.requests[i].At < at {
			n++
		}
	}
	return n
}

// begin is the beginning, or what is left when all that was said is forgotten but for a
// summary.
func (c *conversation) begin() {
	c.history = append(slices.Clone(c.head), c.g.part("user", c.g.Own, unevenly))
}

// ask makes the next request and returns the part that its answer is, and when it is
// taken to be there.
func (c *conversation) ask() (answer Part, end time.Duration) {
	r := c.request(c.at, c.history, c.g.Output)
	if r.Input()+r.Output > c.g.Longest && len(c.history) > len(c.head)+1 {
		c.begin()
		r.Parts = slices.Clip(c.history)
	}
	c.g.requests = append(c.g.requests, r)
	return r.answer(), c.end(&r)
}

func (c *conversation) request(at time.Duration, parts []Part, output int) Request {
	// What is appended to the history later is not seen through a clipped slice.
	return Request{At: at, Session: c.number, Tenant: c.tenant, Parts: slices.Clip(parts),
		Output: c.g.answer(output), Answer: c.g.id()}
}

func (r *Request) answer() Part { return Part{ID: r.Answer, Tokens: r.Output, Role: "assistant"} }

func (c *conversation) end(r *Request) time.Duration {
	return r.At + time.Duration(r.Output)*c.g.PerToken
}

// gap draws how long an answer takes and what is done with it.
func (g *generator) gap() time.Duration {
	return time.Duration(g.answer(g.Output))*g.PerToken + g.wait(g.Think.Seconds())
}

// singles are heads of one part.
func singles(parts []Part) [][]Part {
	heads := make([][]Part, max(len(parts), 1))
	for k := range parts {
		heads[k] = parts[k : k+1]
	}
	return heads
}

// chats are conversations of people, who read an answer and think before they go on.
func (g *generator) chats() {
	g.conversations(singles(g.groups("system", g.Shared)), 0, g.gap, func(c *conversation, last bool) {
		answer, end := c.ask()
		c.history = append(c.history, answer, g.part("user", g.Own, unevenly))
		c.at = end + g.wait(g.Think.Seconds())
	})
}

// An agent calls several tools at a time once in so many steps, and has others answer
// questions of its own instead once in so many; each time there are two to four.
const (
	stepsPerCalls  = 6
	stepsPerOthers = 10
)

func (g *generator) several() int { return 2 + g.random.IntN(3) }

// agents have tools, whose results they go on with.
func (g *generator) agents() {
	tools, systems := g.groups("tools", g.Shared*3/4), g.groups("system", g.Shared/4)
	heads := make([][]Part, len(tools))
	for k := range heads {
		heads[k] = []Part{tools[k], systems[k]}
	}
	if len(heads) == 0 {
		heads = [][]Part{nil}
	}
	gap := func() time.Duration {
		longest := 0
		if g.random.IntN(stepsPerOthers) == 0 {
			for range g.several() {
				longest = max(longest, g.answer(2*g.Output))
			}
		}
		return g.gap() + time.Duration(longest)*g.PerToken
	}
	g.conversations(heads, 3.0/stepsPerOthers, gap, func(c *conversation, last bool) {
		answer, end := c.ask()
		context := append(c.history, answer)
		c.history = context
		results := 1
		switch {
		case last:
			return
		case g.random.IntN(stepsPerOthers) == 0:
			began := end
			for range g.several() {
				r := c.request(began, append(slices.Clip(context), g.part("user", g.Own, unevenly)), 2*g.Output)
				if r.Input()+r.Output > g.Longest {
					continue
				}
				g.requests = append(g.requests, r)
				c.history = append(c.history, Part{ID: r.Answer, Tokens: r.Output, Role: "tool"})
				end = max(end, c.end(&r))
			}
			if results = 0; c.history[len(c.history)-1].Role != "tool" {
				results = 1
			}
		case g.random.IntN(stepsPerCalls) == 0:
			results = g.several()
		}
		for range results {
			c.history = append(c.history, g.part("tool", g.Result, unevenly))
		}
		c.at = end + g.wait(g.Think.Seconds())
	})
}

// swarm is a number of agents that are all there from the beginning to the end.
func (g *generator) swarm() {
	if g.Throttles == nil {
		g.Throttles = []Throttle{{At: g.length() / 3, Factor: 8}}
	}
	heads, every := singles(g.groups("system", g.Shared)), float64(g.Sessions)/g.Rate
	g.Think = time.Duration(max(every-float64(g.Output)*g.PerToken.Seconds(), 0) * float64(time.Second))
	var swarm []*conversation
	for n := range g.Sessions {
		c := &conversation{g: g, head: heads[n%len(heads)], number: n + 1, tenant: n % g.Tenants}
		c.at = time.Duration(g.random.Float64() * every * float64(time.Second))
		c.begin()
		swarm = append(swarm, c)
	}
	for {
		c := slices.MinFunc(swarm, func(a, b *conversation) int { return cmp.Compare(a.at, b.at) })
		if g.over(c.at) {
			return
		}
		answer, end := c.ask()
		c.history = append(c.history, answer, g.part("tool", g.Result, unevenly))
		c.at = end + g.wait(g.Think.Seconds())
	}
}
