package agent

import (
	"encoding/hex"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// accessOf says who may send requests. A key that was in old under the same
// name keeps its budget: what it has used of this minute stays used.
func accessOf(c *ServerConfig, old *proxy.Access, now time.Time) *proxy.Access {
	budgets := map[string]*policy.Budget{}
	if old != nil {
		for _, k := range old.Keys {
			budgets[k.Name] = k.Budget
		}
	}
	access := &proxy.Access{Origins: c.CORSOrigins}
	for _, kc := range c.APIKeys {
		k := &proxy.Key{Name: kc.Name, Models: kc.Models, Budget: budgets[kc.Name]}
		// Validate has seen to the length.
		hex.Decode(k.Hash[:], []byte(kc.SHA256))
		rates := policy.Rates{
			Requests:     int64(kc.RequestsPerMinute),
			InputTokens:  int64(kc.InputTokensPerMinute),
			OutputTokens: int64(kc.OutputTokensPerMinute),
		}
		if k.Budget == nil {
			k.Budget = policy.NewBudget(rates, now)
		} else {
			k.Budget.SetRates(rates, now)
		}
		access.Keys = append(access.Keys, k)
	}
	return access
}
