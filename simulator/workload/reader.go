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
	"slices"
	"strings"
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
// these as gzip has packed it. Of a decision log there may be several files, in any
// order, as its rotation has left them or several agents have written them; a path that
// names no file may be a pattern ("decisions.jsonl*").
func (o ReadOptions) Read(paths ...string) (*Workload, error) {
	files, err := matching(paths)
	if err != nil {
		return nil, err
	}
	if len(files) == 1 {
		f, err := os.Open(files[0])
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }()
		return o.Parse(f, filepath.Base(files[0]))
	}
	var all decisions
	for _, file := range files {
		if err := all.readFile(file, o.Model); err != nil {
			return nil, err
		}
	}
	name := filepath.Base(paths[0])
	if more := len(paths) - 1; more > 0 {
		name += fmt.Sprintf(" and %d more", more)
	}
	w, err := all.workload(o.Model)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return w.finish(name)
}

// matching are the files that paths name, each once.
func matching(paths []string) (files []string, err error) {
	var seen []os.FileInfo
	add := func(file string) error {
		info, err := os.Stat(file)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(seen, func(other os.FileInfo) bool { return os.SameFile(info, other) }) {
			seen, files = append(seen, info), append(files, file)
		}
		return nil
	}
	for _, path := range paths {
		_, statErr := os.Stat(path)
		if statErr == nil || !strings.ContainsAny(path, "*?[") {
			if err := add(path); err != nil {
				return nil, err
			}
			continue
		}
		found, err := filepath.Glob(path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("%s: there is no such file, and none that the pattern matches", path)
		}
		for _, file := range found {
			if err := add(file); err != nil {
				return nil, err
			}
		}
	}
	if len(files) == 0 {
		return nil, errors.New("no file of requests is named")
	}
	return files, nil
}

// readFile adds the decisions of one file of several. One that is empty, as that which
// has been begun just now, has none.
func (all *decisions) readFile(path, model string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	r, err := unpacked(f)
	if err == nil {
		is := formatDecisions
		if is, err = formatOf(r); err == nil && is != formatDecisions {
			err = errors.New("it is no decision log, of which alone several files can be read as one")
		} else if errors.Is(err, io.EOF) {
			return nil
		}
	}
	if err == nil {
		err = all.read(r, model)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	return nil
}

// unpacked reads what gzip may have packed.
func unpacked(from io.Reader) (*bufio.Reader, error) {
	r := bufio.NewReaderSize(from, 1<<16)
	if magic, err := r.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		packed, err := gzip.NewReader(r)
		if err != nil {
			return nil, err
		}
		r = bufio.NewReaderSize(packed, 1<<16)
	}
	return r, nil
}

// Parse is Read of what has been opened; errors call it by name.
func (o ReadOptions) Parse(from io.Reader, name string) (*Workload, error) {
	r, err := unpacked(from)
	var w *Workload
	if err == nil {
		if _, empty := r.Peek(1); empty == io.EOF {
			return nil, fmt.Errorf("%s: the file is empty", name)
		}
		w, err = o.read(r)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return w.finish(name)
}

// finish makes a workload of what has been read.
func (w *Workload) finish(name string) (*Workload, error) {
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
	is, err := formatOf(r)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return nil, err
	case is == formatMooncake:
		return readMooncake(r)
	case is == formatDecisions:
		return o.readDecisions(r)
	case is == formatShareGPT:
		return o.readShareGPT(r)
	case is == formatAzure:
		return readAzure(r)
	}
	return nil, errUnknown
}

// format is what a file of requests is.
type format uint8

const (
	formatUnknown format = iota
	formatMooncake
	formatDecisions
	formatShareGPT
	formatAzure
)

// formatOf looks at the beginning; io.EOF is that there is nothing but blanks.
func formatOf(r *bufio.Reader) (format, error) {
	head, err := r.Peek(1 << 12)
	if err != nil && !errors.Is(err, io.EOF) {
		return formatUnknown, err
	}
	head = bytes.TrimPrefix(head, []byte("\ufeff"))
	head = bytes.TrimLeft(head, " \t\r\n")
	if len(head) == 0 {
		return formatUnknown, io.EOF
	}
	line, _, _ := bytes.Cut(head, []byte("\n"))
	has := func(what string) bool { return bytes.Contains(line, []byte(what)) }
	switch object := bytes.HasPrefix(head, []byte("{")); {
	case object && has(`"hash_ids"`):
		return formatMooncake, nil
	case object && has(`"prompt_tokens"`):
		return formatDecisions, nil
	case bytes.HasPrefix(head, []byte("[")) || object && bytes.Contains(head, []byte(`"conversations"`)):
		return formatShareGPT, nil
	case has("ContextTokens"):
		return formatAzure, nil
	}
	return formatUnknown, nil
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
				err = fmt.Errorf("line %d: %w", n, err)
				if end {
					err = unfinished{err}
				}
				return err
			}
		}
		if end {
			return nil
		}
	}
}

// unfinished is what is wrong with a last line that has no end: it may be that it is
// being written.
type unfinished struct{ error }

func (u unfinished) Unwrap() error { return u.error }

// longestLine is how many bytes a line may have.
const longestLine = 64 << 20
