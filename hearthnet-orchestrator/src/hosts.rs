//! Where spans come from: a source of hosts, asked at the start and after a failure.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::error::ChatError;
use crate::link::HostLink;
use crate::router::{Candidate, RouteRequest, RoutingPolicy, pick};
use crate::sharded::ModelOnWire;

/// One host of the route and the layers it runs for this sequence.
#[derive(Debug, Clone)]
pub struct RoutedSpan {
    /// The session with the host.
    pub link: Arc<HostLink>,
    /// First layer.
    pub lo: u32,
    /// Last layer.
    pub hi: u32,
}

/// Finds hosts for layers.
pub trait HostSource: Send {
    /// Sessions with hosts that together run `layers`, in order, none of them on a
    /// node in `exclude` (node ids as text). May block to connect.
    ///
    /// # Errors
    /// [`ChatError::ShardUnavailable`] or [`ChatError::WeightsMismatch`].
    fn route(
        &mut self,
        layers: RangeInclusive<u32>,
        exclude: &BTreeSet<String>,
    ) -> Result<Vec<RoutedSpan>, ChatError>;
}

/// A fixed set of hosts with open sessions.
pub struct ConnectedHosts {
    /// The sessions. Those that have ended are passed over.
    pub links: Vec<Arc<HostLink>>,
    /// The model that they must hold.
    pub model: ModelOnWire,
    /// Chooses among them.
    pub policy: Box<dyn RoutingPolicy>,
    /// Most spans allowed.
    pub max_shards: usize,
    /// The caller's own node id.
    pub own_id: String,
    /// Whether the caller's own node may serve.
    pub allow_self: bool,
}

impl HostSource for ConnectedHosts {
    fn route(
        &mut self,
        layers: RangeInclusive<u32>,
        exclude: &BTreeSet<String>,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let links: Vec<&Arc<HostLink>> = self.links.iter().filter(|link| link.is_open()).collect();
        let candidates: Vec<Candidate> = links
            .iter()
            .map(|link| Candidate {
                descriptor: link.descriptor().clone(),
                hop_weight: 0,
                is_self: link.descriptor().host == self.own_id,
            })
            .collect();
        let request = RouteRequest {
            model_id: &self.model.model_id,
            weights_sha256: &self.model.weights.to_string(),
            boundary_dtype: self.model.boundary.descriptor_name(),
            layers,
            total_layers: self.model.layers,
            max_shards: self.max_shards,
            allow_self: self.allow_self,
            exclude,
        };
        let spans = pick(self.policy.as_ref(), &request, &candidates)?;
        Ok(spans
            .iter()
            .filter_map(|span| {
                Some(RoutedSpan {
                    link: Arc::clone(links.get(span.candidate)?),
                    lo: span.lo,
                    hi: span.hi,
                })
            })
            .collect())
    }
}
