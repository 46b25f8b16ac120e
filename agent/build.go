package agent

import (
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// build is what the program was built from. Immutable.
type build struct {
	// version is the module's, or (devel); revision the commit, "" when it is not known.
	version, revision, goVersion string
}

var thisBuild = buildOf(debug.ReadBuildInfo())

func buildOf(info *debug.BuildInfo, ok bool) build {
	if !ok {
		return build{version: "(unknown)"}
	}
	b := build{version: info.Main.Version, goVersion: info.GoVersion}
	if b.version == "" {
		b.version = "(devel)"
	}
	modified := ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			b.revision = s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = "+modified"
		}
	}
	b.revision += modified
	return b
}

// buildInfo is the metric that tells what runs; its value is always 1.
var buildInfo = prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "inferrail_build_info",
	Help:        "What the agent was built from; always 1.",
	ConstLabels: prometheus.Labels{"version": thisBuild.version, "revision": thisBuild.revision, "goversion": thisBuild.goVersion},
}, func() float64 { return 1 })

// uptime is the metric of how long the agent has been running.
func (a *Agent) uptime() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "inferrail_uptime_seconds", Help: "Time since the agent has started."},
		func() float64 { return time.Since(a.started).Seconds() })
}

// Version is what this program calls itself.
func Version() string { return thisBuild.version }
