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

// What the README points to is there, and it tells of every configuration key.
func TestReadme(t *testing.T) {
	data, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	readme := string(data)
	links := regexp.MustCompile(`\]\(([^)#]+)\)`).FindAllStringSubmatch(readme, -1)
	if len(links) < 10 {
		t.Errorf("only %d links found", len(links))
	}
	for _, link := range links {
		if strings.Contains(link[1], "://") {
			continue
		}
		if _, err := os.Stat(filepath.Join("../..", link[1])); err != nil {
			t.Errorf("a link leads nowhere: %v", err)
		}
	}
	for _, target := range regexp.MustCompile(`make ([a-z-]+)`).FindAllStringSubmatch(readme, -1) {
		if !strings.Contains(makefile(t), "\n"+target[1]+":") && target[1] != "and" {
			t.Errorf("no target for %q", target[0])
		}
	}
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
			t.Errorf("the configuration key %s is not in the README's table", key)
		}
	}
}

func makefile(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../../Makefile")
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
