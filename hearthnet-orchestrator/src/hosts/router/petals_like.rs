//! Shortest path by measured speed, as Petals routes.

use super::greedy::Greedy;
use super::measured::{Believed, Rules, Speeds, cheapest};
use super::policy::{RoutePolicy, Usable};
use super::policy_name::PolicyName;
use super::request::{Candidate, RouteError, RouteRequest, Span};

/// The weight of a span is its layers divided by the host's throughput, plus the network delay.
/// Neither queues nor standing count. Without measurements, or without such a route, the route is
/// that of [`Greedy`].
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct PetalsLike<'a> {
    pub speeds: &'a Speeds,
}

impl RoutePolicy for PetalsLike<'_> {
    fn cover(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
    ) -> Result<Vec<Span>, RouteError> {
        let rules = Rules {
            policy: PolicyName::PetalsLike,
            takes: &|_: &Usable<'_>| true,
            load: &|_: &Candidate| 1,
            by_rank: false,
            noise_percent: 0,
        };
        Believed::new(usable, self.speeds)
            .and_then(|believed| cheapest(request, usable, &believed, &rules))
            .map_or_else(|| Greedy.cover(request, usable), Ok)
    }
}
