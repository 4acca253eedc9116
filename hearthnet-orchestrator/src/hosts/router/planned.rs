//! Cost-optimal route by measured speed and delay.

use std::collections::BTreeSet;

use super::measured::{Believed, Rules, Speeds, cheapest};
use super::policy_name::PolicyName;
use super::request::{Candidate, RouteRequest, Span, Usable};
use crate::hosts::health::Standing;

/// Times of alike hosts differ by chance, so a smaller gain is no reason for a hop or another host.
const NOISE_PERCENT: u64 = 10;

/// Takes the route of the least time per token, and the greedy one if no other one is faster by more
/// than the noise of measurements. A host's time per layer counts once more for each entry of its
/// queue. Hosts of worse standing, and others than exact ones where these are preferred, are used for
/// as few spans and layers as possible. `None` without measurements, or without such a route.
pub(super) fn best(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    speeds: &Speeds,
) -> Option<Vec<Span>> {
    let believed = Believed::new(usable, speeds)?;
    [Standing::Good, Standing::Failing, Standing::Quarantined]
        .into_iter()
        .find_map(|worst| route(request, usable, &believed, worst))
}

/// Route over hosts of at least this standing.
fn route(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    believed: &Believed<'_>,
    worst: Standing,
) -> Option<Vec<Span>> {
    let rules = Rules {
        policy: PolicyName::Planned,
        takes: &|(_, c): &Usable<'_>| c.standing <= worst,
        load: &|c: &Candidate| u64::from(c.descriptor.queue_depth) + 1,
        by_rank: true,
        noise_percent: NOISE_PERCENT,
    };
    let route = cheapest(request, usable, believed, &rules)?;
    let chosen: BTreeSet<usize> = route.iter().map(|span| span.candidate).collect();
    let mut hosts = usable.iter().filter(|(index, _)| chosen.contains(index));
    if hosts.all(|(_, c)| c.descriptor.queue_depth == 0) {
        return Some(route);
    }
    // A queue decides which hosts compute for the chat. It is no reason for a hop away from one
    // of them and back: every token pays for the hop.
    let idle = Rules {
        takes: &|(index, _): &Usable<'_>| chosen.contains(index),
        load: &|_: &Candidate| 1,
        ..rules
    };
    cheapest(request, usable, believed, &idle).or(Some(route))
}
