//! The flight recorder: recent events of this process, in memory.
//!
//! ```
//! use hearthnet_bus::flight::{self, Event, PipelineId};
//!
//! let pipeline = PipelineId::draw();
//! flight::record(Event::Aborted { pipeline, code: "shard_unavailable".into() });
//! ```
//!
//! There is one ring per process, bounded in events and bytes; the oldest are dropped first. The
//! types make sure that it holds only codes, ids and numbers: no field of an [`Event`] can hold a
//! user's text, a token or a row. `specs/flight-record.md` is the normative text. It limits the
//! readers, because the record shows which nodes worked together, and when.
//!
//! | concept | where |
//! |---|---|
//! | events | [`Event`], `event.rs` |
//! | ids and names in events | `ids.rs` |
//! | the ring | `ring.rs` (pure) |
//! | reading another node's record | `share.rs` |
//! | merging several nodes' records | `timeline.rs` (pure) |
//!
//! Recording locks the ring while the event is moved in. Events are as frequent as streams and
//! sessions, not as steps.

mod event;
mod ids;
mod ring;
mod share;
mod timeline;

#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use hearthnet_platform::machine::monotonic;
use hearthnet_transport::{CloseCode, RefusedConnection};
use parking_lot::Mutex;

use crate::{NodeId, now_ms};

pub use event::{Class, Event, StreamTrace};
pub use ids::{MAX_NAME_BYTES, Name, PipelineId, SessionId};
pub use ring::{MAX_PAGE_BYTES, MAX_PAGE_RECORDS, Page, Record, Ring, Stamp};
pub use share::{Answer, Readers, params};
pub use timeline::{Clock, Entry, merge, of_pipeline};

static RING: LazyLock<Mutex<Ring>> = LazyLock::new(|| {
    let mut run = [0; 8];
    // Without randomness two runs have the same number; the clock still distinguishes them.
    let _ = getrandom::fill(&mut run);
    Mutex::new(Ring::new(u64::from_le_bytes(run), now()))
});

/// Records an event with the current time.
pub fn record(event: Event) {
    let mut ring = RING.lock();
    // Read under the lock, so that times are in the order of the numbers.
    ring.push(now(), event);
}

/// Records a key that was refused. The peer may not have proved that it owns the key.
pub fn peer_refused(key: NodeId, code: CloseCode) {
    record(Event::PeerRefused {
        peer: key,
        code: code.into(),
    });
}

/// Records a connection that ended before a session, except those of a [refused key](peer_refused).
pub fn connection_refused(why: &RefusedConnection) {
    let told = match why {
        RefusedConnection::Path { code, .. } => *code == CloseCode::ConnectionLimit,
        RefusedConnection::Closed(closed) => closed.code == CloseCode::ConnectionLimit,
        RefusedConnection::Tls { cause, .. } => *cause != "not_admitted",
        _ => true,
    };
    if told {
        record(Event::ConnectionRefused { code: why.code() });
    }
}

/// A page of the records from number `from` on that happened at or after `since_unix_ms`. With
/// `caller`, only events that [concern](Event::concerns) it.
pub fn page(from: u64, since_unix_ms: u64, caller: Option<&NodeId>) -> Page {
    let at = now();
    RING.lock().page(at, from, since_unix_ms, caller)
}

/// The current time, by both clocks.
pub fn now() -> Stamp {
    Stamp {
        unix_ms: now_ms(),
        // Includes time in suspend, so that ages of earlier events stay right.
        mono_us: u64::try_from(monotonic().as_micros()).unwrap_or(u64::MAX),
    }
}
