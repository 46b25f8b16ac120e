package agent

import (
	"fmt"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// The bounds of RoutingConfig.Pieces: of less most is what a request costs by itself, and
// with more hardly any prompt is cut.
const (
	leastPieces = DurationOrOff(50 * time.Millisecond)
	mostPieces  = DurationOrOff(time.Minute)
)

// piecesOf is what long prompts are cut by that p chooses for.
func piecesOf(pieces DurationOrOff, p policy.Policy) policy.Pieces {
	return policy.Pieces{Length: pieces.seconds()}.With(p)
}

func (c *Config) validatePieces(p *problems) {
	const off = "sends each prompt whole"
	p.within("routing.pieces", c.Routing.Pieces, leastPieces, mostPieces, off)
	for i := range c.Models {
		p.within(fmt.Sprintf("models[%d].pieces", i), c.Models[i].Pieces, leastPieces, mostPieces, off)
	}
}
