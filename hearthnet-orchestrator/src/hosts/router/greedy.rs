//! Takes the best candidate for each next layer.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::BuildHasher as _;

use hearthnet_bus::NodeId;

use super::policy::{RoutePolicy, Usable};
use super::request::{Candidate, RouteError, RouteRequest, Span};
use crate::exact::Allowed;
use crate::hosts::health::Standing;

/// Streams that a host may get regardless of its share: the first few show no pattern.
const FREE_STREAMS: u32 = 2;

/// Walks from the first layer to the last; the default policy.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct Greedy;

impl RoutePolicy for Greedy {
    fn cover(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
    ) -> Result<Vec<Span>, RouteError> {
        cover(request, usable)
    }
}

/// Covers the layers from first to last with the best candidate for each next layer.
///
/// Candidates are compared by, in this order: rating by the caller (failing and quarantined hosts
/// come last); exact arithmetic, if preferred; measured speed, in factors of two of the fastest;
/// whether the host has more than its share of the caller's streams; advertised load; distance;
/// reach; and a tie-break that differs between callers, so that callers spread. Measurements of the
/// caller thus outweigh claims of hosts.
///
/// # Errors
/// [`RouteError::Uncovered`] or [`RouteError::TooManyShards`].
fn cover(request: &RouteRequest<'_>, usable: &[Usable<'_>]) -> Result<Vec<Span>, RouteError> {
    let exact_first = request.arithmetic == Allowed::ExactFirst;
    let is_second = |c: &Candidate| exact_first && !c.is_exact();
    let by_load = |c: &Candidate, competition: &Competition| {
        let (depth, distance) = (c.descriptor.queue_depth, c.hop_weight);
        let slowness = slowness(c, competition.fastest);
        let over = competition.is_over(c);
        (c.standing, is_second(c), slowness, over, depth, distance)
    };
    let by_standing = |c: &Candidate, _: &Competition| (c.standing, is_second(c), 0, false, 0, 0);
    let by_reach = |_: &Candidate, _: &Competition| (Standing::Good, false, 0, false, 0, 0);
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
type Cost = (Standing, bool, u32, bool, u32, u32);

/// Ranks a candidate against its competitors.
type CostOf<'a> = dyn Fn(&Candidate, &Competition) -> Cost + 'a;

/// Competitors of a candidate.
struct Competition {
    /// Shortest measured time per layer among the route's candidates, in milliseconds.
    fastest: Option<f64>,
    /// Hosts that hold the current layer, and the recent streams given to them.
    hosts: u32,
    streams: u32,
}

impl Competition {
    /// Returns true if one more stream would exceed a host's share: half of all streams, or twice
    /// an equal share, whichever is less. Claims are free, and a host that attracted all chats by
    /// them would see all of their activations. The caller's own node has no limit.
    fn is_over(&self, candidate: &Candidate) -> bool {
        let (own, all) = (
            u64::from(candidate.streams) + 1,
            u64::from(self.streams) + 1,
        );
        let is_free = candidate.is_self || candidate.streams < FREE_STREAMS;
        !is_free && own * u64::from(self.hosts.max(4)) > 2 * all
    }
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
    let mut spans: Vec<Span> = Vec::new();
    let mut cursor = first;
    loop {
        let here = usable.iter().filter(|(_, c)| c.holds(cursor));
        let given: BTreeMap<NodeId, u32> = here
            .clone()
            .map(|(_, c)| (c.descriptor.host, c.streams))
            .collect();
        let competition = Competition {
            fastest,
            hosts: u32::try_from(given.len()).unwrap_or(u32::MAX),
            streams: given.values().sum(),
        };
        let best = here.min_by_key(|(_, c)| {
            let own_first = c.is_self && cursor == 0;
            let reach = c.descriptor.layer_range.1.min(last);
            let host = c.descriptor.host;
            let tie = request.tie_breaker.hash_one(host);
            (cost(c, &competition), own_first, Reverse(reach), tie, host)
        });
        let Some(&(index, candidate)) = best else {
            return Err(RouteError::Uncovered {
                layer: cursor,
                model_id: request.model_id.to_owned(),
            });
        };
        if spans.len() == request.max_shards {
            return Err(RouteError::TooManyShards {
                max: request.max_shards,
            });
        }
        let hi = candidate.descriptor.layer_range.1.min(last);
        spans.push(Span {
            candidate: index,
            lo: cursor,
            hi,
        });
        if hi == last {
            return Ok(spans);
        }
        cursor = hi + 1;
    }
}
