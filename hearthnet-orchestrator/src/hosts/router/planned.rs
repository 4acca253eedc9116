//! Cost-optimal route by measured speed and delay.

use std::collections::BTreeSet;

use super::greedy::Greedy;
use super::measured::{Rules, Speeds, cheapest};
use super::policy::{RoutePolicy, Usable};
use super::policy_name::PolicyName;
use super::request::{Candidate, RouteError, RouteRequest, Span};
use super::share::is_over;
use crate::hosts::health::Standing;

/// Time per layer of a host with more than its share of streams. So equal machines share the chats,
/// and a machine that is faster by more than this does not.
const OVER_SHARE_PERCENT: u64 = 110;

/// Takes the route of the least time per token. A host's time per layer counts once more for each
/// entry of its queue. Hosts of worse standing, and others than exact ones where these are
/// preferred, are used for as few spans and layers as possible. Without measurements, or without
/// such a route, the route is that of [`Greedy`].
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct Planned<'a> {
    pub speeds: &'a Speeds,
}

impl Planned<'_> {
    /// Route of the least time per token. `None` without measurements, or if none exists.
    pub(super) fn best(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
    ) -> Option<Vec<Span>> {
        [Standing::Good, Standing::Failing, Standing::Quarantined]
            .into_iter()
            .find_map(|worst| self.route(request, usable, worst))
    }

    /// Route over hosts of at least this standing.
    fn route(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
        worst: Standing,
    ) -> Option<Vec<Span>> {
        let first = *request.layers.start();
        let load = |c: &Candidate| {
            let share = match is_over(c, first, usable) {
                true => OVER_SHARE_PERCENT,
                false => 100,
            };
            u64::from(c.descriptor.queue_depth)
                .saturating_add(1)
                .saturating_mul(share)
        };
        let rules = Rules {
            policy: PolicyName::Planned,
            takes: &|(_, c): &Usable<'_>| c.standing <= worst,
            load_percent: &load,
            by_rank: true,
        };
        let route = cheapest(request, usable, self.speeds, &rules)?;
        // A queue decides which hosts compute for the chat. It is no reason for a hop away from one
        // of them and back: every token pays for the hop.
        let chosen: BTreeSet<usize> = route.iter().map(|span| span.candidate).collect();
        let idle = Rules {
            takes: &|(index, _): &Usable<'_>| chosen.contains(index),
            load_percent: &|_: &Candidate| 100,
            ..rules
        };
        cheapest(request, usable, self.speeds, &idle).or(Some(route))
    }
}

impl RoutePolicy for Planned<'_> {
    fn cover(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
    ) -> Result<Vec<Span>, RouteError> {
        self.best(request, usable)
            .map_or_else(|| Greedy.cover(request, usable), Ok)
    }
}
