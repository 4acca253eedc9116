//! One life of a stream, as the connection and the compute thread share it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hearthnet_transport::{
    Code, KeyedBuckets, Message, NodeId, StreamClose, StreamOpen, StreamOpened, Time,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::claims::Claims;
use crate::events::{Caller, HostEvents, Work};
use crate::fault::StreamFault;
use crate::plan::{IDLE_AFTER, UNUSED_AFTER};

/// Where the answers of a connection's streams go. Never blocks.
pub(crate) trait Outlet: Send + Sync {
    /// Sends a message to the peer, in order for each stream.
    fn send(&self, message: Message) {
        self.send_all(vec![message]);
    }

    /// Sends several messages in one piece.
    fn send_all(&self, messages: Vec<Message>);
}

/// What one caller may have at once, over all its connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quota {
    /// Streams.
    pub(crate) streams: u32,
    /// Steps that wait.
    pub(crate) steps: u32,
}

/// The places for streams, over all connections. A place is taken or refused at once; where none is
/// free, a stream that rests gives its own up. If none rests, a running one has to go: for the owner
/// of the machine, who always has a place on it; and for whoever has waited for long and has less than
/// its share, from the caller that has most. Callers are counted as [parties](Caller::party).
#[derive(Debug)]
pub(crate) struct Slots {
    /// Who owns the machine.
    owner: NodeId,
    max: u32,
    quota: Quota,
    events: Arc<HostEvents>,
    taken: Mutex<Taken>,
    /// What each caller may yet open.
    opens: Mutex<KeyedBuckets<NodeId>>,
    /// The last place was given back.
    emptied: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    /// No more are given away: the host leaves.
    closed: bool,
    all: u32,
    by_caller: HashMap<NodeId, Share>,
    /// How the streams stand, by the id of their life.
    standing: BTreeMap<u64, Arc<Standing>>,
    last_id: u64,
    claims: Claims,
}

/// Streams that a caller may open over time, and at once, over all its sessions, which begin with a count of
/// their own each: four times as many as in one, for each costs the host something even if it is closed at
/// once.
const OPENS_PER_SECOND: u64 = 256;
const OPENS: u64 = 1024;
/// Callers whose opens are remembered.
const MAX_OPENERS: usize = 1024;

/// What becomes of a request for a place.
enum Asked {
    Granted(Slot, Arc<AtomicU32>),
    /// Once this life has given way; `None` if it is doing so.
    Instead(Option<Arc<StreamHandle>>),
}

/// How a stream stands. Apart from its handle, so that whoever chooses among them under the lock of
/// the places never holds the last reference to one: its end gives a place back.
#[derive(Debug)]
struct Standing {
    caller: NodeId,
    handle: Weak<StreamHandle>,
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    /// Most positions that the stream may hold.
    max_positions: u32,
    /// Steps that wait, and their rows.
    steps: u32,
    rows: u32,
    /// When something last happened on it.
    active: Duration,
    /// Its caller has said that it asks nothing for now.
    rests: bool,
    /// A step has come.
    used: bool,
    /// Its caller was told that it is open.
    opened: bool,
    work: Work,
}

impl Standing {
    /// Since when it has been resting, if it does: its caller has said so, or has long asked
    /// nothing.
    fn rests_since(&self, now: Duration) -> Option<Duration> {
        let state = self.now.lock();
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

/// What one caller has of it.
#[derive(Debug, Default)]
struct Share {
    streams: u32,
    /// Steps that wait, of all its streams.
    steps: Arc<AtomicU32>,
}

/// A taken place; given back when dropped.
#[derive(Debug)]
struct Slot {
    slots: Arc<Slots>,
    caller: NodeId,
    /// Of the life that has it; used once.
    id: u64,
}

impl Slots {
    pub(crate) fn new(owner: NodeId, max: u32, quota: Quota, events: Arc<HostEvents>) -> Arc<Self> {
        Arc::new(Self {
            owner,
            max,
            quota,
            events,
            taken: Mutex::default(),
            opens: Mutex::new(KeyedBuckets::new(OPENS_PER_SECOND, OPENS, MAX_OPENERS)),
            emptied: Notify::new(),
        })
    }

    /// Gives no place away from here on. Those that are taken stay so.
    pub(crate) fn close(&self) {
        self.taken.lock().closed = true;
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.taken.lock().closed
    }

    /// Resolves when no place is taken, which only after [`Slots::close`] means that it stays so.
    /// For one to wait.
    pub(crate) async fn emptied(&self) {
        while self.taken() > 0 {
            self.emptied.notified().await;
        }
    }

    /// Whether a caller may open one more stream by now, which then counts.
    pub(crate) fn may_open(&self, caller: NodeId, now: Duration) -> bool {
        self.opens.lock().take(&caller, Time::from(now))
    }

    /// Streams open now.
    pub(crate) fn taken(&self) -> u32 {
        self.taken.lock().all
    }

    /// A place for a stream of this caller, and the count of the caller's waiting steps.
    fn take(self: &Arc<Self>, caller: NodeId, now: Duration) -> Result<Asked, StreamFault> {
        let mut guard = self.taken.lock();
        let taken = &mut *guard;
        if taken.closed {
            return Err(StreamFault::ShuttingDown);
        }
        let (standing, by_caller) = (&taken.standing, &taken.by_caller);
        let resting = |of: Option<NodeId>| {
            let of_them = move |s: &Standing| of.is_none_or(|caller| s.caller == caller);
            let all = standing.iter().filter(move |(_, s)| of_them(s));
            all.filter_map(move |(id, s)| Some((s.rests_since(now)?, *id, s)))
        };
        let longest = |of| {
            let (.., standing) = resting(of).min_by_key(|(since, id, _)| (*since, *id))?;
            Some(Weak::clone(&standing.handle))
        };
        let streams = |caller: &NodeId| by_caller.get(caller).map_or(0, |share| share.streams);
        let max = self.quota.streams;
        let victim = if streams(&caller) >= max {
            Some(longest(Some(caller)).ok_or(StreamFault::StreamQuota { max })?)
        } else {
            let free = self.max.saturating_sub(taken.all) as usize;
            let running = |caller: &NodeId| {
                let resting = u32::try_from(resting(Some(*caller)).count());
                streams(caller).saturating_sub(resting.unwrap_or(u32::MAX))
            };
            // The owner's first stream waits for nobody.
            let is_owed = caller == self.owner && running(&caller) == 0;
            let ahead = match is_owed {
                true => 0,
                false => taken.claims.ahead(caller, now, running),
            };
            if free.saturating_add(resting(None).count()) > ahead {
                if free == 0 { longest(None) } else { None }
            } else {
                // A running one has to go, if there is a caller that runs more than it keeps then.
                let callers = by_caller.len() + usize::from(!by_caller.contains_key(&caller));
                let share = self.max / u32::try_from(callers).unwrap_or(u32::MAX);
                let share = share.max(1);
                let is_due = ahead == 0 && taken.claims.is_due(caller, now);
                let keeps = match is_owed {
                    true => 0,
                    false if is_due && running(&caller) < share => share,
                    false => u32::MAX,
                };
                let theirs = standing.iter().filter(|(_, s)| s.caller != caller);
                let theirs = theirs.filter(|(_, s)| running(&s.caller) > keeps);
                let least = theirs.max_by_key(|(id, s)| {
                    (running(&s.caller), Reverse(s.now.lock().work.rows), **id)
                });
                let Some((_, least)) = least else {
                    taken.claims.refused(caller, now);
                    return Err(StreamFault::StreamLimit { max: self.max });
                };
                Some(Weak::clone(&least.handle))
            }
        };
        if let Some(victim) = victim {
            // A life that ends here gives its place back, and needs the lock for that.
            drop(guard);
            return Ok(Asked::Instead(victim.upgrade()));
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
        Ok(Asked::Granted(slot, Arc::clone(&share.steps)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken.lock();
        taken.standing.remove(&self.id);
        taken.all = taken.all.saturating_sub(1);
        self.slots.events.streams(taken.all);
        if let Some(share) = taken.by_caller.get_mut(&self.caller) {
            share.streams = share.streams.saturating_sub(1);
            // Steps of streams that have ended may wait to be dropped: they count on.
            if share.streams == 0 && share.steps.load(Ordering::Acquire) == 0 {
                taken.by_caller.remove(&self.caller);
            }
        }
        if taken.all == 0 {
            self.slots.emptied.notify_one();
        }
    }
}

/// One life of a stream: the caller's `(stream, epoch)` on one connection.
///
/// ```text
///   take a slot                    end(): by the caller, the host or the connection
///  -------------> living ----------------------------------------------------------> ended
///                 slot held, steps accepted        slot free, steps dropped before compute
/// ```
///
/// Either side may end it, once; whoever did has to tell the other. The engine's
/// sequence is the compute thread's and is freed there.
pub(crate) struct StreamHandle {
    /// Unique on this host.
    pub(crate) id: u64,
    pub(crate) caller: Caller,
    /// What the caller calls this life.
    pub(crate) name: StreamClose,
    /// First and last layer that its rows run through.
    pub(crate) layers: (u32, u32),
    pub(crate) outlet: Arc<dyn Outlet>,
    events: Arc<HostEvents>,
    slot: Mutex<Option<Slot>>,
    ended: AtomicBool,
    standing: Arc<Standing>,
    /// Steps of all streams of the caller, and how many those may be.
    of_caller: Arc<AtomicU32>,
    max_of_caller: u32,
}

impl StreamHandle {
    /// Takes a place for a stream at `now`. Where none is free, `give_way` is called with lives
    /// that rest, until one is; it has to end them.
    ///
    /// # Errors
    /// [`StreamFault::StreamLimit`] if none is free, [`StreamFault::StreamQuota`] if the caller has
    /// all that it may; [`StreamFault::ShuttingDown`].
    pub(crate) fn begin(
        slots: &Arc<Slots>,
        caller: Caller,
        open: &StreamOpen,
        outlet: Arc<dyn Outlet>,
        now: Duration,
        give_way: impl Fn(&Self),
    ) -> Result<Arc<Self>, StreamFault> {
        let (slot, of_caller) = loop {
            match slots.take(caller.party, now)? {
                Asked::Granted(slot, of_caller) => break (slot, of_caller),
                Asked::Instead(handle) => handle.iter().for_each(|handle| give_way(handle)),
            }
        };
        Ok(Arc::new_cyclic(|handle| {
            let standing = Arc::new(Standing {
                caller: caller.party,
                handle: Weak::clone(handle),
                now: Mutex::new(Now {
                    max_positions: open.max_positions,
                    steps: 0,
                    rows: 0,
                    active: now,
                    rests: false,
                    used: false,
                    opened: false,
                    work: Work::default(),
                }),
            });
            let enlisted = Arc::clone(&standing);
            slots.taken.lock().standing.insert(slot.id, enlisted);
            Self {
                id: slot.id,
                caller,
                name: StreamClose {
                    stream: open.stream,
                    epoch: open.epoch,
                },
                layers: (open.lo, open.hi),
                outlet,
                events: Arc::clone(&slots.events),
                slot: Mutex::new(Some(slot)),
                ended: AtomicBool::new(false),
                standing,
                of_caller,
                max_of_caller: slots.quota.steps,
            }
        }))
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.standing.now.lock()
    }

    /// Most positions that the stream may hold.
    pub(crate) fn max_positions(&self) -> u32 {
        self.now().max_positions
    }

    /// Lets the stream hold more positions.
    pub(crate) fn grow(&self, max_positions: u32) {
        let mut state = self.now();
        state.max_positions = state.max_positions.max(max_positions);
    }

    /// Tells the caller that the stream is open, for as many positions as it asked for.
    pub(crate) fn opened(&self) {
        self.now().opened = true;
        let StreamClose { stream, epoch } = self.name;
        self.events
            .stream_opened(self.caller, self.name, self.layers);
        self.outlet
            .send(Message::StreamOpened(StreamOpened { stream, epoch }));
    }

    /// A step of so many rows has come.
    pub(crate) fn asked(&self, rows: u32, now: Duration) {
        let mut state = self.now();
        (state.used, state.rests, state.active) = (true, false, now);
        state.work.rows += u64::from(rows);
    }

    /// A step was answered.
    pub(crate) fn answered(&self, now: Duration) {
        let mut state = self.now();
        state.active = now;
        state.work.steps += 1;
    }

    /// Its caller asks nothing of it for now.
    pub(crate) fn rest(&self, now: Duration) {
        let mut state = self.now();
        (state.rests, state.active) = (true, now);
    }

    /// Whether its caller has said that it asks nothing for now.
    pub(crate) fn rests(&self) -> bool {
        self.now().rests
    }

    /// Ends the life, calls `announce`, and then frees its place, so that whoever takes the
    /// place comes after what was announced. `false`, and nothing done, if it had ended before;
    /// whoever ended it has then announced it.
    pub(crate) fn end(&self, announce: impl FnOnce()) -> bool {
        let mut slot = self.slot.lock();
        let first = !self.ended.swap(true, Ordering::AcqRel);
        if first {
            announce();
            drop(slot.take());
        }
        first
    }

    /// Tells the caller why the life is over, for [`StreamHandle::end`] to announce, and at which
    /// of its steps.
    pub(crate) fn failed(&self, position: Option<u32>, fault: &StreamFault) {
        let Now { opened, work, .. } = *self.now();
        match opened {
            true => self
                .events
                .stream_failed(self.caller, self.name, fault, work),
            false => self.events.stream_refused(self.caller, self.name, fault),
        }
        let error = fault.message(self.name, position);
        self.outlet.send(Message::StreamError(error));
    }

    /// Its caller knows already that the life is over: for [`StreamHandle::end`] to announce.
    pub(crate) fn closed(&self, code: &'static str) {
        let work = self.now().work;
        self.events
            .stream_ended(self.caller, self.name, Code::new(code), work);
    }

    /// Whether the life has ended, and what ended it was announced: for whoever answers the caller
    /// next.
    pub(crate) fn was_announced(&self) -> bool {
        self.has_ended() && {
            drop(self.slot.lock());
            true
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Lets a step wait, if the stream has room for it: at most `max_steps` steps, and
    /// not more rows than the stream may hold positions; and the caller as well.
    ///
    /// # Errors
    /// [`StreamFault::QueueFull`], [`StreamFault::StepQuota`].
    pub(crate) fn ticket(
        self: &Arc<Self>,
        rows: u32,
        max_steps: u32,
    ) -> Result<Ticket, StreamFault> {
        let mut state = self.now();
        let total = state.rows.checked_add(rows);
        let total = total.filter(|total| *total <= state.max_positions && state.steps < max_steps);
        let total = total.ok_or(StreamFault::QueueFull)?;
        // The caller's other streams add to this as well.
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

/// The right of one step to wait; the room is free again when dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    handle: Arc<StreamHandle>,
    rows: u32,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.handle.of_caller.fetch_sub(1, Ordering::AcqRel);
        let mut state = self.handle.now();
        state.steps -= 1;
        state.rows -= self.rows;
    }
}
