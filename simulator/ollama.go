package simulator

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
