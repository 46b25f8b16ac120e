package agent

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// certificate is the pair that new TLS connections are served with. It is
// replaced when its files hold another good pair; connections that are open go
// on with the one they began with. Make it with openCertificate. Its methods
// may be called from any goroutine.
type certificate struct {
	log  *slog.Logger
	pair atomic.Pointer[tls.Certificate]

	mu   sync.Mutex // guards the rest
	used contents   // of the files when pair was read
	why  string     // the files as they are cannot be used; empty when they are in use
}

// loadPair reads a certificate and its key.
func loadPair(files TLSConfig) (*tls.Certificate, contents, error) {
	// First, so that files which change meanwhile look changed the next time.
	sum := contentsOf(files.CertFile, files.KeyFile)
	cert, err := readFile(files.CertFile)
	key, keyErr := readFile(files.KeyFile)
	if err := cmp.Or(err, keyErr); err != nil {
		return nil, sum, fmt.Errorf("cannot read the certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, sum, fmt.Errorf("certificate %s with key %s cannot be used: %s",
			files.CertFile, files.KeyFile, strings.TrimPrefix(err.Error(), "tls: "))
	}
	return &pair, sum, nil
}

func openCertificate(files TLSConfig, log *slog.Logger) (*certificate, error) {
	pair, sum, err := loadPair(files)
	if err != nil {
		return nil, fmt.Errorf("server.tls: %w", err)
	}
	c := &certificate{log: log, used: sum}
	c.use(pair)
	return c, nil
}

func (c *certificate) use(pair *tls.Certificate) {
	c.pair.Store(pair)
	args := []any{"names", pair.Leaf.DNSNames, "expires", pair.Leaf.NotAfter}
	if time.Now().After(pair.Leaf.NotAfter) {
		c.log.Warn("the certificate has expired; clients will refuse it", args...)
		return
	}
	c.log.Info("certificate in use", args...)
}

// config is what listeners serve TLS with.
func (c *certificate) config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return c.pair.Load(), nil
		},
	}
}

// look takes the files' pair into use if it is another one. A pair that cannot
// be used is reported once, and looked at again the next time: of two files that
// are replaced one after the other, the second may be yet to come.
func (c *certificate) look(files TLSConfig) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if contentsOf(files.CertFile, files.KeyFile) == c.used {
		c.why = ""
		return
	}
	pair, sum, err := loadPair(files)
	if err != nil {
		if why := err.Error(); why != c.why {
			c.why = why
			c.log.Error("the new certificate is not used; the old one stays", "why", why)
		}
		return
	}
	c.used, c.why = sum, ""
	c.use(pair)
}

// problem says why the files as they are now are not in use; empty when they
// are.
func (c *certificate) problem() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why
}

var certificateExpiryDesc = prometheus.NewDesc("inferrail_certificate_expiry_timestamp_seconds",
	"When the certificate in use expires, in seconds since 1970.", nil, nil)

// Describe implements prometheus.Collector.
func (c *certificate) Describe(ch chan<- *prometheus.Desc) { ch <- certificateExpiryDesc }

// Collect implements prometheus.Collector.
func (c *certificate) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(certificateExpiryDesc, prometheus.GaugeValue, float64(c.pair.Load().Leaf.NotAfter.Unix()))
}
