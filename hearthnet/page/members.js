// The members of the community: which are here, what each gave, and their changes by an anchor.

import * as api from './api.js';
import { $, count, el, list, say, size } from './dom.js';

const LEVELS = {
  member: 'chats',
  trusted: 'chats and computes',
  anchor: 'chats, computes and manages the members',
};

const MAY = {
  member: 'Chat',
  trusted: 'Chat, and compute for the others',
  anchor: 'Chat, compute, and manage the members',
};

// What follows when a home gets a level.
const FOLLOWS = {
  member: (name) => `${name} can ask, and no longer computes for the others. Answers that it takes part in go on elsewhere.`,
  trusted: (name) => `${name} can ask, and compute for the others. A home that computes could find out what the others ask.`,
  anchor: (name) => `${name} can also invite and remove homes, and choose the models. Only the computer that founded the community can take that back.`,
};

const removed = (name) => `${name} can no longer ask, nor compute for the others, and answers that it takes part in go on elsewhere. `
  + 'This cannot be undone. To come back, it has to run “hearthnet community leave”, and needs a new invite.';

const GAVE = 'By its own count, up to the last full day. A token through half of the layers counts half.';
const GAVE_SO_FAR = 'By the count of this computer. The others hear of it when a day has ended.';

export class Members {
  // `mesh` asks the node for changes.
  constructor(mesh) {
    this.mesh = mesh;
    // Member that the dialog is about, whether it asks for its removal, and the button that opened it.
    this.member = null;
    this.removes = false;
    this.opener = null;
    $('member-levels').addEventListener('change', () => this.choose());
    $('member-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.change();
    });
    $('member-dialog').addEventListener('close', () => this.closed());
  }

  draw(state) {
    $('homes').hidden = !state.members.length;
    const elsewhere = state.node?.level === 'anchor' && state.members.length > 1 && !state.may_change.length;
    $('homes-elsewhere').hidden = !elsewhere;
    say($('homes-elsewhere'), elsewhere
      ? `Members are changed on ${state.node.name} itself only, by the user who runs HearthNet there.` : '');
    const rank = (it) => (it.this_node ? 0 : it.connected ? 1 : 2);
    const members = [...state.members].sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
    const focused = $('members').contains(document.activeElement) ? document.activeElement.id : null;
    $('members').replaceChildren(...members.map((it) => {
      const place = it.frozen ? 'not trusted: its key was copied' : it.this_node ? 'this computer'
        : it.connected ? 'here' : 'away';
      return el('li', { class: it.connected ? 'here' : null },
        el('span', { class: 'dot', 'aria-hidden': 'true' }),
        el('span', {}, el('strong', {}, it.name), ` – ${place}`,
          el('span', { class: 'soft', title: it.short }, LEVELS[it.level] ?? it.level),
          ...(it.gave ? [el('span', { class: 'soft', title: GAVE }, given(it.gave))] : []),
          ...(it.this_node && gaveAny(state.node?.gave) ? [el('span', { class: 'soft', title: GAVE_SO_FAR }, `${given(state.node.gave)} up to now`)] : []),
          ...this.buttons(state, it)));
    }));
    if (focused) ($(focused) ?? $('homes-title')).focus({ preventScroll: true });
  }

  // Controls of an anchor's own computer. A home whose key was copied can only be removed.
  buttons(state, it) {
    if (it.this_node || !state.may_change.includes(it.level)) return [];
    const button = (text, label, removes) => el('button', {
      type: 'button', class: 'quiet', id: `${text}-${it.id}`, 'aria-label': label, 'aria-haspopup': 'dialog',
      onclick: (event) => this.ask(event.currentTarget.id, it, removes),
    }, text);
    return [el('span', { class: 'row' },
      ...(it.frozen ? [] : [button('Change', `Change what ${it.name} may do`, false)]),
      button('Remove', `Remove ${it.name}`, true))];
  }

  ask(opener, member, removes) {
    Object.assign(this, { opener, member, removes });
    const { may_change: levels } = this.mesh.state;
    say($('member-title'), removes ? `Remove ${member.name}?` : `What may ${member.name} do?`);
    $('member-levels').hidden = removes;
    $('member-choices').replaceChildren(...(removes ? [] : levels.map((it) => el('label', {},
      el('input', { type: 'radio', name: 'level', value: it, checked: it === member.level }), MAY[it] ?? it))));
    $('member-founder').hidden = removes || levels.includes('anchor');
    say($('member-error'), '');
    say($('homes-done'), '');
    this.choose();
    $('member-dialog').showModal();
    (removes ? $('member-no') : $('member-choices').querySelector('input:checked')).focus();
  }

  chosen() {
    return $('member-choices').querySelector('input:checked')?.value;
  }

  // Says what follows from the choice. The root key changes anchors.
  choose() {
    const { member: { name, level }, removes } = this;
    const to = this.chosen();
    const changes = removes || to !== level;
    say($('member-text'), removes ? removed(name) : changes ? FOLLOWS[to](name) : '');
    const asks = this.mesh.state.needs_passphrase && changes && [level, to].includes('anchor');
    $('member-sealed').hidden = !asks;
    $('member-passphrase').required = asks;
    say($('member-yes'), removes ? 'Remove for good' : 'Change');
    $('member-yes').disabled = !changes;
  }

  async change() {
    const { member: { id, name }, removes } = this;
    const to = this.chosen();
    const passphrase = $('member-sealed').hidden ? undefined : $('member-passphrase').value;
    const done = await this.mesh.change($('member-yes'), $('member-error'), () => (removes
      ? api.revoke(id, passphrase) : api.level(id, to, passphrase)));
    if (!done) return;
    $('member-dialog').close();
    say($('homes-done'), removes ? `${name} is no longer a member.` : `${name} ${LEVELS[to]} now.`);
  }

  closed() {
    $('member-passphrase').value = '';
    ($(this.opener) ?? $('homes-title')).focus();
  }
}

const gaveAny = (it) => it && (it.tokens || it.minutes || it.weights_bytes);

// What a home has given to the others.
function given({ tokens, minutes, weights_bytes: bytes }) {
  const parts = [];
  if (tokens) parts.push(count(tokens, 'token', 'tokens'));
  if (minutes) parts.push(minutes < 120 ? count(minutes, 'minute', 'minutes') : `${Math.round(minutes / 60)} hours`);
  if (bytes) parts.push(`${size(bytes)} of models`);
  return `gave ${list(parts)}`;
}
