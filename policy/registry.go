package policy

import "fmt"

// Default is the policy where none is configured.
const Default = "least_request"

// New returns the policy of a name, with the weights that are given in place of
// its defaults. An error says which names or weights there are.
func New(name string, weights map[string]float64) (Policy, error) {
	switch name {
	case "least_request":
		return LeastRequest{}, nil
	case "cost_model":
		return NewCostModel(), nil
	}
	return nil, fmt.Errorf("no policy %q", name)
}

// Names are the names that New takes.
func Names() []string { return []string{"cost_model", "least_request"} }
