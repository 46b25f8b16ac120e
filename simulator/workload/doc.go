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
// # Where the sizes come from
//
// Generate's defaults are round figures near those of real traffic. Answers, and
// prompts that share nothing, are as in Azure's conversations of 2023: 1,155 and 211
// tokens on average, log-normal with a deviation of 0.99 and 0.86; Mooncake's
// conversations have answers of 343. Of documents three in a hundred are six in ten of
// what is asked for, and they add a thousand tokens and more to a question of a
// hundred (RAGCache, arXiv 2404.12457). Agents call 1.2 tools a step, with long
// contexts and short answers, in loops that nobody interrupts (TraceLab, arXiv
// 2606.30560: 4,300 sessions, 350,000 steps, 430,000 calls); theirs are several times as long
// as the ten steps here, which an engine of 30,000 tokens has room for. Production
// traffic is burstier than a Poisson process (BurstGPT, arXiv 2401.17644; ServeGen,
// arXiv 2505.09999), which is what the bursts are for. How long people think, how many
// turns a conversation has, and how large system prompts and lists of tools are is
// chosen, and an option as all else is.
//
// # When requests come
//
// The schedule is fixed before anything is served: whoever is compared gets the same
// requests at the same times, and a slow engine does not get fewer. So a later turn
// does not wait for the answer before it. It comes when that answer would be there at
// Options.PerToken for each of its tokens, and somebody has thought about it after
// that. An engine that is slower than both together is asked to go on with an answer
// that it has not given yet; it computes it as part of the prompt then.
//
// # The same tokens everywhere
//
// Over HTTP the parts are words, each of which is one token of the simulated model,
// and a chat has around them what its template writes: five tokens for a message of the user, six for
// one of the assistant or the system, one behind each, and six for the model to go on from.
// AppendPrompt has the same tokens, so that an engine names the same blocks and counts
// the same hits in virtual time. A simulated engine is told which part its answer is
// (BodyOptions.Say); what another engine says is its own, and then prompts share with
// what it has computed all up to its first answer.
//
// The package imports none of this project's, does no I/O but that of its readers,
// and starts no goroutine. All that is random comes from a seed.
package workload
