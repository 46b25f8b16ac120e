#!/usr/bin/env python3
"""Writes scheduler.txt: what vLLM's scheduler does to its KV cache while requests
come one after the other, with its plain loop and with the one that schedules a
step before the last one's tokens are known.

Run it with a Python that has vLLM 0.32:

    python scheduler.py > scheduler.txt

The lines are

    scheduler NAME SIZE BLOCKS
    PROMPT SAID END = tokens cached | events

SAID are the tokens that were generated, the last one included, END is why they
ended: "length" or "stop". Tokens are letters, blocks have numbers in the order
in which their names first appear.
"""
import json
import os
import random
import tempfile

from vllm.config import CacheConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

init_none_hash(sha256)
STOP = "!"

model = tempfile.mkdtemp()
with open(os.path.join(model, "config.json"), "w") as f:
    json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
               "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 1000,
               "max_position_embeddings": 4096, "torch_dtype": "float32", "rms_norm_eps": 1e-5}, f)


def history(kind, size, blocks, seed):
    r = random.Random(seed)
    print(f"scheduler {kind.__name__} {size} {blocks}")
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=500),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=True, num_gpu_blocks_override=blocks),
        scheduler_config=SchedulerConfig(max_model_len=500, is_encoder_decoder=False, max_num_batched_tokens=2048,
                                         async_scheduling=kind is AsyncScheduler))
    config.cache_config.num_gpu_blocks = blocks
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    spec = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=32, dtype=torch.float32)
    scheduler = kind(config, KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]),
                     StructuredOutputManager(config), block_size=size, log_stats=True)
    events = []
    publish = scheduler.kv_event_publisher
    publish.publish = lambda batch: events.extend(batch.events)
    hasher = get_request_block_hasher(size, sha256)
    numbers = {}
    number = lambda h: numbers.setdefault(h, len(numbers))
    said = [""]
    for step in range(120):
        prompt = r.choice(said)[:r.randint(0, 60)] + "".join(r.choice("ab") for _ in range(r.randint(1, 3 * size)))
        length, end = r.randint(1, 4 * size), r.choice(["length", "stop"])
        tokens = [r.choice("ab") for _ in range(length)]
        if end == "stop":
            tokens[-1] = STOP
        request = Request(f"r{step}", [ord(c) for c in prompt],
                          SamplingParams(max_tokens=length if end == "length" else 400, stop_token_ids=[ord(STOP)]), None, block_hasher=hasher)
        scheduler.add_request(request)
        cached, made, pending = None, 0, []
        depth = 2 if kind is AsyncScheduler else 1
        while True:
            out = scheduler.schedule()
            if out.num_scheduled_tokens:
                if cached is None:
                    cached = out.scheduled_new_reqs[0].num_computed_tokens
                pending.append(out)
            if len(pending) == depth or pending and not out.num_scheduled_tokens:
                out = pending.pop(0)
                sampled = [[ord(tokens[made])] if made < length else [ord("x")]]
                made += 1
                scheduler.update_from_output(out, ModelRunnerOutput(
                    req_ids=[request.request_id], req_id_to_index={request.request_id: 0}, sampled_token_ids=sampled,
                    logprobs=None, prompt_logprobs_dict={}, pooler_output=[]))
            elif not pending:
                break
        # The last events are published with the next step.
        scheduler.schedule()
        line = f"{prompt} {''.join(tokens)} {end} = {cached}"
        told = list(events) + list(scheduler.kv_cache_manager.take_events())
        events.clear()
        for e in told:
            if isinstance(e, BlockStored):
                line += " | stored " + ",".join(str(number(h)) for h in e.block_hashes) + " " + "".join(map(chr, e.token_ids))
                if e.parent_block_hash is not None:
                    line += f" after {number(e.parent_block_hash)}"
            elif isinstance(e, BlockRemoved):
                line += " | removed " + ",".join(str(number(h)) for h in e.block_hashes)
        print(line)
        said.append(prompt + "".join(tokens[:-1] if end == "stop" else tokens))


for seed in range(3):
    for kind in [Scheduler, AsyncScheduler]:
        history(kind, 4, 30 + 10 * seed, seed)
