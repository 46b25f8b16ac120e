"""Makes payloads.txt: payloads as engines write them, and what is in them.

vLLM's are written by vLLM's own classes, as of the version that the Makefile
names; its arrays, of versions before 0.24, by the same classes with the option
that these had. SGLang's are written by hand after what its versions send.

    ~/.cache/inferrail/vllm-0.32.0/bin/python payloads.py >payloads.txt

Each line has a name, the payload in hexadecimal, and in JSON the batch that is
in it; "again" says in which form (and length of hashes) writing the batch gives
the same bytes.
"""

import json

import msgspec
from msgspec.msgpack import encode

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

M64 = 1 << 64


def number(h):
    return int.from_bytes(h[-8:], "big") if isinstance(h, bytes) else h % M64


def expected(e, adapter="", salt="", extra=None, tokens=None):
    if isinstance(e, AllBlocksCleared):
        return {"kind": "cleared", "medium": "gpu"}
    out = {
        "kind": "stored" if isinstance(e, BlockStored) else "removed",
        "hashes": [str(number(h)) for h in e.block_hashes or []],
        "medium": (e.medium or "gpu").lower(),
        "locality": e.locality or "",
        "ownership": e.ownership or "",
    }
    if e.group_idx is not None:
        out["group"] = e.group_idx
    if isinstance(e, BlockStored):
        if e.parent_block_hash is not None:
            out["parent"] = str(number(e.parent_block_hash))
        out["tokens"] = list(e.token_ids) if tokens is None else tokens
        out["block_size"] = e.block_size
        out["spec"] = e.kv_cache_spec_kind or ""
        if e.lora_id is not None:
            out["adapter_id"] = e.lora_id
        out["adapter"] = adapter or e.lora_name or ""
        out["salt"] = salt
        out["extra"] = extra or []
    return out


def line(name, payload, events, rank=None, again="", passed=0, time=1700000000.25, publisher=b""):
    batch = {
        "time": time,
        "rank": -1 if rank is None else rank,
        "passed": passed,
        "publisher": publisher.hex(),
        "events": events,
        "again": again,
    }
    print(name, payload.hex(), json.dumps(batch, separators=(",", ":")), sep="\t")


def legacy(e, length):
    """The array that a version before 0.24 wrote: its classes were array_like."""
    array = [type(e).__name__] + [getattr(e, f) for f in e.__struct_fields__]
    return array[:length]


def stored(hashes, parent=None, tokens=(), size=16, **kw):
    kw.setdefault("medium", "GPU")
    kw.setdefault("lora_id", None)
    kw.setdefault("lora_name", None)
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=list(tokens), block_size=size, **kw)


big = [M64 - 1, 0x8000000000000000, 5, 300, 70000, 1 << 40]
full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
TS = 1700000000.25


def batch(name, events, want, rank=0, again="", **kw):
    line(name, encode(KVEventBatch(ts=TS, events=events, data_parallel_rank=rank)), want, rank, again, **kw)


plain = stored(big[:2], None, range(100, 132), extra_keys=[None, None], **full)
child = stored(big[2:], big[1], [0, 127, 128, 255, 256, 65535, 65536, 151935, 4294967295] + list(range(55)), extra_keys=[None] * 4, **full)
batch("vllm-plain", [plain, child], [expected(plain), expected(child)], again="vllm")
batch("vllm-no-rank", [plain], [expected(plain)], rank=None, again="vllm")
batch("vllm-heartbeat", [], [], again="vllm")

gone = [BlockRemoved(block_hashes=[h], medium="GPU", group_idx=0) for h in big]
batch("vllm-removed", gone, [expected(e) for e in gone], rank=3, again="vllm")
batch("vllm-cleared", [AllBlocksCleared()], [expected(AllBlocksCleared())], again="vllm")

for length in (16, 32):
    digests = [bytes((7 * i + j) % 256 for j in range(length)) for i in range(3)]
    e = stored(digests[1:], digests[0], range(32), extra_keys=[None, None], **full)
    r = BlockRemoved(block_hashes=digests, medium="GPU", group_idx=0)
    batch("vllm-bytes-%d" % length, [e, r], [expected(e), expected(r)])
short = [b"\x01\x02", b""]
e = stored(short, None, range(32), **full)
batch("vllm-bytes-short", [e], [expected(e)])
zeros = [bytes(24) + h.to_bytes(8, "big") for h in big]
e = stored(zeros, None, range(96), extra_keys=[None] * 6, **full)
batch("vllm-bytes-zeros", [e], [expected(e)], again="vllm 32")

e = stored(big[:2], None, range(32), lora_id=7, lora_name="sql", extra_keys=[("sql",), ("sql",)], **full)
batch("vllm-lora", [e], [expected(e)], again="vllm")
e = stored(big[:2], None, range(32), extra_keys=[("pepper",), None], **full)
batch("vllm-salt", [e], [expected(e, salt="pepper")], again="vllm")
e = stored(big[:2], None, range(32), lora_id=7, lora_name="sql", extra_keys=[("sql", "pepper"), ("sql",)], **full)
batch("vllm-lora-salt", [e], [expected(e, salt="pepper")], again="vllm")
e = stored(big[:2], 9, range(32), extra_keys=[("not a salt",), None], **full)
batch("vllm-text-later", [e], [expected(e, extra=[["not a salt"]])], again="vllm")
e = stored(big[:2], None, range(32), extra_keys=[("sql",), None], **full)
batch("vllm-salt-like-adapter", [e], [expected(e, salt="sql")], again="vllm")
e = stored(big[:2], None, range(32), lora_id=7, lora_name="sql", extra_keys=[("sql", "sql"), ("sql",)], **full)
batch("vllm-salt-is-adapter", [e], [expected(e, salt="sql")], again="vllm")
e = stored(big[:3], None, range(48), extra_keys=[None, (("img-1", 4), ("img-2", -3)), None], **full)
batch("vllm-image", [e], [expected(e, extra=[[], ["#", "#"]])])
e = stored(big[:3], None, range(48), lora_id=1, lora_name="sql", extra_keys=[("sql", ("img-1", 4), "pepper", bytes(32)), ("sql", bytes(32)), ("sql",)], **full)
batch("vllm-everything", [e], [expected(e, salt="pepper", extra=[["#", "#"], ["#"]])])

e = [
    stored(big[:1], None, range(16), medium="CPU", locality="LOCAL", **full),
    stored(big[:1], medium="STORAGE", size=0, group_idx=0, locality="REMOTE", ownership="tier-2"),
    stored(big[:1], medium="cpu", size=16, group_idx=1, parent=4),
    BlockRemoved(block_hashes=big[:2], medium="CPU", group_idx=0, locality="LOCAL", ownership="tier-1"),
    stored(big[:1], None, range(16), medium=None),
]
batch("vllm-tiers", e, [expected(x) for x in e])
e = stored(big[:1], 3, range(64), group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=4096, session_id="s-1")
batch("vllm-window", [e], [expected(e)])
e = stored(None, None, [], 0)
batch("vllm-null-hashes", [e], [expected(e)])

p = bytes(range(16))
line("vllm-publisher", encode([TS, [plain], 0, p]), [expected(plain)], 0, "vllm", publisher=p)
line("vllm-more-elements", encode([TS, [plain], 0, p, {"a": [1, {"b": None}]}, 2.5]), [expected(plain)], 0, publisher=p)
line("vllm-odd-publisher", encode([TS, [plain], None, "who"]), [expected(plain)])
line("time-integer", encode([1700000000, []]), [], time=1700000000)

unknown = [{"type": "BlockMoved", "block_hashes": [1, 2], "deep": [[[{"a": msgspec.msgpack.Ext(5, b"xyz")}]], 1.5, True, -70000]}, ["Later", 1, [2]], [7], ["BlockMoved"], {}, {"no": "type"}]
line("unknown-kinds", encode([TS, [unknown[0], plain, *unknown[1:3], gone[0], *unknown[3:]], 0]), [expected(plain), expected(gone[0])], 0, passed=6)
m = {"block_size": 16, "new": {"x": [1]}, "token_ids": list(range(16)), 5: "number as key", "extra_keys": [["pepper"]], "block_hashes": [1], "type": "BlockStored", "medium": "GPU"}
line("map-in-another-order", encode([TS, [m], 0]), [expected(stored([1], None, range(16)), salt="pepper")], 0)

# Arrays: what the versions had of the members.
e = stored(big[:2], 77, range(32), lora_id=7, lora_name="sql", extra_keys=[("sql",), ("sql", ("img", 2))], group_idx=1, kv_cache_spec_kind="mla_attention")
r = BlockRemoved(block_hashes=big, medium="CPU", group_idx=2)
c = AllBlocksCleared()
for n in range(6, 13):
    arrays = [legacy(e, n), legacy(r, 2 if n < 7 else 3 if n < 10 else 4), legacy(c, 1)]
    we, wr = expected(e, extra=[[], ["#"]]), expected(r)
    if n < 7:
        we["medium"] = wr["medium"] = "gpu"
    if n < 8:
        we["adapter"] = ""
    if n < 9:
        we["extra"] = []
    if n < 10:
        del we["group"], wr["group"]
    if n < 11:
        we["spec"] = ""
    line("vllm-array-%d" % n, encode([TS, arrays, 1]), [we, wr, expected(c)], 1)
e = stored(big[:2], None, range(32), **full)
e.extra_keys = [("pepper",), None]
line("vllm-array", encode([TS, [legacy(e, 12), legacy(gone[0], 4), legacy(c, 1)], 1]), [expected(e, salt="pepper"), expected(gone[0]), expected(c)], 1, "vllm-arrays")

# SGLang: signed hashes; arrays, later maps.
signed = [-1, -(1 << 63), 5, -70000, -33, -128, (1 << 63) - 1]
s = [h % M64 for h in signed]


def sglang(hashes, parent, tokens, size, medium, **more):
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size, "lora_id": None, "medium": medium, **more}


def want(hashes, parent, tokens, size, medium, salt=""):
    return expected(stored(hashes, parent, tokens, size, medium=medium), salt=salt)


line("sglang-cleared", encode([TS, [{"type": "AllBlocksCleared"}], 0]), [expected(c)], 0, "sglang")
line("sglang", encode([TS, [sglang(signed, -12345678901, list(range(7)), 1, "GPU"), {"type": "BlockRemoved", "block_hashes": signed, "medium": "CPU_PINNED"}], 0]),
     [want(signed, -12345678901, list(range(7)), 1, "GPU"), expected(BlockRemoved(block_hashes=s, medium="CPU_PINNED"))], 0, "sglang")
line("sglang-salt", encode([TS, [sglang(signed[:1], None, [1, 2], 2, "DISK", cache_salt="pepper")], None]), [want(signed[:1], None, [1, 2], 2, "DISK", "pepper")], None, "sglang")
line("sglang-session", encode([TS, [sglang(signed[:1], None, [1, 2], 2, "EXTERNAL", cache_salt=None, session_id="s")], None]), [want(signed[:1], None, [1, 2], 2, "EXTERNAL")])
line("sglang-array", encode([TS, [["BlockStored", signed[:2], None, [1, 2], 1, None, "GPU"], ["BlockRemoved", signed, "GPU"], ["AllBlocksCleared"]], 0]),
     [want(signed[:2], None, [1, 2], 1, "GPU"), expected(BlockRemoved(block_hashes=s, medium="GPU")), expected(c)], 0, "sglang-arrays")
line("sglang-array-old", encode([TS, [["BlockStored", signed[:2], 8, [1, 2], 1, None], ["BlockRemoved", signed]]]),
     [want(signed[:2], 8, [1, 2], 1, "GPU"), expected(BlockRemoved(block_hashes=s, medium="GPU"))])
line("sglang-array-salt", encode([TS, [["BlockStored", signed[:2], None, [1, 2], 1, None, "GPU", {"cache_salt": "pepper"}]], 0]), [want(signed[:2], None, [1, 2], 1, "GPU", "pepper")], 0, "sglang-arrays")
line("sglang-eagle", encode([TS, [sglang(signed[:1], None, [[11, 12], [12, 13], [13, 70000]], 3, "GPU")], 0]), [want(signed[:1], None, [11, 12, 13], 3, "GPU")], 0)
line("sglang-lora-text", encode([TS, [{**sglang(signed[:1], None, [1], 1, "GPU"), "lora_id": "0a1b"}], 0]), [expected(stored(signed[:1], None, [1], 1), adapter="0a1b")], 0)
