// Package deploy_test checks the files by which an agent is installed.
package deploy_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubejson "sigs.k8s.io/json"

	"github.com/inferrail/inferrail/agent"
)

// helmVersion is that of the Makefile.
const helmVersion = "4.3.2"

// renderings are ways to set the chart's values, and where what it makes of them
// is kept.
var renderings = []struct{ values, golden string }{
	{"", "kubernetes/10-inferrail.yaml"},
	{"testdata/copy.values.yaml", "testdata/copy.yaml"},
	{"testdata/all.values.yaml", "testdata/all.yaml"},
}

// podMonitor mirrors as much of the PodMonitor of the Prometheus operator as is
// used.
type podMonitor struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Selector            metav1.LabelSelector `json:"selector"`
		PodMetricsEndpoints []struct {
			PortNumber    int32  `json:"portNumber"`
			Path          string `json:"path"`
			Interval      string `json:"interval"`
			Authorization struct {
				Credentials corev1.SecretKeySelector `json:"credentials"`
			} `json:"authorization"`
			Relabelings []struct {
				SourceLabels []string `json:"sourceLabels"`
				TargetLabel  string   `json:"targetLabel"`
			} `json:"relabelings"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

// rendered is what the chart makes.
type rendered struct {
	daemonSet       *appsv1.DaemonSet
	configMap       *corev1.ConfigMap
	service         *corev1.Service
	serviceAccount  *corev1.ServiceAccount
	roles           []*rbacv1.Role
	bindings        []*rbacv1.RoleBinding
	clusterRoles    []*rbacv1.ClusterRole
	clusterBindings []*rbacv1.ClusterRoleBinding
	monitor         *podMonitor
	policy          *networkingv1.NetworkPolicy
}

// The manifests are objects of Kubernetes without a key that it does not know,
// and go together with one another and with the agent.
func TestManifests(t *testing.T) {
	for _, r := range renderings {
		t.Run(filepath.Base(r.golden), func(t *testing.T) {
			text, err := os.ReadFile(r.golden)
			if err != nil {
				t.Fatal(err)
			}
			check(t, decode(t, text))
		})
	}
	namespace, err := os.ReadFile("kubernetes/00-namespace.yaml")
	if err != nil {
		t.Fatal(err)
	}
	strictly(t, namespace, &corev1.Namespace{})
}

// decode reads objects, without tolerance.
func decode(t *testing.T, text []byte) (r rendered) {
	t.Helper()
	for part := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var meta metav1.TypeMeta
		data, err := yaml.YAMLToJSON(part)
		if err == nil {
			err = json.Unmarshal(data, &meta)
		}
		if err != nil {
			t.Fatalf("%v in %s", err, part)
		}
		switch kind := meta.APIVersion + " " + meta.Kind; kind {
		case "apps/v1 DaemonSet":
			r.daemonSet = strictly(t, part, &appsv1.DaemonSet{})
		case "v1 ConfigMap":
			r.configMap = strictly(t, part, &corev1.ConfigMap{})
		case "v1 Service":
			r.service = strictly(t, part, &corev1.Service{})
		case "v1 ServiceAccount":
			r.serviceAccount = strictly(t, part, &corev1.ServiceAccount{})
		case "rbac.authorization.k8s.io/v1 Role":
			r.roles = append(r.roles, strictly(t, part, &rbacv1.Role{}))
		case "rbac.authorization.k8s.io/v1 RoleBinding":
			r.bindings = append(r.bindings, strictly(t, part, &rbacv1.RoleBinding{}))
		case "rbac.authorization.k8s.io/v1 ClusterRole":
			r.clusterRoles = append(r.clusterRoles, strictly(t, part, &rbacv1.ClusterRole{}))
		case "rbac.authorization.k8s.io/v1 ClusterRoleBinding":
			r.clusterBindings = append(r.clusterBindings, strictly(t, part, &rbacv1.ClusterRoleBinding{}))
		case "networking.k8s.io/v1 NetworkPolicy":
			r.policy = strictly(t, part, &networkingv1.NetworkPolicy{})
		case "monitoring.coreos.com/v1 PodMonitor":
			r.monitor = strictly(t, part, &podMonitor{})
		default:
			t.Errorf("unknown kind %q", kind)
		}
	}
	if r.daemonSet == nil || r.configMap == nil || r.service == nil || r.serviceAccount == nil {
		t.Fatal("an object is missing")
	}
	return r
}

func strictly[T any](t *testing.T, text []byte, into *T) *T {
	t.Helper()
	data, err := yaml.YAMLToJSON(text)
	if err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	unknown, err := kubejson.UnmarshalStrict(data, into)
	if err = errors.Join(append(unknown, err)...); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return into
}

func check(t *testing.T, r rendered) {
	t.Helper()
	config := agent.DefaultConfig()
	if err := config.ParseConfig([]byte(r.configMap.Data["config.yaml"])); err != nil {
		t.Fatal(err)
	}
	if err := config.Validate(); err != nil {
		t.Fatal(err)
	}
	port := func(address string) int {
		n, err := strconv.Atoi(address[strings.LastIndex(address, ":")+1:])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	local := strings.HasPrefix(config.AdminListen, "127.")
	pod := r.daemonSet.Spec.Template
	c := pod.Spec.Containers[0]

	// The configuration is where the agent looks for it, as a whole directory.
	if got, want := strings.Join(c.Args, " "), "agent --config /etc/inferrail/config.yaml"; got != want {
		t.Errorf("the arguments are %q, want %q", got, want)
	}
	volumes := map[string]corev1.VolumeSource{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = v.VolumeSource
	}
	mounts := map[string]string{}
	for _, m := range c.VolumeMounts {
		if _, ok := volumes[m.Name]; !ok || m.SubPath != "" {
			t.Errorf("mount %s is of no volume, or of a part of one, which would not follow changes", m.Name)
		}
		mounts[m.MountPath] = m.Name
	}
	if v := volumes[mounts["/etc/inferrail"]].ConfigMap; v == nil || v.Name != r.configMap.Name {
		t.Error("the configuration is not mounted")
	}

	// Probes and ports are those that the agent listens on.
	for _, p := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
		if p == nil || p.HTTPGet == nil || p.HTTPGet.Port.IntValue() != port(config.AdminListen) {
			t.Fatalf("a probe is %+v, and the admin pages are at %s", p, config.AdminListen)
		}
		if (p.HTTPGet.Host == "127.0.0.1") != local || local && !pod.Spec.HostNetwork {
			t.Errorf("the kubelet asks at %q, and the admin pages are at %s", p.HTTPGet.Host, config.AdminListen)
		}
	}
	if c.LivenessProbe.HTTPGet.Path != "/healthz" || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
		t.Error("the probes ask for other pages")
	}
	if got := r.service.Spec.Ports[0].TargetPort.IntValue(); got != port(config.Listen) {
		t.Errorf("the service leads to port %d, and the agent listens at %s", got, config.Listen)
	}
	if !reflect.DeepEqual(r.service.Spec.Selector, r.daemonSet.Spec.Selector.MatchLabels) {
		t.Error("the service is not of the pods")
	}
	for label, value := range r.daemonSet.Spec.Selector.MatchLabels {
		if pod.Labels[label] != value {
			t.Errorf("the pods lack label %s", label)
		}
	}
	if pod.Spec.HostNetwork && len(c.Ports) > 0 {
		t.Error("with named ports in the node's network an agent's successor is not scheduled")
	}
	if r.monitor != nil && (local || int(r.monitor.Spec.PodMetricsEndpoints[0].PortNumber) != port(config.AdminListen)) {
		t.Error("Prometheus does not reach the metrics")
	}
	if r.policy != nil && pod.Spec.HostNetwork {
		t.Error("the network policy has no effect")
	}

	// An agent may end in peace.
	grace := time.Duration(*pod.Spec.TerminationGracePeriodSeconds) * time.Second
	if over := grace - config.Server.ShutdownTimeout; over < 10*time.Second || over > time.Minute {
		t.Errorf("%v are granted to an agent that takes %v", grace, config.Server.ShutdownTimeout)
	}

	// No privilege that is not needed.
	s := c.SecurityContext
	var added []string
	for _, name := range s.Capabilities.Add {
		added = append(added, string(name))
	}
	if !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || s.Privileged != nil || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem ||
		pod.Spec.HostPID || pod.Spec.HostIPC || s.SeccompProfile == nil {
		t.Errorf("the privileges are %+v", s)
	}
	bpf := volumes[mounts["/sys/fs/bpf"]].HostPath
	if config.Datapath.Mode == "copy" {
		if len(added) > 0 || bpf != nil || !*s.RunAsNonRoot || *s.RunAsUser == 0 {
			t.Errorf("the copy tier needs no privilege, and has %q, %+v", added, s)
		}
	} else {
		// The test of the privileges in cmd/inferrail shows that these suffice.
		if len(added) < 3 || !slices.Equal(added[:3], []string{"BPF", "NET_ADMIN", "PERFMON"}) || *s.RunAsUser != 0 {
			t.Errorf("the capabilities are %q", added)
		}
		if bpf == nil || bpf.Path != "/sys/fs/bpf" || *bpf.Type != corev1.HostPathDirectory {
			t.Errorf("the BPF file system is %+v", bpf)
		}
	}

	// The roles are what discovery needs, and no more.
	wanted := map[string]bool{}
	nodeLocal := false
	for _, k := range config.Discovery.Kubernetes {
		nodeLocal = nodeLocal || k.NodeLocal
		if k.Kubeconfig != "" {
			continue
		}
		resource := "discovery.k8s.io/endpointslices"
		if k.Pods != "" {
			resource = "/pods"
		}
		namespace := k.Namespace
		if namespace == "" {
			namespace = r.daemonSet.Namespace
		}
		wanted[namespace+": "+resource] = true
	}
	granted := map[string]bool{}
	grant := func(namespace string, rules []rbacv1.PolicyRule, role string, to rbacv1.RoleRef, subjects []rbacv1.Subject) {
		if to.Name != role || len(subjects) != 1 || subjects[0].Name != pod.Spec.ServiceAccountName || subjects[0].Namespace != r.daemonSet.Namespace {
			t.Errorf("role %s is not given to the agent: %+v, %+v", role, to, subjects)
		}
		for _, rule := range rules {
			if !slices.Equal(rule.Verbs, []string{"get", "list", "watch"}) || len(rule.APIGroups) != 1 || len(rule.Resources) != 1 {
				t.Errorf("a rule is %+v", rule)
			}
			granted[namespace+": "+rule.APIGroups[0]+"/"+rule.Resources[0]] = true
		}
	}
	for i, role := range r.roles {
		if r.bindings[i].Namespace != role.Namespace {
			t.Errorf("role %s of %s is bound in %s", role.Name, role.Namespace, r.bindings[i].Namespace)
		}
		grant(role.Namespace, role.Rules, role.Name, r.bindings[i].RoleRef, r.bindings[i].Subjects)
	}
	for i, role := range r.clusterRoles {
		grant("*", role.Rules, role.Name, r.clusterBindings[i].RoleRef, r.clusterBindings[i].Subjects)
	}
	if !reflect.DeepEqual(granted, wanted) {
		t.Errorf("the roles are %v, want %v", granted, wanted)
	}
	if !slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool {
		return e.Name == "NODE_NAME" && e.ValueFrom != nil && e.ValueFrom.FieldRef.FieldPath == "spec.nodeName"
	}) && nodeLocal {
		t.Error("the agent is not told its node")
	}
}

// helm is a command of Helm, which "make helm" builds.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program := os.Getenv("INFERRAIL_HELM")
	if program == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Skip(err)
		}
		program = filepath.Join(cache, "inferrail", "helm-"+helmVersion, "helm")
	}
	if _, err := os.Stat(program); err != nil {
		t.Skip("no Helm; make helm builds it")
	}
	cmd := exec.Command(program, args...)
	// Neither a cluster nor what a user has configured has a say.
	home := t.TempDir()
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "KUBECONFIG=" + filepath.Join(home, "none")}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return string(out), fmt.Errorf("%s", strings.TrimSpace(stderr.String()+string(out)))
	}
	return string(out), err
}

// ofHelm are the lines that are not true of what kubectl applies.
var ofHelm = regexp.MustCompile(`(?m)^(# Source: .*| *app\.kubernetes\.io/managed-by: Helm| *helm\.sh/chart: .*)\n`)

// What is kept is what the chart makes now; "make manifests" makes it anew.
func TestChartRenders(t *testing.T) {
	for _, r := range renderings {
		args := []string{"template", "inferrail", "helm/inferrail", "--namespace", "inferrail"}
		if r.values != "" {
			args = append(args, "--values", r.values)
		}
		out, err := helm(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		out = strings.TrimPrefix(ofHelm.ReplaceAllString(out, ""), "---\n")
		out = strings.ReplaceAll(out, "\n\n---\n", "\n---\n")
		if os.Getenv("INFERRAIL_MANIFESTS") != "" {
			if err := os.WriteFile(r.golden, []byte(out), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(r.golden)
		if err != nil {
			t.Fatal(err)
		}
		if string(want) != out {
			t.Errorf("%s is not what the chart makes: run make manifests", r.golden)
		}
		if out, err := helm(t, append([]string{"lint", "--strict", "--quiet"}, append(args[2:], "--kube-version", "1.37.0")...)...); err != nil {
			t.Errorf("helm lint: %v %s", err, out)
		}
	}
}

// What does not go together is refused, with what to do.
func TestChartRefuses(t *testing.T) {
	f := func(want string, set ...string) {
		t.Helper()
		args := []string{"template", "inferrail", "helm/inferrail"}
		for _, s := range set {
			args = append(args, "--set", s)
		}
		if _, err := helm(t, args...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", set, err, want)
		}
	}
	const token = "config.admin_token_sha256=2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
	f("set that in its place", "config.server.shutdown_timeout=3s")
	f("config.admin_token_sha256 is missing", "config.admin_listen=:9090")
	f("the kubelet does not reach the probes", "hostNetwork=false")
	f("podMonitor wants config.admin_listen beyond loopback", "podMonitor.enabled=true")
	f("podMonitor.tokenSecret.name is missing", "podMonitor.enabled=true", "config.admin_listen=:9090", token)
	f("networkPolicy has no effect", "networkPolicy.enabled=true")
	// The schema.
	f("hostNetwrok", "hostNetwrok=false")
	f("/config/datapath/mode", "config.datapath.mode=fast")
	f("/extraCapabilities/0", "extraCapabilities={CAP_SYS_ADMIN}")
	f("/shutdownTimeoutSeconds", "shutdownTimeoutSeconds=0")
}

// Every value has a row in the schema, and the other way round.
func TestValuesHaveASchema(t *testing.T) {
	var values map[string]any
	text, err := os.ReadFile("helm/inferrail/values.yaml")
	if err == nil {
		err = yaml.Unmarshal(text, &values)
	}
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if text, err = os.ReadFile("helm/inferrail/values.schema.json"); err == nil {
		err = json.Unmarshal(text, &schema)
	}
	if err != nil {
		t.Fatal(err)
	}
	var walk func(path string, values, schema map[string]any)
	walk = func(path string, values, schema map[string]any) {
		known, _ := schema["properties"].(map[string]any)
		if path == "/config" || known == nil { // of the agent, which checks it itself
			return
		}
		for name, value := range values {
			if known[name] == nil {
				t.Errorf("%s/%s is not in the schema", path, name)
			} else if below, ok := value.(map[string]any); ok {
				walk(path+"/"+name, below, known[name].(map[string]any))
			}
		}
		for name := range known {
			if _, ok := values[name]; !ok && name != "global" {
				t.Errorf("%s/%s is not in values.yaml", path, name)
			}
		}
	}
	walk("", values, schema)
}
