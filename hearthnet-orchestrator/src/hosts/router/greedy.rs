//! Takes the best candidate for each next layer.

use std::cmp::Reverse;

use super::policy_name::PolicyName;
use super::request::{Candidate, RouteError, RouteRequest, Span, Usable};
use super::share::Share;
use crate::exact::Allowed;
use crate::hosts::health::Standing;

/// Covers the layers from first to last with the best candidate for each next layer.
///
/// Candidates are compared by, in this order: rating by the caller (failing and quarantined hosts
/// come last); exact arithmetic, if preferred; false
/// accusations, by verdicts; measured speed, in factors of two of the fastest;
/// whether the host has more than its share of the caller's streams; advertised load; distance;
/// reach; and a tie-break that differs between callers, so that callers spread. Measurements of the
/// caller thus outweigh claims of hosts.
///
/// # Errors
/// [`RouteError::Uncovered`] or [`RouteError::TooManyShards`].
pub(super) fn cover(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
) -> Result<Vec<Span>, RouteError> {
    let exact_first = request.arithmetic == Allowed::ExactFirst;
    // Arithmetic, then reputation.
    let second = |c: &Candidate| (exact_first && !c.is_exact(), c.is_false_accuser);
    let by_load = |c: &Candidate, competition: &Competition| {
        let (depth, distance) = (c.descriptor.queue_depth, c.hop_weight);
        let slowness = slowness(c, competition.fastest);
        let over = competition.share.is_exceeded_by(c);
        (c.standing, second(c), slowness, over, depth, distance)
    };
    let by_standing = |c: &Candidate, _: &Competition| (c.standing, second(c), 0, false, 0, 0);
    let by_reach =
        |_: &Candidate, _: &Competition| (Standing::Good, (false, false), 0, false, 0, 0);
    // Selection by load can take more hops than allowed. Selection by reach yields the fewest hops.
    let tries: [&CostOf<'_>; 3] = [&by_load, &by_standing, &by_reach];
    let mut covers = tries.into_iter().map(|cost| walk(request, usable, cost));
    let too_long = |cover: &Result<_, _>| matches!(cover, Err(RouteError::TooManyShards { .. }));
    covers
        .find(|cover| !too_long(cover))
        .unwrap_or(Err(RouteError::TooManyShards {
            max: request.max_shards,
        }))
}

/// Cost of a candidate, most important part first. Reach is compared after it.
type Cost = (Standing, (bool, bool), u32, bool, u32, u32);

/// Ranks a candidate against its competitors.
type CostOf<'a> = dyn Fn(&Candidate, &Competition) -> Cost + 'a;

/// Competitors of a candidate.
struct Competition {
    /// Shortest measured time per layer among the route's candidates, in milliseconds.
    fastest: Option<f64>,
    share: Share,
}

/// Number of times that a host's time per layer can be halved before it is below twice the
/// `fastest` one. The advertised time is used if there is no measurement.
fn slowness(candidate: &Candidate, fastest: Option<f64>) -> u32 {
    let Some(fastest) = fastest else { return 0 };
    let (lo, hi) = candidate.descriptor.layer_range;
    let layers = hi.saturating_sub(lo).saturating_add(1);
    let claimed = f64::from(candidate.descriptor.ms_per_token) / f64::from(layers);
    let takes = candidate.ms_per_layer.unwrap_or(claimed);
    // Machines are not distinguished below a microsecond per layer.
    let mut bound = fastest.max(0.001) * 2.0;
    let mut times = 0;
    while takes >= bound && times < 16 {
        (times, bound) = (times + 1, bound * 2.0);
    }
    times
}

/// Moves a cursor over the layers and takes the best candidate at each stop.
fn walk(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    cost: &CostOf<'_>,
) -> Result<Vec<Span>, RouteError> {
    let (first, last) = (*request.layers.start(), *request.layers.end());
    // Over all layers: they are similar, and the candidates of one layer may all be unmeasured.
    let measured = usable.iter().filter_map(|(_, c)| c.ms_per_layer);
    let fastest = measured.min_by(f64::total_cmp);
    let competition = |layer: u32| Competition {
        fastest,
        share: Share::of(layer, usable),
    };
    let mut chosen: Vec<(Span, &Candidate)> = Vec::new();
    let mut cursor = first;
    loop {
        let here = usable.iter().filter(|(_, c)| c.holds(cursor));
        let competition = competition(cursor);
        let best = here.min_by_key(|(_, c)| {
            let own_first = c.is_self && cursor == 0;
            let reach = c.descriptor.layer_range.1.min(last);
            let host = c.descriptor.host;
            let tie = request.tie_breaker.rank(&host);
            (cost(c, &competition), own_first, Reverse(reach), tie, host)
        });
        let Some(&(index, candidate)) = best else {
            return Err(RouteError::Uncovered {
                layer: cursor,
                model_id: request.model_id.to_owned(),
            });
        };
        if chosen.len() == request.max_shards {
            return Err(RouteError::TooManyShards {
                max: request.max_shards,
            });
        }
        let hi = candidate.descriptor.layer_range.1.min(last);
        let span = Span {
            candidate: index,
            lo: cursor,
            hi,
            policy: PolicyName::Greedy,
        };
        chosen.push((span, candidate));
        if hi == last {
            break;
        }
        cursor = hi + 1;
    }
    let is_worse = |next: &Candidate, host: &Candidate, layer: u32| {
        let competition = competition(layer);
        let keys = |c: &Candidate| {
            let (standing, second, slowness, over, ..) = cost(c, &competition);
            (standing, second, slowness, over)
        };
        keys(next) > keys(host)
    };
    Ok(joined(chosen, is_worse))
}

/// Removes needless hops: a span whose layers the next host holds as well becomes part of that
/// host's span, unless the next host `is_worse` at a layer. A queue is no reason for a hop, because
/// the next host computes for this chat anyway. A span of the caller's own node costs no hop.
fn joined(
    chosen: Vec<(Span, &Candidate)>,
    is_worse: impl Fn(&Candidate, &Candidate, u32) -> bool,
) -> Vec<Span> {
    let mut route: Vec<(Span, &Candidate)> = Vec::with_capacity(chosen.len());
    for (span, host) in chosen.into_iter().rev() {
        let takes_over = |next: &Candidate| {
            let stays = host.is_self || (next.is_self && span.lo == 0);
            next.holds(span.lo) && !stays && !is_worse(next, host, span.lo)
        };
        match route.last_mut().filter(|(_, next)| takes_over(next)) {
            Some((next, _)) => next.lo = span.lo,
            None => route.push((span, host)),
        }
    }
    route.into_iter().rev().map(|(span, _)| span).collect()
}
