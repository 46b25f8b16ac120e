package agent

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
	"github.com/inferrail/inferrail/proxy"
)

// engineCache is what the fleet knows of a member's KV cache. It lies in the
// member; fleet.mu guards it. The zero value knows nothing, and the member's
// slot has not joined the index.
type engineCache struct {
	// slot is what is known of it for the index; joined: the index was told.
	slot   index.SlotConfig
	joined bool
	// What the engine's pages tell: which it is, how many tokens a block has and
	// how many blocks there are, that it reuses none of them, and how many caches it has.
	engine        string
	block, blocks int
	uncached      bool
	sequences     int // that it runs at a time, each with a cache of its own; 0: they share one
	published     int // how many tokens a block has by the engine's events
	// What was told and differs from what is configured.
	doubtedBlock, doubtedBlocks int
}

// expire is the goroutine of what is done from time to time: it passes on what is known
// of speeds, ten times a second, and each second lets the index give up what engines
// should have told by now.
func (f *fleet) expire() {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for turn := 1; ; turn++ {
		select {
		case <-f.stopped.Done():
			return
		case now := <-tick.C:
			f.shareSpeeds()
			if turn%10 != 0 {
				continue
			}
			f.countSequences()
			for _, slot := range f.index.Expire(now) {
				f.states.contradict(slot, index.Silent)
				f.log.Warn("what an engine has in its cache is not known any more", "replica", f.replicaAt(slot), "why", index.Silent)
			}
		}
	}
}

// countSequences tells the index of engines that have proved to run more sequences at a
// time than was supposed.
func (f *fleet) countSequences() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		if n := m.cache.slot.Sequences; m.cache.joined && n > 0 && m.replica.Standing().Sequences() > n {
			f.log.Info("an engine runs more requests at a time than was supposed", "replica", m.id, "sequences", m.replica.Standing().Sequences())
			f.publishLocked()
			return
		}
	}
}

// replicaAt is the id of the member that has a slot.
func (f *fleet) replicaAt(slot int) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		if m.replica.Slot == slot {
			return m.id
		}
	}
	return ""
}

// slotStates decide how well slots of the index are known: as what follows an
// engine's events says, unless the engine has found other tokens in its cache
// than were predicted. Their methods may be called from any goroutine; they call
// the index, and nobody else, with mu held.
type slotStates struct {
	index *index.Index

	mu    sync.Mutex // guards what follows
	slots map[int]slotState
}

// slotState is what is said of one slot. The zero value is that nothing is.
type slotState struct {
	events   index.State
	why      string
	mismatch string // "" when there is none
}

// follow says how well a slot's events are followed, and why so, for people.
func (s *slotStates) follow(slot int, events index.State, why string) {
	s.change(slot, func(st *slotState) { st.events, st.why = events, why })
}

// contradict says why what is predicted of a slot is not believed, and that it
// is again when why is empty.
func (s *slotStates) contradict(slot int, why string) {
	s.change(slot, func(st *slotState) { st.mismatch = why })
}

// joined tells the index, which a slot has joined anew, what was said before.
func (s *slotStates) joined(slot int) { s.change(slot, func(*slotState) {}) }

func (s *slotStates) change(slot int, how func(*slotState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, known := s.slots[slot]
	is := was
	how(&is)
	if !known && is == was {
		return
	}
	s.slots[slot] = is
	if is.mismatch != "" {
		s.index.SetState(slot, index.Mismatched, is.mismatch)
	} else {
		s.index.SetState(slot, is.events, is.why)
	}
}

// mismatch is why what is predicted of a slot is not believed; "" when it is.
func (s *slotStates) mismatch(slot int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slots[slot].mismatch
}

// left forgets a slot.
func (s *slotStates) left(slot int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.slots, slot)
}

// Cached implements proxy.CacheChecks: what is predicted of an engine's cache is
// believed for as long as the engine's counts bear it out.
func (f *fleet) Cached(_ *proxy.Model, r *proxy.Replica, predicted, actual int, reported bool) {
	f.audit(r, predicted, actual, reported, time.Now())
}

func (f *fleet) audit(r *proxy.Replica, predicted, actual int, reported bool, now time.Time) {
	why, changed := f.index.Audit(r.Slot, predicted, actual, reported, now)
	if !changed {
		return
	}
	f.states.contradict(r.Slot, why)
	if why != "" {
		f.log.Warn("what the engine finds in its cache is not what is predicted", "replica", r.ID, "why", why)
	} else {
		f.log.Info("what the engine finds in its cache is what is predicted, again", "replica", r.ID)
	}
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
		if m.cache.slot.BlockSize > 0 {
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
// what the member serves. It reports whether the size of its blocks is known.
func (f *fleet) joinIndexLocked(cfg *Config, m *member) bool {
	model := f.servedBaseLocked(m)
	if model == "" {
		return m.cache.slot.BlockSize > 0 // what it served last stays
	}
	slot := index.SlotConfig{
		Model:        cmp.Or(f.cacheNames[model], model),
		BlockSize:    cmp.Or(m.cache.published, f.configuredBlock(cfg, m), m.cache.block, defaultBlock),
		Capacity:     cmp.Or(m.cfg.KVBlocks, m.cache.blocks, cfg.Index.DefaultCapacity),
		AfterPrefill: m.engine() == "sglang",
		Sequences:    m.cache.sequences,
	}
	supposed := m.engine() == "ollama" // which may be set to run more
	m.replica.Standing().SetSequences(slot.Sequences, supposed, time.Now())
	room := m.cache.block * m.cache.blocks // not what is supposed of one that does not tell
	switch n := m.cfg.KVBlocks; {
	case slot.Sequences > 0:
		room = 0 // each has a cache of its own
	case n > 0:
		room = n * slot.BlockSize
	}
	m.replica.Standing().SetRoom(room)
	if supposed && slot.Sequences > 0 {
		slot.Sequences = m.replica.Standing().Sequences()
	}
	if n := m.cache.block; n > 0 && n != slot.BlockSize && n != m.cache.doubtedBlock {
		m.cache.doubtedBlock = n
		f.log.Warn("models[].block_size is not what the engine tells; what is configured is used, and predicts wrongly if the engine is right",
			"replica", m.id, "configured", slot.BlockSize, "told", n)
	}
	if n := m.cache.blocks; n > 0 && n != slot.Capacity && n != m.cache.doubtedBlocks {
		m.cache.doubtedBlocks = n
		f.log.Warn("kv_blocks is not what the engine tells; what is configured is used, and predicts wrongly if the engine is right",
			"replica", m.id, "configured", slot.Capacity, "told", n)
	}
	joins := !m.cache.joined
	anew := joins || m.cache.slot.Model != slot.Model || m.cache.slot.BlockSize != slot.BlockSize
	if joins || m.cache.slot != slot {
		m.cache.slot = slot
		m.replica.SetBlock(slot.BlockSize)
	} else if !m.cache.uncached {
		return true
	}
	// Of an engine that reuses nothing, nothing is held: it is not in the index.
	if m.cache.uncached {
		if !joins {
			f.index.Leave(m.replica.Slot)
			f.states.contradict(m.replica.Slot, "")
			m.cache.joined = false
		}
		return true
	}
	if anew {
		m.subscriber.anew(func() *kvevent.Cursor {
			f.index.Join(m.replica.Slot, slot)
			return nil
		})
		f.states.contradict(m.replica.Slot, "")
	} else {
		f.index.Join(m.replica.Slot, slot)
	}
	m.cache.joined = true
	if joins {
		f.states.joined(m.replica.Slot)
		f.restoreLocked(m)
	}
	return true
}

// cacheStatus is what /debug/fleet shows of a replica's KV cache.
type cacheStatus struct {
	// Engine is which one it is, as far as that is known.
	Engine string `json:"engine,omitempty"`
	Rank   *int   `json:"data_parallel_rank,omitempty"`
	// Blocks and BlockSize are what is reckoned with. Of each Told is what the
	// engine tells, 0 when it does not.
	Blocks        int `json:"blocks"`
	BlocksTold    int `json:"blocks_told"`
	BlockSize     int `json:"block_size"`
	BlockSizeTold int `json:"block_size_told"`
	// Sequences is how many run at a time, each with a cache of its own; 0 where they
	// share one.
	Sequences int `json:"sequences,omitempty"`
	// Reused: what it has computed for a prompt it reuses for another.
	Reused   bool `json:"prefix_caching"`
	Restarts int  `json:"restarts"`
	// Shared: several processes answer at its URL, so that restarts are not seen.
	Shared bool `json:"several_processes,omitempty"`
	// Why its pages could not be read when they were last.
	Why string `json:"why,omitempty"`
	// State is how well it is known what it holds, StateWhy why not better.
	State    string `json:"state"`
	StateWhy string `json:"state_why,omitempty"`
}

func (m *member) cacheStatusLocked() cacheStatus {
	c := &m.cache
	s := cacheStatus{
		Engine: m.engine(), Blocks: c.slot.Capacity, BlocksTold: c.blocks, BlockSize: c.slot.BlockSize, BlockSizeTold: c.block, Sequences: c.slot.Sequences,
		Reused: !c.uncached, Restarts: m.restarts, Shared: m.server.life.shared, Why: m.server.why,
	}
	if rank := m.rank; rank >= 0 {
		s.Rank = &rank
	}
	return s
}

// allChats reports that the engine makes chats of completions, as Ollama does.
func (m *member) allChats() bool { return m.engine() == "ollama" || m.cfg.VRAM > 0 }

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
	if f.warm != nil {
		// Those from before the agent was started wait for who is served by them.
		for name, was := range f.cacheNames {
			if names[name] == "" && !taken[was] {
				names[name] = was
			}
		}
	}
	f.cacheNames = names
}
