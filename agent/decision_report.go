package agent

import (
	"fmt"
	"net/http"
	"strconv"
)

// decisions shows the last decisions: GET /debug/decisions answers a
// proxy.RecentDecisions, the rows without what each was chosen from. With
// ?after=SEQ it has the rows that have changed since an answer whose seq that was:
// a page that polls keeps rows by id and asks for what came after the last seq, and
// begins anew when an answer's seq is below it, because the agent has been started
// anew.
//
// ?id=N, or ?request_id=TEXT, answers one of them whole, as an Explanation: with all
// candidates, their terms, the shadows and the outcome. 404 is that it is not kept.
//
// The agent keeps at most 200, fewer of a large fleet, and not each one when there are
// many: see the answer's kept and made. While somebody asks, it keeps more.
func (ad *admin) decisions(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	number := func(name string) (n uint64, ok bool) {
		text := query.Get(name)
		if text == "" {
			return 0, true
		}
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			http.Error(w, fmt.Sprintf("%s=%.40q is not a whole number, such as an earlier answer tells", name, text), http.StatusBadRequest)
		}
		return n, err == nil
	}
	after, ok := number("after")
	if !ok {
		return
	}
	id, ok := number("id")
	if !ok {
		return
	}
	request := query.Get("request_id")
	if id == 0 && request == "" {
		ad.write(w, ad.agent.proxy.RecentDecisions(after))
		return
	}
	d := ad.agent.proxy.RecentDecision(id, request)
	if d == nil {
		http.Error(w, "this decision is not kept, or not any more", http.StatusNotFound)
		return
	}
	out := Explanation{Decision: *d}
	ad.agent.fleet.explainApproximate(&out)
	ad.write(w, out)
}
