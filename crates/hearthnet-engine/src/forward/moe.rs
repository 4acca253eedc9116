//! Feed-forward layer of a mixture of experts (MoE).
//!
//! All rows of a pass that are routed to the same expert go through its weights together, across
//! tiles and sequences. Experts without rows are not read:
//!
//! ```text
//! each tile:    router -> scores -> the experts of each row, best first, and their weights
//! once:         pairs of row and expert, sorted by expert; up to 64 of one expert are a chunk
//! each chunk:   rows gathered, quantised -> gate, up -> h
//! each chunk:   h quantised -> down -> outputs
//! each tile:    outputs of a row times their weights, added up, best first
//! ```
//!
//! If there are fewer chunks than the threads need, chunks are split by panels. An output does not
//! depend on the other pairs of its chunk: kernels and order are the same.
//!
//! A thread that wakes late still goes through phases that are over, while the plan may already be
//! that of a later layer. So the number of units of a phase is a bound that depends on the pass
//! only, and a thread reads the plan only while it holds a unit.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::ops::Range;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{ExpertSpec, GroupSpec};

use super::tiles::{Widths, shared};
use super::tiling::{PREFILL_TILE, UNITS};
use crate::kernels::{Kernels, SharedMut, fold16};
use crate::layer::RouterVectors;

/// Maximum rows of a pass: enough that each of many experts gets some rows, but so few that the
/// outputs of all pairs (a row each) stay small.
pub(super) const PASS_ROWS: usize = 8 * PREFILL_TILE;

/// Expert that a row is routed to, and the weight of its output.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Route {
    pub expert: u32,
    pub weight: f32,
}

/// Reusable buffers for the pairs of a pass.
#[derive(Default)]
pub(super) struct MoeBuffers {
    normed: Vec<f32>,
    routes: Vec<Route>,
    h: Vec<f32>,
    out: Vec<f32>,
    shared: Vec<f32>,
    shared_weights: Vec<f32>,
    plan: Plan,
}

/// [`MoeBuffers`], shared between threads. The index of a pair is `row * used + rank`.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a> {
    /// `[row][width]`: input of the experts.
    pub(super) normed: SharedMut<'a, f32>,
    /// `[pair]`
    pub(super) routes: SharedMut<'a, Route>,
    /// `[place][ffn]`
    pub(super) h: SharedMut<'a, f32>,
    /// `[place][width]`
    pub(super) out: SharedMut<'a, f32>,
    /// `[row][width]`: outputs of the shared expert.
    pub(super) shared: SharedMut<'a, f32>,
    /// `[row]`: their weights.
    pub(super) shared_weights: SharedMut<'a, f32>,
    pub(super) plan: SharedMut<'a, Plan>,
    units: Units,
}

/// Pairs sorted by expert. The *place* of a pair is its index in that order.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) pairs: Vec<usize>,
    pub(super) places: Vec<usize>,
    chunks: Vec<Chunk>,
}

/// Consecutive places with the same expert, at most [`PREFILL_TILE`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Chunk {
    pub(super) expert: usize,
    pub(super) places: Range<usize>,
}

/// Units of a phase of experts: `parts` ranges of panels for each chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Units {
    /// Upper bound of the chunks of any plan.
    chunks: usize,
    parts: usize,
}

impl Units {
    fn of(pairs: usize, experts: usize, threads: usize) -> Self {
        // Each expert has at most one chunk that is not full.
        let chunks = pairs.min(pairs / PREFILL_TILE + experts);
        let wanted = if threads == 1 { 1 } else { threads * UNITS };
        Self {
            chunks,
            parts: wanted.div_ceil(chunks.max(1)),
        }
    }
}

impl MoeBuffers {
    pub(super) fn pairs(&mut self, widths: &Widths, threads: usize, rows: usize) -> Pairs<'_> {
        let pairs = rows * widths.used;
        // Without experts there are no pairs, and `normed` is unused.
        let rows = if widths.used > 0 { rows } else { 0 };
        let of_shared = if widths.shared > 0 { rows } else { 0 };
        Pairs {
            normed: shared(&mut self.normed, rows * widths.x),
            routes: shared(&mut self.routes, pairs),
            h: shared(&mut self.h, pairs * widths.ffn),
            out: shared(&mut self.out, pairs * widths.x),
            shared: shared(&mut self.shared, of_shared * widths.x),
            shared_weights: shared(&mut self.shared_weights, of_shared),
            plan: SharedMut::new(std::slice::from_mut(&mut self.plan)),
            units: Units::of(pairs, widths.experts, threads),
        }
    }
}

impl Plan {
    /// Sorts the pairs of `routes` by expert (stable) and splits them into chunks.
    pub(super) fn fill(&mut self, routes: &[Route], experts: usize) {
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
                .extend((start..end).step_by(PREFILL_TILE).map(|start| Chunk {
                    expert,
                    places: start..end.min(start + PREFILL_TILE),
                }));
        }
    }
}

impl Pairs<'_> {
    /// Number of units of each of the two phases of experts.
    pub(super) fn units(&self) -> usize {
        self.units.chunks * self.units.parts
    }

    /// The chunk of a unit and, of the panels of its expert, number and index of the parts; `None`
    /// if the plan has fewer chunks.
    pub(super) fn unit<'p>(
        &self,
        plan: &'p Plan,
        unit: usize,
    ) -> Option<(&'p Chunk, usize, usize)> {
        let Units { parts, .. } = self.units;
        let chunk = plan.chunks.get(unit / parts)?;
        Some((chunk, parts, unit % parts))
    }
}

/// Returns true if score `a` of expert `i` ranks before score `b` of expert `j`: larger scores
/// first, lower indices first among equal scores, NaN last.
fn before((a, i): (f32, usize), (b, j): (f32, usize)) -> bool {
    let key = |score: f32| (!score.is_nan()).then_some(score);
    match key(a).partial_cmp(&key(b)) {
        Some(Ordering::Greater) => true,
        Some(Ordering::Equal) => i < j,
        _ => false,
    }
}

/// The best score that ranks after `last`, and its index, in the order of [`before`].
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

/// Fills `routes` with the best experts of a row, and their weights. Overwrites `scores`, which has
/// one of each expert, as have the vectors.
pub fn choose(
    kernels: Kernels,
    scores: &mut [f32],
    spec: &ExpertSpec,
    vectors: &RouterVectors,
    routes: &mut [Route],
) {
    if let Some(bias) = &vectors.bias {
        kernels.add_round(scores, bias, BoundaryDtype::F32);
    }
    if spec.sigmoid {
        kernels.sigmoid(scores);
    }
    let mut ranked = Cow::Borrowed(&*scores);
    if let Some(correction) = &vectors.correction {
        kernels.add_round(ranked.to_mut(), correction, BoundaryDtype::F32);
    }
    if let Some(groups) = &spec.groups {
        keep_groups(ranked.to_mut(), groups, spec.sigmoid);
    }
    let mut last = None;
    for route in routes.iter_mut() {
        last = next_best(&ranked, last);
        let (_, expert) = last.unwrap_or_default();
        route.expert = expert as u32;
    }
    if !spec.sigmoid {
        let best = routes.first().map_or(0, |route| route.expert as usize);
        let top = scores[best];
        scores.iter_mut().for_each(|score| *score -= top);
        kernels.exp(scores);
    }
    let own = |route: &Route| scores[route.expert as usize];
    let sum = match (spec.normalise, spec.sigmoid) {
        (true, false) => routes.iter().fold(0.0, |sum, route| sum + own(route)),
        (true, true) => routes.iter().fold(0.0, |sum, route| sum + own(route)) + LEAST_SUM,
        (false, false) => fold16(scores),
        (false, true) => 1.0,
    };
    for route in routes {
        route.weight = own(route) / sum;
        if let Some(scale) = spec.scale {
            route.weight *= scale;
        }
        if let Some(scale) = &vectors.scale {
            route.weight *= scale[route.expert as usize];
        }
    }
}

/// Added to the sum of sigmoids, as in the published models.
const LEAST_SUM: f32 = 1e-20;

/// Makes NaN, which ranks last, of the scores outside the best groups. The score of a group is that
/// of its best expert; or, of sigmoids, the sum of those of its two best experts.
fn keep_groups(scores: &mut [f32], groups: &GroupSpec, of_two: bool) {
    let each = scores.len() / groups.count as usize;
    let best = |group: &[f32]| {
        let first = next_best(group, None);
        let (score, _) = first.unwrap_or_default();
        match of_two {
            true => score + next_best(group, first).unwrap_or_default().0,
            false => score,
        }
    };
    let of_groups: Vec<f32> = scores.chunks_exact(each).map(best).collect();
    let mut kept = vec![false; of_groups.len()];
    let mut last = None;
    for _ in 0..groups.used {
        last = next_best(&of_groups, last);
        let (_, group) = last.unwrap_or_default();
        kept[group] = true;
    }
    for (group, kept) in scores.chunks_exact_mut(each).zip(kept) {
        if !kept {
            group.fill(f32::NAN);
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
    fn experts_are_ranked_by_score_then_index_with_nan_last() {
        assert_eq!(best(&[1.0, 3.0, 2.0], 3), [1, 2, 0]);
        assert_eq!(best(&[2.0, 5.0, 2.0, 5.0], 4), [1, 3, 0, 2]);
        assert_eq!(best(&[-0.0, 0.0, -1.0], 2), [0, 1]);
        let nan = f32::NAN;
        assert_eq!(best(&[nan, f32::NEG_INFINITY, nan, 1.0], 4), [3, 1, 0, 2]);
    }

    #[test]
    fn expert_weights_equal_the_specification() {
        let spec = std::fs::read_to_string(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../specs/canonical-arithmetic.md"
        ));
        let spec = spec.unwrap();
        let softmax = ExpertSpec {
            count: 4,
            used: 2,
            normalise: true,
            bias: false,
            shared: None,
            leading: None,
            sigmoid: false,
            correction: false,
            groups: None,
            scale: None,
            norms: false,
        };
        let sigmoid = ExpertSpec {
            sigmoid: true,
            correction: true,
            scale: Some(2.5),
            ..softmax
        };
        let groups = Some(GroupSpec { count: 2, used: 1 });
        let each = |spec: ExpertSpec| {
            let not = ExpertSpec {
                normalise: false,
                ..spec
            };
            [spec, not]
        };
        let grouped = ExpertSpec { groups, ..sigmoid };
        let [both, rest] = [each(softmax), each(sigmoid)];
        for (of, experts) in [(&both[..], [0, 2]), (&rest, [1, 2]), (&[grouped], [2, 3])] {
            for of in of {
                let mut scores = [1.5, -0.25, 1.5, 0.75];
                let correction = vec![-0.25, 0.5, 0.0, 0.125];
                let vectors = RouterVectors {
                    correction: of.correction.then_some(correction),
                    ..RouterVectors::default()
                };
                let mut routes = [Route::default(); 2];
                choose(Kernels::best(), &mut scores, of, &vectors, &mut routes);
                assert_eq!(routes.map(|route| route.expert), experts, "{of:?}");
                let [first, second] = routes.map(|r| format!("`{:08x}`", r.weight.to_bits()));
                assert!(
                    spec.contains(&format!("{first}, {second}")),
                    "{of:?}: {first}"
                );
            }
        }
        // A softmax is limited to the group with the best expert, here the first of two equal ones.
        let grouped = ExpertSpec { groups, ..softmax };
        let mut scores = [1.5, -0.25, 1.5, 0.75];
        let mut routes = [Route::default(); 2];
        let none = RouterVectors::default();
        choose(Kernels::best(), &mut scores, &grouped, &none, &mut routes);
        assert_eq!(routes.map(|route| route.expert), [0, 1]);
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
