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
	// unlike is what the default is to be compared with where it is not round_robin.
	unlike string
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

// seeds are the runs of workloads that are drawn: medians are taken over them.
const seeds = " --seed 1,2,3"

// reference is the fleet of the reference replay: engines whose prefill is one queue,
// and caches of 4,000 blocks of 512 tokens.
const reference = " --replicas 8 --profile reference --blocks 4000"

// gpu are engines as on an H100 with Llama-3.1-8B, mixed is a fleet of two kinds of GPU,
// and small are engines as DIO's experiments had them.
const (
	gpu   = " --profile h100-llama-8b"
	mixed = " --profile h100-llama-8b=4,l4-llama-8b=4"
	small = " --profile t4-qwen-3b"
)

// plan is the evaluation, in the order in which it runs and is reported.
var plan = []group{
	{id: "traces", title: "Traces",
		about: "Traffic of Mooncake, in which it is recorded which prompts begin alike, before the engines of the reference replay: " +
			"prefill takes 60 us a token and 1 ns for each token before it, and nothing else is in its way. The fleet is small for this traffic.",
		experiments: []experiment{
			{name: "conversation", title: "Mooncake conversation", charts: []string{"ttft", "reuse", "distribution", "time", "prediction"},
				args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl" + reference},
			{name: "conversation-fast", title: "Mooncake conversation at 1.8x", charts: []string{"ttft", "distribution"},
				args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --speed 1.8" + reference},
			{name: "synthetic", title: "Mooncake synthetic", charts: []string{"ttft", "reuse", "distribution"},
				args: "simulate --trace TRACES/mooncake_synthetic_trace.jsonl" + reference},
			{name: "synthetic-fast", title: "Mooncake synthetic at 1.8x", charts: []string{"ttft"},
				args: "simulate --trace TRACES/mooncake_synthetic_trace.jsonl --speed 1.8" + reference},
		}},
	{id: "rates", title: "Latency against rate",
		about: "The same trace, slower and faster.",
		experiments: []experiment{
			{name: "conversation-x0.5", title: "0.5x", args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --speed 0.5" + reference + few},
			{name: "conversation-x1.4", title: "1.4x", args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --speed 1.4" + reference + few},
			{name: "conversation-x2.4", title: "2.4x", args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --speed 2.4" + reference + few},
			{name: "conversation-x3", title: "3x", args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --speed 3" + reference + few},
		}},
	{id: "gpus", title: "Traces before engines like real ones",
		about: "Engines that batch, prefill in chunks and disturb decoding with it, with the speed and the cache of an H100 that serves Llama-3.1-8B. " +
			"The traces of Azure have no prefixes: nothing is shared in them, and only balance counts.",
		experiments: []experiment{
			{name: "conversation-h100", title: "Mooncake conversation, 4 x H100", charts: []string{"ttft"},
				args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --replicas 4" + gpu},
			{name: "synthetic-h100", title: "Mooncake synthetic, 4 x H100",
				args: "simulate --trace TRACES/mooncake_synthetic_trace.jsonl --replicas 4" + gpu},
			{name: "azure-conversation", title: "Azure conversation at 10x, 4 x H100",
				args: "simulate --trace TRACES/azure2023_conv.csv --speed 10 --replicas 4" + gpu},
			{name: "azure-code", title: "Azure code at 8x, 4 x H100",
				args: "simulate --trace TRACES/azure2023_code.csv --speed 8 --replicas 4" + gpu},
		}},
	{id: "workloads", title: "Workloads",
		about: "Drawn traffic of six kinds before eight H100 with Llama-3.1-8B, three seeds each; the rows are medians. " +
			"W1: questions behind shared system prompts. W2: chats of several turns. W3: agents with tools and growing contexts. " +
			"W4: questions about popular documents. W5: bursts, and an engine that becomes slow in the middle. W6: nothing shared.",
		experiments: []experiment{
			{name: "w1", title: "W1 shared system prompts", charts: []string{"ttft"}, args: "simulate --workload w1 --rate 300 --requests 4000" + gpu + " --replicas 8" + seeds},
			{name: "w2", title: "W2 chats", args: "simulate --workload w2 --rate 120 --requests 4000" + gpu + " --replicas 8" + seeds},
			{name: "w3", title: "W3 agents", charts: []string{"ttft"}, args: "simulate --workload w3 --rate 30 --requests 4000" + gpu + " --replicas 8" + seeds},
			{name: "w4", title: "W4 documents", args: "simulate --workload w4 --rate 35 --requests 4000" + gpu + " --replicas 8" + seeds},
			{name: "w5", title: "W5 bursts and a slow engine", charts: []string{"time"}, args: "simulate --workload w5 --rate 100 --requests 4000" + gpu + " --replicas 8" + seeds},
			{name: "w6", title: "W6 nothing shared", args: "simulate --workload w6 --rate 90 --requests 4000" + gpu + " --replicas 8" + seeds},
		}},
	{id: "fleets", title: "Other fleets",
		about: "What real fleets have: engines of different speed, several agents that do not know of one another, and caches that nobody tells of.",
		experiments: []experiment{
			{name: "mixed", title: "W2 on 4 x H100 and 4 x L4", charts: []string{"ttft", "replicas"}, args: "simulate --workload w2 --rate 25 --requests 4000" + mixed + seeds},
			{name: "agents", title: "Mooncake conversation through 4 agents", args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --agents 4" + reference},
			{name: "no-events", title: "Mooncake conversation without KV events", args: "simulate --trace TRACES/mooncake_conversation_trace.jsonl --no-events" + reference},
		}},
	{id: "dio", title: "DIO's experiments",
		about: "What DIO reports of itself, in its shape: two engines alike, one of them twice as slow, chats of several turns, admission under a tight limit, and eight sessions of which one engine is throttled eightfold. " +
			"DIO (0.4.2, two T4, ten seeds) states: alike, as round robin; twice as slow, p99 48.3 % below round robin; chats, p99 51.8 % below in the median; throttled, a mean of 1,298 ms after 1,990 ms of round robin.",
		experiments: []experiment{
			{name: "dio-matched", title: "Two engines alike", args: "simulate --workload dio-matched --replicas 2" + small + seeds},
			{name: "dio-asymmetry", title: "One engine twice as slow", charts: []string{"ttft"}, args: "simulate --workload dio-asymmetry --replicas 2" + small + seeds},
			{name: "dio-chat", title: "Chats of several turns", args: "simulate --workload dio-chat --replicas 2" + small + seeds},
			{name: "dio-swarm", title: "Eight sessions, one engine throttled eightfold", charts: []string{"time"}, args: "simulate --workload dio-swarm --replicas 3" + small + seeds},
		}},
	{id: "admission", title: "Admission under a tight limit",
		about: "The same load under each way to decide which requests are taken. Absolute trusts the prediction, empirical what was observed, rank_only takes all.",
		experiments: []experiment{
			{name: "admission-rank", title: "rank_only", args: "simulate --workload dio-matched --rate 30 --replicas 2" + small + " --admission rank_only --budget 300ms" + seeds + few},
			{name: "admission-empirical", title: "empirical", args: "simulate --workload dio-matched --rate 30 --replicas 2" + small + " --admission empirical --budget 300ms" + seeds + few},
			{name: "admission-absolute", title: "absolute", args: "simulate --workload dio-matched --rate 30 --replicas 2" + small + " --admission absolute --budget 300ms" + seeds + few},
		}},
	{id: "capacity", title: "Capacity",
		about: "The highest rate at which 99 of 100 requests have their first token in 2 s and each further one in 100 ms, and how many replicas each policy needs for what round_robin serves with 8.",
		experiments: []experiment{
			{name: "capacity-w1", title: "W1", charts: []string{"capacity"}, args: "simulate --find-capacity --workload w1 --requests 4000" + gpu + " --replicas 8" + few},
			{name: "capacity-w2", title: "W2", charts: []string{"capacity"}, args: "simulate --find-capacity --workload w2 --requests 4000" + gpu + " --replicas 8" + few},
			{name: "capacity-w3", title: "W3", charts: []string{"capacity"}, args: "simulate --find-capacity --workload w3 --requests 4000" + gpu + " --replicas 8" + few},
		}},
	{id: "http", title: "Over HTTP",
		about: "Real agents and simulated engines, connected by sockets, in real time. What virtual time leaves out is in these numbers: parsing, tokenizing, the network, this machine.",
		experiments: []experiment{
			{name: "http-w1", title: "W1 over HTTP", slow: true, args: "bench compare --workload w1 --rate 10 --requests 300 --replicas 4 --seeds 2 --policies round_robin,sticky,lmetric,cost_model"},
			{name: "http-w2", title: "W2 over HTTP", slow: true, args: "bench compare --workload w2 --rate 10 --requests 300 --replicas 4 --seeds 2 --policies round_robin,sticky,lmetric,cost_model"},
			{name: "http-w5", title: "W5 over HTTP", slow: true, charts: []string{"time"}, args: "bench compare --workload w5 --rate 10 --requests 300 --replicas 4 --seeds 2 --policies round_robin,sticky,lmetric,cost_model"},
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
