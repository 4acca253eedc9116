//! Hosts known by address, for a program that runs for long.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_transport::Config;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::timeout_at;

use super::opening::{Opening, SignOfLife};
use super::source::{
    Choice, DARK_AFTER, GRACE, HostSource, LOOK_EVERY, PATIENCE, Patience, RoutedSpan,
    SHORT_PATIENCE, Search,
};
use crate::Cancel;
use crate::error::ChatError;
use crate::health::{FailureKind, SharedHealth};
use crate::link::{HostAddr, HostLink};

/// How long a host that could not be reached is left alone: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Hosts known by address. Sessions are opened when a chat needs them, shared by all chats, and
/// renewed before they reach the end of their lifetime.
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
}

/// What is known of the session with one host.
#[derive(Default)]
struct Session {
    /// The last attempt to reach it, and what it came to. One at a time: chats that come meanwhile
    /// wait for it, too.
    last: Option<Opening>,
    /// The session that stood last. A host that was silent for a while may go on with it.
    link: Option<Arc<HostLink>>,
    /// How long it is left alone since it could not be reached, and until when.
    backoff: Duration,
    retry_at: Option<Instant>,
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
    /// Nothing is connected yet. `runtime` is where sessions live; `health` is told what hosts do, as
    /// the [`Choice`] of every chat with them is.
    pub fn new(
        runtime: Handle,
        key: Arc<NodeKey>,
        transport: Config,
        hosts: impl IntoIterator<Item = HostAddr>,
        health: SharedHealth,
    ) -> Self {
        let known = |addr| {
            let session = Mutex::default();
            Arc::new(Known { addr, session })
        };
        Self {
            runtime,
            key,
            transport,
            hosts: hosts.into_iter().map(known).collect(),
            health,
        }
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
        let openings = self.hosts.iter().map(|host| self.opening(host));
        let mut missing: BTreeMap<usize, Opening> = openings.enumerate().collect();
        let mut attempts: FuturesUnordered<_> = missing
            .iter()
            .map(|(&at, opening)| opening.wait().map(move |outcome| (at, outcome)))
            .collect();
        let mut reached = Reached::default();
        let give_up = limit.map(|limit| Instant::now() + limit);
        while !missing.is_empty() {
            let until = match enough(&reached.links) {
                // Those that have been tried for long already are not waited for.
                true => missing
                    .values()
                    .map(|opening| opening.since() + GRACE)
                    .max(),
                false => give_up,
            };
            let until = until.into_iter().chain(give_up).min();
            let next = attempts.next();
            let next = match until {
                Some(until) => timeout_at(until.into(), next).await,
                None => Ok(next.await),
            };
            let Ok(Some((at, outcome))) = next else { break };
            missing.remove(&at);
            match outcome {
                Ok(link) => reached.links.push(link),
                Err(error) => reached.failures.push(error),
            }
        }
        let silent = missing.keys().filter_map(|at| self.hosts.get(*at));
        reached.failures.extend(silent.map(|host| {
            let HostAddr { endpoint, node } = &host.addr;
            let text = format!("{endpoint} ({}) has not answered yet", node.short());
            ChatError::ShardUnavailable(text)
        }));
        // In the order of the hosts, not of their answers: routes do not depend on chance.
        let place =
            |link: &Arc<HostLink>| self.hosts.iter().position(|host| host.addr == link.addr);
        reached.links.sort_by_key(place);
        reached
    }

    /// Lets hosts that could not be reached a moment ago be asked again, those in `exclude` not.
    fn forget_failures(&self, exclude: &BTreeSet<NodeId>) {
        let wanted = |host: &&Arc<Known>| !exclude.contains(&host.addr.node);
        for host in self.hosts.iter().filter(wanted) {
            host.session.lock().retry_at = None;
        }
    }

    /// The attempt to reach a host that is under way, or a new one.
    fn opening(&self, host: &Arc<Known>) -> Opening {
        let mut session = host.session.lock();
        let outcome = session.last.as_ref().map(|last| (last, last.now()));
        let failed = match outcome {
            Some((last, None)) => return last.clone(),
            Some((_, Some(Err(error)))) if session.retry_at > Some(Instant::now()) => Some(error),
            _ => None,
        };
        // Chats that still use one that is not fresh keep it open.
        session.link.take_if(|link| !link.is_fresh());
        let link = session.link.clone();
        let (host, key) = (Arc::clone(host), Arc::clone(&self.key));
        let (transport, health) = (self.transport.clone(), self.health.clone());
        let heard = SignOfLife::default();
        let opening = Opening::begin(&self.runtime, heard, async move {
            if let Some(link) = link
                && link.answers(GRACE).await
            {
                return Ok(link);
            }
            if let Some(error) = failed {
                return Err(error);
            }
            // A host that is silent may have been started again, and know nothing of the session.
            let connected = HostLink::connect(&host.addr, &key, transport)
                .await
                .map(Arc::new);
            let mut session = host.session.lock();
            match &connected {
                Ok(link) => {
                    session.link = Some(Arc::clone(link));
                    health.look(|all, now| all.reached(&host.addr.node, now));
                    session.backoff = Duration::ZERO;
                }
                Err(_) => {
                    health.failed(&host.addr.node, FailureKind::Unreachable);
                    session.backoff = (session.backoff * 2).clamp(BACKOFF.0, BACKOFF.1);
                    session.retry_at = Some(Instant::now() + session.backoff);
                }
            }
            connected
        });
        session.last = Some(opening.clone());
        opening
    }
}

/// A pool's hosts as the source of one chat's spans.
#[derive(Clone)]
pub struct PooledHosts {
    /// The hosts.
    pub pool: Arc<HostPool>,
    /// How to choose among them.
    pub choice: Choice,
}

impl PooledHosts {
    /// Connects to the hosts, until they have all layers and the others have had their chance.
    /// One error per host that is not there by then.
    pub async fn reach(&self, patience: Patience) -> Vec<ChatError> {
        let (cancel, exclude) = (Cancel::default(), BTreeSet::new());
        let hosted = &self.choice.model.hosted;
        let search = Search {
            layers: hosted.start..=hosted.end.saturating_sub(1),
            exclude: &exclude,
            before: None,
            patience,
            cancel: &cancel,
        };
        let enough = |links: &[Arc<HostLink>]| self.choice.among(links, &search).is_ok();
        let limit = connecting(patience);
        self.pool.reach_enough(enough, limit).await.failures
    }
}

/// How long hosts have to be connected; `None`: as long as that takes.
fn connecting(patience: Patience) -> Option<Duration> {
    match patience {
        Patience::None => Some(GRACE),
        Patience::Short => Some(DARK_AFTER),
        Patience::Long => None,
    }
}

impl HostSource for PooledHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        // Those that are not connected by then may be by the next time that somebody looks.
        let limit = connecting(search.patience);
        let patience = match search.patience {
            Patience::None => Duration::ZERO,
            Patience::Short => SHORT_PATIENCE,
            Patience::Long => PATIENCE,
        };
        // A host of an answer that has begun may be on its way back.
        let until = search.before.map(|_| Instant::now() + patience);
        let is_absent = |host: &Arc<Known>, links: &[Arc<HostLink>]| {
            let node = &host.addr.node;
            !search.exclude.contains(node) && links.iter().all(|link| link.addr.node != *node)
        };
        loop {
            let enough = |links: &[Arc<HostLink>]| self.choice.among(links, search).is_ok();
            let reach = search.cancel.or(self.pool.reach_enough(enough, limit));
            let reached = self.pool.runtime.block_on(reach);
            let reached = reached.ok_or(ChatError::Cancelled)?;
            let error = match self.choice.among(&reached.links, search) {
                // A host that could not be reached explains a hole better than the hole does.
                Err(error @ ChatError::ShardUnavailable(_)) => {
                    reached.failures.into_iter().next().unwrap_or(error)
                }
                spans => return spans,
            };
            let mut hosts = self.pool.hosts.iter();
            let in_vain = !hosts.any(|host| is_absent(host, &reached.links));
            if in_vain || until.is_none_or(|until| until <= Instant::now() + LOOK_EVERY) {
                return Err(error);
            }
            let pause = async { tokio::time::sleep(LOOK_EVERY).await };
            let paused = self.pool.runtime.block_on(search.cancel.or(pause));
            paused.ok_or(ChatError::Cancelled)?;
            self.pool.forget_failures(search.exclude);
        }
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn prepare(&mut self, _: &[RoutedSpan]) {
        let pool = Arc::clone(&self.pool);
        self.pool.runtime.spawn(async move { pool.reach().await });
    }
}
