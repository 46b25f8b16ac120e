"""Encodes the texts that come in as JSON strings, a line each, with the
tokenizer.json that the argument names: prints the library's version, and for
each text the number of ids and the time, as Go reads it."""

import json
import sys
import time

import tokenizers

tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
print(tokenizers.__version__, flush=True)
for line in sys.stdin:
    text = json.loads(line)
    began = time.perf_counter_ns()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    took = time.perf_counter_ns() - began
    print(len(ids), took, flush=True)
