//! One life of a stream, as the connection and the compute thread share it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearthnet_transport::{Message, PeerKey, StreamClose, StreamOpen};
use metrics::gauge;
use tokio::sync::Notify;

use crate::fault::StreamFault;

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

/// The places for streams, over all connections. A place is taken or refused at once.
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
    by_caller: HashMap<PeerKey, Share>,
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
    caller: PeerKey,
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
        lock(&self.taken).closed = true;
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.taken).closed
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
        lock(&self.taken).all
    }

    /// A place for a stream of this caller, and the count of its waiting steps.
    fn take(self: &Arc<Self>, caller: PeerKey) -> Result<(Slot, Arc<AtomicU32>), StreamFault> {
        let mut taken = lock(&self.taken);
        if taken.closed {
            return Err(StreamFault::ShuttingDown);
        }
        if taken.all >= self.max {
            return Err(StreamFault::StreamLimit { max: self.max });
        }
        let max = self.quota.streams;
        let of_caller = taken.by_caller.get(&caller);
        if of_caller.is_some_and(|share| share.streams >= max) {
            return Err(StreamFault::StreamQuota { max });
        }
        let share = taken.by_caller.entry(caller).or_default();
        share.streams += 1;
        let steps = Arc::clone(&share.steps);
        taken.all += 1;
        gauge!("hearthnet_shard_streams").set(taken.all);
        let slots = Arc::clone(self);
        Ok((Slot { slots, caller }, steps))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = lock(&self.slots.taken);
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
pub(crate) struct Life {
    /// Unique in this process.
    pub(crate) id: u64,
    pub(crate) caller: PeerKey,
    pub(crate) stream: u32,
    pub(crate) epoch: u32,
    /// First and last layer that its rows run through.
    pub(crate) layers: (u32, u32),
    /// Most positions that the stream may hold.
    pub(crate) max_positions: u32,
    pub(crate) outlet: Arc<dyn Outlet>,
    slot: Mutex<Option<Slot>>,
    ended: AtomicBool,
    steps: AtomicU32,
    rows: AtomicU32,
    /// Steps of all streams of the caller, and how many those may be.
    of_caller: Arc<AtomicU32>,
    max_of_caller: u32,
}

impl Life {
    /// Takes a place for a stream.
    ///
    /// # Errors
    /// [`StreamFault::StreamLimit`] if none is free, [`StreamFault::StreamQuota`] if the caller has
    /// all that it may; [`StreamFault::ShuttingDown`].
    pub(crate) fn begin(
        slots: &Arc<Slots>,
        caller: PeerKey,
        id: u64,
        open: &StreamOpen,
        outlet: Arc<dyn Outlet>,
    ) -> Result<Arc<Self>, StreamFault> {
        let (slot, of_caller) = slots.take(caller)?;
        Ok(Arc::new(Self {
            id,
            caller,
            stream: open.stream,
            epoch: open.epoch,
            layers: (open.lo, open.hi),
            max_positions: open.max_positions,
            outlet,
            slot: Mutex::new(Some(slot)),
            ended: AtomicBool::new(false),
            steps: AtomicU32::new(0),
            rows: AtomicU32::new(0),
            of_caller,
            max_of_caller: slots.quota.steps,
        }))
    }

    /// What the caller calls this life.
    pub(crate) fn name(&self) -> StreamClose {
        StreamClose {
            stream: self.stream,
            epoch: self.epoch,
        }
    }

    /// Ends the life, calls `announce`, and then frees its place, so that whoever takes the
    /// place comes after what was announced. `false`, and nothing done, if it had ended before.
    pub(crate) fn end(&self, announce: impl FnOnce()) -> bool {
        let first = !self.ended.swap(true, Ordering::AcqRel);
        if first {
            announce();
            drop(lock(&self.slot).take());
        }
        first
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
        let steps = self.steps.load(Ordering::Acquire);
        let waiting = self.rows.load(Ordering::Acquire);
        let total = waiting.checked_add(rows).ok_or(StreamFault::QueueFull)?;
        if steps >= max_steps || total > self.max_positions {
            return Err(StreamFault::QueueFull);
        }
        // The caller's other connections add to this as well.
        if self.of_caller.fetch_add(1, Ordering::AcqRel) >= self.max_of_caller {
            self.of_caller.fetch_sub(1, Ordering::AcqRel);
            let max = self.max_of_caller;
            return Err(StreamFault::StepQuota { max });
        }
        self.steps.fetch_add(1, Ordering::AcqRel);
        self.rows.fetch_add(rows, Ordering::AcqRel);
        Ok(Ticket {
            life: Arc::clone(self),
            rows,
        })
    }
}

impl fmt::Debug for Life {
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
    life: Arc<Life>,
    rows: u32,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.life.steps.fetch_sub(1, Ordering::AcqRel);
        self.life.of_caller.fetch_sub(1, Ordering::AcqRel);
        self.life.rows.fetch_sub(self.rows, Ordering::AcqRel);
    }
}

/// Locks, also after a panic elsewhere: every critical section here leaves its data whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
