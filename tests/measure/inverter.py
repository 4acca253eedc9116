#!/usr/bin/env python3
"""Trains networks that recover words from the rows that hosts receive.

    cargo run --release -p hearthnet-engine --example leakage -- --train 65536 --dump FOLDER
    python3 -m venv VENV && VENV/bin/pip install jax optax
    VENV/bin/python tests/measure/inverter.py FOLDER [--depths 1,2,4,8,15,22] [--noise 0.01,0.1]

For rows behind 1, 2, ... private layers, and for rows behind two private layers with noise of each
strength, it prints the share of tokens that are recovered:
- linear: by ridge regression to the embedding, and the nearest embedding by angle;
- network: by a network that gets the rows of the token, of the one before and of the one after it.
  It adds three layers of `--hidden` units to the linear map.

Both learn from the set `attacker` only, and recover the sets `books` and `languages` (see
`crates/hearthnet-engine/examples/leakage/dump.rs`). Training stops at the best accuracy for texts of
`attacker` that it left out. The attacker knows the strength of the noise, and learns with noise of that
strength. The last line is a JSON object with all figures.
"""
import argparse
import json
import pathlib
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Depth at which noise is added.
NOISY = 2
# Candidates of a training step, beside the tokens of its batch.
CANDIDATES = 2048
# Share of units that are left out in training.
DROPOUT = 0.1


class Set:
    """Rows of one depth, their tokens, and for each row the ones before and after it in its text."""

    def __init__(self, folder, name, depth, width):
        self.ids = np.fromfile(folder / f'{name}.ids', '<u4').astype(np.int32)
        self.texts = np.fromfile(folder / f'{name}.texts', '<u4').astype(np.int32)
        self.clean = np.fromfile(folder / f'{name}.{depth}', '<f4').reshape(-1, width)
        order = np.argsort(self.texts, kind='stable')
        same = self.texts[order[1:]] == self.texts[order[:-1]]
        # Number of the row of zeros that stands before and behind each text.
        none = len(self.ids)
        self.before, self.after = np.full(none, none), np.full(none, none)
        self.before[order[1:][same]] = order[:-1][same]
        self.after[order[:-1][same]] = order[1:][same]

    def set_rows(self, rows, mean, scale):
        none = np.zeros((1, rows.shape[1]), np.float32)
        self.rows = np.concatenate([(rows - mean) * scale, none])

    def window(self, at):
        return np.concatenate([self.rows[at], self.rows[self.before[at]], self.rows[self.after[at]]], 1)


def disturb(rows, strength, random):
    """Adds random signs, as the caller does. `strength`: their norm as a part of the row's."""
    if not strength:
        return rows
    size = strength * np.linalg.norm(rows, axis=1, keepdims=True) / rows.shape[1] ** 0.5
    signs = random.integers(0, 2, rows.shape, np.int8) * 2 - 1
    return (rows + size * signs).astype(np.float32)


def ridge(rows, wanted):
    """Linear map with a bias as its last row."""
    x = np.concatenate([rows, np.ones((len(rows), 1), np.float32)], 1)
    a = (x.T @ x).astype(np.float64)
    a[np.arange(len(a) - 1), np.arange(len(a) - 1)] += len(rows) * 1e-4
    return np.linalg.solve(a, (x.T @ wanted).astype(np.float64)).astype(np.float32)


def new_network(linear, hidden, key):
    width = linear.shape[1]
    sizes = [3 * width, hidden, hidden, width]
    layers = []
    for number, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        weights = jax.random.normal(jax.random.fold_in(key, number), (inputs, outputs)) / inputs ** 0.5
        # At first the network is the linear map.
        layers.append((weights * (number < 2), jnp.zeros(outputs)))
    return {'linear': jnp.asarray(linear), 'layers': layers, 'scale': jnp.asarray(3.0)}


def network(state, window, key=None):
    """Directions in the space of embeddings. With a key, units are left out at random."""
    linear = state['linear']
    x = window
    for number, (weights, bias) in enumerate(state['layers']):
        x = x @ weights + bias
        if number < 2:
            x = jax.nn.gelu(x)
            if key is not None:
                stays = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - DROPOUT, x.shape)
                x = jnp.where(stays, x / (1 - DROPOUT), 0)
    return unit(window[:, :linear.shape[1]] @ linear[:-1] + linear[-1] + x)


def unit(rows):
    return rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def loss(state, window, ids, candidates, table, key):
    """Cross-entropy of the right token among candidates, the first of which are the batch's tokens."""
    scores = network(state, window, key) @ table[candidates].T * jnp.exp(state['scale'])
    own = jnp.arange(len(ids))
    again = (candidates[None, :] == ids[:, None]) & (jnp.arange(len(candidates))[None, :] != own[:, None])
    scores = jnp.where(again, -1e9, scores)
    return optax.softmax_cross_entropy_with_integer_labels(scores, own).mean()


@jax.jit
def ranks_of(mapped, ids, table):
    scores = unit(mapped) @ table.T
    return (scores > jnp.take_along_axis(scores, ids[:, None], 1)).sum(1)


def recovered(mapping, one, at, table):
    """Ranks of the right tokens among all, by angle: 0 is the first choice."""
    parts = (at[begin:begin + 512] for begin in range(0, len(at), 512))
    return np.concatenate([ranks_of(mapping(one.window(part)), one.ids[part], table) for part in parts])


def shares(ranks):
    return {'first': round(100 * float((ranks < 1).mean()), 1), 'five': round(100 * float((ranks < 5).mean()), 1)}


def train(state, learned, kept, left_out, table, options, refresh, random):
    """Trains, and returns the best state with its accuracy. `refresh` draws new noise for an epoch."""
    steps = options.epochs * (len(kept) // options.batch)
    optimiser = optax.adamw(optax.cosine_onecycle_schedule(steps, options.rate, 0.1), weight_decay=0.01)
    memory, key = optimiser.init(state), jax.random.key(1)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(state, memory, window, ids, candidates, key):
        slopes = jax.grad(loss)(state, window, ids, candidates, table, key)
        updates, memory = optimiser.update(slopes, memory, state)
        return optax.apply_updates(state, updates), memory

    trained = jax.jit(network)
    best, best_state = -1.0, None
    for epoch in range(options.epochs):
        refresh()
        order = random.permutation(kept)
        for at in range(0, len(order) - options.batch + 1, options.batch):
            rows = order[at:at + options.batch]
            ids = learned.ids[rows]
            candidates = np.concatenate([ids, random.integers(0, len(table), CANDIDATES, np.int32)])
            state, memory = step(state, memory, learned.window(rows), ids, candidates,
                                 jax.random.fold_in(key, epoch * len(kept) + at))
        right = shares(recovered(lambda window: trained(state, window), learned, left_out, table))['first']
        if right > best:
            best, best_state = right, jax.tree.map(jnp.copy, state)
    return best_state, best


def measure(folder, depth, strength, options, raw_table):
    width, random = raw_table.shape[1], np.random.default_rng(1)
    table = jnp.asarray(raw_table / np.maximum(np.linalg.norm(raw_table, axis=1, keepdims=True), 1e-9))
    learned = Set(folder, 'attacker', depth, width)
    targets = {name: Set(folder, name, depth, width) for name in ('books', 'languages')}
    noisy = disturb(learned.clean, strength, random)
    mean, scale = noisy.mean(0), 1 / np.maximum(noisy.std(0), 1e-6)
    learned.set_rows(noisy, mean, scale)
    for one in targets.values():
        one.set_rows(disturb(one.clean, strength, random), mean, scale)

    def refresh():
        if strength:
            learned.set_rows(disturb(learned.clean, strength, random), mean, scale)

    linear = ridge(learned.rows[:-1], raw_table[learned.ids])
    # Every 20th text is left out.
    is_left_out = learned.texts % 20 == 7
    kept, left_out = np.flatnonzero(~is_left_out), np.flatnonzero(is_left_out)[:4096]
    state = new_network(linear, options.hidden, jax.random.key(2))
    begin = time.monotonic()
    state, own = train(state, learned, kept, left_out, table, options, refresh, random)
    found = {'depth': depth, 'noise': strength, 'tokens': len(kept), 'left_out': own,
             'seconds': round(time.monotonic() - begin)}
    names = (folder / 'languages').read_text(encoding='utf-8').split('\n')
    trained = jax.jit(network)
    for name, one in targets.items():
        everything = np.arange(len(one.ids))
        by_map = recovered(lambda window: window[:, :width] @ linear[:-1] + linear[-1], one, everything, table)
        by_network = recovered(lambda window: trained(state, window), one, everything, table)
        found[name] = {'tokens': len(one.ids), 'linear': shares(by_map), 'network': shares(by_network)}
        if name == 'languages':
            found['each'] = {language: shares(by_network[one.texts == number])['first']
                             for number, language in enumerate(names)}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--depths', default='1,2,4,8,15,22')
    parser.add_argument('--noise', default='', help='strengths, behind two private layers')
    parser.add_argument('--hidden', type=int, default=768)
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--batch', type=int, default=512)
    parser.add_argument('--rate', type=float, default=1e-3)
    options = parser.parse_args()
    # SmolLM2-135M has 49,152 tokens.
    table = np.fromfile(options.folder / 'table', '<f4').reshape(49_152, -1)
    cases = [(int(depth), 0.0) for depth in options.depths.split(',') if depth]
    cases += [(NOISY, float(noise)) for noise in options.noise.split(',') if noise]
    all_found = []
    print('| private first layers | noise | books: linear | first five | network | first five | languages: linear '
          '| network | first five |')
    print('|---|---|---|---|---|---|---|---|---|')
    for depth, strength in cases:
        found = measure(options.folder, depth, strength, options, table)
        all_found.append(found)
        books, languages = found['books'], found['languages']
        cells = [books['linear']['first'], books['linear']['five'], books['network']['first'],
                 books['network']['five'], languages['linear']['first'], languages['network']['first'],
                 languages['network']['five']]
        print(f'| {depth} | {strength:.1%} | ' + ' | '.join(f'{cell}%' for cell in cells) + ' |', flush=True)
    print(json.dumps(all_found))


if __name__ == '__main__':
    main()
