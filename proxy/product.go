package proxy

import (
	"runtime/debug"
	"strings"
)

// product is the Server field of answers that the agent makes itself: by it
// another agent knows that this is none of the engines.
var product = productOf(debug.ReadBuildInfo())

// productOf is "inferrail/VERSION", without a version when none was built in.
func productOf(info *debug.BuildInfo, ok bool) string {
	const name = "inferrail"
	if !ok || !strings.HasPrefix(info.Main.Version, "v") {
		return name
	}
	return name + "/" + strings.TrimPrefix(info.Main.Version, "v")
}

// InstanceField is the field of an answer to GET /health by which an agent knows
// another one, and itself.
const InstanceField = "x-inferrail-agent"

// Instance is what the server has in that field: no other has the same.
func (s *Server) Instance() string { return s.instance }
