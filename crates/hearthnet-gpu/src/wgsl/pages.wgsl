// Pages of 32 positions of one key/value head: `32 * head_dim` words of two binary16 components.
// Keys first, [pair of components][slot], then values, [slot][pair of components].
fn key_word(slot: u32, pair: u32) -> u32 { return pair * 32u + slot; }
fn value_word(head_dim: u32, slot: u32, pair: u32) -> u32 { return 16u * head_dim + slot * (head_dim >> 1u) + pair; }
