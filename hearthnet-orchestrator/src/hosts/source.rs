//! What is looked for, and how hosts are chosen.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_model::catalogue::Band;
use hearthnet_model::{BoundaryDtype, ModelSpec, WeightsId};
use hearthnet_transport::Want;

use crate::Cancel;
use crate::error::ChatError;
use crate::exact::Exact;
use crate::health::SharedHealth;
use crate::link::HostLink;
use crate::router::{Candidate, RouteError, RouteRequest, Span, pick};

/// A model as its hosts must hold it.
#[derive(Debug, Clone)]
pub struct ModelOnWire {
    /// Catalogue id or file stem.
    pub model_id: String,
    /// Identity of the weights.
    pub weights: WeightsId,
    /// Values per row.
    pub width: usize,
    /// Layers of the whole model.
    pub layers: u32,
    /// Those of them that hosts are asked for, half-open: the caller computes the others itself.
    pub hosted: Range<u32>,
    /// Longest sequence.
    pub context: u32,
    /// Data type of the rows.
    pub boundary: BoundaryDtype,
    /// Bands of the rows' magnitude, one per layer's output, where the catalogue has them.
    pub bands: Option<Vec<Band>>,
}

impl ModelOnWire {
    /// The wire's view of a model.
    pub fn new(
        model_id: &str,
        weights: WeightsId,
        spec: &ModelSpec,
        bands: Option<Vec<Band>>,
    ) -> Self {
        Self {
            model_id: model_id.to_owned(),
            weights,
            width: spec.width as usize,
            layers: spec.layers,
            hosted: 0..spec.layers,
            context: spec.context,
            boundary: spec.boundary,
            bands,
        }
    }

    /// What the last host gives back: the last row, or all where the caller goes on with them.
    pub(crate) fn back(&self) -> Want {
        match self.hosted.end < self.layers {
            true => Want::All,
            false => Want::Last,
        }
    }
}

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

/// How long a search waits for hosts that are not there, or do not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Named by whoever searches, read by every source.
pub enum Patience {
    /// Not at all: the layers are run as it is, or others are asked next. A host that has to be
    /// connected has [`GRACE`].
    None,
    /// [`SHORT_PATIENCE`], and 1.5 s for a sign of life at the beginning: this machine can
    /// answer as well.
    Short,
    /// [`PATIENCE`], and as long as an attempt to connect takes: nobody else can answer.
    Long,
}

/// How long to wait for hosts that close a gap: this node may have found the others only now, or a
/// host may be coming back.
pub const PATIENCE: Duration = Duration::from_secs(6);

/// The same in the middle of an answer that this machine can finish by itself: a host that is started
/// anew takes longer to read its layers, and news of those that stay take less to come.
pub const SHORT_PATIENCE: Duration = Duration::from_secs(2);

/// How long a new question that this machine can answer waits for a sign of life of its hosts: many round
/// trips, and a question whose hosts are dark begins within 3 s, which leaves half for the local engine.
pub(super) const DARK_AFTER: Duration = Duration::from_millis(1500);

/// How often hosts are looked for that are not there.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What is looked for.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by whoever searches, read by every source.
pub struct Search<'a> {
    /// The layers to be run.
    pub layers: RangeInclusive<u32>,
    /// Nodes that must not run any of them.
    pub exclude: &'a BTreeSet<NodeId>,
    /// The arithmetic of whoever ran them, where a sequence that has begun goes on behind them.
    pub before: Option<&'a str>,
    /// For whom the search may wait.
    pub patience: Patience,
    /// Set when the caller gives up.
    pub cancel: &'a Cancel,
}

/// Finds hosts for layers.
pub trait HostSource: Send {
    /// Sessions with hosts that together run the layers, in order. May block to connect for as long
    /// as the search has [`Patience`]; ends soon when the caller gives up.
    ///
    /// # Errors
    /// [`ChatError::ShardUnavailable`], [`ChatError::WeightsMismatch`],
    /// [`ChatError::ArithmeticMismatch`] or [`ChatError::Cancelled`].
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError>;

    /// Sees to it that there is somebody at hand for each span of a route, should its host fail.
    /// Called again and again while a sequence runs. Never waits.
    fn prepare(&mut self, route: &[RoutedSpan]) {
        let _ = route;
    }

    /// How it chooses.
    fn choice(&self) -> &Choice;
}

/// What a route is chosen by, wherever the hosts come from.
#[derive(Clone)]
pub struct Choice {
    /// The model that hosts must hold.
    pub model: ModelOnWire,
    /// Most spans allowed.
    pub max_shards: usize,
    /// The caller's own node id.
    pub own_id: NodeId,
    /// Whether the caller's own node may serve.
    pub allow_self: bool,
    /// What is wanted of their arithmetics.
    pub exact: Exact,
    /// What was seen of hosts, in all calls of this process.
    pub health: SharedHealth,
}

impl Choice {
    /// Covers `layers` with candidates, none of them on a node in `exclude`; `before` as in [`Search`].
    ///
    /// # Errors
    /// Any [`RouteError`].
    pub fn pick(
        &self,
        mut candidates: Vec<Candidate>,
        layers: RangeInclusive<u32>,
        exclude: &BTreeSet<NodeId>,
        before: Option<&str>,
    ) -> Result<Vec<Span>, RouteError> {
        let request = RouteRequest {
            model_id: &self.model.model_id,
            weights_sha256: &self.model.weights.to_string(),
            boundary_dtype: self.model.boundary.descriptor_name(),
            arithmetic: self.exact.allows(before),
            layers,
            total_layers: self.model.layers,
            max_shards: self.max_shards,
            allow_self: self.allow_self,
            exclude,
            lots: self.health.lots(),
        };
        self.health.count();
        self.health.look(|all, now| {
            for one in &mut candidates {
                let Descriptor { host, shard_id, .. } = &one.descriptor;
                one.standing = all.standing(host, now);
                one.ms_per_layer = all.ms_per_layer(host, shard_id, now);
                one.streams = all.streams(host);
            }
        });
        pick(&request, &candidates)
    }

    /// The same among sessions; those that have ended, or will soon, are passed over.
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
        let spans = self.pick(candidates, layers, search.exclude, search.before)?;
        let routed = spans.into_iter().map(|Span { candidate, lo, hi }| {
            let link = Arc::clone(links.get(candidate)?);
            Some(RoutedSpan { link, lo, hi })
        });
        let route: Option<Vec<RoutedSpan>> = routed.collect();
        route.ok_or_else(|| ChatError::Engine("a route names a host that is none".into()))
    }
}

/// How long a host may keep others waiting that could do without it: many round trips on any
/// network of a home, and less than a person notices.
pub const GRACE: Duration = Duration::from_millis(300);
