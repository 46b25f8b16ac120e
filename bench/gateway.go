package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Gateway is `inferrail bench gateway`; the package comment has the method.
// The tags are kong's. Run may be called once, from any goroutine.
type Gateway struct {
	Rates       []int         `default:"500,1000,2000,5000" placeholder:"N" help:"Calls a second, of the open loop."`
	Connections int           `default:"1024" help:"Most connections of the open loop. A call that is due when all are busy waits, and that counts."`
	Callers     int           `default:"64" help:"Connections of the closed loop that finds the most a contestant can do; 0 leaves that out."`
	Reps        int           `default:"3" help:"Repetitions of each measurement."`
	Warm        time.Duration `default:"300ms" help:"Time between the first answer and the measurement."`
	Measure     time.Duration `default:"3s" help:"Length of one measurement."`
	Only        []string      `placeholder:"NAME" help:"Contestants to run: direct, packet, copy, nginx, haproxy, sglang-router, vllm-router. Default all."`
	OtherLoad   float64       `default:"8" help:"Repeat a measurement during which the machine's CPUs were busy with other things for more than this many percent."`
	Limit       time.Duration `default:"7m30s" help:"Repeat no noisy measurement that would make the whole take longer than this."`
	Results     string        `default:"bench/results" help:"Folder for gateway.json and gateway.svg; empty writes none."`
	Agent       []string      `sep:" " placeholder:"COMMAND" help:"How to start the agent; --datapath, --replica, --listen and --iface are appended. Default: this program's agent command."`

	// Stdout receives the table, Stderr the progress. Nil is the process's own.
	Stdout io.Writer `kong:"-"`
	Stderr io.Writer `kong:"-"`
}

// CallRun is one measurement of one contestant at one rate; rate 0 is the
// closed loop.
type CallRun struct {
	Contestant string `json:"contestant"`
	Rate       int    `json:"rate"`
	Rep        int    `json:"repetition"`
	Attempt    int    `json:"attempt"`
	CallReport
	CPU CPU `json:"cpu_us_per_request"`
	// Wakeups are voluntary context switches of the contestant per request.
	Wakeups float64 `json:"wakeups_per_request"`
	// PeakKiB is that of the contestant since it was started, which is once a
	// repetition.
	PeakKiB uint64  `json:"peak_kib"`
	Busy    float64 `json:"busy_percent"`
	Other   float64 `json:"other_load_percent"`
	Noisy   bool    `json:"noisy,omitempty"`
	Behind  bool    `json:"behind,omitempty"` // under 97 % of the calls were answered in time
}

// Absent is a contestant that was left out, at first or from some measurement on.
type Absent struct {
	Contestant string `json:"contestant"`
	Reason     string `json:"reason"`
}

// gateways are the contestants in the order of the table.
func gateways() []contestant {
	all := slices.Clone(contestants)
	for i := range routers {
		all = append(all, routers[i].contestant())
	}
	return all
}

// Run measures, prints the table and writes the results. It fails when direct
// or the agent did not start or answered a call wrongly. A peer that does is a
// line of the table.
func (g *Gateway) Run(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if g.Stdout == nil {
		g.Stdout = os.Stdout
	}
	if g.Stderr == nil {
		g.Stderr = os.Stderr
	}
	chosen, err := g.check()
	if err != nil {
		return fmt.Errorf("bench gateway: %w", err)
	}
	machine, err := describeMachine(ctx)
	if err != nil {
		return err
	}
	for _, r := range routers {
		machine.Versions[r.name] = r.version
	}
	report := GatewayReport{Date: time.Now().UTC().Format(time.RFC3339), Machine: machine, Note: sharedNote(machine.CPUs),
		Reps: g.Reps, Seconds: g.Measure.Seconds(), Callers: g.Callers, Connections: g.Connections, OtherLoadLimit: g.OtherLoad,
		RequestBytes: newCall().bodyLength(), AnswerBytes: newAnswer().bodyLength(), Engines: len(gatewayEngines)}

	session := gatewaySession{Gateway: g, report: &report, absent: map[string]bool{}}
	for i := range chosen {
		session.prepare(ctx, &chosen[i])
	}
	session.begin = time.Now()
	session.total = g.Reps * len(chosen) * len(g.rates())
	fmt.Fprintf(g.Stderr, "bench gateway: %d measurements of %v\n", session.total, g.Measure)
	for rep := range g.Reps {
		for i := range chosen {
			session.compete(ctx, &chosen[(i+rep)%len(chosen)], rep+1)
			if ctx.Err() != nil {
				return fmt.Errorf("bench gateway ended early: %w", context.Cause(ctx))
			}
		}
	}
	report.summarise()
	report.Took = time.Since(session.begin).Seconds()
	if err := report.writeTable(g.Stdout); err != nil {
		return err
	}
	if g.Results != "" && len(report.Rows) > 0 {
		if err := writeResults(g.Results, "gateway", &report, report.appendChart(nil)); err != nil {
			return err
		}
	}
	return errors.Join(session.failures...)
}

// gatewayEngines are where the engine answers.
var gatewayEngines = []string{engineAddr, engineAddr2}

// rates are those of the open loop, and 0 for the closed one.
func (g *Gateway) rates() []int {
	if g.Callers == 0 {
		return g.Rates
	}
	return append(slices.Clone(g.Rates), 0)
}

// check validates the fields and returns the chosen contestants.
func (g *Gateway) check() ([]contestant, error) {
	if g.Reps < 1 || g.Measure <= 0 || g.Warm < 0 || g.Connections < 1 || g.Callers < 0 || len(g.rates()) == 0 {
		return nil, errors.New("--reps, --measure and --connections must be positive, and --rates or --callers given")
	}
	for _, rate := range g.Rates {
		if rate < 1 || rate > 100_000 {
			return nil, fmt.Errorf("--rates %d: want 1 to 100000 calls a second", rate)
		}
	}
	clients := max(g.Connections, g.Callers)
	if clients > maxStreams {
		return nil, fmt.Errorf("%d connections: want at most %d", clients, maxStreams)
	}
	chosen, err := choose(gateways(), g.Only)
	if err == nil {
		err = checkMachine(clients)
	}
	return chosen, err
}

// gatewaySession is one run of the benchmark on its way. Gateway.Run owns it.
type gatewaySession struct {
	*Gateway
	report   *GatewayReport
	begin    time.Time
	number   int           // of the measurement
	total    int           // measurements
	repeats  time.Duration // spent on measuring again what was noisy
	absent   map[string]bool
	failures []error
}

// prepare gets what a contestant needs.
func (s *gatewaySession) prepare(ctx context.Context, c *contestant) {
	if c.prepare == nil {
		return
	}
	fmt.Fprintf(s.Stderr, "bench gateway: looking for %s, or installing it\n", c.name)
	if err := c.prepare(ctx); err != nil {
		s.leaveOut(ctx, c, err)
	}
}

// leaveOut gives a contestant up, unless the whole is being given up.
func (s *gatewaySession) leaveOut(ctx context.Context, c *contestant, err error) {
	if ctx.Err() != nil {
		return
	}
	fmt.Fprintf(s.Stderr, "%s is left out: %v\n", c.name, err)
	s.absent[c.name] = true
	reason, _, _ := strings.Cut(err.Error(), "\n")
	s.report.Absent = append(s.report.Absent, Absent{c.name, reason})
	if c.agent || c.command == nil {
		s.failures = append(s.failures, fmt.Errorf("%s: %w", c.name, err))
	}
}

// compete starts a contestant and measures it at every rate.
func (s *gatewaySession) compete(ctx context.Context, c *contestant, rep int) {
	if s.absent[c.name] {
		s.number += len(s.rates())
		return
	}
	r, err := newRig(ctx, c, setup{agent: s.Agent, engines: gatewayEngines, clients: max(s.Connections, s.Callers)}, 20)
	if err != nil {
		s.number += len(s.rates())
		s.leaveOut(ctx, c, err)
		return
	}
	defer r.close()
	for i, rate := range s.rates() {
		s.number++
		var best *CallRun
		for attempt := 1; attempt <= 3; attempt++ {
			took := time.Now()
			m, err := s.measure(ctx, r, c, rate, rep)
			if err != nil {
				s.number += len(s.rates()) - i - 1
				s.leaveOut(ctx, c, err)
				return
			}
			m.Attempt = attempt
			fmt.Fprintf(s.Stderr, "[%d/%d] %v\n", s.number, s.total, m)
			if m.Bad+m.Lost > 0 && (c.agent || c.command == nil) {
				s.failures = append(s.failures, fmt.Errorf("%s at %s: %d wrong answers, %d lost calls; the first: %w",
					c.name, rateText(rate), m.Bad, m.Lost, r.failed(m.Fault)))
			}
			if best == nil || m.Other < best.Other {
				best = m
			}
			if attempt > 1 {
				s.repeats += time.Since(took)
			}
			if !best.Noisy || s.expected()+time.Since(took) > s.Limit {
				break
			}
		}
		s.report.Runs = append(s.report.Runs, *best)
	}
}

// expected is how long the whole will take when nothing more is repeated. What
// was repeated so far is no measure for the rest.
func (s *gatewaySession) expected() time.Duration {
	first := time.Since(s.begin) - s.repeats
	return s.repeats + first*time.Duration(s.total)/time.Duration(s.number)
}

// measure makes one measurement. The same repetition has the same arrivals for
// every contestant.
func (s *gatewaySession) measure(ctx context.Context, r *rig, c *contestant, rate, rep int) (*CallRun, error) {
	connections := s.Connections
	if rate == 0 {
		connections = s.Callers
	}
	client, err := r.startClient(ctx, s.Warm, "caller", "-target", c.target(), "-rate", fmt.Sprint(rate),
		"-connections", fmt.Sprint(connections), "-seed", fmt.Sprint(rep))
	if err != nil {
		return nil, err
	}
	defer client.stop()
	used, peak, err := r.meter(ctx, client, s.Measure)
	if err != nil {
		return nil, err
	}
	m := &CallRun{Contestant: c.name, Rate: rate, Rep: rep, PeakKiB: peak, Busy: used.busy, Other: used.other}
	if err := r.report(ctx, client, &m.CallReport); err != nil {
		return nil, err
	}
	if m.Answers == 0 {
		return nil, fmt.Errorf("no answer arrived in %v: %s", s.Measure, m.Fault)
	}
	m.CPU = used.cpu.per(float64(m.Answers))
	m.Wakeups = float64(used.sleeps) / float64(m.Answers)
	m.Noisy = m.Other > s.OtherLoad
	m.Behind = rate > 0 && float64(m.Answers) < 0.97*float64(m.Calls)
	return m, nil
}

// perSecond is how many calls were answered.
func (m *CallRun) perSecond() float64 { return float64(m.Answers) / m.Seconds }

// String is a progress line.
func (m *CallRun) String() string {
	s := fmt.Sprintf("%-13s %7s  %6.0f answers/s  p50 %d us  p99 %d us  %.1f us/answer (proxy %.1f)  CPUs %.0f %% busy, other load %.1f %%",
		m.Contestant, rateText(m.Rate), m.perSecond(), m.Latency.P50, m.Latency.P99, m.CPU.Total, m.CPU.Proxy, m.Busy, m.Other)
	if m.Bad+m.Lost > 0 {
		s += fmt.Sprintf("  BAD %d, LOST %d: %.300s", m.Bad, m.Lost, m.Fault)
	}
	if m.Noisy {
		s += "  noisy"
	}
	if m.Behind {
		s += "  behind"
	}
	return s
}

func rateText(rate int) string {
	if rate == 0 {
		return "most"
	}
	return fmt.Sprintf("%d/s", rate)
}

func sharedNote(cpus int) string {
	return fmt.Sprintf("Caller, engine and contestant share the machine's %d CPUs: one thread each for caller and engine. "+
		"Above what the three need together, latencies are those of a queue for the CPU.", cpus)
}
