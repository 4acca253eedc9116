// Vercel's `ai`, with its provider for APIs in OpenAI's form.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool,
} from "ai";
import { z } from "zod";
import { QUESTION, SYSTEM, TOO_LONG, all, baseUrl, feature, main, model, rejected } from "./feature.mjs";

const provider = createOpenAICompatible({
  name: "hearth", baseURL: baseUrl, includeUsage: true, supportsStructuredOutputs: true,
});
const ask = { model: provider(model), prompt: QUESTION, temperature: 0, maxRetries: 0 };
const SHORT = { ...ask, maxOutputTokens: 12 };
const LONGER = { ...ask, maxOutputTokens: 200 };
const Person = z.object({ name: z.string().max(20), mood: z.enum(["good", "bad"]) });
const weather = (calls) =>
  tool({
    description: "Weather of a town.",
    inputSchema: z.object({ town: z.enum(["Oslo", "Rome"]) }),
    execute: ({ town }) => (calls.push(town), "20 degrees"),
  });

feature("chat", async () => {
  const { text, usage } = await generateText({ ...SHORT, system: SYSTEM });
  assert(text && usage.outputTokens);
});

feature("stream", async () => {
  const whole = await generateText({ ...SHORT, system: SYSTEM });
  const streamed = streamText({ ...SHORT, system: SYSTEM });
  assert.equal((await all(streamed.textStream)).join(""), whole.text);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
});

feature("settings", async () => {
  const say = async (more) =>
    (await generateText({ ...SHORT, temperature: 1, seed: 5, topP: 0.9, ...more })).text;
  const text = await say();
  assert.equal(text, await say({ frequencyPenalty: 0 }));
  const word = text.split(/\s+/)[2];
  assert.equal(await say({ stopSequences: [word] }), text.slice(0, text.indexOf(word)));
});

feature("tools", async () => {
  const calls = [];
  const { steps } = await generateText({
    ...LONGER, tools: { weather: weather(calls) }, toolChoice: "required",
    stopWhen: stepCountIs(2),
  });
  assert(steps.length === 2 && calls.length >= 2, `${steps.length} steps`);
  const named = await generateText({
    ...LONGER, tools: { weather: weather(calls) }, toolChoice: { type: "tool", toolName: "weather" },
  });
  // The conversation goes on with the calls and their results.
  const messages = [{ role: "user", content: QUESTION }, ...named.response.messages];
  const { prompt: _, ...rest } = SHORT;
  assert((await generateText({ ...rest, messages })).text);
});

feature("tool-stream", async () => {
  const calls = [];
  const streamed = streamText({
    ...LONGER, tools: { weather: weather(calls) }, toolChoice: "required",
  });
  const kinds = new Set((await all(streamed.fullStream)).map((part) => part.type));
  assert(kinds.has("tool-input-delta") && kinds.has("tool-result") && calls.length, [...kinds].join());
});

feature("schema", async () => {
  const { output } = await generateText({ ...LONGER, output: Output.object({ schema: Person }) });
  assert(Person.parse(output));
});

feature("schema-stream", async () => {
  const streamed = streamText({ ...LONGER, output: Output.object({ schema: Person }) });
  const parts = await all(streamed.partialOutputStream);
  assert(Person.parse(parts.at(-1)));
});

feature("completions", async () => {
  assert((await generateText({ ...SHORT, model: provider.completionModel(model) })).text);
});

feature("embeddings", async () => {
  const embedding = provider.embeddingModel(model);
  const { embeddings } = await embedMany({ model: embedding, values: ["a cat", "a dog"] });
  assert.equal(embeddings.length, 2);
}, "/v1/embeddings");

feature("batch", async () => {
  const answers = await Promise.all(Array.from({ length: 8 }, () => generateText(SHORT)));
  assert.equal(new Set(answers.map((answer) => answer.text)).size, 1);
});

feature("errors", async () => {
  const error = await rejected(generateText({ ...SHORT, prompt: TOO_LONG }));
  assert(APICallError.isInstance(error) && error.statusCode === 400, String(error));
  assert.match(error.message, /maximum context length/);
  const missing = await rejected(generateText({ ...SHORT, model: provider("none") }));
  assert.equal(missing.statusCode, 404);
});

await main();
