package tokenizer

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
)

// check reports whatever is not as a shard's comments say, and its size.
func (s *shard) check(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	bytes, entries := len(s.table)*slotBytes, 0
	inUse := map[uint32]bool{}
	for _, number := range s.order {
		seg := &s.segments[number]
		if inUse[number] || len(seg.words) == 0 || seg.used > len(seg.words) {
			t.Fatalf("segment %d is in order twice, without memory or overfull", number)
		}
		inUse[number] = true
		bytes += 4*len(seg.words) + segmentBytes
	}
	for i, slot := range s.table {
		if slot.segment == 0 {
			continue
		}
		entries++
		if !inUse[slot.segment-1] {
			t.Fatalf("slot %d leads to segment %d, which is not in use", i, slot.segment-1)
		}
		seg := &s.segments[slot.segment-1]
		e := entry(seg.words[slot.at:])
		if int(slot.at)+e.size() > seg.used {
			t.Fatalf("the entry of slot %d ends behind its segment", i)
		}
		if at, found := s.findLocked(e.hash()); at != i || found == nil {
			t.Fatalf("slot %d is not found by its hash, but %d", i, at)
		}
	}
	switch {
	case entries != s.entries:
		t.Fatalf("%d entries, counted %d", entries, s.entries)
	case bytes != s.bytes:
		t.Fatalf("%d bytes, counted %d", bytes, s.bytes)
	case bytes > s.limit:
		t.Fatalf("%d bytes, allowed %d", bytes, s.limit)
	case len(inUse)+len(s.unused) != len(s.segments):
		t.Fatalf("%d segments: %d in use and %d not", len(s.segments), len(inUse), len(s.unused))
	}
}

func checkCache(t *testing.T, c *Cache, bytes int64) {
	t.Helper()
	for i := range c.shards {
		c.shards[i].check(t)
	}
	if got := c.Stats(); got.Bytes > bytes {
		t.Fatalf("holds %d bytes, allowed %d", got.Bytes, bytes)
	}
}

// key is one of the model's.
type key struct {
	owner   uint32
	variant uint8
	text    string
}

// idsOf returns the ids that a text has for an owner and a variant: the same
// ones whenever asked, and others for others.
func idsOf(k key) []uint32 {
	r := rand.New(rand.NewPCG(uint64(k.owner)<<8|uint64(k.variant), uint64(len(k.text))))
	ids := make([]uint32, 0, len(k.text)/4)
	for i := 0; i < len(k.text); i += 1 + i/8 {
		ids = append(ids, uint32(k.text[i])<<16|r.Uint32N(1<<16))
	}
	// The number of ids grows with the text as it does with a tokenizer.
	for len(ids) < len(k.text)/8 {
		ids = append(ids, ids...)
	}
	return ids
}

// randomText has sizes of every kind: none, a few bytes, a segment and more.
func randomText(r *rand.Rand, most int) string {
	n := 0
	switch r.IntN(10) {
	case 0:
	case 1, 2, 3, 4:
		n = r.IntN(12)
	case 5, 6, 7:
		n = r.IntN(min(most, 2000) + 1)
	case 8:
		n = r.IntN(min(most, 20000) + 1)
	default:
		if r.IntN(20) == 0 {
			n = r.IntN(most + 1)
		}
	}
	// Few letters, so that texts come again.
	b := make([]byte, min(n, 14))
	for i := range b {
		b[i] = 'a' + byte(r.IntN(2))
	}
	return string(b) + strings.Repeat("x", n-len(b))
}

// TestCacheAgainstModel: a random history of a cache and a map that forgets
// nothing. What the cache knows is right, and it holds what it may.
func TestCacheAgainstModel(t *testing.T) {
	for _, size := range []int64{leastCache, 100_000, 1 << 20, 3 << 20, 20 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(size), 1))
			c := NewCache(size)
			model := map[key][]uint32{}
			var keys []key
			var hits int64
			for step := range 8_000 {
				k := key{r.Uint32N(3), uint8(r.IntN(3)), ""}
				switch {
				case len(keys) > 0 && r.IntN(3) > 0:
					// Later ones more often.
					k = keys[len(keys)-1-int(float64(len(keys))*r.Float64()*r.Float64()*r.Float64())]
				default:
					k.text = randomText(r, int(min(size, 400_000)))
				}
				prefix := []uint32{7, 8, 9}[:r.IntN(4)]
				got, ok := c.Append(slices.Clone(prefix), k.owner, k.variant, k.text)
				want := prefix
				if ok {
					hits++
					ids, known := model[k]
					if !known {
						t.Fatalf("step %d: %.40q was never put", step, k.text)
					}
					want = slices.Concat(prefix, ids)
				}
				if !slices.Equal(got, want) {
					t.Fatalf("step %d: %.40q: got %v, want %v", step, k.text, got, want)
				}
				if !ok || r.IntN(10) == 0 {
					ids := idsOf(k)
					model[k] = ids
					keys = append(keys, k)
					c.Put(k.owner, k.variant, k.text, ids)
					if _, ok := c.Append(nil, k.owner, k.variant, k.text); ok {
						hits++
					} else if 24+4*len(ids)+len(k.text) < int(size)/int(4*len(c.shards))-1000 {
						t.Fatalf("step %d: a text of %d bytes is not there right after it was put", step, len(k.text))
					}
				}
				if step%500 == 0 {
					checkCache(t, c, size)
				}
			}
			checkCache(t, c, size)
			if s := c.Stats(); s.Hits != hits || s.Misses == 0 {
				t.Errorf("%+v, but there were %d hits", s, hits)
			} else if size <= 1<<20 && s.Evictions == 0 {
				t.Errorf("%+v: nothing was evicted, the test has shown little", s)
			}
		})
	}
}

// TestCacheCollisions: keys of one hash, or of one half of it, as a hostile
// client that knew the seed would send.
func TestCacheCollisions(t *testing.T) {
	const size = 1 << 20
	c := NewCache(size)
	r := rand.New(rand.NewPCG(5, 6))
	hashes := []uint64{0, 1, 1 << 32, 2 << 32, 0xffffffff, ^uint64(0), 1<<63 | 5}
	type place struct {
		hash uint64
		key
	}
	last := map[uint64]key{}
	for step := range 20_000 {
		p := place{hashes[r.IntN(len(hashes))], key{r.Uint32N(2), uint8(r.IntN(2)), randomText(r, 3000)}}
		if r.IntN(2) == 0 {
			c.putAt(p.hash, p.owner, p.variant, p.text, idsOf(p.key))
			last[p.hash] = p.key
		}
		got, ok := c.appendAt(nil, p.hash, p.owner, p.variant, p.text)
		if ok && !slices.Equal(got, idsOf(p.key)) {
			t.Fatalf("step %d: a wrong answer for %.40q", step, p.text)
		}
		if known := last[p.hash] == p.key; ok && !known || known && !ok && p.text != "" {
			t.Fatalf("step %d: found %v, but put last was %v", step, ok, known)
		}
		if step%1000 == 0 {
			checkCache(t, c, size)
		}
	}
	if n := c.Stats().Entries; n != int64(len(hashes)) {
		t.Errorf("%d entries of %d hashes", n, len(hashes))
	}
}

// TestCacheManyOfOnePlace: thousands of entries whose search begins at the
// same slot stay findable while others come and go.
func TestCacheManyOfOnePlace(t *testing.T) {
	const size = 1 << 20
	c := NewCache(size)
	r := rand.New(rand.NewPCG(8, 9))
	for step := range 5000 {
		hash := uint64(r.IntN(2000))<<32 | uint64(r.IntN(3))
		k := key{0, 0, fmt.Sprint(hash)}
		c.putAt(hash, 0, 0, k.text, idsOf(k))
		if got, ok := c.appendAt(nil, hash, 0, 0, k.text); !ok || !slices.Equal(got, idsOf(k)) {
			t.Fatalf("step %d: got %v, %v", step, got, ok)
		}
	}
	checkCache(t, c, size)
}

// TestCacheKeepsWhatIsUsed: a flood of texts that come once does not push out
// those that are asked for in between.
func TestCacheKeepsWhatIsUsed(t *testing.T) {
	const size = 1 << 20
	c := NewCache(size)
	used := make([]key, 50)
	for i := range used {
		used[i] = key{1, 0, fmt.Sprint("used ", i, strings.Repeat(" often", 200))}
		c.Put(1, 0, used[i].text, idsOf(used[i]))
	}
	large := key{1, 0, strings.Repeat("a system prompt ", 4000)}
	c.Put(1, 0, large.text, idsOf(large))
	for i := range 5_000 {
		n := 100 + i%3*300
		if i%50 == 0 {
			n = 6000
		}
		once := key{1, 0, fmt.Sprint(i, strings.Repeat(" once", n))}
		c.Put(1, 0, once.text, idsOf(once))
		// Each is asked for long before as much as the cache holds has come.
		if i%2 == 0 {
			k := used[i/2%len(used)]
			if _, ok := c.Append(nil, 1, 0, k.text); !ok {
				t.Fatalf("text %d: %.10q is gone", i, k.text)
			}
		}
		if _, ok := c.Append(nil, 1, 0, large.text); i%4 == 0 && !ok {
			t.Fatalf("text %d: the large one is gone", i)
		}
	}
	checkCache(t, c, size)
	if c.Stats().Evictions < 2_500 {
		t.Errorf("%+v: the flood was no flood", c.Stats())
	}
}

// TestCacheOfNothing: too small, nil, and what does not fit.
func TestCacheOfNothing(t *testing.T) {
	for _, c := range []*Cache{nil, NewCache(0), NewCache(-1), NewCache(leastCache - 1)} {
		c.Put(1, 2, "text", []uint32{3})
		if got, ok := c.Append([]uint32{4}, 1, 2, "text"); ok || !slices.Equal(got, []uint32{4}) {
			t.Errorf("got %v, %v", got, ok)
		}
		if s := c.Stats(); s.Bytes != 0 {
			t.Errorf("%+v", s)
		}
	}
	c := NewCache(leastCache)
	c.Put(1, 2, strings.Repeat("x", leastCache), nil)
	c.Put(1, 2, "few", make([]uint32, leastCache))
	if s := c.Stats(); s.Entries != 0 {
		t.Errorf("%+v: holds what is larger than itself", s)
	}
	c.Put(1, 2, "", nil)
	if got, ok := c.Append(nil, 1, 2, ""); !ok || len(got) != 0 {
		t.Errorf("no ids of no text: got %v, %v", got, ok)
	}
}

// TestCacheIsFewObjects: the garbage collector has as little to do with a cache
// of many texts as with one of few.
func TestCacheIsFewObjects(t *testing.T) {
	const texts = 50_000
	objects := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapObjects
	}
	before := objects()
	c := NewCache(32 << 20)
	for i := range texts {
		c.Put(1, 0, fmt.Sprint("a text of its own, number ", i), []uint32{1, 2, 3, 4, 5, 6, 7, uint32(i)})
	}
	n := int64(objects() - before)
	if s := c.Stats(); s.Entries != texts || s.Bytes > 10<<20 {
		t.Errorf("%+v", s)
	}
	if n > texts/20 {
		t.Errorf("%d objects for %d texts", n, texts)
	}
}

// TestCacheOfManyGoroutines: they ask for and put the same texts at the same
// time, in a cache that is too small for them.
func TestCacheOfManyGoroutines(t *testing.T) {
	const size = 9 << 20
	c := NewCache(size)
	if len(c.shards) < 2 {
		t.Fatal("one shard only")
	}
	var done sync.WaitGroup
	for g := range 8 {
		done.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 3))
			var buf []uint32
			for range 1000 {
				n := r.IntN(2000)
				k := key{r.Uint32N(2), uint8(r.IntN(2)), strings.Repeat(fmt.Sprint("text ", n, " "), 1+n*n/3000)}
				var ok bool
				if buf, ok = c.Append(buf[:0], k.owner, k.variant, k.text); !ok {
					c.Put(k.owner, k.variant, k.text, idsOf(k))
				} else if !slices.Equal(buf, idsOf(k)) {
					t.Errorf("wrong ids of %.40q", k.text)
					return
				}
				_ = c.Stats()
			}
		})
	}
	done.Wait()
	checkCache(t, c, size)
	if s := c.Stats(); s.Hits == 0 || s.Evictions == 0 {
		t.Errorf("%+v", s)
	}
}

func TestCacheHitAllocatesNothing(t *testing.T) {
	withoutRace(t)
	c := NewCache(1 << 20)
	text := strings.Repeat("a text ", 300)
	c.Put(1, 1, text, make([]uint32, 600))
	dst := make([]uint32, 0, 600)
	part := &chunks{c, 1}
	if n := testing.AllocsPerRun(100, func() {
		if _, ok := part.append(dst, text, 1); !ok {
			t.Fatal("not there")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkCacheHit asks for one of 1,000 texts of 2 KB with 500 ids each, from
// all processors.
func BenchmarkCacheHit(b *testing.B) {
	for _, size := range []int{64, 2 << 10, 32 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c := NewCache(256 << 20)
			texts := make([]string, 1000)
			for i := range texts {
				texts[i] = fmt.Sprintf("%-*d", size, i)
				c.Put(1, 0, texts[i], make([]uint32, size/4))
			}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				dst := make([]uint32, 0, size/4)
				for i := rand.IntN(len(texts)); pb.Next(); i = (i + 1) % len(texts) {
					if _, ok := c.Append(dst, 1, 0, texts[i]); !ok {
						b.Fatal("not there")
					}
				}
			})
		})
	}
}

// BenchmarkCachePut puts texts of 2 KB into a full cache.
func BenchmarkCachePut(b *testing.B) {
	c := NewCache(16 << 20)
	ids := make([]uint32, 500)
	b.ReportAllocs()
	for i := range b.N {
		c.Put(1, 0, fmt.Sprintf("%-2000d", i), ids)
	}
}
