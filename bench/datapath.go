package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Datapath is `inferrail bench datapath`; the package comment has the method.
// The tags are kong's. Run may be called once, from any goroutine.
type Datapath struct {
	Streams   []Load        `default:"1000x20,3000x6" placeholder:"NxR" help:"Loads: N streams of R chunks a second each. 3,000 streams get 6, which two CPUs sustain with every contestant."`
	Reps      int           `default:"3" help:"Repetitions of each measurement."`
	Warm      time.Duration `default:"1.5s" help:"Time between the last stream's first chunk and the measurement."`
	Measure   time.Duration `default:"6s" help:"Length of one measurement."`
	Chunks    int           `default:"200" help:"Chunks of a response."`
	Only      []string      `placeholder:"NAME" help:"Contestants to run: direct, packet, copy, nginx, haproxy. Default all."`
	OtherLoad float64       `default:"8" help:"Repeat a measurement during which the machine's CPUs were busy with other things for more than this many percent."`
	Limit     time.Duration `default:"6m" help:"Start no repetition of a noisy measurement that would make the whole take longer than this."`
	Results   string        `default:"bench/results" help:"Folder for datapath.json and datapath.svg; empty writes none."`
	Agent     []string      `sep:" " placeholder:"COMMAND" help:"How to start the agent; --datapath, --replica, --listen and --iface are appended. Default: this program's agent command."`

	// Stdout receives the table, Stderr the progress. Nil is the process's own.
	Stdout io.Writer `kong:"-"`
	Stderr io.Writer `kong:"-"`
}

// maxStreams keeps the client within its ports.
const maxStreams = 20000

// Load is a number of streams and the chunks a second each of them gets. As
// text, and in JSON, it is "1000x20".
type Load struct {
	Streams int
	Rate    float64
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Load) UnmarshalText(b []byte) error {
	streams, rate, ok := strings.Cut(string(b), "x")
	if !ok {
		return fmt.Errorf("load %q: want STREAMSxRATE, such as 1000x20", b)
	}
	n, err := strconv.Atoi(streams)
	if err != nil || n < 1 || n > maxStreams {
		return fmt.Errorf("load %q: streams must be between 1 and %d", b, maxStreams)
	}
	r, err := strconv.ParseFloat(rate, 64)
	if err != nil || !(r >= 0.1 && r <= 1000) {
		return fmt.Errorf("load %q: the rate must be between 0.1 and 1000 chunks a second", b)
	}
	*l = Load{Streams: n, Rate: r}
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (l Load) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// String is the form that UnmarshalText reads.
func (l Load) String() string { return fmt.Sprintf("%dx%g", l.Streams, l.Rate) }

// Measurement is one run of one contestant under one load.
type Measurement struct {
	Contestant string `json:"contestant"`
	Load       Load   `json:"load"`
	Rep        int    `json:"repetition"`
	Attempt    int    `json:"attempt"`
	ClientReport
	CPU CPU `json:"cpu_us_per_chunk"`
	// Wakeups are voluntary context switches of the contestant per 1,000 chunks.
	Wakeups float64      `json:"wakeups_per_1000_chunks"`
	PeakKiB uint64       `json:"peak_kib"`
	Busy    float64      `json:"busy_percent"`
	Other   float64      `json:"other_load_percent"`
	Noisy   bool         `json:"noisy,omitempty"`
	Behind  bool         `json:"behind,omitempty"` // under 97 % of the chunks arrived
	Unclean bool         `json:"unclean_stop,omitempty"`
	Agent   *AgentReport `json:"agent,omitempty"`
	fault   error        // Fault with the logs of those involved
}

// Run measures, prints the table and writes the results. It fails when a
// contestant did not start, or a client received a wrong byte or lost its
// connection; the others are measured all the same.
func (d *Datapath) Run(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if d.Stdout == nil {
		d.Stdout = os.Stdout
	}
	if d.Stderr == nil {
		d.Stderr = os.Stderr
	}
	chosen, err := d.check()
	if err != nil {
		return err
	}
	begin := time.Now()
	machine, err := describeMachine(ctx)
	if err != nil {
		return err
	}
	report := Report{Date: begin.UTC().Format(time.RFC3339), Machine: machine, Reps: d.Reps,
		Seconds: d.Measure.Seconds(), ChunkBytes: chunkSize, ResponseChunks: d.Chunks, OtherLoadLimit: d.OtherLoad}
	total := len(d.Streams) * d.Reps * len(chosen)
	fmt.Fprintf(d.Stderr, "bench datapath: %d measurements of %v\n", total, d.Measure)

	var failures []error
	failed := map[string]bool{}
	number := 0
	for _, load := range d.Streams {
		for rep := range d.Reps {
			for i := range chosen {
				number++
				c := &chosen[(i+rep)%len(chosen)]
				if failed[c.name] {
					continue
				}
				var best *Measurement
				for attempt := 1; attempt <= 3; attempt++ {
					took := time.Now()
					m, err := d.measure(ctx, c, load)
					if ctx.Err() != nil {
						return fmt.Errorf("bench datapath ended early: %w", context.Cause(ctx))
					}
					if err != nil {
						err = fmt.Errorf("%s at %s: %w", c.name, load, err)
						fmt.Fprintf(d.Stderr, "[%d/%d] %v\n", number, total, err)
						failures = append(failures, err)
						failed[c.name] = true
						break
					}
					m.Rep, m.Attempt = rep+1, attempt
					fmt.Fprintf(d.Stderr, "[%d/%d] %v\n", number, total, m)
					if m.Bad+m.Lost > 0 {
						failures = append(failures, fmt.Errorf("%s at %s: %d streams with wrong bytes, %d lost; the first: %w",
							c.name, load, m.Bad, m.Lost, m.fault))
					}
					if best == nil || m.Other < best.Other {
						best = m
					}
					remaining := time.Since(took) * time.Duration(total-number+1)
					if !best.Noisy || time.Since(begin)+remaining > d.Limit {
						break
					}
				}
				if best != nil {
					report.Runs = append(report.Runs, *best)
				}
			}
		}
	}
	report.summarise()
	report.Took = time.Since(begin).Seconds()
	if len(report.Rows) > 0 {
		if err := report.writeTable(d.Stdout); err != nil {
			return err
		}
		if d.Results != "" {
			if err := report.write(d.Results); err != nil {
				return err
			}
		}
	}
	return errors.Join(failures...)
}

// check validates the fields and returns the chosen contestants.
func (d *Datapath) check() ([]contestant, error) {
	if d.Reps < 1 || d.Chunks < 1 || d.Measure <= 0 || d.Warm < 0 || len(d.Streams) == 0 {
		return nil, errors.New("bench datapath: --reps, --chunks, --measure and --streams must be positive")
	}
	clients := 0
	for _, l := range d.Streams {
		clients = max(clients, l.Streams)
	}
	chosen, err := choose(contestants, d.Only)
	if err == nil {
		err = checkMachine(clients)
	}
	if err != nil {
		return nil, fmt.Errorf("bench datapath: %w", err)
	}
	return chosen, nil
}

// measure makes the hosts, starts everything, measures and takes all down.
func (d *Datapath) measure(ctx context.Context, c *contestant, load Load) (m *Measurement, err error) {
	m = &Measurement{Contestant: c.name, Load: load}
	r, err := newRig(ctx, c, setup{agent: d.Agent, engines: []string{engineAddr}, clients: load.Streams, streamed: true}, load.Rate)
	if err != nil {
		return nil, err
	}
	defer func() {
		if clean := r.close(); m != nil {
			m.Unclean = !clean
		}
	}()
	client, err := r.startClient(ctx, d.Warm, "client", "-target", c.target(),
		"-streams", fmt.Sprint(load.Streams), "-chunks", fmt.Sprint(d.Chunks))
	if err != nil {
		return nil, err
	}
	defer client.stop()

	var agentBefore AgentReport
	if c.agent {
		if agentBefore, err = agentReport(ctx, r.network.proxy); err != nil {
			return nil, r.proxy.failed(err)
		}
	}
	used, peak, err := r.meter(ctx, client, d.Measure)
	if err != nil {
		return nil, err
	}
	m.PeakKiB = peak
	if c.agent {
		agentAfter, err := agentReport(ctx, r.network.proxy)
		if err != nil {
			return nil, r.proxy.failed(err)
		}
		difference := agentAfter.since(agentBefore)
		m.Agent = &difference
	}
	if err := r.report(ctx, client, &m.ClientReport); err != nil {
		return nil, err
	}
	if m.Bad+m.Lost > 0 {
		m.fault = r.failed(m.Fault)
	}
	if m.Chunks == 0 {
		return nil, fmt.Errorf("no chunk arrived in %v", d.Measure)
	}
	m.account(used, d.OtherLoad)
	return m, nil
}

// account turns what was consumed into figures per chunk.
func (m *Measurement) account(c consumed, limit float64) {
	chunks := float64(m.Chunks)
	m.CPU = c.cpu.per(chunks)
	m.Wakeups = 1000 * float64(c.sleeps) / chunks
	m.Busy, m.Other = c.busy, c.other
	m.Noisy = m.Other > limit
	m.Behind = chunks < 0.97*m.Seconds*float64(m.Load.Streams)*m.Load.Rate
}

// String is a progress line.
func (m *Measurement) String() string {
	s := fmt.Sprintf("%-8s %8s  %6.2f us/chunk (proxy %.2f)  p50 %d us  p99 %d us  CPUs %.0f %% busy, other load %.1f %%",
		m.Contestant, m.Load, m.CPU.Total, m.CPU.Proxy, m.Latency.P50, m.Latency.P99, m.Busy, m.Other)
	if m.Bad+m.Lost > 0 {
		s += fmt.Sprintf("  BAD %d, LOST %d", m.Bad, m.Lost)
	}
	if m.Noisy {
		s += "  noisy"
	}
	if m.Behind {
		s += "  behind"
	}
	if m.Unclean {
		s += "  had to be killed"
	}
	return s
}
