//! A handle that ends a connection from outside, for instance when a permission is revoked.

use std::fmt;
use std::sync::Weak;

use crate::NodeId;
use crate::code::{CloseCode, SessionClosed};

/// A connection that can be ended from outside.
pub(crate) trait Ends: Send + Sync {
    /// Ends the connection if it is open. `cut`: drops the queues of both directions.
    fn end(&self, code: CloseCode, detail: &str, cut: bool);

    /// Cause of the end, if it has ended.
    fn closed(&self) -> Option<SessionClosed>;
}

/// Ends one connection at once, from any task. Cheap to clone; does not keep it alive.
#[derive(Clone)]
pub struct Closer {
    pub(crate) peer: NodeId,
    pub(crate) of: Weak<dyn Ends>,
}

impl Closer {
    pub fn peer(&self) -> NodeId {
        self.peer
    }

    /// Ends the connection with `code` and drops the queues of both directions: no message of the
    /// peer reaches the application after this. Does nothing if the connection has ended.
    pub fn close(&self, code: CloseCode) {
        if let Some(of) = self.of.upgrade() {
            of.end(code, "", true);
        }
    }

    /// Returns whether the connection has ended, or is about to.
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
