//! Where spans come from: a source of hosts, asked at the start and after a failure.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use hearthnet_bus::NodeKey;
use hearthnet_transport::Config;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use crate::Cancel;
use crate::error::ChatError;
use crate::link::{HostAddr, HostLink};
use crate::router::{Candidate, RouteError, RouteRequest, RoutingPolicy, Span, pick};
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

/// What is looked for.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Built by whoever searches, read by every source.
pub struct Search<'a> {
    /// The layers to be run.
    pub layers: RangeInclusive<u32>,
    /// Nodes that must not run any of them; node ids as text.
    pub exclude: &'a BTreeSet<String>,
    /// Somebody runs them as it is: what is not at hand is not worth waiting for.
    pub optional: bool,
    /// Set when the caller gives up.
    pub cancel: &'a Cancel,
}

/// Finds hosts for layers.
pub trait HostSource: Send {
    /// Sessions with hosts that together run the layers, in order. May block to connect, unless
    /// the search is optional; ends soon when the caller gives up.
    ///
    /// # Errors
    /// [`ChatError::ShardUnavailable`], [`ChatError::WeightsMismatch`] or
    /// [`ChatError::Cancelled`].
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError>;
}

/// What a route is chosen by, wherever the hosts come from.
#[derive(Clone)]
pub struct Choice {
    /// The model that hosts must hold.
    pub model: ModelOnWire,
    /// Chooses among them.
    pub policy: Arc<dyn RoutingPolicy>,
    /// Most spans allowed.
    pub max_shards: usize,
    /// The caller's own node id.
    pub own_id: String,
    /// Whether the caller's own node may serve.
    pub allow_self: bool,
}

impl Choice {
    /// Covers `layers` with candidates, none of them on a node in `exclude`.
    ///
    /// # Errors
    /// Any [`RouteError`].
    pub fn pick(
        &self,
        candidates: &[Candidate],
        layers: RangeInclusive<u32>,
        exclude: &BTreeSet<String>,
    ) -> Result<Vec<Span>, RouteError> {
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
        pick(self.policy.as_ref(), &request, candidates)
    }

    /// The same among sessions; those that have ended, or will soon, are passed over.
    fn among(
        &self,
        links: &[Arc<HostLink>],
        search: &Search<'_>,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let links: Vec<&Arc<HostLink>> = links.iter().filter(|link| link.takes_streams()).collect();
        let candidates: Vec<Candidate> = links
            .iter()
            .map(|link| Candidate {
                descriptor: link.descriptor().clone(),
                hop_weight: 0,
                is_self: link.descriptor().host == self.own_id,
            })
            .collect();
        let spans = self.pick(&candidates, search.layers.clone(), search.exclude)?;
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

/// A fixed set of hosts with open sessions.
pub struct ConnectedHosts {
    /// The sessions. Those that have ended, or whose hosts are about to leave, are passed over.
    pub links: Vec<Arc<HostLink>>,
    /// How to choose among them.
    pub choice: Choice,
}

impl HostSource for ConnectedHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        self.choice.among(&self.links, search)
    }
}

/// How long a host that could not be reached is left alone: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Hosts known by address, for a program that runs for long. Sessions are opened when a chat
/// needs them, shared by all chats, and renewed before they reach the end of their lifetime.
pub struct HostPool {
    runtime: Handle,
    key: Arc<NodeKey>,
    transport: Config,
    hosts: Vec<(HostAddr, Mutex<Session>)>,
}

/// What is known of the session with one host.
#[derive(Default)]
struct Session {
    link: Option<Arc<HostLink>>,
    failed: Option<Failed>,
}

/// An attempt that failed.
struct Failed {
    error: ChatError,
    backoff: Duration,
    retry_at: Instant,
}

/// The sessions that stand, and why others do not.
#[derive(Debug, Default)]
pub struct Reached {
    /// Sessions with hosts.
    pub links: Vec<Arc<HostLink>>,
    /// One error per host that cannot be reached.
    pub failures: Vec<ChatError>,
}

impl HostPool {
    /// Nothing is connected yet. `runtime` is where sessions live.
    pub fn new(
        runtime: Handle,
        key: Arc<NodeKey>,
        transport: Config,
        hosts: impl IntoIterator<Item = HostAddr>,
    ) -> Self {
        Self {
            runtime,
            key,
            transport,
            hosts: hosts
                .into_iter()
                .map(|addr| (addr, Mutex::default()))
                .collect(),
        }
    }

    /// A session with every host that can be reached. Those that are missing are opened, all at
    /// once; a host that could not be reached a moment ago is not asked again.
    pub async fn reach(&self) -> Reached {
        let sessions = self.hosts.iter().map(|(addr, session)| async move {
            // Chats that come while one connects wait for it instead of connecting too.
            self.session(addr, &mut *session.lock().await).await
        });
        let mut reached = Reached::default();
        for session in join_all(sessions).await {
            match session {
                Ok(link) => reached.links.push(link),
                Err(error) => reached.failures.push(error),
            }
        }
        reached
    }

    /// The sessions that stand, without waiting for any.
    fn at_hand(&self) -> Vec<Arc<HostLink>> {
        let sessions = self.hosts.iter();
        sessions
            .filter_map(|(_, session)| session.try_lock().ok()?.link.clone())
            .filter(|link| link.is_fresh())
            .collect()
    }

    async fn session(
        &self,
        addr: &HostAddr,
        session: &mut Session,
    ) -> Result<Arc<HostLink>, ChatError> {
        if let Some(link) = session.link.as_ref().filter(|link| link.is_fresh()) {
            return Ok(Arc::clone(link));
        }
        // Chats that still use the old one keep it open.
        session.link = None;
        if let Some(failed) = &session.failed
            && Instant::now() < failed.retry_at
        {
            return Err(failed.error.clone());
        }
        match HostLink::connect(addr, &self.key, self.transport.clone()).await {
            Ok(link) => {
                let link = Arc::new(link);
                *session = Session {
                    link: Some(Arc::clone(&link)),
                    failed: None,
                };
                Ok(link)
            }
            Err(error) => {
                let before = session.failed.as_ref().map(|failed| failed.backoff);
                let backoff = before.map_or(BACKOFF.0, |backoff| (backoff * 2).min(BACKOFF.1));
                session.failed = Some(Failed {
                    error: error.clone(),
                    backoff,
                    retry_at: Instant::now() + backoff,
                });
                Err(error)
            }
        }
    }
}

/// A pool's hosts as the source of one chat's spans.
pub struct PooledHosts {
    /// The hosts.
    pub pool: Arc<HostPool>,
    /// How to choose among them.
    pub choice: Choice,
}

impl HostSource for PooledHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let runtime = &self.pool.runtime;
        let reached = if search.optional {
            // Those that are not connected may be by the next time that somebody looks.
            let pool = Arc::clone(&self.pool);
            runtime.spawn(async move { pool.reach().await });
            Reached {
                links: self.pool.at_hand(),
                failures: Vec::new(),
            }
        } else {
            let reach = search.cancel.or(self.pool.reach());
            runtime.block_on(reach).ok_or(ChatError::Cancelled)?
        };
        match self.choice.among(&reached.links, search) {
            // A host that could not be reached explains a hole better than the hole does.
            Err(error @ ChatError::ShardUnavailable(_)) => {
                Err(reached.failures.into_iter().next().unwrap_or(error))
            }
            spans => spans,
        }
    }
}
