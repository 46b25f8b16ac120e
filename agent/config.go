package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// Config is everything an agent can be told. DefaultConfig gives one that is
// complete except for its replicas; a file (ReadConfig) and then flags
// overwrite parts of it; Validate, which Start calls, reports all that is wrong
// with it. It is not changed after that.
//
// The yaml tags are the keys of the configuration file, in which any other key
// is an error. Values tagged secret appear in no message, nor do hashes: who
// puts the key itself where its hash belongs must not find it in a log.
type Config struct {
	// Listen is the TCP address that clients send their requests to.
	Listen string `yaml:"listen"`
	// AdminListen serves metrics, health and debug pages.
	AdminListen string `yaml:"admin_listen"`
	// AdminTokenSHA256 is the SHA-256, in hexadecimal, of the bearer token that
	// the admin pages want. It is required when they are not on loopback.
	AdminTokenSHA256 string `yaml:"admin_token_sha256" secret:"yes"`
	// Models gives models aliases and policies. A model that an engine lists
	// is served without being named here.
	Models    []ModelConfig   `yaml:"models"`
	Replicas  []ReplicaConfig `yaml:"replicas"`
	Discovery DiscoveryConfig `yaml:"discovery"`
	Datapath  DatapathConfig  `yaml:"datapath"`
	Routing   RoutingConfig   `yaml:"routing"`
	// Classes are those of requests that wait.
	Classes   []ClassConfig   `yaml:"classes"`
	Health    HealthConfig    `yaml:"health"`
	Load      LoadConfig      `yaml:"load"`
	Retry     RetryConfig     `yaml:"retry"`
	Tokenizer TokenizerConfig `yaml:"tokenizer"`
	Index     IndexConfig     `yaml:"index"`
	Server    ServerConfig    `yaml:"server"`
	Decisions DecisionsConfig `yaml:"decisions"`
	// Observability is where traces go.
	Observability ObservabilityConfig `yaml:"observability"`

	// misread is what ParseConfig could not use; Validate reports it.
	misread problems
}

// ModelConfig is one entry of Config.Models.
type ModelConfig struct {
	// Name is what the engines call the model.
	Name string `yaml:"name"`
	// Aliases are further names that clients may use for it.
	Aliases []string `yaml:"aliases"`
	// Policy chooses among its replicas; empty means RoutingConfig.DefaultPolicy.
	// Weights are the policy's.
	Policy  string  `yaml:"policy"`
	Weights Weights `yaml:"weights"`
	// Shadows are beside those of RoutingConfig.
	Shadows []ShadowConfig `yaml:"shadows"`
	// Admission, Queue, Hold, Pieces and Prewarm are in place of those of RoutingConfig, as
	// far as they say something.
	Admission AdmissionConfig `yaml:"admission"`
	Queue     QueueConfig     `yaml:"queue"`
	Hold      DurationOrOff   `yaml:"hold"`
	Pieces    DurationOrOff   `yaml:"pieces"`
	Prewarm   DurationOrOff   `yaml:"prewarm"`
	// SessionHeader is as in RoutingConfig, in place of that; empty leaves it.
	SessionHeader string `yaml:"session_header"`
	// Tokenizer is a model's directory, a name org/name[@revision] in the
	// Hugging Face cache, builtin:sim, or none. When empty it is looked for
	// where the engine says that the model is, and then by the model's name.
	Tokenizer string `yaml:"tokenizer"`
	// BlockSize is how many tokens a block of its engines' KV caches has; 0 is
	// defaultBlock.
	BlockSize int `yaml:"block_size"`
	// ChatTemplate is a file, ContentFormat auto, string or openai, and
	// TemplateKwargs what templates are given, as vLLM's --chat-template,
	// --chat-template-content-format and --default-chat-template-kwargs say.
	ChatTemplate   string `yaml:"chat_template"`
	ContentFormat  string `yaml:"content_format"`
	TemplateKwargs Object `yaml:"template_kwargs"`
}

// TokenizerConfig says what it may cost to turn prompts into tokens, and where
// tokenizers are.
type TokenizerConfig struct {
	// Workers read the prompts that are large. A request waits MaxWait for
	// them, and goes on without its tokens then.
	Workers int           `yaml:"workers"`
	MaxWait time.Duration `yaml:"max_wait"`
	// CacheBytes bounds the memory for the tokens of texts seen before; 0 keeps
	// none.
	CacheBytes Bytes `yaml:"cache_bytes"`
	// HubCache is the Hugging Face cache; when empty it is where the variables
	// HF_HUB_CACHE and HF_HOME say, or where it is without them.
	HubCache string `yaml:"hub_cache"`
}

// ReplicaConfig is one engine endpoint.
type ReplicaConfig struct {
	// ID names it in headers, metrics and logs; host:port of URL when empty.
	ID string `yaml:"id"`
	// URL is http://host:port, with a path when the engine's API is not at
	// the root. /v1 is not part of it.
	URL string `yaml:"url"`
	// Engine is what runs there: one of engines, "" when it need not be known.
	Engine string `yaml:"engine"`
	// Models it serves. When empty they are learned from its /v1/models.
	Models []string `yaml:"models"`
	// APIKey is the key that the engine wants, or APIKeyFile the file that
	// holds it. It replaces whatever key a client has sent.
	APIKey     string `yaml:"api_key" secret:"yes"`
	APIKeyFile string `yaml:"api_key_file"`
	// MaxConcurrency bounds the requests it is sent at one time, MaxPending
	// those that wait in the agent for their turn there. 0: no bound, and none
	// waits.
	MaxConcurrency int `yaml:"max_concurrency"`
	MaxPending     int `yaml:"max_pending"`
	// KVEvents says where it publishes what its cache holds.
	KVEvents KVEventsConfig `yaml:"kv_events"`
	// KVBlocks is how many blocks the engine's KV cache has. 0: the engine's
	// pages tell, or else IndexConfig.DefaultCapacity does.
	KVBlocks int `yaml:"kv_blocks"`
	// DataParallel is how many data-parallel ranks answer at the URL. Each is a
	// replica of its own, ID/0 to ID/N-1, unless there is one only. 0: the
	// engine's pages tell.
	DataParallel int `yaml:"data_parallel"`
	// Tier says which requests it is meant for, small or large ones, to the
	// policy nlms. Empty is small.
	Tier string `yaml:"tier"`
	// VRAM is the memory of its GPUs, of which Ollama tells how much its models
	// have. 0: Ollama is not asked, and it is not known how much is free.
	VRAM Bytes `yaml:"vram"`
}

// IndexConfig is about what is known of the engines' KV caches.
type IndexConfig struct {
	// MaxBytes is the memory for it.
	MaxBytes Bytes `yaml:"max_bytes"`
	// DefaultCapacity is how many blocks the KV cache of an engine has that does
	// not tell.
	DefaultCapacity int `yaml:"default_capacity_blocks"`
	// Snapshot is the file in which it survives a restart of the agent; when
	// empty, it does not.
	Snapshot string `yaml:"snapshot"`
}

// DiscoveryConfig says where engines are found beside Config.Replicas.
type DiscoveryConfig struct {
	DNS        []DNSConfig        `yaml:"dns"`
	Kubernetes []KubernetesConfig `yaml:"kubernetes"`
	// Local finds engines that listen on this node.
	Local bool `yaml:"local"`
}

// DNSConfig is a name whose addresses are engines: one replica for each.
type DNSConfig struct {
	Name string `yaml:"name"`
	// Type is auto (A and AAAA), a, aaaa or srv.
	Type string `yaml:"type"`
	// Port of the engines; srv brings its own.
	Port int `yaml:"port"`
	// Refresh is the longest time between two look-ups; a shorter TTL of the
	// answer makes it shorter, down to a second. 0 is 30s.
	Refresh time.Duration `yaml:"refresh"`

	// As in ReplicaConfig, for each replica that is found.
	Engine         string         `yaml:"engine"`
	Models         []string       `yaml:"models"`
	APIKey         string         `yaml:"api_key" secret:"yes"`
	APIKeyFile     string         `yaml:"api_key_file"`
	MaxConcurrency int            `yaml:"max_concurrency"`
	MaxPending     int            `yaml:"max_pending"`
	KVEvents       KVEventsConfig `yaml:"kv_events"`
}

// RetryConfig says how often a request is tried. Only one that has not been
// answered with a single byte is tried again.
type RetryConfig struct {
	// MaxAttempts counts the first one.
	MaxAttempts int `yaml:"max_attempts"`
	// Backoff is the pause before a replica is tried again that has failed
	// the request before; it doubles each time.
	Backoff time.Duration `yaml:"backoff"`
}

// RoutingConfig says how replicas are chosen.
type RoutingConfig struct {
	// DefaultPolicy is the policy of models that have none of their own, and
	// Weights are its weights.
	DefaultPolicy string  `yaml:"default_policy"`
	Weights       Weights `yaml:"weights"`
	// Shadows choose beside the policy of every model, without effect, and count
	// how they would have done.
	Shadows []ShadowConfig `yaml:"shadows"`
	// SessionHeader is the request header by which clients name the session that a
	// request belongs to; empty is x-session-id.
	SessionHeader string `yaml:"session_header"`
	// Admission says which requests are taken, and Queue which wait instead of being
	// refused.
	Admission AdmissionConfig `yaml:"admission"`
	Queue     QueueConfig     `yaml:"queue"`
	// Hold is how much work each replica has before it, in time, when requests are held
	// back in the agent until one has less.
	Hold DurationOrOff `yaml:"hold"`
	// Pieces is how long a piece takes in which engines are let compute long prompts.
	Pieces DurationOrOff `yaml:"pieces"`
	// Prewarm is how long a piece takes in which idle engines are let compute ahead what
	// many prompts begin with.
	Prewarm DurationOrOff `yaml:"prewarm"`
}

// HealthConfig says when a replica takes requests.
type HealthConfig struct {
	// Interval is the time between two checks of one replica.
	Interval time.Duration `yaml:"interval"`
	// Timeout bounds one check.
	Timeout time.Duration `yaml:"timeout"`
	// UnhealthyThreshold is how many checks in a row must fail before the
	// replica gets no more requests.
	UnhealthyThreshold int `yaml:"unhealthy_threshold"`
	// EjectionFailures is how many requests in a row must fail at a replica
	// for it to be ejected, for EjectionBackoff the first time and twice as
	// long each further time.
	EjectionFailures int           `yaml:"ejection_failures"`
	EjectionBackoff  time.Duration `yaml:"ejection_backoff"`
	// MaxEjectionPercent of a model's replicas may be ejected at one time.
	MaxEjectionPercent int `yaml:"max_ejection_percent"`
	// SlowStart is how long a replica that returns takes less than its share.
	SlowStart time.Duration `yaml:"slow_start"`
}

// LoadConfig says how engines are asked for their load.
type LoadConfig struct {
	// Interval is the time between two reports of an engine that has something
	// to do.
	Interval time.Duration `yaml:"interval"`
	// Timeout bounds one.
	Timeout time.Duration `yaml:"timeout"`
	// MaxAge is how old a report may be used, from when it was asked for.
	MaxAge time.Duration `yaml:"max_age"`
}

// ServerConfig bounds clients' requests.
type ServerConfig struct {
	// IdleTimeout closes a client connection that asks nothing.
	IdleTimeout time.Duration `yaml:"idle_timeout"`
	// HeadTimeout and BodyTimeout bound the arrival of a request's head and
	// body, each as a whole.
	HeadTimeout time.Duration `yaml:"head_timeout"`
	BodyTimeout time.Duration `yaml:"body_timeout"`
	// RequestTimeout bounds the wait for an engine's first byte. The answer
	// may last longer.
	RequestTimeout time.Duration `yaml:"request_timeout"`
	// StallTimeout ends an answer of which the client takes nothing for so long.
	StallTimeout time.Duration `yaml:"stall_timeout"`
	// ConnectTimeout bounds connecting to an engine.
	ConnectTimeout time.Duration `yaml:"connect_timeout"`
	// UpstreamIdle is how long an idle connection to an engine is kept. It
	// must be shorter than the engine's own keep-alive, 5 s for vLLM.
	UpstreamIdle time.Duration `yaml:"upstream_idle"`
	MaxHeadBytes Bytes         `yaml:"max_head_bytes"`
	MaxBodyBytes Bytes         `yaml:"max_body_bytes"`
	// ShutdownTimeout is how long running requests may go on after a signal.
	ShutdownTimeout time.Duration `yaml:"shutdown_timeout"`
	// MaxConnections bounds clients' connections; 0 is half of the files the
	// process may open. MaxBuffered bounds the memory of all request bodies.
	MaxConnections int   `yaml:"max_connections"`
	MaxBuffered    Bytes `yaml:"max_buffered_bytes"`
	// CORSOrigins are the web pages whose scripts may read answers; "*" is all.
	CORSOrigins []string    `yaml:"cors_origins"`
	TLS         TLSConfig   `yaml:"tls"`
	APIKeys     []KeyConfig `yaml:"api_keys"`
	// LogPrompts adds request bodies to the log lines of requests.
	LogPrompts bool `yaml:"log_prompts"`
}

// TLSConfig is a certificate, read again when one of its files changes.
type TLSConfig struct {
	// Listen is the address for TLS; when empty, Config.Listen speaks it.
	Listen   string `yaml:"listen"`
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
}

// KeyConfig is an API key that clients may use. With none, anybody may send
// requests.
type KeyConfig struct {
	// Name stands for the key in metrics and logs.
	Name string `yaml:"name"`
	// SHA256 of the key, in hexadecimal.
	SHA256 string `yaml:"sha256" secret:"yes"`
	// Models it may be used for; empty is all.
	Models []string `yaml:"models"`
	// Class is that of its requests, unless they name a worse one; the default one
	// when empty.
	Class string `yaml:"class"`
	// What it may use in a minute; 0 is no limit.
	RequestsPerMinute     int `yaml:"requests_per_minute"`
	InputTokensPerMinute  int `yaml:"input_tokens_per_minute"`
	OutputTokensPerMinute int `yaml:"output_tokens_per_minute"`
}

// DefaultConfig returns a Config that lacks only replicas.
func DefaultConfig() Config {
	return Config{
		Listen:      ":8080",
		AdminListen: "127.0.0.1:9090",
		Datapath:    DatapathConfig{Mode: "auto", Hook: "auto", Loop: "auto"},
		Routing: RoutingConfig{
			DefaultPolicy: policy.Default, SessionHeader: "x-session-id",
			Admission: AdmissionConfig{Mode: policy.AdmissionModes()[0], Percentile: 90, Window: 30 * time.Second},
			Queue:     QueueConfig{Timeout: 10 * time.Second},
			Hold:      DurationOrOff(50 * time.Millisecond),
			Pieces:    DurationOrOff(500 * time.Millisecond),
			Prewarm:   DurationOrOff(100 * time.Millisecond),
		},
		Health: HealthConfig{
			Interval:           time.Second,
			Timeout:            500 * time.Millisecond,
			UnhealthyThreshold: 3,
			EjectionFailures:   3,
			EjectionBackoff:    5 * time.Second,
			MaxEjectionPercent: 50,
			SlowStart:          10 * time.Second,
		},
		Load:      LoadConfig{Interval: 100 * time.Millisecond, Timeout: 500 * time.Millisecond, MaxAge: time.Second},
		Retry:     RetryConfig{MaxAttempts: 3, Backoff: 25 * time.Millisecond},
		Tokenizer: TokenizerConfig{Workers: 2, MaxWait: 50 * time.Millisecond, CacheBytes: 256 << 20},
		Index:     IndexConfig{MaxBytes: 1 << 30, DefaultCapacity: 16384},
		Decisions: DecisionsConfig{Sample: 0.01, MaxBytes: 256 << 20, Keep: 4},
		Server: ServerConfig{
			IdleTimeout:     2 * time.Minute,
			HeadTimeout:     10 * time.Second,
			BodyTimeout:     2 * time.Minute,
			RequestTimeout:  10 * time.Minute,
			StallTimeout:    10 * time.Minute,
			ConnectTimeout:  5 * time.Second,
			UpstreamIdle:    4 * time.Second,
			MaxHeadBytes:    16 << 10,
			MaxBodyBytes:    64 << 20,
			ShutdownTimeout: time.Minute,
			MaxBuffered:     2 << 30,
			CORSOrigins:     []string{"*"},
		},
	}
}

// ReadConfig overwrites in c what the file sets. See ParseConfig.
func (c *Config) ReadConfig(file string) error {
	data, err := readOnce(file)
	if err != nil {
		return fmt.Errorf("cannot read the configuration: %w", err)
	}
	if err := c.ParseConfig(data); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// ParseConfig overwrites in c what the YAML text sets. The error tells that the
// text is not YAML; unknown keys and values of the wrong kind are reported by
// Validate, together with all else.
func (c *Config) ParseConfig(data []byte) error {
	// Editors of some systems put it before the text.
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	var doc any
	dec := yaml.NewDecoder(bytes.NewReader(data), yaml.UseOrderedMap())
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil // an empty file changes nothing
		}
		// The lines around the mistake help, but may hold a secret.
		excerpt := !secretKeys.Match(data)
		return fmt.Errorf("not YAML: %s", strings.TrimSpace(yaml.FormatError(err, false, excerpt)))
	}
	var extra any
	if err := dec.Decode(&extra); !errors.Is(err, io.EOF) {
		return errors.New("the file holds more than one YAML document; remove all but the first")
	}
	if doc != nil {
		c.misread.fill("", reflect.ValueOf(c).Elem(), doc)
	}
	return nil
}

// secretKeys finds out whether a text holds secrets; see Config.
var secretKeys = regexp.MustCompile(`api_key|sha256`)

// Validate reports everything that is wrong with c at once, as Problems. It
// looks at c alone, see Check, and fills in the IDs that were left out.
func (c *Config) Validate() error {
	p := problems{list: slices.Clone(c.misread.list)}
	p.address("listen", c.Listen)
	p.address("admin_listen", c.AdminListen)
	if overlap(c.Listen, c.AdminListen) {
		p.add("admin_listen", "is the same as listen (%s); give one of them another port", c.Listen)
	}
	if c.AdminTokenSHA256 != "" {
		p.sha256("admin_token_sha256", c.AdminTokenSHA256)
	} else if host, _, err := net.SplitHostPort(c.AdminListen); err == nil && !isLoopback(host) {
		p.add("admin_token_sha256", "is missing, and admin_listen (%s) is not on loopback; %s", c.AdminListen, makeHash)
	}
	c.validateModels(&p)
	c.validateReplicas(&p)
	c.validateDiscovery(&p)
	c.validateRouting(&p)
	c.validateHold(&p)
	c.validatePieces(&p)
	c.validatePrewarm(&p)
	c.validateAdmission(&p)

	p.oneOf("datapath.mode", c.Datapath.Mode, "auto", "packet", "copy")
	p.oneOf("datapath.hook", c.Datapath.Hook, "auto", "tcx", "clsact")
	p.oneOf("datapath.loop", c.Datapath.Loop, "auto", "bpf_loop", "bounded")
	for i, name := range c.Datapath.Interfaces {
		path := fmt.Sprintf("datapath.interfaces[%d]", i)
		if name == "" {
			p.add(path, "is empty; want an interface name or a glob such as \"veth*\"")
		} else if _, err := filepath.Match(name, ""); err != nil {
			p.add(path, "%q is not a glob; check its brackets", name)
		}
	}
	if c.Datapath.MaxSplices < 0 {
		p.add("datapath.max_splices", "%d is negative; leave it out for the default", c.Datapath.MaxSplices)
	}
	if c.Datapath.PinDir != "" && !filepath.IsAbs(c.Datapath.PinDir) {
		p.add("datapath.pin_dir", "%q is not an absolute path", c.Datapath.PinDir)
	}

	c.validateHealth(&p)
	c.validateLoad(&p)
	if n := c.Retry.MaxAttempts; n < 1 {
		p.add("retry.max_attempts", "%d is below 1; the first attempt counts", n)
	}
	p.positive("retry.backoff", c.Retry.Backoff)
	c.validateTokenizer(&p)
	c.validateIndex(&p)
	c.validateServer(&p)
	c.validateDecisions(&p)
	c.validateObservability(&p)
	return p.err()
}

// Check is Validate, and looks at the files that c names too: certificates, keys
// and templates must be readable, and directories there. Tokenizers are
// not loaded, which takes long: see CheckPrompts.
func (c *Config) Check() error {
	var p problems
	if err := (Problems)(nil); errors.As(c.Validate(), &err) {
		p.list = err
	}
	if t := c.Server.TLS; t.CertFile != "" && t.KeyFile != "" {
		if _, _, err := loadPair(t); err != nil {
			p.add("server.tls", "%v", err)
		}
	}
	if file := c.Index.Snapshot; file != "" {
		p.directoryOf("index.snapshot", file)
	}
	if file := c.Decisions.File; file != "" {
		p.directoryOf("decisions.file", file)
	}
	for i, r := range c.Replicas {
		p.keyFile(fmt.Sprintf("replicas[%d].api_key_file", i), r.APIKeyFile)
	}
	for i, d := range c.Discovery.DNS {
		p.keyFile(fmt.Sprintf("discovery.dns[%d].api_key_file", i), d.APIKeyFile)
	}
	for i, k := range c.Discovery.Kubernetes {
		path := fmt.Sprintf("discovery.kubernetes[%d]", i)
		p.keyFile(path+".api_key_file", k.APIKeyFile)
		if _, err := readFile(k.Kubeconfig); k.Kubeconfig != "" && err != nil {
			p.add(path+".kubeconfig", "cannot be read: %v", err)
		}
	}
	for i, m := range c.Models {
		p.modelFiles(fmt.Sprintf("models[%d]", i), m)
	}
	return p.err()
}

// namedFiles are the files of which what they hold is a part of the
// configuration: engines' keys, templates and kubeconfigs.
func (c *Config) namedFiles() []string {
	var files []string
	for _, m := range c.Models {
		files = append(files, m.ChatTemplate)
	}
	for _, r := range c.Replicas {
		files = append(files, r.APIKeyFile)
	}
	for _, d := range c.Discovery.DNS {
		files = append(files, d.APIKeyFile)
	}
	for _, k := range c.Discovery.Kubernetes {
		files = append(files, k.APIKeyFile, k.Kubeconfig)
	}
	return slices.DeleteFunc(files, func(f string) bool { return f == "" })
}

// leastVRAM is less than any GPU has that serves a model.
const leastVRAM = 64 << 20

// leastInterval bounds HealthConfig.Interval from below.
const leastInterval = 10 * time.Millisecond

func (c *Config) validateHealth(p *problems) {
	h := &c.Health
	if p.positive("health.interval", h.Interval); h.Interval < leastInterval {
		p.add("health.interval", "%v is below %v; engines would do little else than to answer checks", h.Interval, leastInterval)
	}
	p.positive("health.timeout", h.Timeout)
	if h.UnhealthyThreshold < 1 {
		p.add("health.unhealthy_threshold", "%d is below 1", h.UnhealthyThreshold)
	}
	if h.EjectionFailures < 1 {
		p.add("health.ejection_failures", "%d is below 1; to eject none, set max_ejection_percent: 0", h.EjectionFailures)
	}
	p.positive("health.ejection_backoff", h.EjectionBackoff)
	if n := h.MaxEjectionPercent; n < 0 || n > 100 {
		p.add("health.max_ejection_percent", "%d is outside 0 to 100", n)
	}
	if h.SlowStart < 0 {
		p.add("health.slow_start", "%v is negative; 0s is none", h.SlowStart)
	}
}

func (c *Config) validateLoad(p *problems) {
	l := &c.Load
	if p.positive("load.interval", l.Interval); l.Interval < leastInterval {
		p.add("load.interval", "%v is below %v; engines would do little else than to tell their load", l.Interval, leastInterval)
	}
	p.positive("load.timeout", l.Timeout)
	if l.MaxAge < 2*l.Interval {
		p.add("load.max_age", "%v is less than twice load.interval (%v); most of the time there would be no report that may be used", l.MaxAge, l.Interval)
	}
}

func (c *Config) validateTokenizer(p *problems) {
	t := &c.Tokenizer
	if n := t.Workers; n < 1 || n > maxWorkers {
		p.add("tokenizer.workers", "%d is outside 1 to %d", n, maxWorkers)
	}
	p.positive("tokenizer.max_wait", t.MaxWait)
	if t.CacheBytes < 0 {
		p.add("tokenizer.cache_bytes", "%d is negative; 0 keeps none", int64(t.CacheBytes))
	}
	if t.HubCache != "" && !filepath.IsAbs(t.HubCache) {
		p.add("tokenizer.hub_cache", "%q is not an absolute path", t.HubCache)
	}
}

const (
	// leastIndex is room for some ten thousand blocks.
	leastIndex = 1 << 20
	// mostBlocks is more than the largest engines have, and bounds what a
	// mistaken number costs.
	mostBlocks = 1 << 28
	// mostRanks bounds the replicas that one URL becomes.
	mostRanks = 1024
)

func (c *Config) validateIndex(p *problems) {
	x := &c.Index
	if x.MaxBytes < leastIndex {
		p.add("index.max_bytes", "%v is below %v, which holds hardly a few prompts", x.MaxBytes, Bytes(leastIndex))
	}
	if n := x.DefaultCapacity; n < 1 || n > mostBlocks {
		p.add("index.default_capacity_blocks", "%d is outside 1 to %d", n, mostBlocks)
	}
	if x.Snapshot != "" && !filepath.IsAbs(x.Snapshot) {
		p.add("index.snapshot", "%q is not an absolute path", x.Snapshot)
	}
}

// maxWorkers bounds TokenizerConfig.Workers: more than a machine has processors
// gain nothing.
const maxWorkers = 1024

func (c *Config) validateServer(p *problems) {
	s := &c.Server
	p.positive("server.idle_timeout", s.IdleTimeout)
	p.positive("server.head_timeout", s.HeadTimeout)
	p.positive("server.body_timeout", s.BodyTimeout)
	p.positive("server.request_timeout", s.RequestTimeout)
	p.positive("server.stall_timeout", s.StallTimeout)
	p.positive("server.connect_timeout", s.ConnectTimeout)
	p.positive("server.upstream_idle", s.UpstreamIdle)
	p.positive("server.shutdown_timeout", s.ShutdownTimeout)
	if s.MaxHeadBytes < 1<<10 || s.MaxHeadBytes > 1<<20 {
		p.add("server.max_head_bytes", "%s is outside 1KiB to 1MiB", s.MaxHeadBytes)
	}
	if s.MaxBodyBytes < 1 {
		p.add("server.max_body_bytes", "%s is below 1; no request would be accepted", s.MaxBodyBytes)
	}
	if s.MaxBuffered < s.MaxBodyBytes {
		p.add("server.max_buffered_bytes", "%s is below server.max_body_bytes (%s); the largest request would never fit", s.MaxBuffered, s.MaxBodyBytes)
	}
	p.notNegative("server.max_connections", s.MaxConnections)
	for i, origin := range s.CORSOrigins {
		p.origin(fmt.Sprintf("server.cors_origins[%d]", i), origin)
	}
	c.validateTLS(p)

	names, hashes := map[string]string{}, map[string]string{} // -> path
	for i, k := range s.APIKeys {
		path := fmt.Sprintf("server.api_keys[%d]", i)
		if k.Name == "" {
			p.add(path+".name", "is missing; it stands for the key in metrics and logs")
		} else if first, ok := names[k.Name]; ok {
			p.add(path+".name", "%q is already %s", k.Name, first)
		} else {
			names[k.Name] = path + ".name"
		}
		if p.sha256(path+".sha256", k.SHA256) {
			hash := strings.ToLower(k.SHA256)
			if first, ok := hashes[hash]; ok {
				p.add(path+".sha256", "is the same as %s; each key has one entry", first)
			} else {
				hashes[hash] = path + ".sha256"
			}
		}
		p.names(path+".models", k.Models)
		p.notNegative(path+".requests_per_minute", k.RequestsPerMinute)
		p.notNegative(path+".input_tokens_per_minute", k.InputTokensPerMinute)
		p.notNegative(path+".output_tokens_per_minute", k.OutputTokensPerMinute)
	}
}

func (c *Config) validateTLS(p *problems) {
	t := &c.Server.TLS
	switch {
	case t.CertFile == "" && t.KeyFile != "":
		p.add("server.tls.cert_file", "is missing, and key_file is set; want both or none")
	case t.CertFile != "" && t.KeyFile == "":
		p.add("server.tls.key_file", "is missing, and cert_file is set; want both or none")
	}
	if t.Listen == "" {
		return
	}
	p.address("server.tls.listen", t.Listen)
	switch {
	case t.CertFile == "" && t.KeyFile == "":
		p.add("server.tls.listen", "is set without cert_file and key_file; TLS needs a certificate")
	case overlap(t.Listen, c.Listen):
		p.add("server.tls.listen", "is the same as listen (%s); leave it out to have TLS only, or give it another port", c.Listen)
	case overlap(t.Listen, c.AdminListen):
		p.add("server.tls.listen", "is the same as admin_listen (%s); give one of them another port", c.AdminListen)
	}
}

// overlap tells whether two addresses to listen on cannot both be had. The
// kernel would not tell: listeners of one user may share a port.
func overlap(a, b string) bool {
	hostA, portA, errA := net.SplitHostPort(a)
	hostB, portB, errB := net.SplitHostPort(b)
	if errA != nil || errB != nil || portA != portB || portA == "0" {
		return false
	}
	return hostA == hostB || isWildcard(hostA) || isWildcard(hostB) || isLocalhost(hostA, hostB) || isLocalhost(hostB, hostA)
}

func isLocalhost(name, ip string) bool { return name == "localhost" && isLoopback(ip) }

func isWildcard(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "" || err == nil && ip.IsUnspecified()
}

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

func (c *Config) validateModels(p *problems) {
	names := map[string]string{} // model name or alias -> where it was given
	for i, m := range c.Models {
		path := fmt.Sprintf("models[%d]", i)
		if m.Name == "" {
			p.add(path+".name", "is missing; want the name the engine lists in /v1/models")
		} else if first, ok := names[m.Name]; ok {
			p.add(path+".name", "%q is already %s", m.Name, first)
		} else {
			names[m.Name] = path + ".name"
		}
		p.tokenizer(path+".tokenizer", m.Tokenizer)
		p.notNegative(path+".block_size", m.BlockSize)
		if m.ContentFormat != "" {
			p.oneOf(path+".content_format", m.ContentFormat, "auto", "string", "openai")
		}
		if _, err := prompt.Load(prompt.Source{TemplateKwargs: string(m.TemplateKwargs)}); err != nil {
			p.add(path+".template_kwargs", "%s", strings.TrimPrefix(err.Error(), "template kwargs: "))
		}
	}
	// Aliases after all names, so that the clash is reported at the alias.
	for i, m := range c.Models {
		for j, alias := range m.Aliases {
			path := fmt.Sprintf("models[%d].aliases[%d]", i, j)
			if alias == "" {
				p.add(path, "is empty; remove it")
			} else if first, ok := names[alias]; ok {
				p.add(path, "%q is already %s", alias, first)
			} else {
				names[alias] = path
			}
		}
	}
}

func (c *Config) validateReplicas(p *problems) {
	if len(c.Replicas) == 0 && len(c.Discovery.DNS) == 0 && len(c.Discovery.Kubernetes) == 0 && !c.Discovery.Local {
		p.add("replicas", "are missing; name an engine here or with --replica http://host:port, let discovery.dns, discovery.kubernetes or discovery.local (--discover-local) find some, or try --sim 3")
	}
	ids := map[string]string{}        // id -> path
	urls := map[string]string{}       // url -> path
	publishers := map[string]string{} // endpoint -> path
	for i := range c.Replicas {
		r := &c.Replicas[i]
		path := fmt.Sprintf("replicas[%d]", i)
		host := p.engineURL(path+".url", r.URL)
		if host != "" {
			for _, key := range (&finding{ReplicaConfig: *r}).keys() {
				if first, ok := urls[key]; ok {
					p.add(path+".url", "%s is already %s", r.URL, first)
				}
				urls[key] = path + ".url"
			}
		}
		if r.ID == "" {
			r.ID = host
		} else if strings.ContainsFunc(r.ID, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
			// The ID is sent as a header's value.
			p.add(path+".id", "%q has a blank or a character that is not ASCII", r.ID)
		}
		if r.ID != "" {
			if first, ok := ids[r.ID]; ok {
				p.add(path+".id", "%q is already %s; ids must differ", r.ID, first)
			}
			ids[r.ID] = path + ".id"
		}
		p.engine(path, engineKeys{r.Engine, r.Models, r.APIKey, r.APIKeyFile, r.MaxConcurrency, r.MaxPending})
		r.KVEvents.validate(p, path+".kv_events", r.Engine)
		if name, _, err := net.SplitHostPort(host); err == nil {
			r.KVEvents.validateRanks(p, path+".kv_events", name, r.DataParallel, publishers)
		}
		if n := r.KVBlocks; n < 0 || n > mostBlocks {
			p.add(path+".kv_blocks", "%d is outside 0 to %d; leave it out to ask the engine", n, mostBlocks)
		}
		if n := r.DataParallel; n < 0 || n > mostRanks {
			p.add(path+".data_parallel", "%d is outside 0 to %d; leave it out to ask the engine", n, mostRanks)
		}
		if r.Tier != "" {
			p.oneOf(path+".tier", r.Tier, "small", "large")
		}
		if r.VRAM != 0 && r.VRAM < leastVRAM {
			p.add(path+".vram", "%v is no GPU's memory; want such as 24GiB", r.VRAM)
		} else if r.VRAM > 0 && r.Engine != "" && r.Engine != "ollama" {
			p.add(path+".vram", "is set, and engine is %s, which does not tell how much of it is in use; only ollama does. Remove it", r.Engine)
		}
	}
	for i, r := range c.Replicas {
		for rank := range min(r.DataParallel, mostRanks) {
			id := r.ID + "/" + strconv.Itoa(rank)
			if other, ok := ids[id]; ok && r.DataParallel > 1 {
				p.add(fmt.Sprintf("replicas[%d].data_parallel", i), "rank %d would be called %q, as %s is", rank, id, other)
			}
		}
	}
}

func (c *Config) validateDiscovery(p *problems) {
	type lookup struct {
		name, kind string
		port       int
	}
	seen := map[lookup]string{} // -> path
	for i := range c.Discovery.DNS {
		d := &c.Discovery.DNS[i]
		path := fmt.Sprintf("discovery.dns[%d]", i)
		if d.Type == "" {
			d.Type = "auto"
		}
		p.hostname(path+".name", d.Name)
		p.oneOf(path+".type", d.Type, "auto", "a", "aaaa", "srv")
		switch {
		case d.Type == "srv" && d.Port != 0:
			p.add(path+".port", "%d is not used: an srv record brings its own; remove it", d.Port)
		case d.Type != "srv" && d.Port == 0:
			p.add(path+".port", "is missing; want the port that the engines listen on, or type: srv")
		case d.Type != "srv" && (d.Port < 1 || d.Port > 65535):
			p.add(path+".port", "%d is not between 1 and 65535", d.Port)
		}
		if d.Refresh != 0 && d.Refresh < time.Second {
			p.add(path+".refresh", "%v is below 1s", d.Refresh)
		}
		key := lookup{strings.ToLower(strings.TrimSuffix(d.Name, ".")), d.Type, d.Port}
		if first, ok := seen[key]; ok {
			p.add(path+".name", "%q is looked up already by %s", d.Name, first)
		}
		seen[key] = path
		p.engine(path, engineKeys{d.Engine, d.Models, d.APIKey, d.APIKeyFile, d.MaxConcurrency, d.MaxPending})
		d.KVEvents.validateFound(p, path+".kv_events", d.Engine)
	}
	known := map[string]string{} // what is looked at -> path
	for i := range c.Discovery.Kubernetes {
		k := &c.Discovery.Kubernetes[i]
		path := fmt.Sprintf("discovery.kubernetes[%d]", i)
		k.validate(p, path)
		k.KVEvents.validateFound(p, path+".kv_events", k.Engine)
		if first, ok := known[k.entry()]; ok {
			p.add(path, "%s is looked at already by %s", k.Name(), first)
		}
		known[k.entry()] = path
	}
}

// ParseReplica reads a replica as the command line has it: [id=]URL.
func ParseReplica(s string) ReplicaConfig {
	if id, rest, ok := strings.Cut(s, "="); ok && !strings.ContainsAny(id, ":/?") {
		return ReplicaConfig{ID: id, URL: rest}
	}
	return ReplicaConfig{URL: s}
}

// engines are the kinds of engine that are known.
var engines = []string{"vllm", "sglang", "tgi", "llamacpp", "ollama"}

// Bytes is a number of bytes, written with a unit: 64MiB.
type Bytes int64

var byteUnits = []struct {
	name string
	size Bytes
}{
	// Longest names first, because the shorter ones are endings of them.
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9},
	{"B", 1},
}

// ParseBytes reads 65536, 64KiB, 64MiB, 1GiB or 10MB.
func ParseBytes(s string) (Bytes, error) {
	number, unit := strings.TrimSpace(s), Bytes(1)
	for _, u := range byteUnits {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.size
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%q is not a size; want such as 16KiB or 64MiB", s)
	}
	if n > math.MaxInt64/int64(unit) {
		return 0, fmt.Errorf("%q is too large", s)
	}
	return Bytes(n) * unit, nil
}

// Object is a JSON object, written as a YAML mapping. Its members keep their
// order. The zero value is none.
type Object string

// String writes b in the largest binary unit that divides it.
func (b Bytes) String() string {
	for i := 2; i >= 0; i-- {
		if u := byteUnits[i]; b != 0 && b%u.size == 0 {
			return strconv.FormatInt(int64(b/u.size), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(b), 10)
}
