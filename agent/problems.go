package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"golang.org/x/sys/unix"
)

// problems collects what is wrong with a configuration. The zero value is none.
type problems struct{ list []string }

// add notes the first problem of a path; others follow from it.
func (p *problems) add(path, format string, args ...any) {
	known := func(line string) bool { return strings.HasPrefix(line, path+": ") }
	if !slices.ContainsFunc(p.list, known) {
		p.list = append(p.list, path+": "+fmt.Sprintf(format, args...))
	}
}

func (p *problems) err() error {
	if len(p.list) == 0 {
		return nil
	}
	return Problems(p.list)
}

// Problems is the error of a configuration that cannot be used: at least one
// line, each with the path of a key and what is wrong there.
type Problems []string

func (p Problems) Error() string {
	if len(p) == 1 {
		return p[0]
	}
	return fmt.Sprintf("%d problems:\n  %s", len(p), strings.Join(p, "\n  "))
}

func (p *problems) oneOf(path, value string, known ...string) {
	if !slices.Contains(known, value) {
		p.add(path, "%q is unknown; want %s", value, strings.Join(known, ", "))
	}
}

func (p *problems) positive(path string, d time.Duration) {
	if d <= 0 {
		p.add(path, "%v is not above zero", d)
	}
}

func (p *problems) notNegative(path string, n int) {
	if n < 0 {
		p.add(path, "%d is negative; leave it out for the default", n)
	}
}

// makeHash is the advice where a hash is wanted.
const makeHash = `make one with: printf %s "$KEY" | sha256sum`

// sha256 reports whether value is a hash. It is not shown: it may be the key.
func (p *problems) sha256(path, value string) bool {
	switch _, err := hex.DecodeString(value); {
	case value == "":
		p.add(path, "is missing; %s", makeHash)
	case err != nil || len(value) != 2*sha256.Size:
		p.add(path, "is not a SHA-256 in 64 hexadecimal digits; %s", makeHash)
	default:
		return true
	}
	return false
}

// names checks a list of models.
func (p *problems) names(path string, list []string) {
	for i, name := range list {
		if name == "" {
			p.add(fmt.Sprintf("%s[%d]", path, i), "is empty; remove it")
		} else if slices.Contains(list[:i], name) {
			p.add(fmt.Sprintf("%s[%d]", path, i), "%q is listed twice", name)
		}
	}
}

// engineKeys are what a replica and a discovery have in common.
type engineKeys struct {
	kind                       string
	models                     []string
	key, keyFile               string
	maxConcurrency, maxPending int
}

func (p *problems) engine(path string, e engineKeys) {
	if e.kind != "" {
		p.oneOf(path+".engine", e.kind, engines...)
	}
	p.names(path+".models", e.models)
	if e.key != "" && e.keyFile != "" {
		p.add(path+".api_key_file", "is set beside api_key; remove one of them")
	}
	if strings.ContainsFunc(e.key, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
		// It is sent as a header's value.
		p.add(path+".api_key", "has a blank or a character that is not ASCII")
	}
	p.notNegative(path+".max_concurrency", e.maxConcurrency)
	if e.maxPending < 0 {
		p.add(path+".max_pending", "%d is negative; 0 is that none waits", e.maxPending)
	} else if e.maxPending > 0 && e.maxConcurrency <= 0 {
		p.add(path+".max_pending", "is set without max_concurrency, without which none waits")
	}
}

// keyFile checks the file that holds an engine's key.
func (p *problems) keyFile(path, file string) {
	if file == "" {
		return
	}
	text, err := readFile(file)
	key := strings.TrimSpace(string(text))
	switch {
	case err != nil:
		p.add(path, "cannot be read: %v", err)
	case key == "":
		p.add(path, "%s is empty; want the key that the engine takes", file)
	case strings.ContainsFunc(key, func(c rune) bool { return c <= ' ' || c >= 0x7f }):
		p.add(path, "%s holds a blank or a character that is not ASCII; want the key alone", file)
	}
}

// hubName is what a model's name in the Hugging Face cache looks like.
var hubName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?(@[A-Za-z0-9][A-Za-z0-9._/-]*)?$`)

// isHubName tells whether a text can be a name in the Hugging Face cache. None
// leads out of it.
func isHubName(s string) bool { return hubName.MatchString(s) && !strings.Contains(s, "..") }

// isPath tells whether the name of a tokenizer is that of a directory.
func isPath(s string) bool {
	return filepath.IsAbs(s) || s == "." || s == ".." || strings.HasPrefix(s, "./") || strings.HasPrefix(s, "../")
}

// tokenizer checks the name of a tokenizer. Whether it is there, modelFiles and
// the loading tell.
func (p *problems) tokenizer(path, name string) {
	const want = "want a directory such as /models/llama or ./llama, a name in the Hugging Face cache such as org/name or org/name@revision, builtin:sim, or none"
	switch {
	case name == "", name == noTokenizer, name == "builtin:sim", isPath(name), strings.HasPrefix(name, "~/"):
	case strings.HasPrefix(name, "builtin:"):
		p.add(path, "%q is unknown; %s", name, want)
	case !isHubName(name):
		p.add(path, "%q is no name of a tokenizer; %s", name, want)
	}
}

// modelFiles checks what a model's entry names on this node.
func (p *problems) modelFiles(path string, m ModelConfig) {
	if isPath(m.Tokenizer) {
		info, err := os.Stat(m.Tokenizer)
		switch {
		case err != nil:
			p.add(path+".tokenizer", "cannot be read: %v", err)
		case !info.IsDir():
			p.add(path+".tokenizer", "%s is not a directory; want the one that holds tokenizer.json", m.Tokenizer)
		}
	}
	if m.ChatTemplate != "" {
		if _, err := readFile(m.ChatTemplate); err != nil {
			p.add(path+".chat_template", "cannot be read: %v", err)
		}
	}
}

// directoryOf checks that a file can be made where it is wanted.
func (p *problems) directoryOf(path, file string) {
	directory := filepath.Dir(file)
	if info, err := os.Stat(directory); err != nil {
		p.add(path, "cannot be written: %v", err)
	} else if !info.IsDir() {
		p.add(path, "cannot be written: %s is not a directory", directory)
	} else if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() {
		p.add(path, "%s is there and is not a file", file)
	} else if err := unix.Access(directory, unix.W_OK|unix.X_OK); err != nil {
		p.add(path, "no file can be made in %s: %v", directory, err)
	}
}

// hostname checks a name that is looked up.
func (p *problems) hostname(path, name string) {
	const want = "want a name such as engines.default.svc"
	if name == "" {
		p.add(path, "is missing; %s", want)
		return
	}
	if strings.ContainsAny(name, "/:@") {
		p.add(path, "%q is more than a name; %s, and the port as port", name, want)
		return
	}
	if _, err := netip.ParseAddr(name); err == nil {
		p.add(path, "%q is an address; list it under replicas", name)
		return
	}
	bad := len(name) > 254
	for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
		bad = bad || label == "" || len(label) > 63 || strings.ContainsFunc(label, func(c rune) bool {
			return c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
		})
	}
	if bad {
		p.add(path, "%q is not a name that can be looked up; %s", name, want)
	}
}

// origin checks an entry of server.cors_origins: it must be what browsers send
// as Origin, byte for byte, or it would never match.
func (p *problems) origin(path, origin string) {
	if origin == "*" {
		return
	}
	u, err := url.Parse(origin)
	if err != nil || u.Scheme == "" || u.Hostname() == "" || strings.Contains(u.Host, "*") || u.Scheme+"://"+u.Host != origin || strings.HasSuffix(origin, ":") {
		p.add(path, "%q is not an origin; want \"*\" or scheme://host[:port], without a path", origin)
	} else if origin != strings.ToLower(origin) {
		p.add(path, "%q has capitals, which browsers do not send; want %s", origin, strings.ToLower(origin))
	}
}

func (p *problems) address(path, value string) {
	_, port, err := net.SplitHostPort(value)
	if err != nil {
		p.add(path, "%q is not host:port; want such as :8080 or 127.0.0.1:8080", value)
		return
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		p.add(path, "%q has no port between 0 and 65535", value)
	}
}

// engineURL checks an engine's URL and returns its host:port, or "".
func (p *problems) engineURL(path, raw string) string {
	const want = "want http://host:port"
	if raw == "" {
		p.add(path, "is missing; %s", want)
		return ""
	}
	u, err := url.Parse(raw)
	raw = withoutSecrets(raw)
	if err != nil || u.Host == "" || u.Opaque != "" {
		p.add(path, "%q is not a URL; %s", raw, want)
		return ""
	}
	if u.Scheme != "http" {
		p.add(path, "%q: engines are reached over http only; %s", raw, want)
		return ""
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		p.add(path, "%q has more than host, port and path; %s", raw, want)
		return ""
	}
	if trimmed, ok := strings.CutSuffix(strings.TrimSuffix(u.Path, "/"), "/v1"); ok {
		p.add(path, "%q ends in /v1, which requests bring along; want http://%s%s", raw, u.Host, trimmed)
		return ""
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			p.add(path, "%q has no port between 1 and 65535", raw)
			return ""
		}
	}
	if u.Hostname() == "" {
		p.add(path, "%q has no host; %s", raw, want)
		return ""
	}
	return u.Host
}

// secret stands for a value that is not shown.
const secret = "(secret)"

// withoutSecrets is an URL as it may be shown: neither a user's password nor a
// query, which may be a key, belongs into a log.
func withoutSecrets(raw string) string {
	if at := strings.LastIndex(raw, "@"); at >= 0 {
		start := 0
		if slashes := strings.Index(raw, "//"); slashes >= 0 && slashes < at {
			start = slashes + 2
		}
		raw = raw[:start] + secret + raw[at:]
	}
	if rest, _, ok := strings.Cut(raw, "?"); ok {
		raw = rest + "?" + secret
	}
	return raw
}

// fill sets v, a part of a Config, from the decoded YAML value in.
func (p *problems) fill(path string, v reflect.Value, in any) {
	if in == nil {
		return // "key:" with nothing behind it leaves the default
	}
	switch v.Interface().(type) {
	case time.Duration:
		p.fillDuration(path, v, in)
		return
	case DurationOrOff:
		p.fillDurationOrOff(path, v, in)
		return
	case Bytes:
		p.fillBytes(path, v, in)
		return
	case PodPort:
		if n, ok := integer(in); ok {
			v.SetString(strconv.FormatInt(n, 10))
			return
		}
		if _, ok := in.(string); !ok {
			p.add(path, "is %s; want the number of a port, or its name", kind(path, in))
			return
		}
	case Weights:
		p.fillWeights(path, v, in)
		return
	case ShadowConfig:
		if name, ok := in.(string); ok {
			v.Set(reflect.ValueOf(ShadowConfig{Policy: name}))
			return
		}
		if _, ok := in.(yaml.MapSlice); !ok {
			p.add(path, "is %s; want the name of a policy, or keys and values such as policy: lmetric", kind(path, in))
			return
		}
	case KVEventsConfig:
		// Its mode may stand for the whole.
		switch mode := in.(type) {
		case string:
			v.Set(reflect.ValueOf(KVEventsConfig{Mode: mode}))
			return
		case bool:
			if !mode { // as YAML 1.1 reads off
				v.Set(reflect.ValueOf(KVEventsConfig{Mode: kvEventsOff}))
				return
			}
		}
		if _, ok := in.(yaml.MapSlice); !ok {
			p.add(path, "is %s; want auto, off, or keys and values such as endpoint: tcp://*:5557", kind(path, in))
			return
		}
	case Object:
		if _, ok := in.(yaml.MapSlice); !ok {
			p.add(path, "is %s; want keys and values", kind(path, in))
			return
		}
		if text, ok := p.appendJSON(path, nil, in); ok {
			v.SetString(string(text))
		}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		p.fillStruct(path, v, in)
	case reflect.Slice:
		list, ok := in.([]any)
		if !ok {
			p.add(path, "is %s; want a list: [a, b] or lines that begin with a dash", kind(path, in))
			return
		}
		out := reflect.MakeSlice(v.Type(), len(list), len(list))
		for i, item := range list {
			if d, ok := out.Index(i).Addr().Interface().(interface{ setDefaults() }); ok {
				d.setDefaults()
			}
			p.fill(fmt.Sprintf("%s[%d]", path, i), out.Index(i), item)
		}
		v.Set(out)
	case reflect.String:
		s, ok := in.(string)
		if !ok {
			p.add(path, "is %s; want text: put it in quotes", kind(path, in))
			return
		}
		v.SetString(s)
	case reflect.Bool:
		b, ok := in.(bool)
		if !ok {
			p.add(path, "is %s; want true or false", kind(path, in))
			return
		}
		v.SetBool(b)
	case reflect.Int:
		n, ok := integer(in)
		if !ok {
			p.add(path, "is %s; want a whole number", kind(path, in))
			return
		}
		v.SetInt(n)
	case reflect.Float64:
		f, ok := in.(float64)
		if n, whole := integer(in); whole {
			f, ok = float64(n), true
		}
		if !ok {
			p.add(path, "is %s; want a number", kind(path, in))
			return
		}
		v.SetFloat(f)
	default:
		panic("BUG: configuration field of kind " + v.Kind().String() + " at " + path)
	}
}

func (p *problems) fillStruct(path string, v reflect.Value, in any) {
	m, ok := in.(yaml.MapSlice)
	if !ok {
		if path == "" {
			path = theFile
		}
		p.add(path, "is %s; want keys and values", kind(path, in))
		return
	}
	fields := map[string]int{}
	var names []string
	for i := range v.NumField() {
		if tag := v.Type().Field(i).Tag.Get("yaml"); tag != "" && tag != "-" {
			fields[tag] = i
			names = append(names, tag)
		}
	}
	for _, item := range m {
		key := fmt.Sprint(item.Key)
		full := key
		if path != "" {
			full = path + "." + key
		}
		i, ok := fields[key]
		if !ok {
			p.add(full, "is unknown; known here: %s", strings.Join(names, ", "))
			continue
		}
		if _, ok := item.Value.(string); !ok && item.Value != nil && v.Type().Field(i).Tag.Get("secret") != "" {
			p.add(full, "is not text; put it in quotes")
			continue
		}
		p.fill(full, v.Field(i), item.Value)
	}
}

func (p *problems) fillDuration(path string, v reflect.Value, in any) {
	s, ok := in.(string)
	if !ok {
		p.add(path, "is %s; want a duration with its unit, such as 500ms, 30s or 10m", kind(path, in))
		return
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		p.add(path, "%q is not a duration; want such as 500ms, 30s or 10m", s)
		return
	}
	v.SetInt(int64(d))
}

func (p *problems) fillBytes(path string, v reflect.Value, in any) {
	if n, ok := integer(in); ok {
		v.SetInt(n)
		return
	}
	s, ok := in.(string)
	if !ok {
		p.add(path, "is %s; want a size, such as 16KiB or 64MiB", kind(path, in))
		return
	}
	n, err := ParseBytes(s)
	if err != nil {
		p.add(path, "%v", err)
		return
	}
	v.SetInt(int64(n))
}

// appendJSON appends a decoded YAML value as JSON, the keys in their order. It
// reports what JSON cannot say.
func (p *problems) appendJSON(path string, dst []byte, in any) (_ []byte, ok bool) {
	switch in := in.(type) {
	case yaml.MapSlice:
		dst, ok = append(dst, '{'), true
		for i, item := range in {
			key, text := item.Key.(string)
			full := path + "." + fmt.Sprint(item.Key)
			if !text {
				p.add(full, "is a key that is not text; put it in quotes")
				ok = false
				continue
			}
			if i > 0 {
				dst = append(dst, ',')
			}
			good := false
			dst, _ = p.appendJSON(full, dst, key)
			dst, good = p.appendJSON(full, append(dst, ':'), item.Value)
			ok = ok && good
		}
		return append(dst, '}'), ok
	case []any:
		dst, ok = append(dst, '['), true
		for i, item := range in {
			if i > 0 {
				dst = append(dst, ',')
			}
			good := false
			dst, good = p.appendJSON(fmt.Sprintf("%s[%d]", path, i), dst, item)
			ok = ok && good
		}
		return append(dst, ']'), ok
	case float64:
		// What is written 1.0 is no integer to a template.
		if in == math.Trunc(in) && math.Abs(in) < 1e15 {
			return strconv.AppendFloat(dst, in, 'f', 1, 64), true
		}
	}
	text, err := json.Marshal(in)
	if err != nil {
		p.add(path, "is %s, which JSON has no way to say", kind(path, in))
		return dst, false
	}
	return append(dst, text...), true
}

// theFile is the path of the whole configuration.
const theFile = "the file"

// kind tells a person what the YAML value at a path is. What is in the wrong
// place where keys belong may be one, and so may be anything in a wrong file.
func kind(path string, in any) string {
	switch in := in.(type) {
	case string:
		if secretKeys.MatchString(path) || path == theFile {
			return "text"
		}
		return fmt.Sprintf("the text %.80q", in)
	case yaml.MapSlice:
		return "a mapping"
	case []any:
		return "a list"
	case nil:
		return "empty"
	default:
		if secretKeys.MatchString(path) {
			return "something else"
		}
		return fmt.Sprint(in)
	}
}

func integer(in any) (int64, bool) {
	switch n := in.(type) {
	case int64:
		return n, true
	case uint64:
		return int64(n), n <= math.MaxInt64
	case int:
		return int64(n), true
	}
	return 0, false
}
