package main

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/agent"
)

// What the READMEs point to is there.
func TestReadme(t *testing.T) {
	for _, file := range []string{"README.md", "agent/README.md"} {
		readme := read(t, file)
		links := regexp.MustCompile(`\]\(([^)#]+)\)`).FindAllStringSubmatch(readme, -1)
		if file == "README.md" && len(links) < 10 {
			t.Errorf("%s: only %d links found", file, len(links))
		}
		for _, link := range links {
			if strings.Contains(link[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join("../..", filepath.Dir(file), link[1])); err != nil {
				t.Errorf("%s: a link leads nowhere: %v", file, err)
			}
		}
		for _, target := range regexp.MustCompile(`make ([a-z-]+)`).FindAllStringSubmatch(readme, -1) {
			if !strings.Contains(read(t, "Makefile"), "\n"+target[1]+":") && target[1] != "and" {
				t.Errorf("%s: no target for %q", file, target[0])
			}
		}
	}
}

// The agent's README tells of every configuration key.
func TestReadmeHasEveryKey(t *testing.T) {
	readme := read(t, "agent/README.md")
	keys := configKeys(reflect.TypeFor[agent.Config](), "")
	if len(keys) < 20 {
		t.Errorf("only %d configuration keys found: %v", len(keys), keys)
	}
	for _, key := range keys {
		section, last := "", key
		if dot := strings.LastIndex(key, "."); dot >= 0 {
			section, last = key[:dot+1], key[dot+1:]
		}
		// A row has `section.key`, or `section.other`, `.key`.
		row := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(section) + "[^|]*`" + `[^|]*\b` + regexp.QuoteMeta(last) + "`[^|]*\\|")
		short := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(key) + "`")
		if !row.MatchString(readme) && !short.MatchString(readme) {
			t.Errorf("the configuration key %s is not in the table", key)
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile("../../" + file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// configKeys lists the paths of the keys that hold values.
func configKeys(typ reflect.Type, path string) []string {
	switch {
	case typ.Kind() == reflect.Slice && typ.Elem().Kind() == reflect.Struct:
		return configKeys(typ.Elem(), path+"[]")
	case typ.Kind() != reflect.Struct:
		return []string{path}
	}
	var keys []string
	for i := range typ.NumField() {
		if tag := typ.Field(i).Tag.Get("yaml"); tag != "" && tag != "-" {
			keys = append(keys, configKeys(typ.Field(i).Type, strings.TrimPrefix(path+"."+tag, "."))...)
		}
	}
	return keys
}
