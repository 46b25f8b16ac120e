package virtual

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// pieceScene is one replica of the reference fleet, of which a new agent knows the speed and
// which computes one prompt after another, with pieces of half a second.
func pieceScene(requests ...workload.Request) *scene {
	return &scene{
		workload: &workload.Workload{Name: "pieces", Requests: requests}, policy: policy.NewCostModel(),
		fleet: Fleet{Engines: []simulator.Config{reference()}, Events: true, Pieces: 500 * time.Millisecond},
	}
}

// asking is a request at so many milliseconds for a token behind a prompt that no other has.
func asking(at, tokens int) workload.Request {
	return workload.Request{At: time.Duration(at) * time.Millisecond, Parts: []workload.Part{{ID: uint64(1 + at), Tokens: tokens}}, Output: 1}
}

// firsts are when first tokens come, in milliseconds.
func firsts(t *testing.T, s *scene) (list []float64) {
	t.Helper()
	for i, r := range s.serve(t).Records {
		if r.Failure != "" {
			t.Errorf("request %d: %s", i, r.Failure)
		}
		list = append(list, math.Round(r.First.Seconds()*1e5)/100)
	}
	return list
}

// Short prompts that come behind a long one wait for all of it when it is computed whole, and
// for what is left of one piece when it is not. The long one has its first token later by what
// the short ones take, and by 5 ms for each piece.
//
// So many tokens u behind so many cached ones m take 60 us · u + 1 ns · u · (m + u/2) + 5 ms.
// The long prompt's 23,000 are 1,649.5 ms. In half a second fit 15 of its blocks of 512, 495.29
// ms, then 13 more, 477.63 ms, and the rest takes 686.58 ms, which is less than one and a half
// pieces. 500 tokens take 35.125 ms.
func TestPiecesSchedule(t *testing.T) {
	f := func(pieces time.Duration, want []float64, requests ...workload.Request) {
		t.Helper()
		s := pieceScene(requests...)
		s.fleet.Pieces = pieces
		if got := firsts(t, s); !slices.Equal(got, want) {
			t.Errorf("pieces of %v: first tokens at %v ms, want %v", pieces, got, want)
		}
	}
	const half = 500 * time.Millisecond
	long := asking(0, 23_000)
	f(0, []float64{1649.5}, long)
	f(half, []float64{1659.5}, long)

	three := []workload.Request{long, asking(100, 500), asking(700, 500), asking(800, 500)}
	f(0, []float64{1649.5, 1684.63, 1719.75, 1754.88}, three...)
	// 495.29 and the first, 530.42 and the second piece, 1,008.05 and the other two, 1,078.30
	// and the rest.
	f(half, []float64{1764.88, 530.42, 1043.17, 1078.3}, three...)

	// One that comes when the last piece has begun waits for that.
	f(half, []float64{1659.5, 1694.63}, long, asking(980, 500))

	// Two long ones do not take turns: the second begins when the rest of the first is asked
	// for. One with less left goes before that: 14,000 tokens are a piece like
	// the first and 452.71 ms.
	f(half, []float64{1659.5, 3319}, long, asking(1, 23_000))
	f(half, []float64{2607.5, 1443.29}, asking(0, 23_000), asking(1, 14_000))

	// One and a half pieces are not worth two requests: 742.57 ms.
	f(half, []float64{742.57, 777.69}, asking(0, 11_240), asking(1, 500))
}

// Whatever short prompts come behind a long one, each waits for one piece and for the short
// ones that came before it, and the long one for no more than all of them and what its pieces
// cost.
func TestPiecesWaits(t *testing.T) {
	for seed := range uint64(20) {
		a := newAuthor("behind a long one")
		a.rand = rand.New(rand.NewPCG(seed, 5))
		long := 20_000 + int(seed)*2000
		a.ask(long, 1)
		ends := policy.DefaultSpeed.Time(policy.Prefill(long, 0))
		short := 0.0
		for a.at < 3*time.Second {
			a.wait(3 + float64(seed%5))
			n := 10 + a.rand.IntN(2000)
			a.ask(n, 1)
			short += policy.DefaultSpeed.Time(policy.Prefill(n, 0))
		}
		s := pieceScene(a.Requests...)
		s.fleet.Lag, s.fleet.EventLag = 500*time.Microsecond, 3*time.Millisecond
		records := s.serve(t).Records
		for i := 1; i < len(records); i++ {
			r := &records[i]
			before := time.Duration(0)
			for k := 1; k < i; k++ {
				if records[k].First > r.Sent {
					before += records[k].Computed
				}
			}
			// What is last of the long one takes one and a half pieces at most.
			if waited := r.First - r.Sent - r.Computed - before; waited > 752*time.Millisecond {
				t.Errorf("%d tokens, and request %d at %v waits for %v more than for the %v before it", long, i, r.Sent, waited, before)
			}
		}
		most := ends + short + float64(long)/5000*(policy.DefaultSpeed.D+0.001)
		if got := records[0].First.Seconds(); got > most {
			t.Errorf("%d tokens have their first token at %.3f s, and %.3f s at most were to be", long, got, most)
		}
	}
}

// A record tells of the whole request: what was cached when its first piece came, however much
// the others found, how long all of them were computed, and what was foretold when it came.
func TestPiecesRecords(t *testing.T) {
	text := workload.Part{ID: 99, Tokens: 4 * 512}
	first, long := asking(0, 100), asking(1000, 23_000-4*512)
	first.Parts = append([]workload.Part{text}, first.Parts...)
	long.Parts = append([]workload.Part{text}, long.Parts...)
	s := pieceScene(first, long, asking(1100, 500))
	o := s.serve(t)
	s.fleet.Pieces = 0
	whole := s.serve(t)
	r, w := &o.Records[1], &whole.Records[1]
	if r.Cached != 4*512 || r.Input != 23_000 || r.Output != 1 || r.Predicted != w.Predicted || r.PredictedCached != w.PredictedCached {
		t.Errorf("in pieces %+v, whole %+v", *r, *w)
	}
	// 1,649.5 ms without the first 2,048 tokens, which take 124.98 ms, with two more pieces.
	if got := (r.Computed - w.Computed).Round(10 * time.Microsecond); got != 10*time.Millisecond {
		t.Errorf("it was computed for %v, and whole for %v", r.Computed, w.Computed)
	}
	if waited := r.First - r.Sent - r.Computed; waited.Round(10*time.Microsecond) != 35_130*time.Microsecond {
		t.Errorf("it waited for %v, want 35.125 ms for the short one", waited)
	}
	if c := &o.Counts[0]; c.Computed != whole.Counts[0].Computed || c.Queried <= whole.Counts[0].Queried {
		t.Errorf("the engine has counted %+v, and %+v of whole ones: nothing is computed twice", *c, whole.Counts[0])
	}
}

// The gaps between tokens are those of answers: a piece, which has one token, has none.
func TestPiecesHaveNoGaps(t *testing.T) {
	long := asking(0, 23_000)
	long.Output = 20
	s := pieceScene(long, asking(100, 500))
	if got := s.serve(t).Gaps.Count(); got != 19 {
		t.Errorf("%d gaps, want 19", got)
	}
}

// Prompts stay whole where the policy does not weigh what has begun, where the engine does not
// tell what it has cached, and where nobody asks for pieces: all is as without.
func TestPiecesOnlyWhereKnown(t *testing.T) {
	var requests []workload.Request
	for i := range 40 {
		requests = append(requests, asking(200*i, 300+i%7*4000))
	}
	f := func(what string, set func(*scene), whole bool) {
		t.Helper()
		s := pieceScene(requests...)
		s.fleet.Engines = append(s.fleet.Engines, reference())
		set(s)
		got := s.serve(t)
		s.fleet.Pieces = 0
		if want := s.serve(t); reflect.DeepEqual(got, want) != whole {
			t.Errorf("%s: all is as without pieces: %v, want %v", what, !whole, whole)
		}
	}
	f("vllm", func(*scene) {}, false)
	f("sglang", func(s *scene) { s.fleet.Engines[0].Engine = "sglang" }, false)
	f("no events", func(s *scene) { s.fleet.Events = false }, true)
	f("tgi", func(s *scene) { s.fleet.Engines[0].Engine, s.fleet.Engines[1].Engine = "tgi", "tgi" }, true)
	f("longer pieces than prompts", func(s *scene) { s.fleet.Pieces = time.Minute }, true)
	for _, name := range policy.Names() {
		if name == "cost_model" {
			continue
		}
		p, err := policy.New(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		f(name, func(s *scene) { s.policy = p }, true)
	}
}

// One that is longer than its engine has room for fails once, after what there is room for was
// computed, and what comes behind it is served as if it had never been there.
func TestPiecesTooLong(t *testing.T) {
	// There is room for 16,384 tokens: the third piece of the first has no room, and of the
	// other the request itself.
	s := pieceScene(asking(0, 30_000), asking(100, 500), asking(5000, 23_000), asking(7000, 12_000))
	s.fleet.Engines[0].NumGPUBlocks, s.fleet.Engines[0].MaxModelLen = 33, 32*512
	o := s.serve(t)
	for i, want := range []string{"longer than an engine has room for", "", "longer than an engine has room for", ""} {
		if r := &o.Records[i]; r.Failure != want || (r.First > 0) != (want == "") {
			t.Errorf("request %d: %+v, want failure %q", i, *r, want)
		}
	}
	// 12,000 tokens in two pieces: 797 ms, and 5 for the second.
	if r := &o.Records[3]; (r.First - r.Sent).Round(time.Millisecond) != 802*time.Millisecond {
		t.Errorf("the last request has its first token after %v", r.First-r.Sent)
	}
}

// A replica where a long prompt has begun is left alone by what is as well served elsewhere,
// and the long one stays there, as long as nobody takes its place.
func TestPiecesAreLeftAlone(t *testing.T) {
	requests := []workload.Request{asking(0, 60_000)}
	for i := range 60 {
		requests = append(requests, asking(10+100*i, 500))
	}
	s := pieceScene(requests...)
	s.fleet.Engines = append(s.fleet.Engines, reference())
	records := s.serve(t).Records
	at, beside := records[0].Replica, 0
	for _, r := range records[1:] {
		if r.Replica == at && r.Sent < records[0].First {
			beside++
		}
	}
	if beside > 0 {
		t.Errorf("%d short ones went where a long one had begun, though another idled", beside)
	}
	// 60,000 tokens take 5.405 s, with 5 ms for each of 15 pieces at most.
	if took := records[0].First; took < 5405*time.Millisecond || took > 5480*time.Millisecond {
		t.Errorf("the long one takes %v", took)
	}
}

// Who is held back goes before the next piece when it is short, and nobody is held for ever:
// with more short prompts than there is time for, the long one goes on by and by.
func TestPiecesAreHeld(t *testing.T) {
	requests := []workload.Request{asking(0, 30_000)}
	for i := range 400 { // 65 ms each, one every 50 ms
		requests = append(requests, asking(1+50*i, 1000))
	}
	s := pieceScene(requests...)
	s.fleet.Hold = 50 * time.Millisecond
	pieces := s.serve(t).Records
	s.fleet.Pieces = 0
	whole := s.serve(t).Records
	mean := func(records []workload.Record) (sum time.Duration) {
		for _, r := range records[1:20] {
			sum += (r.First - r.Sent) / 19
		}
		return sum
	}
	if got, was := mean(pieces), mean(whole); got > was/2 {
		t.Errorf("the first short ones wait for %v, behind a whole one for %v", got, was)
	}
	if got := pieces[0].First; got > 20*time.Second {
		t.Errorf("the long one has its first token at %v", got)
	}
	last := func(records []workload.Record) (last time.Duration) {
		for _, r := range records {
			last = max(last, r.First)
		}
		return last
	}
	if got, was := last(pieces), last(whole); got > was+50*time.Millisecond {
		t.Errorf("the last is served at %v, and at %v behind a whole one", got, was)
	}
}

// A prompt has 64 pieces at most, however small they are, and what is left then is asked for
// at once.
func TestPiecesAreNotMany(t *testing.T) {
	s := pieceScene(asking(0, 100_000))
	s.fleet.Pieces = 20 * time.Millisecond // and 15 times the 5 ms of each prompt
	o := s.serve(t)
	asked, held := 100_000, 0
	for range 64 {
		c := policy.Candidate{Speed: policy.DefaultSpeed, Cached: int32(held)}
		held = policy.Pieces{Length: 0.02}.Cut(&policy.Request{Tokens: 100_000}, &c, 512)
		asked += held
	}
	if got := o.Counts[0].Queried; got != asked || held == 0 || o.Records[0].Failure != "" {
		t.Errorf("the engine was asked for %d tokens in all, want %d, the last piece ending at %d; %+v", got, asked, held, o.Records[0])
	}
}
