// The conversation that is shown: questions, streamed answers, stop, edit, retry.

import * as api from './api.js';
import * as store from './store.js';
import { show as markdown } from './markdown.js';
import { $, copy, el, list, say } from './dom.js';

// Shortest time between two drawings, and between two saves, of an answer that grows, in ms.
const DRAW = 80;
const SAVE = 1000;
// A speed is shown from so many tokens and so much time on, in ms.
const FIRST_TOKENS = 8;
const FIRST_TIME = 1000;

export class Chat {
  // `mesh` names hosts; `changed` is called after each change of the conversation.
  constructor(mesh, changed) {
    this.mesh = mesh;
    this.changed = changed;
    this.conversation = fresh();
    this.running = null;
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation ?? fresh();
    this.draw();
  }

  draw() {
    const { messages } = this.conversation;
    $('messages').querySelectorAll('article').forEach((old) => old.remove());
    messages.forEach((message, at) => $('messages').append(this.article(message, at)));
    $('welcome').hidden = messages.length > 0;
    this.buttons();
    toEnd(true);
  }

  buttons() {
    $('send').hidden = !!this.running;
    $('stop').hidden = !this.running;
  }

  article(message, at) {
    const mine = message.role === 'user';
    const body = el('div', { class: 'body' });
    const made = el('article', { class: message.role, 'aria-label': mine ? 'You' : 'Answer' }, body,
      el('p', { class: 'facts soft' }), el('p', { class: 'error' }), el('div', { class: 'row tools' }));
    this.fill(made, message, at);
    return made;
  }

  // Shows a message, while it grows as well.
  fill(article, message, at) {
    const [body, facts, error, tools] = article.children;
    if (message.role === 'user') say(body, message.content);
    else markdown(body, message.content);
    const grows = this.running?.message === message;
    article.classList.toggle('grows', grows);
    article.setAttribute('aria-busy', String(grows));
    say(facts, grows ? this.progress(message) : factsOf(message));
    say(error, message.error ?? '');
    if (grows) {
      tools.replaceChildren();
      return;
    }
    const last = at === this.conversation.messages.length - 1;
    const button = (text, label, onclick) => el('button', {
      type: 'button', class: 'quiet', 'aria-label': label, onclick,
    }, text);
    const copying = button('Copy', null, (event) => copy(message.content, event.currentTarget));
    tools.replaceChildren(copying, ...(message.role === 'user'
      ? [button('Edit', 'Edit this question', () => this.edit(article, message, at))]
      : last ? [button('Retry', 'Retry this answer', () => this.retry())] : []));
  }

  progress(message) {
    if (message.content) {
      const rate = pace(this.running);
      return [rate && `${rate.toFixed(1)} tokens per second`, message.news].filter(Boolean).join(' · ');
    }
    const read = this.running.read;
    return message.news ?? (read ? `Reading the conversation: ${Math.round(read * 100)} %` : 'Thinking…');
  }

  async ask(text) {
    const content = text.trim();
    if (!content || this.running) return;
    const { messages } = this.conversation;
    if (!messages.length) this.conversation.title = content.replace(/\s+/g, ' ').slice(0, 60);
    messages.push({ role: 'user', content });
    await this.answer();
  }

  // Another answer to the last question.
  async retry() {
    if (this.running) return;
    const { messages } = this.conversation;
    if (messages.at(-1)?.role === 'assistant') messages.pop();
    await this.answer();
  }

  // Replaces the text of a question by a field. The messages after it are dropped when it is sent.
  edit(article, message, at) {
    if (this.running) return;
    const field = el('textarea', { 'aria-label': 'Edit the question', rows: '3' });
    field.value = message.content;
    const cancel = () => {
      const back = this.article(message, at);
      article.replaceWith(back);
      back.querySelector('[aria-label="Edit this question"]').focus();
    };
    const send = async () => {
      if (!field.value.trim()) return;
      this.conversation.messages.length = at;
      await this.ask(field.value);
    };
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        cancel();
      } else if (isSend(event)) {
        event.preventDefault();
        send();
      }
    });
    const tools = el('div', { class: 'row end' },
      el('button', { type: 'button', class: 'quiet', onclick: cancel }, 'Cancel'),
      el('button', { type: 'button', class: 'main', onclick: send }, 'Send'));
    article.replaceChildren(field, tools);
    grow(field);
    field.focus();
  }

  stop() {
    this.running?.abort.abort();
  }

  async answer() {
    const { conversation } = this;
    const { messages } = conversation;
    const sent = turns(messages);
    const message = { role: 'assistant', content: '' };
    messages.push(message);
    const running = { message, abort: new AbortController(), read: 0, hosts: new Map(), tokens: 0, began: 0 };
    this.running = running;
    this.draw();
    this.keep(conversation);
    const aloud = new Aloud();
    const article = $('messages').lastElementChild;
    const at = messages.length - 1;
    let drawing = null;
    const draw = () => {
      drawing = null;
      if (!article.isConnected) return;
      const follow = atEnd();
      this.fill(article, message, at);
      toEnd(follow);
      if (this.running === running) this.mesh.pace(pace(running));
    };
    let saved = Date.now();
    try {
      for await (const part of api.answer(this.mesh.model(), sent, running.abort.signal)) {
        if (part.text) {
          message.content += part.text;
          running.tokens += 1;
          running.began ||= Date.now();
          aloud.hear(part.text);
        }
        if (part.trace) this.trace(running, part.trace);
        if (part.alone) message.news = 'No other home is there: this computer continues alone.';
        if (part.reason === 'length') message.cut = true;
        if (part.usage) message.tokens = part.usage.completion_tokens;
        drawing ??= setTimeout(draw, DRAW);
        if (Date.now() - saved > SAVE) {
          saved = Date.now();
          this.keep(conversation);
        }
      }
    } catch (error) {
      if (error.name === 'AbortError') message.stopped = true;
      else message.error = this.mesh.failed(error);
    }
    clearTimeout(drawing);
    aloud.end(message);
    this.running = null;
    this.mesh.answered(message.speed ? message : null);
    this.keep(conversation);
    this.buttons();
    if (this.conversation === conversation) draw();
  }

  // News about the hosts of the answer.
  trace(running, { event, data }) {
    const { message } = running;
    if (event === 'prompt_progress') {
      running.read = data.total ? data.done / data.total : 0;
    } else if (event === 'shard_status') {
      const waits = data.status !== 'ready' && data.code;
      message.news = waits ? `Waiting for ${this.mesh.name(data.host)}…` : undefined;
      if (data.status === 'ready') this.mesh.answering(running.hosts.set(data.shard_id, data.host));
    } else if (event === 'shard_failover') {
      const to = data.replacements.length ? data.replacements : [undefined];
      const took = list(unique(to.map((id) => this.mesh.name(id))));
      const seconds = (data.recovery_ms / 1000).toFixed(1);
      const left = data.host ? `${this.mesh.name(data.host)} left` : 'The other homes left';
      message.news = `${left}; ${took} took over after ${seconds} s.`;
      (message.moves ??= []).push(message.news);
    } else if (event === 'done') {
      message.by = unique(data.route.map((hop) => this.mesh.name(hop.host)));
      message.speed = data.timings.tokens_per_second;
    }
  }

  // Saves a conversation, unless it was deleted while its answer grew.
  keep(conversation) {
    if (conversation.deleted) return;
    conversation.changed = Date.now();
    store.put(conversation).catch(() => {});
    this.changed(conversation);
  }
}

function fresh() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: '', changed: Date.now(), messages: [] };
}

// Messages to send. Many templates want turns to alternate, so after an answer that failed the next
// question joins the one before it.
function turns(messages) {
  const sent = [];
  for (const { role, content } of messages) {
    if (!content) continue;
    if (sent.at(-1)?.role === role) sent.at(-1).content += `\n\n${content}`;
    else sent.push({ role, content });
  }
  return sent;
}

// Tokens per second since the first one, or null if it is too early to tell. The node sends a piece of
// text for nearly every token.
function pace({ tokens, began }) {
  const time = Date.now() - began;
  return tokens >= FIRST_TOKENS && time >= FIRST_TIME ? ((tokens - 1) * 1000) / time : null;
}

function unique(names) {
  return [...new Set(names)];
}

// One line below an answer: who gave it, how fast, and what happened.
function factsOf(message) {
  if (message.role !== 'assistant') return '';
  const facts = [];
  if (message.by?.length) facts.push(`Answered by ${list(message.by)}`);
  if (message.speed) facts.push(`${message.speed.toFixed(1)} tokens per second`);
  if (message.stopped) facts.push('Stopped');
  if (message.cut) facts.push('Cut off: the conversation fills the model’s memory');
  return [facts.join(' · '), ...(message.moves ?? [])].filter(Boolean).join(' · ');
}

// Announces finished sentences to screen readers, at most one text every two seconds.
class Aloud {
  constructor() {
    this.rest = '';
    this.ready = '';
    this.timer = null;
  }

  hear(text) {
    this.rest += text;
    const end = Math.max(...['. ', '! ', '? ', '\n'].map((mark) => this.rest.lastIndexOf(mark)));
    if (end < 0) return;
    this.ready += this.rest.slice(0, end + 1);
    this.rest = this.rest.slice(end + 1);
    this.timer ??= setTimeout(() => this.speak(), 2000);
  }

  speak() {
    this.timer = null;
    if (this.ready.trim()) $('announce').textContent = this.ready;
    this.ready = '';
  }

  end(message) {
    clearTimeout(this.timer);
    const state = message.error ? message.error : message.stopped ? 'Stopped.' : 'End of the answer.';
    this.ready += `${this.rest} ${state}`;
    this.speak();
  }
}

// Enter sends; with Shift, and while a word is being composed, it does not.
export function isSend(event) {
  return event.key === 'Enter' && !event.shiftKey && !event.isComposing;
}

// Fits a field to its text.
export function grow(field) {
  field.style.height = 'auto';
  field.style.height = `${Math.min(field.scrollHeight + 2, 240)}px`;
}

function atEnd() {
  const box = $('messages');
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function toEnd(follow) {
  if (follow) $('messages').scrollTop = $('messages').scrollHeight;
}

