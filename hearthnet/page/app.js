// Start of the page: conversations, panels, dialogs and keys.

import * as api from './api.js';
import * as store from './store.js';
import { Chat, grow, isSend } from './chat.js';
import { Mesh } from './mesh.js';
import { $, copy, count, el, sure, svg } from './dom.js';

api.takeKey();
const mesh = new Mesh();
let conversations = [];
const chat = new Chat(mesh, (changed) => {
  conversations = [changed, ...conversations.filter((it) => it.id !== changed.id)];
  drawList();
});

function drawList() {
  $('no-conversations').hidden = conversations.length > 0;
  $('export').disabled = $('delete-all').disabled = !conversations.length;
  $('conversations').replaceChildren(...conversations.map((it) => {
    const title = it.title || 'New conversation';
    const current = it.id === chat.conversation.id;
    return el('li', {},
      el('button', {
        type: 'button', class: 'quiet title', 'aria-current': current ? 'true' : null, onclick: () => open(it),
      }, title),
      el('button', {
        type: 'button', class: 'quiet', 'aria-label': `Delete “${title}”`, onclick: () => remove(it),
      }, svg('svg', { viewBox: '0 0 24 24', 'aria-hidden': 'true' }, svg('path', { d: 'M7 7l10 10M17 7L7 17' }))));
  }));
}

function open(conversation) {
  chat.open(conversation);
  drawList();
  panel(null);
  $('question').focus();
}

async function remove(conversation) {
  if (!await sure('Delete this conversation?', 'It is kept nowhere else.')) return;
  conversation.deleted = true;
  if (conversation.id === chat.conversation.id) chat.open(null);
  await store.remove(conversation.id);
  conversations = conversations.filter((it) => it.id !== conversation.id);
  drawList();
  $('new').focus();
}

$('new').onclick = () => open(null);

$('delete-all').onclick = async () => {
  const many = count(conversations.length, 'conversation', 'conversations');
  if (!await sure(`Delete ${many}?`, 'They are kept nowhere else. Export them first to keep a copy.')) return;
  for (const it of conversations) it.deleted = true;
  chat.open(null);
  await store.clear();
  conversations = [];
  drawList();
};

$('export').onclick = () => {
  const text = JSON.stringify({ format: 'hearthnet-conversations', version: 1, conversations }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  const day = new Date().toISOString().slice(0, 10);
  el('a', { href: url, download: `hearthnet-conversations-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
};

// Panels. On a wide screen both are always there; on a narrow one they slide over the conversation.
const PANELS = { list: $('open-list'), mesh: $('open-mesh') };
const narrow = matchMedia('(max-width: 959px)');

function panel(name) {
  for (const [id, button] of Object.entries(PANELS)) {
    const opened = id === name;
    $(id).classList.toggle('open', opened);
    $(id).inert = narrow.matches && !opened;
    button.setAttribute('aria-expanded', String(opened || !narrow.matches));
  }
  document.querySelector('main').inert = narrow.matches && !!name;
  $('shade').hidden = !narrow.matches || !name;
}

for (const [id, button] of Object.entries(PANELS)) {
  button.onclick = () => {
    const opens = !$(id).classList.contains('open');
    panel(opens ? id : null);
    if (opens && narrow.matches) $(id).querySelector('button').focus();
  };
}
$('shade').onclick = () => panel(null);
for (const button of document.querySelectorAll('[data-close-panel]')) {
  button.onclick = () => {
    const { id } = button.closest('.side');
    panel(null);
    PANELS[id].focus();
  };
}
narrow.addEventListener('change', () => panel(null));
panel(null);

// Keys and the question.
const question = $('question');
question.addEventListener('input', () => grow(question));
question.addEventListener('keydown', (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  send();
});
$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
$('stop').onclick = () => {
  chat.stop();
  question.focus();
};
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || document.querySelector('dialog[open]')) return;
  const opened = Object.entries(PANELS).find(([id]) => $(id).classList.contains('open'));
  if (opened && narrow.matches) {
    panel(null);
    opened[1].focus();
  } else {
    chat.stop();
  }
});

function send() {
  if ($('send').disabled || chat.running) return;
  const text = question.value;
  question.value = '';
  grow(question);
  chat.ask(text);
}

// Dialogs.
for (const button of document.querySelectorAll('[data-close]')) {
  button.onclick = () => button.closest('dialog').close();
}
$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  const fits = api.setKey($('key').value.trim());
  $('key-error').textContent = fits ? '' : 'A key has at least 16 letters, digits or signs, without spaces.';
  if (!fits) return;
  $('key').value = '';
  $('key-dialog').close();
  mesh.look();
});
addEventListener('hashchange', () => {
  if (api.takeKey()) mesh.look();
});

const MAY = { member: 'chat', trusted: 'chat, and compute for the others' };
$('invite').onclick = () => {
  const levels = mesh.state.may_invite;
  $('invite-level').replaceChildren(...levels.map((it) => el('option', { value: it }, MAY[it] ?? it)));
  $('invite-level').value = levels.at(-1);
  $('invite-ask').hidden = false;
  $('invite-done').hidden = true;
  $('invite-error').textContent = '';
  $('invite-dialog').showModal();
};
$('invite-make').onclick = async () => {
  $('invite-make').disabled = true;
  $('invite-error').textContent = '';
  try {
    const made = await api.invite($('invite-level').value, Number($('invite-uses').value));
    const { side, path } = made.qr;
    const drawing = svg('svg', { viewBox: `0 0 ${side} ${side}`, role: 'img', 'aria-label': 'QR code of the invite' },
      svg('rect', { width: side, height: side, class: 'light' }), svg('path', { d: path, class: 'dark' }));
    $('invite-qr').replaceChildren(drawing);
    $('invite-code').textContent = made.code;
    $('invite-ask').hidden = true;
    $('invite-done').hidden = false;
    $('invite-copy').focus();
  } catch (error) {
    $('invite-error').textContent = mesh.failed(error);
  }
  $('invite-make').disabled = false;
};
$('invite-copy').onclick = (event) => copy($('invite-code').textContent, event.currentTarget);

// Start.
mesh.look();
conversations = await store.all().catch(() => []);
drawList();
chat.draw();
if (!narrow.matches) question.focus();
// Only this computer's own address counts as secure without TLS.
navigator.serviceWorker?.register('/service-worker.js').catch(() => {});
