package proxy

import (
	"runtime/debug"
	"testing"
)

func TestProduct(t *testing.T) {
	f := func(version string, ok bool, want string) {
		t.Helper()
		if got := productOf(&debug.BuildInfo{Main: debug.Module{Version: version}}, ok); got != want {
			t.Errorf("%q: got %q, want %q", version, got, want)
		}
	}
	f("v1.2.3", true, "inferrail/1.2.3")
	f("v0.0.0-20261130005038-4cc26ce0aabb+dirty", true, "inferrail/0.0.0-20261130005038-4cc26ce0aabb+dirty")
	f("(devel)", true, "inferrail")
	f("", true, "inferrail")
	f("", false, "inferrail")
}
