// OpenAI's package for Node.js.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { QUESTION, SYSTEM, TOO_LONG, all, baseUrl, feature, main, model, rejected } from "./feature.mjs";

const client = new OpenAI({ baseURL: baseUrl, apiKey: "none", maxRetries: 0 });
const chats = client.chat.completions;
const USER = [{ role: "user", content: QUESTION }];
const MESSAGES = [{ role: "developer", content: SYSTEM }, ...USER];
const SHORT = { model, max_tokens: 12, temperature: 0 };
const LONGER = { ...SHORT, max_tokens: 200 };
const Person = z.object({ name: z.string().max(20), mood: z.enum(["good", "bad"]) });
const Weather = z.object({ town: z.enum(["Oslo", "Rome"]) });
// Small models do not end a list of calls.
const ONE_CALL = { parallel_tool_calls: false, ...LONGER };
const weather = (calls = []) =>
  zodFunction({
    name: "get_weather",
    description: "Weather of a town.",
    parameters: Weather,
    function: ({ town }) => (calls.push(town), "20 degrees"),
  });

feature("models", async () => {
  assert.deepEqual((await all(client.models.list())).map((found) => found.id), [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

feature("chat", async () => {
  const answer = await chats.create({ messages: MESSAGES, ...SHORT });
  assert(answer.choices[0].message.content && answer._request_id);
  assert(answer.usage.total_tokens > answer.usage.completion_tokens);
});

feature("stream", async () => {
  const whole = await chats.create({ messages: MESSAGES, ...SHORT });
  const pieces = [];
  const stream = chats.stream({ messages: MESSAGES, stream_options: { include_usage: true }, ...SHORT });
  stream.on("content", (piece) => pieces.push(piece));
  const final = await stream.finalChatCompletion();
  assert.equal(pieces.join(""), whole.choices[0].message.content);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
  const left = await chats.create({ messages: MESSAGES, stream: true, ...SHORT });
  for await (const _ of left) break;
});

feature("settings", async () => {
  const say = async (options) => {
    const asked = { messages: USER, ...SHORT, temperature: 1, seed: 5, ...options };
    return (await chats.create(asked)).choices[0].message.content;
  };
  const text = await say();
  assert.equal(text, await say({ user: "me", store: false }));
  assert.notEqual(text, await say({ seed: 6 }));
  const word = text.split(/\s+/)[2];
  assert.equal(await say({ stop: word }), text.slice(0, text.indexOf(word)));
});

feature("n", async () => {
  const answer = await chats.create({ messages: USER, ...SHORT, n: 3, temperature: 1 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2]);
});

feature("logprobs", async () => {
  const answer = await chats.create({ messages: USER, logprobs: true, top_logprobs: 2, ...SHORT });
  const [choice] = answer.choices;
  const spelled = choice.logprobs.content.map((entry) => entry.token).join("");
  assert.equal(spelled, choice.message.content);
});

feature("tools", async () => {
  const calls = [];
  const asked = await chats.parse({
    messages: USER, tools: [weather()], tool_choice: "required", ...ONE_CALL,
  });
  const { message } = asked.choices[0];
  assert(Weather.parse(message.tool_calls[0].function.parsed_arguments));
  // The package's own loop: the first turn has to call, the second need not.
  const named = { type: "function", function: { name: "get_weather" } };
  const runner = chats.runTools(
    { messages: USER, tools: [weather(calls)], tool_choice: named, ...ONE_CALL },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert(calls.length && runner.messages.some((one) => one.role === "tool"));
});

feature("tool-stream", async () => {
  const asked = { messages: USER, tools: [weather()], tool_choice: "required", ...ONE_CALL };
  const final = await chats.stream(asked).finalChatCompletion();
  const call = final.choices[0].message.tool_calls[0];
  assert(call.id && Weather.parse(JSON.parse(call.function.arguments)));
  assert.equal(final.choices[0].finish_reason, "tool_calls");
});

feature("schema", async () => {
  const form = zodResponseFormat(Person, "person");
  const answer = await chats.parse({ messages: USER, response_format: form, ...LONGER });
  assert(Person.parse(answer.choices[0].message.parsed));
});

feature("schema-stream", async () => {
  const form = zodResponseFormat(Person, "person");
  const final = await chats.stream({ messages: USER, response_format: form, ...LONGER })
    .finalChatCompletion();
  assert(Person.parse(final.choices[0].message.parsed));
});

feature("completions", async () => {
  const answer = await client.completions.create({ prompt: ["Once", "Two"], ...SHORT, logprobs: 1 });
  assert.equal(answer.choices.length, 2);
  const chunks = await all(await client.completions.create({ prompt: "Once", stream: true, ...SHORT }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), answer.choices[0].text);
});

feature("responses", async () => {
  const ask = { model, temperature: 0 };
  const first = await client.responses.create({ ...ask, input: QUESTION, max_output_tokens: 12 });
  assert(first.output_text);
  const second = await client.responses.create({
    ...ask, input: "Why?", previous_response_id: first.id, max_output_tokens: 12,
  });
  assert(second.output_text);
  const text = { format: zodTextFormat(Person, "person") };
  const parsed = await client.responses.parse({ ...ask, input: QUESTION, text });
  assert(Person.parse(parsed.output_parsed));
  const streamed = await client.responses.stream({ ...ask, input: QUESTION, text }).finalResponse();
  assert(Person.parse(streamed.output_parsed));
  const tool = { type: "function", name: "get_weather", parameters: z.toJSONSchema(Weather), strict: true };
  const called = await client.responses.create({
    ...ask, input: QUESTION, tools: [tool], tool_choice: "required", parallel_tool_calls: false,
  });
  const call = called.output.at(-1);
  assert(Weather.parse(JSON.parse(call.arguments)));
  const result = { type: "function_call_output", call_id: call.call_id, output: "20 degrees" };
  const end = await client.responses.create({
    ...ask, input: [result], previous_response_id: called.id, max_output_tokens: 12,
  });
  assert(end.output_text);
});

feature("embeddings", async () => {
  const { data } = await client.embeddings.create({ model, input: ["a cat", "a dog"] });
  const { data: [one] } = await client.embeddings.create({ model, input: "a cat" });
  assert(data.length === 2 && Math.abs(one.embedding[0] - data[0].embedding[0]) < 1e-6);
}, "/v1/embeddings");

feature("batch", async () => {
  const ask = () => chats.create({ messages: USER, ...SHORT });
  const answers = await Promise.all(Array.from({ length: 8 }, ask));
  assert.equal(new Set(answers.map((answer) => answer.choices[0].message.content)).size, 1);
});

feature("errors", async () => {
  const missing = await rejected(chats.create({ messages: USER, ...SHORT, model: "none" }));
  assert(missing instanceof OpenAI.NotFoundError && missing.code === "model_not_found");
  const long = [{ role: "user", content: TOO_LONG }];
  const error = await rejected(chats.create({ messages: long, ...SHORT }));
  assert.equal(error.code, "context_length_exceeded");
});

await main();
