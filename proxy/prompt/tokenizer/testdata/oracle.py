"""Answers, line by line, what the tokenizers library does.

{"load": path} or {"json": text} loads a tokenizer.json, {"directory": path}
what transformers makes of it and of the files beside it, {"texts": [...],
"special": bool} encodes texts: [[id, ...], ...], null where the library panics.
{"nfc": [...]} normalizes.
An error is answered with a string.
"""

import json
import sys

from tokenizers import Tokenizer, normalizers

tokenizer = None


def encode(text, special):
    try:
        return tokenizer.encode(text, add_special_tokens=special).ids
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        return None


for line in sys.stdin:
    ask = json.loads(line)
    try:
        if "load" in ask:
            tokenizer = Tokenizer.from_file(ask["load"])
            answer = []
        elif "directory" in ask:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(ask["directory"])._tokenizer
            answer = []
        elif "json" in ask:
            tokenizer = Tokenizer.from_str(ask["json"])
            answer = []
        elif "nfc" in ask:
            answer = [normalizers.NFC().normalize_str(t) for t in ask["nfc"]]
        else:
            answer = [encode(text, ask["special"]) for text in ask["texts"]]
    except Exception as e:
        answer = str(e)
    print(json.dumps(answer), flush=True)
