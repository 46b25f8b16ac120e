package workload

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// decisionLine mirrors what is needed of proxy.Decision, as the agent writes it with
// decisions.prompts: hashes.
type decisionLine struct {
	Model        string          `json:"model"`
	PromptTokens int             `json:"prompt_tokens"`
	Exact        bool            `json:"exact"`
	Prompt       *decisionPrompt `json:"prompt"`
	Outcome      struct {
		PromptTokens int `json:"prompt_tokens"`
		OutputTokens int `json:"output_tokens"`
	} `json:"outcome"`
}

// decisionPrompt mirrors proxy.PromptHashes.
type decisionPrompt struct {
	Arrived time.Time    `json:"arrived"`
	Session string       `json:"session"`
	Every   int          `json:"every"`
	Hashes  []prefixHash `json:"hashes"`
}

// prefixHash mirrors proxy.PrefixHash.
type prefixHash uint64

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *prefixHash) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 16, 64)
	if err != nil {
		return fmt.Errorf("the hash %q is no number of 16 hexadecimal digits", text)
	}
	*h = prefixHash(n)
	return nil
}

// decisions are what has been read of an agent's decision log, of one file or several.
// The zero value has none.
type decisions struct {
	list   []decisionLine
	models map[string]int // requests of each
	// Of prompts that are not exact.
	estimated, counted int
	bare               int // from before hashes were asked for
}

// readDecisions reads an agent's decision log: the requests for one model, which is
// that of the options, or the only one that there is. What a prompt has behind the
// last of its hashes is taken to be shared with none. Requests without a prompt are
// left out, as are decisions that were written without hashes.
//
// Of prompts that the agent has not followed exactly it has estimated the tokens, and so
// those between hashes. The engines have counted them: by how much they have more or
// fewer altogether, those between all hashes have too. It must be the same for all, for
// what is shared has one length.
func (o ReadOptions) readDecisions(r *bufio.Reader) (*Workload, error) {
	var all decisions
	if err := all.read(r, o.Model); err != nil {
		return nil, err
	}
	return all.workload(o.Model)
}

// read adds those of a file. The last line may be torn: an agent is writing it, or was
// killed.
func (all *decisions) read(r *bufio.Reader, model string) error {
	if all.models == nil {
		all.models = map[string]int{}
	}
	err := lines(r, func(line []byte) error {
		var d decisionLine
		if err := json.Unmarshal(line, &d); err != nil {
			return err
		}
		if d.Prompt == nil {
			all.bare++
			return nil
		}
		if err := d.check(); err != nil {
			return err
		}
		all.models[d.Model]++
		if model != "" && model != d.Model {
			return nil
		}
		all.list = append(all.list, d)
		if !d.Exact && d.PromptTokens > 0 && d.Outcome.PromptTokens > 0 {
			all.estimated, all.counted = all.estimated+d.PromptTokens, all.counted+d.Outcome.PromptTokens
		}
		return nil
	})
	torn, syntax := unfinished{}, (*json.SyntaxError)(nil)
	if errors.As(err, &torn) && errors.As(err, &syntax) {
		return nil
	}
	return err
}

// workload is what they were made for, for one model.
func (all *decisions) workload(model string) (*Workload, error) {
	models, list := all.models, all.list
	if len(models) == 0 && all.bare > 0 {
		return nil, errNoHashes
	}
	if model == "" && len(models) > 1 || model != "" && models[model] == 0 {
		var list []string
		for _, m := range slices.Sorted(maps.Keys(models)) {
			list = append(list, fmt.Sprintf("%q (%d requests)", m, models[m]))
		}
		return nil, fmt.Errorf("a workload is of one model; say with --trace-model which of these: %s", strings.Join(list, ", "))
	}
	ratio := 1.0
	if all.estimated > 0 {
		ratio = float64(all.counted) / float64(all.estimated)
	}
	w := &Workload{}
	var times []time.Time
	sessions := map[string]int{"": 0}
	for i := range list {
		d := &list[i]
		by := 1.0
		if !d.Exact {
			by = ratio
		}
		q := d.request(uint64(len(times)), by)
		if len(q.Parts) == 0 {
			continue
		}
		if q.Parts[0].ID < restParts {
			w.Block = max(w.Block, q.Parts[0].Tokens)
		}
		if _, ok := sessions[d.Prompt.Session]; !ok {
			sessions[d.Prompt.Session] = len(sessions)
		}
		q.Session = sessions[d.Prompt.Session]
		w.Requests, times = append(w.Requests, q), append(times, d.Prompt.Arrived)
	}
	return w, w.schedule(times)
}

var errNoHashes = errors.New("none of the decisions has hashes of its prompt; the agent writes them with decisions.prompts: hashes")

func (d *decisionLine) check() error {
	for _, tokens := range []int{d.PromptTokens, d.Outcome.PromptTokens, d.Outcome.OutputTokens} {
		if tokens < 0 || tokens > mostTokens {
			return fmt.Errorf("a prompt or answer has %d tokens, and may have up to %d", tokens, mostTokens)
		}
	}
	if p := d.Prompt; len(p.Hashes) > 0 && (p.Every < 1 || p.Every > mostTokens) {
		return fmt.Errorf("prompt.every is %d, and says how many tokens each hash stands for", p.Every)
	}
	return nil
}

// restParts is from where on the numbers of parts are of which nothing is known to be
// shared.
const restParts = 1 << 62

// request is the decision's, whose estimates are wrong by a ratio.
func (d *decisionLine) request(index uint64, ratio float64) Request {
	scaled := func(tokens int) int { return min(max(int(math.Round(float64(tokens)*ratio)), 1), mostTokens) }
	tokens := d.Outcome.PromptTokens // which the engine has counted
	if tokens == 0 && d.PromptTokens > 0 {
		tokens = scaled(d.PromptTokens)
	}
	q := Request{Output: max(d.Outcome.OutputTokens, 1)}
	for _, h := range d.Prompt.Hashes {
		every := scaled(d.Prompt.Every)
		if tokens < every {
			break
		}
		tokens -= every
		q.Parts = append(q.Parts, Part{ID: uint64(h) % restParts, Tokens: every})
	}
	if tokens > 0 {
		q.Parts = append(q.Parts, Part{ID: restParts + index, Tokens: tokens})
	}
	return q
}
