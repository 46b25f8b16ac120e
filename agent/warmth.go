package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc64"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// warmth is what is known of the engines' caches from before a restart of the
// agent: what was read from IndexConfig.Snapshot. fleet.mu guards it. Slots take
// what is theirs; the rest is dropped after warmFor.
//
// The file is
//
//	warmMagic, of which the last byte is the version
//	length and bytes of a warmHead, as JSON
//	of each slot: length and bytes of a warmSlot, as JSON, and of what
//	              index.AppendSnapshot has written
//	CRC-64 of all that, big-endian
//
// Lengths are varints. It is removed once it was read: when the agent dies
// without writing another, what engines have taken in meanwhile is not in it.
type warmth struct {
	slots []warmSlot
	until time.Time
}

const (
	warmMagic = "inferrail caches \x01"
	// warmFor is how long after the start an engine may join and take what is
	// known of it.
	warmFor = 5 * time.Minute
	// saveTime bounds the writing of the file. What is left then is not saved.
	saveTime = 10 * time.Second
	// lookAroundTime bounds the last look at engines' pages before that.
	lookAroundTime = 2 * time.Second
	looksAtOnce    = 32
)

var warmTable = crc64.MakeTable(crc64.ECMA)

// warmHead is what is saved once.
type warmHead struct {
	// Names are those that base models have in the index.
	Names map[string]string `json:"names"`
}

// warmSlot is what is saved of one slot, besides what it holds: whose it is,
// and by what its engine is known again.
type warmSlot struct {
	Replica string             `json:"replica"`
	URL     string             `json:"url"`
	Rank    int                `json:"rank"`
	Model   string             `json:"model"`
	Block   int                `json:"block_size"`
	Started float64            `json:"started"`
	Counts  map[string]float64 `json:"counts"`

	// Events is how far the engine's events were followed, as kvevent.AppendCursor
	// writes it.
	Events []byte `json:"events,omitempty"`

	member *member // when it is saved
	held   []byte  // what index.AppendSnapshot has written
}

// familyNames are the names that counts are saved by.
var familyNames = func() (names [counters]string) {
	for name, f := range families {
		if f >= firstCounter && (names[f-firstCounter] == "" || len(name) < len(names[f-firstCounter])) {
			names[f-firstCounter] = name
		}
	}
	return names
}()

// countsOf are those that say whether a rank, or the whole of an engine when rank
// is -1, has restarted.
func (l *life) countsOf(rank int) (c counts) {
	c.update(&l.counts)
	if i := max(rank, 0); i < len(l.ranks) {
		c.update(&l.ranks[i].counts)
	}
	return c
}

// savedLocked are the slots that can be saved: of engines that tell nothing of
// their process, which may be another one next time, nothing is.
func (f *fleet) savedLocked() (list []warmSlot) {
	for _, m := range f.members {
		life := &m.server.life
		if !m.cache.joined || !life.tells() {
			continue
		}
		w := warmSlot{Replica: m.id, URL: m.url, Rank: m.rank, Model: m.cache.slot.Model, Block: m.cache.slot.BlockSize,
			Started: life.started, Counts: map[string]float64{}, member: m}
		counts := life.countsOf(m.rank)
		for i, known := range counts.known {
			if known {
				w.Counts[familyNames[i]] = counts.value[i]
			}
		}
		list = append(list, w)
	}
	return list
}

// lookAround looks at the pages of all engines, so that what they count is known
// as it is after the last request.
func (f *fleet) lookAround() {
	ctx, cancel := context.WithTimeout(f.stopped, lookAroundTime)
	defer cancel()
	f.mu.Lock()
	servers := slices.Clone(f.servers)
	f.mu.Unlock()
	var looks sync.WaitGroup
	turns := make(chan struct{}, looksAtOnce)
	for _, s := range servers {
		turns <- struct{}{}
		looks.Go(func() {
			defer func() { <-turns }()
			if ctx.Err() == nil {
				f.look(ctx, s, nil)
			}
		})
	}
	looks.Wait()
}

// save writes what is known of the members' engines to a file. No request is
// running any more.
func (f *fleet) save(file string) error {
	began := time.Now()
	f.lookAround()
	f.mu.Lock()
	slots, names := f.savedLocked(), f.cacheNames
	f.mu.Unlock()
	temporary, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(temporary.Name()) // unless it has the other name by then
	defer temporary.Close()
	sum := crc64.New(warmTable)
	w := bufio.NewWriterSize(io.MultiWriter(temporary, sum), 1<<16)
	var length []byte
	piece := func(data []byte) {
		length = binary.AppendUvarint(length[:0], uint64(len(data)))
		w.Write(length)
		w.Write(data)
	}
	w.WriteString(warmMagic)
	head, err := json.Marshal(warmHead{names})
	if err != nil {
		return err
	}
	piece(head)
	var held []byte
	saved := 0
	for _, slot := range slots {
		if time.Since(began) > saveTime {
			break
		}
		m := slot.member
		if c := m.subscriber.save(func() { held = f.index.AppendSnapshot(held[:0], m.replica.Slot) }); c != nil {
			slot.Events = kvevent.AppendCursor(nil, *c)
		}
		text, err := json.Marshal(slot)
		if err != nil {
			return err
		}
		if len(held) > 0 {
			piece(text)
			piece(held)
			saved++
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if _, err := temporary.Write(binary.BigEndian.AppendUint64(nil, sum.Sum64())); err != nil {
		return err
	}
	// What a crash of the machine leaves must be the whole or nothing.
	if err := errors.Join(temporary.Sync(), temporary.Close()); err != nil {
		return err
	}
	if err := os.Rename(temporary.Name(), file); err != nil {
		return err
	}
	f.log.Info("what engines hold is saved", "file", file, "replicas", saved, "of", len(slots), "took", time.Since(began).Round(time.Millisecond))
	return nil
}

// load reads the file that save has written, if there is one, and removes it. A
// file that cannot be used is ignored. largest bounds what is read of it.
func (f *fleet) load(file string, largest int64, now time.Time) {
	head, slots, err := readWarmth(file, largest)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		f.log.Warn("index.snapshot is ignored: what engines hold has to be learned anew", "file", file, "why", err)
		return
	}
	if err := os.Remove(file); err != nil {
		f.log.Warn("index.snapshot cannot be removed; should the agent die it may be read again, and be out of date then", "file", file, "why", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.warm = &warmth{slots: slots, until: now.Add(warmFor)}
	f.cacheNames = head.Names
}

func readWarmth(file string, largest int64) (head warmHead, slots []warmSlot, err error) {
	if irregular(file) {
		return head, nil, errIrregular
	}
	in, err := os.Open(file)
	if err != nil {
		return head, nil, err
	}
	defer in.Close()
	data, err := io.ReadAll(io.LimitReader(in, largest+1))
	if err != nil {
		return head, nil, err
	}
	if int64(len(data)) > largest {
		return head, nil, fmt.Errorf("it is larger than %v", Bytes(largest))
	}
	return parseWarmth(data)
}

// parseWarmth takes the contents of the file apart; the slots point into it.
func parseWarmth(data []byte) (head warmHead, slots []warmSlot, err error) {
	const sum = 8
	if len(data) < len(warmMagic)+sum || string(data[:len(warmMagic)-1]) != warmMagic[:len(warmMagic)-1] {
		return head, nil, errors.New("it is no snapshot, or cut short")
	}
	if data[len(warmMagic)-1] != warmMagic[len(warmMagic)-1] {
		return head, nil, errors.New("it is of another version of the agent")
	}
	body := data[:len(data)-sum]
	if crc64.Checksum(body, warmTable) != binary.BigEndian.Uint64(data[len(body):]) {
		return head, nil, errors.New("it is damaged or cut short: the checksum is wrong")
	}
	rest := body[len(warmMagic):]
	piece := func() []byte {
		n, size := binary.Uvarint(rest)
		if size <= 0 || n > uint64(len(rest)-size) {
			err = errors.New("it is damaged: a length in it is wrong")
			rest = nil
			return nil
		}
		p := rest[size : size+int(n)]
		rest = rest[size+int(n):]
		return p
	}
	if text := piece(); err == nil {
		err = json.Unmarshal(text, &head)
	}
	for len(rest) > 0 && err == nil {
		var slot warmSlot
		text := piece()
		if slot.held = piece(); err == nil {
			err = json.Unmarshal(text, &slot)
		}
		slots = append(slots, slot)
	}
	if err != nil {
		return warmHead{}, nil, err
	}
	return head, slots, nil
}

// restoreLocked gives a slot that has just joined the index what was known of it
// before the agent was started, if its engine has not restarted meanwhile.
func (f *fleet) restoreLocked(m *member) {
	if f.warm == nil {
		return
	}
	if time.Now().After(f.warm.until) {
		f.warm = nil
		return
	}
	same := func(w warmSlot) bool { return w.Replica == m.id && w.URL == m.url && w.Rank == m.rank }
	i := slices.IndexFunc(f.warm.slots, same)
	if i < 0 || !m.server.life.tells() {
		return // what its engine tells may still come
	}
	w := f.warm.slots[i]
	if f.warm.slots = slices.Delete(f.warm.slots, i, i+1); len(f.warm.slots) == 0 {
		f.warm = nil
	}
	err := w.holds(&m.server.life, m.cache.slot.Capacity)
	if err == nil {
		m.subscriber.anew(func() *kvevent.Cursor {
			if err = f.index.Restore(m.replica.Slot, w.held); err != nil {
				return nil
			}
			c, err := kvevent.ParseCursor(w.Events)
			if err != nil {
				return nil // its events are told anew
			}
			return &c
		})
	}
	if err != nil {
		f.log.Info("what the engine holds has to be learned anew", "replica", m.id, "why", err)
		return
	}
	f.log.Info("what the engine holds is known from before", "replica", m.id)
}

// holds tells why what was saved is not what the engine holds now; nil when it
// may be.
func (w *warmSlot) holds(l *life, capacity int) error {
	if l.shared {
		return errors.New("several processes answer at its URL")
	}
	if w.Started != l.started {
		return errors.New("it is another process")
	}
	now := l.countsOf(w.Rank)
	counted := false
	for i, name := range familyNames {
		before, ok := w.Counts[name]
		if !ok {
			continue
		}
		switch {
		case !now.known[i]:
			return fmt.Errorf("it does not tell %s any more", name)
		case now.value[i] < before:
			return errors.New("it counts less than before: it has restarted")
		}
		counted = counted || before > 0
		if f := firstCounter + family(i); f == vllmPrompt || f == sglangPrompt || f == llamaPrompt {
			if now.value[i]-before > float64(capacity)*float64(w.Block) {
				return errors.New("it has read more than its cache holds since")
			}
		}
	}
	if w.Started == 0 && !counted {
		return errors.New("it tells nothing that would show a restart")
	}
	return nil
}
