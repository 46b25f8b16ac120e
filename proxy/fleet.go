package proxy

import (
	"sync/atomic"

	"github.com/inferrail/inferrail/policy"
)

// Fleet is what requests can be routed to: an immutable snapshot that the
// agent publishes (Server.SetFleet) and each request reads once.
type Fleet struct {
	// Models maps every name a client may use, aliases included, to its model.
	Models map[string]*Model
	// Listed are the models in the order GET /v1/models shows them.
	Listed []*Model
}

// Model is one served model. Immutable once published.
type Model struct {
	// Name is what engines know it by. A request that used an alias has its
	// model member rewritten to Name.
	Name    string
	Aliases []string
	// Created and OwnedBy are shown in GET /v1/models, MaxModelLen when not 0.
	Created     int64
	OwnedBy     string
	MaxModelLen int64
	Policy      policy.Policy
	// Replicas that serve it and may be chosen now.
	Replicas []*Replica
}

// Replica is one engine endpoint. The agent makes it with NewReplica, keeps it
// across snapshots for as long as the endpoint is a member, and closes it when
// it has left. Its counters and idle connections may be used from any
// goroutine.
type Replica struct {
	// Slot is the agent's dense number for the endpoint.
	Slot int
	// ID names it to people: header x-inferrail-replica, metric labels.
	ID string
	// Addr is host:port to dial; Host is sent as the Host field; BasePath is
	// put before the request's path ("" for none).
	Addr, Host, BasePath string

	inFlight atomic.Int64
	upstream upstream
}

// InFlight is the number of requests sent to the replica and not finished.
func (r *Replica) InFlight() int { return int(r.inFlight.Load()) }
