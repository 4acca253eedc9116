//! Shortest path by measured speed, as Petals routes.

use super::measured::{Believed, Rules, Speeds, cheapest};
use super::policy_name::PolicyName;
use super::request::{Candidate, RouteRequest, Span, Usable};

/// The weight of a span is its layers divided by the host's throughput, plus the network delay.
/// Neither queues nor standing count. `None` without measurements, or without such a route.
pub(super) fn best(
    request: &RouteRequest<'_>,
    usable: &[Usable<'_>],
    speeds: &Speeds,
) -> Option<Vec<Span>> {
    let rules = Rules {
        policy: PolicyName::PetalsLike,
        takes: &|_: &Usable<'_>| true,
        load: &|_: &Candidate| 1,
        by_rank: false,
        noise_percent: 0,
    };
    cheapest(request, usable, &Believed::new(usable, speeds)?, &rules)
}
