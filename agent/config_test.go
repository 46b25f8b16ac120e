package agent

import (
	"bytes"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// Each story in testdata/config is a configuration file and what the agent
// says to it. Regenerate with -rewrite and read the difference.
func TestConfigStories(t *testing.T) {
	datadriven.Walk(t, filepath.Join("testdata", "config"), func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd != "config" {
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			c := DefaultConfig()
			err := c.ParseConfig([]byte(d.Input))
			if err == nil {
				err = c.Validate()
			}
			if err != nil {
				return "error: " + err.Error() + "\n"
			}
			return changes(DefaultConfig(), c)
		})
	})
}

// changes lists the fields in which b differs from a.
func changes(a, b Config) string {
	var out bytes.Buffer
	var walk func(path string, a, b reflect.Value)
	walk = func(path string, a, b reflect.Value) {
		if a.Kind() == reflect.Slice && a.Type().Elem().Kind() == reflect.Struct {
			for i := range b.Len() {
				walk(fmt.Sprintf("%s[%d]", path, i), reflect.Zero(a.Type().Elem()), b.Index(i))
			}
			return
		}
		if a.Kind() != reflect.Struct {
			if !reflect.DeepEqual(a.Interface(), b.Interface()) {
				fmt.Fprintf(&out, "%s = %+v\n", path, b.Interface())
			}
			return
		}
		for i := range a.NumField() {
			if !a.Type().Field(i).IsExported() {
				continue
			}
			walk(strings.TrimPrefix(path+"."+a.Type().Field(i).Name, "."), a.Field(i), b.Field(i))
		}
	}
	walk("", reflect.ValueOf(a), reflect.ValueOf(b))
	if out.Len() == 0 {
		return "as by default\n"
	}
	return out.String()
}

func TestByteOrderMark(t *testing.T) {
	c := DefaultConfig()
	if err := c.ParseConfig([]byte("\ufefflisten: :81\n")); err != nil || c.Listen != ":81" || len(c.misread.list) > 0 {
		t.Errorf("%v, %v, listens on %s", err, c.misread.list, c.Listen)
	}
}

func TestDefaultConfigLacksOnlyReplicas(t *testing.T) {
	c := DefaultConfig()
	c.Replicas = []ReplicaConfig{{URL: "http://10.0.0.1:8000"}}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if got := c.Replicas[0].ID; got != "10.0.0.1:8000" {
		t.Errorf("the ID left out became %q", got)
	}
}

func TestParseReplica(t *testing.T) {
	f := func(in, id, url string) {
		t.Helper()
		if got := ParseReplica(in); got.ID != id || got.URL != url {
			t.Errorf("%q: got %q, %q", in, got.ID, got.URL)
		}
	}
	f("http://h:1", "", "http://h:1")
	f("gpu-0=http://h:1", "gpu-0", "http://h:1")
	f("http://h:1/a=b", "", "http://h:1/a=b")
	f("=http://h:1", "", "http://h:1")
	f("h:1", "", "h:1")
}

func TestParseBytesSuccess(t *testing.T) {
	f := func(in string, want Bytes, text string) {
		t.Helper()
		got, err := ParseBytes(in)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%q: got %d (%s), %v; want %d (%s)", in, int64(got), got, err, int64(want), text)
		}
	}
	f("0", 0, "0")
	f("1", 1, "1")
	f("1023", 1023, "1023")
	f("16KiB", 16<<10, "16KiB")
	f("64MiB", 64<<20, "64MiB")
	f("64 MiB", 64<<20, "64MiB")
	f("2GiB", 2<<30, "2GiB")
	f("3000MiB", 3000<<20, "3000MiB")
	f("10MB", 10e6, "10000000")
	f("5kB", 5000, "5000")
	f("7B", 7, "7")
}

func TestParseBytesFailure(t *testing.T) {
	f := func(in string) {
		t.Helper()
		if got, err := ParseBytes(in); err == nil {
			t.Errorf("%q: got %d", in, int64(got))
		}
	}
	f("")
	f("MiB")
	f("-1")
	f("1.5MiB")
	f("64mib")
	f("1TiB")
	f("9223372036854775807KiB")
	f("99999999999999999999")
}

// Whatever the file holds, it is accepted or refused with a reason, and what
// is accepted passes through Validate without a panic.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte("listen: :80\nreplicas: [{url: http://a:1}]\n"))
	f.Add([]byte("health: {interval: 1s}\nserver: {max_body_bytes: 1GiB}\n"))
	f.Add([]byte("a: &x [1]\nmodels: *x\n"))
	f.Add([]byte("models:\n- name: m\n  aliases: [a, a]\n- null\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := DefaultConfig()
		if err := c.ParseConfig(data); err != nil {
			if err.Error() == "" {
				t.Error("an error that says nothing")
			}
			return
		}
		if err := c.Validate(); err == nil && (c.Health.Interval <= 0 || c.Health.Interval > 1<<62*time.Nanosecond) {
			t.Errorf("accepted interval %v", c.Health.Interval)
		}
	})
}
