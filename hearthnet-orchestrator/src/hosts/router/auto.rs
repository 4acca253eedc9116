//! Choice between the policies by what was measured.

use super::greedy::Greedy;
use super::measured::Speeds;
use super::planned::Planned;
use super::policy::{RoutePolicy, Usable};
use super::request::{RouteError, RouteRequest, Span};

/// [`Planned`] if every host of its route has measurements, else [`Greedy`]; the default policy.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct Auto<'a> {
    pub speeds: &'a Speeds,
}

impl RoutePolicy for Auto<'_> {
    fn cover(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
    ) -> Result<Vec<Span>, RouteError> {
        let speeds = self.speeds;
        let is_measured = |span: &Span| {
            let host = usable.iter().find(|(index, _)| *index == span.candidate);
            host.is_some_and(|(_, c)| speeds.contains_key(&c.descriptor.host))
        };
        let planned = Planned { speeds }.best(request, usable);
        planned
            .filter(|route| route.iter().all(is_measured))
            .map_or_else(|| Greedy.cover(request, usable), Ok)
    }
}
