"""Makes pool.txt: what the KV cache of vLLM does with random requests.

It drives vLLM's own KVCacheManager, which needs no GPU, as its scheduler does:

    python index/testdata/pool.py > index/testdata/pool.txt

with a Python that has vLLM (0.32.0 made the file). Each line is

    pool BLOCK BLOCKS            a new cache of so many blocks of so many tokens
    begin ID CACHED PROMPT       a request, and how many of its tokens are cached
    end ID GENERATED QUEUED FREE what it has generated; then so many free blocks
                                 are cached, and so many are not

PROMPT and GENERATED are parts: +N.M are the first N tokens of the stream M, @ID/N
the first N tokens of request ID, with what it has generated.
"""

import random

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request


class Stream:
    """The tokens that TestShadowAgainstVLLM has, too."""

    def __init__(self, number):
        self.x = number

    def next(self, n):
        ids = []
        for _ in range(n):
            self.x = (self.x * 6364136223846793005 + 1442695040888963407) % 2**64
            ids.append((self.x >> 40) % 100000)
        return ids


def play(rng, block, blocks, requests):
    print("pool", block, blocks)
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(block, sha256_cbor)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=100000,
        scheduler_block_size=block,
        hash_block_size=block,
        enable_caching=True,
    )
    pool = manager.block_pool
    streams = 0
    running = []
    ended = []
    said = {}

    def fresh(n):
        nonlocal streams
        streams += 1
        return Stream(streams).next(n), f"+{n}.{streams}"

    system = [fresh(2 * block), fresh(3 * block + block // 2)]

    def begin(number):
        kind = rng.randrange(10)
        if kind < 5 and ended:
            # The next turn of a conversation.
            other = rng.choice(ended[-6:])
            ended.remove(other)
            ids, part = said[other], f"@{other}/{len(said[other])}"
            if len(ids) > blocks * block // 4:
                return False
            more, parts = fresh(rng.randrange(1, 2 * block))
            ids, part = ids + more, part + " " + parts
        elif kind < 6 and ended:
            # The prompt of a conversation again, cut to whole blocks.
            other = rng.choice(ended)
            n = len(said[other]) // block * block
            ids, part = said[other][:n], f"@{other}/{n}"
            if n < 4 * block:
                return False
            # What would go on otherwise cannot be told from what comes now.
            if any(r.prompt_token_ids[:n] == ids for r in running):
                return False
            ended[:] = [o for o in ended if said[o][:n] != ids]
        else:
            first, part = rng.choice(system)
            more, parts = fresh(rng.randrange(1, 6 * block))
            ids, part = first + more, part + " " + parts
        params = SamplingParams(max_tokens=100000)
        request = Request(str(number), ids, params, None, block_hasher=hasher)
        found, cached, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, len(ids) - cached, cached, found) is None:
            return False
        request.num_computed_tokens = len(ids)
        running.append(request)
        print("begin", number, cached, part)
        return True

    def end(request):
        running.remove(request)
        number = int(request.request_id)
        ids, _ = fresh(rng.randrange(1, 3 * block))
        done = 0
        for token in ids:
            if done and manager.allocate_slots(request, 1) is None:
                break
            request.num_computed_tokens += done > 0
            request.append_output_token_ids(token)
            done += 1
        print("end", number, f"+{done}.{streams}", end=" ")
        manager.free(request)
        said[number] = list(request.all_token_ids)
        ended.append(number)
        free = pool.free_block_queue.get_all_free_blocks()
        cached = sum(b.block_hash is not None for b in free)
        print(cached, len(free) - cached)

    number = 0
    while number < requests:
        if rng.randrange(2) == 0 and len(running) < 5:
            number += begin(number)
        elif running:
            end(rng.choice(running))


rng = random.Random(5)
for block, blocks in [(4, 60), (16, 40), (1, 90)]:
    play(rng, block, blocks, 400)
