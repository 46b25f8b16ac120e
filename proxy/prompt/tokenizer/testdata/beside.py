"""What transformers makes of a tokenizer.json because of the files beside it.

Writes beside.json.gz: tokenizers of a toy vocabulary in directories of random
settings, with the ids that AutoTokenizer gives to texts, or null where it loads
nothing. Run it with vLLM's Python: python beside.py COUNT SEED OUTPUT
"""

import gzip
import json
import logging
import os
import random
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
from tokenizers import pre_tokenizers  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

logging.disable(logging.CRITICAL)

TEXTS = [
    "hello world", " hello  world\n\n x", "<s>a</s> b <|endoftext|>c", "café cafe\u0301 123456 I'M we'll x", "<bos>x<eos> <pad><unk><mask>",
    "▁a ▁▁ b", "\u00a0 \u3000x\r\n\r\n\ty", "", "<|im_start|>user\nhi<|im_end|>\n", "<x> <y>x<y>  <x>", " ", " <z> <z>", "<dec><more> <image>",
    "he  <s>  he", "\u0915\u094d\u0937 \U0001f937\u200d\u2640", "<zz>hex<zz> <newpad> <c>",
]
TYPES = [None, "llama", "qwen2", "qwen3", "qwen3_5", "gemma2", "gemma3_text", "mistral", "phi3", "deepseek_v3", "gpt2", "gpt_neox", "starcoder2", "olmo", "olmo2",
         "granite", "stablelm", "cohere2", "glm4", "exaone4", "gpt_oss", "llama4_text", "smollm3", "seed_oss", "lfm2", "jamba", "mamba", "falcon_h1", "minimax_m2",
         "qwen3_moe", "qwen3_next", "code_llama", "gemma4_text", "hyperclovax", "modernbert", "roberta", "idefics2", "phi", "opt"]
CLASSES = [None, "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast",
           "PreTrainedTokenizerFast", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", "CodeGenTokenizer", "GPTNeoXTokenizerFast", "CohereTokenizerFast",
           "BloomTokenizerFast", "Qwen3_5Tokenizer", "SomeTokenizerFast", "RobertaTokenizerFast", "BertTokenizerLegacy", "XLMTokenizer"]
NAMES = ["<x>", "<y>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<pad>", " <z>", "e", "<c>"]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MERGES = [("h", "e"), ("l", "o"), ("he", "l"), ("hel", "lo"), ("a", "b"), ("i", "m")]


def model(vocabulary, merges, **more):
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [list(m) for m in merges], **more}


def bases():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>"]
    byte = model({t: i for i, t in enumerate(specials + letters)}, MERGES + [("Ġ", "w"), ("Ċ", "Ċ")])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    fallback = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["▁"] + [chr(c) for c in range(33, 127)]
    piece = model({t: i for i, t in enumerate(fallback)}, MERGES + [("▁", "he"), ("▁", "▁"), (">", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    whole = {"version": "1.0", "truncation": None, "padding": None, "decoder": None, "post_processor": None}
    return {
        "gpt2": {**whole, "specials": specials, "normalizer": None, "pre_tokenizer": level, "model": byte},
        "qwen": {**whole, "specials": specials, "normalizer": {"type": "NFC"}, "model": byte,
                 "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {**level, "use_regex": False}]}},
        "llama": {**whole, "specials": fallback[:3], "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
                  "pre_tokenizer": None, "model": piece},
        "gemma": {**whole, "specials": fallback[:3], "normalizer": replace, "model": piece,
                  "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}},
    }


def added(r, content, special=None):
    flag = lambda p: r.random() < p  # noqa: E731
    return {"content": content, "single_word": flag(0.1), "lstrip": flag(0.15), "rstrip": flag(0.15), "normalized": flag(0.2), "special": flag(0.7) if special is None else special}


def plain(content, special=True):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}


def case(r, bases):
    kind = r.choice(list(bases))
    base = bases[kind]
    vocabulary = base["model"]["vocab"]
    tokens = [{"id": vocabulary[t], **plain(t)} for t in base["specials"]]
    following = len(vocabulary)
    for text in r.sample(NAMES, r.randint(0, 4)):
        if text in [t["content"] for t in tokens]:
            continue
        token = {"id": vocabulary.get(text, following), **added(r, text)}
        following += token["id"] == following
        tokens.append(token)
    tokens.sort(key=lambda t: t["id"])
    config, settings = {}, {}
    if kind_of := r.choice(TYPES):
        config["model_type"] = kind_of
    name = r.choice(CLASSES)
    if name:
        (config if r.random() < 0.1 else settings)["tokenizer_class"] = name
    for key, chance in ("add_bos_token", 0.2), ("add_eos_token", 0.2), ("add_prefix_space", 0.15), ("legacy", 0.3), ("split_special_tokens", 0.05):
        if r.random() < chance:
            settings[key] = r.choice([True, False, None] if key == "legacy" else [True, False])
    if r.random() < 0.6:
        decoder = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokens}
        if r.random() < 0.3:
            decoder[str(following)] = added(r, "<dec>")
        if r.random() < 0.2:
            del decoder[r.choice(list(decoder))]
        for t in decoder.values():
            if r.random() < 0.1:
                t[r.choice(["lstrip", "rstrip", "normalized", "special", "single_word"])] ^= True
        settings["added_tokens_decoder"] = decoder
    for key, values in {"bos_token": ["<s>", "<bos>", "<x>", "<newbos>"], "eos_token": ["</s>", "<eos>", "<|endoftext|>", "<|im_end|>"], "unk_token": ["<unk>", "<|endoftext|>"],
                        "pad_token": ["<pad>", "</s>", "<newpad>"], "mask_token": ["<mask>"], "c_token": ["<c>"], "image_token": ["<image>"]}.items():
        if r.random() < 0.3:
            value = r.choice(values + [None])
            settings[key] = {**added(r, value), "__type": "AddedToken"} if value and r.random() < 0.3 else value
    if r.random() < 0.15:
        settings["additional_special_tokens"] = r.choice([["<x>"], ["<more>"], ["<|im_start|>", "<|im_end|>"], [], [{**added(r, "<more>"), "__type": "AddedToken"}]])
    if r.random() < 0.1:
        settings["extra_special_tokens"] = r.choice([["<more>", "<x>"], {"image_token": "<image>"}, {}, []])
    files = {"config.json": config, "tokenizer_config.json": settings}
    if r.random() < 0.05:
        del files["config.json"]
    if r.random() < 0.15:
        files["special_tokens_map.json"] = {"bos_token": "<s>", "eos_token": r.choice(["</s>", added(r, "</s>", True)]), "pad_token": r.choice(["<pad>", "<newpad>"])}
    if r.random() < 0.15:
        files["added_tokens.json"] = r.choice([{"<zz>": following}, {"<zz>": following, "<newpad>": following + 1}, {"<s>": 1}])
    post = None
    token = r.choice(tokens)
    if r.random() < 0.3:
        text = token["content"]
        post = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {text: {"id": text, "ids": [token["id"]], "tokens": [text]}}}
    return {"base": kind, "added_tokens": tokens, "post_processor": post, "files": files}


def main():
    count, seed, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    r = random.Random(seed)
    all_bases = bases()
    cases = []
    for _ in range(count):
        c = case(r, all_bases)
        with tempfile.TemporaryDirectory() as path:
            base = {k: v for k, v in all_bases[c["base"]].items() if k != "specials"}
            whole = {**base, "added_tokens": c["added_tokens"], "post_processor": c["post_processor"]}
            for name, content in {**c["files"], "tokenizer.json": whole}.items():
                with open(os.path.join(path, name), "w") as f:
                    json.dump(content, f)
            try:
                t = AutoTokenizer.from_pretrained(path)
                c["class"] = type(t).__name__
                c["ids"] = [[t(text, add_special_tokens=special)["input_ids"] for text in TEXTS] for special in (False, True)]
            except BaseException as e:  # the library panics
                c["class"], c["ids"] = f"{type(e).__name__}: {e}"[:100], None
        cases.append(c)
    with gzip.GzipFile(output, "w", mtime=0) as f:
        f.write(json.dumps({"texts": TEXTS, "bases": all_bases, "cases": cases}, ensure_ascii=False).encode())


main()
