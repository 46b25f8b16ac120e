"""Makes told.txt: what vLLM tells of its KV cache, and what it finds in it.

It drives vLLM's own KVCacheManager, which needs no GPU, as its scheduler does,
with random requests of adapters, salts and images, and writes the events with
vLLM's own classes:

    python index/testdata/told.py > index/testdata/told.txt

with a Python that has vLLM (0.32.0 made the file). Each line is

    pool BLOCK                    a new cache of blocks of so many tokens
    batch PAYLOAD                 events, in hexadecimal
    prompt CACHED LORA SALT IDS   how many tokens of a prompt are cached now; the
                                  ids, one a byte in hexadecimal; "-" is none

Prompts with images are told of, but not asked for: what is in them is not in
their tokens.
"""

import os
import random

import torch
from msgspec.msgpack import encode

from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request


def play(rng, block, blocks, requests):
    print("pool", block)
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(block, sha256_cbor)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=100000,
        scheduler_block_size=block,
        hash_block_size=block,
        enable_caching=True,
        enable_kv_cache_events=True,
    )
    batches = 0
    running = []
    ended = []

    def publish():
        nonlocal batches
        events = manager.take_events()
        if events:
            print("batch", encode(KVEventBatch(ts=1e9 + batches, events=events, data_parallel_rank=0)).hex())
            batches += 1

    def fresh(n):
        return [rng.randrange(256) for _ in range(n)]

    def image(ids):
        if not ids or rng.randrange(5):
            return []
        at = rng.randrange(len(ids))
        return [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier="image-%d" % rng.randrange(2),
                mm_position=PlaceholderRange(offset=at, length=min(len(ids) - at, 1 + rng.randrange(3 * block))),
            )
        ]

    system = [fresh(2 * block), fresh(3 * block + block // 2)]
    loras = [None, None, LoRARequest("sql", 1, "/a"), LoRARequest("sql", 2, "/b"), LoRARequest("law", 3, "/c")]

    def begin(number):
        lora, salt = rng.choice(loras), rng.choice([None, None, "pepper"])
        kind = rng.randrange(10)
        if kind < 5 and ended:
            # The next turn of a conversation, or the same again.
            ids, lora, salt, images = rng.choice(ended[-8:])
            if rng.randrange(4) == 0:
                ids = ids[: len(ids) // block * block]
            else:
                ids = ids + fresh(rng.randrange(1, 2 * block))
            images = [i for i in images if i.mm_position.offset + i.mm_position.length <= len(ids)]
        else:
            ids = rng.choice(system) + fresh(rng.randrange(1, 4 * block)) if kind < 8 else fresh(rng.randrange(1, 6 * block))
            images = image(ids)
        if not ids or len(ids) > blocks * block // 3:
            return False
        params = SamplingParams(max_tokens=100)
        params.update_from_generation_config({}, 0)
        request = Request(str(number), ids, params, None, lora_request=lora, cache_salt=salt, mm_features=images, block_hasher=hasher)
        found, cached, _ = manager.get_computed_blocks(request)
        first = len(ids) - cached
        if rng.randrange(3) == 0:
            first = rng.randrange(1, first + 1)  # a part of it
        if manager.allocate_slots(request, first, cached, found) is None:
            publish()
            return False
        if not images:
            print("prompt", cached, lora.lora_name if lora else "-", salt or "-", bytes(ids).hex())
        request.num_computed_tokens = cached + first
        if request.num_computed_tokens < len(ids):
            if manager.allocate_slots(request, len(ids) - request.num_computed_tokens) is None:
                manager.free(request)
                publish()
                return True
            request.num_computed_tokens = len(ids)
        publish()
        running.append((request, images))
        return True

    def end():
        request, images = running.pop(rng.randrange(len(running)))
        for i, token in enumerate(fresh(rng.randrange(1, 3 * block))):
            if i and manager.allocate_slots(request, 1) is None:
                break
            request.num_computed_tokens += i > 0
            request.append_output_token_ids(token)
        manager.free(request)
        ended.append((list(request.all_token_ids), request.lora_request, request.cache_salt, images))
        publish()

    number = 0
    while number < requests:
        if rng.randrange(2) == 0 and len(running) < 5:
            number += begin(number)
        elif running:
            end()
        elif rng.randrange(40) == 0:
            assert manager.reset_prefix_cache()
            publish()


rng = random.Random(9)
for block, blocks, ints in [(4, 60, "1"), (16, 40, "0"), (1, 90, "1")]:
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = ints
    play(rng, block, blocks, 100)
