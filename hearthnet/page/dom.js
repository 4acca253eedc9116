// Helpers for elements. Text is always set as text, never parsed as HTML.

export const $ = (id) => document.getElementById(id);

// New element with attributes, listeners (`onclick`) and children.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, '');
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const SVG = 'http://www.w3.org/2000/svg';

// New element of an SVG drawing.
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Sets the text of an element if it differs, so that screen readers hear each text once.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// "Ana", "Ana and Kim", "Ana, Kim and Lee", "Ana, Kim, Lee and 3 more".
export function list(names) {
  const all = names.length > 4 ? [...names.slice(0, 3), `${names.length - 3} more`] : [...names];
  const last = all.pop() ?? '';
  return all.length ? `${all.join(', ')} and ${last}` : last;
}

export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

export function size(bytes) {
  return bytes < 1e9 ? `${Math.ceil(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
}

// Copies a text, and confirms on the button for a moment.
export async function copy(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS browsers offer no clipboard beyond this computer.
    const area = el('textarea', { class: 'hidden' });
    area.value = text;
    (button.closest('dialog') ?? document.body).append(area);
    area.select();
    copied = document.execCommand('copy');
    area.remove();
    button.focus();
  }
  const before = button.dataset.label ??= button.textContent;
  button.textContent = copied ? 'Copied' : 'Not copied';
  setTimeout(() => { button.textContent = before; }, 1500);
}

// Asks before something is deleted. Resolves to true if the user agrees.
export function sure(title, text) {
  const dialog = $('sure-dialog');
  $('sure-title').textContent = title;
  $('sure-text').textContent = text;
  dialog.returnValue = '';
  $('sure-yes').onclick = () => dialog.close('yes');
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === 'yes'), { once: true });
  });
}
