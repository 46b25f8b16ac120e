package proxy

import (
	"slices"
	"strconv"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// LabelValues are all the values that labels of the server's metrics may have, by
// metric and label, for those that are words of the program; the others are names of
// models, replicas, keys and classes, of which there are as many as the agent serves
// or is configured with. They are what the documentation is made of, and what tests
// hold the metrics against.
func LabelValues() map[string]map[string][]string {
	var outcomes, retried, prompts []string
	pieces := []string{pieceComputed, pieceRefused, clientLeft.label(), shutDown.label()}
	for f := none; f < failures; f++ {
		outcomes = append(outcomes, f.label())
		if f.retried() {
			retried = append(retried, f.label())
		}
		if f >= connectFailed && f <= noSocket {
			pieces = append(pieces, f.label())
		}
	}
	for _, status := range []int{500, 502, 503, 504} { // saysUnavailable
		retried = append(retried, "status_"+strconv.Itoa(status))
	}
	for r := range prompt.Reasons {
		prompts = append(prompts, prompt.Reason(r).String())
	}
	var blames []string
	for b := byNobody; b <= byAgent; b++ {
		blames = append(blames, b.String())
	}
	tiers := []string{"packet", "copy"}
	kinds := []string{"prompt", "completion", "cached", "completion_chunks"}
	return map[string]map[string][]string{
		"inferrail_requests_total":             {"outcome": outcomes, "status": statusClasses[:], "blame": blames},
		"inferrail_key_requests_total":         {"outcome": outcomes},
		"inferrail_retries_total":              {"reason": retried},
		"inferrail_tokens_total":               {"kind": kinds},
		"inferrail_key_tokens_total":           {"kind": kinds},
		"inferrail_key_limited_total":          {"limit": limits[:]},
		"inferrail_prompts_total":              {"outcome": prompts},
		"inferrail_prompt_cached_tokens_total": {"kind": {"predicted", "actual", "unverified"}},
		"inferrail_admissions_total":           {"verdict": policy.AdmissionReasons()},
		"inferrail_pieces_total":               {"outcome": pieces},
		"inferrail_prewarm_total":              {"outcome": prewarmOutcomes[:]},
		"inferrail_decisions_total":            {"policy": policy.Names(), "reason": policy.Reasons()},
		"inferrail_responses_total":            {"tier": tiers, "reason": slices.Concat([]string{""}, joinReasons[:])},
		"inferrail_relay_chunks_total":         {"tier": tiers},
		"inferrail_relay_bytes_total":          {"tier": tiers},
		"inferrail_shadow_decisions_total":     {"agreed": {"yes", "no"}},
		"inferrail_shadow_regret_seconds_total": {
			"kind": {"predicted", "observed"}, "direction": {"better", "worse"}},
	}
}

// joinReasons are those of the proxy's own for which a response is copied. The
// Joiner has more.
var joinReasons = [...]string{"off", "with_head", "until_close", "usage", "http10", "small", "never_quiet", "tls", "http2"}
