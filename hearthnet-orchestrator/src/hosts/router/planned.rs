//! Cost-optimal route by measured speed and delay.

use super::greedy::Greedy;
use super::measured::{Speeds, cheapest};
use super::policy::{RoutePolicy, Usable};
use super::request::{RouteError, RouteRequest, Span};
use crate::hosts::health::Standing;

/// Takes the route of the least time per token. A host's time per layer counts once more for each
/// entry of its queue. Hosts of worse standing are used only if the others do not cover the layers.
/// Without measurements, or without such a route, the route is that of [`Greedy`].
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct Planned<'a> {
    pub speeds: &'a Speeds,
}

impl RoutePolicy for Planned<'_> {
    fn cover(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
    ) -> Result<Vec<Span>, RouteError> {
        let route = |worst: Standing| {
            cheapest(
                request,
                usable,
                self.speeds,
                |c| c.standing <= worst,
                |c| u64::from(c.descriptor.queue_depth).saturating_add(1),
            )
        };
        [Standing::Good, Standing::Failing, Standing::Quarantined]
            .into_iter()
            .find_map(route)
            .map_or_else(|| Greedy.cover(request, usable), Ok)
    }
}
