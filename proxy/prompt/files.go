package prompt

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// files is what the files of a model's directory say about its prompts, as
// transformers reads them. Load reads it once; it is immutable then.
type files struct {
	dir           string
	repository    string // that the engine loads, "" when it loads a directory
	modelType     string
	architectures []string
	// templates are the chat templates by name; a model with one template has
	// it as "default".
	templates map[string]string
	// processor is a template that only the processor of a multimodal model
	// has, in chat_template.json.
	processor string
	// hasProcessor reports that the directory configures such a processor.
	hasProcessor bool
	// special are the variables that hold special tokens.
	special map[string]jinja.Value
	// unsure are special tokens that the files do not give and whose value in
	// the engine depends on the class of its tokenizer.
	unsure []string
	names  []string

	// tokenizerClass is what the files name as the tokenizer's class.
	tokenizerClass string
}

// specialTokens are those that transformers knows by name.
var specialTokens = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// readFiles reads a model's directory. What is missing there is no error; a
// file that cannot be read, or does not hold what it should, is.
func readFiles(dir, repository string) (*files, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("tokenizer directory %s: %w", dir, err)
	}
	f := &files{dir: dir, repository: repository, templates: map[string]string{}, special: map[string]jinja.Value{}}
	for _, entry := range entries {
		f.names = append(f.names, entry.Name())
	}
	config, err := f.object("config.json")
	if err != nil {
		return nil, err
	}
	if kind := config.Data["model_type"]; kind.IsString() {
		f.modelType = kind.AsString()
	}
	if list := config.Data["architectures"]; list.IsList() {
		for _, name := range list.AsList().Items {
			if name.IsString() {
				f.architectures = append(f.architectures, name.AsString())
			}
		}
	}
	settings, err := f.object("tokenizer_config.json")
	if err != nil {
		return nil, err
	}
	for _, from := range []*jinja.Dict{settings, config} {
		if class := from.Data["tokenizer_class"]; class.IsString() && f.tokenizerClass == "" {
			f.tokenizerClass = class.AsString()
		}
	}
	if err := f.readTemplates(settings); err != nil {
		return nil, err
	}
	if err := f.readSpecial(settings); err != nil {
		return nil, err
	}
	return f, nil
}

// has reports whether the directory has a file of that name.
func (f *files) has(name string) bool { return slices.Contains(f.names, name) }

// matches reports whether a file's name matches the pattern.
func (f *files) matches(pattern string) bool {
	return slices.ContainsFunc(f.names, func(name string) bool {
		ok, _ := filepath.Match(pattern, name)
		return ok
	})
}

// object reads a JSON file that holds an object. A file that is not there is
// an empty one.
func (f *files) object(name string) (*jinja.Dict, error) {
	path := filepath.Join(f.dir, name)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return jinja.NewDict().AsDict(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("tokenizer file: %w", err)
	}
	d := decoder{text: string(data)}
	v, ok := d.decode()
	if !ok || !v.IsDict() {
		return nil, fmt.Errorf("tokenizer file %s is no JSON object (wrong at byte %d): fetch the model's files again", path, d.pos)
	}
	return v.AsDict(), nil
}

// text reads a file; one that is not there is "".
func (f *files) text(name string) (string, error) {
	data, err := os.ReadFile(filepath.Join(f.dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("tokenizer file: %w", err)
	}
	return string(data), nil
}

// readTemplates finds the chat templates: files of their own come before those
// in tokenizer_config.json and replace all of them.
func (f *files) readTemplates(settings *jinja.Dict) error {
	if f.has("chat_template.jinja") {
		text, err := f.text("chat_template.jinja")
		if err != nil {
			return err
		}
		f.templates["default"] = text
	}
	others, err := filepath.Glob(filepath.Join(f.dir, "additional_chat_templates", "*.jinja"))
	if err != nil {
		return fmt.Errorf("chat templates in %s: %w", f.dir, err)
	}
	for _, path := range others {
		data, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("chat template: %w", err)
		}
		f.templates[strings.TrimSuffix(filepath.Base(path), ".jinja")] = string(data)
	}
	f.hasProcessor = f.has("processor_config.json") || f.has("preprocessor_config.json")
	if len(f.templates) > 0 {
		return nil
	}
	legacy, err := f.object("chat_template.json")
	if err != nil {
		return err
	}
	if text := legacy.Data["chat_template"]; text.IsString() {
		f.processor = text.AsString()
	}
	switch own := settings.Data["chat_template"]; {
	case own.IsString():
		f.templates["default"] = own.AsString()
	case own.IsDict():
		for name, text := range own.AsDict().Data {
			if text.IsString() {
				f.templates[name] = text.AsString()
			}
		}
	case own.IsList():
		for _, item := range own.AsList().Items {
			if !item.IsDict() {
				continue
			}
			name, text := item.AsDict().Data["name"], item.AsDict().Data["template"]
			if name.IsString() && text.IsString() {
				f.templates[name.AsString()] = text.AsString()
			}
		}
	}
	return nil
}

// readSpecial finds the variables for special tokens: the named ones and those
// that the model adds.
func (f *files) readSpecial(settings *jinja.Dict) error {
	given := map[string]jinja.Value{}
	note := func(from *jinja.Dict, allStrings bool) {
		for _, name := range from.Keys {
			token := from.Data[name]
			if token.IsDict() {
				token = token.AsDict().Data["content"]
			}
			known := slices.Contains(specialTokens, name)
			if known || token.IsString() && (allStrings || strings.HasSuffix(name, "_token")) {
				given[name] = token
			}
		}
	}
	note(settings, false)
	if extra := settings.Data["extra_special_tokens"]; extra.IsDict() {
		note(extra.AsDict(), true)
	}
	if !settings.Has("added_tokens_decoder") {
		legacy, err := f.object("special_tokens_map.json")
		if err != nil {
			return err
		}
		note(legacy, false)
		if extra := legacy.Data["extra_special_tokens"]; extra.IsDict() {
			note(extra.AsDict(), true)
		}
	}
	for name, token := range given {
		if token.IsString() {
			f.special[name] = token
		}
	}
	if tokenizer.Class(f.modelType, f.tokenizerClass, f.repository) != "" {
		for _, name := range specialTokens {
			if _, ok := given[name]; !ok {
				f.unsure = append(f.unsure, name)
			}
		}
	}
	return nil
}

// template returns the source that transformers takes for a chat with or
// without tools, "" when there is none.
func (f *files) template(tools bool) string {
	if tools {
		if source, ok := f.templates["tool_use"]; ok {
			return source
		}
	} else if f.processor != "" && f.hasProcessor {
		return f.processor
	}
	return f.templates["default"]
}

// engineTemplates are the model types for which the engine brings a template of
// its own when the files have none.
var engineTemplates = []string{"blip-2", "clip", "colpali", "deepseek_ocr", "deepseek_ocr2", "unlimited-ocr",
	"unlimited_ocr", "deepseek_vl_v2", "minicpmv", "minicpmv4_6", "minicpmv4_7", "paligemma", "siglip", "siglip2"}

// renders are the architectures whose chats the engine renders by code that is
// not followed. Their completions are: only the rendering is special.
var renders = []string{"KimiK3ForConditionalGeneration", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM",
	"DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM", "InklingForCausalLM",
	"InklingForConditionalGeneration"}

// tokenizes are the architectures whose tokenizer is the engine's own code.
var tokenizes = []string{"MoonshotKimiaForCausalLM"}

// is reports whether one of the model's architectures is in the list.
func (f *files) is(list []string) bool {
	return slices.ContainsFunc(f.architectures, func(name string) bool { return slices.Contains(list, name) })
}

// form is which tokenizer and renderer the engine chooses for the files.
type form uint8

const (
	// formTemplate is a tokenizer.json and a Jinja template.
	formTemplate form = iota
	// formMistral is a tekken.json and mistral_common's rendering.
	formMistral
	// formUnsure are files for both without the weights that would tell, or a
	// tekken.json beside weights of the other form.
	formUnsure
)

// form decides as vLLM does with --tokenizer-mode auto: weights in Mistral's
// own format make it use Mistral's tokenizer.
func (f *files) form() form {
	tekken := f.has("tekken.json") || f.matches("tokenizer.model.v*")
	switch {
	case !tekken:
		return formTemplate
	case f.matches("consolidated*.safetensors"):
		return formMistral
	case f.matches("*.safetensors"), f.matches("*.bin"), f.matches("*.gguf"):
		if !f.has("tokenizer.json") {
			return formUnsure // transformers makes one of the other, unless told otherwise
		}
		return formTemplate
	case !f.has("tokenizer.json"):
		return formMistral // these are not all of the model's files
	}
	return formUnsure
}
