package simulator

func llamacppFace() *face {
	return uvicorn(&face{parsers: openAIParsers(), mount: llamacppRoutes, appendError: appendVLLMError})
}

// llamacppRoutes adds its paths.
func llamacppRoutes(s *Server, on route) { openAIRoutes(s, on) }

// llamacpp makes what the page of metrics shows.
func (m *metrics) llamacpp(*rank) *rankMetrics {
	rm := &rankMetrics{}
	rm.counters("", nil)
	return rm
}
