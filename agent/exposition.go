package agent

import (
	"bytes"
	"strconv"
)

// family is a family of metrics of an engine that the agent reads. The others
// on an engine's page, most of it, are passed over.
type family uint8

const (
	unread family = iota

	processStart
	vllmCache
	sglangCapacity
	sglangPage

	// What an engine has to do now.
	vllmRunning
	vllmWaiting
	vllmUsage
	sglangRunning
	sglangWaiting
	sglangUsage
	sglangHitRate
	llamaRunning
	llamaWaiting
	tgiRunning
	tgiWaiting

	// Those that an engine's life only adds to: the others are before.
	vllmPrompt
	vllmGenerated
	vllmQueries
	vllmHits
	vllmSuccess
	sglangPrompt
	sglangGenerated
	sglangRequests
	llamaPrompt
	llamaPredicted
	llamaDecoded
	tgiRequests
	tgiSuccess
	tgiBatches

	familyEnd
	firstCounter = vllmPrompt
	counters     = familyEnd - firstCounter
)

// families are the names that the families have, and had in older engines.
var families = map[string]family{
	"process_start_time_seconds": processStart,

	"vllm:cache_config_info":              vllmCache,
	"vllm:prompt_tokens_total":            vllmPrompt,
	"vllm:generation_tokens_total":        vllmGenerated,
	"vllm:prefix_cache_queries_total":     vllmQueries,
	"vllm:gpu_prefix_cache_queries_total": vllmQueries,
	"vllm:prefix_cache_hits_total":        vllmHits,
	"vllm:gpu_prefix_cache_hits_total":    vllmHits,
	"vllm:request_success_total":          vllmSuccess,

	"vllm:num_requests_running": vllmRunning,
	"vllm:num_requests_waiting": vllmWaiting,
	"vllm:kv_cache_usage_perc":  vllmUsage,
	"vllm:gpu_cache_usage_perc": vllmUsage,

	"sglang:num_running_reqs": sglangRunning,
	"sglang:num_queue_reqs":   sglangWaiting,
	"sglang:token_usage":      sglangUsage,
	"sglang:cache_hit_rate":   sglangHitRate,

	"llamacpp:requests_processing": llamaRunning,
	"llamacpp:requests_deferred":   llamaWaiting,

	"tgi_batch_current_size": tgiRunning,
	"tgi_queue_size":         tgiWaiting,

	"sglang:max_total_num_tokens":    sglangCapacity,
	"sglang:page_size":               sglangPage,
	"sglang:prompt_tokens_total":     sglangPrompt,
	"sglang:generation_tokens_total": sglangGenerated,
	"sglang:num_requests_total":      sglangRequests,

	"llamacpp:prompt_tokens_total":    llamaPrompt,
	"llamacpp:tokens_predicted_total": llamaPredicted,
	"llamacpp:n_decode_total":         llamaDecoded,

	"tgi_request_count":         tgiRequests,
	"tgi_request_success":       tgiSuccess,
	"tgi_batch_inference_count": tgiBatches,
}

// longestFamily is the length of the longest name: no longer one is looked up.
var longestFamily = func() (n int) {
	for name := range families {
		n = max(n, len(name))
	}
	return n
}()

// point is one line of a page. Its labels are as they are written between the
// braces, and lie in the page.
type point struct {
	family family
	labels []byte
	value  float64
}

// appendPoints appends the lines of a page in the text format of Prometheus
// that belong to a family that is read, in their order. Lines that cannot be
// read are passed over, and so is one that the page breaks off in. It allocates
// nothing where dst has room.
func appendPoints(dst []point, page []byte) []point {
	var last []byte // the name on the line before, up to its labels
	var f family
	for len(page) > 0 {
		end := bytes.IndexByte(page, '\n')
		if end < 0 {
			break
		}
		line := page[:end]
		page = page[end+1:]
		// Names are told apart by their first letters: most lines end here.
		if len(line) < 2 || line[0] == '#' {
			continue
		}
		// Most lines are of the same family as the one before.
		n := len(last)
		if n == 0 || n >= len(line) || line[n] != '{' || !bytes.Equal(line[:n], last) {
			if n = nameEnd(line); n < 0 {
				continue
			}
			last, f = line[:n], families[string(line[:n])]
		}
		if f == unread {
			continue
		}
		if s, ok := readPoint(f, line[n:]); ok {
			dst = append(dst, s)
		}
	}
	return dst
}

// nameEnd returns where the name ends that a line begins with, -1 when it is none
// that is read.
func nameEnd(line []byte) int {
	for i, c := range line[:min(len(line), longestFamily+1)] {
		if c == '{' || c == ' ' || c == '\t' {
			return i
		}
	}
	return -1
}

// readPoint reads what is behind the name of a family: labels, if any, a value
// and perhaps a time, which is left out.
func readPoint(f family, rest []byte) (point, bool) {
	s := point{family: f}
	if rest[0] == '{' {
		n := labelsEnd(rest)
		if n < 0 {
			return s, false
		}
		s.labels, rest = rest[1:n], rest[n+1:]
	}
	rest = bytes.Trim(rest, " \t\r")
	if n := bytes.IndexAny(rest, " \t"); n >= 0 {
		rest = rest[:n]
	}
	value, err := strconv.ParseFloat(string(rest), 64)
	s.value = value
	return s, err == nil
}

// labelsEnd returns where the brace is that closes the labels, -1 if there is
// none. One in a value is not it.
func labelsEnd(text []byte) int {
	quoted := false
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			quoted = !quoted
		case c == '\\' && quoted:
			i++
		case c == '}' && !quoted:
			return i
		}
	}
	return -1
}

// label returns the value of a label, as it is written: none of those that are
// read holds what would be escaped.
func (s *point) label(name string) (value []byte, ok bool) {
	rest := s.labels
	for {
		rest = bytes.TrimLeft(rest, ", \t")
		eq := bytes.IndexByte(rest, '=')
		if eq < 0 {
			return nil, false
		}
		key := bytes.TrimRight(rest[:eq], " \t")
		if rest = bytes.TrimLeft(rest[eq+1:], " \t"); len(rest) == 0 || rest[0] != '"' {
			return nil, false
		}
		rest = rest[1:]
		end := 0
		for end < len(rest) && rest[end] != '"' {
			if rest[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(rest) {
			return nil, false
		}
		if string(key) == name {
			return rest[:end], true
		}
		rest = rest[end+1:]
	}
}

// count returns a label that is a whole number, 0 when it is none or not above
// zero.
func (s *point) count(name string) int {
	text, _ := s.label(name)
	n, err := strconv.ParseInt(string(text), 10, 32)
	if err != nil {
		return 0
	}
	return int(max(n, 0))
}

// number returns a label that is a number above zero, else 0.
func (s *point) number(name string) float64 {
	text, _ := s.label(name)
	n, err := strconv.ParseFloat(string(text), 64)
	if err != nil || !(n > 0) || n > 1e15 {
		return 0
	}
	return n
}
