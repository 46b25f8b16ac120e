#!/usr/bin/env python3
"""Writes pool.txt: what the KV cache of vLLM does in random histories.

Run it with a Python that has vLLM 0.32:

    python pool.py > pool.txt

Each line is what is done, " = " and what comes of it:

    pool SIZE BLOCKS CACHING
    admit NAME PROMPT SALT ADAPTER = tokens cached, or "full"
    again NAME                     = the same for one that was freed, with what it has generated
    grow NAME LETTER               = "ok", or "full"
    free NAME
    reset                          = "true" or "false"

and behind it the events, and how many blocks are free. Tokens are letters,
blocks have numbers in the order in which their names first appear, SALT and
ADAPTER are "-" when there is none.
"""
import random

from vllm.config import VllmConfig  # noqa: F401  settles the order of vLLM's imports
import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

init_none_hash(sha256)


def history(seed):
    r = random.Random(seed)
    size = r.choice([1, 2, 4, 4])
    blocks = r.randint(4, 24)
    caching = seed % 6 != 5
    print(f"pool {size} {blocks} {int(caching)}")
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]),
        max_model_len=10000, scheduler_block_size=size, hash_block_size=size,
        enable_caching=caching, enable_kv_cache_events=True, log_stats=True)
    hasher = get_request_block_hasher(size, sha256)
    numbers = {}
    number = lambda h: numbers.setdefault(h, len(numbers))

    def outcome(did, result=""):
        line = f"{did} = {result}"
        for e in manager.take_events():
            if isinstance(e, BlockStored):
                line += " | stored " + ",".join(str(number(h)) for h in e.block_hashes)
                line += " " + "".join(map(chr, e.token_ids))
                if e.parent_block_hash is not None:
                    line += f" after {number(e.parent_block_hash)}"
            elif isinstance(e, BlockRemoved):
                line += " | removed " + ",".join(str(number(h)) for h in e.block_hashes)
            elif isinstance(e, AllBlocksCleared):
                line += " | cleared"
        print(f"{line} | {manager.block_pool.get_num_free_blocks()} free")

    def schedule(request):
        hit, cached, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - cached, cached, hit, full_sequence_must_fit=True) is None:
            return "full"
        request.num_computed_tokens = request.num_tokens
        return str(cached)

    running, waiting, said = {}, {}, [""]
    for step in range(140):
        what = r.random()
        if what < 0.4:
            prompt = r.choice(said)[:r.randint(0, 40)]
            prompt += "".join(r.choice("ab") for _ in range(r.randint(1, 3 * size)))
            said.append(prompt)
            name, salt, adapter = f"r{step}", r.choice("-----s"), r.choice("-----l")
            request = Request(
                name, [ord(c) for c in prompt], SamplingParams(max_tokens=1000), None,
                lora_request=LoRARequest(adapter, 1, "/") if adapter != "-" else None,
                cache_salt=salt if salt != "-" else None, block_hasher=hasher)
            result = schedule(request)
            (waiting if result == "full" else running)[name] = request
            outcome(f"admit {name} {prompt} {salt} {adapter}", result)
        elif what < 0.75 and running:
            name = r.choice(sorted(running))
            request, letter = running[name], r.choice("ab")
            request.append_output_token_ids(ord(letter))
            fits = manager.allocate_slots(request, 1) is not None
            if fits:
                request.num_computed_tokens += 1
                said.append("".join(map(chr, request.all_token_ids)))
            outcome(f"grow {name} {letter}", "ok" if fits else "full")
            if not fits:
                # As in a preemption.
                manager.free(request)
                request.num_computed_tokens = 0
                waiting[name] = running.pop(name)
                outcome(f"free {name}")
        elif what < 0.9 and running:
            name = r.choice(sorted(running))
            manager.free(running[name])
            running[name].num_computed_tokens = 0
            waiting[name] = running.pop(name)
            outcome(f"free {name}")
        elif what < 0.97 and waiting:
            name = r.choice(sorted(waiting))
            request = waiting[name]
            request.status = RequestStatus.PREEMPTED
            result = schedule(request)
            if result != "full":
                running[name] = waiting.pop(name)
            outcome(f"again {name}", result)
        elif what > 0.97:
            if r.random() < 0.5:
                for name in sorted(running):
                    manager.free(running[name])
                    outcome(f"free {name}")
                running, waiting = {}, {}
            outcome("reset", str(manager.reset_prefix_cache()).lower())


for seed in range(24):
    history(seed)
