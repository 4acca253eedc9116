//! Router: selects hosts that together cover a range of layers.
//!
//! Pure: no clock, no network. [`pick_by`] filters the advertised candidates and covers the layers
//! with spans of them, by a policy: `greedy.rs`, `planned.rs`, `petals_like.rs`, or one of the first
//! two, by what was measured. Speeds come from the members' measurements, corrected by what the
//! caller observed (`measured.rs`). No policy takes a needless hop: layers that the next host of the
//! route holds as well, and is not worse at, are part of its span.
//!
//! Layers that must run together count as one layer (`together.rs`), so that no policy cuts them.
//!
//! # Worked example
//! A model of 16 layers, shards `0-7`, `4-11`, `8-15`, all idle. The cursor
//! stands at layer 0: only `0-7` has it. The cursor moves to 8: `4-11` and
//! `8-15` both have it, both are idle and on the same LAN, and `8-15` reaches
//! further. The cover is `{0-7, 8-15}`; `4-11` stays unused.

mod greedy;
mod measured;
mod petals_like;
mod planned;
mod policy_name;
mod request;
mod share;
mod together;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hearthnet_bus::NodeId;

pub use self::measured::{HostSpeed, Speeds, speeds};
pub use self::policy_name::PolicyName;
pub use self::request::{Candidate, RouteError, RouteRequest, Span, Usable};
use crate::exact::Allowed;
use crate::hosts::health::Standing;
use crate::hosts::tie_breaker::TieBreaker;

/// Maximum number of candidates per decision; a community has tens of hosts. It bounds the work
/// under a flood of descriptors. Measured hosts are kept first, then hosts by the caller's secret
/// tie-break, so that no claim and no choice of a name helps.
pub const MAX_CANDIDATES: usize = 4096;

/// Maximum number of candidates of one host, latest first: it serves one range of a model and rarely
/// changes it.
pub const MAX_OF_HOST: usize = 4;

/// Covers the requested layers with usable candidates, by `policy`. Without `speeds`, every policy
/// routes as the greedy one.
///
/// # Errors
/// Any [`RouteError`].
pub fn pick_by(
    policy: PolicyName,
    speeds: &Speeds,
    request: &RouteRequest<'_>,
    candidates: &[Candidate],
) -> Result<Vec<Span>, RouteError> {
    match request.together.len() {
        0 | 1 => pick_anywhere(policy, speeds, request, candidates),
        _ => together::pick(request, candidates, |request, candidates| {
            pick_anywhere(policy, speeds, request, candidates)
        }),
    }
}

/// [`pick_by`], for a model that may be cut between any two layers.
fn pick_anywhere(
    policy: PolicyName,
    speeds: &Speeds,
    request: &RouteRequest<'_>,
    candidates: &[Candidate],
) -> Result<Vec<Span>, RouteError> {
    let (usable, other_weights, other_dtypes) = usable(request, candidates);
    let may = |c: &Candidate| request.arithmetic.admits(&c.descriptor.arithmetic);
    let (usable, others): (Vec<_>, Vec<_>) = usable.into_iter().partition(|(_, c)| may(c));
    let cover = |usable: &[Usable<'_>]| cover(policy, speeds, request, usable);
    let covered = match request.arithmetic {
        Allowed::ExactFirst => {
            // A recently failed host is used only for layers without another host.
            let first = |c: &Candidate| c.is_exact() && c.standing == Standing::Good;
            let exact = usable.iter().filter(|(_, c)| first(c)).copied();
            let exact: Vec<Usable<'_>> = exact.collect();
            cover(&exact).or_else(|_| cover(&usable))
        }
        Allowed::Only(_) | Allowed::All => cover(&usable),
    };
    let Err(RouteError::Uncovered { layer, .. }) = covered else {
        return covered;
    };
    if let (Allowed::Only(wanted), Some((_, other))) = (
        request.arithmetic,
        others.iter().find(|(_, c)| c.holds(layer)),
    ) {
        return Err(RouteError::ArithmeticMismatch {
            layer,
            wanted: wanted.to_owned(),
            found: other.descriptor.arithmetic.clone(),
        });
    }
    if let Some(other) = other_dtypes.iter().find(|c| c.holds(layer)) {
        return Err(RouteError::DtypeMismatch {
            layer,
            wanted: request.boundary_dtype.to_owned(),
            found: other.descriptor.boundary_dtype.clone(),
        });
    }
    match other_weights {
        Some(found) => Err(RouteError::WeightsMismatch {
            wanted: request.weights_sha256.to_owned(),
            found,
        }),
        None => covered,
    }
}

/// Covers the layers with candidates that passed all tests of the request.
///
/// # Errors
/// [`RouteError::Uncovered`] or [`RouteError::TooManyShards`].
fn cover(
    policy: PolicyName,
    speeds: &Speeds,
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
) -> Result<Vec<Span>, RouteError> {
    let is_measured = |span: &Span| {
        let host = usable.iter().find(|(index, _)| *index == span.candidate);
        host.is_some_and(|(_, c)| speeds.contains_key(&c.descriptor.host))
    };
    let by_speed = match policy {
        PolicyName::Greedy => None,
        PolicyName::Planned => planned::best(request, usable, speeds),
        PolicyName::PetalsLike => petals_like::best(request, usable, speeds),
        PolicyName::Auto => {
            planned::best(request, usable, speeds).filter(|route| route.iter().all(is_measured))
        }
    };
    by_speed.map_or_else(|| greedy::cover(request, usable), Ok)
}

/// Usable candidates, and reasons for rejecting others: weights of a candidate with the same model
/// id, and candidates with the right weights or model id and another data type. Both lists have at
/// most [`MAX_CANDIDATES`].
fn usable<'a>(
    request: &RouteRequest<'_>,
    candidates: &'a [Candidate],
) -> (Vec<Usable<'a>>, Option<String>, Vec<&'a Candidate>) {
    let (mut usable, mut other_weights, mut other_dtypes) = (Vec::new(), None, Vec::new());
    let mut of_host: BTreeMap<NodeId, usize> = BTreeMap::new();
    for (index, candidate) in in_order(request.tie_breaker, candidates) {
        let d = &candidate.descriptor;
        let taken = of_host.entry(d.host).or_default();
        if *taken == MAX_OF_HOST || usable.len() == MAX_CANDIDATES {
            continue;
        }
        if request.exclude.contains(&d.host)
            || (candidate.is_self && !request.allow_self)
            || d.total_layers != request.total_layers
        {
            continue;
        }
        if d.boundary_dtype != request.boundary_dtype {
            let same_model =
                d.weights_sha256 == request.weights_sha256 || d.model_id == request.model_id;
            if same_model && other_dtypes.len() < MAX_CANDIDATES {
                other_dtypes.push(candidate);
            }
        } else if d.weights_sha256 == request.weights_sha256 {
            usable.push((index, candidate));
            *taken += 1;
        } else if d.model_id == request.model_id {
            other_weights = Some(d.weights_sha256.clone());
        }
    }
    (usable, other_weights, other_dtypes)
}

/// Order in which candidates are considered: measured ones first, then by tie-break; the latest
/// advertisement of a host first.
fn in_order<'a>(
    tie_breaker: &TieBreaker,
    candidates: &'a [Candidate],
) -> impl Iterator<Item = (usize, &'a Candidate)> {
    let mut all: Vec<_> = candidates.iter().enumerate().collect();
    all.sort_by_cached_key(|(_, c)| {
        let d = &c.descriptor;
        let tie = tie_breaker.rank(&d.host);
        (c.ms_per_layer.is_none(), tie, Reverse(d.advertised_at))
    });
    all.into_iter()
}

#[cfg(test)]
mod policy_tests;
#[cfg(test)]
mod tests;
