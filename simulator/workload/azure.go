package workload

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// readAzure reads the traces of LLM inference in AzurePublicDataset, of 2023 and 2024. They
// tell nothing of what prompts share, so each shares nothing.
func readAzure(r *bufio.Reader) (*Workload, error) {
	rows := csv.NewReader(r)
	rows.ReuseRecord, rows.TrimLeadingSpace = true, true
	header, err := rows.Read()
	if err != nil {
		return nil, err
	}
	header[0] = strings.TrimPrefix(header[0], "\ufeff")
	var at [3]int
	for i, name := range []string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"} {
		if at[i] = slices.Index(header, name); at[i] < 0 {
			return nil, fmt.Errorf("line 1: there is no column %s", name)
		}
	}
	w := &Workload{}
	var times []time.Time
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err // which names the line
		}
		line, _ := rows.FieldPos(0)
		when, err := azureTime(row[at[0]])
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		var tokens [2]int
		for i := range tokens {
			n, err := strconv.Atoi(row[at[i+1]])
			if err != nil || n < 0 || n > mostTokens {
				return nil, fmt.Errorf("line %d: %q is not a number of tokens from 0 to %d", line, row[at[i+1]], mostTokens)
			}
			tokens[i] = max(n, 1)
		}
		times = append(times, when)
		w.Requests = append(w.Requests, Request{Output: tokens[1], Parts: []Part{{ID: uint64(len(times)), Tokens: tokens[0]}}})
	}
	return w, w.schedule(times)
}

// schedule gives the requests their times, the first of which is the beginning.
func (w *Workload) schedule(times []time.Time) error {
	if len(times) == 0 {
		return nil
	}
	begin := slices.MinFunc(times, time.Time.Compare)
	for i, t := range times {
		at := t.Sub(begin)
		if at > longestTime {
			return fmt.Errorf("request %d comes %v after the first; a workload is at most ten years long", i+1, at)
		}
		w.Requests[i].At = at
	}
	return nil
}

func azureTime(s string) (time.Time, error) {
	for _, layout := range []string{"2006-01-02 15:04:05.999999999", "2006-01-02 15:04:05.999999999Z07:00"} {
		if t, err := time.Parse(layout, s); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is no time such as 2023-11-16 18:17:03.9799600", s)
}
