"""The official OpenAI SDK for Python, unmodified, against an agent in front of
two simulated engines. sdk_test.go starts all three and passes a JSON object in
INFERRAIL_SDK: base_url of the agent, control of the engines, what the agent is
configured with."""

import asyncio
import json
import os
import sys
import time
import unittest
import urllib.request

import openai
from pydantic import BaseModel

SITE = json.loads(os.environ["INFERRAIL_SDK"])

TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
        },
    },
}]
HELLO = [{"role": "user", "content": "Hello!"}]


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


def control(path, body=None):
    """Talks to the engines past the agent."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(SITE["control"] + path, data, timeout=20) as answer:
        return json.load(answer)


def until(what, holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)


def idle():
    until("no engine runs a request", lambda: control("/counts")["running"] == 0)


def options(**more):
    return {"base_url": SITE["base_url"], "api_key": SITE["key"], "max_retries": 0, "timeout": 30, **more}


def sim(**faults):
    return {"vllm_xargs": {"sim": faults}}


class Timed:
    """Says how long each test took, and leaves engines that behave well."""

    def setUp(self):
        control("/faults", {})
        self.began = time.monotonic()

    def tearDown(self):
        control("/faults", {})
        print(f"{self.id().removeprefix('__main__.')} {time.monotonic() - self.began:.2f}s", flush=True)


class Sync(Timed, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = openai.OpenAI(**options())

    @classmethod
    def tearDownClass(cls):
        cls.client.close()

    def chat(self, **more):
        return self.client.chat.completions.create(**{"model": "sim", "messages": HELLO, "max_tokens": 12, **more})

    def test_models(self):
        models = self.client.models.list().data
        self.assertEqual([m.id for m in models], ["sim"])
        self.assertEqual(self.client.models.retrieve("sim").id, "sim")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("other")

    def test_chat(self):
        whole = self.chat()
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual(whole.usage.completion_tokens, 12)
        pieces, usage = [], None
        for chunk in self.chat(stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            pieces += [c.delta.content or "" for c in chunk.choices]
        self.assertEqual("".join(pieces), whole.choices[0].message.content)
        self.assertEqual(usage.completion_tokens, 12)
        # Who does not ask for usage gets none.
        for chunk in self.chat(stream=True):
            self.assertIsNone(chunk.usage)
            self.assertEqual(len(chunk.choices), 1)

    def test_chat_stream_helper(self):
        with self.client.chat.completions.stream(model="sim", messages=HELLO) as stream:
            kinds = [event.type for event in stream]
        self.assertIn("content.delta", kinds)
        self.assertEqual(kinds[-1], "content.done")
        self.assertEqual(stream.get_final_completion().choices[0].message.content, self.chat(max_tokens=None).choices[0].message.content)

    def test_choices(self):
        whole = self.chat(n=3)
        self.assertEqual(len({c.message.content for c in whole.choices}), 3)
        texts = ["", "", ""]
        for chunk in self.chat(n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        self.assertEqual(texts, [c.message.content for c in whole.choices])

    def test_completions(self):
        whole = self.client.completions.create(model="sim", prompt="Once", max_tokens=20)
        self.assertEqual(whole.usage.completion_tokens, 20)
        stream = self.client.completions.create(model="sim", prompt="Once", max_tokens=20, stream=True)
        self.assertEqual("".join(c.choices[0].text for c in stream), whole.choices[0].text)
        stop = whole.choices[0].text[5:8]
        stopped = self.client.completions.create(model="sim", prompt="Once", max_tokens=20, stop=stop)
        self.assertEqual(stopped.choices[0].text, whole.choices[0].text.split(stop)[0])

    def test_responses(self):
        whole = self.client.responses.create(model="sim", input="Hello!", instructions="Be brief.")
        self.assertEqual(whole.status, "completed")
        events = list(self.client.responses.create(model="sim", input="Hello!", instructions="Be brief.", stream=True))
        self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
        self.assertEqual(events[0].type, "response.created")
        self.assertEqual(events[-1].type, "response.completed")
        said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        self.assertEqual(said, whole.output_text)
        self.assertEqual(events[-1].response.usage.total_tokens, whole.usage.total_tokens)
        with self.client.responses.stream(model="sim", input="Hello!", instructions="Be brief.") as stream:
            self.assertEqual(stream.get_final_response().output_text, whole.output_text)
        cut = self.client.responses.create(model="sim", input="Hello!", max_output_tokens=2)
        self.assertEqual((cut.status, cut.incomplete_details.reason), ("incomplete", "max_output_tokens"))

    def test_tools(self):
        answer = self.chat(tools=TOOLS, max_tokens=None)
        self.assertEqual(answer.choices[0].finish_reason, "tool_calls")
        call = answer.choices[0].message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        self.assertEqual(call.function.name, "get_weather")
        self.assertTrue(1 <= arguments["days"] <= 7 and arguments["city"])
        pieces, name = [], ""
        for chunk in self.chat(tools=TOOLS, max_tokens=None, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                name += delta.function.name or ""
                pieces.append(delta.function.arguments or "")
        self.assertEqual((name, "".join(pieces)), ("get_weather", call.function.arguments))
        self.assertGreater(len(pieces), 3)
        with self.client.chat.completions.stream(model="sim", messages=HELLO, tools=TOOLS) as stream:
            final = stream.get_final_completion()
        self.assertEqual(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments)
        named = self.chat(tools=TOOLS, max_tokens=None, tool_choice={"type": "function", "function": {"name": "get_weather"}})
        self.assertEqual(named.choices[0].message.tool_calls[0].function.name, "get_weather")
        said = self.chat(tools=TOOLS, messages=[
            *HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}])
        self.assertTrue(said.choices[0].message.content)

    def test_tools_of_responses(self):
        tools = [{"type": "function", **TOOLS[0]["function"], "strict": True}]
        answer = self.client.responses.create(model="sim", input="Weather?", tools=tools)
        call = answer.output[0]
        self.assertEqual((call.type, call.name), ("function_call", "get_weather"))
        with self.client.responses.stream(model="sim", input="Weather?", tools=tools) as stream:
            final = stream.get_final_response()
        self.assertEqual(final.output[0].arguments, call.arguments)
        said = self.client.responses.create(model="sim", tools=tools, input=[
            {"role": "user", "content": "Weather?"}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}])
        self.assertTrue(said.output_text)

    def test_parse(self):
        chat = self.client.chat.completions.parse(model="sim", messages=HELLO, response_format=Person)
        self.assertIsInstance(chat.choices[0].message.parsed, Person)
        response = self.client.responses.parse(model="sim", input="Who?", text_format=Person)
        self.assertIsInstance(response.output_parsed, Person)
        thing = self.chat(response_format={"type": "json_object"}, max_tokens=None)
        self.assertIsInstance(json.loads(thing.choices[0].message.content), dict)

    def test_embeddings(self):
        texts = ["good morning", "good evening"]
        packed = self.client.embeddings.create(model="sim", input=texts)  # asks for base64
        plain = self.client.embeddings.create(model="sim", input=texts, encoding_format="float")
        for a, b in zip(packed.data, plain.data, strict=True):
            self.assertEqual(len(a.embedding), 256)
            self.assertTrue(all(abs(x - y) < 1e-6 for x, y in zip(a.embedding, b.embedding, strict=True)))
        self.assertEqual(packed.usage.prompt_tokens, 6)
        self.assertEqual(len(self.client.embeddings.create(model="sim", input="a", dimensions=8).data[0].embedding), 8)

    def test_audio(self):
        with open(SITE["audio"], "rb") as file:
            said = self.client.audio.transcriptions.create(model="sim", file=file)
        self.assertTrue(said.text)
        self.assertEqual(said.usage.seconds, 1)
        with open(SITE["audio"], "rb") as file:
            stream = self.client.audio.transcriptions.create(model="sim", file=file, stream=True)
            self.assertEqual("".join(e.choices[0]["delta"]["content"] for e in stream), said.text)
        with open(SITE["audio"], "rb") as file:
            self.assertTrue(self.client.audio.translations.create(model="sim", file=file).text)
        with open(SITE["audio"], "rb") as file, self.assertRaises(openai.NotFoundError):
            self.client.audio.transcriptions.create(model="other", file=file)

    def test_refusals(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.chat(model="other")
        self.assertEqual(caught.exception.body["code"], 404)
        self.assertTrue(caught.exception.request_id)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(n=0)
        self.assertEqual(caught.exception.param, "n")
        with self.assertRaises(openai.NotFoundError):
            self.client.post("/no/such/route", body={}, cast_to=object)
        with self.assertRaises(openai.APIStatusError) as caught:
            self.chat(messages=[{"role": "user", "content": "x" * (SITE["max_body_bytes"] + 1000)}])
        self.assertEqual(caught.exception.status_code, 413)
        # The client is not the worse for it.
        self.assertTrue(self.chat().id)

    def test_keys(self):
        for key in ("wrong", SITE["key"] + "x"):
            with self.assertRaises(openai.AuthenticationError):
                self.client.with_options(api_key=key).models.list()
        raw = self.client.with_options(api_key=SITE["limited_key"]).completions.with_raw_response.create(
            model="sim", prompt="x", max_tokens=1)
        self.assertEqual(raw.headers["x-ratelimit-limit-requests"], "60")
        self.assertLess(int(raw.headers["x-ratelimit-remaining-requests"]), 60)
        self.assertTrue(raw.headers["x-ratelimit-reset-requests"])

    def test_rate_limit(self):
        limited = self.client.with_options(api_key=SITE["limited_key"])
        with self.assertRaises(openai.RateLimitError) as caught:
            for _ in range(200):
                limited.completions.create(model="sim", prompt="x", max_tokens=1)
        wait = float(caught.exception.response.headers["retry-after"])
        self.assertGreater(wait, 0)
        if wait <= 5:
            # The wait that the SDK is told is long enough: one retry does it.
            began = time.monotonic()
            raw = limited.with_options(max_retries=2).completions.with_raw_response.create(model="sim", prompt="x", max_tokens=1)
            self.assertLessEqual(raw.retries_taken, 1)
            self.assertLess(time.monotonic() - began, wait + 5)
        # Another key has limits of its own.
        self.assertTrue(self.chat().id)

    def test_engine_is_overloaded(self):
        with self.assertRaises(openai.RateLimitError):
            self.chat(extra_body=sim(status=429))

    def test_engines_fail(self):
        control("/faults", {"status": 503})
        before = control("/counts")["aborted"]
        with self.assertRaises(openai.InternalServerError) as caught:
            self.client.with_options(max_retries=1).completions.create(model="sim", prompt="x")
        self.assertEqual(caught.exception.status_code, 503)
        self.assertGreaterEqual(control("/counts")["aborted"] - before, 2)

    def test_engines_fail_first(self):
        for faults in ({"status": 500, "fail_requests": 1}, {"status": 429, "fail_requests": 1}):
            control("/faults", faults)
            raw = self.client.with_options(max_retries=4).completions.with_raw_response.create(model="sim", prompt="x")
            self.assertTrue(raw.parse().choices[0].text)
            self.assertGreaterEqual(raw.retries_taken, 1)

    def test_one_attempt_is_not_seen(self):
        # What an engine does before its first byte the agent makes good itself.
        for faults in ({"close_before_head": "fin"}, {"close_before_head": "rst"}, {"status": 503}, {"garbage": True}):
            control("/faults", {**faults, "fail_requests": 1, "only": 0})
            for _ in range(4):
                self.assertTrue(self.client.completions.create(model="sim", prompt="x", max_tokens=1).id)

    def test_timeout(self):
        control("/faults", {"hang": True})
        with self.assertRaises(openai.APITimeoutError):
            self.client.with_options(timeout=0.3).completions.create(model="sim", prompt="x")
        idle()
        control("/faults", {})
        with self.assertRaises(openai.APITimeoutError):
            for _ in self.client.with_options(timeout=0.3).completions.create(
                    model="sim", prompt="x", max_tokens=10, stream=True, extra_body=sim(**{"break": "stall", "break_after": 3})):
                pass
        idle()

    def test_stream_is_left(self):
        stream = self.client.completions.create(model="sim", prompt="x", max_tokens=30000, stream=True, extra_body=sim(slow=50))
        next(stream)
        self.assertEqual(control("/counts")["running"], 1)
        stream.close()
        idle()

    def test_broken_stream(self):
        for how in ("fin", "rst", "chunk", "error"):
            with self.subTest(how):
                pieces = []
                with self.assertRaises(openai.APIError):
                    for chunk in self.chat(stream=True, max_tokens=50, extra_body=sim(**{"break": how, "break_after": 20})):
                        pieces.append(chunk)
                self.assertLessEqual(len(pieces), 21)
        with self.assertRaises(openai.APIError):
            self.chat(extra_body=sim(length_excess=10))
        with self.assertRaises(openai.APIError):
            for _ in self.client.responses.create(model="sim", input="x", stream=True, extra_body=sim(**{"break": "fin", "break_after": 5})):
                pass

    def test_headers(self):
        raw = self.client.chat.completions.with_raw_response.create(
            model="sim", messages=HELLO, max_tokens=2, extra_headers={"X-Request-Id": "mine"})
        self.assertEqual(raw.headers["x-request-id"], "mine")
        self.assertEqual(raw.request_id, "mine")
        self.assertIn(raw.headers["x-inferrail-replica"], SITE["replicas"])
        self.assertEqual(raw.parse()._request_id, "mine")

    def test_cached_tokens(self):
        found = []
        for _ in range(6):
            raw = self.client.chat.completions.with_raw_response.create(
                model="sim", max_tokens=2, messages=[{"role": "user", "content": "Tell me of Python and of caches. " * 20}])
            found.append(raw.parse().usage.prompt_tokens_details.cached_tokens)
            self.assertEqual(raw.headers["x-inferrail-cached-tokens"], str(found[-1]))
        self.assertGreater(max(found), 64)

    def test_thousand_calls(self):
        before = control("/counts")["accepted"]
        for _ in range(1000):
            self.client.completions.create(model="sim", prompt="x", max_tokens=1)
        self.assertLess(control("/counts")["accepted"] - before, 20)


class Async(Timed, unittest.IsolatedAsyncioTestCase):
    def client(self, **more):
        return openai.AsyncOpenAI(**options(**more))

    async def test_all_routes(self):
        async with self.client() as client:
            self.assertEqual([m.id async for m in client.models.list()], ["sim"])
            whole = await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=12)
            stream = await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=12, stream=True)
            said = "".join([c.choices[0].delta.content or "" async for c in stream])
            self.assertEqual(said, whole.choices[0].message.content)
            response = await client.responses.create(model="sim", input="Hello!")
            events = [e async for e in await client.responses.create(model="sim", input="Hello!", stream=True)]
            self.assertEqual(events[-1].response.output_text, response.output_text)
            call = await client.chat.completions.create(model="sim", messages=HELLO, tools=TOOLS)
            self.assertEqual(call.choices[0].message.tool_calls[0].function.name, "get_weather")
            vectors = await client.embeddings.create(model="sim", input=["a", "b"])
            self.assertEqual(len(vectors.data), 2)
            with open(SITE["audio"], "rb") as file:
                self.assertTrue((await client.audio.transcriptions.create(model="sim", file=file)).text)
            with self.assertRaises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=HELLO)

    async def test_fifty_at_a_time(self):
        async with self.client() as client:
            async def one(i):
                messages = [{"role": "user", "content": f"Number {i}"}]
                whole = await client.chat.completions.create(model="sim", messages=messages, max_tokens=20)
                stream = await client.chat.completions.create(model="sim", messages=messages, max_tokens=20, stream=True)
                said = "".join([c.choices[0].delta.content or "" async for c in stream])
                self.assertEqual(said, whole.choices[0].message.content)

            await asyncio.gather(*(one(i) for i in range(50)))

    async def test_task_is_cancelled(self):
        async with self.client() as client:
            call = asyncio.create_task(client.completions.create(model="sim", prompt="x", max_tokens=30000, extra_body=sim(slow=50)))
            while control("/counts")["running"] == 0:
                await asyncio.sleep(0.01)
            call.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(idle)

    async def test_timeout_and_broken_stream(self):
        async with self.client() as client:
            with self.assertRaises(openai.APITimeoutError):
                await client.with_options(timeout=0.3).completions.create(model="sim", prompt="x", extra_body=sim(hang=True))
            await asyncio.to_thread(idle)
            with self.assertRaises(openai.APIError):
                async for _ in await client.completions.create(
                        model="sim", prompt="x", max_tokens=9, stream=True, extra_body=sim(**{"break": "rst", "break_after": 4})):
                    pass

    async def test_retries(self):
        control("/faults", {"status": 500, "fail_requests": 1})
        async with self.client(max_retries=4) as client:
            raw = await client.completions.with_raw_response.create(model="sim", prompt="x")
            self.assertGreaterEqual(raw.retries_taken, 1)


if __name__ == "__main__":
    print(f"openai {openai.__version__}, Python {sys.version.split()[0]}", flush=True)
    unittest.main(verbosity=0)
