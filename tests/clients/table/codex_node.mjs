// OpenAI's Codex, which its package carries as a program. It asks `/v1/responses` in streams only, and
// lists tools of its own, a web search, and tools of MCP servers in namespaces.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { createRequire } from "node:module";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { QUESTION, SYSTEM, TOO_LONG, baseUrl, feature, main, model } from "./feature.mjs";

const codex = createRequire(import.meta.url).resolve("@openai/codex/bin/codex.js");
const town = fileURLToPath(new URL("codex_town.mjs", import.meta.url));
const home = mkdtempSync(join(tmpdir(), "hn-codex-"));
process.on("exit", () => rmSync(home, { recursive: true, force: true }));
writeFileSync(join(home, "instructions.md"), SYSTEM);
// A provider of one's own needs no login. The instructions are short, because the context of the small
// model would not hold Codex's own beside its tools. No tool runs commands: the model might call it.
// The web search stays, which this server leaves out.
writeFileSync(join(home, "config.toml"), `
model = ${JSON.stringify(model)}
model_provider = "hearth"
model_instructions_file = ${JSON.stringify(join(home, "instructions.md"))}
approval_policy = "never"
check_for_update_on_startup = false
[analytics]
enabled = false
[skills]
include_instructions = false
[tools]
experimental_request_user_input = { enabled = false }
[features]
goals = false
multi_agent = false
shell_tool = false
unified_exec = false
view_image = false
[model_providers.hearth]
name = "hearth"
base_url = ${JSON.stringify(baseUrl)}
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`);

/** Events of a run. */
function run(prompt, ...words) {
  const args = [codex, "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", ...words, "-"];
  const env = { ...process.env, CODEX_HOME: home, HOME: home };
  const options = { cwd: home, env, maxBuffer: 1 << 26 };
  return new Promise((ended) => {
    const child = execFile(process.execPath, args, options, (_, said, complaint) => {
      console.error(complaint);
      const lines = said.split("\n").filter((line) => line.startsWith("{"));
      ended(lines.map((line) => JSON.parse(line)));
    });
    child.stdin.end(prompt);
  });
}

const last = (events, type) => {
  const found = events.filter((event) => event.type === type).at(-1);
  assert(found, JSON.stringify(events.slice(-3)));
  return found;
};

/** Text of the last answer of a turn that was completed. */
function answer(events) {
  last(events, "turn.completed");
  const items = events.filter((event) => event.type === "item.completed").map(({ item }) => item);
  const messages = items.filter((item) => item.type === "agent_message");
  assert(messages.length, JSON.stringify(items));
  return messages.at(-1).text;
}

feature("chat", async () => {
  const events = await run(QUESTION);
  assert(answer(events));
  const { usage } = last(events, "turn.completed");
  assert(usage.input_tokens > 0 && usage.output_tokens > 0, JSON.stringify(usage));
});

feature("responses", async () => {
  // The conversation goes on with the answer so far.
  const first = await run(QUESTION);
  const { thread_id: thread } = last(first, "thread.started");
  const next = await run("And why is it hard?", "resume", thread);
  assert(answer(first) && answer(next));
  assert.equal(last(next, "thread.started").thread_id, thread);
});

feature("tools", async () => {
  // The package cannot force a call. The model is told of the tools of an MCP server, which are in a
  // namespace, and may call them, perhaps until the context is full.
  const servers = { command: process.execPath, args: [town] };
  const toml = Object.entries(servers).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  const events = await run(QUESTION, "-c", `mcp_servers.town={${toml.join(",")}}`);
  const called = ({ item }) => item?.type === "mcp_tool_call" && item.status === "completed";
  if (!events.some(called)) last(events, "turn.completed");
});

feature("schema", async () => {
  const schema = {
    type: "object",
    properties: { name: { type: "string", maxLength: 20 }, mood: { enum: ["good", "bad"] } },
    required: ["name", "mood"],
    additionalProperties: false,
  };
  const file = join(home, "schema.json");
  writeFileSync(file, JSON.stringify(schema));
  const said = JSON.parse(answer(await run(QUESTION, "--output-schema", file)));
  assert(["good", "bad"].includes(said.mood) && said.name.length <= 20, JSON.stringify(said));
});

feature("errors", async () => {
  const long = last(await run(TOO_LONG), "turn.failed");
  assert.match(long.error.message, /context/);
  const missing = last(await run(QUESTION, "--model", "none"), "turn.failed");
  assert.match(missing.error.message, /none/);
});

await main();
