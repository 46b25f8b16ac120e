// Package virtual serves a workload in virtual time: engines of package simulator
// behind an agent that knows, predicts, chooses and learns with the code of packages
// index and policy. Nothing sleeps, no socket is opened, and the same seed gives the
// same run. Hours of traffic take seconds.
package virtual
