package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
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
	keys   []string // of the tenants
	client *http.Client
	// timeout bounds a request, from when it is sent to its last byte.
	timeout time.Duration
}

// EndpointOptions are what a user may say of an endpoint. The zero value lacks URL.
type EndpointOptions struct {
	URL         string        `required:"" placeholder:"http://HOST:PORT" help:"The gateway or engine to ask, with or without /v1."`
	APIKey      []string      `env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as bearer token. Repeatable: each tenant of the workload has one, in turn."`
	Header      []string      `sep:"none" placeholder:"NAME: VALUE" help:"Sent with every request. Repeatable."`
	Budget      time.Duration `placeholder:"TIME" help:"How long first tokens may take, told to inferrail with every request (x-inferrail-budget-ms)."`
	NoKeepAlive bool          `name:"no-keep-alive" help:"Open a connection for every request."`
}

func newEndpoint(o EndpointOptions, timeout time.Duration) (*endpoint, error) {
	u, err := url.Parse(o.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("--url: %w", err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return nil, fmt.Errorf("--url %q: want http://HOST:PORT or https://HOST", o.URL)
	case u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("--url %q: want no ? and no # in it", o.URL)
	case o.Budget < 0:
		return nil, fmt.Errorf("--budget %v: want a positive time", o.Budget)
	}
	e := &endpoint{base: strings.TrimSuffix(strings.TrimRight(o.URL, "/"), "/v1"), header: http.Header{}, timeout: timeout}
	e.header.Set("Content-Type", "application/json")
	e.header.Set("User-Agent", "inferrail-bench")
	for _, h := range o.Header {
		name, value, ok := strings.Cut(h, ":")
		if name = strings.TrimSpace(name); !ok || name == "" {
			return nil, fmt.Errorf("--header %q: want NAME: VALUE", h)
		}
		e.header.Add(name, strings.TrimSpace(value))
	}
	for _, key := range o.APIKey {
		e.keys = append(e.keys, "Bearer "+key)
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

// request makes one that is to be sent by client.
func (e *endpoint) request(ctx context.Context, method, path string, body []byte, tenant int) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, e.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, e.header) // whose values nobody changes
	if len(e.keys) > 0 {
		req.Header.Set("Authorization", e.keys[tenant%len(e.keys)])
	}
	return req, nil
}

func (e *endpoint) close() { e.client.CloseIdleConnections() }

// models asks which models there are.
func (e *endpoint) models(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := e.request(ctx, http.MethodGet, "/v1/models", nil, 0)
	if err != nil {
		return nil, err
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxEvent))
	if err != nil {
		return nil, fmt.Errorf("GET %s: %w", req.URL, err)
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	switch resp.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		return nil, fmt.Errorf("GET %s: status %d: give its key as --api-key or OPENAI_API_KEY", req.URL, resp.StatusCode)
	case http.StatusNotFound:
		return nil, fmt.Errorf("GET %s: status 404: is the path right? if so, give --model", req.URL)
	}
	if err := json.Unmarshal(body, &list); resp.StatusCode != http.StatusOK || err != nil {
		return nil, fmt.Errorf("GET %s: status %d: %.200q", req.URL, resp.StatusCode, body)
	}
	var names []string
	for _, m := range list.Data {
		names = append(names, m.ID)
	}
	return names, nil
}

// onlyModel is the model that is served, when there is only one.
func (e *endpoint) onlyModel(ctx context.Context) (string, error) {
	names, err := e.models(ctx)
	if err != nil {
		return "", fmt.Errorf("--url %s does not tell its model: %w", e.base, err)
	}
	if len(names) != 1 {
		return "", fmt.Errorf("which of its models is to be asked? give --model: %s", strings.Join(names, ", "))
	}
	return names[0], nil
}
