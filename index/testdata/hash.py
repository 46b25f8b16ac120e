"""Makes hash.txt: chains of block hashes by another implementation of XXH3.

    python -m venv venv && venv/bin/pip install xxhash==4.1.0
    venv/bin/python hash.py > hash.txt
"""

import struct

import xxhash

MASK = 2**64 - 1
SPREAD = 0x9E3779B97F4A7C15


def xxh3(data, seed):
    h = xxhash.xxh3_128_intdigest(data, seed)
    return h >> 64, h & MASK


def root(model, adapter, salt):
    parts = b"".join(struct.pack("<Q", len(p)) + p for p in (model, adapter, salt))
    return xxh3(parts, 0x696E66657272616C)


def chain(parent, data, size):
    for at in range(0, len(data) - size + 1, size):
        hi, lo = xxh3(data[at : at + size], parent[1])
        parent = (hi + parent[0] * SPREAD) & MASK, lo
        yield parent


def show(words, hashes):
    print(" ".join(words), *(f"{hi:016x}{lo:016x}" for hi, lo in hashes))


# Numbers of a linear congruential generator, which the test has too.
def numbers(n):
    x = 1
    for _ in range(n):
        x = (x * 6364136223846793005 + 1442695040888963407) & MASK
        yield x >> 32


roots = [(b"", b"", b""), (b"model", b"", b""), (b"", b"model", b""), (b"", b"", b"model"),
         (b"org/name", b"adapter", b"salt\0"), (b"m" * 300, b"a" * 300, b"s" * 300)]
for r in roots:
    show(["root", *(part.hex() or "-" for part in r)], [root(*r)])
for block in (1, 2, 3, 4, 5, 8, 16, 32, 60, 61, 64, 128, 256, 512):
    ids = struct.pack(f"<{3 * block + 1}I", *numbers(3 * block + 1))
    show(["tokens", str(block)], chain(root(b"model", b"", b"salt"), ids, 4 * block))
for size in (0, 255, 256, 1000):
    text = bytes(n & 255 for n in numbers(size))
    hi, lo = root(b"model", b"", b"salt")
    start = xxh3(struct.pack("<QQ", lo, hi), 0x7465787474657874)
    show(["text", str(size)], chain(start, text, 256))
