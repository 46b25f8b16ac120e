package agent

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

const explainUsage = "POST the body of a request to /explain?path=/v1/chat/completions"

// Explanation is what POST /explain answers: where a request would go now, and why.
type Explanation struct {
	proxy.Decision
	// WhyApproximate is Decision.Why in a sentence.
	WhyApproximate string `json:"why_approximate,omitempty"`
}

// explain tells where the request whose body is posted would go now. Its fields but
// those that are for this page are taken for the request's own, so that sessions,
// classes and budgets have their say. Nothing is sent to an engine.
func (ad *admin) explain(w http.ResponseWriter, r *http.Request) {
	body, done, ok := ad.posted(w, r, explainUsage)
	if !ok {
		return
	}
	defer done()
	path := r.URL.Query().Get("path")
	if path == "" {
		path = "/v1/chat/completions"
	}
	explained, err := ad.agent.proxy.Explain(path, requestFields(r.Header), body)
	if err != nil {
		http.Error(w, ad.agent.fleet.explainRefusal(err), http.StatusBadRequest)
		return
	}
	out := Explanation{Decision: *explained}
	ad.agent.fleet.completeExplanation(&out)
	ad.write(w, out)
}

// requestFields are the fields of a request that is explained: those of the one to
// this page, without what says who asks for it and how its body is sent.
func requestFields(h http.Header) http.Header {
	out := h.Clone()
	for _, name := range []string{"Authorization", "Connection", "Content-Length", "Cookie", "Expect", "Host", "Keep-Alive",
		"Origin", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "User-Agent", "Accept", "Accept-Encoding"} {
		out.Del(name)
	}
	return out
}

// explainRefusal is why a request would be refused, with the models that are served
// if it names none of them.
func (f *fleet) explainRefusal(err error) string {
	refusal := (*proxy.Refusal)(nil)
	if errors.As(err, &refusal) && refusal.Status == http.StatusNotFound && strings.HasPrefix(refusal.Message, "The model ") {
		return strings.TrimSuffix(refusal.Error(), ".") + "; " + served(f.current())
	}
	return err.Error()
}

// completeExplanation adds what the proxy does not know: the replicas that take no
// requests, and why.
func (f *fleet) completeExplanation(e *Explanation) {
	f.mu.Lock()
	for _, m := range f.members {
		serves := slices.ContainsFunc(m.models, func(c card) bool { return c.ID == e.Model })
		listed := slices.ContainsFunc(e.Replicas, func(r proxy.Considered) bool { return r.Replica == m.id })
		if !serves || listed {
			continue
		}
		why := "it is " + m.vitals.standing.String()
		if m.takesRequests() {
			why = "it has come up since"
		} else if reason := m.reason(); reason != "" {
			why += ": " + reason
		}
		e.Replicas = append(e.Replicas, proxy.Excluded(m.replica, why))
	}
	f.mu.Unlock()
	f.explainApproximate(e)
}

// explainApproximate says in a sentence why a prompt's tokens are not known.
func (f *fleet) explainApproximate(e *Explanation) {
	model := f.current().Models[e.Model]
	if model == nil || e.Exact {
		return
	}
	for reason := range prompt.Reasons {
		if reason := prompt.Reason(reason); reason != prompt.Exact && reason.String() == e.Why {
			e.WhyApproximate = f.prompts.whyApproximate(model, reason)
		}
	}
}

// served names the models that are served, for people.
func served(s *proxy.Fleet) string {
	var names []string
	for _, m := range s.Listed {
		names = append(names, m.Name)
	}
	if n := len(names); n > 20 {
		names = append(slices.Clip(names[:20]), fmt.Sprintf("%d more", n-20))
	}
	if len(names) == 0 {
		return "none is served"
	}
	return "those served are " + strings.Join(names, ", ")
}
