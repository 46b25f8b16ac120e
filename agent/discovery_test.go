package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Findings are written as id@host:port, with ~engine and +other addresses.
func parseFindings(text string) []finding {
	var out []finding
	for _, word := range strings.Fields(text) {
		var f finding
		also := strings.Split(word, "+")
		word, f.also = also[0], also[1:]
		word, f.Engine, _ = strings.Cut(word, "~")
		id, rest, _ := strings.Cut(word, "@")
		f.ID, f.URL = id, "http://"+rest
		out = append(out, f)
	}
	return out
}

func TestMerge(t *testing.T) {
	f := func(want string, lists ...string) {
		t.Helper()
		var in [][]finding
		for _, l := range lists {
			in = append(in, parseFindings(l))
		}
		var got []string
		for _, f := range merge(in...) {
			word := f.ID + "@" + strings.TrimPrefix(f.URL, "http://")
			if f.Engine != "" {
				word += "~" + f.Engine
			}
			got = append(got, word)
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%q: got %s, want %s", lists, s, want)
		}
	}
	f("")
	f("a@h:1 b@h:2 c@h:3", "a@h:1", "b@h:2", "c@h:3")
	// The first stays, and learns the engine.
	f("a@h:1~vllm", "a@h:1", "b@h:1~vllm")
	f("a@h:1~tgi", "a@h:1~tgi", "b@h:1~vllm")
	// Ways to write the same.
	f("a@h:80", "a@h:80", "b@H", "c@h.:80/")
	f("a@localhost:1", "a@localhost:1", "b@127.0.0.1:1 c@[::1]:1")
	f("a@127.0.0.1:1", "a@127.0.0.1:1", "b@localhost:1")
	f("a@[::ffff:10.0.0.1]:1", "a@[::ffff:10.0.0.1]:1", "b@10.0.0.1:1")
	f("a@10.0.0.1:1", "a@10.0.0.1:1", "b@127.0.0.1:1+10.0.0.1:1")
	f("a@127.0.0.1:1", "a@127.0.0.1:1+10.0.0.1:1", "b@10.0.0.1:1")
	// Not the same.
	f("a@h:1/x b@h:1 c@h:1/y", "a@h:1/x", "b@h:1", "c@h:1/y")
	f("a@127.0.0.1:1 b@127.0.0.2:1 c@[::1]:1", "a@127.0.0.1:1", "b@127.0.0.2:1", "c@[::1]:1")
	// An ID is given once.
	f("a@h:1 a#2@h:2 a#3@h:3", "a@h:1", "a@h:2", "a@h:3")
}

// What a source reports, and what becomes of the fleet.
func TestSourceThatFailsKeepsItsFindings(t *testing.T) {
	var applied []string
	d := newDiscovery(testLog(t), func(list []finding) error {
		var ids []string
		for _, f := range list {
			ids = append(ids, f.ID+"("+f.source+")")
		}
		applied = append(applied, strings.Join(ids, " "))
		return nil
	})
	defer d.close()
	s := &source{name: "names", first: make(chan struct{})}
	d.sources = []*source{s}
	d.static = []finding{{ReplicaConfig: ReplicaConfig{ID: "s", URL: "http://s:1"}, source: "static"}}
	step := func(found string, err error, want ...string) {
		t.Helper()
		applied = nil
		var list []finding
		if found != "-" {
			list = append([]finding{}, parseFindings(found)...)
		}
		d.report(s, list, err)
		if !slices.Equal(applied, want) {
			t.Errorf("%s, %v: applied %q, want %q", found, err, applied, want)
		}
	}
	failed := errors.New("SERVFAIL")
	step("-", failed)
	step("a@a:1 b@b:1", nil, "s(static) a(names) b(names)")
	step("a@a:1 b@b:1", nil) // the same again
	step("-", failed)
	if st := d.status()[0]; st.Error != "SERVFAIL" || fmt.Sprint(st.Replicas) != "[a b]" || st.Success == nil || time.Since(*st.Success) > time.Hour {
		t.Errorf("status %+v", st)
	}
	step("-", failed)
	step("b@b:1", failed, "s(static) b(names)") // in part
	step("", nil, "s(static)")
	if st := d.status()[0]; st.Error != "" {
		t.Errorf("status %+v", st)
	}
	s.gone = true
	step("c@c:1", nil)
}

// A source goes on when the configuration that made it is the same, whatever
// else has changed.
func TestConfigureKeepsSources(t *testing.T) {
	d := newDiscovery(testLog(t), func([]finding) error { return nil })
	defer d.close()
	server := startNameServer(t)
	server.set(t, "")
	d.resolver.config = server.conf()
	configure := func(dns ...DNSConfig) []*source {
		t.Helper()
		c := DefaultConfig()
		c.Discovery.DNS = dns
		if err := d.configure(&c); err != nil {
			t.Fatal(err)
		}
		return d.sources
	}
	a := DNSConfig{Name: "a.test", Type: "a", Port: 1, Models: []string{"m"}}
	b := DNSConfig{Name: "b.test", Type: "a", Port: 1}
	first := configure(a, b)
	second := configure(b, DNSConfig{Name: "a.test", Type: "a", Port: 1, Models: []string{"m"}})
	if first[0] != second[1] || first[1] != second[0] {
		t.Error("sources were made anew")
	}
	b.Port = 2
	third := configure(a, b)
	if third[0] != first[0] || third[1] == first[1] {
		t.Error("a source whose configuration has changed goes on, or the other does not")
	}
	select {
	case <-first[1].ended:
	default:
		t.Error("the source that is not wanted any more still runs")
	}
	if twice := configure(a, a); twice[0].name == twice[1].name {
		t.Errorf("two sources are named %s", twice[0].name)
	}
}
