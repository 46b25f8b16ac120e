package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
)

// adminPort is where the commands that ask a running agent find it, as their flags. Its
// methods may be called from any goroutine.
type adminPort struct {
	Admin     string `placeholder:"URL" default:"http://127.0.0.1:9090" env:"INFERRAIL_ADMIN" help:"The agent's admin port, by default http://127.0.0.1:9090."`
	Token     string `placeholder:"TOKEN" env:"INFERRAIL_ADMIN_TOKEN" help:"The token that the admin pages want, if they want one. Better given as a variable, which other users do not see."`
	TokenFile string `placeholder:"FILE" env:"INFERRAIL_ADMIN_TOKEN_FILE" help:"The file that holds it."`
}

// mostAnswered bounds a page that is read: those about the largest fleets have a few
// megabytes.
const mostAnswered = 64 << 20

// inquiry is one request to the admin port; body is posted when it is not nil.
type inquiry struct {
	path   string
	query  url.Values
	header http.Header
	body   []byte
	// answers are the statuses, beside 200, that are no error.
	answers []int
}

// adminClient asks. A redirect would take the token elsewhere.
var adminClient = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

// address is the URL of a page.
func (p *adminPort) address(path string, query url.Values) (string, error) {
	admin := p.Admin
	if !strings.Contains(admin, "://") {
		admin = "http://" + admin
	}
	base, err := url.Parse(admin)
	if err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https" {
		return "", fmt.Errorf("--admin %q is not a URL; want such as http://127.0.0.1:9090", p.Admin)
	}
	target := base.JoinPath(path)
	target.RawQuery = query.Encode()
	return target.String(), nil
}

// token is that which the pages want, "" for none. The file is read each time: it may
// hold another one by now.
func (p *adminPort) token() (string, error) {
	if p.Token != "" && p.TokenFile != "" {
		return "", errors.New("--token and --token-file are both given; want one of them")
	}
	return secret(p.Token, p.TokenFile, "--token-file")
}

// secret is text, or what the file holds if one is named, by the flag.
func secret(text, file, flag string) (string, error) {
	if file == "" {
		return text, nil
	}
	held, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", flag, err)
	}
	if text = strings.TrimSpace(string(held)); text == "" {
		return "", fmt.Errorf("%s: %s is empty", flag, file)
	}
	return text, nil
}

// ask returns an answer and its status. The errors tell what to do.
func (p *adminPort) ask(ctx context.Context, q inquiry) (answer []byte, status int, err error) {
	target, err := p.address(q.path, q.query)
	if err != nil {
		return nil, 0, err
	}
	token, err := p.token()
	if err != nil {
		return nil, 0, err
	}
	method, body := http.MethodGet, io.Reader(nil)
	if q.body != nil {
		method, body = http.MethodPost, bytes.NewReader(q.body)
	}
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, 0, err
	}
	for name, values := range q.header {
		req.Header[name] = values
	}
	if q.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := adminClient.Do(req)
	if err != nil {
		return nil, 0, fmt.Errorf("cannot ask the agent at %s: %w; does it run, and is that its admin_listen? (--admin URL)", p.Admin, cause(err))
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(io.LimitReader(resp.Body, mostAnswered+1))
	text := strings.TrimSpace(string(answer[:min(len(answer), 2000)]))
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("the answer of %s breaks off: %w", p.Admin, err)
	case len(answer) > mostAnswered:
		return nil, 0, fmt.Errorf("the answer of %s to /%s has more than %d MiB; is that the admin port of an agent?", p.Admin, q.path, mostAnswered>>20)
	case resp.StatusCode == http.StatusOK:
		return answer, resp.StatusCode, nil
	case resp.StatusCode == http.StatusBadRequest && text != "":
		return nil, resp.StatusCode, errors.New(text)
	case resp.StatusCode == http.StatusUnauthorized:
		return nil, resp.StatusCode, fmt.Errorf("the agent at %s wants its admin token: INFERRAIL_ADMIN_TOKEN or --token, or --token-file", p.Admin)
	}
	for _, fine := range q.answers {
		if resp.StatusCode == fine {
			return answer, resp.StatusCode, nil
		}
	}
	if resp.StatusCode == http.StatusNotFound {
		return nil, resp.StatusCode, fmt.Errorf("there is no /%s at %s; is that the agent's admin_listen? (--admin URL)", q.path, p.Admin)
	}
	return nil, resp.StatusCode, fmt.Errorf("%s (status %d of %s)", text, resp.StatusCode, p.Admin)
}

// read asks for a page and decodes it.
func (p *adminPort) read(ctx context.Context, q inquiry, page any) error {
	answer, _, err := p.ask(ctx, q)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(answer, page); err != nil {
		return fmt.Errorf("%s has answered /%s otherwise than an agent does (%w); is it the admin port of an agent of this version (inferrail version)?", p.Admin, q.path, err)
	}
	return nil
}

// cause is an error of a client without the method and the URL, which may be long.
func cause(err error) error {
	if of := (*url.Error)(nil); errors.As(err, &of) {
		return of.Err
	}
	return err
}
