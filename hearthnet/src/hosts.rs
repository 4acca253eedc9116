//! Hosts for a chat, found in the community's log.
//!
//! Which hosts there are, the advertisements say; where one is, its advertisement, what it
//! says of itself and what discovery heard say; who it is, the TLS handshake proves; that
//! it lets this node in, its own grant says, which is asked for anew for each session.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, Shared, select_all};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use hearthnet_bus::calls::{Client, SHARD_SERVE, ShardGrant};
use hearthnet_bus::discovery::{Distance, Local};
use hearthnet_bus::log::{Advert, EventLog};
use hearthnet_bus::node::{Connections, Node, WeakNode, bus_rule};
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::health::{FailureKind, SharedHealth};
use hearthnet_orchestrator::hosts::{Choice, GRACE, HostSource, RoutedSpan, Search};
use hearthnet_orchestrator::link::{HostAddr, HostLink, PIPELINE};
use hearthnet_orchestrator::router::{Candidate, RouteError, Span};
use hearthnet_transport::{Config, Hello, connect_path};
use parking_lot::{Mutex, MutexGuard};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::time::{timeout, timeout_at};

use crate::backends::choice;
use crate::changes::{Follower, follow};
use crate::community::{Home, endpoints_of, label, now_ms};
use crate::config::Config as Settings;
use crate::failure::Failure;
use crate::layers::{missing, runs_text};
use crate::lock::Lock;
use crate::models::OpenModel;
use crate::output::note;

/// How long one address of a host may take: connecting, the grant, the session.
const PER_ADDRESS: Duration = Duration::from_secs(5);
/// Most addresses that are tried of one host.
const MAX_ADDRESSES: usize = 6;

/// How long to wait for advertisements that close a gap: this node may have found the others
/// only now, or a host may be coming back.
const PATIENCE: Duration = Duration::from_secs(6);

/// The same in the middle of an answer that this machine can finish by itself: a host that is started
/// anew takes longer to read its layers, and news of those that stay take less to come.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);

/// A host that cannot be used and is known not to be within this time may be asked again.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Where else a node may be, as discovery knows.
pub(crate) type Places = Arc<dyn Fn(&NodeId) -> Vec<SocketAddr> + Send + Sync>;

/// Sessions with the hosts of a community, opened as routes need them.
pub(crate) struct CommunityHosts {
    /// Runs the connections.
    pub(crate) runtime: Handle,
    /// This node.
    pub(crate) key: Arc<NodeKey>,
    /// Its community's log, which something keeps even with the others.
    pub(crate) log: EventLog,
    /// The same as a place where this node's standing is known.
    pub(crate) home: Home,
    /// What discovery knows.
    pub(crate) places: Places,
    /// Limits of the sessions.
    pub(crate) transport: Config,
    /// How to choose among them.
    pub(crate) choice: Choice,
    /// How long to wait for advertisements that close a gap: the log may only be coming.
    pub(crate) patience: Duration,
    /// Open sessions, which chats share.
    pub(crate) links: Links,
    /// This node, if it runs in this process: its own layers need no wire.
    pub(crate) here: Option<WeakNode>,
    /// Where this machine can answer as well: whether the log is even with the neighbours', so that
    /// waiting for advertisements keeps the first word back for nothing.
    pub(crate) in_sync: Option<InSync>,
    /// A route was found: somebody waits in the middle of an answer.
    pub(crate) routed: bool,
}

/// Whether this node knows what its neighbours know, or has had the time to.
pub(crate) type InSync = Arc<dyn Fn() -> bool + Send + Sync>;

/// Sessions that chats share.
#[derive(Clone)]
pub(crate) struct Links {
    all: Arc<Mutex<Vec<Arc<HostLink>>>>,
    /// Those that are being opened.
    opening: Arc<Mutex<BTreeMap<Key, Call>>>,
    /// Ends those whose hosts may not see this node's rows any more.
    connections: Connections,
    /// What was seen of hosts.
    health: SharedHealth,
}

/// A host's key, and what it serves.
type Key = (NodeId, String);

/// A session that is being opened.
#[derive(Clone)]
struct Call {
    since: Instant,
    outcome: Shared<BoxFuture<'static, Result<Arc<HostLink>, String>>>,
}

impl Call {
    fn is_over(&self) -> bool {
        self.outcome.clone().now_or_never().is_some()
    }
}

/// The sessions that one search waits for.
#[derive(Default)]
struct Calls(BTreeMap<Key, Call>);

impl Calls {
    fn since(&self, advert: &Advert) -> Option<Instant> {
        let key = (advert.author, advert.descriptor.shard_id.clone());
        self.0.get(&key).map(|call| call.since)
    }

    /// The hosts that have kept this waiting for [`GRACE`].
    fn late(&self, now: Instant) -> BTreeSet<NodeId> {
        let late = |call: &Call| call.since + GRACE <= now && !call.is_over();
        let calls = self.0.iter().filter(|(_, call)| late(call));
        calls.map(|((node, _), _)| *node).collect()
    }

    /// Resolves when one of them has come to something, and at `until` at the latest.
    async fn any(&self, until: Option<Instant>) {
        let calls = self.0.values().filter(|call| !call.is_over());
        let outcomes: Vec<_> = calls.map(|call| call.outcome.clone()).collect();
        if outcomes.is_empty() {
            return;
        }
        let any = select_all(outcomes);
        match until {
            Some(until) => {
                let _ = timeout_at(until.into(), any).await;
            }
            None => {
                let _ = any.await;
            }
        }
    }
}

impl Links {
    /// None yet. `connections` watches them, and `health` is told what their hosts do.
    pub(crate) fn new(connections: Connections, health: SharedHealth) -> Self {
        Self {
            all: Arc::default(),
            opening: Arc::default(),
            connections,
            health,
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<HostLink>>> {
        self.all.lock()
    }

    fn opening(&self) -> MutexGuard<'_, BTreeMap<Key, Call>> {
        self.opening.lock()
    }
}

/// What a chat needs of the community while it lasts: somebody who keeps the log even with
/// the others. Where a node runs on this machine, it does.
#[derive(Default)]
pub(crate) struct TransientNode(
    Option<(Node, Instant)>,
    #[expect(dead_code, reason = "held, never read")] Option<Follower>,
);

impl TransientNode {
    /// Starts looking for the others, unless a node here has found them already.
    pub(crate) async fn begin(home: &Home, config: &Settings) -> Result<Self, Failure> {
        if Lock::is_held(&home.dir) {
            return Ok(Self(None, Some(follow(home))));
        }
        let node = crate::node::transient(home, config).await?;
        Ok(Self(Some((node, Instant::now())), None))
    }

    /// Waits, within bounds, until the log is what others know: what they serve is in it.
    pub(crate) async fn settle(&self) {
        if let Some((node, _)) = &self.0 {
            crate::node::settle_in(node).await;
        }
    }

    /// The hosts of the community, for chats with `model`.
    pub(crate) fn hosts(
        &self,
        runtime: Handle,
        home: &Home,
        model: &OpenModel,
        config: &Settings,
    ) -> Result<CommunityHosts, Failure> {
        let node = self.0.as_ref().map(|(node, _)| node.clone());
        let connections = match &node {
            Some(node) => node.connections().clone(),
            // The node that runs here watches its own connections, and this program these.
            None => {
                let _inside = runtime.enter();
                Connections::watched(home.log.clone())
            }
        };
        let places: Places = Arc::new(move |id: &NodeId| {
            node.as_ref()
                .map_or_else(Vec::new, |node| node.discovery().endpoints(id))
        });
        CommunityHosts::new(
            runtime,
            home,
            model,
            config,
            places,
            Links::new(connections, SharedHealth::default()),
        )
    }

    /// Whether the log is even with the others'. Where a node runs here, it sees to that.
    pub(crate) fn in_sync(&self) -> InSync {
        match &self.0 {
            None => Arc::new(|| true),
            Some((node, began)) => in_sync(node.downgrade(), *began),
        }
    }

    /// What `check` says, but not before the others were asked where it refuses: this node's log
    /// may be behind.
    pub(crate) async fn judge(
        &self,
        home: &Home,
        check: impl Fn() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if check().is_ok() {
            return Ok(());
        }
        note("asking the others whether this node may");
        match &self.0 {
            Some((node, _)) => crate::node::learn(node, home).await,
            None => crate::node::settle_beside(home, || check().is_ok()).await,
        }
        check()
    }

    /// Says goodbye.
    pub(crate) async fn end(self) {
        if let Some((node, _)) = self.0 {
            node.shutdown().await;
        }
    }
}

/// Whether a node that began then knows what its neighbours know, or has had the time to.
pub(crate) fn in_sync(node: WeakNode, began: Instant) -> InSync {
    Arc::new(move || {
        let node = node.upgrade();
        node.is_none_or(|node| crate::node::in_sync(&node, began.elapsed()))
    })
}

impl HostSource for CommunityHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let (layers, exclude) = (&search.layers, search.exclude);
        let patience = match search.optional {
            true => Duration::ZERO,
            // In the middle of an answer that this machine can finish.
            false if self.routed && self.in_sync.is_some() => self.patience.min(SHORT_PATIENCE),
            false => self.patience,
        };
        let deadline = Instant::now() + patience;
        let mut changes = self.log.changes();
        // Hosts that could not be used in this search, and why the last of them could not.
        // Those that said so at once are asked again: a host that has just been started
        // listens before it serves.
        let mut unusable = exclude.clone();
        let mut resting = BTreeSet::new();
        let mut calls = Calls::default();
        let mut failure = None;
        loop {
            if search.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            changes.borrow_and_update();
            let mut passed_over = &unusable | &resting;
            self.links().retain(|link| {
                // It would refuse; its advertisement may be gone a moment later only.
                if link.is_leaving() {
                    passed_over.insert(link.descriptor().host);
                }
                link.is_open()
            });
            let adverts = self.adverts();
            let asked = Instant::now();
            let opened = match self.choose(&adverts, layers.clone(), &passed_over) {
                Ok(_) => self.open(&adverts, &passed_over, &mut calls, search),
                Err(error) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let in_vain = !self.routed && self.in_sync.as_ref().is_some_and(|is| is());
                    // Nobody lets this node in any more: there is nothing to wait for.
                    if let Err(put_out) = self.home.level() {
                        return Err(ChatError::ShardUnavailable(put_out.to_string()));
                    }
                    let over = left.is_zero() || in_vain;
                    // Before the first route the log may still be behind.
                    if (over || self.routed) && !self.log.state().policy.research {
                        return Err(ChatError::ExperimentalDisabled);
                    }
                    if over {
                        return Err(
                            failure.unwrap_or_else(|| self.explain(error, &adverts, exclude))
                        );
                    }
                    // Advertisements also expire without a change of the log.
                    let wait = left.min(Duration::from_millis(200));
                    let changed = async { timeout(wait, changes.changed()).await };
                    let _ = self.runtime.block_on(search.cancel.or(changed));
                    resting.clear();
                    continue;
                }
            };
            match opened {
                Ok(route) => {
                    self.routed = true;
                    return Ok(route);
                }
                Err((_, error @ ChatError::Cancelled)) => return Err(error),
                // Nobody is there at once: whoever is being connected to may be the next time.
                Err((None, error)) => return Err(error),
                Err((Some(host), error)) => {
                    let said_so = asked.elapsed() < AT_ONCE;
                    if said_so { &mut resting } else { &mut unusable }.insert(host);
                    failure = Some(error);
                }
            }
        }
    }

    fn health(&self) -> SharedHealth {
        self.links.health.clone()
    }

    /// Keeps a session with one spare per span: shared by all chats, asked for a sign of life
    /// whenever somebody comes by here, and there when a host fails.
    fn prepare(&mut self, route: &[RoutedSpan]) {
        let adverts = self.adverts();
        for span in route {
            let host = BTreeSet::from([span.link.descriptor().host]);
            // Nobody else has these layers: then there is nothing to prepare.
            let spares = self.choose(&adverts, span.lo..=span.hi, &host);
            for spare in spares.unwrap_or_default() {
                if let Some(advert) = adverts.get(spare.candidate) {
                    self.session(advert, &mut Calls::default());
                }
            }
        }
    }
}

impl CommunityHosts {
    /// What is advertised now, by trusted members only, whatever others said before they were none.
    fn adverts(&self) -> Vec<Advert> {
        let state = self.log.state();
        let live = state.shards(now_ms()).filter(|_| state.policy.research);
        live.cloned().collect()
    }

    /// The hosts of `home`'s community.
    pub(crate) fn new(
        runtime: Handle,
        home: &Home,
        model: &OpenModel,
        config: &Settings,
        places: Places,
        links: Links,
    ) -> Result<Self, Failure> {
        Ok(Self {
            runtime,
            choice: Choice {
                health: links.health.clone(),
                ..choice(model, home.key.id(), config)
            },
            key: Arc::clone(&home.key),
            log: home.log.clone(),
            home: home.clone(),
            places,
            transport: config.transport()?,
            patience: PATIENCE,
            links,
            here: None,
            in_sync: None,
            routed: false,
        })
    }

    fn choose(
        &self,
        adverts: &[Advert],
        layers: RangeInclusive<u32>,
        exclude: &BTreeSet<NodeId>,
    ) -> Result<Vec<Span>, RouteError> {
        let own = self.key.id();
        let local = Local::read(&[]);
        let candidates: Vec<Candidate> = adverts
            .iter()
            .map(|advert| {
                let hop_weight = match advert.descriptor.endpoint.parse() {
                    _ if advert.author == own => 0,
                    Ok(at) if local.distance(&at) <= Distance::Subnet => 1,
                    _ => 2,
                };
                Candidate::new(advert.descriptor.clone(), hop_weight, advert.author == own)
            })
            .collect();
        self.choice.pick(&candidates, layers, exclude)
    }

    /// Sessions for a route: those that stand, and new ones, all at once. A host that keeps others
    /// waiting gets [`GRACE`]; then those that could do without it are connected as well, and
    /// whichever route is complete first is taken. An error names the host that refused.
    fn open(
        &self,
        adverts: &[Advert],
        passed_over: &BTreeSet<NodeId>,
        calls: &mut Calls,
        search: &Search<'_>,
    ) -> Result<Vec<RoutedSpan>, (Option<NodeId>, ChatError)> {
        let give_up = search.optional.then(|| Instant::now() + GRACE);
        loop {
            let now = Instant::now();
            let late = &calls.late(now) | passed_over;
            let mut waiting: Option<Instant> = None;
            // What is wanted, and what there is without those that are late.
            for exclude in [passed_over, &late] {
                let Ok(spans) = self.choose(adverts, search.layers.clone(), exclude) else {
                    continue;
                };
                let mut route = Vec::new();
                for span in &spans {
                    let Some(advert) = adverts.get(span.candidate) else {
                        continue;
                    };
                    match self.session(advert, calls) {
                        Some(Ok(link)) if holds(&link, span.lo, span.hi) => {
                            let (lo, hi) = (span.lo, span.hi);
                            route.push(RoutedSpan { link, lo, hi });
                        }
                        // A host that has moved to other layers since it advertised is of no use.
                        Some(other) => {
                            let why = other.err();
                            let why = why.unwrap_or_else(|| "it serves other layers now".into());
                            let host = label(&self.log.state(), &advert.author);
                            let error = ChatError::ShardUnavailable(format!(
                                "{host} serves layers {}-{} but cannot be used: {why}",
                                span.lo, span.hi
                            ));
                            return Err((Some(advert.descriptor.host), error));
                        }
                        None => {
                            let at = calls.since(advert).unwrap_or(now) + GRACE;
                            if at > now {
                                waiting = Some(waiting.map_or(at, |waiting| waiting.min(at)));
                            }
                        }
                    }
                }
                if route.len() == spans.len() {
                    return Ok(route);
                }
            }
            if give_up.is_some_and(|at| at <= now) {
                let error = ChatError::ShardUnavailable("nobody else is there at once".into());
                return Err((None, error));
            }
            let until = waiting.into_iter().chain(give_up).min();
            let answered = search.cancel.or(calls.any(until));
            if self.runtime.block_on(answered).is_none() {
                return Err((None, ChatError::Cancelled));
            }
        }
    }

    /// The session with a host, if it stands or has failed; else it is on its way, in a task that
    /// goes on when this search has ended: what it opens is at hand for the next one.
    fn session(&self, advert: &Advert, calls: &mut Calls) -> Option<Result<Arc<HostLink>, String>> {
        let (node, shard) = (advert.author, advert.descriptor.shard_id.clone());
        let key = (node, shard.clone());
        if let Some(call) = calls.0.get(&key) {
            let outcome = call.outcome.clone().now_or_never()?;
            if outcome.as_ref().is_ok_and(|link| link.is_fresh()) {
                return Some(outcome);
            }
            // Asked again, it may say something else.
            calls.0.remove(&key);
            if outcome.is_err() {
                return Some(outcome);
            }
        }
        let is_it = |link: &Arc<HostLink>| {
            link.is_fresh() && link.addr().node == node && link.descriptor().shard_id == shard
        };
        // The newest: of a host that was started again an older one may still stand.
        let found = self.links().iter().rev().find(|link| is_it(link)).cloned();
        if let Some(link) = found.as_ref().filter(|link| link.was_heard_just_now()) {
            return Some(Ok(Arc::clone(link)));
        }
        let mut opening = self.links.opening();
        opening.retain(|_, call| !call.is_over());
        let call = opening.entry(key.clone()).or_insert_with(|| {
            let addresses = self.addresses(advert);
            let (key, transport) = (Arc::clone(&self.key), self.transport.clone());
            let links = self.links.clone();
            let here = self.here.clone().filter(|_| node == self.key.id());
            let endpoint = advert.descriptor.endpoint.clone();
            let task = self.runtime.spawn(async move {
                if let Some(link) = found
                    && link.answers(GRACE).await
                {
                    return Ok(link);
                }
                let Links {
                    connections,
                    health,
                    ..
                } = &links;
                let link = match here {
                    Some(here) => {
                        let addr = HostAddr { endpoint, node };
                        connect_to_self(&here, &addr, &shard, &transport, connections).await
                    }
                    None => connect(node, &shard, &addresses, &key, &transport, connections).await,
                };
                let link = link.inspect_err(|_| health.failed(&node, FailureKind::Unreachable))?;
                health.reached(&node);
                let link = Arc::new(link);
                links.all().push(Arc::clone(&link));
                Ok(link)
            });
            let since = Instant::now();
            let ended = async move { task.await.unwrap_or_else(|ended| Err(ended.to_string())) };
            Call {
                since,
                outcome: ended.boxed().shared(),
            }
        });
        let call = call.clone();
        drop(opening);
        let outcome = call.outcome.clone().now_or_never();
        calls.0.insert(key, call);
        outcome
    }

    fn links(&self) -> MutexGuard<'_, Vec<Arc<HostLink>>> {
        self.links.all()
    }

    /// Where a host may be, the nearest first.
    fn addresses(&self, advert: &Advert) -> Vec<SocketAddr> {
        let state = self.log.state();
        let told = endpoints_of(&state, &advert.author, now_ms());
        let mut all: Vec<SocketAddr> = std::iter::once(&advert.descriptor.endpoint)
            .chain(&told)
            .filter_map(|text| text.parse().ok())
            .chain((self.places)(&advert.author))
            .collect();
        let local = Local::read(&[]);
        // Stable: of the same distance, what the host itself says comes first.
        all.sort_by_key(|address| local.distance(address));
        let mut seen = BTreeSet::new();
        all.retain(|address| seen.insert(*address));
        all.truncate(MAX_ADDRESSES);
        all
    }

    /// Why there is no route, in terms of the whole model.
    fn explain(
        &self,
        error: RouteError,
        adverts: &[Advert],
        exclude: &BTreeSet<NodeId>,
    ) -> ChatError {
        let RouteError::Uncovered { .. } = error else {
            return error.into();
        };
        let weights = self.choice.model.weights.to_string();
        let own = self.key.id();
        let held: Vec<(u32, u32)> = adverts
            .iter()
            .filter(|a| self.choice.allow_self || a.author != own)
            .filter(|a| {
                a.descriptor.weights_sha256 == weights && !exclude.contains(&a.descriptor.host)
            })
            .map(|a| a.descriptor.layer_range)
            .collect();
        let community = &self.log.state().name;
        let model = &self.choice.model.model_id;
        let mut text = if held.is_empty() {
            format!("nobody in {community:?} serves {model}")
        } else {
            // What this machine computes itself, nobody need serve.
            let hosted = &self.choice.model.hosted;
            let own = [(0, hosted.start), (hosted.end, self.choice.model.layers)];
            let own = own.into_iter().filter(|(lo, end)| lo < end);
            let held: Vec<(u32, u32)> = own.map(|(lo, end)| (lo, end - 1)).chain(held).collect();
            let missing = runs_text(&missing(self.choice.model.layers, &held));
            format!("nobody in {community:?} serves layers {missing} of {model}")
        };
        let own_serves = |a: &Advert| a.author == own && a.descriptor.weights_sha256 == weights;
        if !self.choice.allow_self && adverts.iter().any(own_serves) {
            text.push_str(
                ", and what this node serves itself does not count \
                 (research.distributed_inference.allow_self_as_shard is false)",
            );
        }
        ChatError::ShardUnavailable(text)
    }
}

fn holds(link: &HostLink, lo: u32, hi: u32) -> bool {
    let (first, last) = link.descriptor().layer_range;
    first <= lo && hi <= last
}

/// A session with the layers that this very process serves: the same grant, and no wire.
async fn connect_to_self(
    here: &WeakNode,
    addr: &HostAddr,
    shard: &str,
    transport: &Config,
    watch: &Connections,
) -> Result<HostLink, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let node = here.upgrade().ok_or("this node is stopping")?;
    let capability = SHARD_SERVE.parse().map_err(|e| text(&e))?;
    let wanted = json!({ "shard_id": shard });
    let answer = node
        .call(addr.node, &capability, &wanted)
        .await
        .map_err(|e| text(&e))?
        .result_within(PER_ADDRESS)
        .await
        .map_err(|e| text(&e))?;
    let grant: ShardGrant = serde_json::from_value(answer).map_err(|e| text(&e))?;
    let token = grant.token().ok_or("its grant is not base64url")?;
    let hello = Hello::new(PIPELINE, token.clone());
    let connection = node.open_here(&hello, transport).map_err(|e| text(&e))?;
    let link = HostLink::over(addr, &token, connection, transport.session_lifetime)
        .await
        .map_err(|e| text(&e))?;
    watch.watch_host(addr.node, Some(&token), link.closer());
    Ok(link)
}

/// Tries the addresses until one leads to the host and it grants a session: the next one when one
/// has failed, or has said nothing for [`GRACE`], beside it.
async fn connect(
    node: NodeId,
    shard: &str,
    addresses: &[SocketAddr],
    key: &Arc<NodeKey>,
    transport: &Config,
    watch: &Connections,
) -> Result<HostLink, String> {
    let mut last = "it says nowhere where it is".to_owned();
    let mut attempts = FuturesUnordered::new();
    let mut rest = addresses.iter();
    loop {
        if let Some(address) = rest.next() {
            attempts.push(async move {
                let attempt = connect_at(node, shard, *address, key, transport, watch);
                let silent = || format!("{address} did not answer in {} s", PER_ADDRESS.as_secs());
                let attempt = timeout(PER_ADDRESS, attempt).await;
                attempt.unwrap_or_else(|_| Err(silent()))
            });
        } else if attempts.is_empty() {
            return Err(last);
        }
        let patience = if rest.len() > 0 { GRACE } else { PER_ADDRESS };
        match timeout(patience, attempts.next()).await {
            Ok(Some(Ok(link))) => return Ok(link),
            Ok(Some(Err(why))) => last = why,
            Ok(None) | Err(_) => {}
        }
    }
}

async fn connect_at(
    node: NodeId,
    shard: &str,
    address: SocketAddr,
    key: &Arc<NodeKey>,
    transport: &Config,
    watch: &Connections,
) -> Result<HostLink, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let identity = key.identity().map_err(|e| text(&e))?;
    let endpoint = address.to_string();
    let expected = Some(node);
    let socket = connect_path(&endpoint, &identity, expected, &bus_rule(), transport)
        .await
        .map_err(|e| text(&e))?;
    watch.watch_host(node, None, socket.closer());
    let client = Client::new(socket, Arc::clone(key));
    let capability = SHARD_SERVE.parse().map_err(|e| text(&e))?;
    let answer = client
        .call(&capability, &json!({ "shard_id": shard }))
        .map_err(|e| text(&e))?
        .result()
        .await
        .map_err(|e| text(&e))?;
    let grant: ShardGrant = serde_json::from_value(answer).map_err(|e| text(&e))?;
    let token = grant.token().ok_or("its grant is not base64url")?;
    let addr = HostAddr { endpoint, node };
    let link = HostLink::connect_with(&addr, key, token.clone(), transport.clone())
        .await
        .map_err(|e| text(&e))?;
    watch.watch_host(node, Some(&token), link.closer());
    Ok(link)
}
