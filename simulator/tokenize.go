package simulator

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"net/http"
	"strings"

	follow "github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// tokenizeBody is the body of a request to /tokenize.
type tokenizeBody struct {
	Model      *string        `json:"model"`
	Messages   *[]message     `json:"messages"`
	Tools      jsontext.Value `json:"tools"`
	Prompt     *string        `json:"prompt"`
	ReturnStrs *bool          `json:"return_token_strs"`
	xargs
	Others others `json:",embed"`
}

// tokenize reads the body of POST /tokenize, which is answered at once.
func (s *Server) tokenize(cfg *Config, body []byte) (*request, error) {
	var b tokenizeBody
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	if err := b.Others.refuse("chat_template"); err != nil {
		return nil, err
	}
	var p prompt
	switch {
	case b.Prompt != nil:
		p = textPrompt(*b.Prompt)
	default:
		text, err := renderChat(&requestBody{Messages: b.Messages, Tools: b.Tools})
		if err != nil {
			return nil, err
		}
		p = chatPrompt(follow.Tokenize, body, text)
	}
	s.vocabulary.learn(p.text)
	how := s.faults.Load().peek().Tokenizer
	if b.Xargs != nil && b.Xargs.Sim != nil {
		how = b.Xargs.Sim.Tokenizer
	}
	p.distort(how)
	answer := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []int    `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{MaxModelLen: cfg.MaxModelLen, Tokens: p.ids()}
	if b.ReturnStrs != nil && *b.ReturnStrs {
		answer.TokenStrs = []string{}
		strs := tokensOf(p.text)
		if p.given != nil {
			strs = strs[:0]
			for _, id := range p.given {
				strs = append(strs, s.vocabulary.text([]int{id}))
			}
		}
		for _, t := range strs {
			answer.TokenStrs = append(answer.TokenStrs, strings.ToValidUTF8(t, "\ufffd"))
		}
	}
	answer.Count = len(answer.Tokens)
	r := &request{api: plain}
	var err error
	if r.body, err = json.Marshal(&answer, json.FormatNilSliceAsNull(true)); err != nil {
		return nil, err
	}
	return r, b.xargs.apply(cfg, r)
}

// detokenize reads the body of POST /detokenize, which is answered at once. It
// is the way back from what this server has tokenised.
func (s *Server) detokenize(cfg *Config, body []byte) (*request, error) {
	var b struct {
		Model  *string `json:"model"`
		Tokens *[]int  `json:"tokens"`
		xargs
	}
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	if b.Tokens == nil {
		return nil, missing("tokens")
	}
	for _, id := range *b.Tokens {
		if id < 0 || id >= tokenizer.SimVocabulary {
			return nil, badParameter("tokens", "token id %d is not between 0 and %d.", id, tokenizer.SimVocabulary-1)
		}
	}
	r := &request{api: plain}
	r.body = append(appendString([]byte(`{"prompt":`), s.vocabulary.text(*b.Tokens)), '}')
	return r, b.xargs.apply(cfg, r)
}

// rendered is a prompt as tokens, and how to go on from it.
type rendered struct {
	RequestID string `json:"request_id"`
	TokenIDs  []int  `json:"token_ids"`
	Features  *int   `json:"features"`
	Sampling  struct {
		MaxTokens int      `json:"max_tokens"`
		N         int      `json:"n"`
		Stop      []string `json:"stop"`
	} `json:"sampling_params"`
	Model      string         `json:"model"`
	Stream     bool           `json:"stream"`
	Options    jsontext.Value `json:"stream_options"`
	CacheSalt  *string        `json:"cache_salt"`
	Priority   int            `json:"priority"`
	KVTransfer *int           `json:"kv_transfer_params"`
}

// render serves POST /v1/chat/completions/render and /v1/completions/render:
// the tokens that the engine would see, without generating.
func (s *Server) render(a api) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id := requestID(r, "")
		s.infer(func(cfg *Config, body []byte) (*request, error) {
			asked, err := parseRequest(cfg, a, body)
			if err != nil {
				return nil, err
			}
			if !asked.ownFaults {
				asked.faults = s.faults.Load().peek()
			}
			asked.distort()
			var list []rendered
			for i := range asked.prompts {
				p := &asked.prompts[i]
				one := rendered{RequestID: "cmpl-" + id, TokenIDs: p.ids(), Model: cfg.ServedModelName[0], Stream: asked.stream}
				if a == chat {
					one.RequestID = "chatcmpl-" + id
				}
				if asked.stream && asked.usage {
					one.Options = jsontext.Value(`{"include_usage":true}`)
				}
				one.CacheSalt = asked.salt
				one.Sampling.MaxTokens, one.Sampling.N, one.Sampling.Stop = asked.output, asked.n, asked.stop
				s.vocabulary.learn(p.text)
				list = append(list, one)
			}
			answer := &request{api: plain, faults: asked.faults, ownFaults: asked.ownFaults}
			if a == chat {
				answer.body = appendJSON(nil, list[0])
			} else {
				answer.body = appendJSON(nil, list)
			}
			return answer, nil
		})(w, r)
	}
}
