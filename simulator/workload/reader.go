package workload

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// mostTokens is how many tokens a prompt may have.
const mostTokens = 1 << 24

// ReadOptions say how a file is read of which not all is known. The zero value will do
// for those that tell when their requests came.
type ReadOptions struct {
	// Rate is how many requests come in a second where the file does not tell when,
	// by default 4, and Seed decides when that is.
	Rate float64
	Seed uint64
	// Model is whose requests are meant where a file has those of several.
	Model string
}

// Read reads a file of requests. Its content tells what it is: Mooncake's traces, those
// of Azure, conversations as ShareGPT has them, the agent's decision log, and any of
// these as gzip has packed it.
func (o ReadOptions) Read(path string) (*Workload, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return o.Parse(f, filepath.Base(path))
}

// Parse is Read of what has been opened; errors call it by name.
func (o ReadOptions) Parse(from io.Reader, name string) (*Workload, error) {
	r := bufio.NewReaderSize(from, 1<<16)
	if _, err := r.Peek(1); err == io.EOF {
		return nil, fmt.Errorf("%s: the file is empty", name)
	}
	if magic, err := r.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		unpacked, err := gzip.NewReader(r)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		r = bufio.NewReaderSize(unpacked, 1<<16)
	}
	w, err := o.read(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(w.Requests) == 0 {
		return nil, fmt.Errorf("%s: there is no request in it", name)
	}
	w.Name = name
	w.order()
	return w, nil
}

var errUnknown = errors.New("this is no trace of Mooncake (lines of JSON with hash_ids) or Azure (CSV with TIMESTAMP,ContextTokens,GeneratedTokens), " +
	"no list of ShareGPT's conversations, and no decision log of the agent with decisions.prompts: hashes")

func (o ReadOptions) read(r *bufio.Reader) (*Workload, error) {
	head, err := r.Peek(1 << 12)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	head = bytes.TrimPrefix(head, []byte("\ufeff"))
	head = bytes.TrimLeft(head, " \t\r\n")
	line, _, _ := bytes.Cut(head, []byte("\n"))
	has := func(what string) bool { return bytes.Contains(line, []byte(what)) }
	switch object := bytes.HasPrefix(head, []byte("{")); {
	case object && has(`"hash_ids"`):
		return readMooncake(r)
	case object && has(`"prompt_tokens"`):
		return o.readDecisions(r)
	case bytes.HasPrefix(head, []byte("[")) || object && bytes.Contains(head, []byte(`"conversations"`)):
		return o.readShareGPT(r)
	case has("ContextTokens"):
		return readAzure(r)
	}
	return nil, errUnknown
}

// lines calls f with each line of r that is not blank, and adds its number to an error.
func lines(r *bufio.Reader, f func(line []byte) error) error {
	var long []byte
	for n := 1; ; n++ {
		long = long[:0]
		line, err := r.ReadSlice('\n')
		for errors.Is(err, bufio.ErrBufferFull) {
			if long = append(long, line...); len(long) > longestLine {
				return fmt.Errorf("line %d has more than %d bytes", n, longestLine)
			}
			line, err = r.ReadSlice('\n')
		}
		if len(long) > 0 {
			long = append(long, line...)
			line = long
		}
		end := errors.Is(err, io.EOF)
		if err != nil && !end {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if n == 1 {
			line = bytes.TrimPrefix(line, []byte("\ufeff"))
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			if err := f(line); err != nil {
				return fmt.Errorf("line %d: %w", n, err)
			}
		}
		if end {
			return nil
		}
	}
}

// longestLine is how many bytes a line may have.
const longestLine = 64 << 20
