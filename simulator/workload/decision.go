package workload

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
	Prompt       *decisionPrompt `json:"prompt"`
	Outcome      struct {
		PromptTokens int `json:"prompt_tokens"`
		OutputTokens int `json:"output_tokens"`
	} `json:"outcome"`
}

// decisionPrompt mirrors proxy.PromptHashes.
type decisionPrompt struct {
	Arrived time.Time `json:"arrived"`
	Session string    `json:"session"`
	Every   int       `json:"every"`
	Hashes  []string  `json:"hashes"`
}

var errNoHashes = errors.New("the decision has no hashes of its prompt; the agent writes them with decisions.prompts: hashes")

// readDecisions reads an agent's decision log: the requests for one model, which is
// that of the options, or the only one that there is. What a prompt has behind the
// last of its hashes is taken to be shared with none. Requests without a prompt are
// left out.
func (o ReadOptions) readDecisions(r *bufio.Reader) (*Workload, error) {
	w := &Workload{}
	var times []time.Time
	sessions := map[string]int{"": 0}
	models := map[string]int{}
	err := lines(r, func(line []byte) error {
		var d decisionLine
		if err := json.Unmarshal(line, &d); err != nil {
			return err
		}
		if d.Prompt == nil {
			return errNoHashes
		}
		models[d.Model]++
		if o.Model != "" && o.Model != d.Model {
			return nil
		}
		q, err := d.request(uint64(len(w.Requests)))
		if err != nil || len(q.Parts) == 0 {
			return err
		}
		w.Block = max(w.Block, d.Prompt.Every)
		if _, ok := sessions[d.Prompt.Session]; !ok {
			sessions[d.Prompt.Session] = len(sessions)
		}
		q.Session = sessions[d.Prompt.Session]
		w.Requests, times = append(w.Requests, q), append(times, d.Prompt.Arrived)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if o.Model == "" && len(models) > 1 || o.Model != "" && models[o.Model] == 0 {
		var list []string
		for _, m := range slices.Sorted(maps.Keys(models)) {
			list = append(list, fmt.Sprintf("%q (%d requests)", m, models[m]))
		}
		return nil, fmt.Errorf("a workload is of one model; say which of these: %s", strings.Join(list, ", "))
	}
	return w, w.schedule(times)
}

// restParts is from where on the numbers of parts are of which nothing is known to be
// shared.
const restParts = 1 << 62

func (d *decisionLine) request(index uint64) (Request, error) {
	p := d.Prompt
	tokens := d.PromptTokens
	if d.Outcome.PromptTokens > 0 {
		tokens = d.Outcome.PromptTokens // which the engine has counted
	}
	switch {
	case tokens < 0 || tokens > mostTokens:
		return Request{}, fmt.Errorf("the prompt has %d tokens, and may have up to %d", tokens, mostTokens)
	case d.Outcome.OutputTokens < 0 || d.Outcome.OutputTokens > mostTokens:
		return Request{}, fmt.Errorf("the answer has %d tokens, and may have up to %d", d.Outcome.OutputTokens, mostTokens)
	case len(p.Hashes) > 0 && (p.Every < 1 || p.Every > mostTokens):
		return Request{}, fmt.Errorf("prompt.every is %d, and says how many tokens each hash stands for", p.Every)
	}
	q := Request{Output: max(d.Outcome.OutputTokens, 1)}
	for _, text := range p.Hashes {
		h, err := strconv.ParseUint(text, 16, 64)
		if err != nil {
			return Request{}, fmt.Errorf("the hash %q is no number of 16 hexadecimal digits", text)
		}
		if tokens < p.Every {
			break
		}
		tokens -= p.Every
		q.Parts = append(q.Parts, Part{ID: h % restParts, Tokens: p.Every})
	}
	if tokens > 0 {
		q.Parts = append(q.Parts, Part{ID: restParts + index, Tokens: tokens})
	}
	return q, nil
}
