// Package agent is the running node: its configuration, the engines it knows,
// the life cycle of the kernel datapath, and the admin pages.
//
//	agent.go          Agent: Start, Run, Stop, in this order and backwards
//	config.go         Config: every key; problems.go tells all that is wrong with one
//	policies.go       how replicas are chosen, admission.go which requests are taken, hold.go
//	                  which are held back, pieces.go which prompts are cut, and prewarm.go
//	                  what is computed ahead
//	reload.go         another configuration while it runs: contents.go sees that a file is
//	                  another one, difference.go what that changes
//	listener.go       the sockets, which a successor takes over; certificate.go, access.go
//	notify.go         what the service manager is told; build.go which version this is
//	survey.go         a look at this node before there is a configuration
//
//	fleet.go          the engines: members, their slots, and the snapshot that proxy goes by
//	member.go         one replica; health.go when it takes requests
//	discovery.go      where replicas come from: dns.go, kubernetes.go, local.go
//
//	scrape.go         pages of an engine, once a second: what it is (reading.go, exposition.go)
//	load.go           and ten times a second: what it has to do
//	speeds.go         how fast replicas are that have not proved it, and who has become slower
//	cache.go          what is known of a KV cache; warmth.go keeps it over a restart
//	publisher.go      an engine's KV events: subscriber.go follows them, by feed.go and zmtp.go
//	prompts.go        how a model's prompts are followed; checks.go and oracle.go compare them
//	                  with its engines', trust.go draws the conclusion
//
//	datapath.go       the kernel's programs, the interfaces they are at (interfaces.go), and
//	                  what proxy sees of them (joiner.go)
//	admin.go          the admin pages: explain.go, predictions.go, policy_report.go,
//	                  load_report.go, index_report.go, prompt_report.go, datapath_status.go,
//	                  decision_report.go
//	overview.go       a screen of the fleet with its last minutes, which console.go shows
//	decision_log.go   decisions, to a file
//	traces.go         requests, to a collector, as spans.go makes them
//
//go:generate go test -run ^TestMetrics$ -rewrite .
package agent
