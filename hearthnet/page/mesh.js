// The homes and models: the node's state, asked for every two seconds while the page is visible.

import * as api from './api.js';
import { $, count, el, list, say, size } from './dom.js';
import { Members } from './members.js';

// Time between two questions, and the longest one while the node is away, in ms.
const EVERY = 2000;
const LONGEST = 10000;

// Why no more of a model can be fetched, and what would help.
const NOWHERE = 'Its download waits: no home that is here has the rest of it, and its address does not answer. '
  + 'It goes on by itself when one of them is back. A home that has the file can offer it with '
  + '“hearthnet serve --model FILE”, and “hearthnet up --from PATH” takes it from a drive.';
const WAITS = {
  no_source: NOWHERE,
  no_object: NOWHERE,
  disk_full: 'Its download waits: the disk of this computer is full. It goes on by itself when there is room.',
};

export class Mesh {
  constructor() {
    this.state = null;
    this.away = false;
    // Why the node tells nothing, although it is there.
    this.problem = '';
    this.homes = new Members(this);
    this.last = null;
    // Homes that answer now, and tokens per second of the answer that grows.
    this.now = null;
    this.rate = null;
    this.chosen = null;
    this.wait = EVERY;
    this.timer = null;
    this.shown = '';
    // Elements with the details of plans, by model, so that an open one stays open.
    this.plans = new Map();
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.look();
    });
    addEventListener('online', () => this.look());
    $('model').onchange = () => { this.chosen = $('model').value; };
    $('pause').onclick = () => this.pause();
    $('quiet-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.setHours(event.submitter, `${$('quiet-from').value}-${$('quiet-until').value}`);
    });
    $('quiet-none').onclick = (event) => this.setHours(event.currentTarget, '');
    $('quiet-configured').onclick = (event) => this.setHours(event.currentTarget, null);
  }

  // Asks for the state now, and again later.
  async look() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      this.state = await api.state();
      this.wait = EVERY;
      if (this.away) $('announce').textContent = 'This node is back.';
      this.away = false;
      this.problem = '';
      if ($('key-dialog').open) $('key-dialog').close();
    } catch (error) {
      this.away = !(error instanceof api.ApiError);
      if (error.status === 401) this.askKey();
      else if (!this.away) this.problem = sentence(error.message);
      this.wait = Math.min(this.wait * 1.5, LONGEST);
    }
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), this.wait);
  }

  askKey() {
    const dialog = $('key-dialog');
    if (dialog.open) return;
    dialog.showModal();
    $('key').focus();
  }

  // Model to ask: the one chosen, or the first.
  model() {
    const models = this.state?.chats.models ?? [];
    return (models.find((it) => it.id === this.chosen) ?? models[0])?.id ?? '';
  }

  // Name of a home by its id; without one, this computer.
  name(id) {
    const node = this.state?.node;
    if (!id || id === node?.id) return node?.name ?? 'this computer';
    return this.state?.members.find((it) => it.id === id)?.name ?? 'another home';
  }

  // Sentence about an error, for the message that failed.
  failed(error) {
    if (!(error instanceof api.ApiError)) {
      this.look();
      return 'The connection to the node was lost. Retry when it is back.';
    }
    if (error.status === 401) this.askKey();
    return sentence(error.message);
  }

  answering(hosts) {
    this.now = [...new Set([...hosts.values()].map((id) => this.name(id)))];
    this.draw();
  }

  // Tokens per second of the answer that grows, or null.
  pace(rate) {
    this.rate = rate;
    if (this.state && !this.away) say($('speed'), this.speed());
  }

  // The answer has ended; `message` is null if it was stopped or failed.
  answered(message) {
    this.now = null;
    this.rate = null;
    this.last = message ?? this.last;
    this.draw();
  }

  async pause() {
    const ask = () => (this.state.paused ? api.resume() : api.pause(pauseEnd($('pause-until').value)));
    await this.change($('pause'), $('pause-error'), ask);
    $('pause').focus();
  }

  async setHours(button, hours) {
    await this.change(button, $('quiet-error'), () => api.quietHours(hours));
    (button.hidden ? $('quiet-now') : button).focus();
  }

  // Asks the node for a change, and shows the outcome. Resolves to true if it was made.
  async change(button, problem, ask) {
    button.disabled = true;
    say(problem, '');
    let done = true;
    try {
      await ask();
    } catch (error) {
      done = false;
      say(problem, this.failed(error));
    }
    button.disabled = false;
    await this.look();
    return done;
  }

  // Homes that hold the model that answers; none if this computer answers alone. `alone` is true while
  // it does so because the homes do not hold all of the model.
  holders() {
    const chat = this.state.chats.models.find((it) => it.id === this.model());
    const model = this.state.models.find((it) => it.weights_sha256 === chat?.weights_sha256);
    const hosts = (model?.hosts ?? []).filter((it) => it.connected);
    return { model, names: [...new Set(hosts.map((it) => it.name))], alone: !!chat?.alone && !!model?.missing.length };
  }

  draw() {
    const { state } = this;
    document.body.classList.toggle('is-away', this.away);
    const away = 'This node is away. The page tries again by itself, and your conversations are kept. '
      + 'If it was stopped, “hearthnet up” on its computer starts it.';
    const notice = this.away ? away : this.problem;
    $('away').hidden = !notice;
    say($('away'), notice);
    $('send').disabled = this.away || !state?.chats.models.length;
    if (this.away || !state) {
      say($('who'), this.away ? 'This node is away' : 'Looking for the node');
      say($('now'), this.away ? 'This node is away.' : 'Looking for the node.');
      return;
    }
    const { model, names, alone } = this.holders();
    const answers = words(state, model, names, alone);
    document.body.classList.toggle('is-partial', (!!model?.missing.length && !alone) || !state.chats.models.length);
    say($('who'), state.paused ? 'Paused' : answers.short);
    say($('community'), state.community?.name ?? 'HearthNet');
    say($('now'), answers.long);
    say($('welcome-who'), answers.long);
    say($('speed'), this.speed());
    const { failovers } = state.chats;
    $('failovers').hidden = !failovers;
    say($('failovers'), `Since this node started, a home left during an answer ${count(failovers, 'time', 'times')}, and others took over.`);
    const why = state.pause_reason ?? state.node?.suspended;
    $('not-serving').hidden = !why;
    say($('not-serving'), why ? `This computer computes nothing for the others: ${why}.` : '');
    $('pausing').hidden = state.paused == null;
    $('pause-until').hidden = !!state.paused;
    say($('pause'), state.paused ? 'Resume' : 'Pause this computer');
    this.quiet(state.quiet_hours);
    say($('version'), `HearthNet ${state.version}`);
    $('invite').hidden = !state.may_invite.length;
    this.downloads(state);
    // Redrawn only if it differs, so that the focus and a screen reader's place stay.
    const choices = state.chats.models;
    const shown = JSON.stringify([choices, state.models, state.members, state.may_change, state.node, state.waiting]);
    if (shown === this.shown) return;
    this.shown = shown;
    this.choices(choices);
    this.models(state);
    this.homes.draw(state);
  }

  // Who is answering, and how fast.
  speed() {
    const { chats } = this.state;
    const busy = chats.running + chats.waiting;
    const who = this.now ? `${list(this.now)} ${this.now.length > 1 ? 'are' : 'is'} answering`
      : busy ? `${count(busy, 'answer is', 'answers are')} being given` : 'Nobody is asking';
    // The state may be older than the answer.
    if (this.rate) return `${this.now ? `${who}. ` : ''}Your answer comes at ${this.rate.toFixed(1)} tokens per second.`;
    return this.last?.speed ? `${who}. The last answer came at ${this.last.speed.toFixed(1)} tokens per second.` : `${who}.`;
  }

  // Quiet hours. The fields change only with the node's hours, so that a time being typed stays.
  quiet(quiet) {
    $('quiet').hidden = !quiet;
    if (!quiet) return;
    const hours = (text) => (text ? text.replace('-', ' to ') : 'none');
    say($('quiet-now'), `Quiet hours: ${hours(quiet.hours)}`);
    say($('quiet-configured'), `As configured: ${hours(quiet.configured)}`);
    $('quiet-configured').hidden = !quiet.is_own;
    $('quiet-none').hidden = !quiet.hours;
    if ($('quiet').dataset.hours === quiet.hours) return;
    $('quiet').dataset.hours = quiet.hours;
    [$('quiet-from').value, $('quiet-until').value] = (quiet.hours || '22:00-07:00').split('-');
  }

  choices(models) {
    const select = $('model');
    const before = this.model();
    select.replaceChildren(...models.map((it) => el('option', { value: it.id }, it.id)));
    select.value = before;
    select.hidden = models.length < 2;
  }

  models(state) {
    const focused = $('models').contains(document.activeElement) ? document.activeElement : null;
    const known = new Set(state.models.map((it) => it.weights_sha256));
    const alone = state.chats.models.filter((it) => !known.has(it.weights_sha256)).map((it) =>
      el('div', { class: 'model' }, el('h3', {}, it.id),
        el('p', { class: 'soft' }, state.community
          ? 'No home offers parts of it. This computer answers alone.'
          : 'This computer holds all of it.')));
    const shared = state.models.map((it) => el('div', { class: 'model' },
      el('h3', {}, it.name ?? 'A model'), el('p', { class: 'soft' }, coverage(it)), ...waits(state, it.name), bars(it), ...this.plan(it)));
    $('models').replaceChildren(...shared, ...alone);
    focused?.focus({ preventScroll: true });
    if (!shared.length && !alone.length) $('models').append(el('p', { class: 'soft' }, 'None yet.'));
  }

  // How the homes should share a model, in sentences of the node; the numbers are folded away.
  plan({ weights_sha256: id, name, plan }) {
    if (!plan) return [];
    const folded = this.plans.get(id) ?? el('details', { class: 'plan' }, el('summary', {}), el('ul', {}));
    this.plans.set(id, folded);
    const [summary, lines] = folded.children;
    say(summary, `Numbers of the plan for ${name ?? 'this model'}`);
    lines.replaceChildren(...plan.details.map((line) => el('li', { class: 'soft' }, line)));
    return [
      el('div', { class: 'plan' }, el('h4', {}, 'The plan'), ...plan.words.map((words) => el('p', { class: 'soft' }, words))),
      ...(plan.details.length ? [folded] : []),
    ];
  }

  // One bar per download. Bars of the same downloads stay, so that a screen reader keeps its place.
  downloads(state) {
    const { downloads } = state;
    $('downloads').hidden = !downloads.length;
    const bars = $('download-list');
    const same = JSON.stringify(downloads.map((it) => [it.name, it.total]));
    if (same !== bars.dataset.same) {
      bars.dataset.same = same;
      this.began = downloads.map((it) => ({ at: Date.now(), done: it.done }));
      bars.replaceChildren(...downloads.map((it) => el('li', {}, el('span', {}, it.name),
        el('progress', { 'aria-label': `Download of ${it.name}` }), el('span', { class: 'soft' }))));
    }
    downloads.forEach((it, at) => {
      const [, bar, text] = bars.children[at].children;
      bar.max = Math.max(1, it.total);
      bar.value = it.done;
      say(text, progress(it, this.began[at]));
    });
  }
}

// End of a pause in ms since 1970, by the clock of this browser; null if it lasts until it is ended.
function pauseEnd(choice) {
  if (choice === 'hour') return Date.now() + 3600e3;
  if (choice !== 'morning') return null;
  const end = new Date();
  end.setDate(end.getDate() + 1);
  return end.setHours(7, 0, 0, 0);
}

// How far a download is, and how long it takes from here on at the speed so far.
function progress({ done, total }, began) {
  const text = `${Math.floor((100 * done) / Math.max(1, total))} % of ${size(total)}`;
  const seconds = ((total - done) * (Date.now() - began.at)) / (1000 * (done - began.done));
  if (!(seconds > 0 && seconds < 86400)) return text;
  return `${text}, ${seconds < 90 ? 'about a minute' : `about ${Math.round(seconds / 60)} minutes`} to go`;
}

// Who answers, short for the top of the page, and as a sentence.
function words(state, model, names, alone) {
  if (!state.chats.models.length) {
    return { short: 'No model yet', long: `This computer cannot answer yet. ${awaits(state)}` };
  }
  if (alone) {
    return {
      short: 'This computer answers',
      long: 'This computer answers alone. A home that joins takes a part of the model.',
    };
  }
  if (model?.adopted && !names.length) {
    const next = waiting(state, model.name) ? 'Its download waits: see “Models”.' : 'The homes are fetching their parts of it.';
    return { short: 'Getting ready', long: `No home serves the model yet. ${next}` };
  }
  if (!model || !names.length) {
    return { short: 'This computer answers', long: 'This computer answers alone.' };
  }
  if (model.missing.length) {
    return {
      short: 'A part is missing',
      long: `${list(names)} ${names.length > 1 ? 'hold' : 'holds'} a part of the model, and the rest is missing.`,
    };
  }
  const answer = names.length > 1 ? 'answer together' : 'answers';
  const short = names.length > 3 ? `${names.length} homes answer together` : `${list(names)} ${answer}`;
  return { short, long: `${list(names)} ${answer}.` };
}

// When a node without a model can answer.
function awaits(state) {
  const adopted = state.models.filter((it) => it.adopted);
  const held = adopted.find((it) => waiting(state, it.name));
  if (held) return `The download of ${held.name} waits: see “Models”.`;
  if (state.downloads.length) return 'It will when the download is complete.';
  if (adopted.length) {
    return `It will when it has fetched its part of ${adopted[0].name ?? 'the model'}.`;
  }
  const none = 'The community has chosen no model yet.';
  return state.node?.level === 'anchor'
    ? `${none} Run “hearthnet model adopt MODEL” on this computer; “hearthnet model list” shows those that fit.`
    : `${none} A home that manages the members chooses one, with “hearthnet model adopt MODEL”.`;
}

// Entry of a model whose download waits.
function waiting(state, name) {
  return state.waiting.find((it) => it.name === name);
}

function waits(state, name) {
  const found = waiting(state, name);
  if (!found) return [];
  return [el('p', { class: 'soft' }, WAITS[found.code] ?? 'Its download waits, and is tried again by itself.')];
}

function coverage(model) {
  if (!model.hosts.length) return 'Getting ready: no home serves a part of it yet.';
  const missing = model.missing.reduce((sum, [lo, hi]) => sum + hi - lo + 1, 0);
  const homes = new Set(model.hosts.filter((it) => it.connected).map((it) => it.id)).size;
  if (missing) {
    const share = Math.max(1, Math.round((missing / model.layers) * 100));
    return `${share} % of it is missing. A home that serves it would complete it.`;
  }
  return homes > 1 ? `Complete: ${homes} homes hold it together.` : 'Complete: one home holds all of it.';
}

// One bar per home: which part of the model it holds.
function bars(model) {
  return el('ul', { class: 'bars' }, ...model.hosts.map((it) => {
    const [lo, hi] = it.layers;
    const share = Math.round(((hi - lo + 1) / model.layers) * 100);
    const bar = el('span', { class: 'part' });
    bar.style.left = `${(lo / model.layers) * 100}%`;
    bar.style.width = `${((hi - lo + 1) / model.layers) * 100}%`;
    const state = it.connected ? '' : ', away';
    const speed = it.ms_per_token > 0 ? `, ${it.ms_per_token.toFixed(1)} ms per token` : '';
    const layers = `Layers ${lo} to ${hi}${speed}`;
    return el('li', { class: it.connected ? null : 'gone', title: layers },
      el('span', { class: 'name' }, it.name),
      el('span', { class: 'bar-line', 'aria-hidden': 'true' }, bar),
      el('span', { class: 'soft' }, `${share} %${state}`, el('span', { class: 'hidden' }, `. ${layers}`)));
  }));
}

// The node's messages begin without a capital and end without a full stop.
function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}
