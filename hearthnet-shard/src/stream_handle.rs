//! An epoch of a stream, shared by its connection and the compute thread.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hearthnet_transport::{
    Code, KeyedBuckets, Message, NodeId, StreamClose, StreamOpen, StreamOpened, Time, Truncated,
};
use tokio::sync::Notify;

use crate::claims::Claims;
use crate::config::ServeConfig;
use crate::events::{Caller, HostEvents, Usage};
use crate::fault::StreamFault;
use crate::plan::{IDLE_AFTER, UNUSED_AFTER};
use crate::sync::{AtomicBool, AtomicU32, Mutex, MutexGuard};

/// Sink for the answers on a connection's streams. Never blocks.
pub(crate) trait ResponseSink: Send + Sync {
    /// Sends a message to the peer, in order for each stream.
    fn send(&self, message: Message) {
        self.send_all(vec![message]);
    }

    /// Sends several messages at once.
    fn send_all(&self, messages: Vec<Message>);
}

/// Stream slots over all connections. A slot is granted or refused at once; if none is free, the
/// longest resting stream is preempted. If none rests, a running stream is preempted in two cases:
/// for the machine's owner, who always has a slot; and for a caller whose claim is due and that has
/// less than its share, from the caller that has most. Callers are counted by
/// [party](Caller::party).
#[derive(Debug)]
pub(crate) struct Slots {
    /// Node that owns the machine.
    owner: NodeId,
    max: u32,
    /// Limits of one caller, over all its connections: streams, and waiting steps.
    max_streams_of_caller: u32,
    max_steps_of_caller: u32,
    events: Arc<HostEvents>,
    taken: Mutex<SlotState>,
    /// Budget of opens per caller.
    opens: Mutex<KeyedBuckets<NodeId>>,
    /// Notified when the last slot is freed.
    emptied: Notify,
}

#[derive(Debug, Default)]
struct SlotState {
    /// No more slots are granted: the host is leaving.
    closed: bool,
    all: u32,
    by_caller: HashMap<NodeId, Share>,
    /// State of the streams, by handle id.
    statuses: BTreeMap<u64, Arc<StreamStatus>>,
    last_id: u64,
    claims: Claims,
}

/// Rate and burst of opens per caller, over all its sessions. Four times as many as within one
/// session: each open costs the host something even if the stream is closed at once.
const OPENS_PER_SECOND: u64 = 256;
const OPENS: u64 = 1024;
/// Callers with a budget in memory.
const MAX_OPENERS: usize = 1024;

/// Result of a request for a slot.
enum SlotOutcome {
    Granted(Slot, Arc<AtomicU32>),
    /// Ask again once this stream has been preempted; `None` if it is already ending.
    Preempt(Option<Arc<StreamHandle>>),
}

/// State of a stream. Separate from its handle: code that chooses a stream under the lock of the
/// slots must never drop the last reference to a handle, since that frees a slot and takes the
/// lock.
#[derive(Debug)]
struct StreamStatus {
    caller: NodeId,
    handle: Weak<StreamHandle>,
    state: Mutex<StreamState>,
}

#[derive(Debug, Default)]
struct StreamState {
    /// Limit of positions.
    max_positions: u32,
    /// Waiting steps, and their rows.
    steps: u32,
    rows: u32,
    /// Time of the last event on it.
    active: Duration,
    /// Its caller has said that it needs nothing for now.
    rests: bool,
    /// At least one step has arrived.
    used: bool,
    /// The caller has been sent STREAM_OPENED.
    opened: bool,
    work: Usage,
}

impl StreamStatus {
    /// Time of the last event if the stream rests: its caller has said so, or has sent nothing for
    /// long.
    fn rests_since(&self, now: Duration) -> Option<Duration> {
        let state = self.state.lock();
        let after = match state.used {
            _ if state.rests => Duration::ZERO,
            true => IDLE_AFTER,
            // There is nothing to replay.
            false => UNUSED_AFTER,
        };
        let rests = state.steps == 0 && now.saturating_sub(state.active) >= after;
        rests.then_some(state.active)
    }
}

#[derive(Debug, Default)]
struct Share {
    streams: u32,
    /// Waiting steps over all its streams.
    steps: Arc<AtomicU32>,
}

/// A granted slot; freed when dropped.
#[derive(Debug)]
struct Slot {
    slots: Arc<Slots>,
    caller: NodeId,
    /// Id of the stream handle in the slot; never reused.
    id: u64,
}

impl Slots {
    pub(crate) fn new(owner: NodeId, limits: &ServeConfig, events: Arc<HostEvents>) -> Arc<Self> {
        Arc::new(Self {
            owner,
            max: limits.max_concurrent_streams,
            max_streams_of_caller: limits.max_streams_per_caller,
            max_steps_of_caller: limits.max_waiting_steps_per_caller,
            events,
            taken: Mutex::default(),
            opens: Mutex::new(KeyedBuckets::new(OPENS_PER_SECOND, OPENS, MAX_OPENERS)),
            emptied: Notify::new(),
        })
    }

    /// Refuses all further requests. Granted slots stay valid.
    pub(crate) fn close(&self) {
        self.taken.lock().closed = true;
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.taken.lock().closed
    }

    /// Resolves when no slot is in use. This is final only after [`Slots::close`]. For a single
    /// waiter.
    pub(crate) async fn emptied(&self) {
        while self.taken() > 0 {
            self.emptied.notified().await;
        }
    }

    /// Takes one open from the caller's budget. `false` if it is exhausted.
    pub(crate) fn may_open(&self, caller: NodeId, now: Duration) -> bool {
        self.opens.lock().take(&caller, Time::from(now))
    }

    pub(crate) fn taken(&self) -> u32 {
        self.taken.lock().all
    }

    /// Requests a slot for a stream of this caller, and the counter of its waiting steps.
    fn take(self: &Arc<Self>, caller: NodeId, now: Duration) -> Result<SlotOutcome, StreamFault> {
        let mut guard = self.taken.lock();
        let taken = &mut *guard;
        if taken.closed {
            return Err(StreamFault::ShuttingDown);
        }
        let (statuses, by_caller) = (&taken.statuses, &taken.by_caller);
        let resting = |of: Option<NodeId>| {
            let of_them = move |s: &StreamStatus| of.is_none_or(|caller| s.caller == caller);
            let all = statuses.iter().filter(move |(_, s)| of_them(s));
            all.filter_map(move |(id, s)| Some((s.rests_since(now)?, *id, s)))
        };
        let longest = |of| {
            let (.., status) = resting(of).min_by_key(|(since, id, _)| (*since, *id))?;
            Some(Weak::clone(&status.handle))
        };
        let streams = |caller: &NodeId| by_caller.get(caller).map_or(0, |share| share.streams);
        let max = self.max_streams_of_caller;
        let victim = if streams(&caller) >= max {
            Some(longest(Some(caller)).ok_or(StreamFault::StreamQuota { max })?)
        } else {
            let free = self.max.saturating_sub(taken.all) as usize;
            let running = |caller: &NodeId| {
                let resting = u32::try_from(resting(Some(*caller)).count());
                streams(caller).saturating_sub(resting.unwrap_or(u32::MAX))
            };
            // The owner's first stream is granted at once.
            let is_owed = caller == self.owner && running(&caller) == 0;
            let ahead = match is_owed {
                true => 0,
                false => taken.claims.ahead(caller, now, running),
            };
            if free.saturating_add(resting(None).count()) > ahead {
                if free == 0 { longest(None) } else { None }
            } else {
                // Preempt a running stream, if another caller runs more than it may keep.
                let callers = by_caller.len() + usize::from(!by_caller.contains_key(&caller));
                let share = self.max / u32::try_from(callers).unwrap_or(u32::MAX);
                let share = share.max(1);
                let is_due = ahead == 0 && taken.claims.is_due(caller, now);
                let keeps = match is_owed {
                    true => 0,
                    false if is_due && running(&caller) < share => share,
                    false => u32::MAX,
                };
                let theirs = statuses.iter().filter(|(_, s)| s.caller != caller);
                let theirs = theirs.filter(|(_, s)| running(&s.caller) > keeps);
                let least = theirs.max_by_key(|(id, s)| {
                    (running(&s.caller), Reverse(s.state.lock().work.rows), **id)
                });
                let Some((_, least)) = least else {
                    taken.claims.refused(caller, now);
                    return Err(StreamFault::StreamLimit { max: self.max });
                };
                Some(Weak::clone(&least.handle))
            }
        };
        if let Some(victim) = victim {
            // Dropping the last reference to a handle frees its slot, which takes the lock.
            drop(guard);
            return Ok(SlotOutcome::Preempt(victim.upgrade()));
        }
        taken.claims.granted(caller);
        let share = taken.by_caller.entry(caller).or_default();
        share.streams += 1;
        taken.all += 1;
        taken.last_id += 1;
        self.events.streams(taken.all);
        let slot = Slot {
            slots: Arc::clone(self),
            caller,
            id: taken.last_id,
        };
        Ok(SlotOutcome::Granted(slot, Arc::clone(&share.steps)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken.lock();
        taken.statuses.remove(&self.id);
        taken.all = taken.all.saturating_sub(1);
        self.slots.events.streams(taken.all);
        if let Some(share) = taken.by_caller.get_mut(&self.caller) {
            share.streams = share.streams.saturating_sub(1);
            // Steps of ended streams may still wait to be dropped: keep counting them.
            if share.streams == 0 && share.steps.load(Ordering::Acquire) == 0 {
                taken.by_caller.remove(&self.caller);
            }
        }
        if taken.all == 0 {
            self.slots.emptied.notify_one();
        }
    }
}

/// One epoch of a stream: the caller's `(stream, epoch)` on one connection.
///
/// ```text
///   take a slot                    end(): by the caller, the host or the connection
///  -------------> living ----------------------------------------------------------> ended
///                 slot held, steps accepted        slot free, steps dropped before compute
/// ```
///
/// Either side ends it, once, and then has to tell the other. The engine's sequence belongs to the
/// compute thread and is freed there.
pub(crate) struct StreamHandle {
    /// Unique on this host.
    pub(crate) id: u64,
    pub(crate) caller: Caller,
    /// Stream and epoch, as the caller numbers them.
    pub(crate) name: StreamClose,
    /// First and last layer, both inclusive.
    pub(crate) layers: (u32, u32),
    /// The caller is the host's own node.
    is_own: bool,
    pub(crate) sink: Arc<dyn ResponseSink>,
    events: Arc<HostEvents>,
    slot: Mutex<Option<Slot>>,
    ended: AtomicBool,
    status: Arc<StreamStatus>,
    /// Waiting steps over all streams of the caller, and their limit.
    of_caller: Arc<AtomicU32>,
    max_of_caller: u32,
}

impl StreamHandle {
    /// Takes a slot for a stream at `now`. If none is free, calls `give_way` with handles to
    /// preempt until one is; `give_way` has to end them.
    ///
    /// # Errors
    /// [`StreamFault::StreamLimit`] if no slot is free, [`StreamFault::StreamQuota`] at the
    /// caller's limit, or [`StreamFault::ShuttingDown`].
    pub(crate) fn begin(
        slots: &Arc<Slots>,
        caller: Caller,
        open: &StreamOpen,
        sink: Arc<dyn ResponseSink>,
        now: Duration,
        give_way: impl Fn(&Self),
    ) -> Result<Arc<Self>, StreamFault> {
        let (slot, of_caller) = loop {
            match slots.take(caller.party, now)? {
                SlotOutcome::Granted(slot, of_caller) => break (slot, of_caller),
                SlotOutcome::Preempt(handle) => handle.iter().for_each(|handle| give_way(handle)),
            }
        };
        Ok(Arc::new_cyclic(|handle| {
            let status = Arc::new(StreamStatus {
                caller: caller.party,
                handle: Weak::clone(handle),
                state: Mutex::new(StreamState {
                    max_positions: open.max_positions,
                    active: now,
                    // A fork has rows to replay.
                    used: open.fork.is_some(),
                    ..StreamState::default()
                }),
            });
            let enlisted = Arc::clone(&status);
            slots.taken.lock().statuses.insert(slot.id, enlisted);
            Self {
                id: slot.id,
                caller,
                name: StreamClose {
                    stream: open.stream,
                    epoch: open.epoch,
                },
                layers: (open.lo, open.hi),
                is_own: caller.node == slots.owner,
                sink,
                events: Arc::clone(&slots.events),
                slot: Mutex::new(Some(slot)),
                ended: AtomicBool::new(false),
                status,
                of_caller,
                max_of_caller: slots.max_steps_of_caller,
            }
        }))
    }

    fn state(&self) -> MutexGuard<'_, StreamState> {
        self.status.state.lock()
    }

    /// Number of layers that the host computes for another node; 0 for its own.
    pub(crate) fn given_layers(&self) -> u32 {
        let (lo, hi) = self.layers;
        match self.is_own {
            true => 0,
            false => hi.saturating_sub(lo).saturating_add(1),
        }
    }

    pub(crate) fn max_positions(&self) -> u32 {
        self.state().max_positions
    }

    /// Raises the limit of positions.
    pub(crate) fn grow(&self, max_positions: u32) {
        let mut state = self.state();
        state.max_positions = state.max_positions.max(max_positions);
    }

    /// Sends STREAM_OPENED to the caller.
    pub(crate) fn opened(&self) {
        self.state().opened = true;
        let StreamClose { stream, epoch } = self.name;
        self.events
            .stream_opened(self.caller, self.name, self.layers);
        self.sink
            .send(Message::StreamOpened(StreamOpened { stream, epoch }));
    }

    /// Tells the caller how many positions the stream has kept.
    pub(crate) fn truncated(&self, position: u32) {
        let StreamClose { stream, epoch } = self.name;
        self.sink.send(Message::Truncated(Truncated {
            stream,
            epoch,
            position,
        }));
    }

    /// Records the arrival of a step, or of a truncation that announces one (with 0 rows).
    pub(crate) fn asked(&self, rows: u32, now: Duration) {
        let mut state = self.state();
        (state.used, state.rests, state.active) = (true, false, now);
        state.work.rows += u64::from(rows);
    }

    /// Records the answer to a step.
    pub(crate) fn answered(&self, now: Duration) {
        let mut state = self.state();
        state.active = now;
        state.work.steps += 1;
    }

    /// Records that the caller needs nothing for now.
    pub(crate) fn rest(&self, now: Duration) {
        let mut state = self.state();
        (state.rests, state.active) = (true, now);
    }

    /// See [`StreamHandle::rest`].
    pub(crate) fn rests(&self) -> bool {
        self.state().rests
    }

    /// Ends the stream, calls `announce`, and then frees its slot, so that the next holder of the
    /// slot comes after the announcement. Does nothing and returns `false` if it had ended before;
    /// the code that ended it has then announced it.
    pub(crate) fn end(&self, announce: impl FnOnce()) -> bool {
        let mut slot = self.slot.lock();
        let first = !self.ended.swap(true, Ordering::AcqRel);
        if first {
            announce();
            drop(slot.take());
        }
        first
    }

    /// Sends the caller the fault that ended the stream, and the position of the step at fault. To
    /// be called by [`StreamHandle::end`].
    pub(crate) fn failed(&self, position: Option<u32>, fault: &StreamFault) {
        let StreamState { opened, work, .. } = *self.state();
        match opened {
            true => self
                .events
                .stream_failed(self.caller, self.name, fault, work),
            false => self.events.stream_refused(self.caller, self.name, fault),
        }
        let error = fault.message(self.name, position);
        self.sink.send(Message::StreamError(error));
    }

    /// Records an end that the caller knows of already. To be called by [`StreamHandle::end`].
    pub(crate) fn closed(&self, code: &'static str) {
        let work = self.state().work;
        self.events
            .stream_ended(self.caller, self.name, Code::new(code), work);
    }

    /// Returns whether the stream has ended. Waits for the announcement, so that a later answer to
    /// the caller comes after it.
    pub(crate) fn was_announced(&self) -> bool {
        self.has_ended() && {
            drop(self.slot.lock());
            true
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Reserves a place in the queue for a step: at most `max_steps` steps of the stream, at most
    /// as many rows as its limit of positions, and within the caller's limit of steps.
    ///
    /// # Errors
    /// [`StreamFault::QueueFull`], [`StreamFault::StepQuota`].
    pub(crate) fn ticket(
        self: &Arc<Self>,
        rows: u32,
        max_steps: u32,
    ) -> Result<Ticket, StreamFault> {
        let mut state = self.state();
        let total = state.rows.checked_add(rows);
        let total = total.filter(|total| *total <= state.max_positions && state.steps < max_steps);
        let total = total.ok_or(StreamFault::QueueFull)?;
        // The caller's other streams count here as well.
        if self.of_caller.fetch_add(1, Ordering::AcqRel) >= self.max_of_caller {
            self.of_caller.fetch_sub(1, Ordering::AcqRel);
            let max = self.max_of_caller;
            return Err(StreamFault::StepQuota { max });
        }
        state.steps += 1;
        state.rows = total;
        Ok(Ticket {
            handle: Arc::clone(self),
            rows,
        })
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamHandle")
            .field("id", &self.id)
            .field("name", &self.name)
            .field("ended", &self.has_ended())
            .finish_non_exhaustive()
    }
}

/// A step's place in the queue; freed when dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    handle: Arc<StreamHandle>,
    rows: u32,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.handle.of_caller.fetch_sub(1, Ordering::AcqRel);
        let mut state = self.handle.state();
        state.steps -= 1;
        state.rows -= self.rows;
    }
}
