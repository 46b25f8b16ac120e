package proxy

import "testing"

// A request that names no model means the one that is served, whatever names
// engines give it and however many adapters of it they list.
func TestModelOfARequestThatNamesNone(t *testing.T) {
	replica := func(n int) []*Replica { return make([]*Replica, n) }
	f := func(want string, listed ...*Model) {
		t.Helper()
		got := ""
		if m := (&Fleet{Listed: listed}).unnamed(); m != nil {
			got = m.Name
		}
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	f("")
	f("a", &Model{Name: "a"})
	f("a", &Model{Name: "a", Root: "/a", Parent: "gone"})
	// Engines that do not say which model a name stands for.
	f("", &Model{Name: "a"}, &Model{Name: "b"})
	f("", &Model{Name: "a", Root: "/a"}, &Model{Name: "b", Root: "/b"})
	f("", &Model{Name: "a", Root: "/a"}, &Model{Name: "b"})
	f("", &Model{Name: "b"}, &Model{Name: "a", Root: "/a"})
	f("a", &Model{Name: "a", Root: "/a"}, &Model{Name: "alias", Root: "/a"})
	f("a", &Model{Name: "a", Root: "/a", Replicas: replica(1)}, &Model{Name: "alias", Root: "/a", Replicas: replica(1)})
	f("alias", &Model{Name: "a", Root: "/a", Replicas: replica(1)}, &Model{Name: "alias", Root: "/a", Replicas: replica(2)})
	f("base", &Model{Name: "adapter", Root: "/lora", Parent: "base"}, &Model{Name: "base", Root: "/a"})
	f("", &Model{Name: "one", Root: "/1", Parent: "gone"}, &Model{Name: "two", Root: "/2", Parent: "gone"})
	f("", &Model{Name: "adapter", Root: "/lora", Parent: "a"}, &Model{Name: "a", Root: "/a"}, &Model{Name: "b", Root: "/b"})
}
