//! Routing policies: how usable candidates are combined into a route.

use super::request::{Candidate, RouteError, RouteRequest, Span};

/// Index of a usable candidate, and the candidate.
pub type Usable<'a> = (usize, &'a Candidate);

/// Rule for covering layers with candidates that passed all tests of the request.
pub trait RoutePolicy {
    /// Covers the layers of the request.
    ///
    /// # Errors
    /// [`RouteError::Uncovered`] or [`RouteError::TooManyShards`].
    fn cover(
        &self,
        request: &RouteRequest<'_>,
        usable: &[Usable<'_>],
    ) -> Result<Vec<Span>, RouteError>;
}
