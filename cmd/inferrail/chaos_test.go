package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/simulator"
)

// TestChaos is an agent in front of three simulated engines, each a process of
// its own, that are killed, hung, made to flap, slowed down and made to answer
// nonsense at random while clients of many kinds send 300 requests a second,
// streams among them. A fourth engine, which is well, is added and removed by
// reloading the configuration, and in a long run a second agent takes over. At
// any time at least one engine is well, so no request may fail before it is
// answered; one whose engine is harmed in mid-answer must be seen to have
// broken, and no other may break. Afterwards the agent holds no more memory,
// goroutines and sockets than before.
//
// It lasts for INFERRAIL_CHAOS (15s) in each tier, or for INFERRAIL_SOAK in all.
// The seed is INFERRAIL_CHAOS_SEED, else drawn and told. INFERRAIL_CHAOS_LOG is
// a file for the agents' logs at level debug.
//
//	make soak SOAK=20m
func TestChaos(t *testing.T) {
	t.Parallel()
	tiers := []string{"copy", "packet"}
	noPacket := bpf.Probe()
	length := 15 * time.Second
	var err error
	if s := os.Getenv("INFERRAIL_CHAOS"); s != "" {
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatalf("INFERRAIL_CHAOS: %v", err)
		}
	} else if s := os.Getenv("INFERRAIL_SOAK"); s != "" {
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatalf("INFERRAIL_SOAK: %v", err)
		}
		if noPacket == nil {
			length /= time.Duration(len(tiers))
		}
	} else if testing.Short() {
		t.Skip("a minute a tier")
	}
	seed := rand.Uint64()
	if s := os.Getenv("INFERRAIL_CHAOS_SEED"); s != "" {
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("INFERRAIL_CHAOS_SEED: %v", err)
		}
	}
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			t.Parallel()
			if tier == "packet" && noPacket != nil && os.Getenv("INFERRAIL_NEED_BPF") != "1" {
				t.Skip(noPacket)
			}
			t.Logf("INFERRAIL_CHAOS=%v INFERRAIL_CHAOS_SEED=%d", length, seed)
			newChaos(t, tier, seed).run(length)
		})
	}
}

// chaosSim is the engines' configuration, one for all: so the text of an answer does not depend on
// who gave it.
var chaosSim = simulator.Config{
	ServedModelName: []string{"m"}, MaxModelLen: 1 << 20, NumGPUBlocks: 1 << 18, PrefillA: 1, PrefillD: 2000, TimePerOutputToken: 2 * time.Millisecond,
}

// chaos is one run of TestChaos.
type chaos struct {
	*testing.T
	seed    uint64
	engines []*chaosEngine // those that are harmed, and last the guest, which is not
	file    string         // the configuration
	listen  string         // of the agent
	secure  string         // where it speaks TLS
	admin   admin
	clients []*chaosClient

	mu     sync.Mutex // guards the rest, and makes reloads and take-overs exclude each other
	agent  *child
	guests bool // the guest is configured

	// ending: an agent closes its idle connections. A client may have sent a
	// request on one just then, and is to send it again, as HTTP has it.
	ending  atomic.Bool
	running sync.WaitGroup // requests
	tally   tally
}

// chaosEngine is one simulated engine.
type chaosEngine struct {
	id, port string
	child    *child // used by the goroutine that harms it only
	// harms is odd while the engine does what may break an answer.
	harms atomic.Int64
}

// tally counts by name. Any goroutine may use it.
type tally struct {
	mu     sync.Mutex // guards counts
	counts map[string]int
}

func (t *tally) add(name string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.counts == nil {
		t.counts = map[string]int{}
	}
	t.counts[name]++
	return t.counts[name]
}

func (t *tally) get(name string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts[name]
}

func (t *tally) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(t.counts)) {
		fmt.Fprintf(&b, "%s %d, ", name, t.counts[name])
	}
	return strings.TrimSuffix(b.String(), ", ")
}

func newChaos(t *testing.T, tier string, seed uint64) *chaos {
	c := &chaos{T: t, seed: seed}
	dir := t.TempDir()
	certFile, keyFile := writeCertificate(t, dir)
	ports := []string{freePort(t), freePort(t), freePort(t)}
	c.listen, c.secure, c.admin = "127.0.0.1:"+ports[0], "127.0.0.1:"+ports[1], admin("http://127.0.0.1:"+ports[2])
	for i := range 4 {
		e := &chaosEngine{id: fmt.Sprint("e", i), port: freePort(t)}
		c.engines = append(c.engines, e)
		if err := c.startEngine(e); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, e := range c.engines {
			e.child.end()
		}
	})
	c.file = filepath.Join(dir, "inferrail.yaml")
	head := fmt.Sprintf(`listen: %s
admin_listen: %s
datapath: {mode: %s, interfaces: [lo]}
models: [{name: m, aliases: [alias]}]
health: {ejection_backoff: 500ms, slow_start: 2s}
server:
  tls: {listen: %q, cert_file: %s, key_file: %s}
  api_keys:
  - {name: free, sha256: %s}
  - {name: counted, sha256: %s, input_tokens_per_minute: 1000000000, output_tokens_per_minute: 1000000000}
`, c.listen, strings.TrimPrefix(string(c.admin), "http://"), tier, c.secure, certFile, keyFile, sha256Hex(freeKey), sha256Hex(countedKey))
	if err := os.WriteFile(c.file+".head", []byte(head), 0o600); err != nil {
		t.Fatal(err)
	}
	c.guests = true
	c.writeConfig()
	c.agent = startChild(t, thisTest(), c.agentArgs()...)
	t.Cleanup(func() {
		if t.Failed() {
			text := c.agent.out.String()
			t.Logf("the end of the agent's log:\n%s", text[max(0, len(text)-8000):])
		}
		if name := os.Getenv("INFERRAIL_CHAOS_LOG"); name != "" {
			f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			fmt.Fprintf(f, "%s\n%s", t.Name(), c.agent.out)
		}
	})
	c.clients = newChaosClients(c)
	t.Cleanup(c.running.Wait)
	if !c.awaitUp(len(c.engines)) {
		t.FailNow()
	}
	return c
}

func (c *chaos) agentArgs() []string {
	args := []string{"agent", "--config", c.file}
	if os.Getenv("INFERRAIL_CHAOS_LOG") != "" {
		args = append(args, "--log-level", "debug")
	}
	return args
}

// writeCertificate makes one for this machine.
func writeCertificate(t *testing.T, dir string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(cryptorand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for name, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

// writeConfig writes the configuration with or without the guest, at once: the
// agent may look at any time.
func (c *chaos) writeConfig() {
	text, err := os.ReadFile(c.file + ".head")
	if err != nil {
		c.Error(err)
		return
	}
	config := bytes.NewBuffer(text)
	config.WriteString("replicas:\n")
	for i, e := range c.engines {
		bounds := ""
		if i < 2 {
			// Enough for what one engine gets when it is the only one, but not
			// for what piles up at one that hangs.
			bounds = ", max_concurrency: 40, max_pending: 10000"
		}
		if i < len(c.engines)-1 || c.guests {
			fmt.Fprintf(config, "- {id: %s, url: \"http://127.0.0.1:%s\"%s}\n", e.id, e.port, bounds)
		}
	}
	if err := os.WriteFile(c.file+".new", config.Bytes(), 0o600); err != nil {
		c.Error(err)
	}
	if err := os.Rename(c.file+".new", c.file); err != nil {
		c.Error(err)
	}
}

func (c *chaos) startEngine(e *chaosEngine) (err error) {
	sim, err := inferrail()
	if err != nil {
		return err
	}
	e.child, err = spawn(sim, "sim", "--port", e.port, "--served-model-name", chaosSim.ServedModelName[0],
		"--max-model-len", fmt.Sprint(chaosSim.MaxModelLen), "--num-gpu-blocks-override", fmt.Sprint(chaosSim.NumGPUBlocks),
		"--prefill-a", fmt.Sprint(chaosSim.PrefillA), "--prefill-b", "0", "--prefill-d", fmt.Sprint(chaosSim.PrefillD),
		"--time-per-output-token", chaosSim.TimePerOutputToken.String())
	return err
}

// awaitUp waits until so many engines take requests as the agent sees it.
func (c *chaos) awaitUp(n int) bool {
	c.Helper()
	if c.admin.awaitMetric(c.T, 2*time.Minute, func(v float64) bool { return int(v) >= n }, "inferrail_replica_up") {
		return true
	}
	fleet, err := c.admin.page("/debug/fleet")
	c.Errorf("not all of %d replicas come up: %v\n%s", n, err, fleet)
	return false
}

const chaosRate = 300 // requests a second

// longChaos is a run in which everything happens.
const longChaos = 3 * time.Minute

func (c *chaos) run(length time.Duration) {
	idle := c.admin.footprint(c.T)
	// What a warm agent holds is what it must not exceed later.
	c.load(max(length/5, 5*time.Second))
	warm := c.admin.footprint(c.T)
	if c.tally.get("failed")+c.tally.get("broken") > 0 {
		c.Fatalf("without harm %v", &c.tally)
	}
	ctx, stop := context.WithCancel(context.Background())
	var others sync.WaitGroup
	others.Go(func() { c.harmEngines(ctx) })
	others.Go(func() { c.reloads(ctx) })
	if length >= longChaos {
		others.Go(func() { c.takeOver(ctx, length/2) })
	}
	for begin, last := time.Now(), time.Now(); time.Since(begin) < length && c.tally.get("failed") < 100; {
		c.load(min(length, 5*time.Second))
		if time.Since(last) > 20*time.Second {
			last = time.Now()
			c.Logf("after %v: %v; %+v", time.Since(begin).Round(time.Second), &c.tally, c.admin.footprint(c.T))
		}
	}
	stop()
	others.Wait()
	c.running.Wait()
	c.Log(&c.tally)
	for _, client := range c.clients {
		client.CloseIdleConnections()
	}

	if sent, answered := c.tally.get("sent"), c.tally.get("answered"); sent < int(length.Seconds()*chaosRate/4) || answered < sent*3/4 {
		c.Errorf("too little happened: %d sent, %d answered", sent, answered)
	}
	c.eachHappened(length)
	if !c.guests {
		idle.goroutines-- // which watches the guest
	}
	now := c.admin.awaitIdle(c.T, idle)
	c.Logf("footprint: idle %+v, warm %+v, afterwards %+v", idle, warm, now)
	// After a few seconds the race detector's memory still grows.
	slack := 256 << 20
	if length >= longChaos {
		slack = warm.rss/4 + 32<<20
	}
	if now.rss > warm.rss+slack {
		c.Errorf("the agent holds %d MiB, and held %d when it was warm", now.rss>>20, warm.rss>>20)
	}
	for _, e := range c.engines {
		if !admin("http://127.0.0.1:"+e.port).awaitMetric(c.T, 20*time.Second, func(v float64) bool { return v == 0 }, "vllm:num_requests_running") {
			c.Errorf("%s generates for ever for somebody who has left", e.id)
		}
	}
	page, err := c.admin.page("/metrics")
	if err != nil {
		c.Fatal(err)
	}
	for line := range strings.Lines(page) {
		if regexp.MustCompile(`^inferrail_(retries|requests|responses)_total`).MatchString(line) {
			c.Log(strings.TrimSpace(line))
		}
	}
	c.awaitEnd(c.agent)
}

// awaitEnd tells an agent to end and waits until it has, in order.
func (c *chaos) awaitEnd(agent *child) {
	agent.signal(syscall.SIGTERM)
	select {
	case <-agent.ended:
	case <-time.After(90 * time.Second):
		c.Errorf("the agent does not end:\n%s", agent.out)
		agent.end()
	}
	if agent.err != nil {
		c.Errorf("the agent: %v\n%s", agent.err, agent.out)
	}
}

// eachHappened expects that a run of some length has seen every kind of client
// and request, and a long one every kind of harm.
func (c *chaos) eachHappened(length time.Duration) {
	names := append([]string{"left", "added", "removed", "counted", "alias"}, bodyManners...)
	for _, client := range c.clients {
		names = append(names, client.name)
	}
	for _, kind := range chaosRequests {
		names = append(names, kind.name)
	}
	if length >= longChaos {
		names = append(names, "broken", "taken over")
		for _, h := range harms {
			names = append(names, h.name)
		}
	}
	for _, name := range names {
		if c.tally.get(name) == 0 {
			c.Errorf("nothing was ever %q", name)
		}
	}
}

// load sends requests at the rate for a time. It does not wait for answers.
func (c *chaos) load(length time.Duration) {
	tick := time.NewTicker(time.Second / chaosRate)
	defer tick.Stop()
	for until := time.Now().Add(length); time.Now().Before(until); <-tick.C {
		n := c.tally.add("sent")
		c.running.Go(func() { c.request(n) })
	}
}

// reloads adds and removes the guest again and again.
func (c *chaos) reloads(ctx context.Context) {
	rng := rand.New(rand.NewPCG(c.seed, 4))
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second + time.Duration(rng.Int64N(int64(3*time.Second)))):
		}
		c.mu.Lock()
		c.guests = !c.guests
		c.writeConfig()
		c.agent.signal(syscall.SIGHUP)
		want, name := 0.0, "removed"
		if c.guests {
			want, name = 1, "added"
		}
		guest := c.engines[len(c.engines)-1]
		if !c.admin.awaitMetric(c.T, time.Minute, func(v float64) bool { return v == want },
			"inferrail_replica_up", `"`+guest.id+`"`) {
			c.Errorf("a replica is never %s", name)
		}
		c.mu.Unlock()
		c.tally.add(name)
	}
}

// takeOver starts another agent after a time and ends the first.
func (c *chaos) takeOver(ctx context.Context, after time.Duration) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(after):
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.agent
	next, err := spawn(thisTest(), c.agentArgs()...)
	if err != nil {
		c.Error(err)
		return
	}
	c.Cleanup(next.end)
	for began := time.Now(); !strings.Contains(next.out.String(), "\nreplicas   "); time.Sleep(20 * time.Millisecond) {
		if time.Since(began) > time.Minute {
			c.Errorf("the second agent does not come up:\n%s", next.out)
			return
		}
	}
	c.ending.Store(true)
	defer c.ending.Store(false)
	c.awaitEnd(old)
	c.agent = next
	c.tally.add("taken over")
}
