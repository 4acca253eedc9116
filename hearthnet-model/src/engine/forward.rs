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
//! A row's values are computed by the same kernels in the same order either way, so nothing
//! depends on the choice, on the tiles, or on who does what.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::kv::{Geometry, Span};
use super::team::{Member, Team};
use super::weights::{Ffn, Layer};
use crate::BoundaryDtype;
use crate::kernels::{
    Act, ActForm, Attention, AttentionScratch, Kernels, LANES, Output, PAGE, Packed, RopeTable,
    SharedMut, Tile, store_kv,
};
use crate::spec::ModelSpec;

/// Rows of a tile when panels are split: what the kernels take at once.
const WIDE_TILE: usize = 8;
/// Rows per member up to which panels are split.
const WIDE_ROWS: usize = 16;
/// Most rows of a tile in prefill: their activations stay in the second-level cache, and weights
/// are read once for all of them.
const TALL_TILE: usize = 64;
/// Tiles per member that one pass over the layers takes at most; more rows go in several passes,
/// so that scratch memory is bounded.
const PASS_TILES: usize = 8;
/// Units per member into which a matrix is split: some slack, so that a member that is held up
/// does not hold up the others.
const UNITS: usize = 2;

/// What does not change from batch to batch.
pub(super) struct Parts<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) kernels: Kernels,
    pub(super) team: &'a Team,
    pub(super) rope: &'a RopeTable,
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
    /// For each member.
    members: Vec<Mutex<Own>>,
}

/// Intermediate values of one tile.
#[derive(Default)]
struct Work {
    act: Act,
    attn: Vec<f32>,
    h: Vec<f32>,
    up: Vec<f32>,
}

#[derive(Default)]
struct Own {
    work: Work,
    attention: AttentionScratch,
}

/// Where a block's output left the range of the boundary dtype.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Overflow {
    /// Counted from the first of [`Parts::layers`].
    pub(super) layer: usize,
    /// Counted over the batch.
    pub(super) row: usize,
}

/// Rows of a tile that belong to one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    span: usize,
    /// Counted from the tile's first.
    row: usize,
    rows: usize,
    /// Of the first row.
    position: usize,
}

/// Widths of the intermediate values.
#[derive(Clone, Copy)]
struct Widths {
    x: usize,
    q: usize,
    kv: usize,
    qkv: usize,
    ffn: usize,
}

/// Runs `x`, the rows of all spans, through the layers. `pages` has a table for each span.
pub(super) fn run(
    parts: &Parts<'_>,
    scratch: &mut Scratch,
    spans: &[Span],
    pages: &[Vec<SharedMut<'_, u16>>],
    x: &mut [f32],
) -> Result<(), Overflow> {
    let widths = Widths::of(parts.spec);
    let threads = parts.team.threads();
    scratch.members.resize_with(threads, Mutex::default);
    let total = x.len() / widths.x;
    let overflow = FirstOverflow::default();
    let most = TALL_TILE * PASS_TILES * threads;
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

/// Most rows for which panels are split. One thread has nothing to split.
fn wide_rows(threads: usize) -> usize {
    if threads == 1 {
        WIDE_TILE
    } else {
        WIDE_ROWS * threads
    }
}

fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

impl Widths {
    fn of(spec: &ModelSpec) -> Self {
        let (q, kv) = (spec.query_width() as usize, spec.kv_width() as usize);
        Self {
            x: spec.width as usize,
            q,
            kv,
            qkv: q + 2 * kv,
            ffn: spec.ffn as usize,
        }
    }
}

/// The lowest layer, and in it the lowest row, whose output was out of range.
struct FirstOverflow(AtomicU64);

impl Default for FirstOverflow {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl FirstOverflow {
    fn note(&self, layer: usize, row: usize) {
        self.0
            .fetch_min(((layer as u64) << 32) | row as u64, Ordering::Relaxed);
    }

    fn get(&self) -> Option<Overflow> {
        let first = self.0.load(Ordering::Relaxed);
        let (layer, row) = (
            (first >> 32) as usize,
            (first & u64::from(u32::MAX)) as usize,
        );
        (first != u64::MAX).then_some(Overflow { layer, row })
    }
}

/// Rows `rows` of the batch as tiles of `size` rows, each as the pieces it consists of.
fn cut(spans: &[Span], rows: &Range<usize>, size: usize) -> Vec<Vec<Piece>> {
    let mut tiles = vec![Vec::new(); rows.len().div_ceil(size.max(1))];
    let mut end = 0;
    for (index, span) in spans.iter().enumerate() {
        let begin = end;
        end = begin + span.rows as usize;
        // Rows of the batch that are in the span and not yet in a tile.
        let mut next = begin.max(rows.start);
        while next < end.min(rows.end) {
            let tile = (next - rows.start) / size;
            let first = rows.start + tile * size;
            let stop = end.min(rows.end).min(first + size);
            tiles[tile].push(Piece {
                span: index,
                row: next - first,
                rows: stop - next,
                position: span.position as usize + (next - begin),
            });
            next = stop;
        }
    }
    tiles
}

/// Unit `unit` of `units` nearly equal parts of `count` things.
fn share(count: usize, units: usize, unit: usize) -> Range<usize> {
    count * unit / units..count * (unit + 1) / units
}

/// A pass of some rows over the layers.
struct Pass<'a> {
    parts: &'a Parts<'a>,
    widths: Widths,
    pages: &'a [Vec<SharedMut<'a, u16>>],
    overflow: &'a FirstOverflow,
    /// First row of the pass in the batch.
    begin: usize,
}

/// A tile's rows and intermediate values. Which member may touch what is the business of [`wide`]
/// and [`tall`].
struct Rows<'a> {
    /// Counted over the pass.
    first: usize,
    rows: usize,
    pieces: &'a [Piece],
    x: SharedMut<'a, f32>,
    qkv: SharedMut<'a, f32>,
}

/// Buffers of a [`Work`], shared.
#[derive(Clone, Copy)]
struct Buffers<'a> {
    act: SharedMut<'a, Act>,
    attn: SharedMut<'a, f32>,
    h: SharedMut<'a, f32>,
    up: SharedMut<'a, f32>,
}

impl Work {
    fn buffers(&mut self, widths: &Widths, rows: usize, ffn: bool) -> Buffers<'_> {
        grow(&mut self.attn, rows * widths.q);
        grow(&mut self.h, rows * widths.ffn);
        grow(&mut self.up, if ffn { rows * widths.ffn } else { 0 });
        Buffers {
            act: SharedMut::new(std::slice::from_mut(&mut self.act)),
            attn: SharedMut::new(&mut self.attn),
            h: SharedMut::new(&mut self.h),
            up: SharedMut::new(&mut self.up),
        }
    }
}

fn tiles_of<'a>(
    widths: &Widths,
    tiles: &'a [Vec<Piece>],
    size: usize,
    x: &'a mut [f32],
    qkv: &'a mut [f32],
) -> Vec<Rows<'a>> {
    let buffers = x
        .chunks_mut(size * widths.x)
        .zip(qkv.chunks_mut(size * widths.qkv));
    let tiles = tiles.iter().zip(buffers).enumerate();
    tiles
        .map(|(index, (pieces, (x, qkv)))| Rows {
            first: index * size,
            rows: x.len() / widths.x,
            pieces,
            x: SharedMut::new(x),
            qkv: SharedMut::new(qkv),
        })
        .collect()
}

/// Splits panels between members.
#[allow(unsafe_code)]
fn wide(pass: &Pass<'_>, scratch: &mut Scratch, spans: &[Span], rows: Range<usize>, x: &mut [f32]) {
    let (parts, widths) = (pass.parts, &pass.widths);
    let threads = parts.team.threads();
    let pieces = cut(spans, &rows, WIDE_TILE);
    let tiles = tiles_of(widths, &pieces, WIDE_TILE, x, &mut scratch.qkv);
    if scratch.tiles.len() < tiles.len() {
        scratch.tiles.resize_with(tiles.len(), Work::default);
    }
    let split_ffn = pass.split_ffn();
    let buffers: Vec<Buffers<'_>> = scratch
        .tiles
        .iter_mut()
        .zip(&tiles)
        .map(|(work, tile)| work.buffers(widths, tile.rows, split_ffn))
        .collect();
    let tiles: Vec<(&Rows<'_>, Buffers<'_>)> = tiles.iter().zip(buffers).collect();
    let units_of_heads = head_units(parts, &tiles, threads);
    let members = &scratch.members;

    parts.team.run(&|member| {
        let mut own = members[member.index()]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let attention = &mut own.attention;
        // The steps of a phase: some units of work, then what must be done to every tile before
        // the next phase. One tile is done at once, several are shared.
        let phase =
            |member: &mut Member<'_>, units, work: &mut dyn FnMut(usize), then: Step<'_>| {
                if let [(rows, buffers)] = tiles[..] {
                    member.phase_then(units, work, || then(rows, buffers));
                } else {
                    member.phase(units, work);
                    member.phase(tiles.len(), |tile| then(tiles[tile].0, tiles[tile].1));
                }
            };
        // All tiles, by panels of a matrix.
        let split = |member: &mut Member<'_>, panels, work: PanelStep<'_>, then: Step<'_>| {
            let units = units(panels, threads);
            let mut work = |unit| {
                for (rows, buffers) in &tiles {
                    work(share(panels, units, unit), rows, *buffers);
                }
            };
            phase(member, units, &mut work, then);
        };
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
                &|rows, _| unsafe { pass.place(index, rows) },
            );
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
            );
            split(
                member,
                layer.attn_output.panels(),
                // SAFETY: separate panels.
                &|panels, rows, buffers| unsafe { pass.attn_output(layer, panels, rows, buffers) },
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe { pass.ffn_norm(layer, rows, buffers) },
            );
            split(
                member,
                layer.ffn.panels(),
                // SAFETY: separate panels.
                &|panels, rows, buffers| unsafe { pass.ffn(layer, panels, rows, buffers) },
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe { pass.quantise_h(layer, rows, buffers) },
            );
            split(
                member,
                layer.ffn_down.panels(),
                // SAFETY: separate panels.
                &|panels, rows, buffers| unsafe { pass.ffn_down(layer, panels, rows, buffers) },
                // SAFETY: separate tiles.
                &|rows, buffers| unsafe {
                    pass.check(index, rows);
                    if index + 1 < parts.layers.len() {
                        pass.attn_norm(index + 1, rows, buffers);
                    }
                },
            );
        }
    });
}

/// Something to do to a tile.
type Step<'a> = &'a dyn Fn(&Rows<'_>, Buffers<'_>);
/// Something to do to a tile with some panels of a matrix.
type PanelStep<'a> = &'a dyn Fn(Range<usize>, &Rows<'_>, Buffers<'_>);

/// Into how many units `panels` panels are split.
fn units(panels: usize, threads: usize) -> usize {
    if threads == 1 {
        1
    } else {
        panels.min(threads * UNITS)
    }
}

/// Splits tiles between members.
#[allow(unsafe_code)]
fn tall(pass: &Pass<'_>, scratch: &mut Scratch, spans: &[Span], rows: Range<usize>, x: &mut [f32]) {
    let (parts, widths) = (pass.parts, &pass.widths);
    let size = tall_tile(rows.len(), parts.team.threads());
    let pieces = cut(spans, &rows, size);
    let tiles = tiles_of(widths, &pieces, size, x, &mut scratch.qkv);
    let members = &scratch.members;
    let split_ffn = pass.split_ffn();

    parts.team.run(&|member| {
        let mut own = members[member.index()]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Own { work, attention } = &mut *own;
        let buffers = work.buffers(widths, size, split_ffn);
        // The last tiles see most positions, so they begin.
        let nth = |unit: usize| &tiles[tiles.len() - 1 - unit];
        // SAFETY (of both phases): a tile, and the place of its rows in the pages, belongs to one
        // unit, and the buffers to this member. The only values that units share are keys and
        // values in the pages, and a phase writes those of one layer and reads those of another.
        member.phase(tiles.len(), |unit| {
            // SAFETY: see above.
            unsafe { pass.begin_layer(0, nth(unit), buffers) };
        });
        for index in 0..parts.layers.len() {
            // SAFETY: see above.
            member.phase(tiles.len(), |unit| unsafe {
                pass.end_layer(index, nth(unit), buffers, attention);
                if index + 1 < parts.layers.len() {
                    pass.begin_layer(index + 1, nth(unit), buffers);
                }
            });
        }
    });
}

/// Rows of a tile: as many as allowed, but the same number of tiles for every member.
fn tall_tile(rows: usize, threads: usize) -> usize {
    let tiles = rows.div_ceil(TALL_TILE).next_multiple_of(threads);
    rows.div_ceil(tiles)
        .next_multiple_of(WIDE_TILE)
        .min(TALL_TILE)
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

/// The steps of a tile. All of them are unsafe in the same way: what they write belongs to the
/// caller's unit of work, and what they read is written by no other unit of the phase.
#[allow(unsafe_code)]
impl Pass<'_> {
    fn split_ffn(&self) -> bool {
        self.parts
            .layers
            .iter()
            .any(|layer| matches!(layer.ffn, Ffn::Split { .. }))
    }

    /// Reads `x`, writes `act`.
    unsafe fn attn_norm(&self, index: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let layer = &self.parts.layers[index];
        // SAFETY: the caller's.
        unsafe { self.norm(&layer.attn_norm, layer.qkv.form, rows, buffers) };
    }

    /// Reads `x`, writes `act`.
    unsafe fn ffn_norm(&self, layer: &Layer, rows: &Rows<'_>, buffers: Buffers<'_>) {
        // SAFETY: the caller's.
        unsafe { self.norm(&layer.ffn_norm, layer.ffn.form(), rows, buffers) };
    }

    unsafe fn norm(&self, weight: &[f32], form: ActForm, rows: &Rows<'_>, buffers: Buffers<'_>) {
        // SAFETY: the caller's.
        let (x, act) = unsafe { (rows.x.slice(0..rows.rows * self.widths.x), buffers.act()) };
        let eps = self.parts.spec.norm_eps;
        self.parts.kernels.norm_prepare(x, weight, eps, form, act);
    }

    /// Reads `act`, writes the columns of `panels` in `qkv`; panels are counted over all parts.
    unsafe fn qkv(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let (mut before, mut column) = (0, 0);
        for part in &layer.qkv.parts {
            let end = before + part.panels();
            let own = panels.start.max(before)..panels.end.min(end);
            if own.start < own.end {
                let own = own.start - before..own.end - before;
                // SAFETY: the caller's.
                unsafe {
                    let columns = columns(part, &own, column);
                    let out = rows.qkv.tile_mut(rows.rows, self.widths.qkv, columns);
                    self.parts
                        .kernels
                        .matmul(part, own, buffers.read_act(), Output::Store, out);
                }
            }
            before = end;
            column += part.rows();
        }
    }

    /// Turns queries and keys in `qkv`, and writes keys and values to the pages.
    unsafe fn place(&self, layer: usize, rows: &Rows<'_>) {
        let Parts {
            kernels,
            rope,
            geometry,
            first,
            ..
        } = *self.parts;
        let Widths { q, kv, qkv, .. } = self.widths;
        let d = geometry.head_dim;
        for piece in rows.pieces {
            for i in 0..piece.rows {
                let (row, position) = (piece.row + i, piece.position + i);
                // SAFETY: the caller's.
                let values = unsafe { rows.qkv.slice_mut(row * qkv..(row + 1) * qkv) };
                kernels.rope(rope, position, &mut values[..q + kv], d);
                let (keys, values) = values[q..].split_at(kv);
                let page = &self.pages[piece.span][position / PAGE];
                for head in 0..geometry.kv_heads {
                    let strip = geometry.strip(geometry.strip_of(first + layer, head));
                    let cells = head * d..(head + 1) * d;
                    // SAFETY: the caller's; a slot belongs to one row.
                    unsafe {
                        store_kv(
                            page.part(strip),
                            position % PAGE,
                            &keys[cells.clone()],
                            &values[cells],
                        );
                    }
                }
            }
        }
    }

    /// Reads queries and pages, writes the columns of some heads of a piece in `attn`.
    #[allow(clippy::too_many_arguments)]
    unsafe fn attend(
        &self,
        layer: usize,
        rows: &Rows<'_>,
        piece: &Piece,
        kv_head: usize,
        heads: Range<usize>,
        attn: SharedMut<'_, f32>,
        scratch: &mut AttentionScratch,
    ) {
        let Parts {
            kernels,
            geometry,
            first,
            ..
        } = *self.parts;
        let Widths { q, qkv, .. } = self.widths;
        let d = geometry.head_dim;
        let strip = geometry.strip(geometry.strip_of(first + layer, kv_head));
        let end = (piece.position + piece.rows).div_ceil(PAGE);
        // SAFETY: the caller's.
        let pages: Vec<&[u16]> = self.pages[piece.span][..end]
            .iter()
            .map(|page| unsafe { page.slice(strip.clone()) })
            .collect();
        let group = self.parts.group();
        let columns = (kv_head * group + heads.start) * d..(kv_head * group + heads.end) * d;
        let attention = Attention {
            head_dim: d,
            heads: heads.len(),
            scale: 1.0 / (d as f32).sqrt(),
            position: piece.position,
            pages: &pages,
        };
        // SAFETY: the caller's.
        unsafe {
            let queries = rows
                .qkv
                .slice(piece.row * qkv + columns.start..rows.rows * qkv);
            let queries = Tile::new(queries, piece.rows, columns.len(), qkv);
            let out = attn
                .part(piece.row * q..rows.rows * q)
                .tile_mut(piece.rows, q, columns);
            kernels.attention(&attention, queries, scratch, out);
        }
    }

    /// Reads `attn`, writes `act`.
    unsafe fn quantise_attn(&self, layer: &Layer, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let width = self.widths.q;
        // SAFETY: the caller's.
        let (attn, act) = unsafe { (buffers.attn.slice(0..rows.rows * width), buffers.act()) };
        self.parts
            .kernels
            .prepare(attn, width, ActForm::of([&layer.attn_output]), act);
    }

    /// Reads `act`, adds to the columns of `panels` in `x`.
    unsafe fn attn_output(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // Not the end of a block: the sum stays as it is.
        let output = Output::Add(BoundaryDtype::F32);
        // SAFETY: the caller's.
        unsafe { self.add(&layer.attn_output, panels, output, rows, buffers) };
    }

    unsafe fn add(
        &self,
        matrix: &Packed,
        panels: Range<usize>,
        output: Output,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let columns = columns(matrix, &panels, 0);
            let out = rows.x.tile_mut(rows.rows, self.widths.x, columns);
            self.parts
                .kernels
                .matmul(matrix, panels, buffers.read_act(), output, out);
        }
    }

    /// Reads `act`, writes the columns of `panels` in `h`.
    unsafe fn ffn(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let kernels = self.parts.kernels;
        let (width, count) = (self.widths.ffn, rows.rows);
        // SAFETY: the caller's.
        unsafe {
            let act = buffers.read_act();
            match &layer.ffn {
                Ffn::Fused(both) => {
                    let out = buffers.h.tile_mut(count, width, columns(both, &panels, 0));
                    kernels.matmul_swiglu(both, panels, act, out);
                }
                Ffn::Split { gate, up } => {
                    let columns = columns(gate, &panels, 0);
                    let mut gates = buffers.h.tile_mut(count, width, columns.clone());
                    let mut ups = buffers.up.tile_mut(count, width, columns);
                    let store = Output::Store;
                    kernels.matmul(gate, panels.clone(), act, store, gates.reborrow());
                    kernels.matmul(up, panels, act, store, ups.reborrow());
                    for row in 0..count {
                        kernels.swiglu(gates.row_mut(row), ups.row(row));
                    }
                }
            }
        }
    }

    /// Reads `h`, writes `act`.
    unsafe fn quantise_h(&self, layer: &Layer, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let width = self.widths.ffn;
        // SAFETY: the caller's.
        let (h, act) = unsafe { (buffers.h.slice(0..rows.rows * width), buffers.act()) };
        self.parts
            .kernels
            .prepare(h, width, ActForm::of([&layer.ffn_down]), act);
    }

    /// Reads `act`, adds to the columns of `panels` in `x`, and rounds them: the block is done.
    unsafe fn ffn_down(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let output = Output::Add(self.parts.spec.boundary);
        // SAFETY: the caller's.
        unsafe { self.add(&layer.ffn_down, panels, output, rows, buffers) };
    }

    /// Reads `x`, a block's output.
    unsafe fn check(&self, layer: usize, rows: &Rows<'_>) {
        let width = self.widths.x;
        // SAFETY: the caller's.
        let x = unsafe { rows.x.slice(0..rows.rows * width) };
        if self.parts.kernels.all_finite(x) {
            return;
        }
        let bad = x
            .chunks_exact(width)
            .position(|row| !self.parts.kernels.all_finite(row));
        self.overflow
            .note(layer, self.begin + rows.first + bad.unwrap_or(0));
    }

    /// A tile up to its keys and values.
    unsafe fn begin_layer(&self, index: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let layer = &self.parts.layers[index];
        // SAFETY: the caller's.
        unsafe {
            self.attn_norm(index, rows, buffers);
            self.qkv(layer, 0..layer.qkv.panels(), rows, buffers);
            self.place(index, rows);
        }
    }

    /// A tile from attention to the end of the block.
    unsafe fn end_layer(
        &self,
        index: usize,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
        scratch: &mut AttentionScratch,
    ) {
        let layer = &self.parts.layers[index];
        let group = self.parts.group();
        // SAFETY: the caller's.
        unsafe {
            for piece in rows.pieces {
                for kv_head in 0..self.parts.geometry.kv_heads {
                    self.attend(index, rows, piece, kv_head, 0..group, buffers.attn, scratch);
                }
            }
            self.quantise_attn(layer, rows, buffers);
            self.attn_output(layer, 0..layer.attn_output.panels(), rows, buffers);
            self.ffn_norm(layer, rows, buffers);
            self.ffn(layer, 0..layer.ffn.panels(), rows, buffers);
            self.quantise_h(layer, rows, buffers);
            self.ffn_down(layer, 0..layer.ffn_down.panels(), rows, buffers);
            self.check(index, rows);
        }
    }
}

#[allow(unsafe_code)]
impl<'a> Buffers<'a> {
    /// # Safety
    /// No other unit of the phase uses the activations.
    unsafe fn act(&self) -> &'a mut Act {
        // SAFETY: the caller's. There is one.
        unsafe { &mut self.act.slice_mut(0..1)[0] }
    }

    /// # Safety
    /// No unit of the phase writes the activations.
    unsafe fn read_act(&self) -> &'a Act {
        // SAFETY: the caller's. There is one.
        unsafe { &self.act.slice(0..1)[0] }
    }
}

/// Columns of the outputs of some panels of a matrix whose first output is column `first`.
fn columns(matrix: &Packed, panels: &Range<usize>, first: usize) -> Range<usize> {
    first + panels.start * LANES..first + matrix.rows().min(panels.end * LANES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kv::{KvCache, Limits};

    fn spans(rows: &[(u32, u32)]) -> Vec<Span> {
        let geometry = Geometry {
            first_layer: 0,
            layers: 1,
            kv_heads: 1,
            head_dim: 8,
        };
        let limits = Limits {
            bytes: 0,
            context: 0,
            sequences: 100,
        };
        let mut cache = KvCache::new(geometry, limits);
        rows.iter()
            .map(|&(position, rows)| Span {
                seq: cache.open().unwrap(),
                position,
                rows,
            })
            .collect()
    }

    #[test]
    fn tiles_have_every_row_once_and_in_order() {
        let batch = spans(&[(5, 3), (0, 1), (100, 70), (7, 2)]);
        for size in [1, 2, 8, 64, 100] {
            for (begin, end) in [(0, 76), (2, 75), (4, 5), (10, 74)] {
                let tiles = cut(&batch, &(begin..end), size);
                let mut rows = Vec::new();
                for (index, tile) in tiles.iter().enumerate() {
                    assert!(!tile.is_empty() && tile.iter().map(|p| p.rows).sum::<usize>() <= size);
                    for piece in tile {
                        rows.extend((0..piece.rows).map(|i| {
                            (index * size + piece.row + i, piece.span, piece.position + i)
                        }));
                    }
                }
                let all = batch.iter().enumerate().flat_map(|(span, s)| {
                    (s.position..s.position + s.rows).map(move |p| (span, p as usize))
                });
                let expected: Vec<(usize, usize, usize)> = all
                    .skip(begin)
                    .take(end - begin)
                    .enumerate()
                    .map(|(row, (span, position))| (row, span, position))
                    .collect();
                assert_eq!(rows, expected, "tiles of {size}, rows {begin}..{end}");
            }
        }
    }

    #[test]
    fn shares_are_nearly_equal_and_cover_everything() {
        for count in [1, 7, 36, 1000] {
            for units in 1..=count.min(9) {
                let shares: Vec<Range<usize>> =
                    (0..units).map(|u| share(count, units, u)).collect();
                assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert_eq!((shares[0].start, shares[units - 1].end), (0, count));
                let sizes = shares.iter().map(ExactSizeIterator::len);
                assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
        }
    }

    #[test]
    fn tall_tiles_are_as_many_for_every_member() {
        assert_eq!(tall_tile(512, 1), 64);
        assert_eq!(tall_tile(512, 2), 64);
        assert_eq!(tall_tile(512, 3), 64);
        assert_eq!(tall_tile(100, 2), 56);
        assert_eq!(tall_tile(65, 1), 40);
        assert_eq!(tall_tile(33, 2), 24);
    }

    #[test]
    fn the_first_overflow_is_the_one_of_the_lowest_layer_and_row() {
        let first = FirstOverflow::default();
        assert_eq!(first.get(), None);
        for (layer, row) in [(3, 1), (2, 9), (2, 4), (7, 0)] {
            first.note(layer, row);
        }
        assert_eq!(first.get(), Some(Overflow { layer: 2, row: 4 }));
    }
}
