// The official OpenAI SDK for JavaScript, unmodified, against an agent in front
// of two simulated engines. sdk_test.go starts all three and passes a JSON
// object in INFERRAIL_SDK: base_url of the agent, control of the engines, what
// the agent is configured with, and where the SDK lies.

import assert from "node:assert/strict";
import { createReadStream } from "node:fs";
import { afterEach, beforeEach, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

const site = JSON.parse(process.env.INFERRAIL_SDK);
const sdk = await import(site.module);
const OpenAI = sdk.default;

const client = new OpenAI({ baseURL: site.base_url, apiKey: site.key, maxRetries: 0, timeout: 30_000 });
const hello = [{ role: "user", content: "Hello!" }];
const tools = [{
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, days: { type: "integer", minimum: 1, maximum: 7 } },
      required: ["city", "days"],
    },
  },
}];

async function control(path, body) {
  const answer = await fetch(site.control + path, body && { method: "POST", body: JSON.stringify(body) });
  assert.equal(answer.status, 200);
  return answer.json();
}

async function idle() {
  for (const end = Date.now() + 20_000; (await control("/counts")).running > 0; await sleep(10)) {
    assert.ok(Date.now() < end, "an engine still runs a request");
  }
}

async function collect(stream) {
  const list = [];
  for await (const item of await stream) list.push(item);
  return list;
}

const chat = (more) => client.chat.completions.create({ model: "sim", messages: hello, max_tokens: 12, ...more });
const sim = (faults) => ({ vllm_xargs: { sim: faults } });
const x = { model: "sim", prompt: "x" };

beforeEach(() => control("/faults", {}));
afterEach(() => control("/faults", {}));

test("models", async () => {
  assert.deepEqual((await collect(client.models.list())).map((m) => m.id), ["sim"]);
  assert.equal((await client.models.retrieve("sim")).id, "sim");
  await assert.rejects(client.models.retrieve("other"), OpenAI.NotFoundError);
});

test("chat", async () => {
  const whole = await chat();
  assert.equal(whole.usage.completion_tokens, 12);
  const chunks = await collect(chat({ stream: true, stream_options: { include_usage: true } }));
  assert.equal(chunks.flatMap((c) => c.choices).map((c) => c.delta.content ?? "").join(""), whole.choices[0].message.content);
  assert.equal(chunks.at(-1).usage.completion_tokens, 12);
  // Who does not ask for usage gets none.
  for (const c of await collect(chat({ stream: true }))) {
    assert.equal(c.usage ?? null, null);
    assert.equal(c.choices.length, 1);
  }
  const final = await client.chat.completions.stream({ model: "sim", messages: hello, max_tokens: 12 }).finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
});

test("completions", async () => {
  const whole = await client.completions.create({ ...x, max_tokens: 20 });
  const chunks = await collect(client.completions.create({ ...x, max_tokens: 20, stream: true }));
  assert.equal(chunks.map((c) => c.choices[0].text).join(""), whole.choices[0].text);
});

test("responses", async () => {
  const ask = { model: "sim", input: "Hello!" };
  const whole = await client.responses.create(ask);
  const events = await collect(client.responses.create({ ...ask, stream: true }));
  const said = events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta).join("");
  assert.equal(said, whole.output_text);
  assert.equal(events.at(-1).type, "response.completed");
  const final = await client.responses.stream(ask).finalResponse();
  assert.equal(final.output_text, whole.output_text);
});

test("tools", async () => {
  const answer = await chat({ tools, max_tokens: undefined });
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  const call = answer.choices[0].message.tool_calls[0];
  assert.ok(JSON.parse(call.function.arguments).city);
  const chunks = await collect(chat({ tools, max_tokens: undefined, stream: true }));
  const pieces = chunks.flatMap((c) => c.choices[0].delta.tool_calls ?? []).map((d) => d.function.arguments ?? "");
  assert.equal(pieces.join(""), call.function.arguments);
  const final = await client.chat.completions.stream({ model: "sim", messages: hello, tools }).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  const said = await chat({ tools, messages: [...hello, answer.choices[0].message, { role: "tool", tool_call_id: call.id, content: "rain" }] });
  assert.ok(said.choices[0].message.content);
  let called = 0;
  const runner = client.chat.completions.runTools({
    model: "sim",
    messages: hello,
    tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: () => (called++, "rain") } }],
  });
  assert.ok(await runner.finalContent());
  assert.equal(called, 1);
});

test("a schema", async () => {
  const schema = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false };
  const answer = await client.chat.completions.parse({
    model: "sim", messages: hello, response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  });
  const person = JSON.parse(answer.choices[0].message.content);
  assert.equal(typeof person.name, "string");
  assert.ok(Number.isInteger(person.age));
});

test("embeddings", async () => {
  const input = ["good morning", "good evening"];
  const packed = await client.embeddings.create({ model: "sim", input });
  const plain = await client.embeddings.create({ model: "sim", input, encoding_format: "float" });
  for (const [i, { embedding }] of packed.data.entries()) {
    assert.equal(embedding.length, 256);
    embedding.forEach((v, d) => assert.ok(Math.abs(v - plain.data[i].embedding[d]) < 1e-6));
  }
});

test("audio", async () => {
  const file = () => createReadStream(site.audio);
  const said = await client.audio.transcriptions.create({ model: "sim", file: file() });
  assert.ok(said.text);
  const chunks = await collect(client.audio.transcriptions.create({ model: "sim", file: file(), stream: true }));
  assert.equal(chunks.map((c) => c.choices[0].delta.content).join(""), said.text);
  assert.ok((await client.audio.translations.create({ model: "sim", file: file() })).text);
});

test("refusals", async () => {
  await assert.rejects(chat({ model: "other" }), (e) => e instanceof OpenAI.NotFoundError && e.code === 404 && Boolean(e.requestID));
  await assert.rejects(chat({ n: 0 }), (e) => e instanceof OpenAI.BadRequestError && e.param === "n");
  await assert.rejects(client.post("/no/such/route", { body: {} }), OpenAI.NotFoundError);
  const long = "x".repeat(site.max_body_bytes + 1000);
  await assert.rejects(chat({ messages: [{ role: "user", content: long }] }), (e) => e instanceof OpenAI.APIError && e.status === 413);
  assert.ok((await chat()).id);
});

test("keys", async () => {
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
  const limited = client.withOptions({ apiKey: site.limited_key });
  const { response } = await limited.completions.create({ ...x, max_tokens: 1 }).withResponse();
  assert.equal(response.headers.get("x-ratelimit-limit-requests"), "60");
  assert.ok(Number(response.headers.get("x-ratelimit-remaining-requests")) < 60);
});

test("rate limit", async () => {
  const limited = client.withOptions({ apiKey: site.limited_key });
  let refused;
  for (let i = 0; i < 200 && !refused; i++) {
    await limited.completions.create({ ...x, max_tokens: 1 }).catch((e) => { refused = e; });
  }
  assert.ok(refused instanceof OpenAI.RateLimitError, `${refused}`);
  const wait = Number(refused.headers.get("retry-after"));
  assert.ok(wait > 0);
  if (wait <= 5) {
    // The wait that the SDK is told is long enough: one retry does it.
    assert.ok((await limited.completions.create({ ...x, max_tokens: 1 }, { maxRetries: 1 })).id);
  }
});

test("engines that fail", async () => {
  await assert.rejects(chat(sim({ status: 429 })), OpenAI.RateLimitError);
  await control("/faults", { status: 503 });
  const before = (await control("/counts")).aborted;
  await assert.rejects(client.completions.create(x, { maxRetries: 1 }), (e) => e instanceof OpenAI.InternalServerError && e.status === 503);
  assert.ok((await control("/counts")).aborted - before >= 2);
});

test("engines that fail first", async () => {
  await control("/faults", { status: 500, fail_requests: 1 });
  const done = (await control("/counts")).aborted;
  assert.ok((await client.completions.create(x, { maxRetries: 4 })).choices[0].text);
  assert.ok((await control("/counts")).aborted > done);
});

test("timeouts", async () => {
  await control("/faults", { hang: true });
  await assert.rejects(client.completions.create(x, { timeout: 300 }), OpenAI.APIConnectionTimeoutError);
  await idle();
});

test("streams that are left", async () => {
  const stream = await client.completions.create({ ...x, max_tokens: 30000, stream: true, ...sim({ slow: 50 }) });
  for await (const _ of stream) break; // which aborts it
  await idle();
  const abort = new AbortController();
  const call = client.completions.create({ ...x, max_tokens: 30000, ...sim({ slow: 50 }) }, { signal: abort.signal });
  setTimeout(() => abort.abort(), 200);
  await assert.rejects(call, OpenAI.APIUserAbortError);
  await idle();
});

for (const how of ["fin", "rst", "chunk", "error"]) {
  test(`a stream that breaks: ${how}`, async () => {
    let got = 0;
    await assert.rejects(async () => {
      for await (const _ of await chat({ stream: true, max_tokens: 50, ...sim({ break: how, break_after: 20 }) })) got++;
    });
    assert.ok(got <= 21, `${got} chunks`);
  });
}

test("headers", async () => {
  const { data, response, request_id } = await chat({ max_tokens: 2 }).withResponse();
  assert.ok(request_id && data._request_id === request_id && response.headers.get("x-request-id") === request_id);
  assert.ok(site.replicas.includes(response.headers.get("x-inferrail-replica")));
});

test("cached tokens", async () => {
  const found = [];
  for (let i = 0; i < 6; i++) {
    const { data, response } = await chat({ max_tokens: 2, messages: [{ role: "user", content: "Tell me of Node and of caches. ".repeat(20) }] }).withResponse();
    found.push(data.usage.prompt_tokens_details.cached_tokens);
    assert.equal(response.headers.get("x-inferrail-cached-tokens"), String(found.at(-1)));
  }
  assert.ok(Math.max(...found) > 64);
});

test("a thousand calls", async () => {
  const before = (await control("/counts")).accepted;
  for (let i = 0; i < 1000; i++) await client.completions.create({ ...x, max_tokens: 1 });
  assert.ok((await control("/counts")).accepted - before < 20);
});

test("fifty at a time", async () => {
  await Promise.all(Array.from({ length: 50 }, async (_, i) => {
    const messages = [{ role: "user", content: `Number ${i}` }];
    const whole = await chat({ messages, max_tokens: 20 });
    const chunks = await collect(chat({ messages, max_tokens: 20, stream: true }));
    assert.equal(chunks.map((c) => c.choices[0].delta.content ?? "").join(""), whole.choices[0].message.content);
  }));
});
