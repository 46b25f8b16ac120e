package agent

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// contents stands for what some files hold, or for the reason why they cannot
// be read.
type contents [sha256.Size]byte

// contentsOf reads the files. They are small, and what they hold tells more
// reliably than their times and inodes whether they have changed; that they
// are symlinks, swapped as Kubernetes does, makes no difference.
func contentsOf(files ...string) (sum contents) {
	h := sha256.New()
	for _, file := range files {
		data, err := readFile(file)
		each := sha256.Sum256(data)
		fmt.Fprintf(h, "%x %v\n", each, err)
	}
	h.Sum(sum[:0])
	return sum
}

// maxFile bounds a file that the agent reads as a whole.
const maxFile = 16 << 20

var (
	errIrregular = errors.New("is not a regular file")
	errTooLarge  = fmt.Errorf("is larger than %v", Bytes(maxFile))
)

// readFile reads a regular file that is not large. To read anything else, a pipe
// above all, may never end, and with it the goroutine that reads.
func readFile(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() && !info.IsDir() { // which the system names better
		return nil, &fs.PathError{Op: "read", Path: name, Err: errIrregular}
	}
	return readBounded(f)
}

func readBounded(f *os.File) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = &fs.PathError{Op: "read", Path: f.Name(), Err: errTooLarge}
	}
	if err != nil {
		return nil, err
	}
	return data, nil
}

// readOnce reads a file that may be a pipe, at the start of the process, which
// the user can end.
func readOnce(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readBounded(f)
}

// irregular reports that the file is there, and of no kind that can be read
// again and again.
func irregular(name string) bool {
	info, err := os.Stat(name)
	return err == nil && !info.Mode().IsRegular() && !info.IsDir()
}
