"""OpenAI's SDK and Ollama's client for Python, unmodified, against a simulated
llama.cpp or Ollama. small_engines_test.go starts it and passes its URL in
INFERRAIL_URL, and which of the two it is in INFERRAIL_ENGINE."""

import datetime
import json
import os
import unittest

import ollama
import openai

ENGINE = os.environ["INFERRAIL_ENGINE"]
URL = os.environ["INFERRAIL_URL"]
HELLO = [{"role": "user", "content": "Hello!"}]
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["days"],
        },
    },
}]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


class OpenAI(unittest.TestCase):
    """What both engines answer to OpenAI's SDK."""

    def setUp(self):
        self.client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=30)

    def tearDown(self):
        self.client.close()

    def test_chat(self):
        whole = self.client.chat.completions.create(model="sim", messages=HELLO, max_tokens=7)
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual(whole.usage.completion_tokens, 7)
        self.assertEqual(whole.object, "chat.completion")
        text, usage, finish = "", None, None
        for chunk in self.client.chat.completions.create(model="sim", messages=HELLO, max_tokens=7, stream=True, stream_options={"include_usage": True}):
            self.assertEqual(chunk.object, "chat.completion.chunk")
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(finish, "length")
        self.assertEqual((usage.prompt_tokens, usage.completion_tokens), (whole.usage.prompt_tokens, 7))

    def test_the_sdk_puts_a_stream_together(self):
        with self.client.chat.completions.stream(model="sim", messages=HELLO, tools=TOOLS) as stream:
            for _ in stream:
                pass
            whole = stream.get_final_completion()
        call = whole.choices[0].message.tool_calls[0]
        self.assertEqual(whole.choices[0].finish_reason, "tool_calls")
        self.assertEqual(call.function.name, "get_weather")
        self.assertIn(json.loads(call.function.arguments)["days"], range(1, 8))
        again = self.client.chat.completions.create(model="sim", messages=HELLO, tools=TOOLS)
        self.assertEqual(json.loads(again.choices[0].message.tool_calls[0].function.arguments), json.loads(call.function.arguments))
        after = HELLO + [again.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        said = self.client.chat.completions.create(model="sim", messages=after, tools=TOOLS)
        self.assertEqual(said.choices[0].finish_reason, "stop")
        self.assertTrue(said.choices[0].message.content)

    def test_completion(self):
        whole = self.client.completions.create(model="sim", prompt="Once upon a time", max_tokens=4)
        self.assertEqual(whole.usage.completion_tokens, 4)
        chunks = list(self.client.completions.create(model="sim", prompt="Once upon a time", max_tokens=4, stream=True))
        self.assertEqual("".join(c.choices[0].text for c in chunks), whole.choices[0].text)

    def test_schema(self):
        whole = self.client.chat.completions.create(model="sim", messages=HELLO, response_format={
            "type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}})
        self.assertIsInstance(json.loads(whole.choices[0].message.content)["age"], int)

    def test_embeddings(self):
        texts = ["a cat", "a cat too", "trains"]
        floats = self.client.embeddings.create(model="sim", input=texts, encoding_format="float")
        decoded = self.client.embeddings.create(model="sim", input=texts)  # asks for base64
        self.assertEqual([d.index for d in floats.data], [0, 1, 2])
        for one, other in zip(floats.data, decoded.data):
            self.assertEqual(len(one.embedding), len(other.embedding))
            for x, y in zip(one.embedding, other.embedding):
                self.assertAlmostEqual(x, y, places=6)

    def test_models(self):
        ids = [m.id for m in self.client.models.list()]
        self.assertEqual(ids, ["sim:latest" if ENGINE == "ollama" else "sim"])

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model="sim", messages=HELLO, logprobs=True, top_logprobs=2)
        self.assertIn("logprobs", str(caught.exception))
        if ENGINE == "ollama":
            with self.assertRaises(openai.NotFoundError):
                self.client.chat.completions.create(model="absent", messages=HELLO)
            self.assertEqual(self.client.models.retrieve("sim").owned_by, "library")
        else:
            with self.assertRaises(openai.BadRequestError) as caught:
                self.client.completions.create(model="sim", prompt="word " * 40000, max_tokens=1)
            self.assertEqual(caught.exception.body["type"], "exceed_context_size_error")


@unittest.skipUnless(ENGINE == "ollama", "only Ollama has its own API")
class Ollama(unittest.TestCase):
    """What Ollama answers to its own client."""

    def setUp(self):
        self.client = ollama.Client(host=URL, timeout=30)

    def test_chat(self):
        whole = self.client.chat(model="sim", messages=HELLO, options={"num_predict": 5})
        self.assertEqual((whole.done, whole.done_reason, whole.eval_count), (True, "length", 5))
        self.assertGreater(whole.total_duration, 0)
        lines = list(self.client.chat(model="sim", messages=HELLO, options={"num_predict": 5}, stream=True))
        self.assertEqual("".join(line.message.content for line in lines), whole.message.content)
        self.assertEqual([line.done for line in lines], [False] * (len(lines) - 1) + [True])
        self.assertEqual(lines[-1].prompt_eval_count, whole.prompt_eval_count)
        datetime.datetime.fromisoformat(lines[0].created_at.replace("Z", "+00:00")[:26] + "+00:00")

    def test_tools(self):
        def get_weather(days: int) -> str:
            """Tells the weather.

            Args:
                days: how many days from now
            """
            return "rain"

        whole = self.client.chat(model="sim", messages=HELLO, tools=[get_weather])
        call = whole.message.tool_calls[0]
        self.assertEqual(call.function.name, "get_weather")
        self.assertIsInstance(call.function.arguments["days"], int)
        after = HELLO + [whole.message, {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
        self.assertTrue(self.client.chat(model="sim", messages=after, tools=[get_weather]).message.content)

    def test_generate(self):
        whole = self.client.generate(model="sim", prompt="Hello", options={"num_predict": 4})
        self.assertEqual(len(whole.context), whole.prompt_eval_count + whole.eval_count)
        more = self.client.generate(model="sim", prompt="More", context=whole.context, options={"num_predict": 1})
        self.assertGreater(more.prompt_eval_count, len(whole.context))
        text = "".join(line.response for line in self.client.generate(model="sim", prompt="Hello", stream=True, options={"num_predict": 4}))
        self.assertEqual(text, whole.response)
        shaped = self.client.generate(model="sim", prompt="Hello", format=SCHEMA)
        self.assertIsInstance(json.loads(shaped.response)["age"], int)

    def test_embed(self):
        two = self.client.embed(model="sim", input=["a", "b"])
        self.assertEqual(len(two.embeddings), 2)
        self.assertAlmostEqual(sum(x * x for x in two.embeddings[0]), 1, places=5)
        self.assertEqual(list(self.client.embeddings(model="sim", prompt="a").embedding), list(two.embeddings[0]))

    def test_pages(self):
        model = self.client.list().models[0]
        self.assertEqual(model.model, "sim:latest")
        self.assertGreater(model.size, 1 << 30)
        self.assertIsInstance(model.modified_at, datetime.datetime)
        shown = self.client.show("sim")
        self.assertIn("tools", shown.capabilities)
        self.assertGreater(shown.modelinfo["llama.context_length"], 0)
        self.assertEqual(self.client.generate(model="sim", keep_alive="10m").done_reason, "load")
        running = self.client.ps().models[0]
        self.assertEqual(running.name, "sim:latest")
        self.assertGreater(running.size_vram, 1 << 30)
        self.assertGreater(running.expires_at, datetime.datetime.now(datetime.timezone.utc))
        self.assertEqual(self.client.generate(model="sim", keep_alive=0).done_reason, "unload")
        self.assertEqual([p.status for p in self.client.pull("sim", stream=True)][-1], "success")
        self.assertEqual(self.client.pull("sim").status, "success")

    def test_errors(self):
        for status, call in {
            404: lambda: self.client.chat(model="absent", messages=HELLO),
            400: lambda: self.client.chat(model="sim", messages=HELLO, think=True),
            500: lambda: self.client.chat(model="sim", messages=HELLO, options={"num_ctx": "many"}),
        }.items():
            with self.assertRaises(ollama.ResponseError) as caught:
                call()
            self.assertEqual(caught.exception.status_code, status)
        with self.assertRaises(ollama.ResponseError):
            list(self.client.pull("absent", stream=True))


if __name__ == "__main__":
    unittest.main(verbosity=2)
