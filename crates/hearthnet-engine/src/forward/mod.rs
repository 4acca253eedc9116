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
//! With latent attention (MLA), QKV gives low-rank rows, and a further phase computes queries,
//! keys and values from them. A mixture of experts regroups the rows across tiles: see [`moe`].
//!
//! Both passes compute a row with the same kernels in the same order, so the result depends neither
//! on the pass, nor on the tiles, nor on which thread does the work.

mod layer_steps;
mod moe;
mod tiling;

use std::ops::Range;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::ModelSpec;
use parking_lot::Mutex;

use super::kv::Geometry;
use super::rope_tables::RopeTables;
use super::sequence::Span;
use super::thread_pool::{PoolThread, ThreadPool};
use super::weights::{FeedForward, Layer};
use crate::kernels::{AttentionScratch, Kernels, SharedMut, grow};
use layer_steps::{Buffers, FirstOverflow, LayerRun, Rows, TileBuffers, Widths, tiles_of};
use moe::{ExpertScratch, MoeBuffers};
use tiling::{
    DECODE_TILE, PASS_TILES, PREFILL_TILE, Segment, cut, decode_rows, prefill_tile, share, units,
};

/// Everything that stays the same for all rows of a batch.
pub(super) struct EngineContext<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) kernels: Kernels,
    pub(super) thread_pool: &'a ThreadPool,
    pub(super) ropes: &'a RopeTables,
    pub(super) geometry: Geometry,
    pub(super) layers: &'a [Layer],
    /// Index of `layers[0]` among the engine's layers.
    pub(super) first: usize,
}

/// Buffers that batches reuse.
#[derive(Default)]
pub(super) struct Scratch {
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
    experts: ExpertScratch,
}

/// Location of a block output that is not finite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Overflow {
    /// Index into [`EngineContext::layers`].
    pub(super) layer: usize,
    pub(super) row: usize,
}

/// Runs `x`, the rows of all spans, through the layers. `pages` has the page table of each span.
pub(super) fn run(
    context: &EngineContext<'_>,
    scratch: &mut Scratch,
    spans: &[Span],
    pages: &[Vec<SharedMut<'_, u16>>],
    x: &mut [f32],
) -> Result<(), Overflow> {
    let widths = Widths::of(context);
    let threads = context.thread_pool.threads();
    scratch.per_thread.resize_with(threads, Mutex::default);
    let total = x.len() / widths.x;
    let overflow = FirstOverflow::default();
    let most = match widths.experts {
        0 => PREFILL_TILE * PASS_TILES * threads,
        _ => moe::PASS_ROWS,
    };
    for begin in (0..total).step_by(most) {
        let rows = begin..total.min(begin + most);
        let x = &mut x[rows.start * widths.x..rows.end * widths.x];
        grow(&mut scratch.qkv, rows.len() * widths.qkv);
        let pass = LayerRun {
            context,
            widths,
            pages,
            overflow: &overflow,
            begin,
        };
        if rows.len() <= decode_rows(threads) {
            decode_pass(&pass, scratch, spans, rows, x);
        } else {
            prefill_pass(&pass, scratch, spans, rows, x);
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
    scratch: &mut Scratch,
    spans: &[Span],
    rows: Range<usize>,
    x: &mut [f32],
) {
    let (context, widths) = (pass.context, &pass.widths);
    let threads = context.thread_pool.threads();
    let segments = cut(spans, &rows, DECODE_TILE);
    let tiles = tiles_of(widths, &segments, DECODE_TILE, x, &mut scratch.qkv);
    if scratch.tiles.len() < tiles.len() {
        scratch.tiles.resize_with(tiles.len(), TileBuffers::default);
    }
    let buffers: Vec<Buffers<'_>> = scratch
        .tiles
        .iter_mut()
        .zip(&tiles)
        .map(|(buffers, tile)| buffers.buffers(widths, tile.rows))
        .collect();
    let tiles: Vec<(&Rows<'_>, Buffers<'_>)> = tiles.iter().zip(buffers).collect();
    let units_of_heads = head_units(context, &tiles, threads);
    let per_thread = &scratch.per_thread;
    let count = rows.len();
    let pairs = scratch.moe.pairs(pass, count);

    context.thread_pool.run(&|thread| {
        let mut own = per_thread[thread.index()].lock();
        let ThreadScratch {
            attention, experts, ..
        } = &mut *own;
        // A phase: units of work, then `then` for every tile, then `last` once. Several tiles are
        // split between the threads; a single tile is done by the thread that ends the phase.
        let phase = |thread: &mut PoolThread<'_>,
                     units,
                     work: &mut dyn FnMut(usize),
                     then: Step<'_>,
                     last: &dyn Fn()| {
            if let [(rows, buffers)] = tiles[..] {
                thread.phase_then(units, work, || {
                    then(rows, buffers);
                    last();
                });
            } else {
                thread.phase(units, work);
                let tile = |tile: usize| then(tiles[tile].0, tiles[tile].1);
                thread.phase_then(tiles.len(), tile, last);
            }
        };
        // A phase whose units are panels of a matrix, for all tiles.
        let split = |thread: &mut PoolThread<'_>,
                     panels,
                     work: PanelStep<'_>,
                     then: Step<'_>,
                     last: &dyn Fn()| {
            let units = units(panels, threads);
            let mut work = |unit| {
                for (rows, buffers) in &tiles {
                    work(share(panels, units, unit), rows, *buffers);
                }
            };
            phase(thread, units, &mut work, then, last);
        };
        let nothing = &|| ();
        // SAFETY (of all steps): units of a phase have separate panels, heads, segments or tiles,
        // so that no two write the same columns or rows. They read values of earlier phases only.
        // Only `store_kv` writes pages, in a phase in which no unit reads them.
        thread.phase(tiles.len(), |tile| {
            let (rows, buffers) = tiles[tile];
            // SAFETY: separate tiles.
            unsafe { pass.attn_norm(0, rows, buffers) };
        });
        for (index, layer) in context.layers.iter().enumerate() {
            split(
                thread,
                layer.qkv.panels(),
                // SAFETY: separate panels.
                &|panels, rows, buffers| unsafe { pass.qkv(layer, panels, rows, buffers) },
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe {
                    match &layer.latent {
                        Some(latent) => pass.norm_latent(latent, rows, buffers),
                        None => pass.store_kv(index, rows, buffers),
                    }
                },
                nothing,
            );
            if let Some(latent) = &layer.latent {
                split(
                    thread,
                    latent.panels(),
                    // SAFETY: separate panels.
                    &|panels, rows, buffers| unsafe {
                        pass.expand_latent(latent, panels, rows, buffers);
                    },
                    // SAFETY: separate tiles.
                    &|rows, buffers| unsafe { pass.store_kv(index, rows, buffers) },
                    nothing,
                );
            }
            let mut attend = |unit: usize| {
                let HeadUnit {
                    tile,
                    segment,
                    kv_head,
                    ref heads,
                } = units_of_heads[unit];
                let (rows, buffers) = tiles[tile];
                let heads = heads.clone();
                // SAFETY: separate segments or heads.
                unsafe {
                    pass.attend(
                        index,
                        rows,
                        &segment,
                        kv_head,
                        heads,
                        buffers.attn,
                        attention,
                    );
                }
            };
            phase(
                thread,
                units_of_heads.len(),
                &mut attend,
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe { pass.quantise_attn(layer, rows, buffers) },
                nothing,
            );
            split(
                thread,
                layer.attn_output.panels(),
                // SAFETY: separate panels.
                &|panels, rows, buffers| unsafe {
                    // The residual stream is rounded at the end of a block only.
                    let dtype = BoundaryDtype::F32;
                    pass.add(&layer.attn_output, panels, dtype, rows, buffers);
                },
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe {
                    pass.end_attention(layer, rows, buffers);
                    pass.ffn_norm(layer, rows, buffers);
                    if let FeedForward::Experts { router, .. } = &layer.feed_forward {
                        pass.route(router, rows, buffers, pairs);
                    }
                },
                // SAFETY: all rows have their routes.
                &|| unsafe {
                    if let FeedForward::Experts { .. } = &layer.feed_forward {
                        pass.group(count, pairs);
                    }
                },
            );
            let done = |rows: &Rows<'_>, buffers: Buffers<'_>| {
                // SAFETY: separate tiles.
                unsafe {
                    pass.end_feed_forward(layer, rows, buffers);
                    pass.check(index, rows);
                    if index + 1 < context.layers.len() {
                        pass.attn_norm(index + 1, rows, buffers);
                    }
                }
            };
            match &layer.feed_forward {
                FeedForward::Dense { ffn, down } => {
                    split(
                        thread,
                        ffn.panels(),
                        // SAFETY: separate panels.
                        &|panels, rows, buffers| unsafe { pass.ffn(ffn, panels, rows, buffers) },
                        // SAFETY: separate tiles.
                        &|rows, buffers| unsafe { pass.quantise_h(down, rows, buffers) },
                        nothing,
                    );
                    split(
                        thread,
                        down.panels(),
                        // SAFETY: separate panels.
                        &|panels, rows, buffers| unsafe {
                            pass.add(down, panels, context.spec.boundary, rows, buffers);
                        },
                        &done,
                        nothing,
                    );
                }
                FeedForward::Experts { experts: all, .. } => {
                    let units = pairs.units();
                    // SAFETY: the plan is complete; separate places or panels.
                    thread.phase(units, |unit| unsafe {
                        pass.expert_gate_up(all, unit, pairs, experts);
                    });
                    let mut down = |unit: usize| {
                        // SAFETY: separate places or panels.
                        unsafe { pass.expert_down(all, unit, pairs, experts) };
                    };
                    let then = |rows: &Rows<'_>, buffers: Buffers<'_>| {
                        // SAFETY: separate tiles.
                        unsafe { pass.combine(rows, buffers, pairs) };
                        done(rows, buffers);
                    };
                    phase(thread, units, &mut down, &then, nothing);
                }
            }
        }
    });
}

type Step<'a> = &'a dyn Fn(&Rows<'_>, Buffers<'_>);
type PanelStep<'a> = &'a dyn Fn(Range<usize>, &Rows<'_>, Buffers<'_>);

/// Runs a pass that splits tiles between threads.
#[allow(unsafe_code)]
fn prefill_pass(
    pass: &LayerRun<'_>,
    scratch: &mut Scratch,
    spans: &[Span],
    rows: Range<usize>,
    x: &mut [f32],
) {
    let (context, widths) = (pass.context, &pass.widths);
    let size = prefill_tile(rows.len(), context.thread_pool.threads());
    let segments = cut(spans, &rows, size);
    let tiles = tiles_of(widths, &segments, size, x, &mut scratch.qkv);
    let per_thread = &scratch.per_thread;
    let count = rows.len();
    let pairs = scratch.moe.pairs(pass, count);

    context.thread_pool.run(&|thread| {
        let mut own = per_thread[thread.index()].lock();
        let ThreadScratch {
            tile,
            attention,
            experts,
        } = &mut *own;
        let buffers = tile.buffers(widths, size);
        // Later tiles attend to more positions, so they start first.
        let nth = |unit: usize| &tiles[tiles.len() - 1 - unit];
        // SAFETY (of all phases): a tile and the slots of its rows in the pages belong to one unit,
        // the buffers to this thread. Units share only keys and values in the pages, and a phase
        // writes those of one layer and reads those of another. (Units of experts have separate
        // places or panels.)
        thread.phase(tiles.len(), |unit| {
            // SAFETY: the unit owns the tile, its slots in the pages and the thread's buffers.
            unsafe { pass.begin_layer(0, nth(unit), buffers) };
        });
        for (index, layer) in context.layers.iter().enumerate() {
            match &layer.feed_forward {
                // SAFETY: as above; other units write keys and values of the next layer.
                FeedForward::Dense { ffn, down } => thread.phase(tiles.len(), |unit| unsafe {
                    pass.attention(index, nth(unit), buffers, attention);
                    pass.feed_forward(ffn, down, nth(unit), buffers);
                    pass.next_layer(index, nth(unit), buffers);
                }),
                FeedForward::Experts {
                    router,
                    experts: all,
                    ..
                } => {
                    // SAFETY: as above; `group` runs in one thread, after all rows have routes.
                    let attend = |unit: usize| unsafe {
                        pass.attention(index, nth(unit), buffers, attention);
                        pass.route(router, nth(unit), buffers, pairs);
                    };
                    // SAFETY: all rows have their routes, and one thread concludes the phase.
                    thread.phase_then(tiles.len(), attend, || unsafe { pass.group(count, pairs) });
                    let units = pairs.units();
                    // SAFETY: the plan is complete; units have separate places or panels.
                    thread.phase(units, |unit| unsafe {
                        pass.expert_gate_up(all, unit, pairs, experts);
                    });
                    // SAFETY: the plan is complete; units have separate places or panels.
                    thread.phase(units, |unit| unsafe {
                        pass.expert_down(all, unit, pairs, experts);
                    });
                    // SAFETY: the unit owns the tile, its slots in the pages, and the buffers.
                    thread.phase(tiles.len(), |unit| unsafe {
                        pass.combine(nth(unit), buffers, pairs);
                        pass.next_layer(index, nth(unit), buffers);
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

fn head_units(
    context: &EngineContext<'_>,
    tiles: &[(&Rows<'_>, Buffers<'_>)],
    threads: usize,
) -> Vec<HeadUnit> {
    let group = context.group();
    let segments: usize = tiles.iter().map(|(rows, _)| rows.segments.len()).sum();
    // Each unit reads keys and values, so heads are split only to keep all threads busy.
    let whole = segments * context.geometry.kv_heads;
    let split = if threads == 1 || whole >= 2 * threads || whole.is_multiple_of(threads) {
        1
    } else {
        group
    };
    let mut units = Vec::new();
    for (tile, (rows, _)) in tiles.iter().enumerate() {
        for &segment in rows.segments {
            for kv_head in 0..context.geometry.kv_heads {
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

impl EngineContext<'_> {
    /// Query heads per KV head.
    fn group(&self) -> usize {
        self.spec.heads as usize / self.geometry.kv_heads
    }
}
