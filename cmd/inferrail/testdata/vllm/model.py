"""Writes a small model that vLLM can serve into the folder named by the first
argument: two layers of Llama with weights of a fixed seed, a byte-level BPE
tokenizer trained on the text below, and a chat template. With a second argument,
a folder that holds Qwen3's tokenizer, it is a Qwen3 with that tokenizer and its
chat template; numbers behind that are how wide it is, inside its layers too, how
many there are of these, and how far its weights are spread. What it says is noise,
the same noise for the same prompt."""

import os
import shutil
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEXT = """
The river rose in the night, and by the morning the lower road was under water. We had been told to wait for the ferry,
but nobody knew when it would come, so we walked along the bank until we found the old bridge. It was narrow and had no
rail. One after another we went across, slowly, with our shoes in our hands. On the other side there was a house with a
green door; a woman stood before it and asked where we had come from. "From the hills," we said. She gave us bread,
cheese and apples, and would take no money. In the afternoon the rain stopped. The sun came through, and the whole
valley began to steam. We counted 12 boats, 7 carts and more than 300 sheep on their way to the market of the next town.
def count(words): return {word: words.count(word) for word in words}
{"name": "get_weather", "arguments": {"city": "Zurich", "unit": "celsius"}}
"""

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def main(folder):
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(
        TEXT.splitlines(keepends=True),
        trainers.BpeTrainer(
            vocab_size=1000,
            special_tokens=["<|start|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
            initializer_range=0.6,
        )
    )
    os.makedirs(folder, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def qwen(folder, tokenizer, width=64, inner=128, layers=1, spread=0.02):
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=32768,
            bos_token_id=151643,
            eos_token_id=151645,
            tie_word_embeddings=True,
            initializer_range=spread,
        )
    )
    os.makedirs(folder, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(tokenizer, name), folder)


if len(sys.argv) > 2:
    qwen(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), *map(float, sys.argv[6:]))
else:
    main(sys.argv[1])
