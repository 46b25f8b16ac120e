package proxy

import "bytes"

// route is what a request's path asks for.
type route uint8

const (
	routeUnknown route = iota
	// routeGenerate: chat and completions. Their streams tell usage when asked.
	routeGenerate
	// routeAnswer: other paths that generate an answer.
	routeAnswer
	// routeInference: paths whose answer is computed, not generated.
	routeInference
	// routeForm: the body is a form with a model field.
	routeForm
	routeModels
	routeModel
	routeHealth
)

// routeOf returns the route of a request's path and the methods it takes. The
// paths are those of vLLM and SGLang that compute something for a model; what
// manages an engine is not reached through the agent.
func routeOf(path []byte) (r route, allow string) {
	switch string(path) {
	case "/v1/chat/completions", "/v1/completions":
		return routeGenerate, "POST"
	case "/v1/responses", "/v1/messages", "/v1/chat/completions/batch",
		"/inference/v1/generate", "/invocations", "/generate", "/generate_stream":
		return routeAnswer, "POST"
	case "/v1/messages/count_tokens",
		"/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render",
		"/generative_scoring", "/v1/decisions",
		"/v1/embeddings", "/v2/embed", "/encode", "/pooling",
		"/classify", "/v1/classify", "/score", "/v1/score",
		"/rerank", "/v1/rerank", "/v2/rerank",
		"/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
		"/v1/audio/speech", "/v1/images/generations":
		return routeInference, "POST"
	case "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits":
		return routeForm, "POST"
	case "/v1/models":
		return routeModels, "GET, HEAD"
	case "/health":
		return routeHealth, "GET, HEAD"
	}
	if bytes.HasPrefix(path, []byte(modelPrefix)) {
		return routeModel, "GET, HEAD"
	}
	return routeUnknown, ""
}

// modelPrefix is before the name of one model.
const modelPrefix = "/v1/models/"
