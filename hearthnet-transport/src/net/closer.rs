//! A handle that ends a connection from outside: for rights that are taken away.

use std::fmt;
use std::sync::Weak;

use super::connection;
use super::local::WeakEnd;
use super::peer_socket;
use crate::NodeId;
use crate::code::CloseCode;

/// Ends one connection at once, whoever holds it. Cheap to clone; does not keep it alive.
#[derive(Clone)]
pub struct Closer {
    peer: NodeId,
    of: Of,
}

#[derive(Clone)]
enum Of {
    Session(Weak<connection::Shared>),
    Peer(Weak<peer_socket::Shared>),
    Local(WeakEnd),
}

impl Closer {
    pub(crate) fn session(peer: NodeId, of: Weak<connection::Shared>) -> Closer {
        Closer {
            peer,
            of: Of::Session(of),
        }
    }

    pub(crate) fn socket(peer: NodeId, of: Weak<peer_socket::Shared>) -> Closer {
        Closer {
            peer,
            of: Of::Peer(of),
        }
    }

    pub(crate) fn local(peer: NodeId, of: WeakEnd) -> Closer {
        Closer {
            peer,
            of: Of::Local(of),
        }
    }

    /// The key at the other end.
    pub fn peer(&self) -> NodeId {
        self.peer
    }

    /// Ends the connection with `code`. What is queued in either direction is dropped: nothing
    /// that the peer has sent reaches the application after this. Does nothing if it has ended.
    pub fn close(&self, code: CloseCode) {
        match &self.of {
            Of::Session(shared) => {
                if let Some(shared) = shared.upgrade() {
                    shared.cut(code);
                }
            }
            Of::Peer(shared) => {
                if let Some(shared) = shared.upgrade() {
                    shared.cut(code);
                }
            }
            Of::Local(end) => end.cut(code),
        }
    }

    /// Whether the connection has ended, or is about to.
    pub fn is_closed(&self) -> bool {
        match &self.of {
            Of::Session(shared) => shared.upgrade().is_none_or(|shared| shared.is_closed()),
            Of::Peer(shared) => shared.upgrade().is_none_or(|shared| shared.is_closed()),
            Of::Local(end) => end.is_closed(),
        }
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closer")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}
