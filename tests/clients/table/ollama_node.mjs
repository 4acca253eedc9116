// Ollama's package for Node.js.

import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { z } from "zod";
import { QUESTION, SYSTEM, TOO_LONG, all, feature, main, model, rejected, root } from "./feature.mjs";

const client = new Ollama({ host: root });
const USER = [{ role: "user", content: QUESTION }];
const MESSAGES = [{ role: "system", content: SYSTEM }, ...USER];
const options = { num_predict: 12, temperature: 0 };
const Person = z.object({ name: z.string().max(20), mood: z.enum(["good", "bad"]) });
const TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Weather of a town.",
    parameters: { type: "object", properties: { town: { type: "string" } }, required: ["town"] },
  },
};

feature("models", async () => {
  assert.deepEqual((await client.list()).models.map((found) => found.name), [model]);
  assert.equal((await client.ps()).models.length, 1);
  assert((await client.show({ model })).capabilities.includes("completion"));
});

feature("chat", async () => {
  const answer = await client.chat({ model, messages: MESSAGES, options });
  assert(answer.message.content && answer.eval_count);
});

feature("stream", async () => {
  const whole = await client.chat({ model, messages: MESSAGES, options });
  const parts = await all(await client.chat({ model, messages: MESSAGES, options, stream: true }));
  assert.equal(parts.map((part) => part.message.content).join(""), whole.message.content);
  assert(parts.at(-1).done);
});

feature("settings", async () => {
  const say = async (more) => {
    const asked = { ...options, temperature: 1, seed: 5, ...more };
    return (await client.chat({ model, messages: USER, options: asked })).message.content;
  };
  const text = await say();
  assert.equal(text, await say({ num_ctx: 4096 }));
  const word = text.split(/\s+/)[2];
  assert.equal(await say({ stop: [word] }), text.slice(0, text.indexOf(word)));
});

feature("tools", async () => {
  const said = { role: "assistant", content: "", tool_calls: [
    { function: { name: "get_weather", arguments: { town: "Oslo" } } },
  ] };
  const result = { role: "tool", content: "20 degrees", tool_name: "get_weather" };
  const messages = [...USER, said, result];
  const { message } = await client.chat({ model, messages, tools: [TOOL], options });
  assert(message.content || message.tool_calls);
});

feature("tool-stream", async () => {
  const asked = { model, messages: USER, tools: [TOOL], options, stream: true };
  const parts = await all(await client.chat(asked));
  assert(parts.at(-1).done);
});

feature("schema", async () => {
  const asked = { model, messages: USER, options: { temperature: 0, num_predict: 200 } };
  const answer = await client.chat({ ...asked, format: z.toJSONSchema(Person) });
  assert(Person.parse(JSON.parse(answer.message.content)));
});

feature("schema-stream", async () => {
  const asked = { model, messages: USER, options: { temperature: 0, num_predict: 200 }, stream: true };
  const parts = await all(await client.chat({ ...asked, format: z.toJSONSchema(Person) }));
  assert(Person.parse(JSON.parse(parts.map((part) => part.message.content).join(""))));
});

feature("completions", async () => {
  assert((await client.generate({ model, prompt: QUESTION, system: SYSTEM, options })).response);
  assert((await client.generate({ model, prompt: "Once upon", raw: true, options })).response);
});

feature("embeddings", async () => {
  assert.equal((await client.embed({ model, input: ["a cat", "a dog"] })).embeddings.length, 2);
}, "/api/embed");

feature("batch", async () => {
  const ask = () => client.chat({ model, messages: USER, options });
  const answers = await Promise.all(Array.from({ length: 8 }, ask));
  assert.equal(new Set(answers.map((answer) => answer.message.content)).size, 1);
});

feature("errors", async () => {
  const missing = await rejected(client.chat({ model: "none", messages: USER }));
  assert.equal(missing.status_code, 404);
  const long = [{ role: "user", content: TOO_LONG }];
  assert.match((await rejected(client.chat({ model, messages: long }))).message, /context/);
});

await main();
