package agent

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// realServer is a kube-apiserver before an etcd, both with nothing in them. No
// controller runs: what there is, the test has made.
type realServer struct {
	t      *testing.T
	dir    string
	etcd   string
	port   string
	server *exec.Cmd
	client *http.Client
	file   string // kubeconfig of a service account that has no rights
	chart  string // of the one that the manifests of deploy give some
}

// startRealServer wants the folder with both programs in INFERRAIL_KUBE_APISERVER.
func startRealServer(t *testing.T) *realServer {
	programs := os.Getenv("INFERRAIL_KUBE_APISERVER")
	if programs == "" {
		t.Skip("no API server: make test-kubernetes builds one")
	}
	s := &realServer{t: t, dir: t.TempDir(), port: unusedPort(t), client: &http.Client{
		Timeout: 30 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	}}
	write := func(name string, text []byte) string {
		file := filepath.Join(s.dir, name)
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
	write("tokens.csv", []byte("admin,admin,1,system:masters\nagent,system:serviceaccount:serving:inferrail,2,\"system:authenticated,system:serviceaccounts\"\n"+
		"chart,system:serviceaccount:inferrail:inferrail,3,\"system:authenticated,system:serviceaccounts\"\n"))
	config := func(token string) string {
		return write(token+".kubeconfig", fmt.Appendf(nil, "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]\n"+
			"users: [{name: u, user: {token: %s}}]\ncontexts: [{name: x, context: {cluster: c, user: u, namespace: serving}}]\ncurrent-context: x\n", "https://127.0.0.1:"+s.port, token))
	}
	s.file, s.chart = config("agent"), config("chart")
	s.etcd = "http://127.0.0.1:" + unusedPort(t)
	peer := "http://127.0.0.1:" + unusedPort(t)
	s.run(filepath.Join(programs, "etcd"), "--data-dir", filepath.Join(s.dir, "etcd"), "--listen-client-urls", s.etcd, "--advertise-client-urls", s.etcd,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer, "--log-level", "error")
	s.begin()
	s.do("POST", "/api/v1/namespaces", `{"metadata": {"name": "serving"}}`)
	return s
}

// begin starts the API server, for the first time or again, and waits for it.
func (s *realServer) begin() {
	s.t.Helper()
	s.server = s.run(filepath.Join(os.Getenv("INFERRAIL_KUBE_APISERVER"), "kube-apiserver"),
		"--etcd-servers", s.etcd, "--secure-port", s.port, "--bind-address", "127.0.0.1", "--cert-dir", filepath.Join(s.dir, "certs"),
		"--token-auth-file", filepath.Join(s.dir, "tokens.csv"), "--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.96.0.0/16",
		"--service-account-issuer", "https://localhost", "--service-account-key-file", filepath.Join(s.dir, "key.pem"),
		"--service-account-signing-key-file", filepath.Join(s.dir, "key.pem"), "--disable-admission-plugins", "ServiceAccount")
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if status, _ := s.call("GET", "/readyz", ""); status == http.StatusOK {
			return
		}
		if time.Since(began) > 3*time.Minute {
			s.t.Fatal("the API server does not become ready")
		}
	}
}

// run starts a process that ends with the test.
func (s *realServer) run(program string, args ...string) *exec.Cmd {
	s.t.Helper()
	log, err := os.Create(filepath.Join(s.dir, filepath.Base(program)+".log"))
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		log.Close()
		if text, err := os.ReadFile(log.Name()); err == nil && s.t.Failed() {
			s.t.Logf("%s: %s", filepath.Base(program), text[max(0, len(text)-3000):])
		}
	})
	return cmd
}

func unusedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// call is a request of the administrator.
func (s *realServer) call(method, path, body string) (int, string) {
	req, err := http.NewRequest(method, "https://127.0.0.1:"+s.port+path, bytes.NewReader([]byte(body)))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer admin")
	req.Header.Set("Content-Type", "application/json")
	if method == "PATCH" {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

func (s *realServer) do(method, path, body string) {
	s.t.Helper()
	if status, text := s.call(method, path, body); status < 200 || status > 299 {
		s.t.Fatalf("%s %s: %d %s", method, path, status, text)
	}
}

// put makes or replaces an EndpointSlice.
func (s *realServer) put(name string, endpoints ...string) {
	s.t.Helper()
	slice := endpointSlice(s.t, name, endpoints...)
	slice.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	text, err := json.Marshal(slice)
	if err != nil {
		s.t.Fatal(err)
	}
	const path = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
	if status, _ := s.call("PUT", path+"/"+name, string(text)); status == http.StatusNotFound {
		s.do("POST", path, string(text))
	} else if status != http.StatusOK {
		s.t.Fatalf("PUT %s: status %d", name, status)
	}
}

// A real API server, etcd behind it, with its own watches and its own RBAC.
func TestKubernetesRealServer(t *testing.T) {
	t.Setenv(nodeName, "here")
	s := startRealServer(t)
	s.put("vllm-1", "a@10.0.0.1:8000", "b@10.0.0.2:8000!")
	f := follow(t, KubernetesConfig{Service: "vllm", Kubeconfig: s.file})
	f.expect(t, "nothing yet", `the agent may not read endpointslices of namespace serving: its service account needs a role with the verbs get, list and watch on endpointslices (the API server says: endpointslices.discovery.k8s.io is forbidden: User "system:serviceaccount:serving:inferrail" cannot `)

	// The roles of the Helm chart.
	s.do("POST", "/apis/rbac.authorization.k8s.io/v1/namespaces/serving/roles", `{"metadata": {"name": "inferrail"}, "rules": [
		{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
		{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]}`)
	s.do("POST", "/apis/rbac.authorization.k8s.io/v1/namespaces/serving/rolebindings", `{"metadata": {"name": "inferrail"},
		"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "inferrail"},
		"subjects": [{"kind": "ServiceAccount", "name": "inferrail", "namespace": "serving"}]}`)
	f.expect(t, "serving/a:8000@10.0.0.1:8000", "")
	s.put("vllm-1", "a@10.0.0.1:8000", "b@10.0.0.2:8000")
	f.expect(t, "serving/a:8000@10.0.0.1:8000 serving/b:8000@10.0.0.2:8000", "")
	s.put("vllm-2", "c@10.0.0.3:9000")
	s.put("vllm-1", "a@10.0.0.1:8000~", "b@10.0.0.2:8000")
	f.expect(t, "serving/b:8000@10.0.0.2:8000 serving/c:9000@10.0.0.3:9000", "")
	s.do("DELETE", "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices/vllm-1", "")
	f.expect(t, "serving/c:9000@10.0.0.3:9000", "")

	// Pods, of this node only.
	pods := follow(t, KubernetesConfig{Pods: "app=vllm", Port: "http", NodeLocal: true, Kubeconfig: s.file})
	pods.expect(t, "", "")
	for _, p := range [][3]string{{"p", "here", "10.0.1.1"}, {"q", "there", "10.0.1.2"}} {
		name, node, ip := p[0], p[1], p[2]
		s.do("POST", "/api/v1/namespaces/serving/pods", fmt.Sprintf(`{"metadata": {"name": %q, "labels": {"app": "vllm"}, "annotations": {"inferrail.io/engine": "vllm"}},
			"spec": {"nodeName": %q, "containers": [{"name": "c", "image": "x", "ports": [{"name": "http", "containerPort": 8000}]}]}}`, name, node))
		s.do("PATCH", "/api/v1/namespaces/serving/pods/"+name+"/status", fmt.Sprintf(`{"status": {"phase": "Running", "podIP": %q,
			"podIPs": [{"ip": %q}], "conditions": [{"type": "Ready", "status": "True"}]}}`, ip, ip))
	}
	pods.expect(t, "serving/p:8000@10.0.1.1:8000", "")
	s.do("PATCH", "/api/v1/namespaces/serving/pods/p/status", `{"status": {"conditions": [{"type": "Ready", "status": "False"}]}}`)
	pods.expect(t, "", "")
	s.do("PATCH", "/api/v1/namespaces/serving/pods/p/status", `{"status": {"conditions": [{"type": "Ready", "status": "True"}]}}`)
	pods.expect(t, "serving/p:8000@10.0.1.1:8000", "")

	// The server goes and comes again.
	s.server.Process.Kill()
	s.server.Wait()
	f.expect(t, "serving/c:9000@10.0.0.3:9000", "the API server cannot be asked for endpointslices of namespace serving: dial: connect: connection refused")
	pods.expect(t, "serving/p:8000@10.0.1.1:8000", "connection refused")
	s.begin()
	f.expect(t, "serving/c:9000@10.0.0.3:9000", "")
	s.put("vllm-2", "d@10.0.0.4:9000")
	f.expect(t, "serving/d:9000@10.0.0.4:9000", "")
	pods.expect(t, "serving/p:8000@10.0.1.1:8000", "")
	s.do("DELETE", "/api/v1/namespaces/serving/pods/p", `{"gracePeriodSeconds": 0}`)
	pods.expect(t, "", "")

	s.manifests()

	// Its rights are taken away, and the watch ends by itself some time; a new
	// source is told at once.
	s.do("DELETE", "/apis/rbac.authorization.k8s.io/v1/namespaces/serving/rolebindings/inferrail", "")
	late := follow(t, KubernetesConfig{Pods: "app=vllm", Namespace: "*", Kubeconfig: s.file})
	late.expect(t, "nothing yet", "the agent may not read pods of all namespaces")
}

// The manifests are taken without a warning, and the role in them is what an
// agent needs that finds engines as they say.
func (s *realServer) manifests() {
	s.t.Helper()
	for _, file := range []string{"00-namespace.yaml", "10-inferrail.yaml"} {
		text, err := os.ReadFile(filepath.Join("..", "deploy", "kubernetes", file))
		if err != nil {
			s.t.Fatal(err)
		}
		for part := range bytes.SplitSeq(text, []byte("\n---\n")) {
			data, err := yaml.YAMLToJSON(part)
			if err != nil {
				s.t.Fatal(err)
			}
			var meta metav1.PartialObjectMetadata
			if err := json.Unmarshal(data, &meta); err != nil {
				s.t.Fatal(err)
			}
			path := "/apis/" + meta.APIVersion
			if !strings.Contains(meta.APIVersion, "/") {
				path = "/api/" + meta.APIVersion
			}
			if meta.Namespace != "" {
				path += "/namespaces/" + meta.Namespace
			}
			s.do("POST", path+"/"+strings.ToLower(meta.Kind)+"s?fieldValidation=Strict", string(data))
		}
	}
	f := follow(s.t, KubernetesConfig{Pods: "inferrail.io/engine", Namespace: "inferrail", Kubeconfig: s.chart})
	f.expect(s.t, "", "")
}
