// Package template renders models' chat templates as Jinja in Python does, set
// up as transformers sets it up. The rendering is github.com/ardanlabs/jinja's;
// this package writes each template anew for it, so that what comes out is
// what Python's Jinja would have written, or refuses what it cannot write so.
//
//	source -> tokens     lexer.go       as Jinja's lexer: trim_blocks, lstrip_blocks, line ends
//	       -> syntax     syntax.go      as its parser; scope.go and content.go read from it what
//	                                    vLLM wants to know of a template
//	       -> rewritten  rewrite.go     statements, scopes and calls stay the library's; what Python
//	                     and others     does in another way becomes a call of an operation of ours
//	       -> text       template.go    the library renders; value.go, method.go, filter.go and
//	                                    others are the operations
//
// The package has no I/O. Time is an argument, but for the bound on how long
// one render may take.
package template
