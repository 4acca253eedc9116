//! The flight recorder: what happened on this node of late, kept in memory.
//!
//! ```
//! use hearthnet_bus::flight::{self, Event, PipelineId};
//!
//! let pipeline = PipelineId::draw();
//! flight::record(Event::Aborted { pipeline, code: "shard_unavailable".into() });
//! ```
//!
//! One ring for the whole process, bounded in events and bytes; the oldest go first. What it
//! holds are codes, ids and numbers, which the types see to: an [`Event`] has no field that
//! could hold a text of a user, a token or a row. `specs/flight-record.md` is the normative
//! text, and says who may read it: it tells who worked with whom, and when.
//!
//! | concept | where |
//! |---|---|
//! | what can have happened | [`Event`], `event.rs` |
//! | ids and names in it | `ids.rs` |
//! | what is kept of it | `ring.rs` (pure) |
//! | how other nodes get it | `share.rs` |
//! | several nodes' records as one | `timeline.rs` (pure) |
//!
//! Recording takes the lock of the ring for as long as it takes to move the event; events are
//! as frequent as streams and sessions are, never as steps.

mod event;
mod ids;
mod ring;
mod share;
mod timeline;

#[cfg(test)]
mod tests;

use std::sync::LazyLock;
use std::time::Duration;

use hearthnet_transport::{CloseCode, RefusedConnection};
use parking_lot::Mutex;

use crate::{NodeId, now_ms};

pub use event::{Class, Event};
pub use ids::{MAX_NAME_BYTES, Name, PipelineId, SessionId};
pub use ring::{MAX_PAGE_BYTES, MAX_PAGE_RECORDS, Page, Record, Ring, Stamp};
pub use share::{Answer, Readers, params};
pub use timeline::{Clock, Entry, merge, of_pipeline};

static RING: LazyLock<Mutex<Ring>> = LazyLock::new(|| {
    let mut run = [0; 8];
    // Without randomness two runs look like one; the clock still tells them apart.
    let _ = getrandom::fill(&mut run);
    Mutex::new(Ring::new(u64::from_le_bytes(run), now()))
});

/// Takes note of an event, as of now.
pub fn record(event: Event) {
    let mut ring = RING.lock();
    // Under the lock, so that what has the later number is not dated earlier.
    ring.push(now(), event);
}

/// Takes note of a key that was shown and not let in. Whether it is its owner who showed it may
/// not be known yet.
pub fn peer_refused(key: NodeId, code: CloseCode) {
    record(Event::PeerRefused {
        peer: key,
        code: code.into(),
    });
}

/// Takes note of a connection that nothing came of, unless it belongs to a key that was
/// [refused](peer_refused).
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

/// What is kept from the record `from` on that happened at or after `since_unix_ms`, as much
/// of it as fits into one page; for a caller, what [concerns](Event::concerns) it.
pub fn page(from: u64, since_unix_ms: u64, caller: Option<&NodeId>) -> Page {
    let at = now();
    RING.lock().page(at, from, since_unix_ms, caller)
}

/// The clocks of this machine.
pub fn now() -> Stamp {
    Stamp {
        unix_ms: now_ms(),
        mono_us: u64::try_from(monotonic().as_micros()).unwrap_or(u64::MAX),
    }
}

/// Counts on while the machine sleeps, so that what was before stays as long ago as it is.
#[cfg(target_os = "linux")]
fn monotonic() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(time).unwrap_or_default()
}

/// Counts from the first use of the recorder.
#[cfg(not(target_os = "linux"))]
fn monotonic() -> Duration {
    static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    START.elapsed()
}
