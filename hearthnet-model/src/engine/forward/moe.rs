//! The feed-forward layer of a mixture of experts.
//!
//! Rows of a pass that want the same expert go through its weights together, whichever tile and
//! sequence they belong to; experts that no row wants are not touched:
//!
//! ```text
//! each tile:    router -> scores -> the experts of each row, best first, and their weights
//! once:         pairs of row and expert, sorted by expert; up to 64 of one expert are a chunk
//! each chunk:   rows gathered, quantised -> gate, up -> h
//! each chunk:   h quantised -> down -> outputs
//! each tile:    outputs of a row times their weights, added up, best first
//! ```
//!
//! Chunks are split by panels where there are fewer than the team has use for. An output is
//! computed by the same kernels in the same order whatever shares its chunk.
//!
//! A member of the team that wakes late goes by phases that are over, when the plan may already be
//! that of a later layer. So the number of a phase's units is a bound that depends on the pass
//! only, and the plan is read by nobody who has no unit.

use std::cmp::Ordering;
use std::ops::Range;

use super::steps::{Buffers, Pass, Rows, Widths, columns};
use super::tiling::{TALL_TILE, UNITS, share};
use crate::BoundaryDtype;
use crate::engine::weights::{Expert, Ffn, Router};
use crate::kernels::{Act, ActForm, Kernels, Output, SharedMut, TileMut, fold16, grow};

/// Most rows of a pass: enough that even many experts get some rows each, few enough that
/// outputs of all pairs, a row for each, do not fill the memory.
pub(super) const PASS_ROWS: usize = 8 * TALL_TILE;

/// An expert that a row goes through.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
struct Route {
    expert: u32,
    weight: f32,
}

/// Memory for the pairs of a pass, reused.
#[derive(Default)]
pub(super) struct Mixture {
    normed: Vec<f32>,
    routes: Vec<Route>,
    h: Vec<f32>,
    out: Vec<f32>,
    plan: Plan,
}

/// The same, shared by the team. A pair is number `row * used + rank`.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a> {
    /// `[row][width]`: what experts read.
    normed: SharedMut<'a, f32>,
    /// By pair.
    routes: SharedMut<'a, Route>,
    /// `[place][ffn]`
    h: SharedMut<'a, f32>,
    /// `[place][width]`
    out: SharedMut<'a, f32>,
    plan: SharedMut<'a, Plan>,
    units: Units,
}

/// The pairs in the order of their experts.
#[derive(Default)]
pub(super) struct Plan {
    /// By place.
    pairs: Vec<usize>,
    /// By pair.
    places: Vec<usize>,
    chunks: Vec<Chunk>,
}

/// Places that have the same expert.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Chunk {
    expert: usize,
    places: Range<usize>,
}

/// How many units a phase of experts has: for each chunk, some parts of the panels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Units {
    /// No plan has more.
    chunks: usize,
    parts: usize,
}

impl Units {
    fn of(pairs: usize, experts: usize, threads: usize) -> Self {
        // Each expert has one chunk that is not full.
        let chunks = pairs.min(pairs / TALL_TILE + experts);
        let wanted = if threads == 1 { 1 } else { threads * UNITS };
        Self {
            chunks,
            parts: wanted.div_ceil(chunks.max(1)),
        }
    }
}

/// What a member needs to itself.
#[derive(Default)]
pub(super) struct ExpertScratch {
    gathered: Vec<f32>,
    act: Act,
    up: Vec<f32>,
}

impl Mixture {
    /// Room for a pass of some rows.
    pub(super) fn pairs(&mut self, pass: &Pass<'_>, rows: usize) -> Pairs<'_> {
        let widths = &pass.widths;
        let pairs = rows * widths.used;
        // Without experts there are no pairs, and no rows to keep.
        let rows = if widths.used > 0 { rows } else { 0 };
        grow(&mut self.normed, rows * widths.x);
        grow(&mut self.routes, pairs);
        grow(&mut self.h, pairs * widths.ffn);
        grow(&mut self.out, pairs * widths.x);
        Pairs {
            normed: SharedMut::new(&mut self.normed),
            routes: SharedMut::new(&mut self.routes),
            h: SharedMut::new(&mut self.h),
            out: SharedMut::new(&mut self.out),
            plan: SharedMut::new(std::slice::from_mut(&mut self.plan)),
            units: Units::of(pairs, widths.experts, pass.parts.thread_pool.threads()),
        }
    }
}

impl Plan {
    /// Sorts the pairs of `routes` by expert; within an expert they keep their order.
    fn fill(&mut self, routes: &[Route], experts: usize) {
        let mut starts = vec![0usize; experts + 1];
        for route in routes {
            starts[route.expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        self.places.clear();
        self.pairs.clear();
        self.pairs.resize(routes.len(), 0);
        for (pair, route) in routes.iter().enumerate() {
            let place = &mut next[route.expert as usize];
            self.places.push(*place);
            self.pairs[*place] = pair;
            *place += 1;
        }
        self.chunks.clear();
        for (expert, range) in starts.windows(2).enumerate() {
            let (start, end) = (range[0], range[1]);
            self.chunks
                .extend((start..end).step_by(TALL_TILE).map(|start| Chunk {
                    expert,
                    places: start..end.min(start + TALL_TILE),
                }));
        }
    }
}

impl Pairs<'_> {
    /// Units of each of the two phases of experts.
    pub(super) fn units(&self) -> usize {
        self.units.chunks * self.units.parts
    }
}

/// Whether score `a` of expert `i` goes before score `b` of expert `j`: a larger one before a
/// smaller one, a lower number before a higher one, NaN last.
fn before((a, i): (f32, usize), (b, j): (f32, usize)) -> bool {
    let key = |score: f32| (!score.is_nan()).then_some(score);
    match key(a).partial_cmp(&key(b)) {
        Some(Ordering::Greater) => true,
        Some(Ordering::Equal) => i < j,
        _ => false,
    }
}

/// The number of the score that comes next after `last`, in the order of [`before`].
fn next_best(scores: &[f32], last: Option<(f32, usize)>) -> Option<(f32, usize)> {
    let mut best = None;
    for (index, &score) in scores.iter().enumerate() {
        let this = (score, index);
        let open = last.is_none_or(|last| before(last, this));
        if open && best.is_none_or(|best| before(this, best)) {
            best = Some(this);
        }
    }
    best
}

/// Chooses the experts of a row, as many as there is room for, by their scores, which are lost.
/// Weights add up to 1 if `normalise`; else they are parts of the softmax over all scores.
fn choose(kernels: Kernels, scores: &mut [f32], normalise: bool, routes: &mut [Route]) {
    let mut last = None;
    let mut top = 0.0;
    for (rank, route) in routes.iter_mut().enumerate() {
        last = next_best(scores, last);
        let (score, expert) = last.unwrap_or_default();
        if rank == 0 {
            top = score;
        }
        route.expert = expert as u32;
    }
    scores.iter_mut().for_each(|score| *score -= top);
    kernels.exp(scores);
    let exp = |route: &Route| scores[route.expert as usize];
    let sum = match normalise {
        true => routes.iter().fold(0.0, |sum, route| sum + exp(route)),
        false => fold16(scores),
    };
    for route in routes {
        route.weight = exp(route) / sum;
    }
}

/// The steps of a mixture. All of them are unsafe as those of a tile are.
#[allow(unsafe_code)]
impl Pass<'_> {
    /// Reads `act`, chooses the experts of each row of a tile.
    pub(super) unsafe fn route(
        &self,
        router: &Router,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
        pairs: Pairs<'_>,
    ) {
        let (kernels, widths) = (self.parts.kernels, &self.widths);
        let normalise = self
            .parts
            .spec
            .experts
            .is_some_and(|experts| experts.normalise);
        let (count, experts, used) = (rows.rows, widths.experts, widths.used);
        // SAFETY: no unit writes `act`; the tile's rows and their routes are the unit's.
        unsafe {
            let act = buffers.read_act();
            let normed = rows.first * widths.x..(rows.first + count) * widths.x;
            pairs.normed.slice_mut(normed).copy_from_slice(act.plain());
            let out = buffers.scores.tile_mut(count, experts, 0..experts);
            let Router { matrix, bias } = router;
            kernels.matmul(matrix, 0..matrix.panels(), act, Output::Store, out);
            let scores = buffers.scores.slice_mut(0..count * experts);
            let routes = rows.first * used..(rows.first + count) * used;
            let routes = pairs.routes.slice_mut(routes);
            let rows = scores.chunks_exact_mut(experts);
            for (scores, routes) in rows.zip(routes.chunks_exact_mut(used)) {
                if let Some(bias) = bias {
                    kernels.add_round(scores, bias, BoundaryDtype::F32);
                }
                choose(kernels, scores, normalise, routes);
            }
        }
    }

    /// Reads the routes of all rows of the pass, plans the work of the experts.
    pub(super) unsafe fn group(&self, rows: usize, pairs: Pairs<'_>) {
        let Widths { experts, used, .. } = self.widths;
        // SAFETY: all routes are written, and one unit plans; there is one plan.
        let (plan, routes) = unsafe {
            (
                &mut pairs.plan.slice_mut(0..1)[0],
                pairs.routes.slice(0..rows * used),
            )
        };
        plan.fill(routes, experts);
    }

    /// Gate and up of a unit: reads the normalised rows, writes its part of `h`.
    pub(super) unsafe fn expert_gate_up(
        &self,
        experts: &[Expert],
        unit: usize,
        pairs: Pairs<'_>,
        scratch: &mut ExpertScratch,
    ) {
        let Widths { x, ffn, used, .. } = self.widths;
        // SAFETY: no unit of the phase writes the plan; there is one.
        let plan = unsafe { &pairs.plan.slice(0..1)[0] };
        let Units { parts, .. } = pairs.units;
        let Some(Chunk { expert, places }) = plan.chunks.get(unit / parts) else {
            return;
        };
        let Expert {
            ffn: gates, bias, ..
        } = &experts[*expert];
        let panels = share(gates.panels(), parts, unit % parts);
        if panels.is_empty() {
            return;
        }
        let count = places.len();
        grow(&mut scratch.gathered, count * x);
        let gathered = &mut scratch.gathered[..count * x];
        for (&pair, to) in plan.pairs[places.clone()]
            .iter()
            .zip(gathered.chunks_exact_mut(x))
        {
            let row = pair / used;
            // SAFETY: no unit of the phase writes `normed`.
            to.copy_from_slice(unsafe { pairs.normed.slice(row * x..(row + 1) * x) });
        }
        let act = &mut scratch.act;
        self.parts.kernels.prepare(gathered, x, gates.form(), act);
        let columns = gates.columns(&panels);
        let up = match gates {
            Ffn::Fused(_) => TileMut::new(&mut [], 0, 0, 0),
            Ffn::Split { .. } => {
                grow(&mut scratch.up, count * columns.len());
                TileMut::new(&mut scratch.up, count, columns.len(), columns.len())
            }
        };
        let h = pairs.h.part(places.start * ffn..places.end * ffn);
        // SAFETY: units have separate places or panels, and so parts of `h`.
        let h = unsafe { h.tile_mut(count, ffn, columns) };
        self.gate_up(gates, bias.as_ref(), panels, act, h, up);
    }

    /// Down of a unit: reads `h`, writes its part of the outputs.
    pub(super) unsafe fn expert_down(
        &self,
        experts: &[Expert],
        unit: usize,
        pairs: Pairs<'_>,
        scratch: &mut ExpertScratch,
    ) {
        let Widths { x, ffn, .. } = self.widths;
        // SAFETY: no unit of the phase writes the plan; there is one.
        let plan = unsafe { &pairs.plan.slice(0..1)[0] };
        let Units { parts, .. } = pairs.units;
        let Some(Chunk { expert, places }) = plan.chunks.get(unit / parts) else {
            return;
        };
        let Expert { down, bias, .. } = &experts[*expert];
        let panels = share(down.panels(), parts, unit % parts);
        if panels.is_empty() {
            return;
        }
        let (kernels, act) = (self.parts.kernels, &mut scratch.act);
        // SAFETY: no unit of the phase writes `h`.
        let h = unsafe { pairs.h.slice(places.start * ffn..places.end * ffn) };
        kernels.prepare(h, ffn, ActForm::of([down]), act);
        let out = pairs.out.part(places.start * x..places.end * x);
        let columns = columns(down, &panels, 0);
        // SAFETY: units have separate places or panels, and so parts of `out`.
        let mut out = unsafe { out.tile_mut(places.len(), x, columns.clone()) };
        kernels.matmul(down, panels, act, Output::Store, out.reborrow());
        if let Some(bias) = bias {
            for row in 0..out.rows() {
                let bias = &bias.down[columns.clone()];
                kernels.add_round(out.row_mut(row), bias, BoundaryDtype::F32);
            }
        }
    }

    /// Adds up the outputs of each row of a tile, in `branch`.
    pub(super) unsafe fn combine(&self, rows: &Rows<'_>, buffers: Buffers<'_>, pairs: Pairs<'_>) {
        let Widths { x, used, .. } = self.widths;
        // SAFETY: no unit writes the plan; the tile's rows of `branch` are the unit's.
        let (plan, sums) = unsafe {
            (
                &pairs.plan.slice(0..1)[0],
                buffers.branch.slice_mut(0..rows.rows * x),
            )
        };
        sums.fill(0.0);
        for (row, sum) in sums.chunks_exact_mut(x).enumerate() {
            let first = (rows.first + row) * used;
            for pair in first..first + used {
                let place = plan.places[pair];
                // SAFETY: no unit of the phase writes routes or outputs.
                let (route, out) = unsafe {
                    (
                        pairs.routes.slice(pair..pair + 1)[0],
                        pairs.out.slice(place * x..(place + 1) * x),
                    )
                };
                self.parts.kernels.add_scaled(sum, out, route.weight);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(scores: &[f32], count: usize) -> Vec<usize> {
        let mut last = None;
        (0..count)
            .map(|_| {
                last = next_best(scores, last);
                last.unwrap().1
            })
            .collect()
    }

    #[test]
    fn experts_are_taken_best_first_the_lower_number_where_they_tie_and_nan_last() {
        assert_eq!(best(&[1.0, 3.0, 2.0], 3), [1, 2, 0]);
        assert_eq!(best(&[2.0, 5.0, 2.0, 5.0], 4), [1, 3, 0, 2]);
        assert_eq!(best(&[-0.0, 0.0, -1.0], 2), [0, 1]);
        let nan = f32::NAN;
        assert_eq!(best(&[nan, f32::NEG_INFINITY, nan, 1.0], 4), [3, 1, 0, 2]);
    }

    #[test]
    fn weights_are_those_that_the_specification_quotes() {
        let spec = std::fs::read_to_string(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../specs/canonical-arithmetic.md"
        ));
        let spec = spec.unwrap();
        for normalise in [true, false] {
            let mut scores = [1.5, -0.25, 1.5, 0.75];
            let mut routes = [Route::default(); 2];
            choose(Kernels::best(), &mut scores, normalise, &mut routes);
            let [first, second] = routes;
            assert_eq!((first.expert, second.expert), (0, 2));
            assert_eq!(first.weight.to_bits(), second.weight.to_bits());
            let bits = format!("`{:08x}`", first.weight.to_bits());
            assert!(spec.contains(&format!("{bits}, {bits}")), "{bits}");
        }
    }

    #[test]
    fn every_pair_has_one_place_and_every_place_is_worked_on_once() {
        let experts = 5;
        let mut plan = Plan::default();
        for (pairs, threads) in [(1usize, 1), (8, 3), (150, 2), (700, 4)] {
            let routes: Vec<Route> = (0..pairs)
                .map(|pair| Route {
                    expert: [3, 0, 3, 4][pair % 4],
                    weight: 0.5,
                })
                .collect();
            plan.fill(&routes, experts);
            let units = Units::of(pairs, experts, threads);
            assert!(plan.chunks.len() <= units.chunks && units.parts > 0);
            let mut worked_on = vec![0; pairs];
            for chunk in &plan.chunks {
                assert!((1..=64).contains(&chunk.places.len()));
                for place in chunk.places.clone() {
                    let pair = plan.pairs[place];
                    assert_eq!(plan.places[pair], place);
                    assert_eq!(routes[pair].expert as usize, chunk.expert);
                    worked_on[place] += 1;
                }
            }
            assert!(worked_on.iter().all(|count| *count == 1), "{pairs} pairs");
        }
    }
}
