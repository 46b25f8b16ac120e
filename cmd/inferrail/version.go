package main

import (
	"fmt"
	"runtime/debug"
)

type versionCommand struct{}

// Run prints what was built: the module's version, or the commit.
func (versionCommand) Run(e *env) error {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		_, err := fmt.Fprintln(e.stdout, "inferrail, built without version")
		return err
	}
	line := "inferrail " + info.Main.Version
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && len(s.Value) >= 12:
			line += " " + s.Value[:12]
		case s.Key == "vcs.modified" && s.Value == "true":
			line += " (modified)"
		}
	}
	_, err := fmt.Fprintln(e.stdout, line+" "+info.GoVersion)
	return err
}
