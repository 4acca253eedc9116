//! Where spans come from: a source of hosts, asked at the start and after a failure.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use hearthnet_bus::{Descriptor, NodeId, NodeKey};
use hearthnet_transport::Config;
use parking_lot::{Mutex as StdMutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::timeout_at;

use crate::Cancel;
use crate::error::ChatError;
use crate::health::{FailureKind, SharedHealth};
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
    pub exclude: &'a BTreeSet<NodeId>,
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

    /// Sees to it that there is somebody at hand for each span of a route, should its host fail.
    /// Called again and again while a sequence runs. Never waits.
    fn prepare(&mut self, route: &[RoutedSpan]) {
        let _ = route;
    }

    /// Where it is told what its hosts do.
    fn health(&self) -> SharedHealth;
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
    pub own_id: NodeId,
    /// Whether the caller's own node may serve.
    pub allow_self: bool,
    /// What was seen of hosts, in all calls of this process.
    pub health: SharedHealth,
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
        exclude: &BTreeSet<NodeId>,
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
            caller: self.own_id,
        };
        self.health.count();
        let judged: Vec<Candidate> = candidates.iter().map(|one| self.judge(one)).collect();
        pick(self.policy.as_ref(), &request, &judged)
    }

    /// A candidate with what is known of it.
    fn judge(&self, candidate: &Candidate) -> Candidate {
        let Descriptor { host, shard_id, .. } = &candidate.descriptor;
        Candidate {
            standing: self.health.standing(host),
            ms_per_layer: self.health.ms_per_layer(host, shard_id),
            ..candidate.clone()
        }
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
            .map(|link| {
                let descriptor = link.descriptor().clone();
                let is_self = descriptor.host == self.own_id;
                Candidate::new(descriptor, 0, is_self)
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
        let Some(link) = self.links.first() else {
            return self.choice.among(&[], search);
        };
        let there = search.cancel.or(answering(&self.links));
        let there = link.runtime().block_on(there).ok_or(ChatError::Cancelled)?;
        match self.choice.among(&there, search) {
            // A host that is silent now may be back in a moment, where there is no other.
            Err(_) if !search.optional && there.len() < self.links.len() => {
                self.choice.among(&self.links, search)
            }
            route => route,
        }
    }

    fn health(&self) -> SharedHealth {
        self.choice.health.clone()
    }
}

/// How long a host may keep others waiting that could do without it: many round trips on any
/// network of a home, and less than a person notices.
pub const GRACE: Duration = Duration::from_millis(300);

/// Those of some hosts that are there, as far as [`GRACE`] tells. On a network where all are, that
/// takes a round trip at most.
pub async fn answering(links: &[Arc<HostLink>]) -> Vec<Arc<HostLink>> {
    let answers = join_all(links.iter().map(|link| link.answers(GRACE))).await;
    let there = links.iter().zip(answers).filter(|(_, there)| *there);
    there.map(|(link, _)| Arc::clone(link)).collect()
}

/// How long a host that could not be reached is left alone: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Hosts known by address, for a program that runs for long. Sessions are opened when a chat
/// needs them, shared by all chats, and renewed before they reach the end of their lifetime.
///
/// All hosts are connected, also those that no route uses now: so a spare is at hand when a host
/// fails. A host that does not answer keeps nobody waiting that others can serve.
pub struct HostPool {
    runtime: Handle,
    key: Arc<NodeKey>,
    transport: Config,
    hosts: Vec<Arc<Known>>,
    health: SharedHealth,
}

/// A host, and the session with it.
struct Known {
    addr: HostAddr,
    session: Mutex<Session>,
    /// Since when somebody has been trying to reach it.
    trying: StdMutex<Option<Instant>>,
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
        let known = |addr| {
            Arc::new(Known {
                addr,
                session: Mutex::default(),
                trying: StdMutex::default(),
            })
        };
        Self {
            runtime,
            key,
            transport,
            hosts: hosts.into_iter().map(known).collect(),
            health: SharedHealth::default(),
        }
    }

    /// What was seen of these hosts: for the [`Choice`] of every chat with them.
    pub fn health(&self) -> &SharedHealth {
        &self.health
    }

    /// A session with every host that can be reached. Those that are missing are opened, all at
    /// once; a host that could not be reached a moment ago is not asked again.
    pub async fn reach(&self) -> Reached {
        self.reach_enough(|_| false, None).await
    }

    /// The same, until there are `enough` and the others have had their chance ([`GRACE`]), or
    /// until `limit` has passed. Whoever is not there by then is still being connected to, for the
    /// next time.
    pub async fn reach_enough(
        &self,
        enough: impl Fn(&[Arc<HostLink>]) -> bool,
        limit: Option<Duration>,
    ) -> Reached {
        let mut attempts: FuturesUnordered<_> =
            self.hosts.iter().map(|host| self.attempt(host)).collect();
        let mut reached = Reached::default();
        let mut missing: Vec<&Arc<Known>> = self.hosts.iter().collect();
        let give_up = limit.map(|limit| Instant::now() + limit);
        while !missing.is_empty() {
            let until = match enough(&reached.links) {
                // Those that have been tried for long already are not waited for.
                true => missing.iter().map(|host| host.tried_since() + GRACE).max(),
                false => give_up,
            };
            let until = until.into_iter().chain(give_up).min();
            let next = attempts.next();
            let next = match until {
                Some(until) => timeout_at(until.into(), next).await,
                None => Ok(next.await),
            };
            match next {
                Ok(Some((host, session))) => {
                    missing.retain(|other| !Arc::ptr_eq(other, &host));
                    match session {
                        Ok(link) => reached.links.push(link),
                        Err(error) => reached.failures.push(error),
                    }
                }
                Ok(None) | Err(_) => break,
            }
        }
        reached.failures.extend(missing.iter().map(|host| {
            let HostAddr { endpoint, node } = &host.addr;
            let text = format!("{endpoint} ({}) has not answered yet", node.short());
            ChatError::ShardUnavailable(text)
        }));
        // In the order of the hosts, not of their answers: routes do not depend on chance.
        let place =
            |link: &Arc<HostLink>| self.hosts.iter().position(|host| host.addr == *link.addr());
        reached.links.sort_by_key(place);
        reached
    }

    /// Reaches a host in a task of its own, which goes on when nobody waits for it any more.
    async fn attempt(&self, host: &Arc<Known>) -> (Arc<Known>, Result<Arc<HostLink>, ChatError>) {
        let (host, key, transport) = (
            Arc::clone(host),
            Arc::clone(&self.key),
            self.transport.clone(),
        );
        let health = self.health.clone();
        host.trying().get_or_insert_with(Instant::now);
        let reached = Arc::clone(&host);
        let session = self.runtime.spawn(async move {
            // Chats that come while one connects wait for it instead of connecting too.
            let session = host
                .session
                .lock()
                .await
                .reach(&host.addr, &key, transport, &health)
                .await;
            *host.trying() = None;
            session
        });
        let session = session.await.unwrap_or_else(|ended| {
            Err(ChatError::Engine(format!(
                "a connection task failed: {ended}"
            )))
        });
        (reached, session)
    }
}

impl Known {
    fn trying(&self) -> MutexGuard<'_, Option<Instant>> {
        self.trying.lock()
    }

    fn tried_since(&self) -> Instant {
        self.trying().unwrap_or_else(Instant::now)
    }
}

impl Session {
    async fn reach(
        &mut self,
        addr: &HostAddr,
        key: &NodeKey,
        transport: Config,
        health: &SharedHealth,
    ) -> Result<Arc<HostLink>, ChatError> {
        // Chats that still use one that is not fresh keep it open.
        self.link.take_if(|link| !link.is_fresh());
        if let Some(link) = &self.link
            && link.answers(GRACE).await
        {
            return Ok(Arc::clone(link));
        }
        if let Some(failed) = &self.failed
            && Instant::now() < failed.retry_at
        {
            return Err(failed.error.clone());
        }
        // A host that is silent may have been started again, and know nothing of the session.
        match HostLink::connect(addr, key, transport).await {
            Ok(link) => {
                health.reached(&addr.node);
                let link = Arc::new(link);
                *self = Self {
                    link: Some(Arc::clone(&link)),
                    failed: None,
                };
                Ok(link)
            }
            Err(error) => {
                health.failed(&addr.node, FailureKind::Unreachable);
                let before = self.failed.as_ref().map(|failed| failed.backoff);
                let backoff = before.map_or(BACKOFF.0, |backoff| (backoff * 2).min(BACKOFF.1));
                self.failed = Some(Failed {
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

impl PooledHosts {
    /// Connects to the hosts, until they have all layers and the others have had their chance.
    /// One error per host that is not there by then.
    pub async fn reach(&self) -> Vec<ChatError> {
        let (cancel, exclude) = (Cancel::default(), BTreeSet::new());
        let hosted = &self.choice.model.hosted;
        let search = Search {
            layers: hosted.start..=hosted.end.saturating_sub(1),
            exclude: &exclude,
            optional: false,
            cancel: &cancel,
        };
        let enough = |links: &[Arc<HostLink>]| self.choice.among(links, &search).is_ok();
        self.pool.reach_enough(enough, None).await.failures
    }
}

impl HostSource for PooledHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let enough = |links: &[Arc<HostLink>]| self.choice.among(links, search).is_ok();
        // Those that are not connected by then may be by the next time that somebody looks.
        let limit = search.optional.then_some(GRACE);
        let reach = search.cancel.or(self.pool.reach_enough(enough, limit));
        let reached = self.pool.runtime.block_on(reach);
        let reached = reached.ok_or(ChatError::Cancelled)?;
        match self.choice.among(&reached.links, search) {
            // A host that could not be reached explains a hole better than the hole does.
            Err(error @ ChatError::ShardUnavailable(_)) => {
                Err(reached.failures.into_iter().next().unwrap_or(error))
            }
            spans => spans,
        }
    }

    fn health(&self) -> SharedHealth {
        self.choice.health.clone()
    }

    fn prepare(&mut self, _: &[RoutedSpan]) {
        let pool = Arc::clone(&self.pool);
        self.pool.runtime.spawn(async move { pool.reach().await });
    }
}
