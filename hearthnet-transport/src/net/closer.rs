//! A handle that ends a connection from outside: for rights that are taken away.

use std::fmt;
use std::sync::Weak;

use crate::NodeId;
use crate::code::{CloseCode, SessionClosed};

/// What can be ended from outside.
pub(crate) trait Ends: Send + Sync {
    /// Ends it, unless it has ended. `cut`: what waits in either direction is dropped.
    fn end(&self, code: CloseCode, detail: &str, cut: bool);

    /// How it ended, if it has.
    fn closed(&self) -> Option<SessionClosed>;
}

/// Ends one connection at once, whoever holds it. Cheap to clone; does not keep it alive.
#[derive(Clone)]
pub struct Closer {
    pub(crate) peer: NodeId,
    pub(crate) of: Weak<dyn Ends>,
}

impl Closer {
    /// The key at the other end.
    pub fn peer(&self) -> NodeId {
        self.peer
    }

    /// Ends the connection with `code`. What is queued in either direction is dropped: nothing
    /// that the peer has sent reaches the application after this. Does nothing if it has ended.
    pub fn close(&self, code: CloseCode) {
        if let Some(of) = self.of.upgrade() {
            of.end(code, "", true);
        }
    }

    /// Whether the connection has ended, or is about to.
    pub fn is_closed(&self) -> bool {
        self.of.upgrade().is_none_or(|of| of.closed().is_some())
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closer")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}
