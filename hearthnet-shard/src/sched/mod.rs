//! The compute thread's state: streams, their waiting steps, and the engine.
//!
//! Uses no socket, thread or system clock: commands come in through [`Scheduler::handle`], answers
//! go out through each stream's [`ResponseSink`](crate::stream_handle::ResponseSink), and the
//! caller loops
//!
//! ```text
//! handle(command) for each queued command         opens, steps, closes
//! turn()                                          one batch; false: no step waits
//! upkeep()                                        timeouts, eviction; returns when to call again
//! ```
//!
//! so that a close or a cancel takes effect before the next batch. A batch is in `run.rs`.

mod run;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use zeroize::Zeroize as _;

use crate::batch::wipe;
use crate::chunked_prefill::ChunkedPrefill;
use crate::clock::Clock;
use crate::config::ServeConfig;
use crate::engine::{EngineSource, LayerEngine, LoadFault, Served, StartProgress};
use crate::events::HostEvents;
use crate::fault::StreamFault;
use crate::notary::Notary;
use crate::plan::{
    Full, Planner, Pool, ReturnEstimator, StreamSnapshot, admit, admit_fork, holders, may_grow,
};
use crate::stream::{Job, Stream, Work};
use crate::stream_handle::StreamHandle;

/// Command from a connection to the compute thread.
pub(crate) enum Command {
    /// Begin a stream, or fork it off.
    Open {
        handle: Arc<StreamHandle>,
        source: Option<ForkSource>,
    },
    /// Let a stream hold more positions.
    Grow { handle: u64, max_positions: u32 },
    /// Run a step, whose shape, dtype and values are already checked, or shorten a stream.
    Work { handle: u64, work: Work },
    /// Free an ended stream.
    Close { handle: u64 },
    /// Change the KV budget, in bytes.
    KvBudget(u64),
    /// End all streams; the thread ends, too.
    Shutdown,
}

/// Stream that another one is forked off, and the number of positions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkSource {
    pub(crate) handle: u64,
    pub(crate) position: u32,
}

/// A stream "returns at once" if its next step arrives within this part of a decode batch, at most
/// `RETURN_LIMIT`.
const RETURN_FRACTION: u32 = 4;
const RETURN_LIMIT: Duration = Duration::from_millis(5);

pub(crate) struct Scheduler<S: EngineSource> {
    source: S,
    /// `None` while the weights are unloaded; then there are no streams.
    engine: Option<S::Engine>,
    served: Served,
    config: ServeConfig,
    events: Arc<HostEvents>,
    clock: Arc<dyn Clock>,
    notary: Notary,
    streams: BTreeMap<u64, Stream<<S::Engine as LayerEngine>::Seq>>,
    /// KV pages; empty before the first load of the weights. More than `budgeted` while streams hold
    /// more.
    pool: Pool,
    /// KV pages of the budget.
    budgeted: Pool,
    page_bytes: u64,
    /// When the last stream ended, or the weights were loaded.
    empty_since: Duration,
    planner: Planner,
    turn: u64,
    prefill: ChunkedPrefill,
    /// See [`Self::delays_decode`].
    delays_decode: bool,
    /// Snapshots of the streams for the planner, kept to reuse the memory.
    snapshots: Vec<StreamSnapshot>,
    /// Rows of the batch, kept to reuse the memory; zeroed between batches.
    x: Vec<f32>,
}

fn at_once(prefill: &ChunkedPrefill) -> Duration {
    RETURN_LIMIT.min(prefill.decode_turn() / RETURN_FRACTION)
}

impl<S: EngineSource> Scheduler<S> {
    pub(crate) fn new(
        source: S,
        served: Served,
        config: ServeConfig,
        events: Arc<HostEvents>,
        clock: Arc<dyn Clock>,
        notary: Notary,
    ) -> Self {
        let prefill = ChunkedPrefill::new(config.prefill_piece);
        let pool = Pool {
            total: 0,
            quota: 0,
            page: 1,
            base: 0,
        };
        Self {
            source,
            engine: None,
            served,
            config,
            events,
            clock,
            notary,
            streams: BTreeMap::new(),
            pool,
            budgeted: pool,
            page_bytes: 0,
            empty_since: Duration::ZERO,
            planner: Planner::new(),
            turn: 0,
            prefill,
            delays_decode: false,
            snapshots: Vec::new(),
            x: Vec::new(),
        }
    }

    /// Loads the weights if they are not in memory.
    ///
    /// # Errors
    /// Error of the source.
    pub(crate) fn load(
        &mut self,
        progress: &mut dyn FnMut(StartProgress),
    ) -> Result<&mut S::Engine, LoadFault> {
        // Not `get_or_insert_with`, since loading can fail.
        let engine = match self.engine.take() {
            Some(engine) => engine,
            None => {
                let engine = self.source.load(progress)?;
                let footprint = engine.footprint();
                self.events.loaded(engine.weight_bytes(), engine.card());
                self.page_bytes = footprint.unit();
                let (budget, percent) =
                    (self.config.kv_budget_bytes, self.config.kv_share_per_caller);
                self.pool = Pool::new(budget, &footprint, percent);
                self.budgeted = self.pool;
                self.events.kv(0, 0, self.pool.total.into());
                self.empty_since = self.clock.now();
                engine
            }
        };
        Ok(self.engine.insert(engine))
    }

    /// Applies one command.
    pub(crate) fn handle(&mut self, command: Command) {
        match command {
            Command::Open { handle, source } => self.open(&handle, source),
            Command::Grow {
                handle,
                max_positions,
            } => self.grow(handle, max_positions),
            Command::Work { handle, work } => self.enqueue(handle, work),
            Command::Close { handle } => self.remove(handle),
            Command::KvBudget(bytes) => self.set_kv_budget(bytes),
            Command::Shutdown => self.end_all(&StreamFault::ShuttingDown),
        }
    }

    /// See [`may_grow`].
    pub(crate) fn may_grow(&self) -> bool {
        // Resting streams are not waited for.
        let streams = self
            .streams
            .values()
            .filter(|stream| !stream.handle.rests());
        let standing =
            streams.map(|stream| (stream.head().map(|job| job.step.rows), stream.active));
        may_grow(standing, self.clock.now())
    }

    /// How long to hold back the next batch for streams that return at once and would otherwise
    /// wait for a whole batch. At most a quarter of a decode batch, and 5 ms, from their last
    /// answer.
    pub(crate) fn awaited(&self) -> Option<Duration> {
        let (now, at_once) = (self.clock.now(), at_once(&self.prefill));
        let waiting = self.streams.values().filter(|one| !one.work.is_empty());
        let waiting: BTreeSet<_> = waiting.map(|one| one.handle.caller.party).collect();
        if waiting.is_empty() {
            return None;
        }
        let idle = |one: &&Stream<_>| one.work.is_empty() && !one.handle.rests();
        // A caller whose steps wait has its part of the batch, unless it is the only one.
        let apart = |one: &&Stream<_>| {
            let party = one.handle.caller.party;
            !waiting.contains(&party) || waiting.len() == 1
        };
        let awaited = self.streams.values().filter(idle).filter(apart);
        awaited
            .filter_map(|one| one.return_estimator.awaited(at_once, now, self.turn))
            .max()
    }

    /// Ends idle streams, and unloads the weights if no stream used them for long. Returns the time
    /// after which to call again if nothing else happens.
    pub(crate) fn upkeep(&mut self) -> Option<Duration> {
        let now = self.clock.now();
        let limit = self.config.stream_idle;
        let idle = |stream: &Stream<_>| {
            stream.work.is_empty() && now.saturating_sub(stream.active) >= limit
        };
        let over: Vec<u64> = self
            .streams
            .iter()
            .filter(|(_, s)| idle(s))
            .map(|(&id, _)| id)
            .collect();
        for id in over {
            self.fail(
                id,
                None,
                &StreamFault::IdleTimeout {
                    seconds: limit.as_secs(),
                },
            );
        }
        if let Some(first) = self.streams.values().map(|stream| stream.active).min() {
            return Some((first + limit).saturating_sub(now));
        }
        let evict_at = self.empty_since + self.config.evict_after?;
        self.engine.as_ref()?;
        if now < evict_at {
            return Some(evict_at - now);
        }
        self.evict();
        None
    }

    /// Returns whether the last batch was prefill while another caller decodes. The compute thread
    /// then yields before the next batch so that arrived messages are read: on a machine without a
    /// free core they could wait for milliseconds.
    pub(crate) fn delays_decode(&self) -> bool {
        self.delays_decode
    }

    /// If the engine is lost, drops it and ends all streams, so that their callers choose other
    /// hosts. Returns false if it cannot be loaded again.
    pub(crate) fn survives_loss(&mut self) -> bool {
        if !self.engine.as_mut().is_some_and(LayerEngine::is_lost) {
            return true;
        }
        let reason = "its device or process is gone".into();
        self.end_all(&StreamFault::Internal { reason });
        self.evict();
        self.source.may_reload()
    }

    /// Takes snapshots of the streams.
    fn take_snapshots(&mut self) {
        let Self {
            snapshots,
            streams,
            engine,
            ..
        } = self;
        snapshots.clear();
        if let Some(engine) = engine {
            snapshots.extend(
                streams
                    .iter()
                    .map(|(&id, stream)| stream.snapshot(id, engine)),
            );
        }
    }

    /// Ends a stream so that others get its pages.
    fn preempt(&mut self, id: u64) {
        let position = self.head(id).map(|job| job.step.position);
        self.fail(id, position, &StreamFault::Preempted);
    }

    pub(crate) fn end_all(&mut self, fault: &StreamFault) {
        for id in self.streams.keys().copied().collect::<Vec<_>>() {
            self.fail(id, None, fault);
        }
    }

    fn open(&mut self, handle: &Arc<StreamHandle>, source: Option<ForkSource>) {
        if handle.has_ended() {
            return;
        }
        match self.try_open(handle, source) {
            Ok(()) => handle.opened(),
            Err(fault) => {
                handle.end(|| handle.failed(None, &fault));
            }
        }
        self.count_kv();
    }

    /// Answers a caller that wants more positions for a stream. As at the open, the host only
    /// promises that so many positions can fit.
    fn grow(&mut self, id: u64, max_positions: u32) {
        let Some(handle) = self.handle_of(id) else {
            return;
        };
        match self.could_hold(max_positions) {
            Ok(()) => handle.opened(),
            Err(fault) => self.fail(id, None, &fault),
        }
    }

    fn set_kv_budget(&mut self, bytes: u64) {
        self.config.kv_budget_bytes = bytes;
        // Without an engine the next load takes it.
        if let Some(engine) = &self.engine {
            let (footprint, percent) = (engine.footprint(), self.config.kv_share_per_caller);
            self.budgeted = Pool::new(bytes, &footprint, percent);
            self.fit_pool();
        }
    }

    /// Shrinks the pool to the budget as far as streams have given up pages.
    fn fit_pool(&mut self) {
        if self.pool == self.budgeted {
            return;
        }
        let Some(engine) = &self.engine else {
            return;
        };
        let streams = self.streams.values();
        let held = streams.map(|stream| self.budgeted.pages(engine.len(stream.seq)));
        let held = held.fold(0, u32::saturating_add);
        self.pool = self.budgeted.holding(held, self.config.kv_share_per_caller);
        self.count_kv();
    }

    fn could_hold(&self, positions: u32) -> Result<(), StreamFault> {
        let pool = self.pool;
        if pool.pages(positions) <= pool.quota {
            return Ok(());
        }
        Err(StreamFault::KvTooSmall {
            asked: positions,
            holds: pool.holds(pool.quota),
        })
    }

    fn try_open(
        &mut self,
        handle: &Arc<StreamHandle>,
        source: Option<ForkSource>,
    ) -> Result<(), StreamFault> {
        let loaded = self.load(&mut |step| tracing::debug!(?step, "loading the weights again"));
        if let Err(LoadFault { reason, .. }) = loaded.map(|_| ()) {
            self.events.not_loaded(&reason);
            return Err(StreamFault::WeightsUnavailable { reason });
        }
        self.fit_pool();
        self.admit(handle, source.map_or(0, |source| source.position))?;
        let Some(engine) = self.engine.as_mut() else {
            let reason = "it is not loaded".into();
            return Err(StreamFault::Internal { reason });
        };
        let seq = match source {
            None => engine.open()?,
            Some(ForkSource { handle, position }) => {
                let source = self.streams.get(&handle);
                let seq = source.ok_or(StreamFault::UnknownStream)?.seq;
                let length = engine.len(seq);
                if length < position {
                    return Err(StreamFault::PositionGap { position, length });
                }
                engine.fork(seq, position)?
            }
        };
        let mut claims = self.notary.claims(handle, &self.served);
        let source = source.and_then(|source| Some((self.streams.get(&source.handle)?, source)));
        if let (Some(claims), Some((of, source))) = (&mut claims, source)
            && let Some(of) = &of.claims
        {
            claims.fork_of(of, source.position);
        }
        let stream = Stream {
            handle: Arc::clone(handle),
            seq,
            work: VecDeque::new(),
            served: self.turn,
            active: self.clock.now(),
            return_estimator: ReturnEstimator::default(),
            claims,
        };
        self.streams.insert(handle.id, stream);
        Ok(())
    }

    /// Checks that the stream fits the pool, and that a page is free for it to begin with, or those
    /// of a fork's `positions`. More is not promised: when no page is left, growth may preempt
    /// another stream.
    fn admit(&mut self, handle: &StreamHandle, positions: u32) -> Result<(), StreamFault> {
        let (pool, percent) = (self.pool, self.config.kv_share_per_caller);
        self.could_hold(handle.max_positions())?;
        self.take_snapshots();
        let holders = holders(&self.snapshots, &pool, self.clock.now());
        let (party, pages) = (handle.caller.party, pool.pages(positions));
        let admitted = match pages {
            0 => admit(&holders, &pool, party),
            pages => admit_fork(&holders, &pool, party, pages),
        };
        admitted.map_err(|full| match full {
            Full::Host => StreamFault::KvFull,
            Full::Caller => StreamFault::KvQuota { percent },
        })
    }

    fn enqueue(&mut self, handle: u64, work: Work) {
        match self.streams.get_mut(&handle) {
            Some(stream) => {
                stream.active = self.clock.now();
                if let Work::Step(job) = &work {
                    let at_once = at_once(&self.prefill);
                    stream
                        .return_estimator
                        .came(job.step.rows, job.arrived, at_once);
                }
                stream.work.push_back(work);
            }
            // The stream ended while this was on its way; the caller has been told of the end.
            None => self.drop_work([work]),
        }
    }

    /// Prepares the step at the head of every stream.
    fn settle(&mut self) {
        let Some(engine) = self.engine.as_mut() else {
            return;
        };
        let mut faults = Vec::new();
        for (&id, stream) in &mut self.streams {
            if stream.handle.has_ended() {
                // Its close command is on its way: compute nothing more of it.
                faults.push((id, None));
            } else if let Err((position, fault)) = stream.settle(engine) {
                faults.push((id, Some((position, fault))));
            } else if let Some(claims) = &mut stream.claims {
                self.notary.certify(claims, &stream.handle.sink, false);
            }
        }
        for (id, fault) in faults {
            match fault {
                Some((position, fault)) => self.fail(id, position, &fault),
                None => self.remove(id),
            }
        }
    }

    fn head(&self, id: u64) -> Option<&Job> {
        self.streams.get(&id)?.head()
    }

    fn handle_of(&self, id: u64) -> Option<Arc<StreamHandle>> {
        Some(Arc::clone(&self.streams.get(&id)?.handle))
    }

    /// Ends a stream from the host's side.
    fn fail(&mut self, id: u64, position: Option<u32>, fault: &StreamFault) {
        let Some(handle) = self.handle_of(id) else {
            return;
        };
        self.remove(id);
        // No message if its caller has ended it meanwhile.
        handle.end(|| handle.failed(position, fault));
    }

    /// Frees everything that a stream holds.
    fn remove(&mut self, id: u64) {
        let Some(stream) = self.streams.remove(&id) else {
            return;
        };
        if let Some(mut claims) = stream.claims {
            self.notary.certify(&mut claims, &stream.handle.sink, true);
        }
        if let Some(engine) = self.engine.as_mut() {
            engine.close(stream.seq);
        }
        if self.streams.is_empty() {
            self.empty_since = self.clock.now();
        }
        self.drop_work(stream.work);
        self.count_kv();
    }

    fn drop_work(&self, work: impl IntoIterator<Item = Work>) {
        let mut steps = 0;
        for work in work {
            if let Work::Step(mut job) = work {
                steps += 1;
                job.out.zeroize();
                wipe(job.step.data);
            }
        }
        if steps > 0 {
            self.events.dropped(steps);
        }
    }

    fn evict(&mut self) {
        if self.engine.take().is_some() {
            self.x = Vec::new();
            self.events.evicted();
            self.count_kv();
        }
    }

    fn count_kv(&self) {
        let used = self.engine.as_ref().map_or(0, LayerEngine::kv_bytes_in_use);
        let page = self.page_bytes;
        let pages = used.checked_div(page).unwrap_or(0);
        self.events.kv(used, pages, self.pool.total.into());
    }

    fn count_waiting(&self) {
        self.events
            .waiting(self.streams.values().map(|stream| stream.work.len()).sum());
    }
}
