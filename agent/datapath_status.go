package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/proxy"
)

// DatapathStatus is the kernel's part of GET /debug/datapath.
type DatapathStatus struct {
	Tier       string            `json:"tier"`
	Reason     string            `json:"reason"`
	Hook       string            `json:"hook,omitempty"`
	Loop       string            `json:"loop,omitempty"`
	Interfaces []string          `json:"interfaces,omitempty"`
	Failed     map[string]string `json:"interfaces_failed,omitempty"`
	// Splices joined now, by state; stalled ones wait for their client.
	Splices *bpf.Census `json:"now,omitempty"`
	// Kernel counts what was carried, over all engines.
	Kernel *CarriedStatus `json:"kernel,omitempty"`
}

// CarriedStatus counts what the kernel carried since start.
type CarriedStatus struct {
	Splices  uint64            `json:"splices"`
	Ended    uint64            `json:"ended"`
	Packets  uint64            `json:"packets"`
	Bytes    uint64            `json:"bytes"`
	Chunks   uint64            `json:"chunks"`
	Pauses   map[string]uint64 `json:"pauses"`
	Refusals map[string]uint64 `json:"refusals"`
}

// Status describes the datapath for people and for the benchmark.
func (d *datapath) Status() any { return d.status() }

func (d *datapath) status() DatapathStatus {
	st := DatapathStatus{Tier: d.tier, Reason: d.reason}
	if d.splicer == nil {
		return st
	}
	st.Hook, st.Loop = d.hook, d.loop
	st.Interfaces, st.Failed = d.watch.names()
	census := d.splicer.Census()
	st.Splices = &census
	k := &CarriedStatus{Pauses: map[string]uint64{}, Refusals: map[string]uint64{}}
	counters, err := d.splicer.Counters()
	if err != nil {
		d.log.Warn("cannot read the datapath's counters", "err", err)
	}
	for _, c := range counters {
		k.Splices += c.Splices
		k.Ended += c.Ends
		k.Packets += c.Packets
		k.Bytes += c.Bytes
		k.Chunks += c.Chunks
		for why, n := range c.Pauses {
			k.Pauses[why] += n
		}
		for why, n := range c.Refusals {
			k.Refusals[why] += n
		}
	}
	st.Kernel = k
	return st
}

var (
	engineLabels   = []string{"replica"}
	descPackets    = prometheus.NewDesc("inferrail_kernel_packets_total", "Engine packets carried by the kernel.", engineLabels, nil)
	descBytes      = prometheus.NewDesc("inferrail_kernel_bytes_total", "Response bytes carried by the kernel.", engineLabels, nil)
	descChunks     = prometheus.NewDesc("inferrail_kernel_chunks_total", "HTTP chunks carried by the kernel.", engineLabels, nil)
	descSplices    = prometheus.NewDesc("inferrail_kernel_splices_total", "Times the kernel took over a response.", engineLabels, nil)
	descEnds       = prometheus.NewDesc("inferrail_kernel_responses_ended_total", "Responses the kernel carried to their end.", engineLabels, nil)
	descStream     = prometheus.NewDesc("inferrail_kernel_stream_seconds_total", "Time from first to last packet of responses that ended in the kernel.", engineLabels, nil)
	descGap        = prometheus.NewDesc("inferrail_inter_token_seconds", "Time between the parts of a stream that have arrived from an engine, with most engines between tokens, by the tier that carried them: in the packet tier between packets, measured in the kernel.", []string{"replica", "tier"}, nil)
	descPauses     = prometheus.NewDesc("inferrail_kernel_pauses_total", "Responses handed back to userspace, by reason.", append(engineLabels, "reason"), nil)
	descRefusals   = prometheus.NewDesc("inferrail_kernel_refusals_total", "Packets that could not start a splice, by reason.", append(engineLabels, "reason"), nil)
	descNow        = prometheus.NewDesc("inferrail_kernel_splices_joined", "Responses joined now, by state.", []string{"state"}, nil)
	descTier       = prometheus.NewDesc("inferrail_datapath_tier", "The tier in use; always 1.", []string{"tier"}, nil)
	descConnection = prometheus.NewDesc("inferrail_kernel_connections", "Connections known to the programs.", nil, nil)
)

// Describe implements prometheus.Collector.
func (d *datapath) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		descPackets, descBytes, descChunks, descSplices, descEnds, descStream, descGap,
		descPauses, descRefusals, descNow, descTier, descConnection,
	} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector: it reads the programs' maps. A replica that
// has left has no series.
func (d *datapath) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(descTier, prometheus.GaugeValue, 1, d.tier)
	carried := d.collectGaps(ch)
	if d.splicer == nil {
		return
	}
	collectCarried(ch, d.splicer.Census(), carried)
}

// collectCarried tells what the kernel has carried, by replica.
func collectCarried(ch chan<- prometheus.Metric, c bpf.Census, carried map[string]*bpf.EngineCounters) {
	for state, n := range map[string]int{"armed": c.Armed, "active": c.Active, "paused": c.Paused, "ended": c.Ended, "stalled": c.Stalled} {
		ch <- prometheus.MustNewConstMetric(descNow, prometheus.GaugeValue, float64(n), state)
	}
	ch <- prometheus.MustNewConstMetric(descConnection, prometheus.GaugeValue, float64(c.Connections))
	for id, e := range carried {
		counter := func(desc *prometheus.Desc, v float64, more ...string) {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, v, append([]string{id}, more...)...)
		}
		counter(descPackets, float64(e.Packets))
		counter(descBytes, float64(e.Bytes))
		counter(descChunks, float64(e.Chunks))
		counter(descSplices, float64(e.Splices))
		counter(descEnds, float64(e.Ends))
		counter(descStream, float64(e.StreamNanos)/1e9)
		for why, n := range e.Pauses {
			counter(descPauses, float64(n), why)
		}
		for why, n := range e.Refusals {
			counter(descRefusals, float64(n), why)
		}
	}
}

// collectGaps tells the times between the parts of streams, by replica and tier, and
// returns what the kernel has carried, by replica.
func (d *datapath) collectGaps(ch chan<- prometheus.Metric) map[string]*bpf.EngineCounters {
	carried := map[string]*bpf.EngineCounters{}
	if d.replicas == nil {
		return carried
	}
	bySlot, copied := map[int]string{}, map[string]*proxy.Gaps{}
	for _, s := range d.replicas() {
		bySlot[s.slot] = s.id
		if sum := copied[s.id]; sum != nil {
			for i, n := range s.gaps.Count {
				sum.Count[i] += n
			}
			sum.Sum += s.gaps.Sum
			continue
		}
		copied[s.id] = &s.gaps
	}
	for id, g := range copied {
		ch <- gapHistogram(g.Count[:], g.Sum.Seconds(), id, "copy")
	}
	if d.splicer == nil {
		return carried
	}
	counters, err := d.splicer.Counters()
	if err != nil {
		d.log.Warn("cannot read the datapath's counters", "err", err)
	}
	for _, e := range counters {
		id, ok := bySlot[e.Slot]
		if !ok {
			continue
		}
		if sum := carried[id]; sum != nil {
			sum.Add(&e)
			continue
		}
		carried[id] = &e
	}
	for id, e := range carried {
		ch <- gapHistogram(e.Gaps[:], float64(e.GapNanos)/1e9, id, "packet")
	}
	return carried
}

// gapBounds are the bounds of the histogram that is told: a fleet may have a thousand
// replicas, so they are fewer than are counted. The bounds of proxy.Gaps and of the
// kernel's counters are the same powers of two.
var gapBounds = func() (list []int) {
	for i := range proxy.GapBuckets - 1 {
		if d := proxy.GapBound(i); d >= 2*time.Millisecond && d < 3*time.Second {
			list = append(list, i)
		}
	}
	return list
}()

func gapHistogram(counts []uint64, seconds float64, labels ...string) prometheus.Metric {
	buckets := make(map[float64]uint64, len(gapBounds))
	var sum uint64
	next := 0
	for i, n := range counts {
		sum += n
		if next < len(gapBounds) && gapBounds[next] == i {
			buckets[proxy.GapBound(i).Seconds()] = sum
			next++
		}
	}
	return prometheus.MustNewConstHistogram(descGap, sum, seconds, buckets, labels...)
}

// chunks are those that the kernel has carried, by slot.
func (d *datapath) chunks() map[int]uint64 {
	if d.splicer == nil {
		return nil
	}
	counters, err := d.splicer.Counters()
	if err != nil {
		return nil // whoever looks at the datapath is told
	}
	out := make(map[int]uint64, len(counters))
	for _, c := range counters {
		out[c.Slot] = c.Chunks
	}
	return out
}

// forget begins anew to count for a slot that another replica may get.
func (d *datapath) forget(slot int) {
	if d.splicer == nil {
		return
	}
	if err := d.splicer.Forget(slot); err != nil {
		d.log.Warn("the datapath's counters of a replica that has left go on", "slot", slot, "err", err)
	}
}
