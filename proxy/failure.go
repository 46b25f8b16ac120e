package proxy

import (
	"cmp"
	"strconv"
)

// failure is how an exchange ended other than well. The table below is the
// only place that maps it to a status, an error type, a metric label and to
// whose fault it is. The zero value is success.
type failure uint8

const (
	none failure = iota

	// The request could not be read: framing is unknown, the connection closes.
	badRequest
	headTooLarge
	bodyTooLarge
	readTimeout
	badVersion
	badExpect
	badEncoding
	buffersFull
	tooManyConns

	// The request was read and is refused: the connection goes on.
	notFound
	badMethod
	badKey
	badJSON
	badForm
	badModel
	noModel
	unknownModel
	forbiddenModel
	badBudget
	overRate
	overBudget
	noReplica
	overloaded
	queueTimeout

	// The engine failed before the first byte of its answer was passed on.
	connectFailed
	connectTimeout
	engineDied
	engineHead
	engineTimeout
	engineDown
	noSocket

	// The answer could not be finished. Nothing can be told to the client but
	// by cutting its connection.
	engineBroke
	engineFraming
	clientLeft
	clientStalled

	// The agent is going away. A request that has no answer yet is told so.
	shutDown

	failures // how many there are
)

// blame says whose fault a failure is.
type blame uint8

const (
	byNobody blame = iota
	byClient
	byEngine
	byAgent
)

func (b blame) String() string {
	return [...]string{"nobody", "client", "engine", "agent"}[b]
}

var failureTable = [failures]struct {
	status int // 0: nothing is answered
	kind   string
	label  string
	blame  blame
	text   string // the message unless the exchange has a more precise one
}{
	none: {200, "", "ok", byNobody, ""},

	badRequest:   {400, "BadRequestError", "bad_request", byClient, "The request is not valid HTTP/1.1."},
	headTooLarge: {431, "RequestHeaderFieldsTooLargeError", "head_too_large", byClient, "The request's header section is too large."},
	bodyTooLarge: {413, "RequestEntityTooLargeError", "body_too_large", byClient, "The request body is too large."},
	readTimeout:  {408, "RequestTimeoutError", "read_timeout", byClient, "The request did not arrive in time."},
	badVersion:   {400, "BadRequestError", "bad_version", byClient, "Only HTTP/1.1 and HTTP/1.0 are spoken here."},
	badEncoding:  {415, "UnsupportedMediaTypeError", "bad_encoding", byClient, "A compressed request body is not taken; send it as it is."},
	buffersFull:  {503, "ServiceUnavailableError", "buffers_full", byAgent, "The agent holds as many request bodies as it may; try again."},
	tooManyConns: {503, "ServiceUnavailableError", "too_many_connections", byAgent, "The agent has as many connections as it may; try again."},
	badExpect:    {417, "ExpectationFailedError", "bad_expect", byClient, "The only expectation understood is 100-continue."},

	notFound:       {404, "NotFoundError", "not_found", byClient, "Not Found"},
	badMethod:      {405, "MethodNotAllowedError", "bad_method", byClient, "Method Not Allowed"},
	badKey:         {401, "AuthenticationError", "bad_key", byClient, "The API key is missing or not known here; send it as Authorization: Bearer KEY."},
	badForm:        {400, "BadRequestError", "bad_form", byClient, "The request body is not a form."},
	badJSON:        {400, "BadRequestError", "bad_json", byClient, "The request body is not a JSON object."},
	badModel:       {400, "BadRequestError", "bad_model", byClient, "The model must be a string."},
	noModel:        {400, "BadRequestError", "no_model", byClient, "The request names no model, and more than one is served."},
	unknownModel:   {404, "NotFoundError", "unknown_model", byClient, "The model does not exist."},
	forbiddenModel: {403, "PermissionDeniedError", "forbidden_model", byClient, "The API key may not be used for this model."},
	overRate:       {429, "RateLimitError", "over_rate", byClient, "The API key has used up what it may use in a minute."},
	badBudget:      {400, "BadRequestError", "bad_budget", byClient, "The field x-inferrail-budget-ms is not a number of milliseconds."},
	overBudget:     {503, "ServiceUnavailableError", "over_budget", byAgent, "Requests take longer to their first token than this one grants; try again."},
	overloaded:     {503, "ServiceUnavailableError", "overloaded", byAgent, "Every engine that serves the model has as many requests as it may; try again."},
	queueTimeout:   {503, "ServiceUnavailableError", "queue_timeout", byAgent, "The request's turn did not come in time; try again."},
	noReplica:      {503, "ServiceUnavailableError", "no_replica", byAgent, "No engine that serves the model is available."},

	connectFailed:  {502, "BadGatewayError", "connect_failed", byEngine, "The engine could not be reached."},
	connectTimeout: {504, "GatewayTimeoutError", "connect_timeout", byEngine, "The engine did not accept the connection in time."},
	engineDied:     {502, "BadGatewayError", "engine_died", byEngine, "The engine closed the connection before it answered."},
	engineHead:     {502, "BadGatewayError", "engine_head", byEngine, "The engine's answer is not valid HTTP/1.1."},
	engineDown:     {502, "BadGatewayError", "engine_down", byEngine, "The engine failed its health check while the request waited."},
	noSocket:       {503, "ServiceUnavailableError", "no_socket", byAgent, "The agent cannot open a connection; try again."},
	engineTimeout:  {504, "GatewayTimeoutError", "engine_timeout", byEngine, "The engine did not answer in time."},

	engineBroke:   {0, "BadGatewayError", "engine_broke", byEngine, "The engine's answer broke off."},
	engineFraming: {0, "BadGatewayError", "engine_framing", byEngine, "The engine's answer is framed wrongly."},
	clientLeft:    {0, "", "client_left", byClient, "The client left."},
	clientStalled: {0, "", "client_stalled", byClient, "The client stopped taking the answer."},
	shutDown:      {503, "ServiceUnavailableError", "shut_down", byAgent, "The agent is stopping; try again."},
}

// retried reports that a request that failed so may be sent to another engine.
func (f failure) retried() bool { return f >= connectFailed && f <= engineDown && f != engineTimeout }

// fatal reports that the connection's framing is unknown after f, or that an
// answer was cut: it can serve no further request.
func (f failure) fatal() bool { return f != none && (f <= tooManyConns || f >= engineBroke) }

func (f failure) label() string { return failureTable[f].label }

// appendError appends the error body in the shape vLLM gives it. A failure that
// has no status is told within a stream, as a bad gateway's.
func appendError(dst []byte, f failure, message, param string) []byte {
	row := &failureTable[f]
	if message == "" {
		message = row.text
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = appendJSONString(dst, message)
	dst = append(dst, `,"type":`...)
	dst = appendJSONString(dst, row.kind)
	dst = append(dst, `,"param":`...)
	if param == "" {
		dst = append(dst, "null"...)
	} else {
		dst = appendJSONString(dst, param)
	}
	dst = append(dst, `,"code":`...)
	dst = strconv.AppendInt(dst, int64(cmp.Or(row.status, 502)), 10)
	return append(dst, "}}"...)
}

// appendMessagesError appends the error body in the shape of Anthropic's
// Messages API, as vLLM does on its paths.
func appendMessagesError(dst []byte, f failure, message string) []byte {
	row := &failureTable[f]
	dst = append(dst, `{"type":"error","error":{"type":`...)
	dst = appendJSONString(dst, row.kind)
	dst = append(dst, `,"message":`...)
	dst = appendJSONString(dst, cmp.Or(message, row.text))
	return append(dst, "}}"...)
}
