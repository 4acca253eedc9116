//! Snapshots of the streams, and what the planner concludes from them.

use std::collections::BTreeSet;
use std::time::Duration;

use hearthnet_transport::NodeId;

use super::pages::{Holder, IDLE_AFTER, Pool};

/// Steps of at most this many rows count as decode: one row is a plain decode step, several are one
/// with speculated tokens to verify.
pub(super) const SHORT_ROWS: u32 = 8;

/// Kinds of steps and of batches. A name is a label of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum Kind {
    /// Short steps, or a batch of short steps only.
    Decode,
    /// Long steps, or a batch with a chunk of them.
    Prefill,
}

impl Kind {
    pub(super) fn of(head: Head) -> Self {
        Self::of_rows(head.rows)
    }

    pub(crate) fn of_rows(rows: u32) -> Self {
        match rows <= SHORT_ROWS {
            true => Self::Decode,
            false => Self::Prefill,
        }
    }
}

/// Snapshot of a stream for the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamSnapshot {
    pub(crate) stream: u64,
    pub(crate) caller: NodeId,
    /// First and last layer, both inclusive.
    pub(crate) layers: (u32, u32),
    /// Positions in its KV.
    pub(crate) length: u32,
    /// Time of the last event on it.
    pub(crate) active: Duration,
    /// Its caller has said that it needs nothing for now.
    pub(crate) rests: bool,
    /// The next step, if one waits.
    pub(crate) head: Option<Head>,
}

/// The step at the head of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// Rows of the whole step.
    pub(crate) rows: u32,
    /// Rows of it still to compute, at least 1.
    pub(crate) left: u32,
    /// Number of the batch that last served the stream.
    pub(crate) served: u64,
    pub(crate) arrived: Duration,
}

impl StreamSnapshot {
    fn holder(&self, pool: &Pool, now: Duration) -> Holder {
        Holder {
            stream: self.stream,
            caller: self.caller,
            length: self.length,
            pages: pool.pages(self.length),
            active: self.active,
            idle: self.head.is_none()
                && (self.rests || now.saturating_sub(self.active) >= IDLE_AFTER),
        }
    }
}

/// Page use of all streams.
pub(crate) fn holders(streams: &[StreamSnapshot], pool: &Pool, now: Duration) -> Vec<Holder> {
    streams.iter().map(|view| view.holder(pool, now)).collect()
}

/// A stream with an event within this time is expected to send its next step in a moment.
const COMES_BACK: Duration = Duration::from_millis(20);

/// Returns whether a stream whose last event was at `active` is expected back in a moment.
pub(super) fn comes_back(active: Duration, now: Duration) -> bool {
    now <= active.saturating_add(COMES_BACK)
}

/// Returns whether a chunk takes the waiting short steps along. They must be of other callers, or
/// the chunk would delay its own for as long as it may. All must use the same layers, or nothing is
/// gained.
pub(crate) fn piggybacks(streams: &[StreamSnapshot], others_decode: bool) -> bool {
    let heads = || streams.iter().filter(|view| view.head.is_some());
    let short =
        |view: &StreamSnapshot| view.head.is_some_and(|head| Kind::of(head) == Kind::Decode);
    let mut layers = heads().map(|view| view.layers);
    let first = layers.next();
    others_decode && heads().any(short) && layers.all(|one| Some(one) == first)
}

/// Returns whether a caller decodes beside the prompts of others: a short step waits or is expected
/// in a moment, and a long step of another caller waits.
pub(crate) fn others_decode(streams: &[StreamSnapshot], now: Duration) -> bool {
    let prompts = || {
        let long = |view: &&StreamSnapshot| {
            view.head
                .is_some_and(|head| Kind::of(head) == Kind::Prefill)
        };
        streams.iter().filter(long)
    };
    let mut decoding = streams.iter().filter(|view| decodes(view, now, COMES_BACK));
    decoding.any(|one| prompts().any(|view| view.caller != one.caller))
}

/// A caller whose stream was active within this time still decodes: it may be at other hosts.
const DECODES_ON: Duration = Duration::from_secs(1);

/// Number of callers that decode: a short step waits, or the next is on its way.
pub(crate) fn decoders(streams: &[StreamSnapshot], now: Duration) -> u32 {
    let decoding = streams.iter().filter(|view| decodes(view, now, DECODES_ON));
    let callers: BTreeSet<NodeId> = decoding.map(|view| view.caller).collect();
    u32::try_from(callers.len()).unwrap_or(u32::MAX)
}

fn decodes(view: &StreamSnapshot, now: Duration, within: Duration) -> bool {
    match view.head {
        Some(head) => Kind::of(head) == Kind::Decode,
        None => view.length > 0 && !view.rests && now <= view.active.saturating_add(within),
    }
}

/// Rows of the waiting short steps.
pub(crate) fn short_rows(streams: &[StreamSnapshot]) -> u32 {
    let heads = streams.iter().filter_map(|view| view.head);
    let short = heads.filter(|head| Kind::of(*head) == Kind::Decode);
    short.map(|head| head.left).sum()
}
