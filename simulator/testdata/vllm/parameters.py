# Prints the parameters that a vLLM knows of chats and of completions: the output
# is parameters.txt. Run it with the Python in which vLLM is installed.
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

for name, kind in ("chat", ChatCompletionRequest), ("completions", CompletionRequest):
    for field in kind.model_fields:
        print(name, field)
