// Markdown to elements. The text comes from a model, so it is never parsed as HTML: every element is
// made here, and links are of http and https only.

import { copy, el } from './dom.js';

// Deepest nesting of lists and quotes; deeper ones are shown as text.
const DEEPEST = 6;
// Longest paragraph whose emphasis and links are shown.
const LONGEST = 20000;

// Shows `text` in `container`. Blocks that have not changed stay, so that a selection and the
// position of a scrolled block survive while an answer grows.
export function show(container, text) {
  const blocks = split(text.replace(/\r\n?/g, '\n').split('\n'));
  const shown = [...container.children];
  blocks.forEach((block, at) => {
    const source = block.lines.join('\n');
    const there = shown[at];
    if (there?.source === source && there.kind === block.kind) return;
    const made = build(block, 0);
    made.source = source;
    made.kind = block.kind;
    if (there) there.replaceWith(made);
    else container.append(made);
  });
  shown.slice(blocks.length).forEach((extra) => extra.remove());
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.+?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])\s+/;
const DASHES = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

// Cuts lines into blocks.
function split(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const from = at;
    let kind = 'paragraph';
    const fence = FENCE.exec(line);
    if (!line.trim()) {
      at += 1;
      continue;
    }
    at += 1;
    if (fence) {
      kind = 'code';
      const end = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (at < lines.length && !end.test(lines[at])) at += 1;
      at += 1;
    } else if (HEADING.test(line)) {
      kind = 'heading';
    } else if (RULE.test(line)) {
      kind = 'rule';
    } else if (QUOTE.test(line)) {
      kind = 'quote';
      while (at < lines.length && QUOTE.test(lines[at])) at += 1;
    } else if (ITEM.test(line)) {
      kind = 'list';
      at = endOfList(lines, from);
    } else if (line.includes('|') && DASHES.test(lines[at] ?? '') && lines[at].includes('-')
      && cells(line).length === cells(lines[at]).length) {
      kind = 'table';
      while (at < lines.length && lines[at].includes('|')) at += 1;
    } else {
      while (at < lines.length && lines[at].trim() && !begins(lines[at])) at += 1;
    }
    blocks.push({ kind, lines: lines.slice(from, at) });
  }
  return blocks;
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line)
    || RULE.test(line);
}

// A list goes on with further items, indented lines, and blank lines between these.
function endOfList(lines, from) {
  const ordered = /\d/.test(ITEM.exec(lines[from])[2]);
  let at = from + 1;
  let end = at;
  while (at < lines.length) {
    const line = lines[at];
    const item = ITEM.exec(line);
    const blank = !line.trim();
    const same = item && (item[1].length >= 2 || /\d/.test(item[2]) === ordered);
    const lazy = !blank && !begins(line) && lines[at - 1].trim();
    if (!blank && !same && !/^\s{2,}/.test(line) && !lazy) break;
    at += 1;
    if (!blank) end = at;
  }
  return end;
}

function build({ kind, lines }, depth) {
  switch (kind) {
    case 'code': return code(lines);
    case 'heading': {
      const [, marks, text] = HEADING.exec(lines[0]);
      // Of one level for the page's outline, whatever the model skips; of several sizes.
      return el('h3', { class: `size-${Math.min(marks.length, 4)}` }, ...inline(text));
    }
    case 'rule': return el('hr');
    case 'quote': return el('blockquote', {}, ...nested(lines.map((line) => line.replace(QUOTE, '')), depth));
    case 'list': return items(lines, depth);
    case 'table': return table(lines);
    default: return el('p', {}, ...inline(lines.join('\n')));
  }
}

function nested(lines, depth) {
  if (depth >= DEEPEST) return [lines.join('\n')];
  return split(lines).map((block) => build(block, depth + 1));
}

function code(lines) {
  const [, mark, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const text = lines.slice(1, closed ? -1 : undefined).join('\n');
  const button = el('button', { type: 'button', class: 'quiet', onclick: () => copy(text, button) }, 'Copy');
  return el('div', { class: 'code' },
    el('div', { class: 'row' }, el('span', { class: 'soft' }, language || 'text'), button),
    el('pre', { tabindex: '0' }, el('code', {}, text)));
}

function items(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const groups = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < first[1].length + 2) {
      groups.push({ width: item[0].length, lines: [line.slice(item[0].length)] });
    } else {
      const { width, lines: into } = groups.at(-1);
      const indent = /^ */.exec(line)[0].length;
      into.push(line.slice(Math.min(indent, width)));
    }
  }
  const start = ordered && Number.parseInt(first[2], 10) !== 1 ? Number.parseInt(first[2], 10) : null;
  const made = groups.map((group) => {
    const inner = nested(group.lines, depth);
    // The first paragraph of an item needs no space around it.
    const head = inner[0];
    if (head instanceof Element && head.tagName === 'P') inner.splice(0, 1, ...head.childNodes);
    return el('li', {}, ...inner);
  });
  return el(ordered ? 'ol' : 'ul', { start }, ...made);
}

function cells(line) {
  const text = line.trim().replace(/^\|/, '').replace(/\|$/, '');
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll('\\|', '|'));
}

function table([head, dashes, ...rows]) {
  const sides = cells(dashes).map((cell) => ({
    '::': 'middle', ':-': '', '-:': 'right',
  })[`${cell[0]}${cell.at(-1)}`] ?? '');
  const row = (tag, line) => el('tr', {}, ...cells(line).slice(0, sides.length).map((text, at) => {
    const scope = tag === 'th' ? { scope: 'col' } : {};
    return el(tag, { class: sides[at] || null, ...scope }, ...inline(text));
  }));
  return el('div', { class: 'table', tabindex: '0', role: 'group', 'aria-label': 'Table' },
    el('table', {}, el('thead', {}, row('th', head)), el('tbody', {}, ...rows.map((line) => row('td', line)))));
}

const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const LINK = /!?\[([^[\]\n]{1,500})\]\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s+"[^"\n]{0,200}")?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`\\]{1,2000}/y;
const MARKS = [['**', 'strong'], ['__', 'strong'], ['~~', 's'], ['*', 'em'], ['_', 'em']];

// Text of a line with emphasis, code and links.
function inline(text, depth = 0) {
  if (text.length > LONGEST || depth > DEEPEST) return [text];
  const made = [];
  let plain = '';
  const push = (element) => {
    if (plain) made.push(plain);
    plain = '';
    made.push(element);
  };
  const match = (pattern, at) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };
  let at = 0;
  while (at < text.length) {
    const sign = text[at];
    let found;
    if (sign === '\n') {
      push(el('br'));
      at += 1;
    } else if (sign === '\\' && (found = match(ESCAPE, at))) {
      plain += found[1];
      at += 2;
    } else if (sign === '`' && (found = span(text, at))) {
      push(el('code', {}, found.text));
      at = found.end;
    } else if ((sign === '[' || sign === '!') && (found = match(LINK, at))) {
      push(link(found[2], inline(found[1], depth + 1)));
      at += found[0].length;
    } else if (sign === 'h' && !/\w/.test(text[at - 1] ?? '') && (found = match(ADDRESS, at))) {
      const address = found[0].replace(/[.,;:!?)\]*_~]+$/, '');
      push(link(address, [address]));
      at += address.length;
    } else if ('*_~'.includes(sign) && (found = marked(text, at))) {
      push(el(found.tag, {}, ...inline(found.text, depth + 1)));
      at = found.end;
    } else {
      plain += sign;
      at += 1;
    }
  }
  if (plain) made.push(plain);
  return made;
}

// Code between equal runs of backticks.
function span(text, at) {
  const [ticks] = /^`+/.exec(text.slice(at, at + 10));
  const end = text.indexOf(ticks, at + ticks.length);
  if (end < 0) return null;
  return { text: text.slice(at + ticks.length, end).replace(/^ (.*) $/, '$1'), end: end + ticks.length };
}

// Emphasised text. An underscore within a word is part of the word.
function marked(text, at) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    if (!/\S/.test(text[from] ?? '') || (mark[0] === '_' && /\w/.test(text[at - 1] ?? ''))) continue;
    for (let end = text.indexOf(mark, from + 1); end > 0;) {
      // Of a longer run of signs, the last ones end the outer emphasis.
      let run = mark.length;
      while (text[end + run] === mark[0]) run += 1;
      const ends = /\S/.test(text[end - 1]) && (mark.length === 2 || run % 2 === 1)
        && !(mark[0] === '_' && /\w/.test(text[end + run] ?? ''));
      if (ends) {
        const close = end + run - mark.length;
        return { tag, text: text.slice(from, close), end: close + mark.length };
      }
      end = text.indexOf(mark, end + run);
    }
  }
  return null;
}

// Link to another site, or only its text if the address is of another kind.
function link(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return el('span', {}, ...children);
  }
  if (url.protocol !== 'http:' && url.protocol !== 'https:') return el('span', {}, ...children);
  return el('a', {
    href: url.href, target: '_blank', rel: 'noopener noreferrer nofollow', title: url.href,
  }, ...children);
}
