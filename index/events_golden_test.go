package index

import (
	"encoding/hex"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// TestEventsAgainstVLLM: vLLM's own cache finds of each prompt as many tokens as
// are predicted from the events that it has sent until then.
func TestEventsAgainstVLLM(t *testing.T) {
	text, err := os.ReadFile("testdata/told.txt")
	if err != nil {
		t.Fatal(err)
	}
	var x *Index
	var d kvevent.Decoder
	var l Lookup
	var told Told
	block, prompts, found := 0, 0, 0
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		switch words[0] {
		case "pool":
			block, _ = strconv.Atoi(words[1])
			x = New(Config{})
			x.Join(0, SlotConfig{Model: "m", BlockSize: block, Capacity: 1000})
			x.SetState(0, Exact, "")
		case "batch":
			payload, err := hex.DecodeString(words[1])
			if err != nil {
				t.Fatal(err)
			}
			var b kvevent.Batch
			if err := d.Batch(&b, payload); err != nil {
				t.Fatal(err)
			}
			told = x.Apply(0, b.Events, time.Time{})
			if told.Orphans+told.OtherGroups+told.Malformed+told.Unknown+told.NoMemory > 0 || told.BlockSize > block {
				t.Fatalf("%+v", told)
			}
		case "prompt":
			cached, _ := strconv.Atoi(words[1])
			ids, err := hex.DecodeString(words[4])
			if err != nil {
				t.Fatal(err)
			}
			p := Prompt{Block: block}
			for _, id := range ids {
				p.IDs = append(p.IDs, uint32(id))
			}
			lora, salt := strings.Trim(words[2], "-"), strings.Trim(words[3], "-")
			p.Chain = AppendTokens(nil, Root("m", lora, []byte(salt)), p.IDs, block)
			x.Look(&l, &p)
			// An adapter that was loaded from two places has one name for both, and
			// is told of by that: what is held of one is taken to be held of both.
			if got := p.Cached(l.Held(0)); got != cached && (lora != "sql" || got < cached) {
				t.Fatalf("prompt %d, of %d tokens with %q and %q: predicted %d, cached %d", prompts, len(ids), lora, salt, got, cached)
			}
			prompts++
			if cached > 0 {
				found++
			}
		}
	}
	if prompts < 200 || found < 100 || told.Removed == 0 {
		t.Errorf("only %d prompts, %d of them cached", prompts, found)
	}
}
