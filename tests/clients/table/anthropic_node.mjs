// Anthropic's package for Node.js.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import { QUESTION, SYSTEM, TOO_LONG, all, feature, main, model, rejected, root } from "./feature.mjs";

const client = new Anthropic({ baseURL: root, apiKey: "none", maxRetries: 0 });
const USER = [{ role: "user", content: QUESTION }];
const SHORT = { model, max_tokens: 12, temperature: 0 };
const LONGER = { ...SHORT, max_tokens: 200 };
const Person = z.object({ name: z.string().max(20), mood: z.enum(["good", "bad"]) });
const Weather = z.object({ town: z.enum(["Oslo", "Rome"]) });
const TOOL = {
  name: "get_weather",
  description: "Weather of a town.",
  input_schema: z.toJSONSchema(Weather),
};
const text = (message) =>
  message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

feature("models", async () => {
  assert.deepEqual((await all(client.models.list())).map((found) => found.id), [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

feature("chat", async () => {
  const message = await client.messages.create({ messages: USER, system: SYSTEM, ...SHORT });
  assert(text(message) && message.usage.output_tokens);
});

feature("stream", async () => {
  const whole = await client.messages.create({ messages: USER, system: SYSTEM, ...SHORT });
  const pieces = [];
  const stream = client.messages.stream({ messages: USER, system: SYSTEM, ...SHORT });
  stream.on("text", (piece) => pieces.push(piece));
  const final = await stream.finalMessage();
  assert.equal(pieces.join(""), text(whole));
  assert.equal(text(final), text(whole));
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

feature("settings", async () => {
  const say = (options) =>
    client.messages.create({ messages: USER, ...SHORT, temperature: 1, seed: 5, top_k: 40, ...options });
  const said = text(await say());
  assert.equal(said, text(await say({ metadata: { user_id: "me" } })));
  const word = said.split(/\s+/)[2];
  assert.equal((await say({ stop_sequences: [word] })).stop_sequence, word);
});

feature("tools", async () => {
  const asked = await client.messages.create({
    messages: USER, tools: [TOOL], tool_choice: { type: "any", disable_parallel_tool_use: true }, ...LONGER,
  });
  assert.equal(asked.stop_reason, "tool_use");
  const calls = asked.content.filter((block) => block.type === "tool_use");
  assert(Weather.parse(calls[0].input));
  const results = calls.map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "20 degrees" }));
  const turn = [...USER, { role: "assistant", content: asked.content }, { role: "user", content: results }];
  const end = await client.messages.create({
    messages: turn, tools: [TOOL], tool_choice: { type: "none" }, ...SHORT,
  });
  assert(text(end));
  // The package's own loop.
  const towns = [];
  const tool = betaZodTool({
    name: "get_weather",
    description: "Weather of a town.",
    inputSchema: Weather,
    run: ({ town }) => (towns.push(town), "20 degrees"),
  });
  const runner = client.beta.messages.toolRunner({
    messages: USER, tools: [tool], tool_choice: { type: "tool", name: "get_weather" },
    max_iterations: 2, ...LONGER,
  });
  assert.equal((await all(runner)).length, 2);
  assert(towns.length);
});

feature("tool-stream", async () => {
  const stream = client.messages.stream({
    messages: USER, tools: [TOOL], tool_choice: { type: "tool", name: TOOL.name }, ...LONGER,
  });
  let pieces = 0;
  stream.on("inputJson", () => (pieces += 1));
  const final = await stream.finalMessage();
  assert(pieces && Weather.parse(final.content.at(-1).input));
});

feature("schema", async () => {
  const parsed = await client.messages.parse({
    messages: USER, output_config: { format: zodOutputFormat(Person) }, ...LONGER,
  });
  assert(Person.parse(parsed.parsed_output));
});

feature("schema-stream", async () => {
  const final = await client.messages
    .stream({ messages: USER, output_config: { format: zodOutputFormat(Person) }, ...LONGER })
    .finalMessage();
  assert(Person.parse(JSON.parse(text(final))));
});

feature("count-tokens", async () => {
  const counted = await client.messages.countTokens({ model, messages: USER, system: SYSTEM });
  const { usage } = await client.messages.create({ messages: USER, system: SYSTEM, ...SHORT });
  assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

feature("batch", async () => {
  const ask = () => client.messages.create({ messages: USER, ...SHORT });
  const answers = await Promise.all(Array.from({ length: 8 }, ask));
  assert.equal(new Set(answers.map(text)).size, 1);
});

feature("errors", async () => {
  const missing = await rejected(client.messages.create({ messages: USER, ...SHORT, model: "none" }));
  assert(missing instanceof Anthropic.NotFoundError);
  const long = [{ role: "user", content: TOO_LONG }];
  const error = await rejected(client.messages.create({ messages: long, ...SHORT }));
  assert.match(error.message, /prompt is too long/);
});

await main();
