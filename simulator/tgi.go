package simulator

func tgiFace() *face {
	return uvicorn(&face{parsers: openAIParsers(), mount: tgiRoutes, guarded: versioned, appendError: appendVLLMError})
}

// tgiRoutes adds its paths.
func tgiRoutes(s *Server, on route) { openAIRoutes(s, on) }

// tgi makes what the page of metrics shows.
func (m *metrics) tgi(*rank) *rankMetrics {
	rm := &rankMetrics{}
	rm.counters("", nil)
	return rm
}
