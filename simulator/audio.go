package simulator

import (
	"bytes"
	"encoding/binary"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
)

// audio is a recording that is put into words, and the form of the answer.
type audio struct {
	seconds  float64
	model    string // as the client called it
	language string
	verbose  bool
}

// The words in a second of speech, and the tokens that a second of sound is.
const (
	spokenTokens = 3
	soundTokens  = 50
)

// speech serves POST /v1/audio/transcriptions and /v1/audio/translations. The
// text is a function of the bytes of the recording.
func (s *Server) speech(a api) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		// The body is read to its end first: only then does net/http watch
		// for the client's leaving.
		body, err := readBody(w, r)
		if err != nil {
			writeError(w, err)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		req, err := parseSpeech(&s.cfg, a, r)
		if err != nil {
			writeError(w, err)
			return
		}
		s.serve(w, r, req)
	}
}

func parseSpeech(cfg *Config, a api, r *http.Request) (*request, error) {
	reader, err := r.MultipartReader()
	if err != nil {
		return nil, invalid("", "the body must be a multipart form")
	}
	fields := map[string]string{}
	var sound []byte
	heard := false
	for {
		part, err := reader.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		var content []byte
		if err == nil {
			content, err = io.ReadAll(part)
		}
		if err != nil {
			return nil, invalid("", "the body is not a whole multipart form")
		}
		switch {
		case part.FormName() == "file" && part.FileName() != "":
			sound, heard = content, true
		default:
			fields[part.FormName()] = string(content)
		}
	}
	if _, ok := fields["file"]; ok {
		return nil, &apiError{status: http.StatusUnprocessableEntity, kind: "UnprocessableEntityError", param: "file", message: "Expected 'file' to be a file-like object, not 'str'."}
	}
	if !heard {
		return nil, missing("file")
	}
	model := fields["model"]
	if err := checkModel(cfg, &model); err != nil {
		return nil, err
	}
	rq := &request{api: a, n: 1, finish: "stop", audio: &audio{seconds: duration(sound), model: model, language: fields["language"]}}
	if rq.audio.model == "" {
		rq.audio.model = cfg.ServedModelName[0]
	}
	if rq.audio.language == "" {
		rq.audio.language = "en"
	}
	if len(sound) == 0 {
		return nil, badParameter("file", "Invalid or unsupported audio file.")
	}
	for name, into := range map[string]*bool{"stream": &rq.stream, "stream_include_usage": &rq.usage,
		"stream_continuous_usage_stats": &rq.continuousUsage} {
		if text := fields[name]; text != "" {
			if *into, err = strconv.ParseBool(text); err != nil {
				return nil, invalid(name, name+" must be true or false")
			}
		}
	}
	if (rq.usage || rq.continuousUsage) && !rq.stream {
		return nil, badParameter("stream_include_usage", "Stream options can only be defined when `stream=True`.")
	}
	rq.continuousUsage = rq.continuousUsage && rq.usage
	switch format := fields["response_format"]; format {
	case "", "json", "text":
	case "verbose_json":
		if rq.stream {
			return nil, badParameter("response_format", "verbose_json format doesn't support streaming case")
		}
		rq.audio.verbose = true
	default:
		return nil, badParameter("response_format", "Currently only support response_format: `text`, `json` or `verbose_json`")
	}
	for _, name := range []string{"timestamp_granularities[]", "include[]", "use_beam_search", "hotwords", "chunking_strategy"} {
		if text := fields[name]; text != "" && text != "segment" && text != "false" && text != "False" {
			return nil, badParameter(name, "The simulated engine does not support `%s`.", name)
		}
	}
	var x xargs
	if text := fields["vllm_xargs"]; text != "" {
		if json.Unmarshal([]byte(`{"vllm_xargs":`+text+"}"), &x, lenient) != nil {
			return nil, badParameter("vllm_xargs", "Failed to parse vllm_xargs. Must be valid JSON.")
		}
	}
	if err := x.apply(cfg, rq); err != nil {
		return nil, err
	}
	said := fields["prompt"] + "\n" + fields["to_language"] + "\n" + rq.audio.language
	rq.prompts = []prompt{{
		tokens: countTokens(fields["prompt"]) + int(math.Ceil(min(30, rq.audio.seconds)*soundTokens)),
		hash:   hashText(string(sound) + said),
	}}
	left, err := rq.room(cfg)
	if err != nil {
		return nil, err
	}
	natural := min(1+int(rq.audio.seconds*spokenTokens), cfg.DefaultOutputTokens)
	rq.output = natural
	if text := fields["max_completion_tokens"]; text != "" {
		most, err := strconv.Atoi(text)
		if err != nil || most < 1 {
			return nil, badParameter("max_completion_tokens", "max_completion_tokens must be at least 1, got %.20s.", text)
		}
		rq.output = min(natural, most)
	}
	rq.output = min(rq.output, left)
	if rq.output < natural {
		rq.finish = "length"
	}
	return rq, nil
}

// duration returns how many seconds of sound a file holds: what a WAV's header
// says, else what its bytes are at 32 kB a second.
func duration(file []byte) float64 {
	const bytesPerSecond = 32000
	if len(file) >= 12 && string(file[:4]) == "RIFF" && string(file[8:12]) == "WAVE" {
		rate := 0.0
		for at := 12; at+8 <= len(file); {
			size := int(binary.LittleEndian.Uint32(file[at+4:]))
			switch name := string(file[at : at+4]); {
			case name == "fmt " && size >= 16 && at+8+16 <= len(file):
				rate = float64(binary.LittleEndian.Uint32(file[at+16:]))
			case name == "data" && rate > 0:
				return float64(min(size, len(file)-at-8)) / rate
			}
			at += 8 + size + size&1
		}
	}
	return float64(len(file)) / bytesPerSecond
}

// appendTranscript appends the body of an answer that is not streamed.
func (a *answer) appendTranscript(dst []byte, pad int) []byte {
	c := &a.choices[0]
	text := c.text() + string(appendX(nil, pad))
	au := a.req.audio
	if !au.verbose {
		dst = appendString(append(dst, `{"text":`...), text)
		if a.req.api == transcription {
			dst = fmt.Appendf(dst, `,"usage":{"type":"duration","seconds":%d}`, int(math.Ceil(au.seconds)))
		}
		return append(dst, '}')
	}
	type segment struct {
		ID          int      `json:"id"`
		Logprob     float64  `json:"avg_logprob"`
		Compression float64  `json:"compression_ratio"`
		End         float64  `json:"end"`
		Silence     *float64 `json:"no_speech_prob"`
		Seek        int      `json:"seek"`
		Start       float64  `json:"start"`
		Temperature float64  `json:"temperature"`
		Text        string   `json:"text"`
		Tokens      []int    `json:"tokens"`
	}
	return appendJSON(dst, struct {
		Duration string    `json:"duration"`
		Language string    `json:"language"`
		Text     string    `json:"text"`
		Segments []segment `json:"segments"`
		Words    *int      `json:"words"`
	}{strconv.FormatFloat(au.seconds, 'f', -1, 64), au.language, text,
		[]segment{{Logprob: -0.25, Compression: 1, End: au.seconds, Text: text, Tokens: tokenIDs(text)}}, nil})
}

// appendSpeechHead appends the members that every event begins with.
func (a *answer) appendSpeechHead(dst []byte) []byte {
	prefix, object := "transcribe-", "transcription.chunk"
	if a.req.api == translation {
		prefix, object = "translate-", "translation.chunk"
	}
	dst = appendString(append(dst, `data: {"id":`...), prefix+a.id)
	dst = fmt.Appendf(dst, `,"object":"%s","created":%d,"model":`, object, a.created)
	return append(appendString(dst, a.req.audio.model), `,"choices":[`...)
}

// appendSpeech appends the event of the next token and counts it as sent.
func (a *answer) appendSpeech(dst []byte) []byte {
	c := &a.choices[0]
	dst = a.appendSpeechHead(dst)
	dst = append(dst, `{"delta":{"content":"`...)
	dst = append(c.appendEscaped(dst, c.sent), `"}`...)
	c.sent++
	if c.sent == c.seq.Output {
		dst = append(append(dst, `,"finish_reason":"`...), c.finish...)
		dst = append(dst, `","stop_reason":null`...)
	}
	dst = append(dst, "}]"...)
	if a.req.continuousUsage {
		dst = appendUsage(append(dst, `,"usage":`...), c.tokens, c.sent)
	}
	return append(dst, "}\n\n"...)
}

func (a *answer) appendSpeechEnd(dst []byte) []byte {
	if a.req.usage {
		dst = append(a.appendSpeechHead(dst), `],"usage":`...)
		dst = append(appendUsage(dst, a.promptTokens(), a.outputTokens()), "}\n\n"...)
	}
	return append(dst, done...)
}

// WAV returns a recording of so many seconds of 16 kHz mono, whose samples are
// a function of the seed: what a test can send to be put into words.
func WAV(seconds float64, seed uint64) []byte {
	const rate = 16000
	samples := int(seconds * rate)
	out := append([]byte("RIFF"), 0, 0, 0, 0)
	binary.LittleEndian.PutUint32(out[4:], uint32(36+2*samples))
	out = append(out, "WAVEfmt "...)
	for _, field := range []uint32{16, 1 | 1<<16, rate, 2 * rate, 2 | 16<<16} {
		out = binary.LittleEndian.AppendUint32(out, field)
	}
	out = binary.LittleEndian.AppendUint32(append(out, "data"...), uint32(2*samples))
	for i := range samples {
		out = binary.LittleEndian.AppendUint16(out, uint16(mix(seed+uint64(i)*golden)))
	}
	return out
}
