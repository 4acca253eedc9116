// The page in a real browser: `node page.mjs URL SCENARIO`. Needs Chromium, and playwright-core and
// axe-core in the folder that HEARTHNET_TEST_NODE_MODULES names; `tests/run` fetches both.
//
// | scenario | what is tested |
// |---|---|
// | chat | questions, streams, stop, edit, retry, reload, export, delete, keys, accessibility |
// | away | the page while the node cannot be reached, and after |
// | failover, failover-phone | an answer during which a host is killed, on a desk and on a phone: prints a line when it may be killed |
// | key | the page with the key in its link |
// | invite | an invite; prints its code |
// | watch | members on the page of a home that is no anchor |
// | promote, anchor, remove | Kim computes; becomes an anchor, with the passphrase; is removed |
// | pause | pause and resume, quiet hours; a download, a model that is not here yet, and its plan |

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const modules = process.env.HEARTHNET_TEST_NODE_MODULES;
const require = createRequire(`${modules}/`);
const { chromium } = require('playwright-core');
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');

const [url, scenario] = process.argv.slice(2);
const origin = new URL(url).origin;
const PHONE = { width: 360, height: 740 };
const DESK = { width: 1280, height: 800 };
const LONG = 'Tell me a long story about a village that bakes bread.';

const browser = await chromium.launch({
  executablePath: process.env.HEARTHNET_TEST_BROWSER ?? '/usr/bin/chromium',
  // In containers the tests run as root, where Chromium has no sandbox.
  args: process.getuid() === 0 ? ['--no-sandbox'] : [],
});

// Opens the page in a new profile. Every violation of the policy, error and foreign request fails
// the test at the end.
async function visit(viewport, colorScheme = 'light', address = url) {
  const context = await browser.newContext({ viewport, colorScheme, reducedMotion: 'reduce' });
  const page = await context.newPage();
  const wrong = [];
  await page.exposeFunction('violated', (what) => wrong.push(what));
  await page.addInitScript(() => document.addEventListener('securitypolicyviolation', (event) => {
    window.violated(`${event.violatedDirective} ${event.blockedURI}`);
  }));
  page.on('pageerror', (error) => wrong.push(error.stack));
  page.on('console', (message) => {
    if (message.type() === 'error' && !context.expectsErrors) wrong.push(message.text());
  });
  context.on('request', (request) => {
    const at = request.url();
    if (!at.startsWith(`${origin}/`) && !/^(data|blob):/.test(at)) wrong.push(`request to ${at}`);
  });
  await page.goto(address);
  return { context, page, narrow: viewport === PHONE, close: async () => {
    assert.deepEqual(wrong, []);
    await context.close();
  } };
}

async function accessible(page, where) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run());
  const found = violations.map((it) => `${it.id}: ${it.nodes.map((node) => node.target).join(', ')}`);
  assert.deepEqual(found, [], where);
}

const last = (page) => page.locator('article.assistant').last();
const words = (page) => last(page).locator('.body').innerText();

async function ask(page, text) {
  await page.fill('#question', text);
  await page.press('#question', 'Enter');
}

// Waits until the answer has at least some characters.
async function grows(page, characters) {
  await page.waitForFunction((least) => {
    const all = document.querySelectorAll('article.assistant .body');
    return all.length && all[all.length - 1].textContent.length >= least;
  }, characters, { timeout: 60_000 });
}

async function ended(page) {
  await page.waitForSelector('#send:not([hidden])', { timeout: 120_000 });
}

// Opens a panel, which on a wide screen is always there.
async function panel(view, name) {
  if (view.narrow) await view.page.click(`#open-${name}`);
}

async function chat(viewport, scheme) {
  const view = await visit(viewport, scheme);
  const { page } = view;
  await page.waitForSelector('#send:not([disabled])');
  assert.equal(await page.locator('#welcome-who').innerText(), 'This computer answers alone.');
  await accessible(page, 'at the start');

  // A stream arrives in pieces; Shift and Enter starts a line.
  await page.focus('#question');
  await page.keyboard.type('Say hello.');
  await page.keyboard.press('Shift+Enter');
  await page.keyboard.type('In one sentence.');
  assert.equal(await page.inputValue('#question'), 'Say hello.\nIn one sentence.');
  await page.fill('#question', LONG);
  await page.press('#question', 'Enter');
  await grows(page, 1);
  await accessible(page, 'while an answer grows');
  const before = await words(page);
  await grows(page, before.length + 40);
  const more = await words(page);
  assert.ok(more.length > before.length && await page.isVisible('#stop'));

  // Escape stops, and the text so far stays.
  await page.keyboard.press('Escape');
  await ended(page);
  const stopped = await words(page);
  assert.ok(stopped.length >= before.length);
  assert.match(await last(page).locator('.facts').innerText(), /Stopped/);
  assert.match(await page.locator('#announce').innerText(), /Stopped\./);

  // Retry asks again.
  await last(page).getByRole('button', { name: 'Retry this answer' }).click();
  await grows(page, 20);
  await page.click('#stop');
  await ended(page);
  assert.equal(await page.locator('article').count(), 2);

  // An edited question replaces the messages after it.
  await page.getByRole('button', { name: 'Edit this question' }).click();
  await accessible(page, 'while a question is edited');
  await page.getByLabel('Edit the question').fill('What is 2 and 2? Answer with one word.');
  await page.getByLabel('Edit the question').press('Enter');
  await grows(page, 1);
  await page.keyboard.press('Escape');
  await ended(page);
  assert.equal(await page.locator('article').count(), 2);
  assert.match(await page.locator('article.user .body').innerText(), /^What is 2 and 2/);
  await accessible(page, 'with an answer');

  // Conversations survive a reload, in this browser.
  const kept = await words(page);
  await page.reload();
  await panel(view, 'list');
  const titles = page.locator('#conversations .title');
  await titles.first().waitFor();
  assert.equal(await titles.count(), 1);
  await accessible(page, 'with the list of conversations');
  await titles.first().click();
  assert.equal(await words(page), kept);

  await panel(view, 'list');
  const download = page.waitForEvent('download');
  await page.click('#export');
  const exported = JSON.parse(readFileSync(await (await download).path(), 'utf8'));
  assert.equal(exported.conversations.length, 1);
  assert.match(exported.conversations[0].messages[0].content, /^What is 2 and 2/);

  await page.locator('#conversations button[aria-label^="Delete"]').click();
  await accessible(page, 'before something is deleted');
  await page.click('#sure-yes');
  await page.waitForSelector('#no-conversations:not([hidden])');
  await page.reload();
  await page.waitForSelector('#send:not([disabled])');
  assert.equal(await page.locator('#conversations li').count(), 0);

  await panel(view, 'mesh');
  await accessible(page, 'with the homes and models');
  // Nothing is wider than the screen.
  const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  assert.ok(!wide);
  await view.close();
}

// Text of a model is never HTML. A model cannot be told what to say, so the stream is replaced.
async function hostile() {
  const view = await visit(DESK);
  const { page } = view;
  const text = '# Title\n\n<img src=x onerror=alert(1)> <script>alert(1)</script>\n\n'
    + '[bad](javascript:alert(1)) [good](https://example.org/a_b) **bold *both*** `<b>`\n\n'
    + '| a | b |\n|---|--:|\n| 1 | 2 |\n\n1. one\n   - inner\n2. two\n\n> quote\n\n```js\n<script>\n```\n';
  const chunk = JSON.stringify({ choices: [{ delta: { content: text }, finish_reason: 'stop' }] });
  await page.route('**/v1/chat/completions', (route) => route.fulfill({
    contentType: 'text/event-stream', body: `data: ${chunk}\n\ndata: [DONE]\n\n`,
  }));
  await page.waitForSelector('#send:not([disabled])');
  await ask(page, 'anything');
  await ended(page);
  const body = last(page).locator('.body');
  assert.equal(await body.locator('img, script, b, [onerror]').count(), 0);
  const links = await body.locator('a').evaluateAll((all) => all.map((it) => [it.href, it.rel]));
  assert.deepEqual(links, [['https://example.org/a_b', 'noopener noreferrer nofollow']]);
  for (const [selector, count] of [['h3', 1], ['table td', 2], ['ol > li', 2], ['ol ul > li', 1],
    ['blockquote', 1], ['pre code', 1], ['strong em', 1]]) {
    assert.equal(await body.locator(selector).count(), count, selector);
  }
  await accessible(page, 'with a rich answer');
  await view.close();
}

async function away() {
  const view = await visit(DESK);
  const { context, page } = view;
  await page.waitForSelector('#send:not([disabled])');
  // The page's files are kept once its worker has started.
  await page.evaluate(() => navigator.serviceWorker.ready);
  context.expectsErrors = true;
  await context.setOffline(true);
  await page.waitForSelector('#away:not([hidden])');
  assert.ok(await page.isDisabled('#send'));
  await accessible(page, 'while the node is away');
  await page.reload();
  await page.waitForSelector('#away:not([hidden])');
  await context.setOffline(false);
  await page.waitForSelector('#away', { state: 'hidden' });
  assert.equal(await page.locator('#announce').innerText(), 'This node is back.');
  await page.waitForSelector('#send:not([disabled])');
  await view.close();
}

async function failover(viewport) {
  const view = await visit(viewport);
  const { page } = view;
  // A small model may go on until its context is full.
  await page.route('**/v1/chat/completions', (route) => {
    const asked = route.request().postDataJSON();
    return route.continue({ postData: JSON.stringify({ ...asked, max_tokens: 200 }) });
  });
  await page.waitForSelector('#send:not([disabled])');
  await ask(page, LONG);
  await grows(page, 60);
  console.log('streaming');
  await page.waitForFunction(() => /took over/.test(document.body.innerText), null, { timeout: 60_000 });
  await ended(page);
  assert.equal(await last(page).locator('.error').innerText(), '');
  assert.match(await last(page).locator('.facts').innerText(), /Answered by .*took over after/);
  await accessible(page, 'after another home took over');
  await panel(view, 'mesh');
  await page.waitForSelector('#failovers:not([hidden])');
  assert.match(await page.locator('#failovers').innerText(), /a home left during an answer \d times?, and/);
  assert.ok(!await page.evaluate(() => document.documentElement.scrollWidth > innerWidth));
  await view.close();
}

async function withKey() {
  const key = process.env.HEARTHNET_TEST_KEY;
  const view = await visit(PHONE, 'dark', `${url}#key=${encodeURIComponent(key)}`);
  const { context, page } = view;
  await page.waitForSelector('#send:not([disabled])');
  assert.equal(page.url(), `${origin}/`, 'the key is not in the address');
  await page.reload();
  await page.waitForSelector('#send:not([disabled])');
  // Without the key the page asks for it.
  context.expectsErrors = true;
  await page.evaluate(() => localStorage.clear());
  await page.reload();
  await page.waitForSelector('#key-dialog[open]');
  await accessible(page, 'while the key is asked for');
  await page.fill('#key', key);
  await page.press('#key', 'Enter');
  await page.waitForSelector('#send:not([disabled])');
  await view.close();
}

async function invite() {
  const view = await visit(PHONE);
  const { page } = view;
  await page.waitForSelector('#homes:not([hidden])', { state: 'attached' });
  await panel(view, 'mesh');
  await page.click('#invite');
  await accessible(page, 'before an invite');
  await page.click('#invite-make');
  await page.waitForSelector('#invite-qr svg');
  await accessible(page, 'with an invite');
  console.log(await page.locator('#invite-code').innerText());
  await view.close();
}

// The page with the members.
async function homes(viewport) {
  const view = await visit(viewport);
  await view.page.waitForSelector('#members li', { state: 'attached' });
  await panel(view, 'mesh');
  return view;
}

const focusIsOn = (page, name) => page.waitForFunction(
  (label) => document.activeElement?.getAttribute('aria-label') === label, name);

async function fitsTheScreen(page) {
  assert.ok(!await page.evaluate(() => document.documentElement.scrollWidth > innerWidth));
  const box = await page.locator('dialog[open]').boundingBox();
  const { width } = page.viewportSize();
  assert.ok(box.x >= 0 && box.x + box.width <= width, JSON.stringify(box));
}

async function watch() {
  for (const viewport of [DESK, PHONE]) {
    const view = await homes(viewport);
    const { context, page } = view;
    assert.match(await page.locator('#members').innerText(), /Kim/);
    assert.equal(await page.locator('#members button').count(), 0);
    assert.ok(await page.isHidden('#homes-elsewhere'));
    context.expectsErrors = true;
    const status = await page.evaluate(async () => {
      const members = (await (await fetch('/hearthnet/v1/state')).json()).members;
      const body = JSON.stringify({ node: members.find((it) => it.name === 'Kim').id });
      const headers = { 'Content-Type': 'application/json' };
      return (await fetch('/hearthnet/v1/revoke', { method: 'POST', headers, body })).status;
    });
    assert.equal(status, 403);
    await view.close();
  }
}

// Opens the dialog about Kim by keyboard.
async function askAbout(page, button) {
  await page.getByRole('button', { name: button }).focus();
  await page.keyboard.press('Enter');
  const dialog = page.getByRole('dialog', { name: /Kim/ });
  await dialog.waitFor();
  await fitsTheScreen(page);
  await accessible(page, `with the dialog of “${button}”`);
  return dialog;
}

const CHANGE = 'Change what Kim may do';

async function promote() {
  // On the phone the dialog is left without a change.
  const small = await homes(PHONE);
  await askAbout(small.page, CHANGE);
  await small.page.keyboard.press('ArrowDown');
  assert.match(await small.page.locator('#member-text').innerText(), /^Kim can ask, and compute/);
  await small.page.keyboard.press('Escape');
  await small.page.waitForSelector('#member-dialog', { state: 'hidden' });
  await focusIsOn(small.page, CHANGE);
  await small.close();

  const view = await homes(DESK);
  const { page } = view;
  assert.match(await page.locator('#members').innerText(), /Kim – \w+\s+chats\n/);
  await askAbout(page, CHANGE);
  assert.ok(await page.isDisabled('#member-yes'));
  await page.keyboard.press('ArrowDown');
  assert.ok(await page.isHidden('#member-sealed'));
  await page.keyboard.press('Enter');
  await page.waitForSelector('#member-dialog', { state: 'hidden' });
  await page.waitForFunction(() => document.querySelector('#homes-done').textContent === 'Kim chats and computes now.');
  await focusIsOn(page, CHANGE);
  assert.match(await page.locator('#members').innerText(), /Kim – \w+\s+chats and computes\n/);
  await accessible(page, 'after a change of a member');
  await view.close();
}

async function makeAnchor() {
  const view = await homes(PHONE);
  const { context, page } = view;
  await askAbout(page, CHANGE);
  assert.ok(await page.isHidden('#member-sealed'));
  await page.keyboard.press('ArrowDown');
  assert.match(await page.locator('#member-text').innerText(), /^Kim can also invite and remove homes/);
  await page.waitForSelector('#member-sealed:not([hidden])');
  await accessible(page, 'with the passphrase');
  // A wrong passphrase is named in the dialog, which stays.
  context.expectsErrors = true;
  await page.fill('#member-passphrase', 'correct horse');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#member-error:not(:empty)');
  assert.match(await page.locator('#member-error').innerText(), /passphrase/);
  await accessible(page, 'with a refused change');
  await page.fill('#member-passphrase', process.env.HEARTHNET_TEST_KEY);
  await page.click('#member-yes');
  await page.waitForSelector('#member-dialog', { state: 'hidden' });
  assert.equal(await page.inputValue('#member-passphrase'), '');
  await page.waitForFunction(() => /^Kim .*manages the members now\.$/.test(document.querySelector('#homes-done').textContent));
  await view.close();
}

async function remove() {
  const small = await homes(PHONE);
  await askAbout(small.page, 'Remove Kim');
  assert.match(await small.page.locator('#member-text').innerText(), /^Kim can no longer ask/);
  // Enter on the first button removes nothing.
  await small.page.keyboard.press('Enter');
  await small.page.waitForSelector('#member-dialog', { state: 'hidden' });
  await focusIsOn(small.page, 'Remove Kim');
  await small.close();

  const view = await homes(DESK);
  const { page } = view;
  await askAbout(page, 'Remove Kim');
  await page.fill('#member-passphrase', process.env.HEARTHNET_TEST_KEY);
  await page.getByRole('button', { name: 'Remove for good' }).click();
  await page.waitForSelector('#member-dialog', { state: 'hidden' });
  await page.waitForFunction(() => document.querySelector('#homes-done').textContent === 'Kim is no longer a member.');
  assert.ok(!/Kim/.test(await page.locator('#members').innerText()));
  await page.waitForFunction(() => document.activeElement?.id === 'homes-title');
  await accessible(page, 'after a removal');
  await view.close();
}

async function pause() {
  const view = await visit(PHONE);
  const { page } = view;
  await page.waitForSelector('#homes:not([hidden])', { state: 'attached' });
  await panel(view, 'mesh');
  assert.ok(await page.isHidden('#not-serving'));
  await page.click('#pause');
  await page.waitForSelector('#not-serving:not([hidden])');
  assert.match(await page.locator('#not-serving').innerText(), /for the others: paused by you\.$/);
  await accessible(page, 'while the node is paused');
  await page.getByRole('button', { name: 'Resume' }).click();
  await page.waitForSelector('#not-serving', { state: 'hidden' });
  await page.getByRole('button', { name: 'Pause this computer' }).waitFor();
  // For a time, of which the reason tells the end.
  await page.selectOption('#pause-until', 'morning');
  await page.click('#pause');
  await page.waitForFunction(() => /paused by you until .*0?7:00/.test(document.querySelector('#not-serving').textContent));
  assert.ok(await page.isHidden('#pause-until'));
  await page.getByRole('button', { name: 'Resume' }).click();
  await page.waitForSelector('#not-serving', { state: 'hidden' });

  const quiet = (hours) => page.waitForFunction(
    (text) => document.querySelector('#quiet-now').textContent === text, `Quiet hours: ${hours}`);
  await quiet('none');
  await page.click('#quiet-now');
  await page.fill('#quiet-from', '01:30');
  await page.fill('#quiet-until', '04:00');
  await page.press('#quiet-until', 'Enter');
  await quiet('01:30 to 04:00');
  await accessible(page, 'with quiet hours');
  await page.getByRole('button', { name: 'As configured: none' }).click();
  await quiet('none');
  assert.ok(await page.isHidden('#quiet-configured'));

  // The node of the test has its model, so the state is replaced.
  let [done, waiting, adopted, chats] = [25e6, [], true, []];
  await page.route('**/hearthnet/v1/state', async (route) => {
    const response = await route.fetch();
    const state = await response.json();
    state.chats.models = chats;
    const plan = { words: [`Ana would run ${done / 1e6} % of the model.`], details: ['Ana: holds layers 0-29'] };
    state.models = !adopted ? [] : [{ name: 'tiny', weights_sha256: '00', layers: 30, missing: [[0, 29]], hosts: [], adopted: true, plan }];
    state.waiting = waiting;
    state.downloads = done < 100e6 ? [{ name: 'tiny', done, total: 100e6 }] : [];
    await route.fulfill({ response, json: state });
  });
  const bar = page.locator('#download-list progress');
  await bar.waitFor();
  assert.equal(await bar.evaluate((it) => it.position), 0.25);
  assert.match(await page.locator('#download-list').innerText(), /tiny\s+25 % of 100 MB$/);
  assert.match(await page.locator('#now').innerText(), /cannot answer yet\. .*download is complete/);
  assert.match(await page.locator('#models').innerText(), /tiny\s+Getting ready/);
  assert.match(await page.locator('#models').innerText(), /Ana would run 25 % of the model\./);
  assert.ok(await page.isHidden('.plan li'));
  await page.click('.plan summary');
  assert.equal(await page.locator('.plan li').innerText(), 'Ana: holds layers 0-29');
  assert.ok(await page.isDisabled('#send'));
  await accessible(page, 'during a download');
  // The bar moves, and is not drawn anew.
  await bar.evaluate((it) => { it.dataset.marked = 'yes'; });
  done = 50e6;
  await page.waitForFunction(() => document.querySelector('#download-list progress').position === 0.5);
  assert.equal(await bar.getAttribute('data-marked'), 'yes');
  // So does the plan, whose numbers stay open, with the focus.
  assert.match(await page.locator('#models').innerText(), /Ana would run 50 %/);
  assert.ok(await page.isVisible('.plan li'));
  assert.ok(await page.locator('.plan summary').evaluate((it) => it === document.activeElement));
  assert.match(await page.locator('#download-list').innerText(), /50 % of 100 MB, about a minute to go$/);
  done = 100e6;
  await page.waitForSelector('#downloads', { state: 'hidden' });
  assert.match(await page.locator('#now').innerText(), /its part of tiny/);
  // Then no source has the rest.
  waiting = [{ name: 'tiny', code: 'no_source' }];
  await page.waitForFunction(() => /tiny waits: see “Models”/.test(document.querySelector('#now').textContent));
  assert.match(await page.locator('#models').innerText(), /no home that is here has the rest of it/);
  await accessible(page, 'while a download waits');
  // It has the whole file, and no home serves the rest.
  waiting = [];
  chats = [{ id: 'tiny', weights_sha256: '00', alone: true }];
  await page.waitForFunction(() => /^This computer answers alone\. A home that joins/.test(document.querySelector('#now').textContent));
  assert.ok(!await page.isDisabled('#send'));
  chats = [];
  adopted = false;
  await page.waitForFunction(() => /hearthnet model adopt MODEL/.test(document.querySelector('#now').textContent));
  await view.close();
}

const scenarios = {
  chat: async () => {
    for (const scheme of ['light', 'dark']) {
      for (const viewport of [PHONE, DESK]) await chat(viewport, scheme);
    }
    await hostile();
  },
  away, failover: () => failover(DESK), 'failover-phone': () => failover(PHONE), key: withKey, invite, pause, watch, promote, anchor: makeAnchor, remove,
};
try {
  await scenarios[scenario]();
} finally {
  await browser.close();
}
