package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// KVEventsConfig says where a replica publishes its KV events. The zero value
// asks the engine.
type KVEventsConfig struct {
	// Mode is auto, which "" is too, or off. It may be written in place of the
	// whole: kv_events: off.
	Mode string `yaml:"mode"`
	// Endpoint is where the engine publishes: tcp://host:port, with * for the
	// replica's own host, or ipc://path. Each further data-parallel rank has the
	// next TCP port. The others, of the same form, are where batches that were
	// lost can be had again, and all that is held.
	Endpoint         string `yaml:"endpoint"`
	ReplayEndpoint   string `yaml:"replay_endpoint"`
	SnapshotEndpoint string `yaml:"snapshot_endpoint"`
	// Topic is what messages begin with.
	Topic string `yaml:"topic"`
}

const kvEventsOff = "off"

// setEndpoint is a key that holds an endpoint.
type setEndpoint struct{ key, value string }

// endpoints are those that are set.
func (c *KVEventsConfig) endpoints() []setEndpoint {
	all := []setEndpoint{{"endpoint", c.Endpoint}, {"replay_endpoint", c.ReplayEndpoint}, {"snapshot_endpoint", c.SnapshotEndpoint}}
	return slices.DeleteFunc(all, func(e setEndpoint) bool { return e.value == "" })
}

// validate checks what is configured for an engine of a kind, "" where that is
// not told.
func (c *KVEventsConfig) validate(p *problems, path, engine string) {
	if strings.Contains(c.Mode, "://") {
		p.add(path, "%q is an endpoint; write it as endpoint: below kv_events", c.Mode)
	} else if c.Mode != "" {
		p.oneOf(path+".mode", c.Mode, "auto", kvEventsOff)
	}
	if c.Endpoint != "" && (engine == "tgi" || engine == "llamacpp" || engine == "ollama") {
		p.add(path+".endpoint", "is set, but %s publishes no KV events; remove it", engine)
	}
	for _, e := range c.endpoints() {
		if _, err := parseEndpoint(e.value, "replica", 0); err != nil {
			p.add(path+"."+e.key, "%v", err)
		} else if c.Mode == kvEventsOff {
			p.add(path+"."+e.key, "is set beside mode: off; remove one of them")
		} else if c.Endpoint == "" {
			p.add(path+"."+e.key, "is set without endpoint, which is where events are published")
		}
	}
	if c.Topic != "" && c.Endpoint == "" {
		p.add(path+".topic", "is set without endpoint; an engine that is asked tells its topic too")
	}
}

// validateFound is validate for what a source of discovery finds: one
// configuration of many engines.
func (c *KVEventsConfig) validateFound(p *problems, path, engine string) {
	c.validate(p, path, engine)
	for _, e := range c.endpoints() {
		if here, err := parseEndpoint(e.value, "a", 0); err == nil {
			if there, err := parseEndpoint(e.value, "b", 0); err == nil && here == there {
				p.add(path+"."+e.key, "%q would be the same for all that is found; want tcp://*:port, the port at each", e.value)
			}
		}
	}
}

// validateRanks checks that each rank of a replica at host has endpoints of its
// own. taken has those of other replicas, with the keys that name them.
func (c *KVEventsConfig) validateRanks(p *problems, path, host string, ranks int, taken map[string]string) {
	for _, e := range c.endpoints() {
		key := path + "." + e.key
		for rank := range max(1, min(ranks, mostRanks)) {
			at, err := parseEndpoint(e.value, host, rank)
			if err != nil {
				if rank > 0 {
					p.add(key, "%q: %v", e.value, err)
				}
				break
			}
			if other := taken[at.String()]; other == key {
				break // an ipc path, which has no ranks
			} else if other != "" {
				p.add(key, "%v is %s already; each endpoint of each rank needs one of its own, and ranks have the ports behind the one that is named", at, other)
				break
			}
			taken[at.String()] = key
		}
	}
}

// publisher is where one data-parallel rank of an engine publishes its KV
// events.
type publisher struct {
	events           endpoint
	replay, snapshot endpoint // zero where there is none
	topic            string
	ranks            int // that the engine says publish, 0 when it does not
}

// endpoint is an address that a ZeroMQ socket has bound. The zero value is none.
type endpoint struct{ network, address string }

// String is how ZeroMQ writes it.
func (e endpoint) String() string {
	switch e.network {
	case "":
		return ""
	case "unix":
		return "ipc://" + e.address
	}
	return "tcp://" + e.address
}

func (e endpoint) isZero() bool { return e == endpoint{} }

// parseEndpoint reads an endpoint as configuration has it. A TCP endpoint whose
// host is any address of the engine is at host, the port of another rank beyond
// it.
func parseEndpoint(text, host string, rank int) (endpoint, error) {
	const want = "want tcp://host:port, tcp://*:port for the replica's own host, or ipc://path"
	scheme, rest, _ := strings.Cut(text, "://")
	switch scheme {
	case "tcp":
	case "ipc":
		if !filepath.IsAbs(rest) {
			return endpoint{}, fmt.Errorf("%q has no absolute path; %s", text, want)
		}
		return endpoint{"unix", rest}, nil
	default:
		return endpoint{}, fmt.Errorf("%q is no endpoint of ZeroMQ; %s", text, want)
	}
	name, port, err := splitEndpoint(rest)
	if err != nil {
		return endpoint{}, fmt.Errorf("%q %w; %s", text, err, want)
	}
	if name != "*" && !isWildcard(name) {
		host = name
	}
	return tcpEndpoint(host, port, rank)
}

// splitEndpoint takes host:port apart, with a port that can be connected to. The
// brackets of IPv6 may be missing, as vLLM takes them too.
func splitEndpoint(address string) (host string, port int, err error) {
	i := strings.LastIndexByte(address, ':')
	if i < 0 {
		return "", 0, errors.New("has no port")
	}
	host = strings.TrimSuffix(strings.TrimPrefix(address[:i], "["), "]")
	port, err = strconv.Atoi(address[i+1:])
	if err != nil || port < 1 || port > 65535 {
		return "", 0, errors.New("has no port between 1 and 65535")
	}
	if strings.ContainsAny(host, " /@?#%") {
		return "", 0, errors.New("has no host that can be connected to")
	}
	return host, port, nil
}

func tcpEndpoint(host string, port, rank int) (endpoint, error) {
	if port < 1 || rank < 0 || port > 65535-rank {
		return endpoint{}, fmt.Errorf("there is no port %d for rank %d", port+rank, rank)
	}
	return endpoint{"tcp", net.JoinHostPort(host, strconv.Itoa(port+rank))}, nil
}

// configured is the publisher that configuration names.
func (c *KVEventsConfig) configured(host string, rank int) (publisher, error) {
	p := publisher{topic: c.Topic}
	var errs [3]error
	p.events, errs[0] = parseEndpoint(c.Endpoint, host, rank)
	if c.ReplayEndpoint != "" {
		p.replay, errs[1] = parseEndpoint(c.ReplayEndpoint, host, rank)
	}
	if c.SnapshotEndpoint != "" {
		p.snapshot, errs[2] = parseEndpoint(c.SnapshotEndpoint, host, rank)
	}
	return p, errors.Join(errs[:]...)
}

// errNoPublisher: the engine publishes no events, or does not say where. The
// text is for people.
type errNoPublisher string

func (e errNoPublisher) Error() string { return string(e) }

// maxSources bounds a page that is read to find a publisher, and findTime how
// long it may take: SGLang answers it after the step that it is computing.
const (
	maxSources = 4 << 20
	findTime   = 5 * time.Second
)

// findPublisher asks an engine of a kind, which is "" when not known, where one
// of its ranks publishes. get gets a page of the engine. What it names is only
// ever a port of host, the replica's own: an engine must not make the agent
// connect to whatever it likes.
func findPublisher(ctx context.Context, get func(ctx context.Context, page string) (*http.Response, error), engine, host string, rank int) (publisher, error) {
	var pages []engineSources
	switch engine {
	case "vllm":
		pages = []engineSources{{"/kv_event_sources", parseVLLMSources}}
	case "sglang":
		pages = []engineSources{{"/server_info", parseSGLangSources}, {"/get_server_info", parseSGLangSources}}
	case "":
		pages = []engineSources{{"/kv_event_sources", parseVLLMSources}, {"/server_info", parseSGLangSources}}
	default:
		return publisher{}, errNoPublisher("this kind of engine publishes no KV events")
	}
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	var none error = errNoPublisher("the engine does not say where it publishes KV events; if it does, configure replicas[].kv_events")
	for _, s := range pages {
		body, status, err := readPage(ctx, get, s.page)
		if err != nil {
			return publisher{}, err
		}
		switch {
		case status == http.StatusOK:
		case status >= 500 || status == http.StatusTooManyRequests:
			return publisher{}, fmt.Errorf("GET %s: status %d", s.page, status)
		case status == http.StatusUnauthorized || status == http.StatusForbidden:
			return publisher{}, errNoPublisher(fmt.Sprintf("GET %s: status %d; give the engine's api_key or api_key_file in the configuration", s.page, status))
		default:
			continue // the engine is older, or of another kind
		}
		p, err := s.parse(body, host, rank)
		if err == nil {
			return p, nil
		}
		none = err
	}
	return publisher{}, none
}

// engineSources is a page on which a kind of engine tells its publishers. The
// errors of parse are errNoPublisher.
type engineSources struct {
	page  string
	parse func(body []byte, host string, rank int) (publisher, error)
}

func readPage(ctx context.Context, get func(ctx context.Context, page string) (*http.Response, error), page string) (body []byte, status int, err error) {
	resp, err := get(ctx, page)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxSources+1))
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("GET %s: %w", page, plainError(err))
	case len(body) > maxSources:
		return nil, 0, fmt.Errorf("GET %s: larger than %v", page, Bytes(maxSources))
	}
	return body, resp.StatusCode, nil
}

const notPublished errNoPublisher = "the engine publishes no KV events; vLLM and SGLang do when they are started with --kv-events-config"

// vllmSource is what vLLM tells of one rank's publisher. Its ports are that
// rank's already.
type vllmSource struct {
	Rank             *int    `json:"data_parallel_rank"`
	Enabled          *bool   `json:"enable_kv_cache_events"`
	Publisher        *string `json:"publisher"`
	Endpoint         *string `json:"endpoint"`
	ReplayEndpoint   *string `json:"replay_endpoint"`
	SnapshotEndpoint *string `json:"snapshot_endpoint"`
	Topic            string  `json:"topic"`
}

// parseVLLMSources reads /kv_event_sources of vLLM: an object by rank, or one
// whose member sources is a list.
func parseVLLMSources(body []byte, host string, rank int) (publisher, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return publisher{}, errNoPublisher(fmt.Sprintf("/kv_event_sources is not what vLLM answers there: %v", err))
	}
	found, ranks := map[int]vllmSource{}, len(members)
	if list, ok := members["sources"]; ok {
		var sources []vllmSource
		if err := json.Unmarshal(list, &sources); err != nil {
			return publisher{}, errNoPublisher(fmt.Sprintf("/kv_event_sources is not what vLLM answers there: sources: %v", err))
		}
		ranks = len(sources)
		for i, s := range sources {
			if s.Rank != nil {
				i = *s.Rank
			}
			found[i] = s
		}
	} else if text, ok := members[strconv.Itoa(rank)]; ok {
		var s vllmSource
		if err := json.Unmarshal(text, &s); err != nil {
			return publisher{}, errNoPublisher(fmt.Sprintf("/kv_event_sources is not what vLLM answers there: rank %d: %v", rank, err))
		}
		found[rank] = s
	} else if len(members) > 0 {
		return publisher{}, errNoPublisher(fmt.Sprintf("the engine names no publisher for its rank %d", rank))
	}
	s, ok := found[rank]
	if !ok || s.Enabled != nil && !*s.Enabled || s.Endpoint == nil || *s.Endpoint == "" {
		return publisher{}, notPublished
	}
	if s.Publisher != nil && *s.Publisher != "zmq" {
		return publisher{}, errNoPublisher(fmt.Sprintf("the engine publishes its KV events by %.40q; only zmq is followed", *s.Publisher))
	}
	p := publisher{topic: s.Topic, ranks: ranks}
	var err error
	if p.events, err = namedEndpoint(s.Endpoint, host); err != nil {
		return publisher{}, err
	}
	if p.replay, err = namedEndpoint(s.ReplayEndpoint, host); err != nil {
		return publisher{}, err
	}
	if p.snapshot, err = namedEndpoint(s.SnapshotEndpoint, host); err != nil {
		return publisher{}, err
	}
	return p, nil
}

// namedEndpoint is the endpoint that an engine has named: its port at host.
func namedEndpoint(text *string, host string) (endpoint, error) {
	if text == nil || *text == "" {
		return endpoint{}, nil
	}
	rest, ok := strings.CutPrefix(*text, "tcp://")
	if !ok {
		return endpoint{}, errNoPublisher(fmt.Sprintf("the engine publishes at %.100q, which only configuration may name: replicas[].kv_events", *text))
	}
	_, port, err := splitEndpoint(rest)
	if err != nil {
		return endpoint{}, errNoPublisher(fmt.Sprintf("the engine publishes at %.100q, which %v", *text, err))
	}
	return endpoint{"tcp", net.JoinHostPort(host, strconv.Itoa(port))}, nil
}

// parseSGLangSources reads /server_info of SGLang, whose member kv_events has
// the port of the first rank.
func parseSGLangSources(body []byte, host string, rank int) (publisher, error) {
	var page struct {
		Events *struct {
			Publisher  string `json:"publisher"`
			Port       int    `json:"endpoint_port_base"`
			ReplayPort int    `json:"replay_endpoint_port_base"`
			Topic      string `json:"topic"`
			Ranks      int    `json:"dp_size"`
		} `json:"kv_events"`
	}
	if err := json.Unmarshal(body, &page); err != nil {
		return publisher{}, errNoPublisher(fmt.Sprintf("/server_info is not what SGLang answers there: %v", err))
	}
	e := page.Events
	switch {
	case e == nil:
		return publisher{}, notPublished
	case e.Publisher != "" && e.Publisher != "zmq":
		return publisher{}, errNoPublisher(fmt.Sprintf("the engine publishes its KV events by %.40q; only zmq is followed", e.Publisher))
	case e.Ranks > 0 && rank >= e.Ranks:
		return publisher{}, errNoPublisher(fmt.Sprintf("the engine names no publisher for its rank %d", rank))
	}
	p := publisher{topic: e.Topic, ranks: max(e.Ranks, 0)}
	var err error
	if p.events, err = tcpEndpoint(host, e.Port, rank); err != nil {
		return publisher{}, errNoPublisher("the engine names no endpoint that can be connected to: " + err.Error())
	}
	if e.ReplayPort != 0 {
		if p.replay, err = tcpEndpoint(host, e.ReplayPort, rank); err != nil {
			return publisher{}, errNoPublisher("the engine names no endpoint that can be connected to: " + err.Error())
		}
	}
	return p, nil
}
