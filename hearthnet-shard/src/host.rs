//! Starting a host, looking at it, and ending it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hearthnet_bus::calls::CallServer;
use hearthnet_bus::flight::{self, Event, Name};
use hearthnet_bus::node::{Node, TensorSessions, bus_rule};
use hearthnet_bus::{Descriptor, DescriptorError, NodeId, NodeKey};
use hearthnet_transport::{Arrival, BindError, Code, Connection, IdentityError, PathListener};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};

use crate::admission::SessionAuthorizer;
use crate::clock::{Clock, SystemClock};
use crate::compute::{Compute, Footprint, Loading, Running};
use crate::config::ServeConfig;
use crate::engine::{EngineSource, LoadPhase, Served};
use crate::inbox::Inbox;
use crate::memory::{MemoryReport, resident_bytes};
use crate::plan::Pool;
use crate::sched::{Limits, Scheduler};
use crate::session::{self, End, Phase};
use crate::stats::{Counters, Stats};
use crate::stream_handle::{Quota, Slots};
use crate::stream_table::{About, HostState};

/// Why a host did not start. Nothing is left running or half open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The model file cannot be read, or is none.
    #[error(transparent)]
    Model(#[from] hearthnet_model::ModelError),
    /// The model does not have these layers.
    #[error(
        "layers {lo}-{hi} do not exist: the model has {total}, so choose a range from 0 to {}",
        .total.saturating_sub(1)
    )]
    LayerRange {
        /// First layer asked for.
        lo: u32,
        /// Last layer asked for.
        hi: u32,
        /// Layers of the model.
        total: u32,
    },
    /// The file holds other weights than those that it was to hold.
    #[error("the model file holds weights {found}, not {expected}: fetch the right one")]
    WeightsMismatch {
        /// Identity that was expected.
        expected: String,
        /// Identity of the file's weights.
        found: String,
    },
    /// The weights could not be loaded.
    #[error("the layers could not be loaded: {reason}")]
    Load {
        /// What went wrong.
        reason: String,
    },
    /// The address is taken or not this machine's, or the transport is misconfigured.
    #[error(transparent)]
    Listen(#[from] BindError),
    /// The node key makes no certificate.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The name of the model or the endpoint makes no valid descriptor.
    #[error("the host cannot be described to others: {0}; choose other names")]
    Descriptor(#[source] DescriptorError),
    /// A setting is out of its range.
    #[error("{setting} {rule}")]
    Setting {
        /// The field of the configuration.
        setting: &'static str,
        /// What it has to satisfy.
        rule: &'static str,
    },
    /// The KV budget, or the part of it that one caller may hold, is less than one page.
    #[error(
        "{budget} bytes of memory for context hold not one page of {page} positions for a caller: \
         these layers need {needed} bytes at least"
    )]
    KvBudget {
        /// Bytes of the budget.
        budget: u64,
        /// Bytes that it would have to be.
        needed: u64,
        /// Positions of a page.
        page: u32,
    },
    /// The system gave no thread.
    #[error("the system gave no thread to compute on: {0}")]
    Thread(#[source] std::io::Error),
}

impl StartError {
    /// The stable code, for machines.
    pub fn code(&self) -> Code {
        Code::new(match self {
            Self::Model(_) => "model_unusable",
            Self::LayerRange { .. } => "layer_range",
            Self::WeightsMismatch { .. } => "weights_mismatch",
            Self::Load { .. } => "weights_unavailable",
            Self::Listen(_) => "listen",
            Self::Setting { .. } | Self::KvBudget { .. } => "bad_request",
            Self::Descriptor(_) => "bad_descriptor",
            Self::Identity(_) | Self::Thread(_) => "internal",
        })
    }
}

/// What a start is busy with. All of it can take seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StartProgress {
    /// Hashing the whole model, to know its identity. Once for each file.
    Hashing {
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Comparing the layers' tensors with the manifest.
    Verifying {
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Reading and packing the layers.
    Loading {
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
}

/// How a host ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Streams that were still open when the sessions were closed; 0 if all callers moved in time.
    pub streams_cut: u32,
}

/// A host that serves. Dropping it ends it at once; [`RunningHost::shutdown`] ends it
/// politely.
pub struct RunningHost {
    addr: SocketAddr,
    footprint: Footprint,
    pool: Pool,
    host_state: Arc<HostState>,
    compute: Compute,
    phase: watch::Sender<Phase>,
    accepting: JoinHandle<()>,
}

/// Starts hosts.
#[derive(Debug, Clone, Copy)]
pub struct ShardHost;

impl ShardHost {
    /// Starts a host on any engine, with what it serves already known. `progress` is called
    /// while the weights are checked and loaded.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start_on<S: EngineSource>(
        config: ServeConfig,
        key: &NodeKey,
        served: Served,
        source: S,
        progress: &mut (dyn FnMut(StartProgress) + Send),
    ) -> Result<RunningHost, StartError> {
        let clock = Arc::new(SystemClock::start());
        start(config, Place::Alone(key), served, source, clock, progress).await
    }

    /// Starts a host that takes its sessions from the listener of a community's node: members get
    /// in, with a grant that the node has issued. Of `config`, `listen`, `admitted` and `transport`
    /// do not count: they are the node's affair.
    ///
    /// # Errors
    /// See [`StartError`]; [`StartError::Setting`] if the node does not listen.
    pub async fn start_on_in<S: EngineSource>(
        config: ServeConfig,
        node: &Node,
        served: Served,
        source: S,
        progress: &mut (dyn FnMut(StartProgress) + Send),
    ) -> Result<RunningHost, StartError> {
        let clock = Arc::new(SystemClock::start());
        start(config, Place::In(node), served, source, clock, progress).await
    }
}

/// Where a host gets its sessions.
pub(crate) enum Place<'a> {
    /// From a listener of its own, under this key.
    Alone(&'a NodeKey),
    /// From a node of a community.
    In(&'a Node),
}

/// [`ShardHost::start_on`] and [`ShardHost::start_on_in`], with a clock of the caller's.
pub(crate) async fn start<S: EngineSource>(
    config: ServeConfig,
    place: Place<'_>,
    served: Served,
    source: S,
    clock: Arc<dyn Clock>,
    progress: &mut (dyn FnMut(StartProgress) + Send),
) -> Result<RunningHost, StartError> {
    config.validate()?;
    let (inbox, counters) = (Arc::new(Inbox::default()), Arc::new(Counters::default()));
    let (id, admitted, transport) = match &place {
        Place::Alone(key) => (key.id(), config.admitted.as_slice(), &config.transport),
        Place::In(node) => (node.id(), &[][..], node.transport()),
    };
    let skew = config.clock_skew_secs;
    let door = Arc::new(SessionAuthorizer::new(id, admitted, skew, counters.clone()));
    let max_unread = u64::from(transport.send_buffer_bytes);
    // First of all, for a port that is in use should not cost the time of a load. Whoever
    // connects meanwhile waits to be accepted.
    let (addr, outward, waiting) = match place {
        Place::Alone(key) => {
            let (identity, admission) = (key.identity()?, Arc::clone(&door) as _);
            let transport = transport.clone();
            let rules = [bus_rule()];
            let own = PathListener::bind(&config.listen, &identity, admission, transport, &rules);
            let own = own.await?;
            (own.local_addr(), None, Waiting::Own(own))
        }
        Place::In(node) => {
            let addr = node.listen_addr().ok_or(StartError::Setting {
                setting: "node.listen",
                rule: "must be set where shards are served",
            })?;
            let outward = node.own_endpoints().into_iter().next();
            (addr, outward, Waiting::At(node))
        }
    };

    let limits = Limits {
        kv_budget: config.kv_budget_bytes,
        kv_share: config.kv_share_per_caller,
        stream_idle: config.stream_idle,
        evict_after: config.evict_after,
        piece: config.prefill_piece,
    };
    let scheduler = {
        let (served, counters, clock) = (served.clone(), counters.clone(), clock.clone());
        move || Scheduler::new(source, served, limits, counters, clock)
    };
    let (compute, mut reports) =
        Compute::start(scheduler, inbox.clone(), config.niceness).map_err(StartError::Thread)?;
    let footprint = loop {
        match reports.recv().await {
            Some(Loading::Progress(LoadPhase::Verifying, done, total)) => {
                progress(StartProgress::Verifying { done, total });
            }
            Some(Loading::Progress(LoadPhase::Loading, done, total)) => {
                progress(StartProgress::Loading { done, total });
            }
            Some(Loading::Done(footprint)) => break footprint,
            Some(Loading::Failed(reason)) => return Err(StartError::Load { reason }),
            None => {
                return Err(StartError::Load {
                    reason: "the engine failed".into(),
                });
            }
        }
    };

    let pool = kv_pool(&config, &footprint)?;
    counters.kv_budget(config.kv_budget_bytes);
    let context = served.context;
    let quota = Quota {
        streams: config.max_streams_per_caller,
        steps: config.max_waiting_steps_per_caller,
    };
    let about = About {
        node: id,
        endpoint: config
            .endpoint
            .or(outward)
            .unwrap_or_else(|| addr.to_string()),
        weight_bytes: footprint.weight_bytes,
        kv_budget_bytes: config.kv_budget_bytes,
    };
    let host_state = Arc::new(HostState {
        about,
        served,
        slots: Slots::new(config.max_concurrent_streams, quota),
        max_streams: config.max_concurrent_streams,
        max_positions: config.max_positions.unwrap_or(context).min(context),
        max_waiting_steps: config.max_waiting_steps,
        inbox,
        counters,
        clock,
        next_life: AtomicU64::new(1),
    });
    // The texts in it are the operator's: said now, rather than to each caller.
    let descriptor = host_state.descriptor();
    descriptor
        .validate()
        .and_then(|()| descriptor.to_cbor())
        .map_err(StartError::Descriptor)?;
    let (phase, watch) = watch::channel(Phase::Serving);
    let end = End {
        phase: watch,
        compute: compute.running.clone(),
    };
    let arrivals = match waiting {
        Waiting::Own(listener) => Arrivals::Own {
            listener,
            answers: Arc::new(door.answers()),
            calls: JoinSet::new(),
        },
        Waiting::At(node) => Arrivals::Node(node.serve_tensors(door)),
    };
    let accepting = tokio::spawn(accept(arrivals, host_state.clone(), end, max_unread));
    tracing::info!(%addr, shard = descriptor.shard_id, "serving");
    flight::record(Event::ShardServing {
        shard: descriptor.shard_id.as_str().into(),
    });
    Ok(RunningHost {
        addr,
        footprint,
        pool,
        host_state,
        compute,
        phase,
        accepting,
    })
}

/// The pages that a budget makes.
///
/// # Errors
/// [`StartError::KvBudget`] where it makes none: every stream would be refused.
fn kv_pool(config: &ServeConfig, footprint: &Footprint) -> Result<Pool, StartError> {
    let page = footprint.kv_page_positions;
    let page_bytes = footprint.kv_bytes_per_position.saturating_mul(page.into());
    let (budget, percent) = (config.kv_budget_bytes, config.kv_share_per_caller);
    let pool = Pool::new(budget, page, page_bytes, percent);
    if pool.quota > 0 {
        return Ok(pool);
    }
    Err(StartError::KvBudget {
        budget,
        needed: page_bytes
            .saturating_mul(100)
            .div_ceil(percent.max(1).into()),
        page,
    })
}

/// Where sessions will come from, once the weights are there.
enum Waiting<'a> {
    Own(PathListener),
    At(&'a Node),
}

/// Sessions as they come.
enum Arrivals {
    Own {
        listener: PathListener,
        /// What answers on the sockets for calls.
        answers: Arc<CallServer>,
        /// Those sockets; they go with this.
        calls: JoinSet<()>,
    },
    Node(TensorSessions),
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
                // The node has ended, or another host serves: no more come.
                None => std::future::pending().await,
            },
        }
    }
}

async fn accept(mut arrivals: Arrivals, host_state: Arc<HostState>, mut end: End, max_unread: u64) {
    // Dropped with this task, and the sessions with it.
    let mut sessions = JoinSet::new();
    let mut phase = end.phase.clone();
    loop {
        tokio::select! {
            connection = arrivals.next() => {
                let session = session::serve(connection, host_state.clone(), end.clone(), max_unread);
                sessions.spawn(session);
            }
            Some(_) = sessions.join_next() => {}
            _ = phase.wait_for(|phase| *phase != Phase::Serving) => break,
        }
    }
    drop(arrivals);
    let _ = end.phase.wait_for(|phase| *phase == Phase::Closing).await;
    while sessions.join_next().await.is_some() {}
}

impl RunningHost {
    #[cfg(test)]
    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.compute.inbox
    }

    /// This host's node id.
    pub fn node_id(&self) -> NodeId {
        self.host_state.about.node
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// What others need to know in order to use this host, as of now. Callers get the same
    /// in answer to DESCRIBE.
    pub fn descriptor(&self) -> Descriptor {
        self.host_state.descriptor()
    }

    /// Gauges and counters as of now.
    pub fn stats(&self) -> Stats {
        self.host_state
            .counters
            .snapshot(self.host_state.slots.taken())
    }

    /// What the host takes of the machine's memory as of now.
    pub fn memory(&self) -> MemoryReport {
        MemoryReport {
            weight_bytes: self.stats().weight_bytes,
            kv_bytes_per_position: self.footprint.kv_bytes_per_position,
            kv_budget_bytes: self.host_state.about.kv_budget_bytes,
            kv_positions: u64::from(self.pool.total) * u64::from(self.pool.page),
            kv_positions_per_caller: u64::from(self.pool.quota) * u64::from(self.pool.page),
            resident_bytes: resident_bytes(),
        }
    }

    /// Resolves if the engine's thread dies, which only a defect can cause. The host refuses
    /// everything from then on and should be ended.
    pub async fn failed(&self) {
        let mut running = self.compute.running.clone();
        if running
            .wait_for(|state| *state == Running::Failed)
            .await
            .is_err()
        {
            // The thread ended in the ordinary way.
            std::future::pending::<()>().await;
        }
    }

    /// Leaves: takes no more connections and streams, tells every session so, and serves the
    /// streams that are open until none is left or `within` has passed. Then it says BYE to every
    /// session and ends. Dropping what this returns ends the host at once.
    pub async fn shutdown(mut self, within: Duration) -> ShutdownReport {
        let until = Instant::now() + within;
        let shard = Name::from(self.descriptor().shard_id.as_str());
        flight::record(Event::ShardLeaving {
            shard: shard.clone(),
            streams: self.host_state.slots.taken(),
            within_ms: u64::try_from(within.as_millis()).unwrap_or(u64::MAX),
        });
        self.host_state.slots.close();
        self.phase.send_replace(Phase::Leaving { until });
        let _ = timeout_at(until, self.host_state.slots.emptied()).await;
        let streams_cut = self.host_state.slots.taken();
        self.phase.send_replace(Phase::Closing);
        // Closing a session needs no answer of the peer: this is over soon.
        let _ = timeout_at(until.max(Instant::now() + CLOSING), &mut self.accepting).await;
        self.compute.inbox.close();
        let mut running = self.compute.running.clone();
        let ended = running.wait_for(|state| *state != Running::Yes);
        let _ = timeout_at(until.max(Instant::now() + CLOSING), ended).await;
        flight::record(Event::ShardStopped {
            shard,
            cut: streams_cut,
        });
        ShutdownReport { streams_cut }
    }
}

/// What the steps of closing may take beyond the deadline.
const CLOSING: Duration = Duration::from_millis(500);

impl Drop for RunningHost {
    fn drop(&mut self) {
        // The sessions say goodbye, and everything goes with them.
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
