//go:build ignore

// testlog runs "go test -json" with its own arguments and makes the result
// readable while it runs: a line for each package, the output of what failed,
// a sign of life in between, and at the end what was skipped and why.
//
// Tests here wait for sockets, processes and the kernel on machines that stand
// still at times. So of some thousands one or two that failed, and neither raced
// nor crashed, are run once more alone. One that passes then is listed as flaky,
// with what it printed when it failed, and has to be mended; the run is not red for
// it. More than that, or one that fails again, is.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// event mirrors the JSON of "go doc test2json"; the build events carry an
// ImportPath instead of a Package.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
	Elapsed    float64
}

type test struct {
	output  []string
	started time.Time
}

func main() {
	cmd := exec.Command("go", append([]string{"test", "-json"}, os.Args[1:]...)...)
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		fail(err)
	}
	if err := cmd.Start(); err != nil {
		fail(err)
	}
	events := make(chan event)
	go func() {
		defer close(events)
		for dec := json.NewDecoder(pipe); ; {
			var e event
			if dec.Decode(&e) != nil {
				return
			}
			events <- e
		}
	}()
	failed, final := report(events)
	err = cmd.Wait()
	exit := (*exec.ExitError)(nil)
	switch {
	case err != nil && !errors.As(err, &exit):
		fail(err)
	case err == nil && len(failed) == 0 && !final:
	case final || !passAlone(failed):
		os.Exit(1)
	}
}

// mostFlaky is how many tests may have failed for them to be run once more.
const mostFlaky = 2

// failedTest is a test at the top level that has failed, or one of whose subtests
// has.
type failedTest struct{ pkg, name string }

// passAlone runs tests that have failed once more, one by one, and reports whether
// all pass.
func passAlone(failed []failedTest) bool {
	if len(failed) == 0 || len(failed) > mostFlaky {
		return false
	}
	for _, t := range failed {
		args := []string{"test", "-count", "1", "-timeout", "10m", "-run", "^" + t.name + "$"}
		if slices.Contains(os.Args, "-race") {
			args = append(args, "-race")
		}
		fmt.Printf("once more, alone: %s %s\n", t.pkg, t.name)
		cmd := exec.Command("go", append(args, t.pkg)...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if cmd.Run() != nil {
			return false
		}
	}
	for _, t := range failed {
		fmt.Printf("FLAKY, to be mended: %s %s failed, and passed alone\n", t.pkg, t.name)
	}
	return true
}

// report prints events as they come. It returns the tests that have failed, and
// whether that is final: one has raced, or a package did not build or crashed.
func report(events <-chan event) (failures []failedTest, final bool) {
	running := map[string]*test{} // by package and test name
	var skipped []string
	var passed, failed, failedHere int
	alive := time.NewTicker(30 * time.Second)
	defer alive.Stop()
	for {
		var e event
		var ok bool
		select {
		case e, ok = <-events:
		case <-alive.C:
			for name, t := range running {
				if d := time.Since(t.started); !t.started.IsZero() && d > 25*time.Second {
					fmt.Printf("...  %s, for %v\n", name, d.Round(time.Second))
				}
			}
			continue
		}
		if !ok {
			break
		}
		name := strings.TrimSpace(e.Package + " " + e.Test)
		t := running[name]
		if t == nil {
			t = &test{}
			running[name] = t
		}
		switch e.Action {
		case "run":
			t.started = time.Now()
		case "output":
			t.output = append(t.output, e.Output)
		case "build-output":
			fmt.Print(e.Output)
		case "pass", "fail", "skip":
			delete(running, name)
			switch {
			case e.Test == "":
				if e.Action == "fail" {
					// Tests without an outcome are where its process died.
					for other, u := range running {
						if strings.HasPrefix(other, e.Package+" ") {
							fmt.Print(strings.Join(u.output, ""))
							delete(running, other)
							final = true
						}
					}
					fmt.Print(strings.Join(t.output, ""))
					if failedHere == 0 {
						failed++ // the package itself: it did not build, or its process died
						final = true
					}
				} else if e.Action == "pass" {
					fmt.Printf("ok   %s %.1fs\n", e.Package, e.Elapsed)
				}
				failedHere = 0
			case e.Action == "pass":
				passed++
			case e.Action == "fail":
				failed++
				failedHere++
				output := strings.Join(t.output, "")
				fmt.Print(output)
				final = final || strings.Contains(output, "DATA RACE") || strings.Contains(output, "panic:")
				if !strings.Contains(e.Test, "/") {
					failures = append(failures, failedTest{e.Package, e.Test})
				}
			case e.Action == "skip":
				skipped = append(skipped, name+": "+reason(t.output))
			}
		}
	}
	if len(skipped) > 0 {
		slices.Sort(skipped)
		fmt.Printf("\nskipped:\n  %s\n", strings.Join(skipped, "\n  "))
	}
	fmt.Printf("\n%d passed, %d failed, %d skipped\n", passed, failed, len(skipped))
	return failures, final
}

// reason is what a skipped test printed, without the marks of the testing
// package.
func reason(output []string) string {
	var words []string
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
			continue
		}
		if file, said, ok := strings.Cut(line, ": "); ok && strings.Contains(file, ".go:") {
			line = said
		}
		words = append(words, line)
	}
	if len(words) == 0 {
		return "no reason given"
	}
	return strings.Join(words, " ")
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "testlog:", err)
	os.Exit(1)
}
