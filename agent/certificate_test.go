package agent

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// pemPair makes a self-signed certificate for a name, and its key.
func pemPair(t *testing.T, name string, expires time.Time) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{name},
		NotBefore: time.Unix(1, 0), NotAfter: expires,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

func write(t *testing.T, file string, data []byte) {
	t.Helper()
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func tlsFiles(t *testing.T) TLSConfig {
	dir := t.TempDir()
	return TLSConfig{CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key")}
}

// serves is the name in the certificate that new connections get.
func (c *certificate) serves(t *testing.T) string {
	t.Helper()
	pair, err := c.config().GetCertificate(&tls.ClientHelloInfo{})
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf.DNSNames[0]
}

func TestCertificateFollowsItsFiles(t *testing.T) {
	files := tlsFiles(t)
	later := time.Now().Add(time.Hour)
	certA, keyA := pemPair(t, "a", later)
	certB, keyB := pemPair(t, "b", later)
	write(t, files.CertFile, certA)
	write(t, files.KeyFile, keyA)
	var said lines
	c, err := openCertificate(files, said.logger())
	if err != nil {
		t.Fatal(err)
	}
	f := func(want, problem string) {
		t.Helper()
		c.look(files)
		if got := c.serves(t); got != want {
			t.Errorf("serves %s, want %s", got, want)
		}
		if why := c.problem(); (why == "") != (problem == "") || !strings.Contains(why, problem) {
			t.Errorf("the problem is %q, want %q", why, problem)
		}
	}
	f("a", "")

	// One file after the other.
	write(t, files.CertFile, certB)
	f("a", "private key does not match public key")
	f("a", "private key does not match public key")
	if n := strings.Count(said.String(), "is not used"); n != 1 {
		t.Errorf("the same problem is logged %d times", n)
	}
	write(t, files.KeyFile, keyB)
	f("b", "")

	// Gone, and there again as it was.
	if err := os.Remove(files.KeyFile); err != nil {
		t.Fatal(err)
	}
	f("b", "no such file")
	write(t, files.KeyFile, keyB)
	f("b", "")
	write(t, files.KeyFile, []byte("half a k"))
	f("b", "cannot be used")

	// As Kubernetes does: the directory behind a symlink is exchanged.
	dir := t.TempDir()
	for name, pair := range map[string][2][]byte{"1": {certA, keyA}, "2": {certB, keyB}} {
		os.Mkdir(filepath.Join(dir, name), 0o700)
		write(t, filepath.Join(dir, name, "tls.crt"), pair[0])
		write(t, filepath.Join(dir, name, "tls.key"), pair[1])
	}
	swap := func(to string) {
		t.Helper()
		link := filepath.Join(dir, "new")
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(link, filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	files = TLSConfig{CertFile: filepath.Join(dir, "..data", "tls.crt"), KeyFile: filepath.Join(dir, "..data", "tls.key")}
	swap("1")
	f("a", "")
	swap("2")
	f("b", "")
}

func TestCertificateFailure(t *testing.T) {
	f := func(cert, key []byte, want string) {
		t.Helper()
		c := testConfig(startEngine(t, 0, "m"))
		c.Server.TLS = tlsFiles(t)
		if cert != nil {
			write(t, c.Server.TLS.CertFile, cert)
		}
		if key != nil {
			write(t, c.Server.TLS.KeyFile, key)
		}
		a, err := Start(t.Context(), c, testLog(t))
		if err == nil {
			stopped(t, a)
		}
		if err == nil || !strings.HasPrefix(err.Error(), "server.tls: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	certA, keyA := pemPair(t, "a", time.Now().Add(time.Hour))
	_, keyB := pemPair(t, "b", time.Now().Add(time.Hour))
	f(nil, nil, "tls.crt: no such file")
	f(certA, nil, "tls.key: no such file")
	f(certA, keyB, "does not match")
	f(certA, []byte("nonsense"), "tls.key cannot be used")
	f(keyA, certA, "cannot be used")
}

func TestExpiredCertificateIsReported(t *testing.T) {
	files := tlsFiles(t)
	cert, key := pemPair(t, "old", time.Now().Add(-time.Hour))
	write(t, files.CertFile, cert)
	write(t, files.KeyFile, key)
	var said lines
	if _, err := openCertificate(files, said.logger()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(said.String(), "level=WARN") || !strings.Contains(said.String(), "has expired") {
		t.Errorf("said %q", &said)
	}
}
