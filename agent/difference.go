package agent

import (
	"fmt"
	"reflect"
	"strings"
)

// difference is one key that has another value in a new configuration. What is
// secret is not shown.
type difference struct {
	path     string
	old, new string
}

// differences lists what differs, in the order of Config. Entries of lists that
// have an id or a name are compared with their namesakes, wherever they are.
func differences(a, b *Config) []difference {
	var d differ
	d.compare("", reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem(), false)
	return d.list
}

type differ struct{ list []difference }

func (d *differ) compare(path string, a, b reflect.Value, hide bool) {
	switch {
	case a.Kind() == reflect.Struct:
		for i := range a.NumField() {
			field := a.Type().Field(i)
			if tag := field.Tag.Get("yaml"); tag != "" && tag != "-" {
				d.compare(strings.TrimPrefix(path+"."+tag, "."), a.Field(i), b.Field(i), field.Tag.Get("secret") != "")
			}
		}
	case a.Kind() == reflect.Slice && a.Type().Elem().Kind() == reflect.Struct:
		d.compareEntries(path, a, b)
	case (a.Kind() == reflect.Slice || a.Kind() == reflect.Map) && a.Len() == 0 && b.Len() == 0:
		// nil or empty, which means the same.
	case !reflect.DeepEqual(a.Interface(), b.Interface()):
		d.list = append(d.list, difference{path, shown(a, hide), shown(b, hide)})
	}
}

func (d *differ) compareEntries(path string, a, b reflect.Value) {
	const present, absent = "(present)", "(absent)"
	entries := map[string]reflect.Value{} // of b, that a lacks
	for i := range b.Len() {
		entries[entryName(b.Index(i))] = b.Index(i)
	}
	for i := range a.Len() {
		name := entryName(a.Index(i))
		each := fmt.Sprintf("%s[%s]", path, name)
		if other, ok := entries[name]; ok {
			d.compare(each, a.Index(i), other, false)
			delete(entries, name)
		} else {
			d.list = append(d.list, difference{each, present, absent})
		}
	}
	for i := range b.Len() {
		if name := entryName(b.Index(i)); entries[name].IsValid() {
			d.list = append(d.list, difference{fmt.Sprintf("%s[%s]", path, name), absent, present})
		}
	}
}

// entryName is what people know an entry of a list by.
func entryName(v reflect.Value) string {
	if id := v.FieldByName("ID"); id.IsValid() {
		return id.String()
	}
	switch e := v.Interface().(type) {
	case ShadowConfig:
		return e.label()
	case DNSConfig: // one name may be looked up in more than one way
		return fmt.Sprintf("%s %s %d", e.Name, e.Type, e.Port)
	case KubernetesConfig:
		return e.entry()
	}
	return v.FieldByName("Name").String()
}

func shown(v reflect.Value, hide bool) string {
	s := fmt.Sprint(v.Interface())
	switch {
	case s == "" || v.Kind() == reflect.Map && v.Len() == 0:
		return "(none)"
	case hide:
		return secret
	}
	return s
}
