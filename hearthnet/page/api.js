// Calls of the node. The key, if there is one, comes from the link's fragment, which browsers send
// nowhere. It is kept in this browser and sent in a header, never in an address.

const KEY = 'hearthnet-key';

// Error that the node reports.
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The node cannot be reached.
export class Away extends Error {}

// Takes the key out of the address, so that it is in no bookmark or screenshot.
export function takeKey() {
  const match = /^#key=(.+)$/.exec(location.hash);
  if (!match) return false;
  history.replaceState(null, '', location.pathname);
  let key = match[1];
  try {
    key = decodeURIComponent(key);
  } catch {
    // A key may contain a percent sign.
  }
  return setKey(key);
}

// Keeps a key; false if it cannot be one.
export function setKey(key) {
  if (!/^[!-~]{16,}$/.test(key)) return false;
  localStorage.setItem(KEY, key);
  return true;
}

async function call(path, { json, headers, ...options } = {}) {
  const key = localStorage.getItem(KEY);
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (json !== undefined) {
    sent['Content-Type'] = 'application/json';
    options.method = 'POST';
    options.body = JSON.stringify(json);
  }
  let response;
  try {
    response = await fetch(path, {
      ...options, headers: sent, cache: 'no-store', credentials: 'omit', redirect: 'error',
    });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Away();
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const message = error?.message ?? `The node answered with status ${response.status}.`;
  throw new ApiError(response.status, error?.code ?? '', message);
}

export async function state() {
  return (await call('/hearthnet/v1/state', { signal: AbortSignal.timeout(8000) })).json();
}

export async function invite(level, uses) {
  return (await call('/hearthnet/v1/invite', { json: { level, uses } })).json();
}

// Pauses the node until a time in ms since 1970; null: until `resume`.
export async function pause(until) {
  await call('/hearthnet/v1/pause', { json: { until_ms: until } });
}

export async function resume() {
  await call('/hearthnet/v1/resume', { json: {} });
}

// Sets the quiet hours, as "22:00-07:00" or "" for none; null: as configured.
export async function quietHours(hours) {
  await call('/hearthnet/v1/quiet-hours', { json: { hours } });
}

// Changes the level of a member. The passphrase is that of the root key, if an anchor needs it.
export async function level(node, to, passphrase) {
  await call('/hearthnet/v1/level', { json: { node, level: to, passphrase } });
}

// Removes a member for good.
export async function revoke(node, passphrase) {
  await call('/hearthnet/v1/revoke', { json: { node, passphrase } });
}

// Asks for an answer. Yields `{text}`, `{trace}`, `{alone}` and `{reason, usage}`.
export async function* answer(model, messages, signal) {
  const response = await call('/v1/chat/completions', {
    json: { model, messages, stream: true, stream_options: { include_usage: true } },
    headers: { 'X-Hearthnet-Trace': '1' },
    signal,
  });
  for await (const line of lines(response)) {
    if (line.startsWith(': hearthnet ')) {
      yield { trace: JSON.parse(line.slice(12)) };
    } else if (line.startsWith(': no host')) {
      yield { alone: true };
    } else if (line === 'data: [DONE]') {
      return;
    } else if (line.startsWith('data: ')) {
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ApiError(200, chunk.error.code, chunk.error.message);
      const choice = chunk.choices[0];
      if (choice?.delta.content) yield { text: choice.delta.content };
      if (choice?.finish_reason) yield { reason: choice.finish_reason };
      if (chunk.usage) yield { usage: chunk.usage };
    }
  }
  // A whole stream ends with [DONE].
  throw new Away();
}

// Each event of the node is one line.
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new Away();
    }
    if (part.done) return;
    const whole = (rest + part.value).split('\n');
    rest = whole.pop();
    yield* whole;
  }
}
