//! Hosts found in a community's log.
//!
//! Which hosts there are, the advertisements say; where one is, its advertisement, what it
//! says of itself and what discovery heard say; who it is, the TLS handshake proves; that
//! it lets this node in, its own grant says, which is asked for anew for each session.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::select_all;
use hearthnet_bus::discovery::{Claims, Distance, Local, Source, vouched_first};
use hearthnet_bus::log::{Advert, EventLog};
use hearthnet_bus::node::{Connections, WeakNode};
use hearthnet_bus::{NodeId, NodeKey, now_ms};
use hearthnet_transport::Config;
use parking_lot::Mutex;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::time::{timeout, timeout_at};

use super::attempt::{Attempt, Knocks};
use super::opening::{Opening, Outcome, SignOfLife};
use super::source::{
    Choice, DARK_AFTER, GRACE, HostSource, LOOK_EVERY, PATIENCE, Patience, RoutedSpan,
    SHORT_PATIENCE, Search,
};
use crate::Cancel;
use crate::error::ChatError;
use crate::exact::{Exact, is_exact};
use crate::health::{FailureKind, SharedHealth};
use crate::link::HostLink;
use crate::placement::{missing, runs_text};
use crate::router::{Candidate, RouteError, Span};

/// Most addresses that are tried of one host, of those that are vouched for; and as many that were only
/// heard.
const MAX_ADDRESSES: usize = 6;

/// A host that cannot be used and is known not to be within this time may be asked again.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Addresses of a node that discovery has found, beside those that it says of itself, each with its source.
pub type KnownAddresses = Arc<dyn Fn(&NodeId) -> Vec<(Source, SocketAddr)> + Send + Sync>;

/// Whether this node knows what its neighbours know, or has had the time to.
pub type InSync = Arc<dyn Fn() -> bool + Send + Sync>;

/// Why this node may ask nobody any more, once it may not.
pub type Expelled = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// Sessions with the hosts of a community, opened as routes need them.
pub struct CommunityHosts {
    runtime: Handle,
    key: Arc<NodeKey>,
    /// Its community's log, which something keeps even with the others.
    log: EventLog,
    transport: Config,
    choice: Choice,
    links: Links,
    /// What discovery knows.
    pub known_addresses: KnownAddresses,
    /// Whether this node has lost its place in the community: then nothing is waited for.
    pub expelled: Expelled,
    /// This node, if it runs in this process: its own layers need no wire.
    pub here: Option<WeakNode>,
    /// Where this machine can answer as well: whether the log is even with the neighbours', so that
    /// waiting for advertisements keeps the first word back for nothing.
    pub in_sync: Option<InSync>,
    /// A route was found: somebody waits in the middle of an answer.
    routed: bool,
}

/// Sessions that chats share. Clones are the same ones.
#[derive(Clone)]
pub struct Links {
    all: Arc<Mutex<Vec<Arc<HostLink>>>>,
    /// Those that are being opened.
    opening: Arc<Mutex<BTreeMap<Key, Opening>>>,
    /// Ends those whose hosts may not see this node's rows any more.
    connections: Connections,
    /// What was seen of hosts.
    health: SharedHealth,
    /// Hosts that were not where they say.
    knocks: Arc<Mutex<Knocks>>,
}

/// Who refused a session, if it was a host, and why there is none.
type Unopened = (Option<NodeId>, ChatError);

/// A host's key, and what it serves.
type Key = (NodeId, String);

/// The sessions that one search waits for.
#[derive(Default)]
struct Awaited(BTreeMap<Key, Opening>);

impl Awaited {
    /// The hosts that have kept this waiting for [`GRACE`].
    fn late(&self, now: Instant) -> BTreeSet<NodeId> {
        let late = |one: &Opening| one.since() + GRACE <= now && one.now().is_none();
        let all = self.0.iter().filter(|(_, one)| late(one));
        all.map(|((node, _), _)| *node).collect()
    }

    /// When those that are on their way have all had [`DARK_AFTER`]; `None` where there are none, or
    /// one has given a sign of life.
    fn dark_at(&self) -> Option<Instant> {
        let under_way = self.0.values().filter(|one| one.now().is_none());
        let dark_at = |one: &Opening| (!one.is_heard()).then(|| one.since() + DARK_AFTER);
        under_way
            .map(dark_at)
            .reduce(|a, b| a.zip(b).map(|(a, b)| a.max(b)))?
    }

    /// Resolves when one of them has come to something, and at `until` at the latest.
    async fn any(&self, until: Option<Instant>) {
        let under_way = self.0.values().filter(|one| one.now().is_none());
        let waits: Vec<_> = under_way.map(Opening::wait).collect();
        if waits.is_empty() {
            return;
        }
        let any = select_all(waits);
        match until {
            Some(until) => drop(timeout_at(until.into(), any).await),
            None => drop(any.await),
        }
    }
}

impl Links {
    /// None yet. `connections` watches them, and `health` is told what their hosts do.
    pub fn new(connections: Connections, health: SharedHealth) -> Self {
        Self {
            all: Arc::default(),
            opening: Arc::default(),
            connections,
            health,
            knocks: Arc::default(),
        }
    }
}

impl HostSource for CommunityHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let deadline = Instant::now()
            + match search.patience {
                Patience::None => Duration::ZERO,
                // In the middle of an answer; before one, others may still be found.
                Patience::Short if self.routed => SHORT_PATIENCE,
                Patience::Short | Patience::Long => PATIENCE,
            };
        let mut changes = self.log.changes();
        // Hosts that could not be used in this search, and why the last of them could not.
        // Those that said so at once are asked again: a host that has just been started
        // listens before it serves.
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
                // It would refuse; its advertisement may be gone a moment later only.
                if link.is_leaving() {
                    passed_over.insert(link.addr.node);
                }
                link.is_open()
            });
            let adverts = self.adverts();
            if let Err(error) = self.choose(&adverts, search, &passed_over) {
                let left = deadline.saturating_duration_since(Instant::now());
                if let Some(end) = self.end_of_waiting(left) {
                    let explained = || self.explain(error, &adverts, search.exclude);
                    return Err(end.or(failure).unwrap_or_else(explained));
                }
                // Advertisements also expire without a change of the log.
                let wait = left.min(LOOK_EVERY);
                let changed = async { timeout(wait, changes.changed()).await };
                let _ = self.runtime.block_on(search.cancel.or(changed));
                resting.clear();
                continue;
            }
            let asked = Instant::now();
            match self.open(&adverts, &passed_over, &mut awaited, search) {
                Ok(route) => {
                    self.routed = true;
                    return Ok(route);
                }
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

    fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Keeps a session with one spare per span: shared by all chats, asked for a sign of life
    /// whenever somebody comes by here, and there when a host fails.
    fn prepare(&mut self, route: &[RoutedSpan]) {
        let (adverts, cancel) = (self.adverts(), Cancel::default());
        for span in route {
            let host = BTreeSet::from([span.link.addr.node]);
            let spare = Search {
                layers: span.lo..=span.hi,
                exclude: &host,
                before: Some(&span.link.descriptor.arithmetic),
                patience: Patience::None,
                cancel: &cancel,
            };
            // Nobody else has these layers: then there is nothing to prepare.
            let spares = self.choose(&adverts, &spare, &host);
            for spare in spares.unwrap_or_default() {
                if let Some(advert) = adverts.get(spare.candidate) {
                    // Whatever it comes to, it is there for the search that needs it.
                    let _ = self.session(advert, &mut Awaited::default());
                }
            }
        }
    }
}

impl CommunityHosts {
    /// Whether waiting for advertisements that close a gap ends here, with so much time left; and with
    /// what, if it is not the gap itself.
    fn end_of_waiting(&self, left: Duration) -> Option<Option<ChatError>> {
        // Nobody lets this node in any more: there is nothing to wait for.
        if let Some(why) = (self.expelled)() {
            return Some(Some(ChatError::ShardUnavailable(why)));
        }
        let in_vain = !self.routed && self.in_sync.as_ref().is_some_and(|is| is());
        let over = left.is_zero() || in_vain;
        // Before the first route the log may still be behind.
        if (over || self.routed) && !self.log.state().policy.research {
            return Some(Some(ChatError::ExperimentalDisabled));
        }
        over.then_some(None)
    }

    /// What is advertised now, by trusted members only, whatever others said before they were none.
    fn adverts(&self) -> Vec<Advert> {
        let state = self.log.state();
        let live = state.shards(now_ms()).filter(|_| state.policy.research);
        live.cloned().collect()
    }

    /// The hosts of the community of `log`, for a node with this key; `choice` says how to choose
    /// among them. Nothing is known of where they are but what they say.
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
            known_addresses: Arc::new(|_| Vec::new()),
            expelled: Arc::new(|| None),
            here: None,
            in_sync: None,
            routed: false,
        }
    }

    /// Hosts for what is looked for, none of them in `exclude`.
    fn choose(
        &self,
        adverts: &[Advert],
        search: &Search<'_>,
        exclude: &BTreeSet<NodeId>,
    ) -> Result<Vec<Span>, RouteError> {
        let own = self.key.id();
        let local = Local::read(&[]);
        let candidates = adverts
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
        let layers = search.layers.clone();
        self.choice.pick(candidates, layers, exclude, search.before)
    }

    /// Sessions for a route: those that stand, and new ones, all at once. A host that keeps others
    /// waiting gets [`GRACE`]; then those that could do without it are connected as well, and
    /// whichever route is complete first is taken. An error names the host that refused.
    fn open(
        &self,
        adverts: &[Advert],
        passed_over: &BTreeSet<NodeId>,
        awaited: &mut Awaited,
        search: &Search<'_>,
    ) -> Result<Vec<RoutedSpan>, Unopened> {
        let began = Instant::now();
        loop {
            let now = Instant::now();
            let late = &awaited.late(now) | passed_over;
            let (mut until, mut wanted) = (None, None);
            // What is wanted, and what there is without those that are late.
            for exclude in [passed_over, &late] {
                let Ok(spans) = self.choose(adverts, search, exclude) else {
                    continue;
                };
                // Exact hosts that are late are waited for like those that nobody can replace.
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
                Patience::None => (Some(began + GRACE), "nobody else is there at once"),
                Patience::Short => (awaited.dark_at(), "the hosts that are needed do not answer"),
                Patience::Long => (None, ""),
            };
            if give_up.is_some_and(|at| at <= now) {
                return Err((None, ChatError::ShardUnavailable(why.into())));
            }
            let until = until.into_iter().chain(give_up).min();
            let answered = search.cancel.or(awaited.any(until));
            if self.runtime.block_on(answered).is_none() {
                return Err((None, ChatError::Cancelled));
            }
        }
    }

    /// Sessions for spans: those that stand, and since when others have been on their way.
    fn sessions(
        &self,
        adverts: &[Advert],
        spans: &[Span],
        awaited: &mut Awaited,
    ) -> Result<(Vec<RoutedSpan>, Vec<Instant>), Unopened> {
        let (mut route, mut missing) = (Vec::new(), Vec::new());
        for Span { candidate, lo, hi } in spans.iter().copied() {
            let Some(advert) = adverts.get(candidate) else {
                continue;
            };
            let why = match self.session(advert, awaited) {
                Ok(Ok(link)) if is_as_advertised(&link, advert, lo, hi) => {
                    route.push(RoutedSpan { link, lo, hi });
                    continue;
                }
                Err(since) => {
                    missing.push(since);
                    continue;
                }
                // A host that has moved to other layers since it advertised is of no use.
                Ok(Ok(_)) => "it serves other layers now, or in another way".to_owned(),
                Ok(Err(error)) => error.to_string(),
            };
            let host = self.log.state().label(&advert.author, now_ms());
            let text = format!("{host} serves layers {lo}-{hi} but cannot be used: {why}");
            return Err((Some(advert.author), ChatError::ShardUnavailable(text)));
        }
        Ok((route, missing))
    }

    /// The session with a host, if it stands or has failed; else it has been on its way since then,
    /// in a task that goes on when this search has ended.
    fn session(&self, advert: &Advert, awaited: &mut Awaited) -> Result<Outcome, Instant> {
        let (node, shard) = (advert.author, advert.descriptor.shard_id.clone());
        let key = (node, shard.clone());
        if let Some(opening) = awaited.0.get(&key) {
            let outcome = opening.now().ok_or(opening.since())?;
            if outcome.as_ref().is_ok_and(|link| link.is_fresh()) {
                return Ok(outcome);
            }
            // Asked again, it may say something else.
            awaited.0.remove(&key);
            if outcome.is_err() {
                return Ok(outcome);
            }
        }
        let is_it = |link: &&Arc<HostLink>| {
            link.is_fresh() && link.addr.node == node && link.descriptor.shard_id == shard
        };
        // The newest: of a host that was started again an older one may still stand.
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
                knocks: Arc::clone(&self.links.knocks),
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

    /// Where a host may be, best first.
    fn addresses(&self, advert: &Advert) -> Vec<SocketAddr> {
        let state = self.log.state();
        let told = state.endpoints_of(&advert.author, now_ms());
        let local = Local::read(&[]);
        let claims = Claims::new(&state, &[], local.clone(), now_ms());
        let proved = self.links.knocks.lock().proved(&advert.author);
        let signed = std::iter::once(&advert.descriptor.endpoint)
            .chain(told)
            .filter_map(|text| match advert.author == self.key.id() {
                true => text.parse().ok(),
                false => claims.admit(text),
            });
        let all = proved
            .map(|address| (Source::Proved, address))
            .into_iter()
            .chain(signed.map(|address| (Source::Log, address)))
            .chain((self.known_addresses)(&advert.author));
        best_first(all.collect(), &local)
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
            format!("nobody in {community:?} serves {id}")
        } else {
            // What this machine computes itself, nobody need serve.
            let own = [(0, model.hosted.start), (model.hosted.end, model.layers)];
            let own = own.into_iter().filter(|(lo, end)| lo < end);
            held.extend(own.map(|(lo, end)| (lo, end - 1)));
            let missing = runs_text(&missing(model.layers, &held));
            format!("nobody in {community:?} serves layers {missing} of {id}")
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

/// The addresses to try of one host: where it has proved to be, then the nearest that are vouched for, then
/// those that anybody may have announced.
fn best_first(mut all: Vec<(Source, SocketAddr)>, local: &Local) -> Vec<SocketAddr> {
    // Stable: of the same distance, what the host itself says comes first.
    all.sort_by_key(|(source, address)| {
        let (heard, proved) = (*source == Source::Mdns, *source == Source::Proved);
        (heard, !proved, local.distance(address))
    });
    let mut seen = BTreeSet::new();
    all.retain(|(_, address)| seen.insert(*address));
    vouched_first(all, MAX_ADDRESSES)
}

/// Whether a host still has the layers that it was chosen for, and computes as it was chosen for: it may
/// have been started again since.
fn is_as_advertised(link: &HostLink, advert: &Advert, lo: u32, hi: u32) -> bool {
    let (now, then) = (&link.descriptor, &advert.descriptor);
    let (first, last) = now.layer_range;
    first <= lo && hi <= last && now.arithmetic == then.arithmetic
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::discovery::LocalAddress;

    use super::*;

    #[test]
    fn no_number_of_announcements_takes_the_place_of_an_address_that_is_vouched_for() {
        let local = Local::new(vec![LocalAddress {
            interface: "eth0".into(),
            index: 2,
            ip: "10.0.0.250".parse().unwrap(),
            prefix: 24,
        }]);
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let (proved, signed, moved) = (at("10.9.0.1:7"), at("10.9.0.2:7"), at("10.9.0.3:7"));
        // The announcements are of this network, what is vouched for is not.
        let heard = (1..41).map(|n| (Source::Mdns, at(&format!("10.0.0.{n}:7"))));
        let mut all: Vec<_> = heard.collect();
        all.extend([(Source::Mdns, moved), (Source::Mdns, signed)]);
        all.extend([(Source::Log, signed), (Source::Proved, proved)]);
        let tried = best_first(all, &local);
        assert_eq!(tried[..2], [proved, signed]);
        assert_eq!(tried.len(), 2 + MAX_ADDRESSES, "{tried:?}");
    }

    #[test]
    fn a_host_that_has_given_a_sign_of_life_is_not_dark() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let begin = |heard: &SignOfLife| {
            let attempt = std::future::pending();
            Opening::begin(runtime.handle(), heard.clone(), attempt)
        };
        let key = |n| (hearthnet_bus::testing::id(n), "all".to_owned());
        let mut awaited = Awaited::default();
        assert_eq!(awaited.dark_at(), None, "nobody is waited for");
        let (first, second) = (SignOfLife::default(), SignOfLife::default());
        awaited.0.insert(key(1), begin(&first));
        awaited.0.insert(key(2), begin(&second));
        let last = awaited.0[&key(2)].since() + DARK_AFTER;
        assert_eq!(awaited.dark_at(), Some(last), "each has its time");
        first.note();
        assert_eq!(awaited.dark_at(), None, "it is slow");
    }
}
