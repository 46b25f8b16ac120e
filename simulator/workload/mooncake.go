package workload

import (
	"bufio"
	"encoding/json"
	"fmt"
	"time"
)

// mooncakeBlock is how many tokens a hash of Mooncake's traces stands for.
const mooncakeBlock = 512

// mooncakeLine is one request of a trace of kvcache-ai/Mooncake. Each of HashIDs names
// a block of the prompt with all that is before it; the last block may be shorter.
type mooncakeLine struct {
	Timestamp    *float64 `json:"timestamp"` // in milliseconds
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []int64  `json:"hash_ids"`
}

func readMooncake(r *bufio.Reader) (*Workload, error) {
	w := &Workload{Block: mooncakeBlock}
	err := lines(r, func(line []byte) error {
		var m mooncakeLine
		if err := json.Unmarshal(line, &m); err != nil {
			return err
		}
		request, err := m.request()
		w.Requests = append(w.Requests, request)
		return err
	})
	return w, err
}

func (m *mooncakeLine) request() (Request, error) {
	if m.Timestamp == nil || m.HashIDs == nil {
		return Request{}, fmt.Errorf("a request of a Mooncake trace has timestamp, input_length, output_length and hash_ids")
	}
	at, err := milliseconds64(*m.Timestamp)
	if err != nil {
		return Request{}, err
	}
	if m.InputLength < 1 || m.InputLength > mostTokens {
		return Request{}, fmt.Errorf("input_length is %d, and must be 1 to %d", m.InputLength, mostTokens)
	}
	if m.OutputLength < 0 || m.OutputLength > mostTokens {
		return Request{}, fmt.Errorf("output_length is %d, and must be 0 to %d", m.OutputLength, mostTokens)
	}
	if n := (m.InputLength + mooncakeBlock - 1) / mooncakeBlock; len(m.HashIDs) != n {
		return Request{}, fmt.Errorf("%d tokens are %d blocks of %d, but there are %d hash_ids", m.InputLength, n, mooncakeBlock, len(m.HashIDs))
	}
	q := Request{At: at, Output: max(m.OutputLength, 1), Parts: make([]Part, len(m.HashIDs))}
	for i, id := range m.HashIDs {
		if id < 0 {
			return Request{}, fmt.Errorf("the hash id %d is negative", id)
		}
		q.Parts[i] = Part{ID: uint64(id) + 1, Tokens: min(mooncakeBlock, m.InputLength-i*mooncakeBlock)}
	}
	return q, nil
}

// longestTime is how late a request may come: ten years.
const longestTime = 10 * 365 * 24 * time.Hour

func milliseconds64(ms float64) (time.Duration, error) {
	if !(ms >= 0 && ms <= float64(longestTime/time.Millisecond)) {
		return 0, fmt.Errorf("the timestamp %v is not milliseconds from the beginning", ms)
	}
	return time.Duration(ms * float64(time.Millisecond)), nil
}
