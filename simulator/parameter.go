package simulator

import (
	"encoding/json/v2"
	"math"
	"slices"
	"strconv"
)

// parameter is what becomes of a member of a chat or of a request for
// completions that has no field of requestBody. A member that is in no table is
// one that the engine does not know, and ignores, as do vLLM and SGLang.
type parameter struct {
	// harmless says why the member cannot change what this engine answers; it is
	// accepted then. Where it is empty the member is refused by its name if it
	// asks for something.
	harmless string
	// within, when set, are the bounds of its number, as the engine checks them
	// and says so.
	within *bounds
	// refusal, when set, is the engine's own.
	refusal string
}

// bounds are those of a number: low itself is one of them unless above is set.
type bounds struct {
	low, high float64
	above     bool
	says      string
}

// Why a parameter changes nothing.
const (
	drawn     = "how a text is drawn does not change that it is one: the model's is drawn from the engine's own seed"
	noSpecial = "the model has no special tokens"
	noThought = "the model does not think"
	oneCall   = "a choice calls one tool"
	noMedia   = "media are read as a mark of their kind"
	template  = "the model's template asks for none of it"
	followed  = "the prompt's tokens are found by the agent's own code, which follows it"
	noDisk    = "an engine without a connector ignores it"
	aside     = "it is for people or routers"
)

// parameters are those that vLLM 0.32 knows, and some that earlier ones did.
var parameters = map[string]parameter{
	"temperature":        {harmless: drawn, within: &bounds{0, 2, false, "temperature must be in [0, 2]"}},
	"top_p":              {harmless: drawn, within: &bounds{0, 1, true, "top_p must be in (0, 1]"}},
	"top_k":              {harmless: drawn, within: &bounds{-1, math.MaxInt32, false, "top_k must be 0 (disable), or at least 1"}},
	"min_p":              {harmless: drawn, within: &bounds{0, 1, false, "min_p must be in [0, 1]"}},
	"presence_penalty":   {harmless: drawn, within: &bounds{-2, 2, false, "presence_penalty must be in [-2, 2]"}},
	"frequency_penalty":  {harmless: drawn, within: &bounds{-2, 2, false, "frequency_penalty must be in [-2, 2]"}},
	"repetition_penalty": {harmless: drawn, within: &bounds{0, math.MaxFloat64, true, "repetition_penalty must be greater than zero"}},
	"seed":               {harmless: drawn},
	"length_penalty":     {harmless: "it is for beams, which are refused"},

	"skip_special_tokens":           {harmless: noSpecial},
	"spaces_between_special_tokens": {harmless: noSpecial},
	"add_special_tokens":            {harmless: noSpecial},
	"reasoning_effort":              {harmless: noThought},
	"include_reasoning":             {harmless: noThought},
	"thinking_token_budget":         {harmless: noThought},
	"parallel_tool_calls":           {harmless: oneCall},
	"media_io_kwargs":               {harmless: noMedia},
	"mm_processor_kwargs":           {harmless: noMedia},
	"chat_template_kwargs":          {harmless: template},
	"add_generation_prompt":         {harmless: followed},
	"continue_final_message":        {harmless: followed},
	"truncation_side":               {harmless: "nothing is cut, for truncate_prompt_tokens is refused"},
	"kv_transfer_params":            {harmless: noDisk},
	"ec_transfer_params":            {harmless: noDisk},
	"user":                          {harmless: aside},
	"session_id":                    {harmless: aside},

	"priority": {refusal: "Got priority %s but Priority scheduling is not enabled."},

	"logprobs": {}, "top_logprobs": {}, "prompt_logprobs": {}, "logprob_token_ids": {}, "return_tokens_as_token_ids": {},
	"echo": {}, "suffix": {}, "best_of": {}, "use_beam_search": {}, "prompt_embeds": {}, "include_stop_str_in_output": {},
	"chat_template": {}, "documents": {}, "truncate_prompt_tokens": {}, "stop_token_ids": {}, "bad_words": {}, "allowed_token_ids": {},
	"logit_bias": {}, "watermarking": {}, "repetition_detection": {}, "routed_experts_prompt_start": {}, "return_token_offsets": {},
	"return_prompt_text": {}, "mm_payload": {}, "return_mm_kwargs": {},
	"guided_json": {}, "guided_regex": {}, "guided_choice": {}, "guided_grammar": {}, "guided_decoding_backend": {},
	"functions": {}, "function_call": {},
}

// sglangParameters are those that only SGLang knows.
var sglangParameters = map[string]parameter{
	"priority":               {harmless: aside},
	"routing_key":            {harmless: aside},
	"separate_reasoning":     {harmless: noThought},
	"stream_reasoning":       {harmless: noThought},
	"bootstrap_host":         {harmless: noDisk},
	"bootstrap_port":         {harmless: noDisk},
	"bootstrap_room":         {harmless: noDisk},
	"no_stop_trim":           {},
	"regex":                  {},
	"ebnf":                   {},
	"json_schema":            {},
	"structural_tag":         {},
	"stop_regex":             {},
	"session_params":         {},
	"input_ids":              {},
	"return_hidden_states":   {},
	"return_routed_experts":  {},
	"return_meta_info":       {},
	"custom_logit_processor": {},
}

// parameter returns what becomes of a member, and whether the engine knows it.
func (c *Config) parameter(name string) (parameter, bool) {
	if c.sglang() {
		if p, ok := sglangParameters[name]; ok {
			return p, true
		}
	}
	p, ok := parameters[name]
	return p, ok
}

// check refuses the first of the members that the engine refuses, in the order of
// their names.
func (o others) check(cfg *Config) error {
	for _, name := range slices.Sorted(mapKeys(o)) {
		p, ok := cfg.parameter(name)
		switch {
		case !ok:
		case p.within != nil:
			if err := p.within.check(name, o[name]); err != nil {
				return err
			}
		case p.harmless != "":
		case p.refusal != "":
			if o.refuse(name) != nil {
				return badParameter(name, p.refusal, o[name])
			}
		default:
			if err := o.refuse(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// check checks the number in a member.
func (b *bounds) check(name string, text []byte) error {
	if string(text) == "null" {
		return nil
	}
	var v float64
	if json.Unmarshal(text, &v) != nil {
		return invalid(name, name+" has a value of the wrong type or range")
	}
	if v < b.low || v > b.high || b.above && v == b.low {
		return badParameter(name, "%s, got %s.", b.says, strconv.FormatFloat(v, 'f', -1, 64))
	}
	return nil
}
