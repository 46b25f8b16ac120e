package agent

import (
	"cmp"
	"slices"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/proxy"
)

// engineCache is what the fleet knows of a member's KV cache. It lies in the
// member; fleet.mu guards it. The zero value knows nothing, and the member's
// slot has not joined the index.
type engineCache struct {
	// slot is what the index was told of it last; joined: it was told.
	slot   index.SlotConfig
	joined bool
	// What the engine's pages tell: which it is, how many tokens a block has and
	// how many blocks there are, and that it reuses none of them.
	engine        string
	block, blocks int
	uncached      bool
}

// cachesLocked gives the models of a snapshot that is about to be published the
// names that they have in the index, and lets the slots of the members join the
// index, or join it anew when what is known of their caches has changed.
func (f *fleet) cachesLocked(cfg *Config, s *proxy.Fleet) {
	f.nameCachesLocked(cfg)
	for name, model := range s.Models {
		if name != model.Name {
			continue // an alias
		}
		base := name
		if model.Parent != "" {
			base, model.Adapter = model.Parent, name
		}
		model.CacheName = cmp.Or(f.cacheNames[base], base)
	}
	blocks := map[*proxy.Replica]int{}
	for _, m := range f.members {
		if f.joinIndexLocked(cfg, m) {
			blocks[m.replica] = m.cache.slot.BlockSize
		}
	}
	for _, m := range f.leaving {
		if m.cache.joined && !m.cache.uncached {
			blocks[m.replica] = m.cache.slot.BlockSize
		}
	}
	for name, model := range s.Models {
		if name != model.Name {
			continue
		}
		replicas := map[int]int{} // by block size
		for _, r := range model.Replicas {
			if n := blocks[r]; n > 0 {
				replicas[n]++
				if !slices.Contains(model.Blocks, n) {
					model.Blocks = append(model.Blocks, n)
				}
			}
		}
		// The usual one first.
		slices.SortStableFunc(model.Blocks, func(a, b int) int { return cmp.Compare(replicas[b], replicas[a]) })
		if len(model.Blocks) > 0 {
			model.BlockSize = model.Blocks[0]
		}
	}
}

// joinIndexLocked tells the index of a member's slot, as soon as it is known
// what the member serves. It reports whether the index knows the slot.
func (f *fleet) joinIndexLocked(cfg *Config, m *member) bool {
	model := f.servedBaseLocked(m)
	if model == "" {
		return m.cache.joined && !m.cache.uncached // what it served last stays
	}
	slot := index.SlotConfig{
		Model:        cmp.Or(f.cacheNames[model], model),
		BlockSize:    cmp.Or(f.configuredBlock(cfg, m), m.cache.block, defaultBlock),
		Capacity:     cmp.Or(m.cfg.KVBlocks, m.cache.blocks, cfg.Index.DefaultCapacity),
		AfterPrefill: m.engine() == "sglang",
	}
	if !m.cache.joined || m.cache.slot != slot {
		f.index.Join(m.replica.Slot, slot)
		m.cache.slot, m.cache.joined = slot, true
		m.subscriber.poke()
	}
	// Where nothing is reused nothing is looked for.
	if m.cache.uncached {
		m.replica.SetBlock(0)
		return false
	}
	m.replica.SetBlock(slot.BlockSize)
	return true
}

// engine is which one it is, as far as that is known.
func (m *member) engine() string { return cmp.Or(m.cfg.Engine, m.cache.engine) }

// servedBaseLocked is the first base model that the member lists, or that an
// adapter it lists adapts; "" when it is not known to serve any.
func (f *fleet) servedBaseLocked(m *member) string {
	for _, c := range m.models {
		if c.Parent == "" {
			return c.ID
		}
	}
	if len(m.models) > 0 {
		return m.models[0].Parent
	}
	return ""
}

// configuredBlock is the block size that the configuration gives one of the
// models that the member serves, 0 for none.
func (f *fleet) configuredBlock(cfg *Config, m *member) int {
	for _, mc := range cfg.Models {
		if mc.BlockSize > 0 && slices.ContainsFunc(m.models, func(c card) bool { return c.ID == mc.Name }) {
			return mc.BlockSize
		}
	}
	return 0
}

// nameCachesLocked maps the names of base models to those that they have in the
// index. All names of one model at one engine have the same: they share what is
// in its cache. A name in the index stays for as long as one of its names is
// served, whoever else comes and goes, since what engines hold is known by it.
func (f *fleet) nameCachesLocked(cfg *Config) {
	// same leads from a name to another of the same model, or to itself.
	same := map[string]string{}
	first := func(name string) string {
		for same[name] != name {
			name = same[name]
		}
		return name
	}
	var order []string // the names, those configured first
	for _, m := range f.members {
		byRoot := map[string]string{}
		for _, c := range m.models {
			if c.Parent != "" {
				continue
			}
			if same[c.ID] == "" {
				same[c.ID] = c.ID
				order = append(order, c.ID)
			}
			if c.Root == "" {
				continue
			}
			if other := byRoot[c.Root]; other == "" {
				byRoot[c.Root] = c.ID
			} else if a, b := first(other), first(c.ID); a != b {
				same[b] = a
			}
		}
	}
	place := map[string]int{}
	for i, mc := range cfg.Models {
		place[mc.Name] = i - len(cfg.Models)
	}
	slices.SortStableFunc(order, func(a, b string) int { return cmp.Compare(place[a], place[b]) })

	groups := map[string][]string{} // by what first returns
	var firsts []string
	for _, name := range order {
		g := first(name)
		if groups[g] == nil {
			firsts = append(firsts, g)
		}
		groups[g] = append(groups[g], name)
	}
	names, taken := map[string]string{}, map[string]bool{}
	for _, g := range firsts {
		chosen := ""
		for _, name := range groups[g] {
			was := f.cacheNames[name]
			// Another model may be served by the name meanwhile.
			if was != "" && !taken[was] && (same[was] == "" || first(was) == g) {
				chosen = was
				break
			}
		}
		chosen = cmp.Or(chosen, groups[g][0])
		taken[chosen] = true
		for _, name := range groups[g] {
			names[name] = chosen
		}
	}
	f.cacheNames = names
}
