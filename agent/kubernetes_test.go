package agent

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/goccy/go-yaml"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/inferrail/inferrail/simulator"
)

// strictly decodes a YAML text into an object of Kubernetes.
func strictly(t *testing.T, text string, into any) {
	t.Helper()
	data, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
}

// clusterObject is an EndpointSlice or a pod, as its kind says.
func clusterObject(t *testing.T, text string) metav1.Object {
	t.Helper()
	if strings.Contains(text, "kind: EndpointSlice") {
		o := &discoveryv1.EndpointSlice{}
		strictly(t, text, o)
		return o
	}
	o := &corev1.Pod{}
	strictly(t, text, o)
	return o
}

// Each story in testdata/kubernetes says what is in a cluster, and what the
// replicas are then. What was found before has a say, as when it runs.
func TestKubernetesStories(t *testing.T) {
	t.Setenv(nodeName, "here")
	datadriven.Walk(t, filepath.Join("testdata", "kubernetes"), func(t *testing.T, path string) {
		k := &kubernetes{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "source":
				k = &kubernetes{}
				c := DefaultConfig()
				if err := c.ParseConfig([]byte("discovery:\n  kubernetes:\n  - " + strings.ReplaceAll(d.Input, "\n", "\n    "))); err != nil {
					d.Fatalf(t, "%v", err)
				}
				if err := c.Validate(); err != nil {
					return err.Error()
				}
				k.KubernetesConfig = c.Discovery.Kubernetes[0]
				return ""
			case "cluster":
				var objects []any
				for text := range strings.SplitSeq(d.Input, "\n---\n") {
					if strings.TrimSpace(text) == "" {
						continue
					}
					object := clusterObject(t, text)
					lean(object)
					objects = append(objects, object)
				}
				found, err := k.findings(objects)
				slices.Reverse(objects)
				again, _ := k.findings(objects)
				if fmt.Sprint(again) != fmt.Sprint(found) {
					t.Errorf("%s: in another order: %v, want %v", d.Pos, again, found)
				}
				var out strings.Builder
				for _, f := range found {
					fmt.Fprint(&out, f.ID, " ", f.URL)
					if len(f.also) > 0 {
						fmt.Fprint(&out, " also ", strings.Join(f.also, " "))
					}
					if f.Engine != "" {
						fmt.Fprint(&out, " ", f.Engine)
					}
					if f.Models != nil {
						fmt.Fprintf(&out, " %q", f.Models)
					}
					for _, n := range []struct {
						name  string
						value int
					}{{"max_concurrency", f.MaxConcurrency}, {"max_pending", f.MaxPending}, {"kv_blocks", f.KVBlocks}, {"data_parallel", f.DataParallel}} {
						if n.value != 0 {
							fmt.Fprintf(&out, " %s=%d", n.name, n.value)
						}
					}
					out.WriteByte('\n')
				}
				if len(found) == 0 {
					out.WriteString("none\n")
				}
				if err != nil {
					fmt.Fprintln(&out, "error:", err)
				}
				return out.String()
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}

// apiServer is as much of an API server as lists and watches need. Unlike a real
// one it can be told to fail.
type apiServer struct {
	*httptest.Server
	file string // the kubeconfig

	mu      sync.Mutex // guards the rest
	changed *sync.Cond
	version int
	objects map[string]metav1.Object // by kind and key
	history []change
	forgot  int // changes up to this version cannot be watched from
	refuses *metav1.Status
	cuts    int // watches of before this number was raised end
	asked   []string
	watches int // that run
	closed  bool
}

// change is what a watch tells of.
type change struct {
	version  int
	kind     string
	resource string
	object   metav1.Object
}

func startAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{objects: map[string]metav1.Object{}, version: 1}
	s.changed = sync.NewCond(&s.mu)
	// Over plain HTTP the client would keep its token to itself.
	s.Server = httptest.NewUnstartedServer(s)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(func() {
		s.mu.Lock()
		s.closed = true
		s.changed.Broadcast()
		s.mu.Unlock()
		s.Close()
	})
	s.file = filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}]\nusers: [{name: u, user: {token: secret}}]\n"+
		"contexts: [{name: x, context: {cluster: c, user: u, namespace: serving}}]\ncurrent-context: x\n",
		s.URL, base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	if err := os.WriteFile(s.file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return s
}

func resourceOf(o metav1.Object) string {
	if _, ok := o.(*corev1.Pod); ok {
		return "pods"
	}
	return "endpointslices"
}

// put makes or changes an object.
func (s *apiServer) put(o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := resourceOf(o) + "/" + o.GetNamespace() + "/" + o.GetName()
	kind := "ADDED"
	if s.objects[key] != nil {
		kind = "MODIFIED"
	}
	s.noteLocked(kind, o)
	s.objects[key] = o
}

func (s *apiServer) noteLocked(kind string, o metav1.Object) {
	s.version++
	o.SetResourceVersion(strconv.Itoa(s.version))
	s.history = append(s.history, change{s.version, kind, resourceOf(o), o})
	s.changed.Broadcast()
}

func (s *apiServer) remove(o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.objects, resourceOf(o)+"/"+o.GetNamespace()+"/"+o.GetName())
	s.noteLocked("DELETED", o)
}

// do changes how the server behaves, and ends the watches that run.
func (s *apiServer) do(how func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	how()
	s.cuts++
	s.changed.Broadcast()
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := r.URL.Query()
	watching := q.Get("watch") == "true"
	s.asked = append(s.asked, fmt.Sprintf("%s watch=%v labels=%s fields=%s", r.URL.Path, watching, q.Get("labelSelector"), q.Get("fieldSelector")))
	refuse := func(status *metav1.Status) {
		status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
		status.Status = metav1.StatusFailure
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(int(status.Code))
		json.NewEncoder(w).Encode(status)
	}
	switch {
	case r.Header.Get("Authorization") != "Bearer secret":
		refuse(&metav1.Status{Code: 401, Reason: metav1.StatusReasonUnauthorized, Message: "Unauthorized"})
		return
	case s.refuses != nil:
		refuse(s.refuses.DeepCopy())
		return
	case q.Get("sendInitialEvents") != "":
		refuse(&metav1.Status{Code: 422, Reason: metav1.StatusReasonInvalid, Message: "sendInitialEvents is forbidden"})
		return
	}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	resource, namespace := parts[len(parts)-1], ""
	if len(parts) > 3 && parts[len(parts)-3] == "namespaces" {
		namespace = parts[len(parts)-2]
	}
	selector, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		refuse(&metav1.Status{Code: 400, Message: err.Error()})
		return
	}
	picks := func(o metav1.Object) bool {
		p, isPod := o.(*corev1.Pod)
		node, wants := strings.CutPrefix(q.Get("fieldSelector"), "spec.nodeName=")
		return resourceOf(o) == resource && (namespace == "" || namespace == o.GetNamespace()) &&
			selector.Matches(labels.Set(o.GetLabels())) && (!wants || isPod && p.Spec.NodeName == node)
	}
	w.Header().Set("Content-Type", "application/json")
	kind, group := map[string]string{"pods": "PodList", "endpointslices": "EndpointSliceList"}[resource], "v1"
	if resource == "endpointslices" {
		group = "discovery.k8s.io/v1"
	}
	if !watching {
		items := []metav1.Object{}
		for _, o := range s.objects {
			if picks(o) {
				items = append(items, o)
			}
		}
		json.NewEncoder(w).Encode(map[string]any{"kind": kind, "apiVersion": group,
			"metadata": map[string]string{"resourceVersion": strconv.Itoa(s.version)}, "items": items})
		return
	}
	send := func(kind string, object any) {
		json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": object})
		w.(http.Flusher).Flush()
	}
	from, _ := strconv.Atoi(q.Get("resourceVersion"))
	w.(http.Flusher).Flush()
	if from < s.forgot {
		send("ERROR", metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: 410, Reason: metav1.StatusReasonExpired, Message: "too old resource version"})
		return
	}
	gone := false
	unhook := context.AfterFunc(r.Context(), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		gone = true
		s.changed.Broadcast()
	})
	defer unhook()
	s.watches++
	s.changed.Broadcast()
	defer func() { s.watches-- }()
	for cuts := s.cuts; cuts == s.cuts && !gone && !s.closed; s.changed.Wait() {
		for _, c := range s.history {
			if c.version <= from || !picks(c.object) {
				continue
			}
			from = c.version
			object := map[string]any{}
			text, _ := json.Marshal(c.object)
			json.Unmarshal(text, &object)
			object["apiVersion"], object["kind"] = group, strings.TrimSuffix(kind, "List")
			send(c.kind, object)
		}
	}
}

// endpointSlice is one of the service vllm; an endpoint is pod@address:port, with
// ! behind it when it is not ready and ~ when it is terminating.
func endpointSlice(t *testing.T, name string, endpoints ...string) *discoveryv1.EndpointSlice {
	t.Helper()
	o := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "serving", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "vllm"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, text := range endpoints {
		bare := strings.TrimRight(text, "!~")
		pod, at, _ := strings.Cut(bare, "@")
		host, port, _ := strings.Cut(at, ":")
		n, err := strconv.ParseInt(port, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		number, portName := int32(n), "http"
		o.Ports = []discoveryv1.EndpointPort{{Name: &portName, Port: &number}}
		ready, ending := !strings.Contains(text, "!"), strings.Contains(text, "~")
		takes := ready && !ending
		o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{host},
			Conditions: discoveryv1.EndpointConditions{Ready: &takes, Serving: &ready, Terminating: &ending},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "serving", Name: pod, UID: types.UID("uid-" + pod)},
		})
	}
	return o
}

// follower follows one source, and keeps what it reports.
type follower struct {
	mu      sync.Mutex
	found   string
	err     string
	reports int
}

func follow(t *testing.T, c KubernetesConfig) *follower {
	t.Helper()
	f := &follower{found: "nothing yet"}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		again := &wait.Backoff{Duration: 5 * time.Millisecond, Factor: 1.1, Steps: 1000, Cap: 100 * time.Millisecond}
		(&kubernetes{KubernetesConfig: c, again: again}).watch(ctx, func(found []finding, err error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.reports++
			if found != nil {
				var words []string
				for _, one := range found {
					words = append(words, one.ID+"@"+strings.TrimPrefix(one.URL, "http://"))
				}
				f.found = strings.Join(words, " ")
			}
			f.err = ""
			if err != nil {
				f.err = err.Error()
			}
		})
	})
	t.Cleanup(func() { cancel(); done.Wait() })
	return f
}

func (f *follower) expect(t *testing.T, found, failure string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	eventuallyLocked(t, &f.mu, func() bool {
		return f.found == found && (failure == "" && f.err == "" || failure != "" && strings.Contains(f.err, failure))
	}, func() string {
		return fmt.Sprintf("found %q, failure %q; want %q and %q", f.found, f.err, found, failure)
	})
}

// eventuallyLocked is eventually for what mu guards, which is held.
func eventuallyLocked(t *testing.T, mu *sync.Mutex, ok func() bool, why func() string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(end) {
			t.Fatal(why())
		}
		mu.Unlock()
		time.Sleep(5 * time.Millisecond)
		mu.Lock()
	}
}

func TestKubernetesWatch(t *testing.T) {
	s := startAPIServer(t)
	s.put(endpointSlice(t, "vllm-1", "a@10.0.0.1:8000"))
	f := follow(t, KubernetesConfig{Service: "vllm", Kubeconfig: s.file})
	f.expect(t, "serving/a:8000@10.0.0.1:8000", "")
	s.put(endpointSlice(t, "vllm-2", "b@10.0.0.2:8000"))
	f.expect(t, "serving/a:8000@10.0.0.1:8000 serving/b:8000@10.0.0.2:8000", "")
	s.put(endpointSlice(t, "vllm-1", "a@10.0.0.1:8000~"))
	f.expect(t, "serving/b:8000@10.0.0.2:8000", "")
	// Another service's.
	other := endpointSlice(t, "tgi-1", "c@10.0.0.3:8000")
	other.Labels[discoveryv1.LabelServiceName] = "tgi"
	s.put(other)

	// The server breaks the watch, forgets what has changed since, and then fails.
	s.do(func() { s.forgot, s.history = 1<<30, nil })
	s.mu.Lock()
	s.forgot = s.version
	s.mu.Unlock()
	s.put(endpointSlice(t, "vllm-1", "d@10.0.0.4:8000"))
	f.expect(t, "serving/b:8000@10.0.0.2:8000 serving/d:8000@10.0.0.4:8000", "")
	s.do(func() {
		s.refuses = &metav1.Status{Code: 500, Reason: metav1.StatusReasonInternalError, Message: "etcd is gone"}
	})
	f.expect(t, "serving/b:8000@10.0.0.2:8000 serving/d:8000@10.0.0.4:8000", "etcd is gone")
	s.remove(endpointSlice(t, "vllm-1"))
	s.do(func() { s.refuses = nil })
	f.expect(t, "serving/b:8000@10.0.0.2:8000", "")

	s.do(func() {
		s.refuses = &metav1.Status{Code: 403, Reason: metav1.StatusReasonForbidden, Message: `User "u" cannot list resource "endpointslices"`}
	})
	f.expect(t, "serving/b:8000@10.0.0.2:8000", `the agent may not read endpointslices of namespace serving: its service account needs a role with the verbs get, list and watch on endpointslices (the API server says: User "u" cannot list resource "endpointslices")`)
	s.do(func() { s.refuses = nil })
	f.expect(t, "serving/b:8000@10.0.0.2:8000", "")
	// What the server says is gone, is.
	s.put(endpointSlice(t, "vllm-2"))
	f.expect(t, "", "")
	s.remove(endpointSlice(t, "vllm-2"))
	f.expect(t, "", "service vllm has no EndpointSlice")
}

// Whatever happens to slices and watches, in the end the engines are those that
// a simple reading of what there is finds.
func TestKubernetesHistory(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	s := startAPIServer(t)
	f := follow(t, KubernetesConfig{Service: "vllm", Kubeconfig: s.file})
	inUse := map[string][]string{} // slice -> endpoints
	for round := range 6 {
		for range 20 {
			name := fmt.Sprintf("vllm-%d", rnd.IntN(4))
			switch n := rnd.IntN(10); {
			case n < 6 || inUse[name] == nil:
				endpoints := []string{}
				for pod := range 6 {
					if rnd.IntN(2) == 0 {
						endpoints = append(endpoints, fmt.Sprintf("p%d@10.0.0.%d:8000%s", pod, pod+1, []string{"", "", "!", "~", "!~"}[rnd.IntN(5)]))
					}
				}
				inUse[name] = endpoints
				s.put(endpointSlice(t, name, endpoints...))
			case n < 8:
				delete(inUse, name)
				s.remove(endpointSlice(t, name))
			case n < 9:
				s.do(func() {}) // the watch ends
			default:
				s.do(func() { s.forgot, s.history = s.version, nil })
			}
		}
		// A pod is as its worst endpoint says.
		bad, ending, there := map[int]bool{}, map[int]bool{}, map[int]bool{}
		for _, endpoints := range inUse {
			for _, e := range endpoints {
				pod := int(e[1] - '0')
				there[pod] = true
				bad[pod] = bad[pod] || strings.Contains(e, "!")
				ending[pod] = ending[pod] || strings.Contains(e, "~")
			}
		}
		var fresh, last []string
		for pod := range 6 {
			id := fmt.Sprintf("serving/p%d:8000@10.0.0.%d:8000", pod, pod+1)
			switch {
			case !there[pod] || bad[pod]:
			case ending[pod]:
				last = append(last, id)
			default:
				fresh = append(fresh, id)
			}
		}
		if len(fresh) == 0 {
			fresh = last
		}
		failure := ""
		if len(inUse) == 0 {
			failure = "has no EndpointSlice"
		}
		t.Logf("round %d: %v", round, inUse)
		f.expect(t, strings.Join(fresh, " "), failure)
	}
}

func TestKubernetesAsksForWhatItNeeds(t *testing.T) {
	t.Setenv(nodeName, "here")
	s := startAPIServer(t)
	o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "p", Labels: map[string]string{"app": "vllm"}}}
	o.Spec.NodeName = "here"
	o.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.9", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	s.put(o)
	elsewhere := o.DeepCopy()
	elsewhere.Name, elsewhere.Spec.NodeName, elsewhere.Status.PodIP = "q", "there", "10.0.0.8"
	s.put(elsewhere)
	f := follow(t, KubernetesConfig{Pods: "app=vllm", Namespace: "*", Port: "8000", NodeLocal: true, Kubeconfig: s.file})
	f.expect(t, "other/p:8000@10.0.0.9:8000", "")
	s.mu.Lock()
	eventuallyLocked(t, &s.mu, func() bool { return s.watches == 1 }, func() string { return "nobody watches" })
	for _, asked := range s.asked {
		if !strings.HasPrefix(asked, "/api/v1/pods watch=") || !strings.HasSuffix(asked, " labels=app=vllm fields=spec.nodeName=here") {
			t.Errorf("asked for %s", asked)
		}
	}
	s.mu.Unlock()

	t.Setenv(nodeName, "")
	f = follow(t, KubernetesConfig{Pods: "app=vllm", NodeLocal: true, Kubeconfig: s.file})
	f.expect(t, "nothing yet", "node_local wants the name of this node in the environment variable NODE_NAME")
	f = follow(t, KubernetesConfig{Pods: "app=vllm", Kubeconfig: filepath.Join(t.TempDir(), "none")})
	f.expect(t, "nothing yet", "none: no such file or directory")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	f = follow(t, KubernetesConfig{Pods: "app=vllm"})
	f.expect(t, "nothing yet", "the agent does not run in a pod of Kubernetes; set kubeconfig")
	// A server that is not there.
	s.mu.Lock()
	s.closed = true
	s.changed.Broadcast()
	s.mu.Unlock()
	s.Close()
	f = follow(t, KubernetesConfig{Pods: "app=vllm", Kubeconfig: s.file})
	f.expect(t, "nothing yet", "the API server cannot be asked for pods of namespace serving: dial: connect: connection refused")
}

// Engines come and go in a Service while streams run: those that leave finish
// what they stream; and an API server that fails takes none away.
func TestKubernetesMembersComeAndGo(t *testing.T) {
	start := func() *simulator.Server {
		server, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, TimePerOutputToken: 20 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { server.Close() })
		return server
	}
	one, two := start(), start()
	s := startAPIServer(t)
	s.put(endpointSlice(t, "vllm-1", "one@"+one.Addr()))
	c := quick()
	c.Listen, c.AdminListen = "127.0.0.1:0", "127.0.0.1:0"
	c.Datapath.Mode = "copy"
	c.Discovery.Kubernetes = []KubernetesConfig{{Service: "vllm", Kubeconfig: s.file, Models: []string{"m"}}}
	a := startAgent(t, *c)
	defer stopped(t, a)
	ids := func() string {
		var out []string
		for _, m := range a.fleet.current().Listed {
			for _, r := range m.Replicas {
				out = append(out, r.ID)
			}
		}
		return strings.Join(out, " ")
	}
	expect := func(want string) {
		t.Helper()
		eventually(t, func() bool { return ids() == want }, func() string { return fmt.Sprintf("m is served by %q, want %q", ids(), want) })
	}
	id := func(pod string, e *simulator.Server) string {
		return fmt.Sprintf("serving/%s:%d", pod, portOf(t, e.Addr()))
	}
	expect(id("one", one))
	resp := ask(t, a, 100)
	in := bufio.NewReader(resp.Body)
	if line, err := in.ReadString('\n'); err != nil || resp.StatusCode != 200 {
		t.Fatalf("status %d, %q, %v", resp.StatusCode, line, err)
	}
	s.put(endpointSlice(t, "vllm-2", "two@"+two.Addr()))
	s.put(endpointSlice(t, "vllm-1", "one@"+one.Addr()+"~"))
	expect(id("two", two))

	s.do(func() {
		s.refuses = &metav1.Status{Code: 403, Reason: metav1.StatusReasonForbidden, Message: "RBAC: no"}
	})
	eventually(t, func() bool {
		status, body := page(t, a, "/readyz")
		return status == http.StatusOK && strings.Contains(body, "discovery kubernetes:vllm fails (the agent may not read endpointslices of namespace serving")
	}, func() string { _, body := page(t, a, "/readyz"); return "the failure is not named: " + body })
	// Another configuration of the same engines, while the server fails, keeps them.
	next := *a.cfg.Load()
	next.Discovery.Kubernetes = slices.Clone(next.Discovery.Kubernetes)
	next.Discovery.Kubernetes[0].MaxConcurrency = 7
	if err := a.fleet.reconfigure(&next); err != nil {
		t.Fatal(err)
	}
	expect(id("two", two))
	a.fleet.mu.Lock()
	for _, m := range a.fleet.members {
		if m.cfg.MaxConcurrency != 7 {
			t.Errorf("max_concurrency of %s is %d", m.id, m.cfg.MaxConcurrency)
		}
	}
	a.fleet.mu.Unlock()
	s.do(func() { s.refuses = nil })
	eventually(t, func() bool { _, body := page(t, a, "/readyz"); return body == "ok\n" }, func() string {
		_, body := page(t, a, "/readyz")
		return body
	})

	// A kubeconfig that says something else is used: the first server has gone.
	other := startAPIServer(t)
	other.put(endpointSlice(t, "vllm-1", "one@"+one.Addr()))
	text, err := os.ReadFile(other.file)
	if err == nil {
		err = os.WriteFile(s.file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Reload(next); err != nil {
		t.Fatal(err)
	}
	expect(id("one", one))
	rest, err := io.ReadAll(in)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Fatalf("the stream was cut: %v", err)
	}
}

// Whoever may make a pod writes its annotations, as large as Kubernetes lets them be:
// neither the agent's memory nor its log nor its time are theirs.
func TestKubernetesHostileAnnotations(t *testing.T) {
	const largest = 256 << 10 // of all annotations of an object
	o := &corev1.Pod{}
	o.Namespace, o.Name, o.UID = "serving", "vllm-0", "u0"
	o.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	f := func(port PodPort, annotations map[string]string, want string) {
		t.Helper()
		o.Annotations = annotations
		lean(o)
		found, err := (&kubernetes{KubernetesConfig: KubernetesConfig{Pods: "app=vllm", Port: port}}).findings([]any{o})
		if err == nil {
			err = errors.New("")
		}
		if !strings.Contains(err.Error(), want) || len(err.Error()) > 1000 {
			t.Errorf("says %.300q, which is %d bytes, want %q", err, len(err.Error()), want)
		}
		for _, r := range found {
			if len(r.Models) > mostHintModels {
				t.Errorf("%d models", len(r.Models))
			}
		}
	}
	var many strings.Builder
	for i := 0; many.Len() < largest-100; i++ {
		fmt.Fprint(&many, i, ",")
	}
	f("8000", map[string]string{hintPrefix + "models": many.String() + "x"}, "want at most 256 names")
	f("8000", map[string]string{hintPrefix + "engine": strings.Repeat("x", largest)}, "want vllm")
	f("", map[string]string{hintPrefix + "port": strings.Repeat("x", largest)}, "neither a number")
	unknown := map[string]string{}
	for i := range largest / 24 {
		unknown[hintPrefix+strconv.Itoa(1e6+i)] = ""
	}
	f("8000", unknown, "and 10919 more like these")
	f("8000", map[string]string{hintPrefix + "models": "m", "kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("x", largest)}, "")
	if len(o.Annotations) != 1 {
		t.Errorf("%d annotations are kept", len(o.Annotations))
	}
}
