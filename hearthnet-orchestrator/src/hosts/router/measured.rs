//! Cheapest route by measurements, for the policies that use them.

use std::collections::BTreeMap;
use std::hash::BuildHasher as _;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{self, Measured};
use hearthnet_files::WeightsId;

use super::policy::Usable;
use super::policy_name::PolicyName;
use super::request::{Candidate, RouteRequest, Span};
use super::share::is_over;
use crate::exact::Allowed;
use crate::placement::observed::links;
use crate::placement::plan::{Community, Layers, Offer, shortest};

/// An announced time counts as no less than the shortest one that the caller observed, divided by
/// this.
const BOLDEST_CLAIM: u64 = 2;

/// Longest time of a layer or a hop. All times of a route add up to less than [`PER_LAYER`].
const MAX_US: u64 = 1 << 28;
/// Cost of a layer on a host of worse rank, per rank.
const PER_LAYER: u64 = 1 << 41;
/// Cost of a span on a host of worse rank, per rank: more than all layers cost by rank.
const PER_SPAN: u64 = 1 << 56;

/// Measurements of a host, as the caller sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_structs)] // Built by callers from events.
pub struct HostSpeed {
    /// One row through one layer.
    pub layer_us: u64,
    /// A row to the host and back.
    pub hop_us: u64,
}

impl HostSpeed {
    /// Both times, each by `of` from those of the two speeds.
    fn with(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            layer_us: of(self.layer_us, other.layer_us),
            hop_us: of(self.hop_us, other.hop_us),
        }
    }
}

/// Measurements by host.
pub type Speeds = BTreeMap<NodeId, HostSpeed>;

/// Speeds of the members that measured the model, for a caller that sends rows of `row_bytes`
/// bytes.
pub fn speeds(
    state: &log::Community,
    weights: WeightsId,
    caller: NodeId,
    row_bytes: u64,
    now_ms: u64,
) -> Speeds {
    let near = links(state, now_ms).filter(|((a, b), _)| *a == caller || *b == caller);
    // Without machines: a plan is limited to 64 nodes.
    let ways = Community::new(std::iter::empty(), near);
    let speed = |(node, measured): (&NodeId, &Measured)| {
        let model = measured.speed_of(&weights.0);
        let model = model.filter(|model| model.layer_us > 0)?;
        let (delay, wire) = ways.way(caller, *node, row_bytes);
        let speed = HostSpeed {
            layer_us: u64::from(model.layer_us),
            hop_us: delay.saturating_add(wire).saturating_mul(2),
        };
        Some((*node, speed))
    };
    state.measured(now_ms).filter_map(speed).collect()
}

/// Candidates that a policy takes, and their weights.
pub(super) struct Rules<'a> {
    pub(super) policy: PolicyName,
    /// Candidates that take part.
    pub(super) takes: &'a dyn Fn(&Usable<'_>) -> bool,
    /// Time per layer in per cent of the measured one.
    pub(super) load_percent: &'a dyn Fn(&Candidate) -> u64,
    /// True if standing and arithmetic count before time.
    pub(super) by_rank: bool,
}

/// Cheapest route. A host without measurements counts as slow and as far as the worst measured
/// candidate. `None` without any measurement, or if the candidates do not cover the layers.
pub(super) fn cheapest(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    speeds: &Speeds,
    rules: &Rules<'_>,
) -> Option<Vec<Span>> {
    let (first, last) = (*request.layers.start(), *request.layers.end());
    let believed = Believed::new(usable, speeds)?;
    let mut taken: Vec<Usable<'_>> = usable
        .iter()
        .filter(|one| (rules.takes)(one))
        .copied()
        .collect();
    // Of equal routes, callers prefer different ones.
    taken.sort_by_cached_key(|(_, c)| {
        let host = c.descriptor.host;
        (request.tie_breaker.hash_one(host), host)
    });
    let offer = |(_, c): &Usable<'_>| {
        let speed = believed.speed(c, || is_over(c, first, usable));
        let hop_us = if c.is_self { 0 } else { speed.hop_us };
        let layer_us = speed.layer_us.saturating_mul((rules.load_percent)(c)) / 100;
        let rank = if rules.by_rank { rank(request, c) } else { 0 };
        Offer {
            layers: Layers::from_inclusive(c.descriptor.layer_range),
            enter_us: hop_us.min(MAX_US) + rank * PER_SPAN,
            layer_us: layer_us.min(MAX_US) + rank * PER_LAYER,
        }
    };
    let offers: Vec<Offer> = taken.iter().map(offer).collect();
    let layers = Layers::new(first, last.checked_add(1)?);
    let (route, _) = shortest(layers, &offers, request.max_shards)?;
    let span = |(index, layers): (usize, Layers)| {
        let (candidate, _) = *taken.get(index)?;
        Some(Span {
            candidate,
            lo: layers.first,
            hi: layers.end.checked_sub(1)?,
            policy: rules.policy,
        })
    };
    route.into_iter().map(span).collect()
}

/// 0 for an exact host of good standing, at most 5.
fn rank(request: &RouteRequest<'_>, candidate: &Candidate) -> u64 {
    let is_second = request.arithmetic == Allowed::ExactFirst && !candidate.is_exact();
    2 * candidate.standing as u64 + u64::from(is_second)
}

/// Limits of announced speeds. An announcement costs its host nothing, so what the caller observed
/// of a host replaces the announcement, and bounds those of other hosts.
struct Believed<'a> {
    speeds: &'a Speeds,
    /// Shortest times that an announcement alone can claim.
    least: HostSpeed,
    /// Longest times of all measured candidates.
    worst: HostSpeed,
}

impl<'a> Believed<'a> {
    /// `None` if no candidate has measurements.
    fn new(usable: &[Usable<'_>], speeds: &'a Speeds) -> Option<Self> {
        let others = usable.iter().filter(|(_, c)| !c.is_self);
        let seen = others.filter_map(|(_, c)| observed(c, *speeds.get(&c.descriptor.host)?));
        let least = seen.reduce(|a, b| a.with(b, u64::min)).unwrap_or_default();
        let believed = Self {
            speeds,
            least: HostSpeed {
                layer_us: least.layer_us / BOLDEST_CLAIM,
                hop_us: least.hop_us / BOLDEST_CLAIM,
            },
            worst: least,
        };
        let known = usable.iter().filter_map(|(_, c)| believed.known(c));
        let worst = known.reduce(|a, b| a.with(b, u64::max))?;
        Some(Self { worst, ..believed })
    }

    /// Speed of a measured candidate.
    fn known(&self, candidate: &Candidate) -> Option<HostSpeed> {
        let announced = *self.speeds.get(&candidate.descriptor.host)?;
        if let Some(seen) = observed(candidate, announced) {
            return Some(seen);
        }
        // The own node's announcement comes from this node.
        Some(match candidate.is_self {
            true => announced,
            false => announced.with(self.least, u64::max),
        })
    }

    /// Speed of any candidate. `is_over`: whether the host has more than its share of streams.
    fn speed(&self, candidate: &Candidate, is_over: impl Fn() -> bool) -> HostSpeed {
        let is_claim = !candidate.is_self && !is_observed(candidate);
        match self.known(candidate) {
            Some(known) if !(is_claim && is_over()) => known,
            _ => self.worst,
        }
    }
}

/// Whether the caller observed decode steps of this model on the host.
fn is_observed(candidate: &Candidate) -> bool {
    candidate.seen_layers > 0 && candidate.ms_per_layer.is_some()
}

/// Speed of a host from observed decode steps. Of such a step, the layers took what the hop did not.
fn observed(candidate: &Candidate, announced: HostSpeed) -> Option<HostSpeed> {
    if !is_observed(candidate) {
        return None;
    }
    let layers = u64::from(candidate.seen_layers);
    let layer_us = candidate.ms_per_layer? * 1e3;
    let step_us = (layer_us * layers as f64).ceil() as u64;
    let hop_us = match candidate.is_self {
        true => 0,
        false => announced.hop_us.min(step_us),
    };
    Some(HostSpeed {
        layer_us: (step_us - hop_us) / layers,
        hop_us,
    })
}
