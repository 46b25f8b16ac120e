package simulator

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// vectorSize is the number of dimensions of an embedding.
const vectorSize = 256

// pooled is what the routes that generate nothing answer with.
type pooled struct {
	// vectors, one for each input: an embedding, or the probabilities of
	// classes.
	vectors [][]float32
	base64  bool
	// scores, in the order of the answer, of the documents they name.
	scores []score
}

// score is how well a document fits a query.
type score struct {
	document int
	text     string
	value    float32
}

// embed returns the vector of token ids, of length 1: the normed sum of a
// random vector for each. So texts that share tokens point in like directions,
// whatever the engine's seed.
func embed(ids []int, dimensions int) []float32 {
	sums := make([]float64, dimensions)
	for _, id := range ids {
		state := mix(uint64(id) + golden)
		for d := 0; d < dimensions; d += 8 {
			state += golden
			var draw [8]byte
			binary.LittleEndian.PutUint64(draw[:], mix(state))
			for i, b := range draw[:min(8, dimensions-d)] {
				sums[d+i] += float64(int8(b))
			}
		}
	}
	square := 0.0
	for _, s := range sums {
		square += s * s
	}
	vector := make([]float32, dimensions)
	if square == 0 {
		vector[0] = 1
		return vector
	}
	for d, s := range sums {
		vector[d] = float32(s / math.Sqrt(square))
	}
	return vector
}

// similar returns how alike two texts are, from 0 to 1 for equal ones.
func similar(a, b string) float32 {
	x, y := embed(tokenIDs(a), vectorSize), embed(tokenIDs(b), vectorSize)
	product := 0.0
	for d := range x {
		product += float64(x[d]) * float64(y[d])
	}
	return float32(min(1, max(0, (1+product)/2)))
}

// classesOf returns the probabilities of two classes.
func classesOf(p *prompt) []float32 {
	first := float32(mix(p.hash)>>40) / (1 << 24)
	return []float32{first, 1 - first}
}

// poolingBody is the body of a request to embeddings, pooling or classify.
type poolingBody struct {
	Model      *string        `json:"model"`
	Input      jsontext.Value `json:"input"`
	Messages   *[]message     `json:"messages"`
	Encoding   *string        `json:"encoding_format"`
	Dimensions *int           `json:"dimensions"`
	Task       *string        `json:"task"`
	xargs
	Others others `json:",embed"`
}

// parsePooling reads the body of POST /v1/embeddings, /pooling and /classify.
func parsePooling(cfg *Config, a api, body []byte) (*request, error) {
	var b poolingBody
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	if err := b.Others.refuse("truncate_prompt_tokens", "additional_data", "data"); err != nil {
		return nil, err
	}
	for name, known := range map[string]string{"embed_dtype": `"float32"`, "endianness": `"native"`} {
		if string(b.Others[name]) != known {
			if err := b.Others.refuse(name); err != nil {
				return nil, err
			}
		}
	}
	r := &request{api: a, n: 1, output: 1, finish: "stop", pooled: &pooled{}, adapter: cfg.adapter(b.Model)}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	if b.Messages != nil {
		text, err := renderChat(&requestBody{Messages: b.Messages})
		if err != nil {
			return nil, err
		}
		r.prompts = []prompt{textPrompt(text)}
	} else {
		var err error
		if r.prompts, err = readPrompts("input", b.Input); err != nil {
			return nil, err
		}
	}
	if err := r.fits(cfg); err != nil {
		return nil, err
	}
	switch encoding := deref(b.Encoding); encoding {
	case "", "float":
	case "base64":
		r.pooled.base64 = true
	default:
		return nil, badParameter("encoding_format", "The simulated engine does not support `encoding_format` %q.", encoding)
	}
	dimensions := vectorSize
	if b.Dimensions != nil {
		dimensions = *b.Dimensions
	}
	if dimensions < 1 || dimensions > vectorSize {
		return nil, badParameter("dimensions", "dimensions must be between 1 and %d, got %d.", vectorSize, dimensions)
	}
	classes := a == classification
	switch task := deref(b.Task); {
	case a == pooling && task == "classify":
		classes = true
	case task != "" && task != "embed":
		return nil, badParameter("task", "The simulated engine does not support the task %q.", task)
	}
	for i := range r.prompts {
		p := &r.prompts[i]
		if classes {
			r.pooled.vectors = append(r.pooled.vectors, classesOf(p))
		} else {
			r.pooled.vectors = append(r.pooled.vectors, embed(p.ids(), dimensions))
		}
	}
	return r, nil
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// fits checks that every prompt fits into the context. Nothing follows it.
func (r *request) fits(cfg *Config) error {
	for i := range r.prompts {
		if n := r.prompts[i].tokens; n > cfg.MaxModelLen {
			return badParameter("input_tokens", "This model's maximum context length is %d tokens. "+
				"However, your request has %d input tokens. Please reduce the length of the input.", cfg.MaxModelLen, n)
		}
	}
	return nil
}

// readTexts reads a text or a list of texts.
func readTexts(name string, v jsontext.Value) ([]string, error) {
	var one string
	var list []string
	switch {
	case len(v) == 0 || v.Kind() == 'n':
		return nil, missing(name)
	case json.Unmarshal(v, &one) == nil:
		return []string{one}, nil
	case json.Unmarshal(v, &list) != nil:
		return nil, invalid(name, name+" must be a string or a list of strings")
	case len(list) == 0 || len(list) > maxChoices:
		return nil, badParameter(name, "%s must hold 1 to %d texts, got %d.", name, maxChoices, len(list))
	}
	return list, nil
}

// scoreBody is the body of a request to score or rerank.
type scoreBody struct {
	Model     *string        `json:"model"`
	Text1     jsontext.Value `json:"text_1"`
	Text2     jsontext.Value `json:"text_2"`
	Queries   jsontext.Value `json:"queries"`
	Query     jsontext.Value `json:"query"`
	Documents jsontext.Value `json:"documents"`
	TopN      *int           `json:"top_n"`
	xargs
	Others others `json:",embed"`
}

// parseScore reads the body of POST /score.
func parseScore(cfg *Config, body []byte) (*request, error) {
	var b scoreBody
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	first, second := "text_1", "text_2"
	if len(b.Queries) > 0 || len(b.Documents) > 0 {
		first, second, b.Text1, b.Text2 = "queries", "documents", b.Queries, b.Documents
	}
	queries, err := readTexts(first, b.Text1)
	if err != nil {
		return nil, err
	}
	documents, err := readTexts(second, b.Text2)
	if err != nil {
		return nil, err
	}
	if len(queries) != 1 && len(queries) != len(documents) {
		return nil, badParameter(first, "Input lengths must be either 1:1, 1:N or N:N")
	}
	return b.pairs(cfg, scores, queries, documents)
}

// parseRerank reads the body of POST /rerank.
func parseRerank(cfg *Config, body []byte) (*request, error) {
	var b scoreBody
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	if b.Query.Kind() == '[' {
		return nil, invalid("query", "query must be a string")
	}
	query, err := readTexts("query", b.Query)
	if err != nil {
		return nil, err
	}
	if b.Documents.Kind() == '"' {
		return nil, invalid("documents", "documents must be a list of strings")
	}
	documents, err := readTexts("documents", b.Documents)
	if err != nil {
		return nil, err
	}
	r, err := b.pairs(cfg, reranking, query, documents)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(r.pooled.scores, func(a, b score) int {
		switch {
		case a.value > b.value:
			return -1
		case a.value < b.value:
			return 1
		}
		return 0
	})
	if b.TopN != nil && *b.TopN > 0 && *b.TopN < len(documents) {
		r.pooled.scores = r.pooled.scores[:*b.TopN]
	}
	return r, nil
}

// pairs returns the request that scores each document with its query, or with
// the only one.
func (b *scoreBody) pairs(cfg *Config, a api, queries, documents []string) (*request, error) {
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	if err := b.Others.refuse("truncate_prompt_tokens", "max_tokens_per_doc"); err != nil {
		return nil, err
	}
	r := &request{api: a, n: 1, output: 1, finish: "stop", pooled: &pooled{}, adapter: cfg.adapter(b.Model)}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	for i, d := range documents {
		q := queries[min(i, len(queries)-1)]
		r.prompts = append(r.prompts, textPrompt(q+"\n"+d))
		r.pooled.scores = append(r.pooled.scores, score{i, d, similar(q, d)})
	}
	return r, r.fits(cfg)
}

// appendPooled appends the body of an answer of a route that generates
// nothing.
func (a *answer) appendPooled(dst []byte) []byte {
	tokens := a.promptTokens()
	prefix := map[api]string{embeddings: "embd-", pooling: "pool-", classification: "classify-", scores: "score-", reranking: "rerank-"}[a.req.api]
	dst = append(dst, `{"id":`...)
	dst = appendString(dst, prefix+a.id)
	if a.req.api == reranking {
		dst = append(dst, `,"model":`...)
		dst = appendString(dst, a.model)
		dst = fmt.Appendf(dst, `,"usage":{"prompt_tokens":%d,"total_tokens":%d},"results":[`, tokens, tokens)
		for i, s := range a.req.pooled.scores {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = fmt.Appendf(dst, `{"index":%d,"document":{"text":`, s.document)
			dst = appendString(dst, s.text)
			dst = append(dst, `,"multi_modal":null},"relevance_score":`...)
			dst = append(appendFloat(dst, s.value), '}')
		}
		return append(dst, "]}"...)
	}
	dst = append(dst, `,"object":"list","created":`...)
	dst = strconv.AppendInt(dst, a.created, 10)
	dst = append(dst, `,"model":`...)
	dst = appendString(dst, a.model)
	dst = append(dst, `,"data":[`...)
	for i, v := range a.req.pooled.vectors {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = fmt.Appendf(dst, `{"index":%d,`, i)
		switch a.req.api {
		case classification:
			label := 0
			if v[1] > v[0] {
				label = 1
			}
			dst = fmt.Appendf(dst, `"label":"LABEL_%d","probs":`, label)
			dst = fmt.Appendf(appendFloats(dst, v), `,"num_classes":%d}`, len(v))
			continue
		case pooling:
			dst = append(dst, `"object":"pooling","data":`...)
		default:
			dst = append(dst, `"object":"embedding","embedding":`...)
		}
		if a.req.pooled.base64 {
			dst = appendBase64(dst, v)
		} else {
			dst = appendFloats(dst, v)
		}
		dst = append(dst, '}')
	}
	for i, s := range a.req.pooled.scores {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = fmt.Appendf(dst, `{"index":%d,"object":"score","score":`, i)
		dst = append(appendFloat(dst, s.value), '}')
	}
	dst = append(dst, `],"usage":`...)
	return append(appendFullUsage(dst, tokens, 0), '}')
}

// appendBase64 appends the numbers' bytes as a JSON string.
func appendBase64(dst []byte, v []float32) []byte {
	raw := make([]byte, 0, 4*len(v))
	for _, x := range v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	dst = append(dst, '"')
	return append(base64.StdEncoding.AppendEncode(dst, raw), '"')
}

func appendFloats(dst []byte, v []float32) []byte {
	dst = append(dst, '[')
	for i, x := range v {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendFloat(dst, x)
	}
	return append(dst, ']')
}

// appendFloat appends x with a point, as Python does.
func appendFloat(dst []byte, x float32) []byte {
	start := len(dst)
	dst = strconv.AppendFloat(dst, float64(x), 'g', -1, 32)
	if bytes.ContainsAny(dst[start:], ".e") {
		return dst
	}
	return append(dst, ".0"...)
}
