package agent

import (
	"encoding/hex"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// keysOf makes the keys of clients. One that was in old under the same name
// keeps its budget: what it has used of this minute stays used.
func keysOf(c *ServerConfig, old []*proxy.Key, now time.Time) (keys []*proxy.Key) {
	budgets := map[string]*policy.Budget{}
	for _, k := range old {
		budgets[k.Name] = k.Budget
	}
	for _, kc := range c.APIKeys {
		k := &proxy.Key{Name: kc.Name, Models: kc.Models, Class: kc.Class, Budget: budgets[kc.Name]}
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
		keys = append(keys, k)
	}
	return keys
}
