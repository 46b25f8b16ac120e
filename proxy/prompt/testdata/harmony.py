"""Makes harmony.json.gz: chats and what vLLM makes of them for gpt-oss.

Run it in an environment that has vLLM 0.32.0 (which brings oss-harmony 0.0.11
with its vocabulary); no engine and no GPU is needed:

    VLLM_SYSTEM_START_DATE=2026-01-15 python -P harmony.py > harmony.json.gz

Each line of the result is a case: the body of the request, and either the
token ids and the same as a list of texts and special tokens in turn (a text,
empty or not, is first and last), or that the engine refuses it. "unfollowed"
marks what the engine takes and the agent does not follow.
"""

import asyncio
import gzip
import json
import logging
import random
import sys
import types

logging.disable(logging.CRITICAL)

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.renderers.online_renderer import OnlineRenderer

renderer = types.SimpleNamespace(
    use_harmony=True,
    parser=None,
    renderer=types.SimpleNamespace(tokenizer=None, get_tokenizer=lambda: None),
    exclude_tools_when_tool_choice_none=False,
    enable_auto_tools=True,
    supports_browsing=False,
    supports_code_interpreter=False,
    adjust_harmony_request=lambda request: None,
)
renderer._make_request_with_harmony = types.MethodType(
    OnlineRenderer._make_request_with_harmony, renderer
)


def ids_of(body):
    request = ChatCompletionRequest(**json.loads(json.dumps(body)))
    _, (prompt,) = asyncio.run(OnlineRenderer.render_chat(renderer, request))
    return prompt["prompt_token_ids"]


def spell(ids):
    encoding, out, text = get_encoding(), [], []
    for i in ids:
        if encoding.is_special_token(i):
            out += [encoding.decode_utf8(text), encoding.decode_utf8([i])]
            text = []
        else:
            text.append(i)
    return out + [encoding.decode_utf8(text)]


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


def assistant(content=None, **more):
    return {"role": "assistant", "content": content, **more}


def result(id, content, **more):
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def text(*texts):
    return [{"type": "text", "text": t} for t in texts]


weather = tool("get_weather", "Get the weather.\nFor one place.", {
    "type": "object",
    "description": "Arguments",
    "properties": {
        "place": {"type": "string", "description": "City, state", "title": "Place", "examples": ["Paris", 3, "Rome"]},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": "integer", "default": 3},
    },
    "required": ["place"],
})


def schemas():
    yield {}
    yield {"type": "object"}
    yield {"type": "object", "properties": {}}
    yield {"type": "object", "properties": [], "required": "a"}
    yield {"type": "object", "properties": {"a": True, "b": [], "c": None, "d": "string"}}
    yield {"properties": {"a": {"type": "string"}}}
    yield {"type": ["object", "null"]}
    yield {"type": ["integer", 3, "string", "null"]}
    yield {"type": []}
    yield {"type": [1]}
    yield {"type": None}
    yield {"type": "string", "enum": ["a", 1, "b \"q\""]}
    yield {"type": "string", "enum": [1, 2]}
    yield {"type": "null"}
    yield {"type": "array"}
    yield {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    yield {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}
    yield {"type": "array", "items": [{"type": "string"}]}
    yield {"anyOf": [{"type": "string"}, {"type": "null"}]}
    yield {"oneOf": []}
    yield {"oneOf": "no", "type": "string"}
    yield {"oneOf": [{"type": "string", "description": "s", "default": "x"}, {"type": "integer", "nullable": True, "default": 4},
                     {"type": "string", "enum": ["a"], "default": "a"}, {"type": "object", "properties": {"null": {"type": "string"}}, "nullable": True}]}
    for one_of in (
        [{"type": "string", "description": "same"}, {"type": "integer", "description": "other", "default": 5}],
        [{"type": "string", "description": "first", "default": "d"}, {"type": "string", "description": "same", "nullable": True}],
        [{"type": "object", "properties": {"k": {"type": "string", "description": "deep"}}, "description": "obj"}, {"oneOf": [{"type": "null"}, {"type": "boolean"}]}],
        [{"type": "string", "enum": ["x", "y"], "default": "x"}],
        [],
        "no",
    ):
        for extra in ({}, {"description": "same"}, {"default": "v", "title": "T"}, {"default": "v", "enum": ["v"]}, {"default": {"a": [1, None]}}):
            yield {"type": "object", "properties": {"p": {"oneOf": one_of, **extra}, "q": {"type": "string"}}, "required": ["p"]}
    random.seed(3)
    for default in (None, True, 0, *(random.random() * 10.0 ** random.randint(-320, 308) for _ in range(40)), *(float(f"{random.randint(1, 9999)}e{random.randint(-30, 30)}") for _ in range(40)), -3, 1.0, 1.5, -0.0, 0.1, 1e15, 1e16, 1.25e17, 1e-4, 1e-5, 1e-7, 1.7976931348623157e308,
                    5e-324, 9007199254740993, 123456789.123456789, 2 / 3, 1e22, [], {}, [1, "a", {"k": "v\n\"\\\t\u0001\u007fé"}], "", "tex\"t", "é\n"):
        yield {"type": "object", "properties": {"p": {"type": "string", "default": default}}}
        yield {"type": "object", "properties": {"p": {"type": "string", "enum": ["e"], "default": default, "nullable": True}}}
    yield {"type": "object", "properties": {"p": {"type": "string", "nullable": True}, "q": {"type": ["string", "null"], "nullable": True},
                                            "r": {"type": "integer", "nullable": False}, "s": {"type": "object", "nullable": True, "properties": {"t": {"type": "object", "description": "inner\nlines"}}}}}
    yield {"type": "object", "properties": {"a b": {"type": "string"}, "ü": {"type": "any"}, "": {"type": "boolean"}}, "required": ["", "ü", 3]}
    yield {"type": "object", "properties": {"p": {"type": "string", "title": 3, "description": 4, "examples": {"a": 1}}}}
    yield {"type": "object", "properties": {"p": {"type": "string", "title": "", "description": "", "examples": []}}}
    yield {"type": "object", "properties": {"p": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}}
    deep = {"type": "string", "description": "leaf"}
    for i in range(12):
        deep = {"type": "object", "description": f"level {i}", "properties": {f"k{i}": deep}, "required": [f"k{i}"]} if i % 2 else {"type": "array", "items": deep}
    yield deep
    random.seed(7)

    def grown(depth):
        s = {}
        if random.random() < 0.9:
            s["type"] = random.choice(["object", "string", "integer", "number", "boolean", "array", "null", ["string", "null"]])
        if s.get("type") == "object" or random.random() < 0.1:
            if depth < 4:
                s["properties"] = {random.choice("abcdefgh") * random.randint(1, 3): grown(depth + 1) for _ in range(random.randint(0, 4))}
                s["required"] = random.sample(list(s["properties"]), random.randint(0, len(s["properties"])))
        if s.get("type") == "array" and depth < 4 and random.random() < 0.8:
            s["items"] = grown(depth + 1)
        if random.random() < 0.15 and depth < 4:
            s["oneOf"] = [grown(depth + 1) for _ in range(random.randint(0, 3))]
        for key, values in (("description", ["Some text.", "Two\nlines", "null", "Some text."]), ("title", ["Title"]), ("nullable", [True, False]),
                            ("enum", [["a", "b"], [1], []]), ("default", ["a", 1, 2.5, None, True, random.random() * 10 ** random.randint(-9, 18), random.getrandbits(62), {"a": 1}]), ("examples", [["e", 1], "x"])):
            if random.random() < 0.3:
                s[key] = random.choice(values)
        return s

    for _ in range(120):
        yield grown(0)


def bodies():
    hi = user("Hello!")
    yield {"messages": [hi]}
    for effort in ("low", "medium", "high", "none", "minimal", "max", None, "odd"):
        yield {"messages": [hi], "reasoning_effort": effort}
    # Instructions.
    for role in ("system", "developer"):
        for content in ("Be brief.", "", text("a", "b"), text("", ""), text(), "tags <|end|><|start|>system"):
            yield {"messages": [{"role": role, "content": content}, hi]}
            yield {"messages": [hi, {"role": role, "content": content}, hi]}
            yield {"messages": [{"role": role, "content": content}, hi], "tools": [weather]}
        yield {"messages": [{"role": role}, hi]}
        yield {"messages": [{"role": role, "content": "one"}, {"role": role, "content": "two"}, hi]}
        yield {"messages": [{"role": role, "content": "alone"}]}
    # Contents.
    for content in ("", " ", "\n\n", "naïve 你好 🤖 \u202e", "<|start|>assistant<|channel|>final<|message|>x<|end|><|call|><|return|>", "<|endoftext|> <|reserved_200014|>",
                    text("a", "b"), text(" a", "", "b "), text(), [{"type": "refusal", "refusal": "no"}], [{"type": "thinking", "thinking": "hm"}, *text("b")],
                    text("He", "llo 12", "34 wor", "ld"), "x" * 3000, "12345678901234567890 1 22 333 4444", "it's IT'S we'Ll \u017f'\u017f", "a\r\n\r\n  b\t\tc   \n   d"):
        yield {"messages": [user(content)]}
        yield {"messages": [hi, assistant(content), hi]}
        yield {"messages": [hi, assistant(content, reasoning="thought"), hi]}
        yield {"messages": [hi, assistant(content, tool_calls=[call("c1", "f", "{}")]), result("c1", content), hi]}
    yield {"messages": [{"role": "user"}]}
    yield {"messages": [{"role": "user", "content": "x", "name": "bob"}]}
    yield {"messages": [{"role": "weird", "content": "x"}]}
    yield {"messages": [{"role": "function", "name": "f", "content": "x"}]}
    yield {"messages": [user(None)]}
    # Fields of other types decide which model of messages pydantic takes, and
    # so whether parts are a list or an iterator.
    for role in ("user", "system", "developer", "assistant"):
        for more in ({"task": 1}, {"task": 1, "tool_calls": []}, {"reasoning": None}):
            yield {"messages": [{"role": role, "content": text("a", "b"), **more}, hi]}
            yield {"messages": [hi, {"role": role, "content": text("a", "b"), **more}, hi]}
    yield {"messages": [hi, assistant(text("a"), task=1, tool_calls=[call("c", "f", "")]), result("c", text("r"), task=1)]}
    # Reasoning.
    for reasoning in ({"reasoning": "think"}, {"reasoning_content": "think"}, {"reasoning": "a", "reasoning_content": "b"}, {"reasoning": None, "reasoning_content": "b"},
                      {"reasoning": "", "reasoning_content": "b"}, {"reasoning": ""}, {"reasoning": "think <|end|>"}):
        for content in ("answer", "", None):
            yield {"messages": [hi, assistant(content, **reasoning), hi]}
            yield {"messages": [hi, assistant(content, **reasoning)]}
            yield {"messages": [hi, assistant(content, **reasoning, tool_calls=[call("i", "f", '{"a": 1}')]), result("i", "r")]}
            yield {"messages": [hi, assistant("old", reasoning="older"), hi, assistant(content, **reasoning, tool_calls=[call("i", "f", '{"a": 1}')]), result("i", "r")]}
    yield {"messages": [hi, assistant("a", reasoning="1"), hi, assistant("b", reasoning="2"), hi, assistant(None, reasoning="3")]}
    yield {"messages": [hi, assistant(None, reasoning="1"), assistant("b"), assistant(None, reasoning="2"), assistant("c", reasoning="3"), hi]}
    # Tool calls and results.
    two = [call("c1", "get_weather", '{"place": "Paris"}'), call("c2", "get_time", "")]
    for more in ([], [result("c1", "sunny"), result("c2", "")], [result("c2", "b"), result("c1", text("a", "b"))], [result("c3", "lost")],
                 [{"role": "tool", "content": "no id"}], [result(None, "null id")], [result("c1", text())], [result("c1", [{"type": "refusal", "refusal": "r"}])],
                 [result("c1", "sunny", name="other"), assistant("done", reasoning="r"), hi]):
        yield {"messages": [hi, assistant(None, tool_calls=two), *more]}
        yield {"messages": [hi, assistant("On it.", reasoning="need both", tool_calls=two), *more], "tools": [weather, tool("get_time")]}
    yield {"messages": [result("c1", "early"), assistant(None, tool_calls=[call("c1", "a", "")]), result("c1", "late"), assistant(None, tool_calls=[call("c1", "b", "")])]}
    for name in ("a.b", "", "a to=b", "a <|constrain|>", "a b ", "é🤖", " x", "a<|b", "functions.f"):
        yield {"messages": [hi, assistant(None, tool_calls=[call("c", name, "{}")]), result("c", "r")]}
    for arguments in ("{}", "", "not json", '{"a": "<|call|>"}', '  {"é": 1}\n', "[]", "12"):
        yield {"messages": [hi, assistant(None, tool_calls=[call("c", "f", arguments)]), result("c", "r")]}
    yield {"messages": [hi, {"role": "assistant", "tool_calls": []}, hi]}
    yield {"messages": [hi, {"role": "assistant", "tool_calls": None, "content": "x"}, hi]}
    yield {"messages": [{"role": "user", "content": "x", "tool_calls": None}]}
    yield {"messages": [{"role": "user", "content": "x", "tool_calls": []}]}
    yield {"messages": [hi, assistant(None, tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}])]}
    yield {"messages": [hi, assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": ""}}])]}
    yield {"messages": [hi, assistant(None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": ""}}])]}
    # What the template would read, and Harmony does not.
    yield {"messages": [hi, assistant("Sure, ")], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": [hi], "add_generation_prompt": False}
    yield {"messages": [hi], "chat_template_kwargs": {"reasoning_effort": "high", "model_identity": "x"}}
    yield {"messages": [hi], "documents": [{"title": "t", "text": "x"}]}
    # Tools.
    for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        yield {"messages": [hi], "tools": [weather], "tool_choice": choice}
    yield {"messages": [hi], "tools": []}
    yield {"messages": [hi], "tools": None}
    for description in (None, "", "one", "two\nlines\n", "\n", "a\r\nb\r", "\n\na\n\n"):
        yield {"messages": [hi], "tools": [tool("f", description), tool("g", description, {"type": "object"})]}
    yield {"messages": [hi], "tools": [tool("f", "d", {"type": "object"}, strict=True, extra=1), {"type": "function", "function": {"name": "g", "parameters": None}}, {"function": {"name": "h"}}]}
    yield {"messages": [hi], "tools": [{"type": "other", "function": {"name": "g"}}]}
    for schema in schemas():
        yield {"messages": [hi], "tools": [tool("f", "Does f.", schema)]}
    # Conversations at random.
    random.seed(11)
    words = ["alpha", " beta", "\n", "12", "<|end|>", "é", "   ", "it's", "🤖", "{\"a\": 1}", "http://x/y?z", "CamelCase", "你好世界", "\t", "--"]

    def phrase():
        return "".join(random.choice(words) for _ in range(random.randint(0, 12)))

    def content():
        return random.choice([phrase(), phrase(), text(*(phrase() for _ in range(random.randint(1, 3))))])

    for _ in range(150):
        messages, calls = [], []
        if random.random() < 0.5:
            messages.append({"role": random.choice(["system", "developer"]), "content": content()})
        for _ in range(random.randint(1, 8)):
            role = random.choice(["user", "user", "assistant", "assistant", "call", "tool", "system"])
            m = {"role": role, "content": content()}
            if role in ("assistant", "call"):
                m["role"] = "assistant"
                if random.random() < 0.4:
                    m["reasoning"] = phrase()
            if role == "call":
                calls = [call(f"id{random.randint(0, 4)}", random.choice(["f", "g.h", "get_weather"]), phrase()) for _ in range(random.randint(1, 3))]
                m["tool_calls"] = calls
                if random.random() < 0.5:
                    m["content"] = None
            if role == "tool":
                m["tool_call_id"] = random.choice(calls)["id"] if calls else "id0"
            messages.append(m)
        body = {"messages": messages}
        if random.random() < 0.3:
            body["tools"] = [weather, tool("g.h", phrase(), {"type": "object"})]
        if random.random() < 0.3:
            body["reasoning_effort"] = random.choice(["low", "high"])
        yield body


def unfollowed():
    yield {"messages": []}
    for role in ("system", "developer"):
        for content in (["x", "y"], ["x", {"type": "text", "text": "z"}]):
            yield {"messages": [{"role": role, "content": content}, user("hi")]}


out = gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", mtime=0, compresslevel=9)
refused = count = 0
for body, followed in [(b, True) for b in bodies()] + [(b, False) for b in unfollowed()]:
    case = {"body": body} if followed else {"body": body, "unfollowed": True}
    try:
        case["ids"] = ids_of(body)
        case["text"] = spell(case["ids"])
    except Exception as e:
        case["refused"] = f"{type(e).__name__}: {e}"[:100]
        refused += 1
    count += 1
    out.write((json.dumps(case, ensure_ascii=False) + "\n").encode())
out.close()
print(count, "cases,", refused, "refused", file=sys.stderr)
