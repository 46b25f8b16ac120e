package simulator

func sglangFace() *face {
	return uvicorn(&face{parsers: openAIParsers(), mount: sglangRoutes, appendError: appendVLLMError})
}

// sglangRoutes adds SGLang's own paths.
func sglangRoutes(s *Server, on route) {
	openAIRoutes(s, on)
	on("GET", "/server_info", s.serverInfo)
	on("GET", "/get_server_info", s.serverInfo)
	on("GET", "/v1/loads", s.telling(s.loads))
	on("POST", "/flush_cache", s.flushCache, "GET")
}
