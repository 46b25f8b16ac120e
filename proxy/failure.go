package proxy

import (
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

	// The request was read and is refused: the connection goes on.
	notFound
	badMethod
	badJSON
	badModel
	noModel
	unknownModel
	noReplica

	// The engine failed before the first byte of its answer was passed on.
	connectFailed
	connectTimeout
	engineDied
	engineHead
	engineTimeout

	// The answer could not be finished. Nothing can be told to the client but
	// by cutting its connection.
	engineBroke
	engineFraming
	clientLeft
	clientStalled
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
	badVersion:   {505, "HTTPVersionNotSupportedError", "bad_version", byClient, "Only HTTP/1.1 and HTTP/1.0 are spoken here."},
	badExpect:    {417, "ExpectationFailedError", "bad_expect", byClient, "The only expectation understood is 100-continue."},

	notFound:     {404, "NotFoundError", "not_found", byClient, "Not Found"},
	badMethod:    {405, "MethodNotAllowedError", "bad_method", byClient, "Method Not Allowed"},
	badJSON:      {400, "BadRequestError", "bad_json", byClient, "The request body is not a JSON object."},
	badModel:     {400, "BadRequestError", "bad_model", byClient, "The model must be a string."},
	noModel:      {400, "BadRequestError", "no_model", byClient, "The request names no model, and more than one is served."},
	unknownModel: {404, "NotFoundError", "unknown_model", byClient, "The model does not exist."},
	noReplica:    {503, "ServiceUnavailableError", "no_replica", byAgent, "No engine that serves the model is available."},

	connectFailed:  {502, "BadGatewayError", "connect_failed", byEngine, "The engine could not be reached."},
	connectTimeout: {504, "GatewayTimeoutError", "connect_timeout", byEngine, "The engine did not accept the connection in time."},
	engineDied:     {502, "BadGatewayError", "engine_died", byEngine, "The engine closed the connection before it answered."},
	engineHead:     {502, "BadGatewayError", "engine_head", byEngine, "The engine's answer is not valid HTTP/1.1."},
	engineTimeout:  {504, "GatewayTimeoutError", "engine_timeout", byEngine, "The engine did not answer in time."},

	engineBroke:   {0, "", "engine_broke", byEngine, "The engine's answer broke off."},
	engineFraming: {0, "", "engine_framing", byEngine, "The engine's answer is framed wrongly."},
	clientLeft:    {0, "", "client_left", byClient, "The client left."},
	clientStalled: {0, "", "client_stalled", byClient, "The client stopped taking the answer."},
	shutDown:      {0, "", "shut_down", byAgent, "The agent was stopped."},
}

// fatal reports that the connection's framing is unknown after f, or that an
// answer was cut: it can serve no further request.
func (f failure) fatal() bool { return f != none && (f <= badExpect || f >= engineBroke) }

func (f failure) label() string { return failureTable[f].label }

// appendError appends the error body in the shape vLLM gives it.
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
	dst = strconv.AppendInt(dst, int64(row.status), 10)
	return append(dst, "}}"...)
}
