//! Start, state and shutdown of a host.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearthnet_bus::calls::CallServer;
use hearthnet_bus::flight::Name;
use hearthnet_bus::node::{Node, TensorSessions, bus_rule};
use hearthnet_bus::{Descriptor, NodeId, NodeKey};
use hearthnet_files::spec::RowShape;
use hearthnet_platform::process::resident_bytes_of_all;
use hearthnet_transport::{Acceptor, Arrival, Config, Connection, Listener};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};

use crate::admission::SessionAuthorizer;
use crate::clock::{Clock, SystemClock};
use crate::compute::{Compute, Loading, Running};
use crate::config::ServeConfig;
use crate::engine::{EngineSource, Footprint, LoadFault, Served, StartProgress};
use crate::events::{HostEvents, Stats};
use crate::fault::StartError;
use crate::memory::MemoryReport;
use crate::notary::{Notary, Sign};
use crate::plan::Pool;
use crate::sched::{Command, Scheduler};
use crate::session::{self, Phase, ShutdownWatch};
use crate::simulated::{self, Handshakes, Simulated};
use crate::stream_handle::Slots;
use crate::stream_table::{HostState, Parties};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Streams still open when the sessions were closed; 0 if all callers moved in time.
    pub streams_cut: u32,
}

/// A running host. Dropping it ends it at once; [`RunningHost::shutdown`] drains it first.
pub struct RunningHost {
    addr: SocketAddr,
    footprint: Footprint,
    host_state: Arc<HostState>,
    compute: Compute,
    phase: watch::Sender<Phase>,
    accepting: JoinHandle<()>,
}

#[derive(Debug, Clone, Copy)]
pub struct ShardHost;

/// Source of a host's sessions.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_enums)] // These are all the sources there are.
pub enum Place<'a> {
    /// A listener of its own, under this key.
    Alone(&'a NodeKey),
    /// The listener of a community's node: it admits members that have a grant issued by the node.
    /// `listen`, `admitted` and `transport` of the configuration are ignored, since the node sets
    /// them.
    In(&'a Node),
    /// The network of a simulation: nothing listens, and no thread is started. `listen` is the
    /// address in the descriptor.
    Simulated(&'a Arc<Simulated>),
}

impl<'a> From<&'a NodeKey> for Place<'a> {
    fn from(key: &'a NodeKey) -> Self {
        Self::Alone(key)
    }
}

impl<'a> From<&'a Node> for Place<'a> {
    fn from(node: &'a Node) -> Self {
        Self::In(node)
    }
}

impl<'a> From<&'a Arc<Simulated>> for Place<'a> {
    fn from(at: &'a Arc<Simulated>) -> Self {
        Self::Simulated(at)
    }
}

impl ShardHost {
    /// Starts a host on any engine, for a model that is already known. `progress` is called while
    /// the weights are verified and loaded.
    ///
    /// # Errors
    /// See [`StartError`]; [`StartError::Setting`] also if the node of a community does not listen.
    pub async fn start_on<S: EngineSource>(
        config: ServeConfig,
        place: impl Into<Place<'_>>,
        served: Served,
        source: S,
        progress: &mut (dyn FnMut(StartProgress) + Send),
    ) -> Result<RunningHost, StartError> {
        let clock = Arc::new(SystemClock::start());
        start(config, place.into(), served, source, clock, progress).await
    }
}

/// [`ShardHost::start_on`] with the given clock.
pub(crate) async fn start<S: EngineSource>(
    mut config: ServeConfig,
    place: Place<'_>,
    served: Served,
    source: S,
    clock: Arc<dyn Clock>,
    progress: &mut (dyn FnMut(StartProgress) + Send),
) -> Result<RunningHost, StartError> {
    config.validate()?;
    let (forks, truncates) = (Descriptor::FORKS, Descriptor::ANSWERS_TRUNCATION);
    // With per-layer inputs, the rows of a step have another width than those of its answer.
    let width = match served.rows {
        RowShape {
            width,
            per_layer: 0,
        } => format!(" width/{width}"),
        RowShape { .. } => String::new(),
    };
    let products = format!("{width} {forks} {truncates}");
    config.software.push_str(&products);
    let events = Arc::new(HostEvents::default());
    let (node, admitted, transport) = match place {
        Place::Alone(key) => (key.id(), config.admitted.as_slice(), &config.transport),
        Place::In(node) => (node.id(), &[][..], node.transport()),
        Place::Simulated(at) => (at.key.id(), config.admitted.as_slice(), &config.transport),
    };
    let skew = config.clock_skew_secs;
    let parties = parties(place);
    let authorizer = SessionAuthorizer::new(node, admitted, skew, parties.clone(), events.clone());
    let authorizer = Arc::new(authorizer);
    let max_unread = u64::from(transport.send_buffer_bytes);
    // Listen first: a port in use must not cost the time of a load. Peers that connect meanwhile
    // wait to be accepted.
    let (addr, outward, waiting) = match place {
        Place::Alone(key) => {
            let (identity, admission) = (key.identity()?, Arc::clone(&authorizer) as _);
            let transport = announced(&config);
            let rules = [bus_rule()];
            let own = Listener::bind(&config.listen, &identity, admission, transport, &rules);
            let own = own.await?;
            (own.local_addr(), None, Waiting::Own(own))
        }
        Place::In(node) => {
            let addr = node.listen_addr().ok_or(StartError::Setting {
                setting: "node.listen",
                rule: "must be set to serve shards",
            })?;
            let outward = node.own_endpoints().into_iter().next();
            (addr, outward, Waiting::At(node))
        }
        Place::Simulated(at) => {
            let (identity, admission) = (at.key.identity()?, Arc::clone(&authorizer) as _);
            let acceptor = Acceptor::new(&identity, admission, announced(&config), &[])?;
            let none = SocketAddr::from(([0, 0, 0, 0], 0));
            let endpoint = Some(config.listen.clone());
            (
                none,
                endpoint,
                Waiting::Simulated(Handshakes::new(acceptor, at)),
            )
        }
    };

    let notary = match place {
        Place::Simulated(_) => Notary::here(node, signer(place)),
        _ => Notary::start(node, signer(place), config.niceness).map_err(StartError::Thread)?,
    };
    let scheduler = {
        let (served, config) = (served.clone(), config.clone());
        let (events, clock) = (events.clone(), clock.clone());
        move || Scheduler::new(source, served, config, events, clock, notary)
    };
    let (compute, mut reports) = match place {
        Place::Simulated(at) => simulated::compute(scheduler(), Arc::clone(at)),
        _ => Compute::start(scheduler, config.niceness).map_err(StartError::Thread)?,
    };
    let (weight_bytes, footprint) = loop {
        let fault = match reports.recv().await {
            Some(Loading::Progress(step)) => {
                progress(step);
                continue;
            }
            Some(Loading::Done {
                weight_bytes,
                footprint,
            }) => break (weight_bytes, footprint),
            Some(Loading::Failed(fault)) => fault,
            None => "the engine failed".to_owned().into(),
        };
        return Err(match fault {
            LoadFault {
                reason,
                too_little: Some(resource),
            } => StartError::TooLittle { resource, reason },
            LoadFault { reason, .. } => StartError::Load { reason },
        });
    };

    check_kv_budget(&config, &footprint)?;
    let endpoint = config.endpoint.clone().or(outward);
    let host_state = Arc::new(HostState {
        node,
        endpoint: endpoint.unwrap_or_else(|| addr.to_string()),
        served,
        slots: Slots::new(node, &config, events.clone()),
        kv_budget: config.kv_budget_bytes.into(),
        config,
        weight_bytes,
        inbox: compute.inbox.clone(),
        events,
        clock,
        parties,
    });
    // The names in it are the operator's: report an invalid one now, not to each caller.
    let descriptor = host_state.descriptor();
    descriptor
        .validate()
        .and_then(|()| descriptor.to_cbor())
        .map_err(StartError::Descriptor)?;
    let (phase, watch) = watch::channel(Phase::Serving);
    let end = ShutdownWatch {
        phase: watch,
        compute: compute.running.clone(),
    };
    let arrivals = match waiting {
        Waiting::Own(listener) => Arrivals::Own {
            listener,
            answers: Arc::new(authorizer.answers()),
            calls: JoinSet::new(),
        },
        Waiting::At(node) => {
            Arrivals::Node(node.serve_tensors(host_state.served.weights, authorizer))
        }
        Waiting::Simulated(handshakes) => Arrivals::Simulated(handshakes),
    };
    let accepting = tokio::spawn(accept(arrivals, host_state.clone(), end, max_unread));
    let (shard, kv_budget) = (&descriptor.shard_id, host_state.kv_budget());
    host_state.events.serving(addr, shard, kv_budget);
    Ok(RunningHost {
        addr,
        footprint,
        host_state,
        compute,
        phase,
        accepting,
    })
}

/// Limits in HELLO: what this host enforces.
fn announced(config: &ServeConfig) -> Config {
    Config {
        stream_steps: config.max_waiting_steps,
        caller_steps: config.max_waiting_steps_per_caller,
        ..config.transport.clone()
    }
}

/// Signs receipts with the key of the host's node.
fn signer(place: Place<'_>) -> Sign {
    let own = |key: &NodeKey| -> Sign {
        let key = NodeKey::from_secret(&key.secret());
        Box::new(move |statement| Some(statement.sign(&key)))
    };
    match place {
        Place::Alone(key) => own(key),
        Place::Simulated(at) => own(&at.key),
        Place::In(node) => {
            // The host does not keep its node alive.
            let node = node.downgrade();
            Box::new(move |statement| Some(node.upgrade()?.sign_receipt(statement)))
        }
    }
}

/// Quota group of a caller: on a standalone host itself, otherwise as the node says.
fn parties(place: Place<'_>) -> Parties {
    match place {
        Place::Alone(_) | Place::Simulated(_) => Arc::new(|caller| *caller),
        Place::In(node) => {
            // The host does not keep its node alive.
            let node = node.downgrade();
            Arc::new(move |caller| {
                let node = node.upgrade();
                node.map_or(*caller, |node| node.quota_key(caller))
            })
        }
    }
}

/// Least KV budget with which a caller can hold a stream.
fn least_kv(config: &ServeConfig, footprint: &Footprint) -> u64 {
    let percent = config.kv_share_per_caller;
    let least = Pool::new(u64::MAX, footprint, percent).least();
    let pages = (100 * u64::from(least)).div_ceil(percent.clamp(1, 100).into());
    footprint.unit().saturating_mul(pages)
}

/// Checks that the share of one caller holds at least a stream of one page, for layers of a
/// footprint.
///
/// # Errors
/// [`StartError::KvBudget`] if it does not: the host would refuse every stream.
pub fn check_kv_budget(config: &ServeConfig, footprint: &Footprint) -> Result<(), StartError> {
    let (budget, percent) = (config.kv_budget_bytes, config.kv_share_per_caller);
    let pool = Pool::new(budget, footprint, percent);
    if pool.quota >= pool.least() {
        return Ok(());
    }
    Err(StartError::KvBudget {
        budget,
        needed: least_kv(config, footprint),
        page: footprint.page,
    })
}

/// Source of sessions until the weights are loaded.
enum Waiting<'a> {
    Own(Listener),
    At(&'a Node),
    Simulated(Handshakes),
}

/// Source of sessions while the host serves.
enum Arrivals {
    Own {
        listener: Listener,
        /// Server for bus calls on this listener.
        answers: Arc<CallServer>,
        /// Tasks of the call sockets; aborted when this is dropped.
        calls: JoinSet<()>,
    },
    Node(TensorSessions),
    Simulated(Handshakes),
}

impl Arrivals {
    async fn next(&mut self) -> Connection {
        match self {
            Self::Own {
                listener,
                answers,
                calls,
            } => loop {
                match listener.accept().await {
                    Arrival::Session(connection) => return connection,
                    Arrival::Peer(socket) => {
                        while calls.try_join_next().is_some() {}
                        let answers = Arc::clone(answers);
                        calls.spawn(async move { answers.serve(socket).await });
                    }
                    _ => {}
                }
            },
            Self::Node(sessions) => match sessions.next().await {
                Some(connection) => connection,
                // The node has ended, or another host of the model serves: no more sessions come.
                None => std::future::pending().await,
            },
            Self::Simulated(handshakes) => handshakes.next().await,
        }
    }
}

async fn accept(
    mut arrivals: Arrivals,
    host_state: Arc<HostState>,
    mut end: ShutdownWatch,
    max_unread: u64,
) {
    // Dropping this set, with the task, aborts the sessions.
    let mut sessions = JoinSet::new();
    let mut phase = end.phase.clone();
    loop {
        tokio::select! {
            biased;
            _ = phase.wait_for(|phase| *phase != Phase::Serving) => break,
            Some(_) = sessions.join_next() => {}
            connection = arrivals.next() => {
                let session = session::serve(connection, host_state.clone(), end.clone(), max_unread);
                sessions.spawn(session);
            }
        }
    }
    drop(arrivals);
    let _ = end.phase.wait_for(|phase| *phase == Phase::Closing).await;
    while sessions.join_next().await.is_some() {}
}

impl RunningHost {
    #[cfg(test)]
    pub(crate) fn inbox(&self) -> &crate::inbox::Inbox {
        &self.compute.inbox
    }

    pub fn node_id(&self) -> NodeId {
        self.host_state.node
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Descriptor with current load and endpoint. Callers get the same in answer to DESCRIBE.
    pub fn descriptor(&self) -> Descriptor {
        self.host_state.descriptor()
    }

    pub fn stats(&self) -> Stats {
        self.host_state.events.stats()
    }

    /// Reads [`Stats::given_layer_rows`], also after the host has ended.
    pub fn given_layer_rows(&self) -> impl Fn() -> u64 + Send + 'static {
        let events = Arc::clone(&self.host_state.events);
        move || events.given_layer_rows()
    }

    /// Sets the KV budget of all streams together, in bytes: at most that of the configuration, and at
    /// least a page for a caller. Streams that hold more keep their pages. Until they end, a stream
    /// grows only by pages that another one gives up.
    pub fn set_kv_budget(&self, bytes: u64) {
        let state = &self.host_state;
        let least = least_kv(&state.config, &self.footprint);
        let bytes = bytes.max(least).min(state.config.kv_budget_bytes);
        if state.kv_budget.swap(bytes, Ordering::Relaxed) != bytes {
            state.events.kv_budget(bytes);
            // Without its thread the host ends.
            state.tell(Command::KvBudget(bytes));
        }
    }

    /// Current memory use.
    pub fn memory(&self) -> MemoryReport {
        let (budget, percent) = (
            self.host_state.kv_budget(),
            self.host_state.config.kv_share_per_caller,
        );
        let pool = Pool::new(budget, &self.footprint, percent);
        MemoryReport {
            weight_bytes: self.stats().weight_bytes,
            kv_bytes_per_position: self.footprint.per_position,
            kv_positions: pool.holds(pool.total).into(),
            resident_bytes: resident_bytes_of_all(std::process::id()),
        }
    }

    /// Resolves if the engine can no longer compute: its thread died, which only a defect can
    /// cause, or it is lost ([`crate::LayerEngine::is_lost`]) and cannot be loaded again. The host
    /// then refuses everything and should be ended.
    pub async fn failed(&self) {
        let mut running = self.compute.running.clone();
        if running
            .wait_for(|state| *state == Running::Failed)
            .await
            .is_err()
        {
            // The thread ended on request.
            std::future::pending::<()>().await;
        }
    }

    /// Resolves with the reason if the weights, which were unloaded, could not be loaded again for a
    /// stream. The host refuses streams until a later load succeeds.
    pub async fn unavailable(&self) -> String {
        let mut reason = self.host_state.events.unavailable();
        let found = reason.wait_for(Option::is_some).await;
        let found = found.ok().and_then(|reason| reason.clone());
        match found {
            Some(reason) => reason,
            // Not reached: this value holds the sender.
            None => std::future::pending().await,
        }
    }

    /// Drains and ends the host. It takes no more connections and streams, announces that to every
    /// session, and serves the open streams until none is left or `within` has passed. Then it
    /// sends BYE to every session and ends. Dropping the future ends the host at once.
    pub async fn shutdown(mut self, within: Duration) -> ShutdownReport {
        let until = Instant::now() + within;
        let shard = Name::from(self.descriptor().shard_id.as_str());
        let HostState { slots, events, .. } = &*self.host_state;
        events.leaving(shard.clone(), slots.taken(), within);
        slots.close();
        self.phase.send_replace(Phase::Leaving { until });
        let _ = timeout_at(until, slots.emptied()).await;
        let streams_cut = slots.taken();
        self.phase.send_replace(Phase::Closing);
        // Closing a session needs no answer of the peer, so this takes little time.
        let _ = timeout_at(until.max(Instant::now() + CLOSING), &mut self.accepting).await;
        self.compute.stop();
        let mut running = self.compute.running.clone();
        let ended = running.wait_for(|state| *state != Running::Yes);
        let _ = timeout_at(until.max(Instant::now() + CLOSING), ended).await;
        events.stopped(shard, streams_cut);
        ShutdownReport { streams_cut }
    }
}

/// Time for the steps of closing beyond the deadline.
const CLOSING: Duration = Duration::from_millis(500);

impl Drop for RunningHost {
    fn drop(&mut self) {
        // The sessions send BYE, and end with their tasks.
        self.phase.send_replace(Phase::Closing);
    }
}

impl fmt::Debug for RunningHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningHost")
            .field("addr", &self.addr)
            .field("served", &self.host_state.served)
            .finish_non_exhaustive()
    }
}
