package simulator

import "errors"

// Ollama is what only Ollama is told when it starts, in its environment.
type Ollama struct{}

func (o *Ollama) complete()    {}
func (o *Ollama) check() error { return errors.Join() }

func ollamaFace() *face {
	return uvicorn(&face{parsers: openAIParsers(), mount: ollamaRoutes, appendError: appendVLLMError})
}

// ollamaRoutes adds its paths.
func ollamaRoutes(s *Server, on route) { openAIRoutes(s, on) }

// ollama makes what the page of metrics shows.
func (m *metrics) ollama(*rank) *rankMetrics {
	rm := &rankMetrics{}
	rm.counters("", nil)
	return rm
}
