package prompt

// Reason is why a prompt is only approximate. The zero value means that it is
// exact.
type Reason uint8

const (
	Exact Reason = iota
	// NoTokenizer: none is configured, and none was found.
	NoTokenizer
	// BadTokenizer: there is one that cannot be followed.
	BadTokenizer
	// NoTemplate and BadTemplate: a chat of a model whose template is missing
	// or cannot be followed.
	NoTemplate
	BadTemplate
	// EngineRenders: the engine renders this model's chats by code of its own
	// that the agent does not have.
	EngineRenders
	// Demoted: an engine has counted or computed other tokens.
	Demoted
	// Route: the route's prompts are not followed.
	Route
	// Media: the prompt holds images, audio, video or embeddings of them.
	Media
	// Embeds: it is given as prompt_embeds.
	Embeds
	// Truncated: the request asks the engine to cut it.
	Truncated
	// RequestTemplate: the request brings a template of its own.
	RequestTemplate
	// Malformed: the engine will refuse it, or nobody knows what it does.
	Malformed
	// Unfollowed: the request uses something that the agent does not follow.
	Unfollowed
	// RenderFailed: the template refuses the messages. The engine will too.
	RenderFailed
	// TooLarge, QueueFull and Late: it would have taken, or did take, too long.
	TooLarge
	QueueFull
	Late
	// Failed: following it panicked. A defect; it is logged.
	Failed
	countReasons
)

var reasonNames = [countReasons]string{
	Exact:           "exact",
	NoTokenizer:     "no_tokenizer",
	BadTokenizer:    "bad_tokenizer",
	NoTemplate:      "no_template",
	BadTemplate:     "bad_template",
	EngineRenders:   "engine_renders",
	Demoted:         "demoted",
	Route:           "route",
	Media:           "media",
	Embeds:          "prompt_embeds",
	Truncated:       "truncated",
	RequestTemplate: "request_template",
	Malformed:       "malformed",
	Unfollowed:      "unfollowed",
	RenderFailed:    "render_failed",
	TooLarge:        "too_large",
	QueueFull:       "queue_full",
	Late:            "late",
	Failed:          "failed",
}

// String is the reason as a metric label.
func (r Reason) String() string { return reasonNames[r] }

// Reasons are all there are, for whoever counts by them.
const Reasons = int(countReasons)
