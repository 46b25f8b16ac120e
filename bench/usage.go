package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// usage is what threads had consumed at one moment, by thread id.
type usage map[int]threadUsage

// threadUsage is cumulative.
type threadUsage struct {
	ran    time.Duration
	sleeps uint64 // voluntary context switches
}

// addProcess adds the threads of a process. A process or thread that is gone
// adds nothing.
func (u usage) addProcess(pid int) error {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*", pid))
	if err != nil {
		return err
	}
	for _, dir := range tasks {
		b, err := os.ReadFile(dir + "/schedstat")
		if err != nil {
			continue
		}
		ran, err := parseSchedstat(b)
		if err != nil {
			return fmt.Errorf("%s/schedstat: %w", dir, err)
		}
		status, err := os.ReadFile(dir + "/status")
		if err != nil {
			continue
		}
		tid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return err
		}
		u[tid] = threadUsage{ran: ran, sleeps: statusNumber(status, "voluntary_ctxt_switches")}
	}
	return nil
}

// since sums what was consumed after before was taken. A thread that has ended
// in between is not counted.
func (u usage) since(before usage) (sum threadUsage) {
	for tid, now := range u {
		then := before[tid]
		sum.ran += now.ran - then.ran
		sum.sleeps += now.sleeps - then.sleeps
	}
	return sum
}

// parseSchedstat reads the run time in /proc/<pid>/task/<tid>/schedstat: run
// time and waiting time in nanoseconds, number of time slices.
func parseSchedstat(b []byte) (time.Duration, error) {
	fields := strings.Fields(string(b))
	if len(fields) != 3 {
		return 0, fmt.Errorf("three numbers expected, not %q", b)
	}
	ns, err := strconv.ParseUint(fields[0], 10, 63)
	if err != nil {
		return 0, fmt.Errorf("run time: %w", err)
	}
	return time.Duration(ns), nil
}

// statusNumber reads a line of /proc/<pid>/status, without its unit; 0 when
// there is none.
func statusNumber(status []byte, name string) uint64 {
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte(name+":")); ok {
			fields := strings.Fields(string(rest))
			if len(fields) > 0 {
				n, _ := strconv.ParseUint(fields[0], 10, 64)
				return n
			}
		}
	}
	return 0
}

// kernelThreads returns the pids of all kworkers and ksoftirqds.
func kernelThreads() (pids []int, err error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		comm, err := os.ReadFile(dir + "/comm")
		if err != nil {
			continue
		}
		if bytes.HasPrefix(comm, []byte("kworker/")) || bytes.HasPrefix(comm, []byte("ksoftirqd/")) {
			pid, err := strconv.Atoi(filepath.Base(dir))
			if err != nil {
				return nil, err
			}
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// family returns pid and its descendants.
func family(pid int) ([]int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, dir := range dirs {
		status, err := os.ReadFile(dir + "/status")
		if err != nil {
			continue
		}
		child, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return nil, err
		}
		parent := int(statusNumber(status, "PPid"))
		children[parent] = append(children[parent], child)
	}
	pids := []int{pid}
	for i := 0; i < len(pids); i++ {
		pids = append(pids, children[pids[i]]...)
	}
	return pids, nil
}

// peakMemory sums VmHWM over processes, in KiB.
func peakMemory(pids []int) (kib uint64) {
	for _, pid := range pids {
		if status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)); err == nil {
			kib += statusNumber(status, "VmHWM")
		}
	}
	return kib
}

// cpuTime is what all CPUs together have spent: doing nothing, and waiting
// while the hypervisor ran something else.
type cpuTime struct {
	idle, steal time.Duration
}

// parseStat reads the first line of /proc/stat. The kernel gives its figures in
// hundredths of a second on every architecture Go runs on.
func parseStat(stat []byte) (c cpuTime, err error) {
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	fields := strings.Fields(string(line))
	// cpu user nice system idle iowait irq softirq steal ...
	if len(fields) < 9 || fields[0] != "cpu" {
		return c, fmt.Errorf("/proc/stat begins with %q", line)
	}
	var ticks [9]int64
	for i := 1; i < len(ticks); i++ {
		if ticks[i], err = strconv.ParseInt(fields[i], 10, 64); err != nil {
			return c, fmt.Errorf("/proc/stat: %w", err)
		}
	}
	const tick = 10 * time.Millisecond
	return cpuTime{idle: time.Duration(ticks[4]+ticks[5]) * tick, steal: time.Duration(ticks[8]) * tick}, nil
}

// meter reads the usage of everything that takes part in a measurement.
type meter struct {
	client, engine int   // pids
	proxy          []int // pids, none for direct
	kernel         []int // pids
}

// reading is one state of the meter.
type reading struct {
	at                            time.Time
	cpus                          cpuTime
	client, engine, proxy, kernel usage
}

// read takes the kernel's threads first at the start of a measurement and last
// at its end (early, late), because they are many and take milliseconds.
func (m *meter) read(early bool) (r reading, err error) {
	r = reading{client: usage{}, engine: usage{}, proxy: usage{}, kernel: usage{}}
	kernel := func() error {
		for _, pid := range m.kernel {
			if err := r.kernel.addProcess(pid); err != nil {
				return err
			}
		}
		return nil
	}
	if m.kernel, err = kernelThreads(); err != nil {
		return r, err
	}
	if early {
		if err := kernel(); err != nil {
			return r, err
		}
	}
	for _, pid := range m.proxy {
		if err := r.proxy.addProcess(pid); err != nil {
			return r, err
		}
	}
	if err := r.engine.addProcess(m.engine); err != nil {
		return r, err
	}
	if err := r.client.addProcess(m.client); err != nil {
		return r, err
	}
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return r, err
	}
	if r.cpus, err = parseStat(stat); err != nil {
		return r, err
	}
	r.at = time.Now()
	if !early {
		return r, kernel()
	}
	return r, nil
}

// CPU is scheduler run time in microseconds per chunk, or per request.
type CPU struct {
	Client float64 `json:"client"`
	Engine float64 `json:"engine"`
	Proxy  float64 `json:"proxy"`
	Kernel float64 `json:"kernel_threads"`
	Total  float64 `json:"total"`
}

// per divides by the number of chunks or requests that the time was spent on.
func (c CPU) per(n float64) CPU {
	return CPU{Client: c.Client / n, Engine: c.Engine / n, Proxy: c.Proxy / n, Kernel: c.Kernel / n, Total: c.Total / n}
}

// consumed is the difference of two readings.
type consumed struct {
	cpu      CPU     // in us, not yet per anything
	sleeps   uint64  // of the proxy
	busy     float64 // percent of all CPUs
	other    float64 // percent of all CPUs: busy and not accounted for in cpu, or stolen
	duration time.Duration
}

func (r reading) since(before reading) (c consumed) {
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	proxy := r.proxy.since(before.proxy)
	c.sleeps = proxy.sleeps
	c.cpu.Client = us(r.client.since(before.client).ran)
	c.cpu.Engine = us(r.engine.since(before.engine).ran)
	c.cpu.Proxy = us(proxy.ran)
	c.cpu.Kernel = us(r.kernel.since(before.kernel).ran)
	c.cpu.Total = c.cpu.Client + c.cpu.Engine + c.cpu.Proxy + c.cpu.Kernel
	c.duration = r.at.Sub(before.at)
	capacity := us(c.duration) * float64(runtime.NumCPU())
	busy := capacity - us(r.cpus.idle-before.cpus.idle)
	c.busy = 100 * busy / capacity
	// Stolen time may be part of busy and, on a thread of ours, of its run time.
	stolen := us(r.cpus.steal - before.cpus.steal)
	c.other = 100 * max(busy-c.cpu.Total, stolen) / capacity
	return c
}
