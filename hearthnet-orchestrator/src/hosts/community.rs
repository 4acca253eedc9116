//! Hosts found in a community's log.
//!
//! Advertisements in the log name the hosts. Addresses come from the advertisement, from the host's
//! own events and from discovery. The TLS handshake proves the host's identity. A grant, requested
//! anew for each session, shows that the host admits this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::discovery::{Claims, Discovery, Distance, Local, Source, vouched_first};
use hearthnet_bus::log::{Advert, EventLog};
use hearthnet_bus::node::{Connections, WeakNode};
use hearthnet_bus::{NodeId, NodeKey, now_ms};
use hearthnet_transport::Config;
use parking_lot::Mutex;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::attempt::{Attempt, DialBudgets};
use super::opening::{Opening, Outcome, SignOfLife, any_of};
use super::source::{
    Choice, DISCOVERY_TIMEOUT, GRACE, HostSource, Patience, RoutedSpan, SEARCH_INTERVAL,
    SHORT_DISCOVERY_TIMEOUT, SIGN_OF_LIFE_TIMEOUT, Search,
};
use crate::Cancel;
use crate::error::ChatError;
use crate::exact::{Exact, is_exact};
use crate::hosts::health::{FailureKind, SharedHealth};
use crate::hosts::link::HostLink;
use crate::hosts::router::{Candidate, PolicyName, RouteError, Span, Speeds, speeds};
use crate::placement::{missing, runs_text};

/// Maximum number of vouched-for addresses tried per host, and of merely announced ones.
const MAX_ADDRESSES: usize = 6;

/// A host whose attempt fails within this time may be tried again in the same search.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Returns true if this node is in sync with its neighbours, or has had time to be.
pub type InSync = Arc<dyn Fn() -> bool + Send + Sync>;

/// Returns the reason why this node may use no host any more, if it was expelled.
pub type Expelled = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// Sessions with the hosts of a community, opened as routes need them.
#[derive(Clone)]
pub struct CommunityHosts {
    runtime: Handle,
    key: Arc<NodeKey>,
    /// Log of the community, kept in sync by the node.
    log: EventLog,
    transport: Config,
    choice: Choice,
    links: Links,
    /// Discovery of a node in this process, which may know more addresses than the log.
    pub discovery: Option<Discovery>,
    /// Tells whether this node was expelled; searches then fail without waiting.
    pub expelled: Expelled,
    /// This node, if it runs in this process: its own layers need no network connection.
    pub here: Option<WeakNode>,
    /// Set if this machine can answer by itself. Once the log is in sync, a search does not wait
    /// for further advertisements.
    pub in_sync: Option<InSync>,
    /// True once a route was found: later searches happen in the middle of an answer.
    routed: bool,
}

/// Sessions that chats share. Clones share the same set.
#[derive(Clone)]
pub struct Links {
    all: Arc<Mutex<Vec<Arc<HostLink>>>>,
    /// Sessions that are being opened.
    opening: Arc<Mutex<BTreeMap<Key, Opening>>>,
    /// Closes sessions with hosts that are not authorised to see this node's rows any more.
    connections: Connections,
    health: SharedHealth,
    /// Dial budgets and proved addresses of hosts.
    budgets: Arc<Mutex<DialBudgets>>,
}

/// Advertisements of members that are trusted, as candidates of routes.
struct Offered {
    adverts: Vec<Advert>,
    /// In the order of `adverts`.
    candidates: Vec<Candidate>,
    speeds: Speeds,
}

/// Host that refused the session, if it was a host, and the error.
type Unopened = (Option<NodeId>, ChatError);

/// Node id and shard id.
type Key = (NodeId, String);

/// Sessions that one search waits for.
#[derive(Default)]
struct Awaited(BTreeMap<Key, Opening>);

impl Awaited {
    /// Hosts that this search has waited on for [`GRACE`].
    fn late(&self, now: Instant) -> BTreeSet<NodeId> {
        let late = |one: &Opening| one.since() + GRACE <= now && one.now().is_none();
        let all = self.0.iter().filter(|(_, one)| late(one));
        all.map(|((node, _), _)| *node).collect()
    }

    /// Time at which every pending attempt has had [`SIGN_OF_LIFE_TIMEOUT`]. `None` if none is
    /// pending, or one host has given a sign of life.
    fn dark_at(&self) -> Option<Instant> {
        let under_way = self.0.values().filter(|one| one.now().is_none());
        let dark_at = |one: &Opening| (!one.is_heard()).then(|| one.since() + SIGN_OF_LIFE_TIMEOUT);
        under_way
            .map(dark_at)
            .reduce(|a, b| a.zip(b).map(|(a, b)| a.max(b)))?
    }
}

impl Links {
    /// Creates an empty set. `connections` watches its sessions; `health` records what their hosts
    /// do.
    pub fn new(connections: Connections, health: SharedHealth) -> Self {
        Self {
            all: Arc::default(),
            opening: Arc::default(),
            connections,
            health,
            budgets: Arc::default(),
        }
    }
}

impl HostSource for CommunityHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let deadline = Instant::now()
            + match search.patience {
                Patience::None => Duration::ZERO,
                // In the middle of an answer. Before one, the log may still bring more hosts.
                Patience::Short if self.routed => SHORT_DISCOVERY_TIMEOUT,
                Patience::Short | Patience::Long => DISCOVERY_TIMEOUT,
            };
        let mut changes = self.log.changes();
        // Hosts that failed in this search. Hosts that failed at once go into `resting` and are
        // tried again: a host that has just started listens before it serves.
        let mut unusable = search.exclude.clone();
        let mut resting = BTreeSet::new();
        let mut failure = None;
        let mut awaited = Awaited::default();
        loop {
            if search.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            changes.borrow_and_update();
            let mut passed_over = &unusable | &resting;
            self.links.all.lock().retain(|link| {
                // A leaving host would refuse; its advertisement is withdrawn only later.
                if link.is_leaving() {
                    passed_over.insert(link.addr.node);
                }
                link.is_open()
            });
            let offered = self.offered();
            if let Err(error) = self.choose(&offered, search, &passed_over) {
                let left = deadline.saturating_duration_since(Instant::now());
                if let Some(end) = self.end_of_waiting(left) {
                    let explained = || self.explain(error, &offered.adverts, search.exclude);
                    return Err(end.or(failure).unwrap_or_else(explained));
                }
                // Advertisements also expire without a change of the log.
                let wait = left.min(SEARCH_INTERVAL);
                let changed = async { timeout(wait, changes.changed()).await };
                let _ = self
                    .runtime
                    .block_on(search.cancel.run_until_cancelled(changed));
                resting.clear();
                continue;
            }
            let asked = Instant::now();
            match self.open(&offered, &passed_over, &mut awaited, search) {
                Ok(route) => {
                    self.routed = true;
                    return Ok(route);
                }
                // No host was ready in time. Attempts continue for the next search.
                Err((None, error)) => return Err(error),
                Err((Some(host), error)) => {
                    let said_so = asked.elapsed() < AT_ONCE;
                    if said_so { &mut resting } else { &mut unusable }.insert(host);
                    failure = Some(error);
                }
            }
        }
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn fork(&self) -> Option<Box<dyn HostSource>> {
        Some(Box::new(self.clone()))
    }

    fn demand(&mut self, exact: Exact) {
        self.choice.exact = exact;
    }

    fn is_convicted(&self, host: &NodeId) -> bool {
        self.log.state().reputation(host).is_convicted()
    }

    /// Keeps a session with one spare per span. It is shared by all chats, checked for a sign of
    /// life at each call, and ready when a host fails.
    fn prepare(&mut self, route: &[RoutedSpan]) {
        let (offered, cancel) = (self.offered(), Cancel::default());
        for span in route {
            let host = BTreeSet::from([span.link.addr.node]);
            let spare = Search {
                layers: span.lo..=span.hi,
                exclude: &host,
                before: Some(&span.link.descriptor.arithmetic),
                patience: Patience::None,
                cancel: &cancel,
            };
            // If no other host has these layers, there is nothing to prepare.
            let spares = self.choose(&offered, &spare, &host);
            for spare in spares.unwrap_or_default() {
                if let Some(advert) = offered.adverts.get(spare.candidate) {
                    // The attempt continues in the background for the search that needs it.
                    let _ = self.session(advert, &mut Awaited::default());
                }
            }
        }
    }
}

impl CommunityHosts {
    /// Decides whether a search stops waiting for advertisements, with `left` of its time. Returns
    /// the error to report, or `Some(None)` for the missing layers themselves.
    fn end_of_waiting(&self, left: Duration) -> Option<Option<ChatError>> {
        // An expelled node is refused by every host.
        if let Some(why) = (self.expelled)() {
            return Some(Some(ChatError::ShardUnavailable(why)));
        }
        let in_vain = !self.routed && self.in_sync.as_ref().is_some_and(|is| is());
        let over = left.is_zero() || in_vain;
        // Before the first route, the log may still be behind.
        if (over || self.routed) && !self.log.state().policy.research {
            return Some(Some(ChatError::ExperimentalDisabled));
        }
        over.then_some(None)
    }

    /// Hosts that are offered now, with what members measured of them.
    fn offered(&self) -> Offered {
        let (own, state) = (self.key.id(), self.log.state());
        // Neither a session with a convicted host nor a lack of other hosts makes an exception.
        let live = state.usable_shards(now_ms());
        let live = live.filter(|_| state.policy.research);
        let adverts: Vec<Advert> = live.cloned().collect();
        let local = Local::read(&[]);
        let candidate = |advert: &Advert| {
            let hop_weight = match advert.descriptor.endpoint.parse() {
                _ if advert.author == own => 0,
                Ok(at) if local.distance(&at) <= Distance::Subnet => 1,
                _ => 2,
            };
            Candidate {
                is_false_accuser: state.reputation(&advert.author).is_false_accuser(),
                ..Candidate::new(advert.descriptor.clone(), hop_weight, advert.author == own)
            }
        };
        let candidates = adverts.iter().map(candidate).collect();
        let model = &self.choice.model;
        let speeds = match self.choice.policy {
            PolicyName::Greedy => Speeds::new(),
            PolicyName::Auto | PolicyName::Planned | PolicyName::PetalsLike => {
                let row = model.bytes_behind();
                speeds(&state, model.weights, own, row as u64, now_ms())
            }
        };
        Offered {
            adverts,
            candidates,
            speeds,
        }
    }

    /// Hosts of the community of `log`, for the node with this key, selected by `choice`. Addresses
    /// come from the log until [`Self::discovery`] is set.
    pub fn new(
        runtime: Handle,
        key: Arc<NodeKey>,
        log: EventLog,
        transport: Config,
        choice: Choice,
        links: Links,
    ) -> Self {
        Self {
            runtime,
            key,
            log,
            transport,
            choice: Choice {
                health: links.health.clone(),
                ..choice
            },
            links,
            discovery: None,
            expelled: Arc::new(|| None),
            here: None,
            in_sync: None,
            routed: false,
        }
    }

    /// Selects hosts for a search, none of them in `exclude`.
    fn choose(
        &self,
        offered: &Offered,
        search: &Search<'_>,
        exclude: &BTreeSet<NodeId>,
    ) -> Result<Vec<Span>, RouteError> {
        let (layers, before) = (search.layers.clone(), search.before);
        let candidates = offered.candidates.clone();
        self.choice
            .pick(candidates, layers, exclude, before, &offered.speeds)
    }

    /// Opens missing sessions of a route in parallel. If a host does not answer within [`GRACE`],
    /// the hosts of a route without it are connected as well, and the first complete route wins. An
    /// error names the host that refused.
    fn open(
        &self,
        offered: &Offered,
        passed_over: &BTreeSet<NodeId>,
        awaited: &mut Awaited,
        search: &Search<'_>,
    ) -> Result<Vec<RoutedSpan>, Unopened> {
        let (adverts, began) = (&offered.adverts, Instant::now());
        loop {
            let now = Instant::now();
            let late = &awaited.late(now) | passed_over;
            let (mut until, mut wanted) = (None, None);
            // The preferred route, then the route without late hosts.
            for exclude in [passed_over, &late] {
                let Ok(spans) = self.choose(offered, search, exclude) else {
                    continue;
                };
                // A late exact host is waited for as if no other host had its layers.
                let mut chosen = spans.iter().filter_map(|span| adverts.get(span.candidate));
                let exact = chosen.all(|advert| is_exact(&advert.descriptor.arithmetic));
                if self.choice.exact != Exact::Any && *wanted.get_or_insert(exact) && !exact {
                    continue;
                }
                let (route, missing) = self.sessions(adverts, &spans, awaited)?;
                if missing.is_empty() {
                    return Ok(route);
                }
                let late_at = missing.into_iter().map(|since| since + GRACE);
                until = until
                    .into_iter()
                    .chain(late_at.filter(|at| *at > now))
                    .min();
            }
            let (give_up, why) = match search.patience {
                Patience::None => (Some(began + GRACE), "no other host is ready"),
                Patience::Short => (awaited.dark_at(), "the required hosts do not answer"),
                Patience::Long => (None, ""),
            };
            if give_up.is_some_and(|at| at <= now) {
                return Err((None, ChatError::ShardUnavailable(why.into())));
            }
            let until = until.into_iter().chain(give_up).min();
            let pending = awaited.0.values().filter(|one| one.now().is_none());
            let answered = search.cancel.run_until_cancelled(any_of(pending, until));
            if self.runtime.block_on(answered).is_none() {
                return Err((None, ChatError::Cancelled));
            }
        }
    }

    /// Open sessions for the spans, and the start times of pending attempts.
    fn sessions(
        &self,
        adverts: &[Advert],
        spans: &[Span],
        awaited: &mut Awaited,
    ) -> Result<(Vec<RoutedSpan>, Vec<Instant>), Unopened> {
        let (mut route, mut missing) = (Vec::new(), Vec::new());
        for span in spans {
            let (lo, hi) = (span.lo, span.hi);
            let Some(advert) = adverts.get(span.candidate) else {
                continue;
            };
            let why = match self.session(advert, awaited) {
                Ok(Ok(link)) if is_as_advertised(&link, advert, lo, hi) => {
                    route.push(RoutedSpan::new(link, span));
                    continue;
                }
                Err(since) => {
                    missing.push(since);
                    continue;
                }
                // The host has changed its layers or arithmetic since it advertised.
                Ok(Ok(_)) => "it now serves other layers, or with another arithmetic".to_owned(),
                Ok(Err(error)) => error.to_string(),
            };
            let host = self.log.state().label(&advert.author, now_ms());
            let text = format!("{host} serves layers {lo}-{hi} but cannot be used: {why}");
            return Err((Some(advert.author), ChatError::ShardUnavailable(text)));
        }
        Ok((route, missing))
    }

    /// Returns the session with a host or the error of its attempt. If neither is there yet,
    /// returns the start time of the attempt, whose task outlives this search.
    fn session(&self, advert: &Advert, awaited: &mut Awaited) -> Result<Outcome, Instant> {
        let (node, shard) = (advert.author, advert.descriptor.shard_id.clone());
        let key = (node, shard.clone());
        if let Some(opening) = awaited.0.get(&key) {
            let outcome = opening.now().ok_or(opening.since())?;
            if outcome.as_ref().is_ok_and(|link| link.is_fresh()) {
                return Ok(outcome);
            }
            // A new attempt may have another result.
            awaited.0.remove(&key);
            if outcome.is_err() {
                return Ok(outcome);
            }
        }
        let is_it = |link: &&Arc<HostLink>| {
            link.is_fresh() && link.addr.node == node && link.descriptor.shard_id == shard
        };
        // Newest first: after a restart of the host, an older session may still seem open.
        let found = self.links.all.lock().iter().rev().find(is_it).cloned();
        if let Some(link) = found.as_ref().filter(|link| link.was_heard_just_now()) {
            return Ok(Ok(Arc::clone(link)));
        }
        let mut all = self.links.opening.lock();
        all.retain(|_, opening| opening.now().is_none());
        let opening = all.entry(key.clone()).or_insert_with(|| {
            let heard = SignOfLife::default();
            let attempt = Attempt {
                node,
                wanted: json!({ "shard_id": shard }),
                key: Arc::clone(&self.key),
                transport: self.transport.clone(),
                connections: self.links.connections.clone(),
                budgets: Arc::clone(&self.links.budgets),
                heard: heard.clone(),
            };
            let (links, addresses) = (self.links.clone(), self.addresses(advert));
            let here = self.here.clone().filter(|_| node == self.key.id());
            let endpoint = advert.descriptor.endpoint.clone();
            Opening::begin(&self.runtime, heard, async move {
                if let Some(link) = found
                    && link.answers(GRACE).await
                {
                    return Ok(link);
                }
                let link = match here {
                    Some(here) => attempt.with_self(&here, endpoint).await,
                    None => attempt.with_any_of(&addresses).await,
                };
                let health = &links.health;
                let link = link.inspect_err(|_| health.failed(&node, FailureKind::Unreachable))?;
                health.look(|all, now| all.reached(&node, now));
                let link = Arc::new(link);
                links.all.lock().push(Arc::clone(&link));
                Ok(link)
            })
        });
        let opening = opening.clone();
        drop(all);
        let outcome = opening.now().ok_or(opening.since());
        awaited.0.insert(key, opening);
        outcome
    }

    /// Addresses of a host, best first.
    fn addresses(&self, advert: &Advert) -> Vec<SocketAddr> {
        let state = self.log.state();
        let told = state.endpoints_of(&advert.author, now_ms());
        let local = Local::read(&[]);
        let claims = Claims::new(&state, &[], local.clone(), now_ms());
        let proved = self.links.budgets.lock().proved(&advert.author);
        let signed = std::iter::once(&advert.descriptor.endpoint)
            .chain(told)
            .filter_map(|text| match advert.author == self.key.id() {
                true => text.parse().ok(),
                false => claims.admit(text),
            });
        let discovery = self.discovery.as_ref();
        let found = discovery.map(|all| all.endpoints_by_source(&advert.author));
        let all = proved
            .map(|address| (Source::Proved, address))
            .into_iter()
            .chain(signed.map(|address| (Source::Log, address)))
            .chain(found.into_iter().flatten());
        best_first(all.collect(), &local)
    }

    /// Explains a missing route in terms of the whole model.
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
        let usable = |a: &&Advert| {
            (self.choice.allow_self || a.author != own)
                && a.descriptor.weights_sha256 == weights
                && !exclude.contains(&a.author)
        };
        let usable = adverts.iter().filter(usable);
        let mut held: Vec<(u32, u32)> = usable.map(|a| a.descriptor.layer_range).collect();
        let (community, model) = (&self.log.state().name, &self.choice.model);
        let id = &model.model_id;
        let mut text = if held.is_empty() {
            format!("no host in {community:?} serves {id}")
        } else {
            // Layers that this machine computes itself need no host.
            let own = [(0, model.hosted.start), (model.hosted.end, model.layers)];
            let own = own.into_iter().filter(|(lo, end)| lo < end);
            held.extend(own.map(|(lo, end)| (lo, end - 1)));
            let missing = runs_text(&missing(model.layers, &held));
            format!("no host in {community:?} serves layers {missing} of {id}")
        };
        let own_serves = |a: &Advert| a.author == own && a.descriptor.weights_sha256 == weights;
        if !self.choice.allow_self && adverts.iter().any(own_serves) {
            text.push_str(
                "; layers that this node serves are not used \
                 (research.distributed_inference.allow_self_as_shard is false)",
            );
        }
        ChatError::ShardUnavailable(text)
    }
}

/// Orders a host's addresses: the proved one, then vouched-for ones by distance, then merely
/// announced ones.
fn best_first(mut all: Vec<(Source, SocketAddr)>, local: &Local) -> Vec<SocketAddr> {
    // The sort is stable: at equal distance, the host's own addresses come first.
    all.sort_by_key(|(source, address)| {
        let (heard, proved) = (*source == Source::Mdns, *source == Source::Proved);
        (heard, !proved, local.distance(address))
    });
    let mut seen = BTreeSet::new();
    all.retain(|(_, address)| seen.insert(*address));
    vouched_first(all, MAX_ADDRESSES)
}

/// Returns true if a host still serves the weights, the layers and the arithmetic that it was
/// selected for. It may have been restarted.
fn is_as_advertised(link: &HostLink, advert: &Advert, lo: u32, hi: u32) -> bool {
    let (now, then) = (&link.descriptor, &advert.descriptor);
    let (first, last) = now.layer_range;
    let is_same = now.weights_sha256 == then.weights_sha256 && now.arithmetic == then.arithmetic;
    first <= lo && hi <= last && is_same
}

#[cfg(test)]
#[path = "community_tests.rs"]
mod tests;
