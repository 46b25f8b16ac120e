package proxy

import (
	"strings"
	"sync"
	"time"
)

// journalRows is how many of the last decisions are kept.
const journalRows = 1024

// journal keeps what became of the last decisions, so that predictions can be
// compared with what was seen. Every request that was sent to a replica is entered
// when it is over, which allocates nothing. Its methods may be called from any
// goroutine; it lives as long as its Server. The zero value is empty.
type journal struct {
	mu   sync.Mutex // guards the rest
	rows [journalRows]journalRow
	n    uint64 // rows that were entered
}

// journalRow is one row of a journal. The strings belong to others, who keep them
// longer: names of models, policies and replicas, and words of the program.
type journalRow struct {
	id       [maxJournalID]byte
	idLength uint8
	p        Prediction
}

// maxJournalID is how much of a request's id is kept.
const maxJournalID = 64

// Prediction is one decision beside what became of it. It is a value.
type Prediction struct {
	// Time is when the request was sent to the replica; RequestID is the beginning of the
	// request's.
	Time      time.Time
	RequestID string
	Model     string
	Policy    string
	Replica   string
	Reason    string
	// Outcome is as in the metric inferrail_requests_total, Status what the client
	// was answered, Attempts how often the request was tried.
	Outcome  string
	Status   int
	Attempts int
	// Exact: the prompt's tokens are known, and Tokens is how many; else it is an
	// estimate, or 0.
	Exact  bool
	Tokens int
	// CachedPredicted and CachedActual are how many of them were expected in the
	// engine's cache, and were there as it has told; -1 is not known.
	CachedPredicted, CachedActual int
	// Predicted and Observed are the seconds from sending the request to the
	// replica to its first token; Observed is below 0 when that was not seen, as of
	// answers that are no streams.
	Predicted, Observed float64
}

// enter adds a row. id is copied.
func (j *journal) enter(p Prediction, id []byte) {
	j.mu.Lock()
	defer j.mu.Unlock()
	row := &j.rows[j.n%journalRows]
	j.n++
	row.p = p
	row.idLength = uint8(copy(row.id[:], id))
}

// append appends the rows to dst, the one that was entered last first.
func (j *journal) append(dst []Prediction) []Prediction {
	j.mu.Lock()
	defer j.mu.Unlock()
	for k := range min(j.n, journalRows) {
		row := &j.rows[(j.n-1-k)%journalRows]
		p := row.p
		p.RequestID = strings.ToValidUTF8(string(row.id[:row.idLength]), "")
		dst = append(dst, p)
	}
	return dst
}

// Predictions appends the decisions whose requests have ended last, at most 1,024,
// the last one first.
func (s *Server) Predictions(dst []Prediction) []Prediction { return s.journal.append(dst) }
