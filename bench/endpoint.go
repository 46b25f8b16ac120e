package bench

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// endpoint is where and how a load asks: any server that speaks OpenAI's API, a
// gateway or an engine. It is made once for a load and used by all of its requests at
// the same time.
type endpoint struct {
	base   string // without the /v1
	header http.Header
	client *http.Client
	// timeout bounds a request, from when it is sent to its last byte.
	timeout time.Duration
}

// EndpointOptions are what a user may say of an endpoint. The zero value lacks URL.
type EndpointOptions struct {
	URL         string        `required:"" placeholder:"http://HOST:PORT" help:"The gateway or engine to ask, with or without /v1."`
	APIKey      string        `env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as bearer token."`
	Header      []string      `sep:"none" placeholder:"NAME: VALUE" help:"Sent with every request. Repeatable."`
	Budget      time.Duration `placeholder:"TIME" help:"How long first tokens may take, told to inferrail with every request (x-inferrail-budget-ms)."`
	Timeout     time.Duration `default:"10m" help:"A request that takes longer than this, from sending to the last byte, has failed."`
	NoKeepAlive bool          `name:"no-keep-alive" help:"Open a connection for every request."`
}

func newEndpoint(o EndpointOptions) (*endpoint, error) {
	u, err := url.Parse(o.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("--url: %w", err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return nil, fmt.Errorf("--url %q: want http://HOST:PORT or https://HOST", o.URL)
	case u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("--url %q: want no ? and no # in it", o.URL)
	case o.Timeout <= 0 || o.Budget < 0:
		return nil, fmt.Errorf("--timeout %v and --budget %v: want a positive time", o.Timeout, o.Budget)
	}
	e := &endpoint{base: strings.TrimSuffix(strings.TrimRight(o.URL, "/"), "/v1"), header: http.Header{}, timeout: o.Timeout}
	e.header.Set("Content-Type", "application/json")
	e.header.Set("User-Agent", "inferrail-bench")
	for _, h := range o.Header {
		name, value, ok := strings.Cut(h, ":")
		if name = strings.TrimSpace(name); !ok || name == "" {
			return nil, fmt.Errorf("--header %q: want NAME: VALUE", h)
		}
		e.header.Add(name, strings.TrimSpace(value))
	}
	if o.APIKey != "" {
		e.header.Set("Authorization", "Bearer "+o.APIKey)
	}
	if o.Budget > 0 {
		e.header.Set("X-Inferrail-Budget-Ms", strconv.FormatInt(o.Budget.Milliseconds(), 10))
	}
	e.client = &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 30 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 1 << 20,
			// A client that is still there within an engine's keep-alive of five seconds
			// should not meet its end.
			IdleConnTimeout:    4 * time.Second,
			DisableKeepAlives:  o.NoKeepAlive,
			DisableCompression: true,
			ReadBufferSize:     8 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return e, nil
}

func (e *endpoint) close() { e.client.CloseIdleConnections() }
