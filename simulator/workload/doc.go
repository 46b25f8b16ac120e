// Package workload is what is asked of engines, and what came of it: requests with
// the time at which they come and what their prompts share, and the records of how
// they were served. `inferrail simulate` serves them in virtual time, `inferrail
// bench` over HTTP; both write the same records, of which one summary is made.
//
//	workload.go   Workload, Request, Part: what is asked
//	text.go       the words of a part, and their tokens
//	chat.go       what stands around them in a chat
//	body.go       AppendBody: the request that asks for it over HTTP
//	generator.go  Generate: workloads by their statistics
//	question.go   questions by themselves
//	conversation.go  people and agents who go on
//	reader.go     Read: workloads from files, by what is in them
//	mooncake.go   Mooncake's traces
//	azure.go      Azure's traces
//	sharegpt.go   conversations as ShareGPT has them
//	decision.go   the agent's decision log
//	selection.go  a workload made faster, shorter, thinner
//	record.go     Record: how one request was served
//	summary.go    Summary, Comparison: what many records say
//	curves.go     Curves: what charts draw of them
//
// A prompt is made of parts, each a text of so many tokens that is the same wherever
// its number is. So what two prompts share is what they begin with in equal parts, and
// neither a text nor a tokenizer is needed to know it.
//
// The package imports none of this project's, does no I/O but that of its readers,
// and starts no goroutine. All that is random comes from a seed.
package workload
