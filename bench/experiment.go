package bench

import (
	"path/filepath"
	"slices"
	"strings"
)

// experiment is one comparison of the evaluation: a command that makes it, and where
// the report has it.
type experiment struct {
	// name is that of its files in results/evaluation.
	name string
	// title is what the report calls it.
	title string
	// args are the command's, after inferrail. TRACES stands for the folder of traces.
	args string
	// slow are those that do not run in virtual time.
	slow bool
	// charts are which of its charts the report shows, by the ends of their names.
	charts []string
	// curve is the name of the curve that it is a point of: latency against rate. A
	// point has no place in the report but there.
	curve string
	point bool
	// capacity is the experiment that has found how much the same fleet takes of the
	// same workload, which says how much load this is.
	capacity string
	// twin is the experiment that has the same requests in virtual time.
	twin string
}

// group is a section of the report.
type group struct {
	id, title string
	// about is said before its tables.
	about       string
	experiments []experiment
}

// few are the default, the best known that does not predict, and two that do not know
// of prompts, where all policies would take too long. Capacities count from the first.
const few = " --policy round_robin,least_request,lmetric,cost_model"

// seeds are the runs of workloads that are drawn, and of traces, of which only ties are: medians
// are taken over them.
const seeds = " --seed 1,2,3"

// reference is the fleet of the reference replay: engines whose prefill is one queue,
// and caches of 4,000 blocks of 512 tokens.
const reference = " --replicas 8 --profile reference --blocks 4000"

// Engines like real ones. gpu are as on an H100 with Llama-3.1-8B and large as on an H200
// with Qwen3-32B; mixed is a fleet of two kinds of GPU, and small are engines as DIO's
// experiments had them.
const (
	gpu   = " --replicas 8 --profile h100-llama-8b"
	large = " --replicas 8 --profile h200-qwen-32b"
	mixed = " --profile h100-llama-8b=4 --profile l40s-llama-8b=4"
	small = " --profile t4-qwen-3b"
)

// What is asked of them. A workload runs for a minute and more at the rates that are
// tried, so that caches fill and queues find their length.
const (
	w1 = "simulate --workload w1 --requests 5000" + large
	w2 = "simulate --workload w2 --requests 8000" + large
	w3 = "simulate --workload w3 --requests 4000" + gpu
	w4 = "simulate --workload w4 --requests 4000" + gpu
	w5 = "simulate --workload w5 --requests 5000" + large
	w6 = "simulate --workload w6 --requests 4000" + gpu

	conversation = "simulate --trace TRACES/mooncake_conversation_trace.jsonl"
	synthetic    = "simulate --trace TRACES/mooncake_synthetic_trace.jsonl"
)

// limited is admission that has to refuse: a fleet of two at more than it can do.
const limited = "simulate --workload dio-matched --rate 15 --requests 2000 --replicas 2" + small + " --budget 300ms --slo-ttft 300ms" + seeds + few

// overHTTP is what two cores can serve in real time with engines and load beside them.
// Answers are cut, for with one of 2,000 tokens a run waits half a minute for its end; what
// is left of a run's time is load. Each policy and seed has engines and an agent of its
// own, which take a second to start: what one run leaves in caches, queues and what was
// learned would be in the next.
const overHTTP = " --profile h200-qwen-32b --replicas 4 --max-tokens 200"

// plan is the evaluation, in the order in which it runs and is reported.
var plan = []group{
	{id: "traces", title: "Traces",
		about: "Traffic of Mooncake, in which it is recorded which prompts begin alike, before the engines of the reference replay: " +
			"prefill takes 60 us a token and 1 ns for each token before it, and nothing else is in its way. Eight of them with 4,000 blocks of 512 tokens each.",
		experiments: []experiment{
			{name: "conversation", title: "Mooncake conversation", curve: "conversation", charts: []string{"ttft", "reuse", "distribution", "time", "prediction"},
				args: conversation + reference + seeds},
			{name: "conversation-fast", title: "Mooncake conversation at 1.8x", curve: "conversation", charts: []string{"ttft", "distribution"},
				args: conversation + " --speed 1.8" + reference + seeds},
			{name: "synthetic", title: "Mooncake synthetic", charts: []string{"ttft", "reuse", "distribution"}, args: synthetic + reference + seeds},
			{name: "synthetic-fast", title: "Mooncake synthetic at 1.8x", charts: []string{"ttft"}, args: synthetic + " --speed 1.8" + reference + seeds},
		}},
	{id: "gpus", title: "Traces before engines like real ones",
		about: "Engines that batch, prefill in chunks and disturb decoding with it, with the speed and the cache of an H100 that serves Llama-3.1-8B, or of an H200 that serves Qwen3-32B. " +
			"The traces of Azure have no prefixes: nothing is shared in them, and only balance counts.",
		experiments: []experiment{
			{name: "conversation-h100", title: "Mooncake conversation, 4 x H100", charts: []string{"ttft"}, args: conversation + " --replicas 4 --profile h100-llama-8b"},
			{name: "synthetic-h100", title: "Mooncake synthetic, 4 x H100", charts: []string{"ttft"}, args: synthetic + " --replicas 4 --profile h100-llama-8b"},
			{name: "azure-conversation", title: "Azure conversation at 4x, 8 x H200", args: "simulate --trace TRACES/azure2023_conv.csv --speed 4 --requests 8000" + large},
			{name: "azure-code", title: "Azure code at 3x, 8 x H200", args: "simulate --trace TRACES/azure2023_code.csv --speed 3 --requests 4000" + large},
		}},
	{id: "workloads", title: "Workloads",
		about: "Drawn traffic of six kinds, three seeds each, at about 60 % and 85 % of what round_robin can take of it (section Capacity), and W1 to W4 at its limit; the rows are medians. " +
			"W1: questions behind shared system prompts. W2: chats of several turns. W3: agents with tools and growing contexts. " +
			"W4: questions about popular documents. W5: W1 in bursts, and an engine that becomes slow in the middle. W6: nothing shared. " +
			"W1, W2 and W5 are served by eight H200 with Qwen3-32B, W3, W4 and W6, of longer prompts, by eight H100 with Llama-3.1-8B.",
		experiments: []experiment{
			{name: "w1", title: "W1 system prompts, 48/s", curve: "w1", capacity: "capacity-w1", charts: []string{"ttft"}, args: w1 + " --rate 48" + seeds},
			{name: "w1-busy", title: "W1 system prompts, 67/s", curve: "w1", capacity: "capacity-w1", charts: []string{"ttft"}, args: w1 + " --rate 67" + seeds},
			{name: "w1-limit", title: "W1 system prompts, 76/s", curve: "w1", capacity: "capacity-w1", args: w1 + " --rate 76" + seeds},
			{name: "w2", title: "W2 chats, 21/s", curve: "w2", capacity: "capacity-w2", charts: []string{"ttft"}, args: w2 + " --rate 21" + seeds},
			{name: "w2-busy", title: "W2 chats, 30/s", curve: "w2", capacity: "capacity-w2", args: w2 + " --rate 30" + seeds},
			{name: "w2-limit", title: "W2 chats, 37/s", curve: "w2", capacity: "capacity-w2", args: w2 + " --rate 37" + seeds},
			{name: "w3", title: "W3 agents, 16/s", curve: "w3", capacity: "capacity-w3", charts: []string{"ttft"}, args: w3 + " --rate 16" + seeds},
			{name: "w3-busy", title: "W3 agents, 22/s", curve: "w3", capacity: "capacity-w3", args: w3 + " --rate 22" + seeds},
			{name: "w3-limit", title: "W3 agents, 28/s", curve: "w3", capacity: "capacity-w3", args: w3 + " --rate 28" + seeds},
			{name: "w4", title: "W4 documents, 36/s", curve: "w4", capacity: "capacity-w4", charts: []string{"ttft"}, args: w4 + " --rate 36" + seeds},
			{name: "w4-busy", title: "W4 documents, 51/s", curve: "w4", capacity: "capacity-w4", args: w4 + " --rate 51" + seeds},
			{name: "w4-limit", title: "W4 documents, 59/s", curve: "w4", capacity: "capacity-w4", args: w4 + " --rate 59" + seeds},
			{name: "w5", title: "W5 bursts and a slow engine, 30/s", charts: []string{"time"}, args: w5 + " --rate 30" + seeds},
			{name: "w5-busy", title: "W5 bursts and a slow engine, 44/s", args: w5 + " --rate 44" + seeds},
			{name: "w6", title: "W6 nothing shared, 90/s", capacity: "capacity-w6", args: w6 + " --rate 90" + seeds},
			{name: "w6-busy", title: "W6 nothing shared, 130/s", capacity: "capacity-w6", args: w6 + " --rate 130" + seeds},
		}},
	{id: "rates", title: "Latency against rate",
		about: "The same traffic, slower and faster, until round_robin is overloaded and beyond. The points that have no section of their own are of one seed.",
		experiments: []experiment{
			{name: "conversation-x0.5", title: "0.5x", curve: "conversation", point: true, args: conversation + " --speed 0.5" + reference + few},
			{name: "conversation-x2.4", title: "2.4x", curve: "conversation", point: true, args: conversation + " --speed 2.4" + reference + few},
			{name: "conversation-x3", title: "3x", curve: "conversation", point: true, args: conversation + " --speed 3" + reference + few},
			{name: "w1-24", title: "24/s", curve: "w1", point: true, args: w1 + " --rate 24"},
			{name: "w1-88", title: "88/s", curve: "w1", point: true, args: w1 + " --rate 88"},
			{name: "w1-110", title: "110/s", curve: "w1", point: true, args: w1 + " --rate 110"},
			{name: "w2-11", title: "11/s", curve: "w2", point: true, args: w2 + " --rate 11"},
			{name: "w2-40", title: "40/s", curve: "w2", point: true, args: w2 + " --rate 40"},
			{name: "w2-50", title: "50/s", curve: "w2", point: true, args: w2 + " --rate 50"},
			{name: "w3-8", title: "8/s", curve: "w3", point: true, args: w3 + " --rate 8"},
			{name: "w3-29", title: "29/s", curve: "w3", point: true, args: w3 + " --rate 29"},
			{name: "w3-36", title: "36/s", curve: "w3", point: true, args: w3 + " --rate 36"},
			{name: "w4-18", title: "18/s", curve: "w4", point: true, args: w4 + " --rate 18"},
			{name: "w4-66", title: "66/s", curve: "w4", point: true, args: w4 + " --rate 66"},
			{name: "w4-84", title: "84/s", curve: "w4", point: true, args: w4 + " --rate 84"},
		}},
	{id: "capacity", title: "Capacity",
		about: "The highest rate at which 99 of 100 requests have their first token in 2 s and each further one in 100 ms, and how many replicas each policy needs for what round_robin serves with eight. " +
			"It is found with the same requests, faster and slower.",
		experiments: []experiment{
			{name: "capacity-w1", title: "How much of W1", charts: []string{"capacity"}, args: w1 + " --find-capacity --rate 70" + few},
			{name: "capacity-w2", title: "How much of W2", charts: []string{"capacity"}, args: w2 + " --find-capacity --rate 40" + few},
			{name: "capacity-w3", title: "How much of W3", charts: []string{"capacity"}, args: w3 + " --find-capacity --rate 30" + few},
			{name: "capacity-w4", title: "How much of W4", charts: []string{"capacity"}, args: w4 + " --find-capacity --rate 60" + few},
			{name: "capacity-w6", title: "How much of W6", args: w6 + " --find-capacity --rate 150 --policy round_robin,cost_model"},
		}},
	{id: "fleets", title: "Other fleets",
		about: "What real fleets have: engines of different speed, several agents that do not know of one another, and caches that nobody tells of, as when all events are lost.",
		experiments: []experiment{
			{name: "mixed", title: "W2 on 4 x H100 and 4 x L40S, 60/s", charts: []string{"ttft", "replicas"}, args: "simulate --workload w2 --rate 60 --requests 8000" + mixed + seeds},
			{name: "agents", title: "Mooncake conversation through 4 agents", args: conversation + " --agents 4" + reference + few},
			{name: "no-events", title: "Mooncake conversation, all KV events lost", args: conversation + " --no-events" + reference + few},
		}},
	{id: "dio", title: "DIO's experiments",
		about: "What DIO reports of itself, in its shape: two engines alike, one of them twice as slow, chats of several turns, and eight sessions of which one engine is throttled eightfold. " +
			"As context only, for its engines and its load are not these: DIO (0.4.2, two T4, ten seeds) states: alike, as round robin; twice as slow, p99 48.3 % below round robin; chats, p99 51.8 % below in the median; " +
			"throttled, a mean of 1,298 ms after 1,990 ms of round robin. Its load is not stated; where it is so low that nobody waits, a p99 is that of the longest prompts alone, and no choice makes it much less than the bound's.",
		experiments: []experiment{
			{name: "dio-matched", title: "Two engines alike", args: "simulate --workload dio-matched --replicas 2" + small + seeds},
			{name: "dio-asymmetry", title: "One engine twice as slow, 1/s", charts: []string{"ttft"}, args: "simulate --workload dio-asymmetry --replicas 2" + small + seeds},
			{name: "dio-asymmetry-busy", title: "One engine twice as slow, 3.2/s", capacity: "capacity-dio", charts: []string{"ttft"}, args: "simulate --workload dio-asymmetry --rate 3.2 --requests 2000 --replicas 2" + small + seeds},
			{name: "capacity-dio", title: "How much with one engine twice as slow", args: "simulate --find-capacity --workload dio-asymmetry --rate 4 --requests 2000 --replicas 2" + small + few},
			{name: "dio-chat", title: "Chats of several turns", args: "simulate --workload dio-chat --replicas 2" + small + seeds},
			{name: "dio-swarm", title: "Eight sessions, one engine throttled eightfold", charts: []string{"time"}, args: "simulate --workload dio-swarm --replicas 3" + small + seeds},
		}},
	{id: "admission", title: "Admission under a tight limit",
		about: "The same load, more than two engines can serve in time, under each way to decide which requests are taken: rank_only takes all, empirical goes by what was observed, absolute by the prediction. " +
			"Good is a first token within 300 ms and 100 ms for each further one, of all requests, those that were refused included. Times are those of the requests that were taken.",
		experiments: []experiment{
			{name: "admission-rank", title: "rank_only", args: limited + " --admission rank_only"},
			{name: "admission-empirical", title: "empirical", args: limited + " --admission empirical"},
			{name: "admission-absolute", title: "absolute", args: limited + " --admission absolute"},
		}},
	{id: "http", title: "Over HTTP",
		about: "Real agents and simulated engines, connected by sockets, in real time, and the same requests in virtual time; no answer has more than 200 tokens. What virtual time leaves out is in these numbers: parsing, tokenizing, the network, this machine.",
		experiments: []experiment{
			{name: "http-w1", title: "W1 over HTTP", slow: true, twin: "virtual-w1", args: "bench compare --workload w1 --rate 24 --requests 300 --seeds 3 --policies round_robin,sticky,lmetric,cost_model" + overHTTP},
			{name: "virtual-w1", title: "W1, the same in virtual time", args: "simulate --workload w1 --rate 24 --requests 300 --seed 1,2,3 --policy round_robin,sticky,lmetric,cost_model" + overHTTP},
			{name: "http-w2", title: "W2 over HTTP", slow: true, twin: "virtual-w2", args: "bench compare --workload w2 --rate 12 --requests 180 --seeds 3 --policies round_robin,sticky,lmetric,cost_model" + overHTTP},
			{name: "virtual-w2", title: "W2, the same in virtual time", args: "simulate --workload w2 --rate 12 --requests 180 --seed 1,2,3 --policy round_robin,sticky,lmetric,cost_model" + overHTTP},
			{name: "http-w5", title: "W5 over HTTP", slow: true, twin: "virtual-w5", charts: []string{"time"}, args: "bench compare --workload w5 --rate 15 --requests 200 --seeds 3 --policies round_robin,sticky,lmetric,cost_model" + overHTTP},
			{name: "virtual-w5", title: "W5, the same in virtual time", args: "simulate --workload w5 --rate 15 --requests 200 --seed 1,2,3 --policy round_robin,sticky,lmetric,cost_model" + overHTTP},
		}},
}

// command is the experiment's command line, with the traces of a folder. A tiny one
// runs in a moment: of flags that are there twice the last counts.
func (e *experiment) command(traces string, tiny bool) []string {
	args := strings.Fields(e.args)
	for i, a := range args {
		if file, ok := strings.CutPrefix(a, "TRACES/"); ok {
			args[i] = filepath.Join(traces, file)
		}
		if tiny && i > 0 && args[i-1] == "--policies" {
			args[i] = "round_robin,cost_model" // it is not such a flag
		}
	}
	switch {
	case tiny && e.slow:
		args = append(args, "--requests", "40", "--seeds", "1", "--attempts", "1")
	case tiny:
		args = append(args, "--requests", "60")
	}
	return args
}

// shown is the command as the report has it.
func (e *experiment) shown() string {
	return "inferrail " + strings.ReplaceAll(strings.Join(strings.Fields(e.args), " "), "TRACES/", "$TRACES/")
}

// file is where the experiment's comparison is.
func (e *experiment) file(dir string) string { return filepath.Join(dir, e.name+".json") }

// planned is the experiment of a name, nil when there is none.
func planned(name string) *experiment {
	for g := range plan {
		if i := slices.IndexFunc(plan[g].experiments, func(e experiment) bool { return e.name == name }); i >= 0 {
			return &plan[g].experiments[i]
		}
	}
	return nil
}
