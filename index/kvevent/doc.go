// Package kvevent knows the KV events of vLLM and SGLang: their form on the
// wire, and how to follow a publisher through lost messages and restarts.
//
// It has no I/O, no clock and no goroutine: the agent moves the messages, the
// simulator makes them.
package kvevent
