//! Search parameters and host selection.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_files::magnitude::Band;
use hearthnet_files::spec::RowShape;
use hearthnet_files::{BoundaryDtype, ModelSpec, WeightsId};
use hearthnet_transport::Want;

use crate::Cancel;
use crate::error::ChatError;
use crate::exact::Exact;
use crate::hosts::health::SharedHealth;
use crate::hosts::link::HostLink;
use crate::hosts::router::{
    Candidate, PolicyName, RouteError, RouteRequest, Span, Speeds, pick_by,
};

/// Properties of a model that its hosts must match.
#[derive(Debug, Clone)]
pub struct ModelOnWire {
    /// Catalogue id or file stem.
    pub model_id: String,
    pub weights: WeightsId,
    /// Values of the rows.
    pub rows: RowShape,
    pub layers: u32,
    /// Layers that one machine must run together; empty if the model may be cut anywhere.
    pub together: Range<u32>,
    /// Layers that hosts run, half-open; the caller runs the others itself.
    pub hosted: Range<u32>,
    /// Some layers are recurrent: a host may be unable to return to a position.
    pub recurrent: bool,
    /// Longest sequence, in tokens.
    pub context: u32,
    /// Data type of the rows.
    pub boundary: BoundaryDtype,
    /// Magnitude bands of the rows, one per layer's output, if the catalogue has them.
    pub bands: Option<Vec<Band>>,
}

impl ModelOnWire {
    /// Takes the properties from a model's spec.
    pub fn new(
        model_id: &str,
        weights: WeightsId,
        spec: &ModelSpec,
        bands: Option<Vec<Band>>,
    ) -> Self {
        Self {
            model_id: model_id.to_owned(),
            weights,
            rows: spec.row_shape(),
            layers: spec.layers,
            together: spec.together(),
            hosted: 0..spec.layers,
            recurrent: spec.state_bytes(0..spec.layers) > 0,
            context: spec.context,
            boundary: spec.boundary,
            bands,
        }
    }

    /// Bytes of a row that a host of these layers receives, first and last inclusive.
    pub(crate) fn bytes_before(&self, (lo, hi): (u32, u32)) -> usize {
        self.rows.before((lo..=hi).count()) * self.boundary.bytes_per_value()
    }

    /// Bytes of a row that a host returns.
    pub(crate) fn bytes_behind(&self) -> usize {
        self.rows.width as usize * self.boundary.bytes_per_value()
    }

    /// Rows that the last host returns: all if the caller runs further layers, else the last one.
    pub(crate) fn back(&self) -> Want {
        match self.hosted.end < self.layers {
            true => Want::All,
            false => Want::Last,
        }
    }
}

/// Host of a route, and the layers that it runs for this sequence.
#[derive(Debug, Clone)]
pub struct RoutedSpan {
    pub link: Arc<HostLink>,
    /// First layer.
    pub lo: u32,
    /// Last layer.
    pub hi: u32,
    /// Policy that chose the host.
    pub policy: PolicyName,
}

impl RoutedSpan {
    /// `link`: session with the candidate of `span`.
    pub(super) fn new(link: Arc<HostLink>, span: &Span) -> Self {
        let Span { lo, hi, policy, .. } = *span;
        Self {
            link,
            lo,
            hi,
            policy,
        }
    }
}

/// How long a search waits for hosts that are offline or do not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Set by every caller, read by every source.
pub enum Patience {
    /// No waiting: the caller tries other hosts, or leaves the layers where they are. A host that
    /// is not connected gets [`GRACE`].
    None,
    /// Up to [`SHORT_DISCOVERY_TIMEOUT`], and at the start 1.5 s for a sign of life: this machine
    /// can answer as well.
    Short,
    /// Up to [`DISCOVERY_TIMEOUT`], and as long as connecting takes: only hosts can answer.
    Long,
}

/// Wait for hosts with missing layers: this node may have just joined the others, or a host may be
/// restarting.
pub const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(6);

/// Wait in the middle of an answer that this machine can finish by itself. A restarted host takes
/// longer to load its layers; news of other hosts arrive sooner.
pub const SHORT_DISCOVERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Wait of a new chat for a sign of life, if this machine can answer as well: many round trips. A
/// chat whose hosts are offline starts within 3 s, which leaves half of them to the local engine.
pub(super) const SIGN_OF_LIFE_TIMEOUT: Duration = Duration::from_millis(1500);

/// Interval between searches for offline hosts.
pub(super) const SEARCH_INTERVAL: Duration = Duration::from_millis(200);

/// Parameters of a search.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by every caller, read by every source.
pub struct Search<'a> {
    pub layers: RangeInclusive<u32>,
    /// Nodes that must not run any of them.
    pub exclude: &'a BTreeSet<NodeId>,
    /// Arithmetic of the replaced host, if later hosts hold KV computed from its output.
    pub before: Option<&'a str>,
    /// Time that the search may wait.
    pub patience: Patience,
    pub cancel: &'a Cancel,
}

/// Source of hosts for layers.
pub trait HostSource: Send {
    /// Returns sessions with hosts that together run the layers, in order. May block to connect, as
    /// [`Patience`] allows; returns soon after the caller cancels.
    ///
    /// # Errors
    /// [`ChatError::ShardUnavailable`], [`ChatError::WeightsMismatch`],
    /// [`ChatError::ArithmeticMismatch`] or [`ChatError::Cancelled`].
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError>;

    /// Waits until [`Self::route`] needs not block, as long as [`Patience`] allows. For a source of a
    /// simulation, where no thread may block; all others wait in [`Self::route`].
    fn ready<'a>(&'a mut self, search: &'a Search<'_>) -> LocalBoxFuture<'a, ()> {
        let _ = search;
        std::future::ready(()).boxed_local()
    }

    /// Prepares a spare host for each span of a route. Called repeatedly while a sequence runs.
    /// Never blocks.
    fn prepare(&mut self, route: &[RoutedSpan]) {
        let _ = route;
    }

    fn choice(&self) -> &Choice;

    /// Returns true if verdicts have found that a host signed wrong rows (`specs/disputes.md` 8).
    fn is_convicted(&self, host: &NodeId) -> bool {
        let _ = host;
        false
    }

    /// Copy for a copy of the sequence, if there can be one.
    fn fork(&self) -> Option<Box<dyn HostSource>> {
        None
    }

    /// Sets which hosts the chat demands. A source of fixed hosts has no choice, and ignores it.
    fn demand(&mut self, exact: Exact) {
        let _ = exact;
    }
}

/// Criteria of host selection, for every source.
#[derive(Clone)]
pub struct Choice {
    pub model: ModelOnWire,
    /// Maximum number of spans.
    pub max_shards: usize,
    /// The caller's own node id.
    pub own_id: NodeId,
    /// True if the caller's own node may be a host.
    pub allow_self: bool,
    /// Rule for the arithmetics of the hosts.
    pub exact: Exact,
    pub policy: PolicyName,
    /// Measurements of hosts known by address. Members of a community announce theirs in its log.
    pub speeds: Speeds,
    /// Behaviour of hosts in all calls of this process.
    pub health: SharedHealth,
}

impl Choice {
    /// Covers `layers` with candidates, none of them in `exclude`; `before` as in [`Search`].
    /// Without `speeds`, every policy chooses as [`PolicyName::Greedy`] does.
    ///
    /// # Errors
    /// Any [`RouteError`].
    pub fn pick(
        &self,
        mut candidates: Vec<Candidate>,
        layers: RangeInclusive<u32>,
        exclude: &BTreeSet<NodeId>,
        before: Option<&str>,
        speeds: &Speeds,
    ) -> Result<Vec<Span>, RouteError> {
        let request = RouteRequest {
            model_id: &self.model.model_id,
            weights_sha256: &self.model.weights.to_string(),
            boundary_dtype: self.model.boundary.descriptor_name(),
            arithmetic: self.exact.allows(before),
            layers,
            total_layers: self.model.layers,
            together: self.model.together.clone(),
            max_shards: self.max_shards,
            allow_self: self.allow_self,
            exclude,
            tie_breaker: self.health.tie_breaker(),
        };
        self.health.count();
        self.health.look(|all, now| {
            for one in &mut candidates {
                let Descriptor { host, shard_id, .. } = &one.descriptor;
                one.standing = all.standing(host, now);
                one.ms_per_layer = all.ms_per_layer(host, shard_id, now);
                let shard = (shard_id.as_str(), self.model.weights);
                one.seen_layers = all.step_layers(host, shard, now).unwrap_or_default();
                one.streams = all.streams(host);
            }
        });
        pick_by(self.policy, speeds, &request, &candidates)
    }

    /// Like [`Self::pick`], among open sessions; leaving and ended ones are skipped.
    ///
    /// # Errors
    /// As [`HostSource::route`].
    pub fn among(
        &self,
        links: &[Arc<HostLink>],
        search: &Search<'_>,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let links: Vec<&Arc<HostLink>> = links.iter().filter(|link| link.takes_streams()).collect();
        let candidate = |link: &&Arc<HostLink>| {
            let is_self = link.addr.node == self.own_id;
            Candidate::new(link.descriptor.clone(), 0, is_self)
        };
        let candidates = links.iter().map(candidate).collect();
        let layers = search.layers.clone();
        let (exclude, before) = (search.exclude, search.before);
        let spans = self.pick(candidates, layers, exclude, before, &self.speeds)?;
        let routed = spans.iter().map(|span| {
            let link = Arc::clone(links.get(span.candidate)?);
            Some(RoutedSpan::new(link, span))
        });
        let route: Option<Vec<RoutedSpan>> = routed.collect();
        route.ok_or_else(|| ChatError::Engine("a route names an unknown host".into()))
    }
}

/// How long a search waits for a host that others could replace: many round trips in a home
/// network, and too short for a user to notice.
pub const GRACE: Duration = Duration::from_millis(300);
