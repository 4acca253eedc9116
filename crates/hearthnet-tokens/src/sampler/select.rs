//! Finds the likeliest tokens without a full sort.
//!
//! The logits must not be NaN or plus infinity. The order is by logit, greatest first, then by id.

use super::weights::weight;
use std::cmp::Ordering;

/// Token with its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
}

impl Candidate {
    /// Best first. -0 equals 0, so the ids decide.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        let by_logit = other
            .logit
            .partial_cmp(&self.logit)
            .unwrap_or(Ordering::Equal);
        by_logit.then(self.id.cmp(&other.id))
    }
}

/// Tokens with consecutive ids from `first_id` on.
pub(super) fn candidates(first_id: u32, logits: &[f32]) -> impl Iterator<Item = Candidate> {
    let tokens = (first_id..).zip(logits);
    tokens.map(|(id, &logit)| Candidate { id, logit })
}

/// Logits per step: enough for the compiler to use wide registers.
const BLOCK: usize = 64;
/// Classes of [`last_of_nucleus`] per unit of the logit.
const CLASSES_PER_UNIT: f64 = 16.0;
/// Number of classes; the last begins where weights become 0.
const CLASSES: usize = 29 * 16;

/// First token whose logit is NaN or plus infinity.
pub(super) fn not_finite(logits: &[f32]) -> Option<u32> {
    // False for NaN too. No early exit, which would prevent vectorisation.
    let fine = |logit: &f32| *logit < f32::INFINITY;
    let all_fine = logits.iter().fold(true, |all, logit| all & fine(logit));
    if all_fine {
        return None;
    }
    logits
        .iter()
        .position(|logit| !fine(logit))
        .and_then(|id| u32::try_from(id).ok())
}

/// Best token; `None` if all are ruled out.
pub(super) fn best(logits: &[f32]) -> Option<Candidate> {
    let top = greatest(logits);
    if top == f32::NEG_INFINITY {
        return None;
    }
    let id = logits.iter().position(|logit| *logit == top)?;
    Some(Candidate {
        id: u32::try_from(id).ok()?,
        logit: top,
    })
}

/// Greatest logit; minus infinity if there are none.
fn greatest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut blocks = logits.chunks_exact(16);
    for block in &mut blocks {
        for (lane, logit) in lanes.iter_mut().zip(block) {
            *lane = if *logit > *lane { *logit } else { *lane };
        }
    }
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let rest = blocks.remainder().iter().copied();
    lanes
        .into_iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, greater)
}

/// Fills `out` with the first `k` tokens in order; fewer if the others are ruled out.
pub(super) fn first_k(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if k == 0 {
        return;
    }
    // Beyond twice the wanted number, all but the best are dropped. From then on, only logits above
    // the worst of these can belong to them, because ids increase.
    let room = k.saturating_mul(2).max(BLOCK);
    let mut floor = f32::NEG_INFINITY;
    for (block, first_id) in logits.chunks(BLOCK).zip((0_u32..).step_by(BLOCK)) {
        if greatest(block) <= floor {
            continue;
        }
        out.extend(candidates(first_id, block).filter(|c| c.logit > floor));
        if out.len() > room {
            cut(out, k);
            floor = out.last().map_or(floor, |worst| worst.logit);
        }
    }
    cut(out, k);
    out.sort_unstable_by(Candidate::order);
}

/// Keeps the first `k`, the worst of them last.
fn cut(candidates: &mut Vec<Candidate>, k: usize) {
    if candidates.len() > k {
        candidates.select_nth_unstable_by(k - 1, Candidate::order);
        candidates.truncate(k);
    }
}

/// Sum of weights at which top-p stops.
fn target(top_p: f32, sum: u64) -> u64 {
    (f64::from(top_p) * sum as f64).ceil() as u64
}

/// Cuts ordered candidates behind the one at which the running sum of weights reaches the share
/// `top_p` of the total.
pub(super) fn cut_at(candidates: &mut Vec<Candidate>, top: f32, top_p: f32) {
    let weight = |c: &Candidate| weight(f64::from(c.logit) - f64::from(top));
    let target = target(top_p, candidates.iter().map(weight).sum());
    keep_until(candidates, 0, target, &weight);
}

/// Cuts ordered candidates behind the one at which the running sum, starting from `running`,
/// reaches `target`.
fn keep_until(
    candidates: &mut Vec<Candidate>,
    mut running: u64,
    target: u64,
    weight: &dyn Fn(&Candidate) -> u64,
) {
    let reached = candidates.iter().position(|candidate| {
        running += weight(candidate);
        running >= target
    });
    candidates.truncate(reached.map_or(candidates.len(), |at| at + 1));
}

/// Last token, in order, that [`cut_at`] would keep of all tokens.
///
/// Instead of sorting, tokens are put into classes by their distance from the best one. The classes
/// are summed from the best on, and only the class that reaches the sum is sorted. `members` is a
/// buffer to reuse.
pub(super) fn last_of_nucleus(
    logits: &[f32],
    top: f32,
    top_p: f32,
    members: &mut Vec<Candidate>,
) -> Option<Candidate> {
    let below = |logit: f32| f64::from(top) - f64::from(logit);
    // Tokens far below the best, or ruled out, are in the last class.
    let class = |logit: f32| (below(logit) * CLASSES_PER_UNIT).min((CLASSES - 1) as f64) as i32;
    let mut sums = [0_u64; CLASSES];
    for block in logits.chunks(BLOCK) {
        // Separate from the summation, so that the compiler can vectorise it.
        let (mut weights, mut classes) = ([0_u64; BLOCK], [0_i32; BLOCK]);
        for ((weight, class_of), logit) in weights.iter_mut().zip(&mut classes).zip(block) {
            *weight = self::weight(-below(*logit));
            *class_of = class(*logit);
        }
        for (weight, class) in weights.iter().zip(classes).take(block.len()) {
            if let Some(sum) = usize::try_from(class)
                .ok()
                .and_then(|class| sums.get_mut(class))
            {
                *sum += weight;
            }
        }
    }
    let target = target(top_p, sums.iter().sum());
    let (mut last, mut running) = (0, 0);
    for (class, sum) in (0..).zip(&sums) {
        last = class;
        if running + sum >= target {
            break;
        }
        running += sum;
    }
    members.clear();
    // A cheaper comparison preselects the members of the class; one unit is a wide margin.
    let floor = f64::from(top) - f64::from(last + 1) / CLASSES_PER_UNIT - 1.0;
    let possible = candidates(0, logits).filter(|c| f64::from(c.logit) >= floor);
    members.extend(possible.filter(|c| class(c.logit) == last));
    members.sort_unstable_by(Candidate::order);
    keep_until(members, running, target, &|c| weight(-below(c.logit)));
    members.last().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sorted(logits: &[f32]) -> Vec<Candidate> {
        let mut all: Vec<_> = candidates(0, logits).collect();
        all.retain(|c| c.logit > f32::NEG_INFINITY);
        all.sort_by(Candidate::order);
        all
    }

    /// Many ties, both zeros, ruled-out tokens.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![
            3 => (-4_i8..4).prop_map(|n| f32::from(n) / 2.0),
            1 => Just(-0.0_f32),
            1 => Just(f32::NEG_INFINITY),
            3 => -30.0_f32..30.0,
        ];
        prop::collection::vec(logit, 0..700)
    }

    fn check_first_k(logits: &[f32], k: usize) -> Result<(), TestCaseError> {
        let mut got = Vec::new();
        first_k(logits, k, &mut got);
        let mut expected = sorted(logits);
        expected.truncate(k);
        prop_assert_eq!(got, expected);
        Ok(())
    }

    proptest! {
        #[test]
        fn the_first_k_are_those_of_a_full_sort(logits in logits(), k in 0_usize..800) {
            check_first_k(&logits, k)?;
        }

        #[test]
        fn ascending_and_descending_logits_are_no_trap(n in 1_usize..2000, k in 1_usize..50, up: bool) {
            let logits: Vec<f32> =
                (0..n).map(|i| if up { i as f32 } else { -(i as f32) }).collect();
            check_first_k(&logits, k)?;
        }

        #[test]
        fn the_best_is_the_first_of_a_full_sort(logits in logits()) {
            prop_assert_eq!(best(&logits), sorted(&logits).first().copied());
        }

        #[test]
        fn top_p_takes_the_shortest_beginning_that_suffices(logits in logits(), top_p in 0.0_f32..1.0) {
            let Some(best) = best(&logits) else { return Ok(()) };
            let last = last_of_nucleus(&logits, best.logit, top_p, &mut Vec::new()).unwrap();
            let mut expected = sorted(&logits);
            let weight = |c: &Candidate| weight(f64::from(c.logit) - f64::from(best.logit));
            let share = |kept: &[Candidate]| {
                let sum = |some: &[Candidate]| some.iter().map(weight).sum::<u64>() as f64;
                sum(kept) / sum(&sorted(&logits))
            };
            cut_at(&mut expected, best.logit, top_p);
            prop_assert_eq!(expected.last(), Some(&last));
            let got = expected;
            prop_assert!(share(&got) >= f64::from(top_p) - 1e-9);
            prop_assert!(got.len() == 1 || share(&got[..got.len() - 1]) < f64::from(top_p));
        }

        #[test]
        fn the_first_invalid_logit_is_found(
            mut logits in logits(),
            at in 0_usize..700,
            bad in prop::sample::select(vec![f32::NAN, -f32::NAN, f32::INFINITY]),
        ) {
            prop_assert_eq!(not_finite(&logits), None);
            if let Some(logit) = logits.get_mut(at) {
                *logit = bad;
                prop_assert_eq!(not_finite(&logits), u32::try_from(at).ok());
            }
        }
    }
}
