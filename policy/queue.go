package policy

// Queue is the order in which those that wait are served: classes by their rank,
// within one the tenants in turn, by deficit round robin in uncached tokens
// (Shreedhar, Varghese 1995), and of a tenant the first come first. It is not safe
// for concurrent use: its owner has a lock. The zero value is empty.
type Queue[T any] struct {
}

// Ticket is what is queued.
type Ticket[T any] struct {
	Value T
	// Class is the rank of its class, the lowest first. Tenant is whose it is, and
	// Tokens what it costs.
	Class  int
	Tenant string
	Tokens int
}
