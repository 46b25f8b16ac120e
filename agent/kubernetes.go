package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// KubernetesConfig is engines in a Kubernetes cluster: the endpoints of a
// Service, or the pods that a label selector picks; one replica for each pod.
type KubernetesConfig struct {
	// Service names a Service; Pods is a label selector. One of them is set.
	Service string `yaml:"service"`
	Pods    string `yaml:"pods"`
	// Namespace they are in; the agent's own when empty. Pods may be looked for
	// in all, "*".
	Namespace string `yaml:"namespace"`
	// Port of the pods, by number or by the name that the Service or the
	// container gives it. It may be left out when there is one only.
	Port PodPort `yaml:"port"`
	// NodeLocal leaves out what is not on the agent's node, whose name is in the
	// environment variable nodeName.
	NodeLocal bool `yaml:"node_local"`
	// Condition of a pod that must be true for it to get requests; Ready when
	// empty. Of a Service's endpoints Kubernetes itself says whether they are.
	Condition string `yaml:"condition"`
	// Kubeconfig is a file that says where the cluster is; without one it is that
	// in which the agent runs.
	Kubeconfig string `yaml:"kubeconfig"`

	// As in ReplicaConfig, for each replica that is found. What a pod says of
	// itself goes first: see hints.
	Engine         string         `yaml:"engine"`
	Models         []string       `yaml:"models"`
	APIKey         string         `yaml:"api_key" secret:"yes"`
	APIKeyFile     string         `yaml:"api_key_file"`
	MaxConcurrency int            `yaml:"max_concurrency"`
	MaxPending     int            `yaml:"max_pending"`
	KVEvents       KVEventsConfig `yaml:"kv_events"`
}

// PodPort is the number of a port, or its name.
type PodPort string

const (
	// nodeName is the environment variable with the name of the agent's node.
	nodeName = "NODE_NAME"
	// allNamespaces is KubernetesConfig.Namespace for pods of every namespace.
	allNamespaces = "*"
	// callTime bounds a list, and the time until a watch begins. Lists of large
	// clusters take seconds.
	callTime = 30 * time.Second
	// gather is how long a change waits for others: a rollout is many.
	gather = 20 * time.Millisecond
	// namespaceFile tells a pod its namespace.
	namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
)

// Name is what people know the source by.
func (c *KubernetesConfig) Name() string {
	name := c.Service
	if c.Pods != "" {
		name = "pods/" + c.Pods
	}
	if c.Namespace != "" {
		name = c.Namespace + "/" + name
	}
	return name
}

// entry tells it from the other sources of a configuration.
func (c *KubernetesConfig) entry() string {
	text := c.Name()
	if c.Port != "" {
		text += " " + string(c.Port)
	}
	if c.NodeLocal {
		text += " node_local"
	}
	if c.Kubeconfig != "" {
		text += " " + c.Kubeconfig
	}
	return text
}

// sameEngines tells whether the other configuration looks at the same ports of
// the same pods.
func (c *KubernetesConfig) sameEngines(other *KubernetesConfig) bool {
	return c.Service == other.Service && c.Pods == other.Pods && c.Namespace == other.Namespace && c.Port == other.Port &&
		c.NodeLocal == other.NodeLocal
}

func (c *KubernetesConfig) validate(p *problems, path string) {
	switch {
	case c.Service == "" && c.Pods == "":
		p.add(path, "names neither a service nor pods; want service: NAME, or pods: LABEL=VALUE")
	case c.Service != "" && c.Pods != "":
		p.add(path+".pods", "is set beside service; remove one of them")
	case c.Service != "":
		if why := validation.IsDNS1123Label(c.Service); why != nil {
			p.add(path+".service", "%q is no name of a Service; want such as vllm, and its namespace as namespace", c.Service)
		}
		if c.Condition != "" {
			p.add(path+".condition", "is set, and is for pods only: Kubernetes says which endpoints of a service are ready. Remove it")
		}
	default:
		if selector, err := labels.Parse(c.Pods); err != nil {
			p.add(path+".pods", "%q is not a label selector; want such as app=vllm,tier!=test (%v)", c.Pods, err)
		} else if selector.Empty() {
			p.add(path+".pods", "%q picks every pod; want such as app=vllm", c.Pods)
		}
		if why := validation.IsQualifiedName(c.Condition); c.Condition != "" && why != nil {
			p.add(path+".condition", "%q is no name of a condition; want such as Ready", c.Condition)
		}
	}
	if c.Namespace == allNamespaces {
		if c.Service != "" {
			p.add(path+".namespace", "a service is in one namespace; want its name, or pods in place of service")
		}
	} else if why := validation.IsDNS1123Label(c.Namespace); c.Namespace != "" && why != nil {
		p.add(path+".namespace", "%q is no name of a namespace", c.Namespace)
	}
	if why := c.Port.problem(); why != "" {
		p.add(path+".port", "%s", why)
	}
	p.engine(path, engineKeys{c.Engine, c.Models, c.APIKey, c.APIKeyFile, c.MaxConcurrency, c.MaxPending})
}

func (p PodPort) problem() string {
	if p == "" {
		return ""
	}
	if n, err := strconv.Atoi(string(p)); err == nil {
		if n < 1 || n > 65535 {
			return fmt.Sprintf("%d is not between 1 and 65535", n)
		}
		return ""
	}
	if why := validation.IsDNS1123Label(string(p)); why != nil {
		return fmt.Sprintf("%.100q is neither a number nor the name of a port, such as http", string(p))
	}
	return ""
}

// number is the port's number, 0 when it is a name.
func (p PodPort) number() int32 {
	n, err := strconv.ParseInt(string(p), 10, 32)
	if err != nil {
		return 0
	}
	return int32(n)
}

// kubernetes is one source of discovery: what one KubernetesConfig finds. It is
// made for a call of watch, and used on that goroutine.
type kubernetes struct {
	KubernetesConfig
	// at is the address by which each pod was found last, so that one with
	// several does not become another engine when they are told one by one.
	at map[string]string
	// again is the pause before the server is asked again that has failed; the
	// zero value is client-go's, 0.8 s at first and up to a minute.
	again *wait.Backoff
}

// silence keeps client-go from writing to the standard error. Its calls return
// what went wrong.
var silence sync.Once

// watch follows the pods, until ctx is done. It takes nothing away while the API
// server fails; what the server says is gone, is.
func (k *kubernetes) watch(ctx context.Context, report func([]finding, error)) {
	silence.Do(func() { klog.SetSlogLogger(slog.New(slog.DiscardHandler)) })
	for {
		err := k.follow(ctx, report)
		if ctx.Err() != nil {
			return
		}
		report(nil, err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(afterFailure):
		}
	}
}

// follow returns why it cannot begin; else it reports until ctx is done.
func (k *kubernetes) follow(ctx context.Context, report func([]finding, error)) error {
	lw, err := k.connect()
	if err != nil {
		return err
	}
	defer lw.close()
	example := runtime.Object(&discoveryv1.EndpointSlice{})
	if k.Pods != "" {
		example = &corev1.Pod{}
	}
	m := &mirror{changed: lw.changed}
	reflector := cache.NewReflectorWithOptions(lw, example, m, cache.ReflectorOptions{Name: k.Name(), Backoff: k.again})
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { reflector.RunWithContext(ctx) })
	defer running.Wait()
	defer cancel()

	for {
		select {
		case <-ctx.Done():
			return nil
		case <-lw.changed:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(gather):
		}
		failure := lw.failure()
		objects, complete := m.list()
		if !complete {
			if failure != nil {
				report(nil, failure)
			}
			continue
		}
		found, problems := k.findings(objects)
		report(found, errors.Join(failure, problems))
	}
}

// mirror is the objects that there are in the cluster, as far as they are looked
// at, and without what takes most of their memory. A reflector of client-go fills
// it, one call at a time; list may be called beside that. The objects are not
// changed any more.
type mirror struct {
	changed chan<- struct{} // is poked at each change

	mu       sync.Mutex     // guards the rest
	objects  map[string]any // by namespace and name
	complete bool           // all have been told once
}

func (m *mirror) set(object any) error {
	lean(object)
	return m.change(object, func(key string) { m.objects[key] = object })
}

func (m *mirror) change(object any, how func(key string)) error {
	key, err := cache.MetaNamespaceKeyFunc(object)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects == nil {
		m.objects = map[string]any{}
	}
	how(key)
	poke(m.changed)
	return nil
}

// Add, Update, Delete, Replace and Resync implement cache.ReflectorStore.
func (m *mirror) Add(object any) error    { return m.set(object) }
func (m *mirror) Update(object any) error { return m.set(object) }

func (m *mirror) Delete(object any) error {
	return m.change(object, func(key string) { delete(m.objects, key) })
}

func (m *mirror) Replace(list []any, _ string) error {
	objects := make(map[string]any, len(list))
	for _, object := range list {
		key, err := cache.MetaNamespaceKeyFunc(object)
		if err != nil {
			return err
		}
		lean(object)
		objects[key] = object
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.objects, m.complete = objects, true
	poke(m.changed)
	return nil
}

func (*mirror) Resync() error { return nil }

func (m *mirror) list() (objects []any, complete bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.objects)), m.complete
}

// poke wakes who waits at the channel, which has room for one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// listWatch are the calls of a reflector, of which it remembers whether the last
// one has failed. close ends it. The reflector makes one call at a time; failure
// may be called beside them.
type listWatch struct {
	*cache.ListWatch
	client   *rest.RESTClient
	what     string        // for people
	resource string        // of which rights are needed
	changed  chan struct{} // is poked when the failure is another
	// unwatch ends the last watch, and frees what it holds.
	unwatch context.CancelFunc

	mu  sync.Mutex // guards err
	err error
}

// connect makes the client. It does not yet call the server.
func (k *kubernetes) connect() (*listWatch, error) {
	conf, namespace, err := k.cluster()
	if err != nil {
		return nil, err
	}
	node := os.Getenv(nodeName)
	if k.NodeLocal && node == "" {
		return nil, fmt.Errorf("node_local wants the name of this node in the environment variable %s; give it by fieldRef: spec.nodeName", nodeName)
	}
	resource, group, modify := "endpointslices", discoveryv1.SchemeGroupVersion, func(o *metav1.ListOptions) {
		o.LabelSelector = discoveryv1.LabelServiceName + "=" + k.Service
	}
	conf.APIPath = "/apis"
	if k.Pods != "" {
		resource, group, modify = "pods", corev1.SchemeGroupVersion, func(o *metav1.ListOptions) {
			o.LabelSelector = k.Pods
			if k.NodeLocal {
				o.FieldSelector = "spec.nodeName=" + node
			}
		}
		conf.APIPath = "/api"
	}
	kinds := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(kinds), discoveryv1.AddToScheme(kinds)); err != nil {
		return nil, err
	}
	metav1.AddToGroupVersion(kinds, schema.GroupVersion{Version: "v1"})
	conf.GroupVersion = &group
	conf.NegotiatedSerializer = serializer.NewCodecFactory(kinds).WithoutConversion()
	conf.UserAgent = "inferrail"
	conf.WarningHandler = rest.NoWarnings{}
	client, err := rest.RESTClientFor(conf)
	if err != nil {
		return nil, fmt.Errorf("the API server %s cannot be asked: %w", conf.Host, err)
	}
	where := " of namespace " + namespace
	if namespace == allNamespaces {
		namespace, where = metav1.NamespaceAll, " of all namespaces"
	}
	return &listWatch{
		ListWatch: cache.NewFilteredListWatchFromClient(client, resource, namespace, modify),
		client:    client, resource: resource, what: resource + where,
		changed: make(chan struct{}, 1), unwatch: func() {},
	}, nil
}

// cluster tells where the API server is, and the namespace.
func (k *kubernetes) cluster() (conf *rest.Config, namespace string, err error) {
	if k.Kubeconfig != "" {
		loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: k.Kubeconfig}, &clientcmd.ConfigOverrides{})
		if conf, err = loader.ClientConfig(); err != nil {
			return nil, "", fmt.Errorf("kubeconfig %s: %w", k.Kubeconfig, err)
		}
		if namespace, _, err = loader.Namespace(); err != nil {
			return nil, "", fmt.Errorf("kubeconfig %s: %w", k.Kubeconfig, err)
		}
	} else {
		conf, err = rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, "", errors.New("the agent does not run in a pod of Kubernetes; set kubeconfig")
		}
		if err != nil {
			return nil, "", fmt.Errorf("the service account of the pod cannot be used: %w", err)
		}
		if own, err := os.ReadFile(namespaceFile); err == nil {
			namespace = strings.TrimSpace(string(own))
		}
	}
	return conf, cmp.Or(k.Namespace, namespace, metav1.NamespaceDefault), nil
}

func (lw *listWatch) close() {
	lw.unwatch()
	if lw.client.Client != nil {
		utilnet.CloseIdleConnectionsFor(lw.client.Client.Transport)
	}
}

// ListWithContext implements cache.ListerWithContext.
func (lw *listWatch) ListWithContext(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	lw.unwatch()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	list, err := lw.ListWatch.ListWithContext(ctx, options)
	lw.called(err)
	return list, err
}

// WatchWithContext implements cache.WatcherWithContext.
func (lw *listWatch) WatchWithContext(ctx context.Context, options metav1.ListOptions) (apiwatch.Interface, error) {
	lw.unwatch()
	ctx, lw.unwatch = context.WithCancel(ctx)
	late := time.AfterFunc(callTime, lw.unwatch)
	w, err := lw.ListWatch.WatchWithContext(ctx, options)
	if !late.Stop() && err == nil {
		w.Stop()
		w, err = nil, errSilent
	}
	// A server that cannot begin a watch with what there is (before 1.32) says so,
	// and is asked for a list. One at which a watch has expired is too.
	if old := options.SendInitialEvents != nil && apierrors.IsInvalid(err); !old && !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		lw.called(err)
	}
	return w, err
}

// called notes what became of a call.
func (lw *listWatch) called(err error) {
	if err != nil {
		err = lw.explain(err)
	}
	lw.mu.Lock()
	defer lw.mu.Unlock()
	if fmt.Sprint(lw.err) != fmt.Sprint(err) {
		lw.err = err
		poke(lw.changed)
	}
}

func (lw *listWatch) failure() error {
	lw.mu.Lock()
	defer lw.mu.Unlock()
	return lw.err
}

// explain says what an error of the API server asks for.
func (lw *listWatch) explain(err error) error {
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("the agent may not read %s: its service account needs a role with the verbs get, list and watch on %s (the API server says: %w)", lw.what, lw.resource, err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server does not take the agent's credentials: the token of the service account or the kubeconfig is out of date (%w)", err)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("the API server knows no %s; Kubernetes 1.21 or later has them (%w)", lw.resource, err)
	case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
		return fmt.Errorf("the API server says: %w", err)
	}
	return fmt.Errorf("the API server cannot be asked for %s: %w", lw.what, plainError(err))
}

// lean takes from an object what is not looked at and takes most of its memory.
func lean(object any) {
	switch o := object.(type) {
	case *discoveryv1.EndpointSlice:
		leanMeta(&o.ObjectMeta)
	case *corev1.Pod:
		leanMeta(&o.ObjectMeta)
		o.Spec = corev1.PodSpec{Containers: o.Spec.Containers, InitContainers: o.Spec.InitContainers, NodeName: o.Spec.NodeName}
		for _, list := range [][]corev1.Container{o.Spec.Containers, o.Spec.InitContainers} {
			for i, c := range list {
				list[i] = corev1.Container{Name: c.Name, Ports: c.Ports, RestartPolicy: c.RestartPolicy}
			}
		}
		o.Status = corev1.PodStatus{Phase: o.Status.Phase, Conditions: o.Status.Conditions, PodIP: o.Status.PodIP, PodIPs: o.Status.PodIPs}
	}
}

// leanMeta leaves of labels and annotations the hints: kubectl keeps whole
// manifests in the latter.
func leanMeta(o *metav1.ObjectMeta) {
	o.ManagedFields = nil
	other := func(key, _ string) bool { return !strings.HasPrefix(key, hintPrefix) }
	maps.DeleteFunc(o.Labels, other)
	maps.DeleteFunc(o.Annotations, other)
}

// pod is an engine that may be sent requests, or may not yet, or no more.
type pod struct {
	id    string // of the replica, without the port
	key   string // the same pod's
	addrs []string
	port  int32
	ready bool
	// ending pods answer still, and are to be left. They are used while nobody
	// else is ready, as kube-proxy does.
	ending bool
	hints  []map[string]string // the first that has one goes
	about  string              // for people
}

// findings makes replicas of what is in the cluster. The error names what it
// could not make one of; nothing is left out without being named.
func (k *kubernetes) findings(objects []any) ([]finding, error) {
	var list []*pod
	var problems complaints
	if k.Pods != "" {
		list = k.pods(objects, &problems)
	} else {
		list = k.endpoints(objects, &problems)
	}
	ready := slices.ContainsFunc(list, func(p *pod) bool { return p.ready && !p.ending })
	at := map[string]string{}
	out := []finding{}
	for _, p := range list {
		if !p.ready || ready && p.ending {
			continue
		}
		addr := p.addrs[0]
		if was := k.at[p.key]; slices.Contains(p.addrs, was) {
			addr = was
		}
		at[p.key] = addr
		port := strconv.Itoa(int(p.port))
		f := finding{ReplicaConfig: ReplicaConfig{ID: p.id + ":" + port, URL: "http://" + net.JoinHostPort(addr, port)}}
		for _, other := range p.addrs {
			if other != addr {
				f.also = append(f.also, net.JoinHostPort(other, port))
			}
		}
		f.hints = hintsOf(p, &problems)
		k.set(&f)
		out = append(out, f)
	}
	k.at = at
	slices.SortFunc(out, func(a, b finding) int { return strings.Compare(a.ID, b.ID) })
	out = slices.CompactFunc(out, func(a, b finding) bool { return a.ID == b.ID })
	return out, problems.err()
}

// set gives a finding the keys of the configuration, and above them its hints.
func (c *KubernetesConfig) set(f *finding) {
	r := &f.ReplicaConfig
	*r = ReplicaConfig{
		ID: r.ID, URL: r.URL, Engine: c.Engine, Models: c.Models, APIKey: c.APIKey, APIKeyFile: c.APIKeyFile,
		MaxConcurrency: c.MaxConcurrency, MaxPending: c.MaxPending, KVEvents: c.KVEvents,
	}
	for name, value := range f.hints {
		hints[name](r, value)
	}
	if r.MaxConcurrency == 0 {
		r.MaxPending = 0
	}
}

// pods reads pods.
func (k *kubernetes) pods(objects []any, problems *complaints) []*pod {
	condition := corev1.PodConditionType(cmp.Or(k.Condition, string(corev1.PodReady)))
	var list []*pod
	for _, object := range sorted(objects) {
		o, ok := object.(*corev1.Pod)
		if !ok {
			continue
		}
		p := &pod{
			id: o.Namespace + "/" + o.Name, key: string(o.UID), about: "pod " + o.Namespace + "/" + o.Name,
			hints: []map[string]string{o.Annotations, o.Labels}, ending: o.DeletionTimestamp != nil,
			ready: o.Status.Phase == corev1.PodRunning && slices.ContainsFunc(o.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == condition && c.Status == corev1.ConditionTrue
			}),
		}
		for _, ip := range o.Status.PodIPs {
			p.addrs = append(p.addrs, ip.IP)
		}
		if len(p.addrs) == 0 && o.Status.PodIP != "" {
			p.addrs = []string{o.Status.PodIP}
		}
		if !p.ready || len(p.addrs) == 0 {
			continue
		}
		var err error
		if p.port, err = k.portOf(o); err != nil {
			problems.add("%s: %v", p.about, err)
			continue
		}
		list = append(list, p)
	}
	return list
}

// portOf finds the port of a pod.
func (k *kubernetes) portOf(o *corev1.Pod) (int32, error) {
	want := k.Port
	for _, from := range []map[string]string{o.Annotations, o.Labels} {
		if hint, ok := from[hintPrefix+"port"]; ok {
			want = PodPort(hint)
			if why := want.problem(); why != "" {
				return 0, fmt.Errorf("%sport: %s", hintPrefix, why)
			}
			break
		}
	}
	if n := want.number(); n != 0 {
		return n, nil
	}
	var ports []discoveryv1.EndpointPort
	containers := slices.Clone(o.Spec.Containers)
	for _, c := range o.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			containers = append(containers, c)
		}
	}
	for _, c := range containers {
		for _, p := range c.Ports {
			ports = append(ports, discoveryv1.EndpointPort{Name: &p.Name, Port: &p.ContainerPort, Protocol: &p.Protocol})
		}
	}
	return want.among(ports, "the pod's containers")
}

// among finds the port in those that a Service or a pod has.
func (p PodPort) among(ports []discoveryv1.EndpointPort, whose string) (int32, error) {
	var usable []discoveryv1.EndpointPort
	var names []string
	for _, port := range ports {
		if port.Port == nil || port.Protocol != nil && *port.Protocol != corev1.ProtocolTCP && *port.Protocol != "" {
			continue
		}
		usable = append(usable, port)
		name := strconv.Itoa(int(*port.Port))
		if port.Name != nil && *port.Name != "" {
			name = *port.Name + " (" + name + ")"
		}
		names = append(names, name)
	}
	number := p.number()
	switch {
	case len(usable) == 0 && number != 0:
		return number, nil // as of a headless Service without ports
	case len(usable) == 0:
		return 0, fmt.Errorf("%s name no port; set port to its number", whose)
	case p == "" && len(usable) == 1:
		return *usable[0].Port, nil
	case p == "":
		return 0, fmt.Errorf("%s have several ports, and port is not set: %s", whose, strings.Join(names, ", "))
	}
	for _, port := range usable {
		if number != 0 && *port.Port == number || number == 0 && port.Name != nil && *port.Name == string(p) {
			return *port.Port, nil
		}
	}
	if number != 0 { // most likely it is the Service's
		return 0, fmt.Errorf("%s have no port %s; want that of the pods: %s", whose, p, strings.Join(names, ", "))
	}
	return 0, fmt.Errorf("%s have no port called %s; they have %s", whose, p, strings.Join(names, ", "))
}

// endpoints reads EndpointSlices. One pod has an endpoint in a slice of each
// address family, and for a while in two of one.
func (k *kubernetes) endpoints(objects []any, problems *complaints) []*pod {
	node := os.Getenv(nodeName)
	var list []*pod
	known := map[string]*pod{}
	slicesFound := false
	for _, object := range sorted(objects) {
		s, ok := object.(*discoveryv1.EndpointSlice)
		if !ok {
			continue
		}
		slicesFound = true
		if len(s.Endpoints) == 0 {
			continue // it has no ports either
		}
		port, err := k.Port.among(s.Ports, "the endpoints of service "+k.Service)
		if err != nil {
			problems.add("%v", err)
			continue
		}
		for _, e := range s.Endpoints {
			if len(e.Addresses) == 0 || k.NodeLocal && (e.NodeName == nil || *e.NodeName != node) {
				continue
			}
			addr := e.Addresses[0] // the others are the same, by definition
			p := &pod{key: addr, id: s.Namespace + "/" + k.Service + "/" + addr}
			if strings.Contains(addr, ":") {
				p.id = s.Namespace + "/" + k.Service + "/[" + addr + "]"
			}
			if ref := e.TargetRef; ref != nil && ref.Kind == "Pod" && ref.Name != "" {
				p.id = cmp.Or(ref.Namespace, s.Namespace) + "/" + ref.Name
				p.key = cmp.Or(string(ref.UID), p.id)
			}
			p.key += ":" + strconv.Itoa(int(port))
			p.ready = e.Conditions.Ready == nil || *e.Conditions.Ready
			serving := e.Conditions.Serving
			p.ending = e.Conditions.Terminating != nil && *e.Conditions.Terminating
			if p.ending && serving != nil {
				p.ready = *serving
			}
			p.addrs, p.port = []string{addr}, port
			p.hints, p.about = []map[string]string{s.Labels, s.Annotations}, "service "+s.Namespace+"/"+k.Service
			other := known[p.key]
			if other == nil {
				known[p.key] = p
				list = append(list, p)
				continue
			}
			// The slices are not told at one time. Whichever says that it is not to
			// be used knows something newer, or will soon be told otherwise.
			other.ready, other.ending = other.ready && p.ready, other.ending || p.ending
			if !slices.Contains(other.addrs, addr) {
				other.addrs = append(other.addrs, addr)
			}
		}
	}
	if !slicesFound {
		problems.add("service %s has no EndpointSlice: there is no such service here, or it has no selector", k.Service)
	}
	for _, p := range list {
		slices.SortFunc(p.addrs, compareAddrs)
	}
	return list
}

// compareAddrs puts IPv4 first.
func compareAddrs(a, b string) int {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX != nil || errY != nil {
		return strings.Compare(a, b)
	}
	return x.Compare(y)
}

// sorted orders objects by their names, so that the same ones are always read
// alike.
func sorted(objects []any) []any {
	name := func(o any) string {
		m, ok := o.(metav1.Object)
		if !ok {
			return ""
		}
		return m.GetNamespace() + "/" + m.GetName()
	}
	return slices.SortedFunc(slices.Values(objects), func(a, b any) int { return strings.Compare(name(a), name(b)) })
}

// hintPrefix begins the annotations and labels by which a pod tells of itself,
// and the labels by which a Service does, which Kubernetes puts on its slices.
const hintPrefix = "inferrail.io/"

// mostHintModels bounds the models of such a hint: whoever may make a pod writes it,
// and each model has series of metrics.
const mostHintModels = 256

// hints are what may follow it, and set a key of the replica. What they return
// says what is wrong with the value.
var hints = map[string]func(r *ReplicaConfig, value string) string{
	"engine": func(r *ReplicaConfig, value string) string {
		if !slices.Contains(engines, value) {
			return "want " + strings.Join(engines, ", ")
		}
		r.Engine = value
		return ""
	},
	"models": func(r *ReplicaConfig, value string) string {
		var models []string
		for name := range strings.SplitSeq(value, ",") {
			if len(models) == mostHintModels {
				return fmt.Sprintf("want at most %d names", mostHintModels)
			}
			if name = strings.TrimSpace(name); name == "" || slices.Contains(models, name) {
				return "want names with commas between them, each once"
			}
			models = append(models, name)
		}
		r.Models = models
		return ""
	},
	"max-concurrency": func(r *ReplicaConfig, value string) string { return hintNumber(&r.MaxConcurrency, value, 1<<30) },
	"max-pending":     func(r *ReplicaConfig, value string) string { return hintNumber(&r.MaxPending, value, 1<<30) },
	"kv-blocks":       func(r *ReplicaConfig, value string) string { return hintNumber(&r.KVBlocks, value, mostBlocks) },
	"data-parallel":   func(r *ReplicaConfig, value string) string { return hintNumber(&r.DataParallel, value, mostRanks) },
}

func hintNumber(n *int, value string, most int) string {
	got, err := strconv.Atoi(value)
	if err != nil || got < 0 || got > most {
		return fmt.Sprintf("want a number from 0 to %d", most)
	}
	*n = got
	return ""
}

// hintsOf returns those of a pod that can be used; nil is none.
func hintsOf(p *pod, problems *complaints) map[string]string {
	var out map[string]string
	for _, from := range p.hints {
		for key, value := range from {
			name, ok := strings.CutPrefix(key, hintPrefix)
			if _, given := out[name]; !ok || given || name == "port" {
				continue
			}
			hint, ok := hints[name]
			if !ok {
				problems.add("%s: %s is unknown; known are %sport, and with it %s", p.about, key, hintPrefix, strings.Join(slices.Sorted(maps.Keys(hints)), ", "))
				continue
			}
			if why := hint(&ReplicaConfig{}, value); why != "" {
				problems.add("%s: %s is %.100q; %s", p.about, key, value, why)
				continue
			}
			if out == nil {
				out = map[string]string{}
			}
			out[name] = value
		}
	}
	return out
}

// complaints are what is wrong with objects of the cluster, each said once. The
// zero value is none.
type complaints struct{ said map[string]bool }

func (c *complaints) add(format string, args ...any) {
	if c.said == nil {
		c.said = map[string]bool{}
	}
	c.said[fmt.Sprintf(format, args...)] = true
}

// err names a few; a rollout may bring hundreds.
func (c *complaints) err() error {
	const most = 3
	if len(c.said) == 0 {
		return nil
	}
	list := slices.Sorted(maps.Keys(c.said))
	text := strings.Join(list[:min(most, len(list))], "; ")
	if more := len(list) - most; more > 0 {
		text += fmt.Sprintf("; and %d more like these", more)
	}
	return errors.New(text)
}
