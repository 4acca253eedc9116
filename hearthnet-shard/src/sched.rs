//! The compute thread's state: streams, their waiting steps, and the engine.
//!
//! Knows no socket, thread or system clock: commands come in by [`Scheduler::handle`],
//! answers go out through each stream's [`Outlet`](crate::stream_handle::Outlet), and the caller
//! loops
//!
//! ```text
//! handle(command) for all commands there are      opens, steps, closes
//! turn()                                          one batch; false: nothing waits
//! upkeep()                                        timeouts, eviction; says when to come back
//! ```
//!
//! so that a close or a cancel takes effect before the next batch, whatever waits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::{Message, Step, StepResult, Want};
use zeroize::Zeroize as _;

use crate::batch::{self, Part, wipe};
use crate::chunked_prefill::ChunkedPrefill;
use crate::clock::Clock;
use crate::engine::{EngineSource, LayerEngine, LoadFault, Served, Span, StartProgress};
use crate::events::HostEvents;
use crate::fault::StreamFault;
use crate::plan::{
    Full, Kind, Planner, Pool, Rhythm, Sizes, Turn, View, admit, decoders, holders, may_grow,
    others_decode, rides, short_rows,
};
use crate::stream::{Job, Stream, Work};
use crate::stream_handle::{Outlet, StreamHandle, Ticket};

/// What connections ask of the compute thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Begin a stream.
    Open(Arc<StreamHandle>),
    /// Let a stream hold more positions.
    Grow { handle: u64, max_positions: u32 },
    /// Run a step, whose shape, type and values were checked.
    Step {
        handle: u64,
        step: Step,
        ticket: Ticket,
        arrived: Duration,
    },
    /// Shorten a stream.
    Truncate {
        handle: u64,
        position: u32,
        ticket: Ticket,
    },
    /// Free a stream that has ended.
    Close { handle: u64 },
}

/// The scheduler's share of the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) kv_budget: u64,
    /// Most of it that one caller may hold, in per cent.
    pub(crate) kv_share: u32,
    pub(crate) stream_idle: Duration,
    /// `None`: never.
    pub(crate) evict_after: Option<Duration>,
    pub(crate) piece: Duration,
}

/// A stream comes back at once within this part of a decode turn, and this time.
const AT_ONCE: u32 = 4;
const AT_MOST: Duration = Duration::from_millis(5);

pub(crate) struct Scheduler<S: EngineSource> {
    source: S,
    /// `None` while the weights are put away; then there are no streams.
    engine: Option<S::Engine>,
    served: Served,
    limits: Limits,
    events: Arc<HostEvents>,
    clock: Arc<dyn Clock>,
    streams: BTreeMap<u64, Stream<<S::Engine as LayerEngine>::Seq>>,
    /// The pages that there are, once the weights have been loaded for the first time.
    pool: Pool,
    page_bytes: u64,
    /// When the last stream went, or the weights came.
    empty_since: Duration,
    planner: Planner,
    turn: u64,
    prefill: ChunkedPrefill,
    /// [`Self::holds_up`].
    holds_up: bool,
    /// The streams as the plan sees them, kept to reuse its memory.
    views: Vec<View>,
    /// The batch, kept to reuse its memory; zero between turns.
    x: Vec<f32>,
}

/// In each turn with such a number there is a row more than the third of a turn allows.
const ONE_MORE: u64 = 16;

fn at_once(prefill: &ChunkedPrefill) -> Duration {
    AT_MOST.min(prefill.decode_turn() / AT_ONCE)
}

impl<S: EngineSource> Scheduler<S> {
    pub(crate) fn new(
        source: S,
        served: Served,
        limits: Limits,
        events: Arc<HostEvents>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let prefill = ChunkedPrefill::new(limits.piece);
        Self {
            source,
            engine: None,
            served,
            limits,
            events,
            clock,
            streams: BTreeMap::new(),
            pool: Pool::new(0, 1, 1, 100),
            page_bytes: 0,
            empty_since: Duration::ZERO,
            planner: Planner::new(),
            turn: 0,
            prefill,
            holds_up: false,
            views: Vec::new(),
            x: Vec::new(),
        }
    }

    /// Loads the weights if they are not there.
    ///
    /// # Errors
    /// What the source says.
    pub(crate) fn load(
        &mut self,
        progress: &mut dyn FnMut(StartProgress),
    ) -> Result<&mut S::Engine, LoadFault> {
        // Not `get_or_insert_with`, for loading can fail.
        let engine = match self.engine.take() {
            Some(engine) => engine,
            None => {
                let engine = self.source.load(progress)?;
                let footprint = engine.footprint();
                self.events.loaded(footprint.weight_bytes);
                let (budget, page) = (self.limits.kv_budget, footprint.kv_page_positions);
                let page_bytes = footprint.kv_bytes_per_position.saturating_mul(page.into());
                self.page_bytes = page_bytes;
                self.pool = Pool::new(budget, page, page_bytes, self.limits.kv_share);
                self.events.kv(0, 0, self.pool.total.into());
                self.empty_since = self.clock.now();
                engine
            }
        };
        Ok(self.engine.insert(engine))
    }

    /// Takes one command in.
    pub(crate) fn handle(&mut self, command: Command) {
        match command {
            Command::Open(handle) => self.open(&handle),
            Command::Grow {
                handle,
                max_positions,
            } => self.grow(handle, max_positions),
            Command::Step {
                handle,
                step,
                ticket,
                arrived,
            } => {
                let job = Job::new(step, ticket, arrived);
                self.enqueue(handle, Work::Step(Box::new(job)));
            }
            Command::Truncate {
                handle,
                position,
                ticket,
            } => {
                self.enqueue(
                    handle,
                    Work::Truncate {
                        position,
                        _ticket: ticket,
                    },
                );
            }
            Command::Close { handle } => self.remove(handle),
        }
    }

    /// Whether the next batch could be larger in a moment: [`may_grow`].
    pub(crate) fn may_grow(&self) -> bool {
        // Nobody waits for those that rest.
        let streams = self
            .streams
            .values()
            .filter(|stream| !stream.handle.rests());
        let standing =
            streams.map(|stream| (stream.head().map(|job| job.step.rows), stream.active));
        may_grow(standing, self.clock.now())
    }

    /// How long the next turn is worth holding back: for so long streams are expected that come back at
    /// once, and that would otherwise wait for a whole turn without them. At most a quarter of a decode
    /// turn, and 5 ms, from when they were answered.
    pub(crate) fn awaited(&self) -> Option<Duration> {
        let (now, at_once) = (self.clock.now(), at_once(&self.prefill));
        let waiting = self.streams.values().filter(|one| !one.work.is_empty());
        let waiting: BTreeSet<_> = waiting.map(|one| one.handle.caller.party).collect();
        if waiting.is_empty() {
            return None;
        }
        let idle = |one: &&Stream<_>| one.work.is_empty() && !one.handle.rests();
        // Whose steps wait has its part of the turn, beside others.
        let apart = |one: &&Stream<_>| {
            let party = one.handle.caller.party;
            !waiting.contains(&party) || waiting.len() == 1
        };
        let awaited = self.streams.values().filter(idle).filter(apart);
        awaited
            .filter_map(|one| one.rhythm.awaited(at_once, now, self.turn))
            .max()
    }

    /// Ends idle streams and puts the weights away when nobody used them for long. Says
    /// after how long to call again if nothing else happens.
    pub(crate) fn upkeep(&mut self) -> Option<Duration> {
        let now = self.clock.now();
        let limit = self.limits.stream_idle;
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
        let evict_at = self.empty_since + self.limits.evict_after?;
        self.engine.as_ref()?;
        if now < evict_at {
            return Some(evict_at - now);
        }
        self.evict();
        None
    }

    /// Whether the last turn was a prompt's while somebody else decodes: what has come meanwhile is to be
    /// read before the next turn. A system that has no other core for that might let it wait for
    /// milliseconds.
    pub(crate) fn holds_up(&self) -> bool {
        self.holds_up
    }

    /// Computes one batch. `false` if nothing waited.
    pub(crate) fn turn(&mut self) -> bool {
        self.settle();
        self.look();
        let now = self.clock.now();
        let beside = others_decode(&self.views, now);
        self.holds_up = false;
        let (rides, decoders) = (rides(&self.views, beside), decoders(&self.views, now));
        let more = match decoders > 1 {
            // Now and then one more, for what a row costs is seen where turns differ.
            true => {
                self.prefill.rows_beside(decoders) + u32::from(self.turn.is_multiple_of(ONE_MORE))
            }
            false => self.prefill.rows_beside(short_rows(&self.views).max(1)),
        };
        let piece = match (beside, rides) {
            (false, _) => self.prefill.piece_rows(),
            (true, false) => self.prefill.rows_between(),
            (true, true) => more,
        };
        let sizes = Sizes {
            piece,
            rides,
            decoders,
            more,
        };
        let turn = self.planner.plan(&self.views, &self.pool, &sizes, now);
        if let Some(turn) = &turn {
            self.holds_up = beside && turn.kind == Kind::Prefill;
            for stream in &turn.preempted {
                self.preempt(*stream);
            }
            if !turn.takes.is_empty() {
                self.turn += 1;
                self.run(turn, beside, now);
            }
        }
        self.count_waiting();
        turn.is_some()
    }

    /// Whether the engine can compute no more.
    pub(crate) fn is_lost(&mut self) -> bool {
        self.engine.as_mut().is_some_and(LayerEngine::is_lost)
    }

    /// Takes down how the streams stand.
    fn look(&mut self) {
        let Self {
            views,
            streams,
            engine,
            ..
        } = self;
        views.clear();
        if let Some(engine) = engine {
            views.extend(streams.iter().map(|(&id, stream)| stream.view(id, engine)));
        }
    }

    /// Ends a stream so that others have its pages.
    fn preempt(&mut self, id: u64) {
        let position = self.head(id).map(|job| job.step.position);
        self.fail(id, position, &StreamFault::Preempted);
    }

    /// Ends every stream.
    pub(crate) fn end_all(&mut self, fault: &StreamFault) {
        for id in self.streams.keys().copied().collect::<Vec<_>>() {
            self.fail(id, None, fault);
        }
    }

    fn open(&mut self, handle: &Arc<StreamHandle>) {
        if handle.has_ended() {
            return;
        }
        match self.try_open(handle) {
            Ok(()) => handle.opened(),
            Err(fault) => {
                handle.end(|| handle.failed(None, &fault));
            }
        }
        self.count_kv();
    }

    /// Answers a caller that wants more positions for a stream. More is not promised than at the
    /// open: that they could ever be there.
    fn grow(&mut self, id: u64, max_positions: u32) {
        let Some(handle) = self
            .streams
            .get(&id)
            .map(|stream| Arc::clone(&stream.handle))
        else {
            return;
        };
        match self.could_hold(max_positions) {
            Ok(()) => handle.opened(),
            Err(fault) => self.fail(id, None, &fault),
        }
    }

    fn could_hold(&self, positions: u32) -> Result<(), StreamFault> {
        let pool = self.pool;
        if pool.pages(positions) <= pool.quota {
            return Ok(());
        }
        Err(StreamFault::KvTooSmall {
            asked: positions,
            holds: pool.quota.saturating_mul(pool.page),
        })
    }

    fn try_open(&mut self, handle: &Arc<StreamHandle>) -> Result<(), StreamFault> {
        self.load(&mut |step| tracing::debug!(?step, "loading the weights again"))
            .map_err(|LoadFault { reason, .. }| StreamFault::WeightsUnavailable { reason })?;
        self.admit(handle)?;
        let Some(engine) = self.engine.as_mut() else {
            let reason = "it is not loaded".into();
            return Err(StreamFault::Internal { reason });
        };
        let seq = engine.open()?;
        let stream = Stream {
            handle: Arc::clone(handle),
            seq,
            work: VecDeque::new(),
            served: self.turn,
            active: self.clock.now(),
            rhythm: Rhythm::default(),
        };
        self.streams.insert(handle.id, stream);
        Ok(())
    }

    /// Whether a stream may begin: it has to fit at all, and to find a page to begin with. More is
    /// not promised: who grows when no page is left may cost somebody its own.
    fn admit(&mut self, handle: &StreamHandle) -> Result<(), StreamFault> {
        let (pool, percent) = (self.pool, self.limits.kv_share);
        self.could_hold(handle.max_positions())?;
        self.look();
        let holders = holders(&self.views, &pool, self.clock.now());
        admit(&holders, &pool, handle.caller.party).map_err(|full| match full {
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
                    stream.rhythm.came(job.step.rows, job.arrived, at_once);
                }
                stream.work.push_back(work);
            }
            // The stream ended while this was on its way; its end was the answer.
            None => self.drop_work([work]),
        }
    }

    /// Brings every stream to the position of the step at its head.
    fn settle(&mut self) {
        let Some(engine) = self.engine.as_mut() else {
            return;
        };
        let mut faults = Vec::new();
        for (&id, stream) in &mut self.streams {
            if stream.handle.has_ended() {
                // Its close is on its way here: nothing of it is computed any more.
                faults.push((id, None));
            } else if let Err((position, fault)) = stream.settle(engine) {
                faults.push((id, Some((position, fault))));
            }
        }
        for (id, fault) in faults {
            match fault {
                Some((position, fault)) => self.fail(id, position, &fault),
                None => self.remove(id),
            }
        }
    }

    fn run(&mut self, turn: &Turn, beside: bool, began: Duration) {
        let Some(engine) = self.engine.as_mut() else {
            return;
        };
        let mut parts: Vec<Part<_>> = turn
            .takes
            .iter()
            .filter_map(|&(stream, rows)| {
                let Stream {
                    seq, handle, work, ..
                } = self.streams.get(&stream)?;
                let span = Span {
                    seq: *seq,
                    position: engine.len(*seq),
                    rows,
                };
                let Some(Work::Step(job)) = work.front() else {
                    return None;
                };
                let row = job.step.data.len() / job.step.rows.max(1) as usize;
                let from = job.done as usize * row;
                Some(Part {
                    stream,
                    layers: handle.layers,
                    span,
                    data: job.step.data.slice(from..from + rows as usize * row),
                })
            })
            .collect();
        // Streams that run through the same layers share a batch.
        parts.sort_by_key(|part| part.layers);
        let (boundary, width) = (self.served.boundary, self.served.width as usize);
        let results = batch::compute(engine, &parts, &mut self.x, boundary, width);
        let took = self.clock.now().saturating_sub(began);

        let rows = batch::rows_of(&parts);
        let (short, piece) = (rows.saturating_sub(turn.piece), turn.piece);
        self.events.turn(turn.kind, (short, piece), took);
        let layers = parts.first().map(|part| part.layers);
        let layers = layers.filter(|layers| parts.iter().all(|part| part.layers == *layers));
        match turn.kind {
            Kind::Decode => self.prefill.note_decode(took),
            Kind::Prefill if short > 0 => {}
            Kind::Prefill if beside => self.prefill.note_between(piece, took),
            Kind::Prefill => self.prefill.note(piece, took),
        }
        if let Some((lo, hi)) = layers.filter(|_| short > 0) {
            let layers = (hi + 1).saturating_sub(lo);
            self.prefill.note_turn(rows, layers, took);
        }
        let mut x = std::mem::take(&mut self.x);
        let mut rest = x.as_mut_slice();
        let mut answers = Vec::with_capacity(results.len());
        for (part, result) in parts.into_iter().zip(results) {
            let (rows, after) = rest.split_at_mut(part.span.rows as usize * width);
            rest = after;
            // Nobody but the step itself holds its rows from here on.
            drop(part.data);
            match result {
                Ok(()) => answers.extend(self.complete(part.stream, part.span.rows, rows, took)),
                Err(fault) => {
                    let position = self.head(part.stream).map(|job| job.step.position);
                    self.fail(part.stream, position, &fault);
                }
            }
        }
        send(answers);
        x.as_mut_slice().zeroize();
        x.clear();
        self.x = x;
        self.count_kv();
    }

    /// Takes note of computed rows. The answer to the step, if they were its last.
    fn complete(
        &mut self,
        stream: u64,
        rows: u32,
        x: &[f32],
        took: Duration,
    ) -> Option<(Arc<dyn Outlet>, Message)> {
        let now = self.clock.now();
        let (boundary, width) = (self.served.boundary, self.served.width as usize);
        let stream = self.streams.get_mut(&stream)?;
        stream.served = self.turn;
        stream.active = now;
        let Some(Work::Step(job)) = stream.work.front_mut() else {
            return None;
        };
        job.compute += took;
        job.done += rows;
        let finished = job.done >= job.step.rows;
        match job.step.want {
            Want::All => {
                if job.out.capacity() == 0 {
                    job.out.reserve_exact(job.step.data.len());
                }
                boundary.encode(x, &mut job.out);
            }
            Want::Last if finished => {
                boundary.encode(x.rchunks(width).next().unwrap_or_default(), &mut job.out);
            }
            _ => {}
        }
        if !finished {
            return None;
        }
        let Some(Work::Step(job)) = stream.work.pop_front() else {
            return None;
        };
        let Job {
            step,
            ticket,
            arrived,
            out,
            compute,
            ..
        } = *job;
        let queued = now.saturating_sub(arrived).saturating_sub(compute);
        let rows = match step.want {
            Want::None => 0,
            Want::Last => 1,
            Want::All => step.rows,
        };
        if stream.work.is_empty() {
            stream.rhythm.answered(step.rows, now);
        }
        let handle = &stream.handle;
        let bytes = out.len();
        let answer = StepResult {
            stream: handle.name.stream,
            epoch: handle.name.epoch,
            position: step.position,
            rows,
            width: step.width,
            dtype: step.dtype,
            compute_us: micros(compute),
            queue_us: micros(queued),
            data: out.into(),
        };
        // Before anybody can see it, in the answer or in the numbers: the next step may need the
        // room.
        handle.answered(now);
        drop(ticket);
        self.events
            .answered(handle.caller.node, step.rows, bytes, queued);
        let outlet = Arc::clone(&handle.outlet);
        wipe(step.data);
        Some((outlet, Message::StepResult(answer)))
    }

    fn head(&self, id: u64) -> Option<&Job> {
        self.streams.get(&id)?.head()
    }

    /// Ends a stream from this side.
    fn fail(&mut self, id: u64, position: Option<u32>, fault: &StreamFault) {
        let Some(handle) = self
            .streams
            .get(&id)
            .map(|stream| Arc::clone(&stream.handle))
        else {
            return;
        };
        self.remove(id);
        // Unless its caller has ended it meanwhile.
        handle.end(|| handle.failed(position, fault));
    }

    /// Frees everything that a stream holds.
    fn remove(&mut self, id: u64) {
        let Some(stream) = self.streams.remove(&id) else {
            return;
        };
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

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// Sends the answers of a batch, those on the same session in one piece.
fn send(mut answers: Vec<(Arc<dyn Outlet>, Message)>) {
    while let Some((outlet, _)) = answers.first() {
        let outlet = Arc::clone(outlet);
        let of_session = |answer: &mut (Arc<dyn Outlet>, Message)| Arc::ptr_eq(&answer.0, &outlet);
        let messages = answers
            .extract_if(.., of_session)
            .map(|(_, message)| message);
        outlet.send_all(messages.collect());
    }
}
