package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/proxy"
)

// Survey is what an agent would find on this node, for whoever is about to configure
// one. It is a value.
type Survey struct {
	// Engines are those that listen here, by URL.
	Engines []SurveyedEngine
	// Locked are the URLs at which the list of models is refused without a key: an
	// engine may be behind it, or anything else.
	Locked []string
	// Interfaces are those that the datapath would attach to.
	Interfaces []string
	// NoBPF is why the kernel lets no program be loaded; "" when it does.
	NoBPF string
}

// SurveyedEngine is one engine, with what it has told and what was learned by asking it.
type SurveyedEngine struct {
	URL    string
	Engine string
	// Why it takes no requests; "" when it does.
	Why    string
	Models []SurveyedModel
	// BlockSize and Blocks are those of its KV cache, Ranks its data-parallel ranks; 0
	// when it does not tell.
	BlockSize, Blocks, Ranks int
	// KVEvents is where it publishes its KV events, "" when it does not, and NoKVEvents
	// why they are not followed.
	KVEvents, NoKVEvents string
}

// SurveyedModel is a model that an engine lists.
type SurveyedModel struct {
	Name string
	// Root is where the engine has it, MaxLen its longest prompt with its answer, 0 when
	// it does not tell. Parent is the model of which it is an adapter.
	Root, Parent string
	MaxLen       int
	// Exact: the agent turns prompts into the tokens that the engine has. Prompts is how,
	// or why not.
	Exact   bool
	Prompts string
}

// surveyTime bounds how long engines and tokenizers are waited for.
const surveyTime = 20 * time.Second

// surveyPause is between two looks for engines where the first has found none.
const surveyPause = 500 * time.Millisecond

// SurveyNode looks for engines that listen here and asks each what it is, as an agent with
// discovery.local does, for at most surveyTime. No prompt is computed for it but those by
// which tokenizers are compared, and nothing is attached to any interface.
func SurveyNode(ctx context.Context) (Survey, error) {
	s := systemSockets()
	return surveyNode(ctx, &s)
}

func surveyNode(ctx context.Context, s *sockets) (Survey, error) {
	asked := ctx
	ctx, end := context.WithTimeout(asked, surveyTime)
	defer end()
	var out Survey
	if err := bpf.Probe(); err != nil {
		out.NoBPF = err.Error()
	}
	client := &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	doors := map[netip.AddrPort]*door{}
	found, err := s.look(ctx, client, localConfig{}, doors)
	// An engine that is busy may not answer at once: where there is none, it is looked for
	// once more.
	if err == nil && len(found) == 0 {
		select {
		case <-time.After(surveyPause):
		case <-ctx.Done():
		}
		clear(doors)
		found, err = s.look(ctx, client, localConfig{}, doors)
	}
	if err != nil {
		return out, fmt.Errorf("cannot list the sockets that listen here: %w", err)
	}
	out.Locked = lockedDoors(ctx, client, doors)

	cfg := DefaultConfig()
	cfg.Index.MaxBytes = leastIndex
	for _, f := range found {
		cfg.Replicas = append(cfg.Replicas, ReplicaConfig{ID: f.URL, URL: f.URL, Engine: f.Engine})
	}
	var addrs []netip.AddrPort
	if len(found) > 0 {
		fleet, err := startFleet(&cfg, slog.New(slog.DiscardHandler), "", func(*proxy.Fleet) {}, func([]netip.AddrPort) {})
		if err != nil {
			return out, err
		}
		fleet.settle(ctx)
		out.Engines, addrs = fleet.surveyed()
		fleet.close()
	}
	out.Interfaces = surveyInterfaces(addrs)
	return out, asked.Err()
}

// lockedDoors are the URLs of those that are nobody known and want a key.
func lockedDoors(ctx context.Context, client *http.Client, doors map[netip.AddrPort]*door) (list []string) {
	for addr, d := range doors {
		if d.own || d.engine != "" {
			continue
		}
		at := "http://" + reachedAt(addr)[0].String()
		// The version and the models of an engine with a key are refused, or the models
		// alone; what answers 401 there is seldom anything else.
		if p, err := getPage(ctx, client, at+"/v1/models"); err == nil && p.status == http.StatusUnauthorized {
			list = append(list, at)
		}
	}
	slices.Sort(list)
	return list
}

// settle waits until it is known what there is to know of the members, or ctx ends.
func (f *fleet) settle(ctx context.Context) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !f.settled() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (f *fleet) settled() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		if m.vitals.standing != up {
			continue // its first check has failed
		}
		is := m.subscriber.standing()
		if len(m.models) == 0 && m.unlisted == "" || is.from.events.isZero() && !is.nowhere && is.why == "" {
			return false
		}
		looked := uint64(0)
		for _, n := range m.reports {
			looked += n
		}
		if looked == 0 {
			return false
		}
	}
	for _, m := range f.snapshot.Listed {
		if s := f.prompts.status(m); s.State == "loading" {
			return false
		}
	}
	return true
}

// surveyed tells what is known, by URL, and the engines' addresses. Ranks of one URL are
// one engine.
func (f *fleet) surveyed() (list []SurveyedEngine, addrs []netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		addrs = append(addrs, m.addrs...)
		if i := slices.IndexFunc(list, func(e SurveyedEngine) bool { return e.URL == m.url }); i >= 0 {
			list[i].Ranks++
			continue
		}
		e := SurveyedEngine{URL: m.url, Engine: m.engine(), BlockSize: m.cache.block, Blocks: m.cache.blocks}
		if m.rank >= 0 {
			e.Ranks = 1
		}
		if !m.takesRequests() {
			e.Why = m.reason()
		}
		is := m.subscriber.standing()
		if e.KVEvents = is.from.events.String(); e.KVEvents == "" {
			e.NoKVEvents = is.why
		}
		for _, c := range m.models {
			row := SurveyedModel{Name: c.ID, Root: c.Root, Parent: c.Parent, MaxLen: number(c.MaxModelLen).upTo(1 << 31)}
			if model := f.snapshot.Models[c.ID]; model != nil {
				s := f.prompts.status(model)
				if row.Exact, row.Prompts = s.State == "exact", s.How; !row.Exact {
					row.Prompts = s.Why
				}
			}
			e.Models = append(e.Models, row)
		}
		list = append(list, e)
	}
	slices.SortFunc(list, func(a, b SurveyedEngine) int { return strings.Compare(a.URL, b.URL) })
	return list, addrs
}

// surveyInterfaces are the names of those that the datapath would attach to by itself,
// with engines at such addresses.
func surveyInterfaces(engines []netip.AddrPort) (names []string) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil
	}
	var all []device
	for _, l := range links {
		all = append(all, newDevice(l))
	}
	w := interfaceWatch{log: slog.New(slog.DiscardHandler), engines: engines}
	for _, d := range wanted(all, nil, w.routedLocked()) {
		names = append(names, d.name)
	}
	slices.Sort(names)
	return names
}

// ID is a name for the engine: what it is, and its port, with its host if that says more.
func (e *SurveyedEngine) ID() string {
	u, err := url.Parse(e.URL)
	if err != nil {
		return e.URL
	}
	name := e.Engine
	if name == "" {
		name = "engine"
	}
	if host := u.Hostname(); host != "127.0.0.1" {
		name += "-" + strings.ReplaceAll(host, ":", ".")
	}
	return name + "-" + u.Port()
}
