// Frame of the programs of this folder in JavaScript. feature.py says what they print.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const frame = readFileSync(new URL("feature.py", import.meta.url), "utf8");
const text = (name) => frame.match(new RegExp(`^${name} = "(.*)"$`, "m"))[1];
const FEATURES = frame.match(/^FEATURES = """([^"]*)"""/m)[1].trim().split(/\s+/);

export const [baseUrl, model] = process.argv.slice(2);
export const root = baseUrl.replace(/\/v1$/, "");
export const SYSTEM = text("SYSTEM");
export const QUESTION = text("QUESTION");
export const TOO_LONG = "word ".repeat(40000);

const checks = new Map();

/** Registers the check of a feature, which the node has if it serves `path`. */
export function feature(name, check, path) {
  assert(FEATURES.includes(name), name);
  checks.set(name, { check, path });
}

/** Error of a promise that must be rejected. */
export async function rejected(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail("an error was expected");
}

/** Items of an asynchronous sequence. */
export async function all(items) {
  const found = [];
  for await (const item of items) found.push(item);
  return found;
}

export async function main() {
  const { paths } = await (await fetch(`${root}/openapi.json`)).json();
  for (const name of FEATURES) {
    const { check, path } = checks.get(name) ?? {};
    let result = "not in this client";
    if (path && !(path in paths)) {
      result = "not served";
    } else if (check) {
      try {
        await check();
        result = "ok";
      } catch (error) {
        console.error(error);
        result = `failed: ${String(error.message).split(/\s+/).join(" ").slice(0, 300)}`;
      }
    }
    console.log(`${name}: ${result}`);
  }
}
