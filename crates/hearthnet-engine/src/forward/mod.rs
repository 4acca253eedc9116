//! Runs a batch of rows through the layers.
//!
//! The batch is split into *tiles* of rows. Per layer, a tile goes through these steps:
//!
//! ```text
//! x --norm, quantise--> act --QKV--> qkv --RoPE, store K and V--> pages
//! q, pages --attention--> attn --quantise--> act --O, add--> x
//! x --norm, quantise--> act --gate, up, SwiGLU--> h --quantise--> act --down, add, round--> x
//! ```
//!
//! Two passes split that work between the threads of the pool:
//!
//! - *Decode pass* ([`decode_pass`]), for few rows: splits the panels of a matrix, so that every
//!   thread computes some outputs of all rows. Five phases per layer; the thread that finishes a
//!   phase does the work between two matrices.
//! - *Prefill pass* ([`prefill_pass`]), for many rows: splits the tiles. A thread takes a tile
//!   from attention to the next layer's keys and values. One phase per layer.
//!
//! A layer with a recurrence (gated delta rule, gated short convolution, Mamba-2) has a phase for it
//! instead of attention, or two: it needs the rows of a sequence one after another, and is split by
//! heads or channels: see [`recurrence`].
//!
//! A layer may lack the part with attention or a recurrence, or the feed-forward layer.
//!
//! A layer may attend to the keys and values of an earlier one, and then has queries only. A layer
//! with a per-layer input has two more matrices behind the feed-forward layer, which apply it to
//! the residual stream. (No layer has such an input and experts.)
//!
//! In an encoder, a row attends to later rows of its text, too: one pass has all rows of a text, and
//! a phase stores the keys and values of all of them before another one reads them.
//!
//! With latent attention (MLA), QKV gives low-rank rows, and further phases expand or absorb them:
//! see [`latent`]. A mixture of experts regroups the rows across tiles: see [`moe`].
//!
//! Both passes compute a row with the same kernels in the same order, so the result depends neither
//! on the pass, nor on the tiles, nor on which thread does the work: see [`stages`].

mod attention;
mod convolution;
mod delta;
mod experts;
mod feed_forward;
mod latent;
mod mamba;
mod moe;
mod recurrence;
mod stages;
mod tiles;
mod tiling;

use std::ops::Range;

use parking_lot::Mutex;

use crate::kernels::AttentionScratch;
use crate::layer::FeedForward;
use crate::memory::Views;
use crate::sequence::Span;
use crate::thread_pool::PoolThread;
use experts::ExpertScratch;
use moe::MoeBuffers;
use recurrence::RecurrenceScratch;
use stages::{FirstOverflow, LayerRun, Stage};
use tiles::{Rows, Tile, TileBuffers, Widths, shared, tiles_of};
use tiling::{
    DECODE_TILE, PASS_TILES, PREFILL_TILE, Segment, UNITS, cut, decode_rows, prefill_tile,
};

pub use moe::{Route, choose};
pub(crate) use stages::Overflow;
pub(crate) use tiles::EngineContext;
pub(crate) use tiling::{share, units};

/// Buffers that batches reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Queries, keys and values of all rows of a pass.
    qkv: Vec<f32>,
    /// Buffers of the tiles of a decode pass.
    tiles: Vec<TileBuffers>,
    moe: MoeBuffers,
    per_thread: Vec<Mutex<ThreadScratch>>,
}

#[derive(Default)]
struct ThreadScratch {
    tile: TileBuffers,
    attention: AttentionScratch,
    recurrence: RecurrenceScratch,
    experts: ExpertScratch,
}

/// Runs `x`, the rows of all spans, through the layers. `views` has the memory of each span.
pub(crate) fn run(
    context: &EngineContext<'_>,
    scratch: &mut Scratch,
    spans: &[Span],
    views: &Views<'_>,
    x: &mut [f32],
) -> Result<(), Overflow> {
    let widths = Widths::of(context);
    let threads = context.thread_pool.threads();
    let Scratch {
        qkv,
        tiles,
        moe,
        per_thread,
    } = scratch;
    per_thread.resize_with(threads, Mutex::default);
    let total = x.len() / widths.x;
    let overflow = FirstOverflow::default();
    let most = match widths.experts {
        // Rows of a text attend to all others of it.
        _ if context.spec.encoder.is_some() => total.max(1),
        0 => PREFILL_TILE * PASS_TILES * threads,
        _ => moe::PASS_ROWS,
    };
    for begin in (0..total).step_by(most) {
        let rows = begin..total.min(begin + most);
        let x = &mut x[rows.start * widths.x..rows.end * widths.x];
        let qkv = shared(qkv, rows.len() * widths.qkv);
        let few = rows.len() <= decode_rows(threads);
        let size = match few {
            true => DECODE_TILE,
            false => prefill_tile(rows.len(), threads),
        };
        let segments = cut(spans, &rows, size);
        let whole = cut(spans, &rows, rows.len());
        let pass = LayerRun {
            context,
            widths,
            pages: &views.pages,
            qkv,
            segments: whole.first().map_or(&[], |segments| segments),
            states: &views.states,
            pairs: moe.pairs(&widths, threads, rows.len()),
            overflow: &overflow,
            rows,
        };
        let rows = tiles_of(&widths, &segments, size, x, qkv);
        if few {
            decode_pass(&pass, &rows, tiles, per_thread);
        } else {
            prefill_pass(&pass, &rows, size, per_thread);
        }
        if let Some(overflow) = overflow.get() {
            return Err(overflow);
        }
    }
    Ok(())
}

/// Runs a pass that splits panels between threads.
#[allow(unsafe_code)]
fn decode_pass(
    pass: &LayerRun<'_>,
    rows: &[Rows<'_>],
    buffers: &mut Vec<TileBuffers>,
    per_thread: &[Mutex<ThreadScratch>],
) {
    let context = pass.context;
    let threads = context.thread_pool.threads();
    if buffers.len() < rows.len() {
        buffers.resize_with(rows.len(), TileBuffers::default);
    }
    let tiles = rows.iter().zip(buffers);
    let tiles: Vec<Tile<'_>> = tiles
        .map(|(&rows, buffers)| Tile {
            rows,
            buffers: buffers.buffers(&pass.widths, rows.count),
        })
        .collect();
    // Layers may differ in their KV heads.
    let mut units_of_heads: Vec<(usize, Vec<HeadUnit>)> = Vec::new();
    for layer in context.layers {
        let kv_heads = layer.place.kv_heads;
        if units_of_heads.iter().all(|(known, _)| *known != kv_heads) {
            let units = head_units(context.group(layer), kv_heads, &tiles, threads);
            units_of_heads.push((kv_heads, units));
        }
    }

    context.thread_pool.run(&|thread| {
        let mut own = per_thread[thread.index()].lock();
        let ThreadScratch {
            attention,
            recurrence,
            experts,
            ..
        } = &mut *own;
        // A phase: units of work, then `then` for every tile, then `last` once. Several tiles are
        // split between the threads; a single tile is done by the thread that ends the phase.
        let phase = |thread: &mut PoolThread<'_>,
                     units,
                     work: &mut dyn FnMut(usize),
                     then: &dyn Fn(Tile<'_>),
                     last: &dyn Fn()| {
            if let [tile] = tiles[..] {
                thread.phase_then(units, work, || {
                    then(tile);
                    last();
                });
            } else {
                thread.phase(units, work);
                thread.phase_then(tiles.len(), |tile| then(tiles[tile]), last);
            }
        };
        // SAFETY (of all steps): units of a phase have separate panels, heads, segments or tiles,
        // so that no two write the same columns or rows. They read values of earlier phases only.
        // Only `store_kv` writes pages, in a phase in which no unit reads them.
        let run = |thread: &mut PoolThread<'_>, index, stages: &[Stage]| {
            for &stage in stages {
                let panels = pass.panels(index, stage);
                let units = units(panels, threads, UNITS);
                let mut work = |unit| {
                    for tile in &tiles {
                        // SAFETY: separate panels.
                        unsafe { pass.multiply(index, stage, share(panels, units, unit), *tile) };
                    }
                };
                phase(
                    thread,
                    units,
                    &mut work,
                    // SAFETY: separate tiles.
                    &|tile| unsafe { pass.finish(index, stage, tile) },
                    // SAFETY: all tiles are finished.
                    &|| unsafe { pass.conclude(index, stage) },
                );
            }
        };
        thread.phase(tiles.len(), |tile| {
            // SAFETY: separate tiles.
            unsafe { pass.attn_norm(0, tiles[tile]) };
        });
        for (index, layer) in context.layers.iter().enumerate() {
            run(thread, index, Stage::before_attention(layer));
            let units = pass.convolution_units(layer);
            // SAFETY: separate sequences or channels.
            thread.phase(units, |unit| unsafe {
                pass.convolve_unit(layer, unit, recurrence);
            });
            let mut units_of_heads = units_of_heads.iter();
            let own = units_of_heads.find(|(kv_heads, _)| *kv_heads == layer.place.kv_heads);
            let units_of_heads = own.map_or(&[][..], |(_, units)| units);
            let mut attend = |unit: usize| {
                let HeadUnit {
                    tile,
                    segment,
                    kv_head,
                    ref heads,
                } = units_of_heads[unit];
                let heads = (kv_head, heads.clone());
                // SAFETY: separate segments or heads.
                unsafe { pass.attend(index, tiles[tile], &segment, heads, attention) };
            };
            // SAFETY: separate tiles.
            let quantise = |tile: Tile<'_>| unsafe { pass.quantise_attn(index, tile) };
            match pass.recurrence_units(layer) {
                Some(units) => {
                    let mut recur = |unit: usize| {
                        // SAFETY: separate sequences, heads or channels.
                        unsafe { pass.recur(layer, unit, recurrence) };
                    };
                    phase(thread, units, &mut recur, &quantise, &|| ());
                }
                None if layer.has_mixer() => {
                    let units = units_of_heads.len();
                    phase(thread, units, &mut attend, &quantise, &|| ());
                }
                None => {
                    // SAFETY: separate tiles.
                    let begin = |tile: usize| unsafe {
                        pass.begin_feed_forward(layer, tiles[tile]);
                    };
                    thread.phase(tiles.len(), begin);
                }
            }
            run(thread, index, Stage::after_attention(layer));
            match &layer.feed_forward {
                FeedForward::Dense { .. } | FeedForward::None => {}
                FeedForward::Experts { experts: all, .. } => {
                    let units = pass.pairs.units();
                    // SAFETY: the plan is complete; separate places or panels.
                    thread.phase(units, |unit| unsafe {
                        pass.expert_gate_up(all, unit, experts);
                    });
                    let mut down = |unit: usize| {
                        // SAFETY: separate places or panels.
                        unsafe { pass.expert_down(all, unit, experts) };
                    };
                    let then = |tile: Tile<'_>| {
                        // SAFETY: separate tiles.
                        unsafe {
                            pass.combine(index, tile);
                            pass.end_feed_forward(index, tile);
                        }
                    };
                    phase(thread, units, &mut down, &then, &|| ());
                }
            }
        }
    });
}

/// Runs a pass that splits tiles, of `size` rows at most, between threads.
#[allow(unsafe_code)]
fn prefill_pass(
    pass: &LayerRun<'_>,
    rows: &[Rows<'_>],
    size: usize,
    per_thread: &[Mutex<ThreadScratch>],
) {
    let context = pass.context;
    context.thread_pool.run(&|thread| {
        let mut own = per_thread[thread.index()].lock();
        let ThreadScratch {
            tile,
            attention,
            recurrence,
            experts,
        } = &mut *own;
        let buffers = tile.buffers(&pass.widths, size);
        // Later tiles attend to more positions, so they start first.
        let nth = |unit: usize| Tile {
            rows: rows[rows.len() - 1 - unit],
            buffers,
        };
        // SAFETY (of all phases): a tile and the slots of its rows in the pages belong to one unit,
        // the buffers to this thread. Units share only keys and values in the pages, and a phase
        // writes those of one layer and reads those of another. (Units of experts have separate
        // places or panels.)
        thread.phase(rows.len(), |unit| {
            // SAFETY: the unit owns the tile, its slots in the pages and the thread's buffers.
            unsafe {
                pass.attn_norm(0, nth(unit));
                pass.before_attention(0, nth(unit));
            }
        });
        for (index, layer) in context.layers.iter().enumerate() {
            // SAFETY: separate sequences or channels; all rows are complete.
            thread.phase(pass.convolution_units(layer), |unit| unsafe {
                pass.convolve_unit(layer, unit, recurrence);
            });
            if let Some(units) = pass.recurrence_units(layer) {
                // SAFETY: separate sequences, heads or channels; all rows are complete.
                thread.phase(units, |unit| unsafe {
                    pass.recur(layer, unit, recurrence);
                });
            }
            let stages = Stage::after_attention(layer);
            match &layer.feed_forward {
                FeedForward::Dense { .. } | FeedForward::None => {
                    // SAFETY: as above; other units write keys and values of the next layer.
                    thread.phase(rows.len(), |unit| unsafe {
                        pass.attention(index, nth(unit), attention);
                        pass.through(index, stages, nth(unit));
                        pass.before_attention(index + 1, nth(unit));
                    });
                }
                FeedForward::Experts { experts: all, .. } => {
                    // SAFETY: as above.
                    let attend = |unit: usize| unsafe {
                        pass.attention(index, nth(unit), attention);
                        pass.through(index, stages, nth(unit));
                    };
                    // SAFETY: all rows have their routes, and one thread concludes the phase.
                    let plan = || unsafe { pass.conclude(index, Stage::Router) };
                    thread.phase_then(rows.len(), attend, plan);
                    let units = pass.pairs.units();
                    // SAFETY: the plan is complete; units have separate places or panels.
                    thread.phase(units, |unit| unsafe {
                        pass.expert_gate_up(all, unit, experts);
                    });
                    // SAFETY: the plan is complete; units have separate places or panels.
                    thread.phase(units, |unit| unsafe {
                        pass.expert_down(all, unit, experts);
                    });
                    // SAFETY: the unit owns the tile, its slots in the pages, and the buffers.
                    thread.phase(rows.len(), |unit| unsafe {
                        pass.combine(index, nth(unit));
                        pass.end_feed_forward(index, nth(unit));
                        pass.before_attention(index + 1, nth(unit));
                    });
                }
            }
        }
    });
}

/// Unit of attention: a segment of a tile, and some query heads that share a KV head.
struct HeadUnit {
    tile: usize,
    segment: Segment,
    kv_head: usize,
    /// Indices among the query heads that share the KV head.
    heads: Range<usize>,
}

fn head_units(group: usize, kv_heads: usize, tiles: &[Tile<'_>], threads: usize) -> Vec<HeadUnit> {
    let segments: usize = tiles.iter().map(|tile| tile.rows.segments.len()).sum();
    // Each unit reads keys and values, so heads are split only to keep all threads busy.
    let whole = segments * kv_heads;
    let split = if threads == 1 || whole >= 2 * threads || whole.is_multiple_of(threads) {
        1
    } else {
        group
    };
    let mut units = Vec::new();
    for (tile, Tile { rows, .. }) in tiles.iter().enumerate() {
        for &segment in rows.segments {
            for kv_head in 0..kv_heads {
                for unit in 0..split {
                    let heads = share(group, split, unit);
                    units.push(HeadUnit {
                        tile,
                        segment,
                        kv_head,
                        heads,
                    });
                }
            }
        }
    }
    units
}
