//! Layout of the key/value cache.
//!
//! A page holds [`PAGE`] positions of one layer and one key/value head: first the keys in blocks of
//! 16 positions, `[position / 16][head_dim][16]`, so that a register holds one component of 16 keys,
//! then the values, `[position][head_dim]`.
//!
//! As binary16, a page has a cell for each of them. As `q8_0`, each is a byte, the quant of a value in
//! a block of 32. Behind the bytes follow the scales of the blocks as bfloat16, in the layout of a
//! page for heads of `head_dim / 32` values.

use hearthnet_files::floats::{bf16_to_f32, f32_to_f16, round_to_bf16};
use hearthnet_files::spec::CacheDtype;

use super::lanes::{LANES, Lanes, ROUND_MAGIC};
use super::prefetch_l2;
use super::rows::QUANT_FLOOR;
use super::shared::SharedMut;

/// Positions in a page.
pub const PAGE: usize = 32;

const CACHE_LINE: usize = 64;

/// Values of a head with a common scale in `q8_0`.
const BLOCK: usize = CacheDtype::BLOCK;

/// Number of 16-bit cells in a page for heads of `head_dim` values.
pub const fn page_len(head_dim: usize, cache: CacheDtype) -> usize {
    cache.bytes((2 * PAGE * head_dim) as u64) as usize / size_of::<u16>()
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

/// Number format of the cells of a page, as the kernels read it.
///
/// # Safety
/// Of the functions: see [`Lanes`]. `page` points to a page of this format for heads of `d` values,
/// which has the cells that are read.
pub(super) trait Cells {
    const CACHE: CacheDtype;
    /// Bytes of a cell.
    const SIZE: usize;

    /// Scales of component `i` of the keys at 16 slots from `slot` on, a multiple of 16.
    unsafe fn key_scales<V: Lanes>(page: *const u16, d: usize, slot: usize, i: usize) -> V;

    /// Scale of component `i` of the value at `slot`, in all lanes.
    unsafe fn value_scale<V: Lanes>(page: *const u16, d: usize, slot: usize, i: usize) -> V;

    /// Sixteen adjacent cells, widened (exact).
    unsafe fn load<V: Lanes>(page: *const u16, cell: usize, scale: V) -> V;
}

/// Cells of [`CacheDtype::F16`], which have no scales.
pub(super) struct F16;

/// Cells of [`CacheDtype::Q8_0`].
pub(super) struct Q8;

impl Cells for F16 {
    const CACHE: CacheDtype = CacheDtype::F16;
    const SIZE: usize = size_of::<u16>();

    #[inline(always)]
    unsafe fn key_scales<V: Lanes>(_: *const u16, _: usize, _: usize, _: usize) -> V {
        // SAFETY: the caller ensures the instruction set.
        unsafe { V::splat(1.0) }
    }

    #[inline(always)]
    unsafe fn value_scale<V: Lanes>(_: *const u16, _: usize, _: usize, _: usize) -> V {
        // SAFETY: the caller ensures the instruction set.
        unsafe { V::splat(1.0) }
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(page: *const u16, cell: usize, _: V) -> V {
        // SAFETY: by the contract.
        unsafe { V::load_f16(page.add(cell)) }
    }
}

impl Cells for Q8 {
    const CACHE: CacheDtype = CacheDtype::Q8_0;
    const SIZE: usize = size_of::<i8>();

    #[inline(always)]
    unsafe fn key_scales<V: Lanes>(page: *const u16, d: usize, slot: usize, i: usize) -> V {
        // SAFETY: by the contract.
        unsafe { V::load_bf16(page.add(PAGE * d + key_cell(d / BLOCK, slot, i / BLOCK))) }
    }

    #[inline(always)]
    unsafe fn value_scale<V: Lanes>(page: *const u16, d: usize, slot: usize, i: usize) -> V {
        // SAFETY: by the contract.
        unsafe {
            let scale = page.add(PAGE * d + value_cell(d / BLOCK, slot, i / BLOCK));
            V::splat(bf16_to_f32(*scale))
        }
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(page: *const u16, cell: usize, scale: V) -> V {
        // SAFETY: by the contract.
        unsafe { V::load_i8(page.cast::<i8>().add(cell)).mul(scale) }
    }
}

/// Prefetches `len` cells of a page, from `first` on.
#[inline(always)]
pub(super) fn fetch<E: Cells>(page: *const u16, first: usize, len: usize) {
    let bytes = page.cast::<u8>().wrapping_add(first * E::SIZE);
    for line in (0..len * E::SIZE).step_by(CACHE_LINE) {
        prefetch_l2(bytes.wrapping_add(line));
    }
}

/// Prefetches a scale of a page for heads of `d` values, if it has scales.
#[inline(always)]
pub(super) fn fetch_scale<E: Cells>(page: *const u16, d: usize, scale: usize) {
    if E::CACHE == CacheDtype::Q8_0 {
        prefetch_l2(page.wrapping_add(PAGE * d + scale).cast());
    }
}

/// Writes one position's key and value in the format of the cache.
///
/// # Safety
/// As [`Lanes`]; no other thread reads or writes the cells of this slot during the call. The
/// caller has called [`check`].
#[inline(always)]
pub(super) unsafe fn store<V: Lanes>(
    page: SharedMut<'_, u16>,
    cache: CacheDtype,
    slot: usize,
    key: &[f32],
    value: &[f32],
) {
    // SAFETY: both have the same contract.
    unsafe {
        match cache {
            CacheDtype::F16 => store_f16::<V>(page, slot, key, value),
            CacheDtype::Q8_0 => store_q8::<V>(page, slot, key, value),
        }
    }
}

/// # Safety
/// As [`store`].
#[inline(always)]
unsafe fn store_f16<V: Lanes>(page: SharedMut<'_, u16>, slot: usize, key: &[f32], value: &[f32]) {
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

/// # Safety
/// As [`store`].
#[inline(always)]
unsafe fn store_q8<V: Lanes>(page: SharedMut<'_, u16>, slot: usize, key: &[f32], value: &[f32]) {
    let d = key.len();
    let (quants, scales) = (page.at(0).cast::<i8>(), page.at(PAGE * d));
    let mut block = [0; BLOCK];
    for (b, (key, value)) in key
        .chunks_exact(BLOCK)
        .zip(value.chunks_exact(BLOCK))
        .enumerate()
    {
        // SAFETY: the page has the bytes of the slot and the scales of its blocks.
        unsafe {
            let scale = quantise::<V>(key, &mut block);
            for (i, quant) in block.iter().enumerate() {
                quants.add(key_cell(d, slot, b * BLOCK + i)).write(*quant);
            }
            scales.add(key_cell(d / BLOCK, slot, b)).write(scale);
            let scale = quantise::<V>(value, &mut block);
            let values = quants.add(value_cell(d, slot, b * BLOCK));
            values.copy_from_nonoverlapping(block.as_ptr(), BLOCK);
            scales.add(value_cell(d / BLOCK, slot, b)).write(scale);
        }
    }
}

/// Quantises a block, and returns the bits of its scale.
///
/// # Safety
/// As [`Lanes`]; `x` has [`BLOCK`] values.
#[inline(always)]
unsafe fn quantise<V: Lanes>(x: &[f32], to: &mut [i8; BLOCK]) -> u16 {
    // SAFETY: both have 32 values; the caller ensures the instruction set.
    unsafe {
        let (lo, hi) = (V::load(x.as_ptr()), V::load(x.as_ptr().add(LANES)));
        let m = f32::from_bits(lo.max_magnitude(hi).top_bits());
        let scale = if m >= QUANT_FLOOR && m.is_finite() {
            // The quotient of `m` and the rounded scale is below 127.5.
            let scale = round_to_bf16(m / 127.0);
            let (inverse, magic) = (V::splat(1.0 / scale), V::splat(ROUND_MAGIC));
            lo.fma(inverse, magic).store_low_bytes(to.as_mut_ptr());
            hi.fma(inverse, magic)
                .store_low_bytes(to.as_mut_ptr().add(LANES));
            scale
        } else {
            // If a value is not finite, the scale is NaN, which reaches every output.
            *to = [0; BLOCK];
            if m.is_finite() { 0.0 } else { f32::NAN }
        };
        (scale.to_bits() >> 16) as u16
    }
}

pub(super) fn check(len: usize, cache: CacheDtype, slot: usize, key: usize, value: usize) {
    assert!(cache.fits(key), "a head width that is not whole blocks");
    assert_eq!(len, page_len(key, cache), "a page of another head width");
    assert_eq!(key, value, "key and value differ in length");
    assert!(slot < PAGE, "a slot beyond the page");
}
