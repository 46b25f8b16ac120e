package agent

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

const (
	// maxPromptReport bounds the body of a request to /debug/prompt or /explain, and
	// promptReports how many are answered at one time: the answer takes some twenty
	// times the memory.
	maxPromptReport = 8 << 20
	promptReports   = 2
	// promptReportTime bounds how long such a body may take to arrive.
	promptReportTime = 30 * time.Second
)

const promptReportUsage = "POST the body of a request to /debug/prompt?path=/v1/chat/completions"

// promptReport is what /debug/prompt tells of a request's prompt.
type promptReport struct {
	Model string `json:"model"`
	Path  string `json:"path"`
	Exact bool   `json:"exact"`
	// Reason is that of the metric inferrail_prompts_total, Why a sentence.
	Reason string `json:"reason"`
	Why    string `json:"why,omitempty"`
	// PromptTokens is nil when it is not known.
	PromptTokens *int `json:"prompt_tokens"`
	// BlockSize is in tokens when the prompt is exact, else in bytes of Text.
	BlockSize int `json:"block_size"`
	// Rendered is what the chat template makes of the messages; nil without one,
	// and RenderedWhy is why.
	Rendered    *string          `json:"rendered"`
	RenderedWhy string           `json:"rendered_why,omitempty"`
	Sequences   []promptSequence `json:"sequences"`
	// Replicas are those that serve the model, the ones that hold the most of the
	// prompt first.
	Replicas []promptHolder `json:"replicas"`
	TookMS   float64        `json:"took_ms"`
}

// promptSequence is one of the sequences that the engine computes: a chat is
// one, a completion's prompts are one each.
type promptSequence struct {
	IDs []uint32 `json:"ids,omitempty"`
	// Text stands for the ids when they are not known.
	Text   string   `json:"text,omitempty"`
	Hashes []string `json:"hashes"`
}

// promptHolder is how much of a prompt a replica's engine has in its cache now.
type promptHolder struct {
	Replica string `json:"replica"`
	// Cache is how well that is known, as in /debug/index.
	Cache string `json:"cache"`
	// CachedTokens are those that it need not compute.
	CachedTokens int `json:"cached_tokens"`
	// Blocks are those of it that each tier has, without what a faster one has too.
	Blocks map[string]int `json:"blocks,omitempty"`
}

// prompt follows the prompt of the request whose body is posted, as the proxy
// would, and shows what comes of it. Nothing is sent to an engine.
func (ad *admin) prompt(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Query().Get("path")
	kind, ok := proxy.PromptKind(path)
	if r.Method == http.MethodPost && !ok {
		http.Error(w, fmt.Sprintf("%q is no path of requests that generate; %s, or another such path", path, promptReportUsage), http.StatusBadRequest)
		return
	}
	body, done, ok := ad.posted(w, r, promptReportUsage)
	if !ok {
		return
	}
	defer done()
	model, err := modelOf(ad.agent.fleet.current(), body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false) // the text is full of <|markup|>
	report := ad.agent.fleet.promptReport(model, path, kind, body)
	if err := enc.Encode(report); err != nil {
		ad.agent.log.Warn("cannot write an admin page", "error", err)
	}
}

// posted reads the body of a request to a page that looks at one. If ok is not set
// it has answered; else the request has one of the places for such until done.
func (ad *admin) posted(w http.ResponseWriter, r *http.Request, usage string) (body []byte, done func(), ok bool) {
	began := time.Now()
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, usage, http.StatusMethodNotAllowed)
		return nil, nil, false
	}
	select {
	case ad.prompts <- struct{}{}:
	default:
		w.Header().Set("Retry-After", "1")
		http.Error(w, fmt.Sprintf("%d prompts are being looked at; try again", promptReports), http.StatusServiceUnavailable)
		return nil, nil, false
	}
	// A connection that cannot have a deadline keeps its place until it ends.
	_ = http.NewResponseController(w).SetReadDeadline(began.Add(promptReportTime))
	done = func() { <-ad.prompts }
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxPromptReport))
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		http.Error(w, fmt.Sprintf("the body is larger than %v", Bytes(maxPromptReport)), http.StatusRequestEntityTooLarge)
	case err != nil:
		http.Error(w, "the body has not arrived: "+err.Error(), http.StatusBadRequest)
	default:
		return body, done, true
	}
	done()
	return nil, nil, false
}

// modelOf returns the model that a request's body names, by whatever name.
func modelOf(s *proxy.Fleet, body []byte) (*proxy.Model, error) {
	var request struct {
		Model *string `json:"model"`
	}
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, fmt.Errorf("the body is no JSON object with a model: %v; %s", err, promptReportUsage)
	}
	served := served(s)
	switch {
	case request.Model == nil && len(s.Listed) == 1:
		return s.Listed[0], nil
	case request.Model == nil:
		return nil, fmt.Errorf("the body names no model; %s", served)
	case s.Models[*request.Model] == nil:
		return nil, fmt.Errorf("the model %.200q is not served; %s", *request.Model, served)
	}
	return s.Models[*request.Model], nil
}

// promptReport follows one prompt.
func (f *fleet) promptReport(model *proxy.Model, path string, kind prompt.Kind, body []byte) promptReport {
	began := time.Now()
	var found prompt.Prompt
	model.Prompts.Follow(&found, kind, body, began)
	took := time.Since(began)
	out := promptReport{
		Model: model.Name, Path: path, Exact: found.Reason == prompt.Exact, Reason: found.Reason.String(),
		BlockSize: model.BlockSize, Sequences: []promptSequence{},
		TookMS: float64(took.Microseconds()) / 1000,
	}
	text, why := model.Prompts.Rendered(kind, body, began)
	runtime.KeepAlive(model.Prompts) // see closeLater
	if out.RenderedWhy = why; why == "" {
		out.Rendered = &text
	}
	root := index.Root(model.CacheName, model.Adapter, found.Salt)
	if out.Exact {
		n := found.Tokens()
		out.PromptTokens = &n
		from := 0
		for _, end := range found.Ends {
			ids := found.IDs[from:end]
			out.Sequences = append(out.Sequences, promptSequence{IDs: ids, Hashes: hexOf(index.AppendTokens(nil, root, ids, model.BlockSize))})
			from = end
		}
	} else {
		out.Why = f.prompts.whyApproximate(model, found.Reason)
		if found.Reason == prompt.RenderFailed && why != "" {
			out.Why = why
		}
		out.BlockSize = index.TextBlock
		from := 0
		for _, end := range found.TextEnds {
			text := found.Text[from:end]
			out.Sequences = append(out.Sequences, promptSequence{Text: string(text), Hashes: hexOf(index.AppendText(nil, root, text))})
			from = end
		}
	}
	out.Replicas = f.holders(model, &found)
	return out
}

// holders tells what the replicas of a model hold of a prompt.
func (f *fleet) holders(model *proxy.Model, p *prompt.Prompt) []promptHolder {
	states := map[int]index.State{}
	for _, st := range f.index.Stats(nil) {
		states[st.Slot] = st.State
	}
	list := []promptHolder{}
	for _, held := range proxy.HeldOf(f.index, model, p) {
		state, ok := states[held.Replica.Slot]
		if !ok {
			continue // nothing of its cache is of use, or it has left
		}
		h := promptHolder{Replica: held.Replica.ID, Cache: indexStates[state], CachedTokens: held.Tokens, Blocks: map[string]int{}}
		for tier, n := range held.Blocks {
			if n > 0 {
				h.Blocks[tierNames[tier]] = n
			}
		}
		list = append(list, h)
	}
	slices.SortStableFunc(list, func(a, b promptHolder) int { return cmp.Compare(b.CachedTokens, a.CachedTokens) })
	return list
}

func hexOf(hashes []index.Hash) []string {
	out := make([]string, len(hashes))
	for i, h := range hashes {
		out[i] = fmt.Sprintf("%016x%016x", h.Hi, h.Lo)
	}
	return out
}

// whyApproximate tells people in a sentence why a prompt of the model is only
// approximate. What ails the model itself is as /debug/fleet has it.
func (p *prompts) whyApproximate(model *proxy.Model, reason prompt.Reason) string {
	if s := p.status(model); s.State != "exact" {
		switch reason {
		case prompt.NoTokenizer, prompt.BadTokenizer, prompt.NoTemplate, prompt.BadTemplate, prompt.EngineRenders, prompt.Demoted:
			if s.Why != "" {
				return s.Why
			}
			return s.How
		}
	}
	return reasonSentences[reason]
}

// reasonSentences tell people what a prompt.Reason means for one request.
var reasonSentences = [prompt.Reasons]string{
	prompt.NoTokenizer:     "the model has no tokenizer",
	prompt.BadTokenizer:    "the model's tokenizer cannot be followed",
	prompt.NoTemplate:      "the model has no chat template for such a request",
	prompt.BadTemplate:     "the model's chat template cannot be followed",
	prompt.EngineRenders:   "the engine renders this model's chats by code of its own",
	prompt.Demoted:         "an engine has other tokens than were expected",
	prompt.Route:           "prompts of this path are not followed, only those of /v1/chat/completions and /v1/completions",
	prompt.Media:           "the prompt holds images, audio or video",
	prompt.Embeds:          "the prompt is given as embeddings",
	prompt.Truncated:       "the request asks the engine to cut the prompt",
	prompt.RequestTemplate: "the request brings a chat template of its own",
	prompt.Malformed:       "the engine will refuse the request, or it is not known what it makes of it",
	prompt.Unfollowed:      "the request uses something that is not followed",
	prompt.RenderFailed:    "the chat template does not take the messages; nor will the engine",
	prompt.TooLarge:        "the prompt is too large to be followed",
	prompt.QueueFull:       "too many large prompts were waiting",
	prompt.Late:            "following the prompt took longer than tokenizer.max_wait",
	prompt.Failed:          "following the prompt has failed, which is a defect: the log has it",
}
