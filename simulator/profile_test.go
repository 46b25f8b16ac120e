package simulator

import (
	"math"
	"strings"
	"testing"
	"time"
)

// closedLoop lets so many clients ask one after the other, each as soon as it has the
// answer before, and returns the means of the times to first token and per token, and
// the tokens that were generated in a second.
func closedLoop(t *testing.T, p Profile, clients, prompt, output, requests int) (ttft, tpot time.Duration, rate float64) {
	t.Helper()
	cfg := Config{NoEnablePrefixCaching: true}
	p.apply(&cfg)
	e, err := cfg.NewEngine()
	if err != nil {
		t.Fatal(err)
	}
	now, done := time.Duration(0), 0
	arrived := map[*Sequence]time.Duration{}
	ask := func() {
		s := &Sequence{Prompt: make([]uint32, prompt), Said: make([]uint32, output), Output: output}
		arrived[s] = now
		e.Arrive(s, now)
	}
	for range clients {
		ask()
	}
	for done < requests {
		next, ok := e.Next()
		if !ok {
			t.Fatalf("%s: nothing happens any more", p.Name)
		}
		now = next
		e.Advance(now)
		for _, s := range e.Changed(nil) {
			if !s.Ended() {
				continue
			}
			done++
			ttft += s.First - arrived[s]
			tpot += (s.End - s.First) / time.Duration(max(1, output-1))
			ask()
		}
	}
	return ttft / time.Duration(done), tpot / time.Duration(done), float64(done*output) / now.Seconds()
}

// TestProfiles compares profiles with what others have measured of vLLM on such GPUs.
func TestProfiles(t *testing.T) {
	near := func(what string, got, want, margin float64) {
		t.Helper()
		t.Logf("%s: %.4g, measured %.4g (%+.0f %%)", what, got, want, 100*(got/want-1))
		if math.Abs(got/want-1) > margin {
			t.Errorf("%s: %.4g is not within %.0f %% of %.4g", what, got, 100*margin, want)
		}
	}
	ms := func(d time.Duration) float64 { return d.Seconds() * 1000 }

	// yobitelcomm.github.io/bench: H100-80GB-HBM3, vLLM 0.21.0, Llama-3.1-8B in 16 bits,
	// short chats: TPOT 6.48 ms for one client and 6.59 ms for four, TTFT 13.98 ms, of
	// which the server's front end has some 5 ms.
	ttft, tpot, _ := closedLoop(t, profile("", h100, llama8B, 1), 1, 128, 128, 20)
	near("H100, 8B, 1 client: TPOT in ms", ms(tpot), 6.48, .1)
	near("H100, 8B, 1 client: TTFT and 5 ms", ms(ttft)+5, 13.98, .25)
	_, tpot, _ = closedLoop(t, profile("", h100, llama8B, 1), 4, 128, 128, 40)
	near("H100, 8B, 4 clients: TPOT in ms", ms(tpot), 6.59, .1)

	// johnmusgrave.com: A100-40GB, vLLM 0.23.0, Llama-3.1-8B in BF16, prompts of 1024 and
	// answers of 128: 75 tokens a second for one client, 6.6 times as many for eight. It
	// has half the memory of the other one, and that is slower.
	small := a100
	small.memory, small.size = 1.555e12, 42.4e9
	_, tpot, one := closedLoop(t, profile("", small, llama8B, 1), 1, 1024, 128, 20)
	near("A100, 8B, 1 client: TPOT in ms", ms(tpot), 1000/75., .1)
	_, _, eight := closedLoop(t, profile("", small, llama8B, 1), 8, 1024, 128, 80)
	near("A100, 8B, 8 clients: gain", eight/one, 6.6, .15)

	for _, name := range Profiles() {
		p, err := ProfileOf(name)
		if err != nil {
			t.Fatal(err)
		}
		long, tpot, _ := closedLoop(t, p, 1, 2048, 2, 3)
		_, crowded, rate := closedLoop(t, p, min(64, p.Sequences, p.Tokens/600), 256, 256, 130)
		t.Logf("%-18s %7d tokens, TTFT of 2048 %6.0f ms, TPOT alone %6.2f ms, of many %6.2f ms, %6.0f tokens/s",
			name, p.Tokens, ms(long), ms(tpot), ms(crowded), rate)
		if p.Tokens < 4096 || crowded < tpot {
			t.Errorf("%s: %+v", name, p)
		}
		if want := p.Latency.Prefill(2048, 0); !p.Apart && (long < want-time.Microsecond || long > want+time.Microsecond) {
			t.Errorf("%s: a lone prompt takes %v, want %v", name, long, want)
		}
	}
}

// TestProfileIsCompleted: what a flag says stands, the rest is the profile's.
func TestProfileIsCompleted(t *testing.T) {
	c := Config{Profile: "reference", NumGPUBlocks: 77, TimePerOutputToken: time.Second}
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	if c.PrefillA != 60 || c.PrefillB != 0.001 || c.BlockSize != 512 || c.NumGPUBlocks != 77 || c.TimePerOutputToken != time.Second || !c.apart {
		t.Errorf("%+v", c)
	}
	c = Config{Profile: "h900"}
	if err := c.complete(); err == nil || !strings.Contains(err.Error(), `profile must be one of reference, h100-llama-8b,`) {
		t.Errorf("%v", err)
	}
}
