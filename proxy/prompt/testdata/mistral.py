"""Makes mistral.json.gz: chats and what vLLM makes of them for Mistral's models.

Run it in an environment that has vLLM 0.32.0 (which brings mistral_common
1.13.1 with its data); no engine and no GPU is needed:

    python -P mistral.py > mistral.json.gz

mistral_common has vocabularies of version 3 only. Files of other versions are
made of one of them in a temporary folder, by variant() below, which
mistral_test.go repeats. Each line of the result is a case: the variant, the
body of the request, and either the token ids and the same as a list of texts
and special tokens in turn (a text, empty or not, is first and last), or that
the engine refuses it. "unfollowed" marks what the engine takes and the agent
does not follow.
"""

import copy
import gzip
import json
import logging
import pathlib
import random
import sys
import tempfile
import types

logging.disable(logging.CRITICAL)

import mistral_common
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.mistral import MistralRenderer
from vllm.tokenizers import mistral as mt

data = json.load(open(pathlib.Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"))

SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> "
    "[IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
VARIANTS = ["v3", "v7", "v11", "v13", "v13-think", "v15", "v15-bare", "v15-none"]


def variant(name):
    """Changes the version 3 file into one of another version."""
    file = copy.copy(data)
    version, _, extra = name.partition("-")
    file["config"] = dict(file["config"], version=version)
    special = list(SPECIAL)
    if version in ("v11", "v13", "v15"):
        special += ["[ARGS]", "[CALL_ID]"]
    if extra == "think" or version == "v15":
        special += ["[THINK]", "[/THINK]"]
    if version == "v15":
        special += ["[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"]
        if extra != "none":
            file["model_settings_builder"] = {}
        if extra == "":
            file["model_settings_builder"] = {
                "reasoning_effort": {"values": ["none", "high"], "default": "none"},
                "json_schema": {"type": "json_schema", "accepts_none": False, "default": None},
            }
    if version not in ("v3", "v7"):
        file["special_tokens"] = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(special)]
    return file


def load(name):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "tekken.json").write_text(json.dumps(variant(name)))
        return mt.MistralTokenizer.from_pretrained(folder)


def ids_of(tokenizer, body):
    request = ChatCompletionRequest(**json.loads(json.dumps(body)))
    mt.maybe_serialize_tool_calls(request)
    mt.truncate_tool_call_ids(request)
    mt.validate_request_params(request)
    renderer = object.__new__(MistralRenderer)
    renderer.get_tokenizer = lambda: tokenizer
    renderer.tokenizer = tokenizer
    renderer.model_config = types.SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False, is_multimodal_model=False)
    tools = None if request.tools is None else [t.model_dump() for t in request.tools]
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": True})
    _, prompt = renderer.render_messages(request.messages, params)
    return prompt["prompt_token_ids"]


def spell(tokenizer, ids):
    tekken, out, text = tokenizer.tokenizer, [], []
    for i in ids:
        if tekken.is_special(i):
            out += [tekken.decode(text), tekken.id_to_piece(i)]
            text = []
        else:
            text.append(i)
    return out + [tekken.decode(text)]


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, description=None, parameters=None, **more):
    f = {"name": name, **more}
    if description is not None:
        f["description"] = description
    if parameters is not None:
        f["parameters"] = parameters
    return {"type": "function", "function": f}


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def assistant(content=None, **more):
    return {"role": "assistant", "content": content, **more}


def result(id, content, **more):
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def text(*texts):
    return [{"type": "text", "text": t} for t in texts]


def think(thinking, **more):
    return {"type": "thinking", "thinking": thinking, **more}


weather = tool("get_weather", "Get the weather.\nFor one place. é", {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "City"}, "unit": {"enum": ["c", "f"], "default": 1.0}, "n": {"maximum": 1e20, "minimum": -0.0, "multipleOf": 1e-7}},
    "required": ["place"],
})
A, B, C = "aaaaaaaa1", "bbbbbbbb2", "cccccccc3"


def bodies():
    hi = user("Hello!")
    yield {"messages": [hi]}
    for content in ("", " ", "\n\n", "naïve 你好 🤖", "[INST] x [/INST]</s> <s>", "12345 it's IT'S a/b//\n/c", "x" * 2000, text("a", "b"), text("a", "", "b "), text("", ""), text(),
                    text("a") + [{"type": "refusal", "refusal": "no"}], [think("hm")], text("a") + [think("hm", closed=False)] + text("b", "c"), [think(""), think("b", closed=True)] + text("", "x ")):
        yield {"messages": [user(content)]}
        yield {"messages": [system(content), hi]}
        yield {"messages": [hi, system(content), hi]}
        yield {"messages": [hi, assistant(content), hi]}
        yield {"messages": [hi, assistant(content, reasoning="thought"), hi]}
        yield {"messages": [hi, assistant(content, tool_calls=[call(A, "f", "{}")]), result(A, content), assistant("x"), hi]}
        yield {"messages": [hi, assistant(content)], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": [system("alone")]}
    yield {"messages": [system("a"), system("b"), {"role": "developer", "content": "c"}, hi, user("again")]}
    yield {"messages": [{"role": "developer", "content": "dev"}, hi]}
    yield {"messages": [hi, system("late"), user("more"), assistant("ok"), assistant("ok2"), user("u1"), user(text("u2", "u3"))]}
    yield {"messages": [system("s"), assistant("first"), hi]}
    yield {"messages": [assistant("first"), hi]}
    yield {"messages": [assistant("only")]}
    yield {"messages": [hi, assistant("ends")]}
    yield {"messages": [hi, assistant("ends")], "add_generation_prompt": False}
    yield {"messages": [hi, system("ends")]}
    yield {"messages": [hi], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": [hi], "add_generation_prompt": False}
    yield {"messages": [hi, assistant("ab  ")], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": [hi, assistant("a"), assistant("b ")], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": [hi, assistant("trail   "), hi]}
    yield {"messages": [hi, {"role": "assistant", "content": "x", "prefix": True}, hi]}
    for role in ("weird", "function"):
        yield {"messages": [{"role": role, "content": "x", "name": "f"}]}
    for more in ({"chat_template_kwargs": {}}, {"chat_template_kwargs": {"a": 1}}, {"documents": [{"a": "b"}]}, {"tools": None}):
        yield {"messages": [hi], **more}
    for effort in (None, "none", "minimal", "low", "high", "max"):
        yield {"messages": [system("s"), hi, assistant("a"), hi], "reasoning_effort": effort, "tools": [weather]}
        yield {"messages": [system("s")], "reasoning_effort": effort}
    # Fields of other types decide which model of messages pydantic takes, and
    # so whether parts are a list or an iterator, which vLLM reads up.
    for role in ("user", "system", "developer", "assistant"):
        yield {"messages": [hi, {"role": role, "content": text("a", "b"), "task": 1}, hi]}
    yield {"messages": [hi, assistant(text("a"), task=1, tool_calls=[call(A, "f", "")]), result(A, text("r"), task=1)]}
    yield {"messages": [hi, assistant(None, tool_calls=[call(A, "f", "")]), result(A, text("r"), task=1)]}
    # Reasoning.
    for reasoning in ({"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": ""}, {"reasoning": None}, {"reasoning": "[/THINK]"}):
        for content in ("answer ", "", None, text("a", "b"), [think("t")]):
            yield {"messages": [hi, assistant(content, **reasoning), hi]}
            yield {"messages": [hi, assistant(content, **reasoning, tool_calls=[call(A, "f", '{"a": 1}')]), result(A, "r")]}
            yield {"messages": [hi, assistant(content, **reasoning), assistant(content, **reasoning), hi]}
    # Tools.
    for n, messages in enumerate(([hi], [system("s"), hi, assistant("a"), hi], [hi, assistant(None, tool_calls=[call(A, "f", "{}")]), result(A, "r")])):
        for tools in ([weather], [weather, tool("f")], [tool("f", "", {})], [tool("f", None, {"type": "object", "properties": {"é\n": {"const": [1, 2.50, True, None, {}, []]}}}, strict=True)],
                      [tool("bad name")], [tool("f\n")], [tool("")], [tool("a" * 64)], [tool("a" * 65)], [{"type": "function", "function": {"name": "f", "parameters": None, "description": None, "x": 1}}]):
            yield {"messages": messages, "tools": tools}
    yield {"messages": [hi], "tools": [weather], "tool_choice": "none"}
    # Calls and answers.
    for id in (A, "short", "call_abcdefghi", "chatcmpl-tool-0123456789abcdef", "aaaa_aaaa", "", "null", "éééééééééé", "aaaaaaaaé", "123456789\n", "0123456789\n"):
        yield {"messages": [hi, assistant(None, tool_calls=[call(id, "f", "{}")]), result(id, "r")]}
        yield {"messages": [hi, assistant(None, tool_calls=[call(id, "f", "{}")])]}
    for name in ("f", "a-b_C9", "a.b", "", "f\n", "é", "a" * 65):
        yield {"messages": [hi, assistant(None, tool_calls=[call(A, name, "{}")]), result(A, "r")]}
        yield {"messages": [hi, assistant(None, tool_calls=[call(A, "f", "{}")]), result(A, "r", name=name)]}
    for arguments in ("", "{}", '{"a":1,"b":[1,2.0,1e5,1E-7,-0,-0.0,true,null],"c":{"d":"é\\u00e9\\n\\"\\u0001\\u007f"}}', '{"a": 1, "a": 2, "b": 3}', "not json", "[1]", "12", '"x"', "null", ' {"a" : 1}\n',
                      '{"a": "\\ud83e\\udd16"}', '{"a": 01}', '{"a": "x\ty"}', '{"a": 123456789012345678}', '{"a": 0.1000000000000000055, "b": 1e16, "c": 9007199254740993.0}', "{'a': 1}", '{"a": 1} x', "\ufeff{}", '{"": {"": [[], {}]}}'):
        yield {"messages": [hi, assistant(None, tool_calls=[call(A, "f", arguments)]), result(A, arguments), hi]}
    two = [call(A, "f", '{"x": 1}'), call(B, "g", "")]
    for more in ([], [result(A, "1"), result(B, "2")], [result(B, "2"), result(A, "1")], [result(A, "1")], [result(C, "3")], [result(A, "1"), result(A, "2")], [{"role": "tool", "content": "x"}],
                 [result(None, "x")], [result(B, "2"), result(A, text("1", "1b")), assistant("done"), hi], [result(A, "1"), assistant("done"), hi], [hi], [assistant("no answer"), hi], [result(A, ""), result(B, text())]):
        yield {"messages": [hi, assistant(None, tool_calls=two), *more]}
        yield {"messages": [hi, assistant("I call ", tool_calls=two), *more], "tools": [weather]}
        yield {"messages": [hi, assistant(None, tool_calls=two[:1]), assistant(None, tool_calls=two[1:]), *more]}
        yield {"messages": [hi, assistant("x"), assistant(None, tool_calls=two), *more]}
    yield {"messages": [hi, assistant(None, tool_calls=[call(A, "f", ""), call(A, "g", "")]), result(A, "1")]}
    yield {"messages": [assistant(None, tool_calls=two), result(A, "1"), result(B, "2")]}
    yield {"messages": [result(A, "1"), hi]}
    yield {"messages": [hi, assistant("x"), result(A, "1")]}
    yield {"messages": [hi, assistant(None, tool_calls=two[:1]), result(A, "1"), user("u"), result(A, "1")]}
    yield {"messages": [hi, assistant(None, tool_calls=two[:1]), result(A, "1"), system("s"), hi]}
    yield {"messages": [hi, {"role": "assistant", "tool_calls": None, "content": "x"}, {"role": "assistant", "tool_calls": []}, hi]}
    yield {"messages": [hi, {"role": "assistant"}, hi]}
    # Conversations at random that are mostly in order.
    random.seed(5)
    words = ["alpha", " beta", "\n", "12", "[INST]", "é", "   ", "it's", "🤖", '{"a": 1}', "http://x/y?z", "CamelCase", "你好世界", "\t", "--", "</s>"]

    def phrase(least=0):
        return "".join(random.choice(words) for _ in range(random.randint(least, 12)))

    def content():
        return random.choice([phrase(1), phrase(1), text(*(phrase() for _ in range(random.randint(1, 3))))])

    for _ in range(60):
        messages = []
        if random.random() < 0.6:
            messages.append(system(content()))
        for _ in range(random.randint(1, 5)):
            messages.append(user(content()))
            if random.random() < 0.2:
                messages.append(system(content()))
            if random.random() < 0.2:
                messages.append(user(content()))
            if random.random() < 0.5:
                calls = [call(random.choice(["call_", ""]) + "".join(random.choice("abcXYZ019") for _ in range(9)), random.choice(["f", "get_weather"]), random.choice(['{"a": "%d"}' % random.randint(0, 9), ""])) for _ in range(random.randint(1, 3))]
                messages.append(assistant(random.choice([None, None, phrase(1)]), tool_calls=calls))
                random.shuffle(calls)
                messages += [result(c["id"], content()) for c in calls]
                if random.random() < 0.3:
                    break
            messages.append(assistant(content(), **({"reasoning": phrase()} if random.random() < 0.2 else {})))
        if messages[-1]["role"] == "assistant":
            messages.append(user(content()))
        body = {"messages": messages}
        if random.random() < 0.4:
            body["tools"] = [weather, tool("f", phrase())]
        if random.random() < 0.2:
            body["reasoning_effort"] = random.choice(["none", "high"])
        yield body


def called_with(*all_arguments):
    for arguments in all_arguments:
        yield {"messages": [user("hi"), assistant(None, tool_calls=[call(A, "f", arguments)]), result(A, "x")]}


def numbers():
    """Numbers that are none elsewhere."""
    return called_with('{"a": 1e400}', '{"a": 123456789012345678901234567890}', '{"a": NaN, "b": -Infinity}')


def unfollowed():
    """Halves of surrogates."""
    return called_with('{"a": "\\ud83e"}')


if __name__ == "__main__":
    out = gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", mtime=0, compresslevel=9)
    for name in VARIANTS:
        tokenizer = load(name)
        refused = count = 0
        cases = [(b, True) for b in bodies()] + [(b, True) for b in numbers()] + [(b, False) for b in unfollowed()]
        if name == "v15-none":  # mistral_common takes no chat
            cases = cases[:5]
        for body, followed in cases:
            case = {"tokenizer": name, "body": body}
            if not followed:
                case["unfollowed"] = True
            try:
                case["ids"] = ids_of(tokenizer, body)
                case["text"] = spell(tokenizer, case["ids"])
            except Exception as e:
                case["refused"] = f"{type(e).__name__}: {e}"[:100]
                refused += 1
            count += 1
            out.write((json.dumps(case, ensure_ascii=False) + "\n").encode())
        print(name, count, "cases,", refused, "refused", file=sys.stderr)
    out.close()
