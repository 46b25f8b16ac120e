package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/inferrail/inferrail/agent"
)

type explainCommand struct {
	File string `arg:"" optional:"" placeholder:"FILE" help:"The body of a request; the standard input by default."`
	adminPort
	Path   string   `placeholder:"PATH" default:"/v1/chat/completions" help:"The path of the request, by default /v1/chat/completions."`
	Header []string `short:"H" sep:"none" placeholder:"NAME: VALUE" help:"A field of the request, such as x-session-id. Repeatable."`
	JSON   bool     `name:"json" help:"Print what the agent answers, for programs."`
}

// explainTimeout bounds the whole question. The agent waits for a large prompt for a
// moment only.
const explainTimeout = 60 * time.Second

// Run asks a running agent where a request would go now, and why.
func (c *explainCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	ctx, end := context.WithTimeout(ctx, explainTimeout)
	defer end()
	body, err := c.body(e)
	if err != nil {
		return err
	}
	answer, err := c.explain(ctx, body)
	if err != nil {
		return err
	}
	if c.JSON {
		_, err := e.stdout.Write(answer)
		return err
	}
	var x agent.Explanation
	if err := json.Unmarshal(answer, &x); err != nil {
		return fmt.Errorf("%s has answered what is no explanation (%w); is it the admin port of an agent of this version (%s)?", c.Admin, err, "inferrail version")
	}
	return printExplanation(e.stdout, &x)
}

func (c *explainCommand) body(e *env) ([]byte, error) {
	if c.File != "" && c.File != "-" {
		body, err := os.ReadFile(c.File)
		if err != nil {
			return nil, fmt.Errorf("cannot read the request: %w", err)
		}
		return body, nil
	}
	in := e.stdin
	if in == nil {
		if info, err := os.Stdin.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			return nil, errors.New("no request to explain: give its body as a file or on the standard input, inferrail explain < request.json")
		}
		in = os.Stdin
	}
	body, err := io.ReadAll(in)
	if err == nil && len(bytes.TrimSpace(body)) == 0 {
		err = errors.New("the standard input is empty; try inferrail explain < request.json")
	}
	return body, err
}

// explain posts the body and returns the answer.
func (c *explainCommand) explain(ctx context.Context, body []byte) ([]byte, error) {
	header := http.Header{}
	for _, field := range c.Header {
		name, value, ok := strings.Cut(field, ":")
		if !ok || strings.TrimSpace(name) == "" {
			return nil, fmt.Errorf("--header %q is not NAME: VALUE", field)
		}
		header.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	answer, _, err := c.ask(ctx, inquiry{path: "explain", query: url.Values{"path": {c.Path}}, header: header, body: body})
	return answer, err
}

// printExplanation prints the answer for people: what is known of the prompt, a row
// for each replica, what its cost is made of, without what is 0, and the winner.
func printExplanation(out io.Writer, x *agent.Explanation) error {
	w := &bytes.Buffer{}
	fmt.Fprintf(w, "model      %s, policy %s\n", x.Model, x.Policy)
	switch {
	case x.Exact:
		fmt.Fprintf(w, "prompt     %s, exact; %s of %d\n", count(x.PromptTokens, "token"), count(x.Blocks, "whole block"), x.BlockSize)
	default:
		why := x.WhyApproximate
		if why == "" {
			why = x.Why
		}
		fmt.Fprintf(w, "prompt     about %s: %s\n", count(x.PromptTokens, "token"), why)
	}
	if x.BudgetMS > 0 {
		fmt.Fprintf(w, "budget     %s to the first token; admission: %s\n", inMilliseconds(x.BudgetMS), x.Admission)
	}
	fmt.Fprintln(w)

	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\treplica\tcached\tahead\twait\tprefill\tfirst token\tat work\tkv\tcost\t")
	for i := range x.Replicas {
		r := &x.Replicas[i]
		mark := " "
		if r.Replica == x.Winner {
			mark = "*"
		}
		if math.IsInf(float64(r.ExpectedMS), 1) {
			fmt.Fprintf(table, "%s\t%s\t\t\t\t\t\t%d\t\t-\t\n", mark, r.Replica, r.InFlight)
			continue
		}
		cost := "-"
		if !math.IsInf(float64(r.Cost), 1) {
			cost = strconv.FormatFloat(float64(r.Cost), 'g', 4, 64)
		}
		fmt.Fprintf(table, "%s\t%s\t%d\t%.0f\t%s\t%s\t%s\t%d\t%.0f%%\t%s\t\n", mark, r.Replica, r.CachedTokens, r.AheadTokens,
			inMilliseconds(float64(r.WaitMS)), inMilliseconds(float64(r.PrefillMS)), inMilliseconds(float64(r.ExpectedMS)), r.InFlight, 100*r.KV, cost)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for i := range x.Replicas {
		r := &x.Replicas[i]
		var parts []string
		for _, t := range r.Terms {
			if t.Value == 0 && len(r.Terms) > 1 {
				continue
			}
			value := "never"
			if !math.IsInf(float64(t.Value), 1) {
				value = strconv.FormatFloat(float64(t.Value), 'g', 4, 64)
			}
			parts = append(parts, t.Name+" "+value)
		}
		line := strings.Join(parts, " + ")
		if line == "" && len(r.Terms) > 0 {
			line = "0"
		}
		if r.Excluded != "" {
			line = strings.TrimPrefix(line+"; not chosen: "+r.Excluded, "; ")
		}
		if len(r.Blocks) > 0 {
			var held []string
			for _, tier := range []string{"gpu", "cpu", "disk", "remote"} {
				if n := r.Blocks[tier]; n > 0 {
					held = append(held, fmt.Sprintf("%d %s", n, tier))
				}
			}
			guess := ""
			if !r.CacheExact {
				guess = ", as far as is known"
			}
			line += fmt.Sprintf(" (blocks held: %s%s)", strings.Join(held, ", "), guess)
		}
		fmt.Fprintf(w, "%s: %s\n", r.Replica, line)
	}
	fmt.Fprintln(w)
	switch {
	case x.Winner == "":
		fmt.Fprintf(w, "winner     %s\n", x.Reason)
	default:
		fmt.Fprintf(w, "winner     %s (%s), first token expected in %s\n", x.Winner, x.Reason, inMilliseconds(float64(x.PredictedMS)))
	}
	switch {
	case x.Refused && x.Waits == "":
		fmt.Fprintf(w, "refused    %s; it may come again in %s\n", x.Admission, inMilliseconds(x.RetryAfterMS))
	case x.Waits != "":
		fmt.Fprintf(w, "waits      %s\n", x.Waits)
	}
	for _, s := range x.Shadows {
		same := "the same"
		if !s.Same {
			same = fmt.Sprintf("%s, first token expected in %s", s.Winner, inMilliseconds(float64(s.PredictedMS)))
		}
		fmt.Fprintf(w, "%s would choose %s\n", s.Policy, same)
	}
	_, err := out.Write(w.Bytes())
	return err
}

// inMilliseconds is a time as people read it.
func inMilliseconds(ms float64) string {
	switch {
	case math.IsInf(ms, 0) || math.IsNaN(ms):
		return "-"
	case ms >= 10_000:
		return strconv.FormatFloat(ms/1000, 'f', 1, 64) + " s"
	case ms >= 100:
		return strconv.FormatFloat(ms, 'f', 0, 64) + " ms"
	}
	return strconv.FormatFloat(ms, 'f', 1, 64) + " ms"
}
