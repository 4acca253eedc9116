//! Cheapest route by measurements, for the policies that use them.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{self, Measured};
use hearthnet_files::WeightsId;

use super::greedy::cover;
use super::policy_name::PolicyName;
use super::request::{Candidate, RouteRequest, Span, Usable};
use super::share::is_over;
use crate::exact::Allowed;
use crate::placement::observed::links;
use crate::placement::plan::{Community, Layers, Offer, Route, shortest_by_spans, slowest};

/// An announced time counts as no less than the shortest one that the caller observed, divided by
/// this. If the caller observed none: than the median of the announced ones, divided by this.
const BOLDEST_CLAIM: u64 = 2;

/// Longest time of a layer or a hop. All times of a route add up to less than [`PER_LAYER`].
const MAX_US: u64 = 1 << 27;
/// Cost of a layer on a host of worse rank, per rank.
const PER_LAYER: u64 = 1 << 40;
/// Cost of a span on a host of worse rank, per rank: more than all layers cost by rank.
const PER_SPAN: u64 = 1 << 56;

/// Measurements of a host, as the caller sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_structs)] // Built by callers from events.
pub struct HostSpeed {
    /// Time of one row through one layer, in us.
    pub layer_us: u64,
    /// Time of a row to the host and back, in us.
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
            hop_us: delay
                .saturating_add(wire)
                .saturating_mul(2)
                .saturating_add(model.step_us.into()),
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
    /// Factor of the time per layer.
    pub(super) load: &'a dyn Fn(&Candidate) -> u64,
    /// True if standing and arithmetic count before time.
    pub(super) by_rank: bool,
    /// Largest difference of measured times, in per cent, that is no reason for another route.
    pub(super) noise_percent: u64,
}

/// Cheapest route, apart from differences within the noise. Of all routes within the noise of the
/// cheapest one: the greedy one, else the one with the fewest hops, else the cheapest one.
/// `None` if the candidates do not cover the layers.
pub(super) fn cheapest(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    believed: &Believed<'_>,
    rules: &Rules<'_>,
) -> Option<Vec<Span>> {
    let (first, last) = (*request.layers.start(), *request.layers.end());
    let mut taken: Vec<Usable<'_>> = usable
        .iter()
        .filter(|one| (rules.takes)(one))
        .copied()
        .collect();
    // Of equal routes, callers prefer different ones.
    taken.sort_by_cached_key(|(_, c)| {
        let host = c.descriptor.host;
        (request.tie_breaker.rank(&host), host)
    });
    let offer = |(_, c): &Usable<'_>| {
        let speed = believed.speed(c, || is_over(c, first, usable));
        let hop_us = if c.is_self { 0 } else { speed.hop_us };
        let layer_us = speed.layer_us.saturating_mul((rules.load)(c));
        let rank = if rules.by_rank { rank(request, c) } else { 0 };
        Offer {
            layers: Layers::from_inclusive(c.descriptor.layer_range),
            enter_us: hop_us.min(MAX_US) + rank * PER_SPAN,
            layer_us: layer_us.min(MAX_US) + rank * PER_LAYER,
        }
    };
    let offers: Vec<Offer> = taken.iter().map(offer).collect();
    let layers = Layers::new(first, last.checked_add(1)?);
    let routes = shortest_by_spans(layers, &offers, request.max_shards);
    let least = routes.iter().map(|(_, cost)| *cost).min()?;
    let time_us = least % PER_LAYER;
    let most = least + time_us * rules.noise_percent / 100;
    let greedy = greedy(request, &taken, &offers).filter(|(_, cost)| *cost <= most);
    let (route, _) = greedy.or_else(|| {
        let hops = |route: &[(usize, Layers)]| {
            let hosts = route.iter().filter_map(|(index, _)| taken.get(*index));
            hosts.filter(|(_, c)| !c.is_self).count()
        };
        let alike = routes.into_iter().filter(|(_, cost)| *cost <= most);
        alike.min_by_key(|(route, cost)| (hops(route), *cost))
    })?;
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

/// Greedy route over `taken`, at the cost of their `offers`.
fn greedy(request: &RouteRequest<'_>, taken: &[Usable<'_>], offers: &[Offer]) -> Option<Route> {
    let (mut route, mut sum) = (Vec::new(), 0u64);
    for span in cover(request, taken).ok()? {
        let is_it = |(index, _): &Usable<'_>| *index == span.candidate;
        let index = taken.iter().position(is_it)?;
        let layers = Layers::from_inclusive((span.lo, span.hi));
        sum = sum.saturating_add(offers.get(index)?.cost(layers.count()));
        route.push((index, layers));
    }
    Some((route, sum))
}

/// 0 for an exact host of good standing, at most 11.
fn rank(request: &RouteRequest<'_>, candidate: &Candidate) -> u64 {
    let is_second = request.arithmetic == Allowed::ExactFirst && !candidate.is_exact();
    4 * candidate.standing as u64 + 2 * u64::from(is_second) + u64::from(candidate.is_false_accuser)
}

/// Limits of announced speeds. An announcement costs its host nothing, so what the caller observed
/// of a host replaces the announcement, and bounds those of other hosts.
pub(super) struct Believed<'a> {
    speeds: &'a Speeds,
    /// Shortest times that an announcement alone can claim.
    least: HostSpeed,
    /// Times of a host without measurements.
    worst: HostSpeed,
}

impl<'a> Believed<'a> {
    /// `None` if no candidate has measurements.
    pub(super) fn new(usable: &[Usable<'_>], speeds: &'a Speeds) -> Option<Self> {
        let others = usable.iter().filter(|(_, c)| !c.is_self);
        let seen = others.filter_map(|(_, c)| observed(c, *speeds.get(&c.descriptor.host)?));
        let seen = seen.reduce(|a, b| a.with(b, u64::min));
        let reference = seen.unwrap_or_else(|| HostSpeed {
            layer_us: usual_layer_us(usable, speeds),
            hop_us: 0,
        });
        let believed = Self {
            speeds,
            least: HostSpeed {
                layer_us: reference.layer_us / BOLDEST_CLAIM,
                hop_us: reference.hop_us / BOLDEST_CLAIM,
            },
            worst: reference,
        };
        let known = usable.iter().filter_map(|(_, c)| {
            let known = believed.known(c)?;
            Some((c.descriptor.host, known))
        });
        // A host that advertises several ranges counts once.
        let known: BTreeMap<NodeId, HostSpeed> = known.collect();
        if known.is_empty() {
            return None;
        }
        let worst = |of: fn(&HostSpeed) -> u64| slowest(known.values().map(of)).unwrap_or(0);
        let worst = HostSpeed {
            layer_us: worst(|speed| speed.layer_us),
            hop_us: worst(|speed| speed.hop_us),
        };
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

/// Median of the announced times per layer, the larger of two in the middle; 0 without any.
fn usual_layer_us(usable: &[Usable<'_>], speeds: &Speeds) -> u64 {
    let hosts: BTreeSet<NodeId> = usable.iter().map(|(_, c)| c.descriptor.host).collect();
    let times = hosts.iter().filter_map(|host| speeds.get(host));
    let mut times: Vec<u64> = times.map(|speed| speed.layer_us).collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0)
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
