//! One life of a stream, as the connection and the compute thread share it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hearthnet_transport::{Message, NodeId, StreamClose, StreamOpen};
use metrics::gauge;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::claims::Claims;
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
/// free, a stream that rests gives its own up.
#[derive(Debug)]
pub(crate) struct Slots {
    max: u32,
    quota: Quota,
    taken: Mutex<Taken>,
    /// The last place was given back.
    emptied: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    /// No more are given away: the host leaves.
    closed: bool,
    all: u32,
    by_caller: HashMap<NodeId, Share>,
    /// How the streams stand, by number of their life.
    standing: BTreeMap<u64, Arc<Standing>>,
    claims: Claims,
}

/// What becomes of a request for a place.
enum Asked {
    Granted(Slot, Arc<AtomicU32>),
    /// Once this life has given way; `None` if it is doing so.
    Instead(Option<Arc<StreamHandle>>),
}

/// How a stream stands, as far as its place is concerned.
#[derive(Debug)]
struct Standing {
    caller: NodeId,
    handle: Weak<StreamHandle>,
    /// Steps that wait.
    steps: AtomicU32,
    /// When something last happened on it, in microseconds of the host's clock.
    active_us: AtomicU64,
    /// Its caller has said that it asks nothing for now.
    rests: AtomicBool,
    /// A step has come.
    used: AtomicBool,
}

impl Standing {
    fn active(&self, now: Duration) {
        let us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        self.active_us.fetch_max(us, Ordering::AcqRel);
    }

    /// Since when it has been resting, if it does: its caller has said so, or has long asked
    /// nothing.
    fn rests_since(&self, now: Duration) -> Option<Duration> {
        if self.steps.load(Ordering::Acquire) > 0 {
            return None;
        }
        let since = Duration::from_micros(self.active_us.load(Ordering::Acquire));
        let after = match self.used.load(Ordering::Acquire) {
            _ if self.rests.load(Ordering::Acquire) => Duration::ZERO,
            true => IDLE_AFTER,
            // There is nothing to replay.
            false => UNUSED_AFTER,
        };
        (now.saturating_sub(since) >= after).then_some(since)
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
    handle: u64,
}

impl Slots {
    pub(crate) fn new(max: u32, quota: Quota) -> Arc<Self> {
        Arc::new(Self {
            max,
            quota,
            taken: Mutex::default(),
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

    /// Streams open now.
    pub(crate) fn taken(&self) -> u32 {
        self.taken.lock().all
    }

    /// A place for the stream `handle` of this caller, and the count of its waiting steps.
    fn take(
        self: &Arc<Self>,
        caller: NodeId,
        handle: u64,
        now: Duration,
    ) -> Result<Asked, StreamFault> {
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
            let ahead = taken.claims.ahead(caller, now, running);
            if free.saturating_add(resting(None).count()) <= ahead {
                taken.claims.refused(caller, now);
                return Err(StreamFault::StreamLimit { max: self.max });
            }
            if free == 0 { longest(None) } else { None }
        };
        if let Some(victim) = victim {
            // A life that ends here gives its place back, and needs the lock for that.
            drop(guard);
            return Ok(Asked::Instead(victim.upgrade()));
        }
        taken.claims.granted(caller);
        let share = taken.by_caller.entry(caller).or_default();
        share.streams += 1;
        let steps = Arc::clone(&share.steps);
        taken.all += 1;
        gauge!("hearthnet_shard_streams").set(taken.all);
        let slots = Arc::clone(self);
        let slot = Slot {
            slots,
            caller,
            handle,
        };
        Ok(Asked::Granted(slot, steps))
    }

    fn enlist(&self, id: u64, standing: &Arc<Standing>) {
        self.taken.lock().standing.insert(id, Arc::clone(standing));
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken.lock();
        taken.standing.remove(&self.handle);
        taken.all = taken.all.saturating_sub(1);
        gauge!("hearthnet_shard_streams").set(taken.all);
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
    /// Unique in this process.
    pub(crate) id: u64,
    pub(crate) caller: NodeId,
    pub(crate) stream: u32,
    pub(crate) epoch: u32,
    /// First and last layer that its rows run through.
    pub(crate) layers: (u32, u32),
    /// Most positions that the stream may hold.
    max_positions: AtomicU32,
    pub(crate) outlet: Arc<dyn Outlet>,
    slot: Mutex<Option<Slot>>,
    ended: AtomicBool,
    standing: Arc<Standing>,
    rows: AtomicU32,
    /// Steps of all streams of the caller, and how many those may be.
    of_caller: Arc<AtomicU32>,
    max_of_caller: u32,
}

/// A stream that is to begin.
pub(crate) struct NewStream<'a> {
    pub(crate) caller: NodeId,
    /// Unique in this process.
    pub(crate) id: u64,
    pub(crate) open: &'a StreamOpen,
    pub(crate) outlet: Arc<dyn Outlet>,
    pub(crate) now: Duration,
}

impl StreamHandle {
    /// Takes a place for a stream. Where none is free, `give_way` is called with lives that rest,
    /// until one is; it has to end them.
    ///
    /// # Errors
    /// [`StreamFault::StreamLimit`] if none is free, [`StreamFault::StreamQuota`] if the caller has
    /// all that it may; [`StreamFault::ShuttingDown`].
    pub(crate) fn begin(
        slots: &Arc<Slots>,
        new_stream: NewStream<'_>,
        give_way: impl Fn(&Self),
    ) -> Result<Arc<Self>, StreamFault> {
        let NewStream {
            caller,
            id,
            open,
            outlet,
            now,
        } = new_stream;
        let (slot, of_caller) = loop {
            match slots.take(caller, id, now)? {
                Asked::Granted(slot, of_caller) => break (slot, of_caller),
                Asked::Instead(handle) => handle.iter().for_each(|handle| give_way(handle)),
            }
        };
        Ok(Arc::new_cyclic(|handle| {
            let standing = Arc::new(Standing {
                caller,
                handle: Weak::clone(handle),
                steps: AtomicU32::new(0),
                active_us: AtomicU64::new(0),
                rests: AtomicBool::new(false),
                used: AtomicBool::new(false),
            });
            standing.active(now);
            slots.enlist(id, &standing);
            Self {
                id,
                caller,
                stream: open.stream,
                epoch: open.epoch,
                layers: (open.lo, open.hi),
                max_positions: AtomicU32::new(open.max_positions),
                outlet,
                slot: Mutex::new(Some(slot)),
                ended: AtomicBool::new(false),
                standing,
                rows: AtomicU32::new(0),
                of_caller,
                max_of_caller: slots.quota.steps,
            }
        }))
    }

    /// Most positions that the stream may hold.
    pub(crate) fn max_positions(&self) -> u32 {
        self.max_positions.load(Ordering::Acquire)
    }

    /// Lets the stream hold more positions.
    pub(crate) fn grow(&self, max_positions: u32) {
        self.max_positions
            .fetch_max(max_positions, Ordering::AcqRel);
    }

    /// A step has come.
    pub(crate) fn asked(&self, now: Duration) {
        self.standing.used.store(true, Ordering::Release);
        self.standing.rests.store(false, Ordering::Release);
        self.standing.active(now);
    }

    /// A step was answered.
    pub(crate) fn answered(&self, now: Duration) {
        self.standing.active(now);
    }

    /// Its caller asks nothing of it for now.
    pub(crate) fn rest(&self, now: Duration) {
        self.standing.rests.store(true, Ordering::Release);
        self.standing.active(now);
    }

    /// Whether its caller has said that it asks nothing for now.
    pub(crate) fn rests(&self) -> bool {
        self.standing.rests.load(Ordering::Acquire)
    }

    /// What the caller calls this life.
    pub(crate) fn name(&self) -> StreamClose {
        StreamClose {
            stream: self.stream,
            epoch: self.epoch,
        }
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
        // Only the connection's task adds, so that reading first is no race: the
        // compute thread can only make room in between.
        let steps = self.standing.steps.load(Ordering::Acquire);
        let waiting = self.rows.load(Ordering::Acquire);
        let total = waiting.checked_add(rows).ok_or(StreamFault::QueueFull)?;
        if steps >= max_steps || total > self.max_positions() {
            return Err(StreamFault::QueueFull);
        }
        // The caller's other connections add to this as well.
        if self.of_caller.fetch_add(1, Ordering::AcqRel) >= self.max_of_caller {
            self.of_caller.fetch_sub(1, Ordering::AcqRel);
            let max = self.max_of_caller;
            return Err(StreamFault::StepQuota { max });
        }
        self.standing.steps.fetch_add(1, Ordering::AcqRel);
        self.rows.fetch_add(rows, Ordering::AcqRel);
        Ok(Ticket {
            handle: Arc::clone(self),
            rows,
        })
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Life")
            .field("id", &self.id)
            .field("stream", &self.stream)
            .field("epoch", &self.epoch)
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
        self.handle.standing.steps.fetch_sub(1, Ordering::AcqRel);
        self.handle.of_caller.fetch_sub(1, Ordering::AcqRel);
        self.handle.rows.fetch_sub(self.rows, Ordering::AcqRel);
    }
}
