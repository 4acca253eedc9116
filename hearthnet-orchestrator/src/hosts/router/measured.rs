//! Cheapest route by measurements, for the policies that use them.

use std::collections::BTreeMap;
use std::hash::BuildHasher as _;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Community;
use hearthnet_files::WeightsId;

use super::policy::Usable;
use super::request::{Candidate, RouteRequest, Span};
use crate::placement::observed::observed;
use crate::placement::plan::{Layers, Offer, shortest};

/// Measurements of a host, as the caller sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built by callers from events.
pub struct HostSpeed {
    /// One row through one layer.
    pub layer_us: u64,
    /// A row to the host and back.
    pub hop_us: u64,
}

/// Measurements by host.
pub type Speeds = BTreeMap<NodeId, HostSpeed>;

/// Speeds of the hosts that measured the model, for a caller that sends rows of `row_bytes` bytes.
pub fn speeds(
    state: &Community,
    weights: WeightsId,
    caller: NodeId,
    row_bytes: u64,
    now_ms: u64,
) -> Speeds {
    let community = observed(state, weights, now_ms);
    let measured = state.measured(now_ms).filter(|(_, measured)| {
        let mut models = measured.models.iter();
        models.any(|model| model.weights == weights.0 && model.layer_us > 0)
    });
    let speed = |(node, _): (&NodeId, _)| {
        let layer_us = u64::from(community.machine(*node)?.layer_us);
        let (delay, wire) = community.way(caller, *node, row_bytes);
        let hop_us = delay.saturating_add(wire).saturating_mul(2);
        Some((*node, HostSpeed { layer_us, hop_us }))
    };
    measured.filter_map(speed).collect()
}

/// Cheapest route over the candidates that `takes` admits; `load` multiplies the time per layer. A
/// host without measurements counts as slow and as far as the worst measured candidate. `None`
/// without any measurement, or if these candidates do not cover the layers.
pub(super) fn cheapest(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    speeds: &Speeds,
    takes: impl Fn(&Candidate) -> bool,
    load: impl Fn(&Candidate) -> u64,
) -> Option<Vec<Span>> {
    let mut taken: Vec<Usable<'_>> = usable.iter().filter(|(_, c)| takes(c)).copied().collect();
    // Of equal routes, callers prefer different ones.
    taken.sort_by_cached_key(|(_, c)| {
        let host = c.descriptor.host;
        (request.tie_breaker.hash_one(host), host)
    });
    let known = |c: &Candidate| speeds.get(&c.descriptor.host).copied();
    let measured = taken.iter().filter_map(|(_, c)| known(c));
    let worst = measured.reduce(|a, b| HostSpeed {
        layer_us: a.layer_us.max(b.layer_us),
        hop_us: a.hop_us.max(b.hop_us),
    })?;
    let offer = |(_, c): &Usable<'_>| {
        let (lo, hi) = c.descriptor.layer_range;
        let speed = known(c).unwrap_or(worst);
        Offer {
            layers: Layers::new(lo, hi.saturating_add(1)),
            enter_us: if c.is_self { 0 } else { speed.hop_us },
            layer_us: speed.layer_us.saturating_mul(load(c)),
        }
    };
    let offers: Vec<Offer> = taken.iter().map(offer).collect();
    let (first, last) = (*request.layers.start(), *request.layers.end());
    let layers = Layers::new(first, last.checked_add(1)?);
    let (route, _) = shortest(layers, &offers, request.max_shards)?;
    let span = |(index, layers): (usize, Layers)| {
        let (candidate, _) = *taken.get(index)?;
        Some(Span {
            candidate,
            lo: layers.first,
            hi: layers.end.checked_sub(1)?,
        })
    };
    route.into_iter().map(span).collect()
}
