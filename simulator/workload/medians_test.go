package workload

import (
	"reflect"
	"testing"
)

// Every figure of a summary has its median: none was forgotten.
func TestMediansKnowEveryField(t *testing.T) {
	var runs []Summary
	for _, n := range []int64{30, 10, 20} {
		var s Summary
		fillWith(reflect.ValueOf(&s).Elem(), n)
		s.Policy = "one"
		runs = append(runs, s)
	}
	m := Medians(runs)[0]
	m.Spread = Spread{}
	var want Summary
	fillWith(reflect.ValueOf(&want).Elem(), 20)
	want.Policy, want.Failures, want.Doubts = "one", map[string]int{"why": 20}, m.Doubts
	if !reflect.DeepEqual(m, want) {
		t.Errorf("got  %+v\nwant %+v", m, want)
	}
	if !reflect.DeepEqual(m.Doubts, []string{"30", "10", "20"}) {
		t.Errorf("doubts %q", m.Doubts)
	}
}

// fillWith makes every number in v that one.
func fillWith(v reflect.Value, n int64) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fillWith(v.Field(i), n)
		}
	case reflect.Int:
		v.SetInt(n)
	case reflect.Float64:
		v.SetFloat(float64(n))
	case reflect.String:
		v.SetString(map[int64]string{10: "10", 20: "20", 30: "30"}[n])
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillWith(v.Index(0), n)
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]int{"why": int(n)}))
	}
}

// Runs on fleets of which not all have served.
func TestMediansOfUnequalFleets(t *testing.T) {
	m := Medians([]Summary{{Replicas: []int{4, 6}}, {Replicas: []int{10}}, {Replicas: []int{4, 4, 2}}})[0]
	if !reflect.DeepEqual(m.Replicas, []int{4, 4, 0}) {
		t.Errorf("replicas %v", m.Replicas)
	}
}
