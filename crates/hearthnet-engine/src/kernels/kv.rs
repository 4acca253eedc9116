//! Layout of the key/value cache.
//!
//! A page holds [`PAGE`] positions of one layer and one key/value head, as
//! binary16: first the keys in blocks of 16 positions, `[position / 16][head_dim][16]`,
//! so that a register holds one component of 16 keys, then the values,
//! `[position][head_dim]`.

use super::lanes::{LANES, Lanes};
use super::shared::SharedMut;
use hearthnet_files::floats::f32_to_f16;

/// Positions in a page.
pub const PAGE: usize = 32;

/// Number of 16-bit cells in a page for heads of `head_dim` values.
pub const fn page_len(head_dim: usize) -> usize {
    2 * PAGE * head_dim
}

/// Cell of component `i` of the key at `slot` (position modulo [`PAGE`]).
#[inline(always)]
pub const fn key_cell(head_dim: usize, slot: usize, i: usize) -> usize {
    (slot / LANES * head_dim + i) * LANES + slot % LANES
}

/// Cell of component `i` of the value at `slot`.
#[inline(always)]
pub const fn value_cell(head_dim: usize, slot: usize, i: usize) -> usize {
    (PAGE + slot) * head_dim + i
}

/// Writes one position's key and value, rounded to binary16 (nearest even).
///
/// # Safety
/// As [`Lanes`]; no other thread reads or writes the cells of this slot during the call. The
/// caller has called [`check`].
#[inline(always)]
pub(super) unsafe fn store<V: Lanes>(
    page: SharedMut<'_, u16>,
    slot: usize,
    key: &[f32],
    value: &[f32],
) {
    let d = key.len();
    // Keys of 16 positions are interleaved, so the components of one key are strided.
    let (keys, values) = (
        page.at(key_cell(d, slot, 0)),
        page.at(value_cell(d, slot, 0)),
    );
    let whole = d / LANES * LANES;
    // SAFETY: the cells of the slot exist (key cells `LANES` apart, value cells adjacent); `key`
    // and `value` have `d` values.
    unsafe {
        let mut cells = [0u16; LANES];
        for i in (0..whole).step_by(LANES) {
            V::load(key.as_ptr().add(i)).store_f16(cells.as_mut_ptr());
            for (j, cell) in cells.iter().enumerate() {
                keys.add((i + j) * LANES).write(*cell);
            }
            V::load(value.as_ptr().add(i)).store_f16(values.add(i));
        }
        for i in whole..d {
            keys.add(i * LANES).write(f32_to_f16(key[i]));
            values.add(i).write(f32_to_f16(value[i]));
        }
    }
}

pub(super) fn check(len: usize, slot: usize, key: usize, value: usize) {
    assert_eq!(len, page_len(key), "a page of another head width");
    assert_eq!(key, value, "key and value differ in length");
    assert!(slot < PAGE, "a slot beyond the page");
}
