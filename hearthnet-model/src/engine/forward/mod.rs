//! A batch of rows through the layers.
//!
//! The batch is cut into *tiles* of rows. Per layer, a tile goes through these steps:
//!
//! ```text
//! x --norm, quantise--> act --QKV--> qkv --RoPE, store K and V--> pages
//! q, pages --attention--> attn --quantise--> act --O, add--> x
//! x --norm, quantise--> act --gate, up, SwiGLU--> h --quantise--> act --down, add, round--> x
//! ```
//!
//! Two ways to share that work between the team's members:
//!
//! - *Wide*, for few rows (decoding): a matrix's panels are split, every member computes some
//!   outputs of all rows. Five phases per layer; what lies between two matrices is done by the
//!   member that finishes a phase.
//! - *Tall*, for many rows (prefill): a member takes a tile through everything from attention to
//!   the next layer's keys and values. One phase per layer.
//!
//! Where attention is latent, QKV gives narrow rows, and a further phase makes queries, keys and
//! values of them. Where the feed-forward layer is a mixture of experts, both ways leave the tiles for it: see
//! [`moe`].
//!
//! A row's values are computed by the same kernels in the same order either way, so nothing
//! depends on the choice, on the tiles, or on who does what.

mod moe;
mod steps;
mod tiling;

use std::ops::Range;

use parking_lot::Mutex;

use super::kv::Geometry;
use super::rope_tables::RopeTables;
use super::sequence::Span;
use super::thread_pool::{Member, ThreadPool};
use super::weights::{Feed, Layer};
use crate::BoundaryDtype;
use crate::kernels::{AttentionScratch, Kernels, SharedMut, grow};
use crate::spec::ModelSpec;
use moe::{ExpertScratch, Mixture};
use steps::{Buffers, FirstOverflow, Pass, Rows, Widths, Work, tiles_of};
use tiling::{PASS_TILES, Piece, TALL_TILE, WIDE_TILE, cut, share, tall_tile, units, wide_rows};

/// What does not change from batch to batch.
pub(super) struct Parts<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) kernels: Kernels,
    pub(super) thread_pool: &'a ThreadPool,
    pub(super) ropes: &'a RopeTables,
    pub(super) geometry: Geometry,
    /// The layers to run, and the index of the first among the engine's.
    pub(super) layers: &'a [Layer],
    pub(super) first: usize,
}

/// Memory that batches reuse.
#[derive(Default)]
pub(super) struct Scratch {
    /// Queries, keys and values of all rows of a pass.
    qkv: Vec<f32>,
    /// For the tiles of a wide pass.
    tiles: Vec<Work>,
    /// For the experts of a pass.
    mixture: Mixture,
    /// For each member.
    members: Vec<Mutex<Own>>,
}

#[derive(Default)]
struct Own {
    work: Work,
    attention: AttentionScratch,
    experts: ExpertScratch,
}

/// Where a block's output left the range of the boundary dtype.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Overflow {
    /// Counted from the first of [`Parts::layers`].
    pub(super) layer: usize,
    /// Counted over the batch.
    pub(super) row: usize,
}

/// Runs `x`, the rows of all spans, through the layers. `pages` has a table for each span.
pub(super) fn run(
    parts: &Parts<'_>,
    scratch: &mut Scratch,
    spans: &[Span],
    pages: &[Vec<SharedMut<'_, u16>>],
    x: &mut [f32],
) -> Result<(), Overflow> {
    let widths = Widths::of(parts);
    let threads = parts.thread_pool.threads();
    scratch.members.resize_with(threads, Mutex::default);
    let total = x.len() / widths.x;
    let overflow = FirstOverflow::default();
    let most = match widths.experts {
        0 => TALL_TILE * PASS_TILES * threads,
        _ => moe::PASS_ROWS,
    };
    for begin in (0..total).step_by(most) {
        let rows = begin..total.min(begin + most);
        let x = &mut x[rows.start * widths.x..rows.end * widths.x];
        grow(&mut scratch.qkv, rows.len() * widths.qkv);
        let pass = Pass {
            parts,
            widths,
            pages,
            overflow: &overflow,
            begin,
        };
        if rows.len() <= wide_rows(threads) {
            wide(&pass, scratch, spans, rows, x);
        } else {
            tall(&pass, scratch, spans, rows, x);
        }
        if let Some(overflow) = overflow.get() {
            return Err(overflow);
        }
    }
    Ok(())
}

/// Splits panels between members.
#[allow(unsafe_code)]
fn wide(pass: &Pass<'_>, scratch: &mut Scratch, spans: &[Span], rows: Range<usize>, x: &mut [f32]) {
    let (parts, widths) = (pass.parts, &pass.widths);
    let threads = parts.thread_pool.threads();
    let pieces = cut(spans, &rows, WIDE_TILE);
    let tiles = tiles_of(widths, &pieces, WIDE_TILE, x, &mut scratch.qkv);
    if scratch.tiles.len() < tiles.len() {
        scratch.tiles.resize_with(tiles.len(), Work::default);
    }
    let buffers: Vec<Buffers<'_>> = scratch
        .tiles
        .iter_mut()
        .zip(&tiles)
        .map(|(work, tile)| work.buffers(widths, tile.rows))
        .collect();
    let tiles: Vec<(&Rows<'_>, Buffers<'_>)> = tiles.iter().zip(buffers).collect();
    let units_of_heads = head_units(parts, &tiles, threads);
    let members = &scratch.members;
    let count = rows.len();
    let pairs = scratch.mixture.pairs(pass, count);

    parts.thread_pool.run(&|member| {
        let mut own = members[member.index()].lock();
        let Own {
            attention, experts, ..
        } = &mut *own;
        // The steps of a phase: some units of work, then what must be done to every tile before
        // the next phase, and what must be done once. One tile is done at once, several are
        // shared.
        let phase = |member: &mut Member<'_>,
                     units,
                     work: &mut dyn FnMut(usize),
                     then: Step<'_>,
                     last: &dyn Fn()| {
            if let [(rows, buffers)] = tiles[..] {
                member.phase_then(units, work, || {
                    then(rows, buffers);
                    last();
                });
            } else {
                member.phase(units, work);
                let tile = |tile: usize| then(tiles[tile].0, tiles[tile].1);
                member.phase_then(tiles.len(), tile, last);
            }
        };
        // All tiles, by panels of a matrix.
        let split = |member: &mut Member<'_>,
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
            phase(member, units, &mut work, then, last);
        };
        let nothing = &|| ();
        // SAFETY (of all steps): units of a phase have separate panels, or separate heads or
        // pieces, or separate tiles, so that no two write the same columns or rows; what they
        // read was written in the phase before. Pages are written by `place` only, at which time
        // nobody reads them.
        member.phase(tiles.len(), |tile| {
            let (rows, buffers) = tiles[tile];
            // SAFETY: separate tiles.
            unsafe { pass.attn_norm(0, rows, buffers) };
        });
        for (index, layer) in parts.layers.iter().enumerate() {
            split(
                member,
                layer.qkv.panels(),
                // SAFETY: separate panels.
                &|panels, rows, buffers| unsafe { pass.qkv(layer, panels, rows, buffers) },
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe {
                    match &layer.latent {
                        Some(latent) => pass.norm_latent(latent, rows, buffers),
                        None => pass.place(index, rows, buffers),
                    }
                },
                nothing,
            );
            if let Some(latent) = &layer.latent {
                split(
                    member,
                    latent.panels(),
                    // SAFETY: separate panels.
                    &|panels, rows, buffers| unsafe {
                        pass.expand_latent(latent, panels, rows, buffers);
                    },
                    // SAFETY: separate tiles.
                    &|rows, buffers| unsafe { pass.place(index, rows, buffers) },
                    nothing,
                );
            }
            let mut attend = |unit: usize| {
                let HeadUnit {
                    tile,
                    piece,
                    kv_head,
                    ref heads,
                } = units_of_heads[unit];
                let (rows, buffers) = tiles[tile];
                let heads = heads.clone();
                // SAFETY: separate pieces or heads.
                unsafe { pass.attend(index, rows, &piece, kv_head, heads, buffers.attn, attention) }
            };
            phase(
                member,
                units_of_heads.len(),
                &mut attend,
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe { pass.quantise_attn(layer, rows, buffers) },
                nothing,
            );
            split(
                member,
                layer.attn_output.panels(),
                // SAFETY: separate panels.
                &|panels, rows, buffers| unsafe {
                    // Not the end of a block: the sum stays as it is.
                    let dtype = BoundaryDtype::F32;
                    pass.add(&layer.attn_output, panels, dtype, rows, buffers);
                },
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe {
                    pass.end_attention(layer, rows, buffers);
                    pass.ffn_norm(layer, rows, buffers);
                    if let Feed::Experts { router, .. } = &layer.feed {
                        pass.route(router, rows, buffers, pairs);
                    }
                },
                // SAFETY: all rows have their routes.
                &|| unsafe {
                    if let Feed::Experts { .. } = &layer.feed {
                        pass.group(count, pairs);
                    }
                },
            );
            let done = |rows: &Rows<'_>, buffers: Buffers<'_>| {
                // SAFETY: separate tiles.
                unsafe {
                    pass.end_feed(layer, rows, buffers);
                    pass.check(index, rows);
                    if index + 1 < parts.layers.len() {
                        pass.attn_norm(index + 1, rows, buffers);
                    }
                }
            };
            match &layer.feed {
                Feed::Dense { ffn, down } => {
                    split(
                        member,
                        ffn.panels(),
                        // SAFETY: separate panels.
                        &|panels, rows, buffers| unsafe { pass.ffn(ffn, panels, rows, buffers) },
                        // SAFETY: separate tiles.
                        &|rows, buffers| unsafe { pass.quantise_h(down, rows, buffers) },
                        nothing,
                    );
                    split(
                        member,
                        down.panels(),
                        // SAFETY: separate panels.
                        &|panels, rows, buffers| unsafe {
                            pass.add(down, panels, parts.spec.boundary, rows, buffers);
                        },
                        &done,
                        nothing,
                    );
                }
                Feed::Experts { experts: all, .. } => {
                    let units = pairs.units();
                    // SAFETY: the plan is made; separate places or panels.
                    member.phase(units, |unit| unsafe {
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
                    phase(member, units, &mut down, &then, nothing);
                }
            }
        }
    });
}

/// Something to do to a tile.
type Step<'a> = &'a dyn Fn(&Rows<'_>, Buffers<'_>);
/// Something to do to a tile with some panels of a matrix.
type PanelStep<'a> = &'a dyn Fn(Range<usize>, &Rows<'_>, Buffers<'_>);

/// Splits tiles between members.
#[allow(unsafe_code)]
fn tall(pass: &Pass<'_>, scratch: &mut Scratch, spans: &[Span], rows: Range<usize>, x: &mut [f32]) {
    let (parts, widths) = (pass.parts, &pass.widths);
    let size = tall_tile(rows.len(), parts.thread_pool.threads());
    let pieces = cut(spans, &rows, size);
    let tiles = tiles_of(widths, &pieces, size, x, &mut scratch.qkv);
    let members = &scratch.members;
    let count = rows.len();
    let pairs = scratch.mixture.pairs(pass, count);

    parts.thread_pool.run(&|member| {
        let mut own = members[member.index()].lock();
        let Own {
            work,
            attention,
            experts,
        } = &mut *own;
        let buffers = work.buffers(widths, size);
        // The last tiles see most positions, so they begin.
        let nth = |unit: usize| &tiles[tiles.len() - 1 - unit];
        // SAFETY (of all phases): a tile, and the place of its rows in the pages, belongs to one
        // unit, and the buffers to this member. The only values that units share are keys and
        // values in the pages, and a phase writes those of one layer and reads those of another.
        // (Units of experts have separate places or panels.)
        member.phase(tiles.len(), |unit| {
            // SAFETY: a tile, its slots in the pages and the member's buffers are the unit's.
            unsafe { pass.begin_layer(0, nth(unit), buffers) };
        });
        for (index, layer) in parts.layers.iter().enumerate() {
            match &layer.feed {
                // SAFETY: so are they here; keys and values that others write are of the next layer.
                Feed::Dense { ffn, down } => member.phase(tiles.len(), |unit| unsafe {
                    pass.attention(index, nth(unit), buffers, attention);
                    pass.feed_forward(ffn, down, nth(unit), buffers);
                    pass.next_layer(index, nth(unit), buffers);
                }),
                Feed::Experts {
                    router,
                    experts: all,
                    ..
                } => {
                    // SAFETY: so are they here; one member groups, when all rows have their routes.
                    let attend = |unit: usize| unsafe {
                        pass.attention(index, nth(unit), buffers, attention);
                        pass.route(router, nth(unit), buffers, pairs);
                    };
                    // SAFETY: all rows have their routes, and one member concludes the phase.
                    member.phase_then(tiles.len(), attend, || unsafe { pass.group(count, pairs) });
                    let units = pairs.units();
                    // SAFETY: the plan is made; units have separate places or panels.
                    member.phase(units, |unit| unsafe {
                        pass.expert_gate_up(all, unit, pairs, experts);
                    });
                    // SAFETY: the plan is made; units have separate places or panels.
                    member.phase(units, |unit| unsafe {
                        pass.expert_down(all, unit, pairs, experts);
                    });
                    // SAFETY: a tile, its slots in the pages and the member's buffers are the unit's.
                    member.phase(tiles.len(), |unit| unsafe {
                        pass.combine(nth(unit), buffers, pairs);
                        pass.next_layer(index, nth(unit), buffers);
                    });
                }
            }
        }
    });
}

/// A unit of attention: a piece of a tile, and some heads that share a KV head.
struct HeadUnit {
    tile: usize,
    piece: Piece,
    kv_head: usize,
    /// Among those that share the KV head.
    heads: Range<usize>,
}

fn head_units(
    parts: &Parts<'_>,
    tiles: &[(&Rows<'_>, Buffers<'_>)],
    threads: usize,
) -> Vec<HeadUnit> {
    let group = parts.group();
    let pieces: usize = tiles.iter().map(|(rows, _)| rows.pieces.len()).sum();
    // Keys and values are read once per unit, so heads are split only to keep members busy.
    let whole = pieces * parts.geometry.kv_heads;
    let split = if threads == 1 || whole >= 2 * threads || whole.is_multiple_of(threads) {
        1
    } else {
        group
    };
    let mut units = Vec::new();
    for (tile, (rows, _)) in tiles.iter().enumerate() {
        for &piece in rows.pieces {
            for kv_head in 0..parts.geometry.kv_heads {
                for unit in 0..split {
                    let heads = share(group, split, unit);
                    units.push(HeadUnit {
                        tile,
                        piece,
                        kv_head,
                        heads,
                    });
                }
            }
        }
    }
    units
}

impl Parts<'_> {
    /// Query heads per KV head.
    fn group(&self) -> usize {
        self.spec.heads as usize / self.geometry.kv_heads
    }
}
