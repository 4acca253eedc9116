// An MCP server with one tool, over standard input and output, for Codex to connect to.

import { createInterface } from "node:readline";

const results = {
  initialize: ({ protocolVersion }) => ({
    protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "town", version: "1" },
  }),
  "tools/list": () => ({
    tools: [
      {
        name: "get_weather",
        description: "Weather of a town.",
        inputSchema: {
          type: "object", properties: { town: { type: "string", enum: ["Oslo", "Rome"] } },
          required: ["town"],
        },
        annotations: { readOnlyHint: true },
      },
    ],
  }),
  "tools/call": () => ({ content: [{ type: "text", text: "20 degrees" }] }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const result = results[method]?.(params) ?? {};
  console.log(JSON.stringify({ jsonrpc: "2.0", id, result }));
}
