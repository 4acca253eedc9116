//! Hosts known by address, for a long-running program.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_transport::Config;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::opening::{Opening, SignOfLife, any_of};
use super::source::{
    Choice, DISCOVERY_TIMEOUT, GRACE, HostSource, Patience, RoutedSpan, SEARCH_INTERVAL,
    SHORT_DISCOVERY_TIMEOUT, SIGN_OF_LIFE_TIMEOUT, Search,
};
use crate::error::ChatError;
use crate::exact::Exact;
use crate::hosts::health::FailureKind;
use crate::hosts::link::{HostAddr, HostLink};

/// Retry delay after a failed connection: initial and maximum.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Hosts known by address. Sessions are opened on demand, shared by all chats, and renewed before
/// their lifetime ends. Clones share them.
///
/// All hosts are connected, including unused ones, so that a spare is ready when a host fails. A
/// host that does not answer delays no chat that others can serve.
#[derive(Clone)]
pub struct HostPool {
    runtime: Handle,
    key: Arc<NodeKey>,
    transport: Config,
    hosts: Vec<Arc<Known>>,
    pub choice: Choice,
}

/// Host and its session.
struct Known {
    addr: HostAddr,
    session: Mutex<Session>,
}

/// State of the session with one host.
#[derive(Default)]
struct Session {
    /// Latest attempt and its result. There is one at a time; further chats wait for the same one.
    last: Option<Opening>,
    /// Latest open session. A host that was silent for a while may continue with it.
    link: Option<Arc<HostLink>>,
    /// Current retry delay, and the time at which it ends.
    backoff: Duration,
    retry_at: Option<Instant>,
}

/// Open sessions, and the errors of the other hosts, one per host.
type Reached = (Vec<Arc<HostLink>>, Vec<ChatError>);

impl HostPool {
    /// Creates a pool without connections. Sessions run on `runtime`.
    pub fn new(
        runtime: Handle,
        key: Arc<NodeKey>,
        transport: Config,
        hosts: impl IntoIterator<Item = HostAddr>,
        choice: Choice,
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
            choice,
        }
    }

    /// Opens missing sessions in parallel. Returns the errors of the hosts that cannot be reached,
    /// one per host. A host within its retry delay is not tried again.
    pub async fn reach(&self) -> Vec<ChatError> {
        self.reach_enough(|_| false, None).await.1
    }

    /// Errors of the hosts without a session, one per host. An attempt is waited for until it has
    /// taken [`GRACE`].
    pub async fn failures(&self) -> Vec<ChatError> {
        self.reach_enough(|_| true, None).await.1
    }

    /// Like [`Self::reach`], but returns once `enough` is true and the other hosts have had
    /// [`GRACE`], or after `limit`. Attempts continue in the background for the next call.
    async fn reach_enough(
        &self,
        enough: impl Fn(&[Arc<HostLink>]) -> bool,
        limit: Option<Duration>,
    ) -> Reached {
        let openings: Vec<Opening> = self.hosts.iter().map(|host| self.opening(host)).collect();
        let give_up = limit.map(|limit| Instant::now() + limit);
        loop {
            // Before the results are read: an attempt that ends in between also ends the wait.
            let pending = openings.iter().filter(|one| one.now().is_none());
            let pending: Vec<&Opening> = pending.collect();
            let reached = self.reached_by(&openings);
            let until = match enough(&reached.0) {
                // Attempts that have already taken longer are not waited for.
                true => pending.iter().map(|one| one.since() + GRACE).max(),
                false => give_up,
            };
            if pending.is_empty() || until.is_some_and(|at| at <= Instant::now()) {
                return reached;
            }
            any_of(pending, until).await;
        }
    }

    /// Results so far, in the order of the hosts, which makes routes deterministic.
    fn reached_by(&self, openings: &[Opening]) -> Reached {
        let (mut links, mut failures, mut silent) = (Vec::new(), Vec::new(), Vec::new());
        for (host, opening) in self.hosts.iter().zip(openings) {
            match opening.now() {
                Some(Ok(link)) => links.push(link),
                Some(Err(error)) => failures.push(error),
                None => {
                    let HostAddr { endpoint, node } = &host.addr;
                    let text = format!("{endpoint} ({}) has not answered yet", node.short());
                    silent.push(ChatError::ShardUnavailable(text));
                }
            }
        }
        failures.extend(silent);
        (links, failures)
    }

    /// Resets the retry delay of hosts that are not in `exclude`.
    fn forget_failures(&self, exclude: &BTreeSet<NodeId>) {
        let wanted = |host: &&Arc<Known>| !exclude.contains(&host.addr.node);
        for host in self.hosts.iter().filter(wanted) {
            host.session.lock().retry_at = None;
        }
    }

    /// Returns the pending attempt for a host, or starts one.
    fn opening(&self, host: &Arc<Known>) -> Opening {
        let mut session = host.session.lock();
        let outcome = session.last.as_ref().map(|last| (last, last.now()));
        let failed = match outcome {
            Some((last, None)) => return last.clone(),
            Some((_, Some(Err(error)))) if session.retry_at > Some(Instant::now()) => Some(error),
            _ => None,
        };
        // Chats that still use a stale session keep it open.
        session.link.take_if(|link| !link.is_fresh());
        let link = session.link.clone();
        let (host, key) = (Arc::clone(host), Arc::clone(&self.key));
        let (transport, health) = (self.transport.clone(), self.choice.health.clone());
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
            // A silent host may have restarted and lost the session.
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

impl HostSource for HostPool {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        // Limits of the wait for connections, and for a host that may be restarting.
        let (limit, patience) = match search.patience {
            Patience::None => (Some(GRACE), Duration::ZERO),
            Patience::Short => (Some(SIGN_OF_LIFE_TIMEOUT), SHORT_DISCOVERY_TIMEOUT),
            Patience::Long => (None, DISCOVERY_TIMEOUT),
        };
        // A host of a running answer may be restarting.
        let until = search.before.map(|_| Instant::now() + patience);
        let is_absent = |host: &Arc<Known>, links: &[Arc<HostLink>]| {
            let node = &host.addr.node;
            !search.exclude.contains(node) && links.iter().all(|link| link.addr.node != *node)
        };
        loop {
            let enough = |links: &[Arc<HostLink>]| self.choice.among(links, search).is_ok();
            let reach = search
                .cancel
                .run_until_cancelled(self.reach_enough(enough, limit));
            let reached = self.runtime.block_on(reach);
            let (links, failures) = reached.ok_or(ChatError::Cancelled)?;
            let error = match self.choice.among(&links, search) {
                // The error of an unreachable host explains more than the missing layers.
                Err(error @ ChatError::ShardUnavailable(_)) => {
                    failures.into_iter().next().unwrap_or(error)
                }
                spans => return spans,
            };
            let mut hosts = self.hosts.iter();
            let in_vain = !hosts.any(|host| is_absent(host, &links));
            if in_vain || until.is_none_or(|until| until <= Instant::now() + SEARCH_INTERVAL) {
                return Err(error);
            }
            let pause = async { tokio::time::sleep(SEARCH_INTERVAL).await };
            let paused = self
                .runtime
                .block_on(search.cancel.run_until_cancelled(pause));
            paused.ok_or(ChatError::Cancelled)?;
            self.forget_failures(search.exclude);
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

    fn prepare(&mut self, _: &[RoutedSpan]) {
        let pool = self.clone();
        self.runtime.spawn(async move { pool.reach().await });
    }
}
