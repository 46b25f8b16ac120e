//go:build ignore

// testlog runs "go test -json" with its own arguments and makes the result
// readable while it runs: a line for each package, the output of what failed,
// a sign of life in between, and at the end what was skipped and why, and what
// took longest.
//
// A test that is not for the race detector, or does less under it, says so in the
// words of underRace. With -race those tests, and no others, are run once more
// without it: so none is forgotten.
//
// Tests here wait for sockets, processes and the kernel on machines that stand
// still at times. So of some thousands one or two that failed, and neither raced
// nor crashed, are run once more alone. One that passes then is listed as flaky,
// with what it printed when it failed, and has to be mended; the run is not red for
// it. More than that, or one that fails again, is.
package main

import (
	"cmp"
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

// underRace is in what a test prints that has to be run without the race detector, too.
const underRace = "under the race detector"

func main() {
	args := os.Args[1:]
	race := slices.Contains(args, "-race")
	again := run(args, race)
	if !race || len(again) == 0 {
		return
	}
	var names, packages []string
	for _, t := range again {
		names, packages = append(names, t.name), append(packages, t.pkg)
	}
	slices.Sort(names)
	slices.Sort(packages)
	names, packages = slices.Compact(names), slices.Compact(packages)
	fmt.Printf("\n%d tests once more, without the race detector\n", len(again))
	run(append([]string{"-timeout", "20m", "-run", "^(" + strings.Join(names, "|") + ")$"}, packages...), false)
}

// run is one "go test". It ends the program if that is red, and returns the tests that
// are to be run without the race detector.
func run(args []string, race bool) []topTest {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	if race {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1") // the race detector needs it
	}
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
	r := report(events, race)
	err = cmd.Wait()
	exit := (*exec.ExitError)(nil)
	switch {
	case err != nil && !errors.As(err, &exit):
		fail(err)
	case err == nil && len(r.failed) == 0 && !r.final:
	case r.final || !passAlone(r.failed, race):
		os.Exit(1)
	}
	return r.underRace
}

// mostFlaky is how many tests may have failed for them to be run once more.
const mostFlaky = 2

// topTest is a test that is no subtest.
type topTest struct{ pkg, name string }

// passAlone runs tests that have failed once more, one by one, and reports whether
// all pass.
func passAlone(failed []topTest, race bool) bool {
	if len(failed) == 0 || len(failed) > mostFlaky {
		return false
	}
	for _, t := range failed {
		args := []string{"test", "-count", "1", "-timeout", "10m", "-run", "^" + t.name + "$"}
		env := os.Environ()
		if race {
			args, env = append(args, "-race"), append(env, "CGO_ENABLED=1")
		}
		fmt.Printf("once more, alone: %s %s\n", t.pkg, t.name)
		cmd := exec.Command("go", append(args, t.pkg)...)
		cmd.Env = env
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

// result is what a run has shown: the tests that have failed, or of which a subtest
// has; whether that is final, because one has raced, or a package did not build or
// crashed; and the tests to be run without the race detector.
type result struct {
	failed, underRace []topTest
	final             bool
}

// longest is how many of the tests that took longest are listed, and long how many
// seconds one takes at least to be.
const (
	longest = 20
	long    = 5
)

// report prints events as they come.
func report(events <-chan event, race bool) (r result) {
	running := map[string]*test{} // by package and test name
	var skipped []string
	var times []event
	var passed, failed int
	failedOf := map[string]int{} // by package: several run at one time
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
			if e.Test != "" && strings.Contains(e.Output, underRace) {
				name, _, _ := strings.Cut(e.Test, "/")
				if top := (topTest{e.Package, name}); !slices.Contains(r.underRace, top) {
					r.underRace = append(r.underRace, top)
				}
			}
		case "build-output":
			fmt.Print(e.Output)
		case "pass", "fail", "skip":
			delete(running, name)
			if e.Test != "" && !strings.Contains(e.Test, "/") && e.Elapsed >= long {
				times = append(times, e)
			}
			switch {
			case e.Test == "":
				if e.Action == "fail" {
					// Tests without an outcome are where its process died.
					for other, u := range running {
						if strings.HasPrefix(other, e.Package+" ") {
							fmt.Print(strings.Join(u.output, ""))
							delete(running, other)
							r.final = true
						}
					}
					fmt.Print(strings.Join(t.output, ""))
					if failedOf[e.Package] == 0 {
						failed++ // the package itself: it did not build, or its process died
						r.final = true
					}
				} else if e.Action == "pass" {
					fmt.Printf("ok   %s %.1fs\n", e.Package, e.Elapsed)
				}
			case e.Action == "pass":
				passed++
			case e.Action == "fail":
				failed++
				failedOf[e.Package]++
				output := strings.Join(t.output, "")
				fmt.Print(output)
				r.final = r.final || strings.Contains(output, "DATA RACE") || strings.Contains(output, "panic:")
				if !strings.Contains(e.Test, "/") {
					r.failed = append(r.failed, topTest{e.Package, e.Test})
				}
			case e.Action == "skip":
				why := reason(t.output)
				skipped = append(skipped, name+": "+why)
				if race && strings.Contains(why, "race detector") && !strings.Contains(why, underRace) {
					fmt.Printf("%s: it skips with %q, and has to call withoutRace to be run at all\n", name, why)
					r.final = true
				}
			}
		}
	}
	slices.SortFunc(times, func(a, b event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
	for i, e := range times[:min(longest, len(times))] {
		if i == 0 {
			fmt.Println("\nlongest:")
		}
		fmt.Printf("  %6.1fs %s %s\n", e.Elapsed, e.Package, e.Test)
	}
	if len(skipped) > 0 {
		slices.Sort(skipped)
		fmt.Printf("\nskipped:\n  %s\n", strings.Join(skipped, "\n  "))
	}
	fmt.Printf("\n%d passed, %d failed, %d skipped\n", passed, failed, len(skipped))
	return r
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
