//! Covers layers with candidates that may be used.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::BuildHasher as _;

use hearthnet_bus::NodeId;

use super::{Candidate, RouteError, RouteRequest, Span};
use crate::exact::Allowed;
use crate::health::Standing;

/// Streams that a host may be given whatever its share: a caller's first chats tell nothing yet.
const FREE_STREAMS: u32 = 2;

/// A candidate that may be used, and its index among all.
pub(super) type Usable<'a> = (usize, &'a Candidate);

/// M26 section 5.2: from the first layer on, take the least loaded shard that has the next layer.
///
/// What the caller has seen counts more than what hosts say: whoever failed of late comes after
/// all others, whoever returned impossible numbers comes last. Where exact hosts are preferred, others
/// come after them. Of the rest those that were
/// measured to be twice as slow as the fastest, or worse, come later. Of those that are equal in this,
/// whoever has had more than its share of the caller's streams comes later, whatever it claims. Only
/// then does the load decide that they claim, then the distance, then who reaches
/// furthest; and last a lot that is different for each caller, so that callers spread.
///
/// # Errors
/// [`RouteError::Uncovered`] or [`RouteError::TooManyShards`].
pub(super) fn cover(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
) -> Result<Vec<Span>, RouteError> {
    let exact_first = request.arithmetic == Allowed::ExactFirst;
    let is_second = |c: &Candidate| exact_first && !c.is_exact();
    let by_load = |c: &Candidate, beside: &Beside| {
        let (depth, distance) = (c.descriptor.queue_depth, c.hop_weight);
        let slowness = slowness(c, beside.fastest);
        let over = beside.is_over(c);
        (c.standing, is_second(c), slowness, over, depth, distance)
    };
    let by_standing = |c: &Candidate, _: &Beside| (c.standing, is_second(c), 0, false, 0, 0);
    let by_reach = |_: &Candidate, _: &Beside| (Standing::Good, false, 0, false, 0, 0);
    // Least load first can take more hops than allowed where fewer would do:
    // longest reach first is the cover with the fewest hops.
    let tries: [&CostOf<'_>; 3] = [&by_load, &by_standing, &by_reach];
    let mut covers = tries.into_iter().map(|cost| walk(request, usable, cost));
    let too_long = |cover: &Result<_, _>| matches!(cover, Err(RouteError::TooManyShards { .. }));
    covers
        .find(|cover| !too_long(cover))
        .unwrap_or(Err(RouteError::TooManyShards {
            max: request.max_shards,
        }))
}

/// What speaks against a candidate, before its reach: the most important first.
type Cost = (Standing, bool, u32, bool, u32, u32);

/// What speaks against a candidate, beside others.
type CostOf<'a> = dyn Fn(&Candidate, &Beside) -> Cost + 'a;

/// Those that a candidate stands beside.
struct Beside {
    /// The least time per layer that was measured of any of the route's candidates.
    fastest: Option<f64>,
    /// Hosts of the layer in question, and the streams that they were given of late.
    hosts: u32,
    streams: u32,
}

impl Beside {
    /// Whether a host has had more than its share, were it given one more stream: half of all, or twice
    /// what would be its own if all were given alike, whichever is less. A claim costs nothing, and
    /// whoever draws all chats by it reads them all. The caller's own layers are not bounded.
    fn is_over(&self, candidate: &Candidate) -> bool {
        let (own, all) = (
            u64::from(candidate.streams) + 1,
            u64::from(self.streams) + 1,
        );
        let is_free = candidate.is_self || candidate.streams < FREE_STREAMS;
        !is_free && own * u64::from(self.hosts.max(4)) > 2 * all
    }
}

/// How often a host's time per layer is twice that of the `fastest` that was measured. What
/// a host says of itself counts where nothing was measured, and never makes it faster than those
/// that were.
fn slowness(candidate: &Candidate, fastest: Option<f64>) -> u32 {
    let Some(fastest) = fastest else { return 0 };
    let (lo, hi) = candidate.descriptor.layer_range;
    let layers = hi.saturating_sub(lo).saturating_add(1);
    let claimed = f64::from(candidate.descriptor.ms_per_token) / f64::from(layers);
    let takes = candidate.ms_per_layer.unwrap_or(claimed);
    // A microsecond per layer is beyond what any machine needs to be told apart by.
    let mut bound = fastest.max(0.001) * 2.0;
    let mut times = 0;
    while takes >= bound && times < 16 {
        (times, bound) = (times + 1, bound * 2.0);
    }
    times
}

/// Moves a cursor over the layers, taking the best shard at each stop.
fn walk(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    cost: &CostOf<'_>,
) -> Result<Vec<Span>, RouteError> {
    let (first, last) = (*request.layers.start(), *request.layers.end());
    // Of all layers: they are much alike, and of those at hand perhaps none was measured.
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
        let beside = Beside {
            fastest,
            hosts: u32::try_from(given.len()).unwrap_or(u32::MAX),
            streams: given.values().sum(),
        };
        let best = here.min_by_key(|(_, c)| {
            let own_first = c.is_self && cursor == 0;
            let reach = c.descriptor.layer_range.1.min(last);
            let host = c.descriptor.host;
            let lot = request.lots.hash_one(host);
            (cost(c, &beside), own_first, Reverse(reach), lot, host)
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
