//! What one listener serves side by side: the tensor path, and plain sockets on other paths.

use super::{Connection, PeerSocket};

/// A path of the listener whose WebSocket carries messages of the application's own protocol.
///
/// The connection below is the one of the tensor path: mutual TLS with pinned Ed25519 keys, a
/// deadline for each phase, a meter below the WebSocket. Nothing is reserved on a peer's word.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathRule {
    /// The path of the upgrade request, such as `/bus/v1`.
    pub path: &'static str,
    /// Largest message in bytes, either way.
    pub max_message_bytes: usize,
    /// Whether text messages may come; binary ones always may.
    pub text: bool,
    /// Sockets that the listener serves at a time on this path.
    pub max_sockets: usize,
    /// The same for one peer.
    pub max_sockets_per_peer: usize,
    /// How many of them may be of peers that do not [belong](super::Admission::belongs) here. For one
    /// more, one of these is closed: the oldest of the address that has most.
    pub max_strangers: usize,
    /// Messages that wait here in each direction: coming ones for the application, outgoing ones
    /// for the peer. When as many have come, no more are read.
    pub queue_messages: usize,
    /// The same in bytes; one message is always taken, whatever its size.
    pub queue_bytes: usize,
}

impl PathRule {
    /// Binary messages of up to `max_message_bytes`; 64 sockets, 4 per peer; queues of 64 messages
    /// that hold at most two of the largest.
    pub fn new(path: &'static str, max_message_bytes: usize) -> PathRule {
        PathRule {
            path,
            max_message_bytes,
            text: false,
            max_sockets: 64,
            max_sockets_per_peer: 4,
            max_strangers: 64,
            queue_messages: 64,
            queue_bytes: max_message_bytes.saturating_mul(2),
        }
    }

    /// Lets text messages come.
    #[must_use]
    pub fn with_text(mut self) -> PathRule {
        self.text = true;
        self
    }

    /// Most sockets of peers that count together, however many keys they have: a quarter, and no less than
    /// one peer's.
    pub(super) fn max_sockets_per_party(&self) -> usize {
        (self.max_sockets / 4).max(self.max_sockets_per_peer)
    }

    /// Sets how many sockets are served, in all and per peer.
    #[must_use]
    pub fn with_sockets(mut self, in_all: usize, per_peer: usize) -> PathRule {
        self.max_sockets = in_all;
        self.max_sockets_per_peer = per_peer;
        self.max_strangers = in_all;
        self
    }

    /// Sets how many of the sockets may be of peers that do not belong here.
    #[must_use]
    pub fn with_strangers(mut self, most: usize) -> PathRule {
        self.max_strangers = most;
        self
    }
}

/// What arrived at a listener.
#[derive(Debug)]
#[non_exhaustive]
pub enum Arrival {
    /// An open tensor session.
    Session(Connection),
    /// An open socket on one of the other paths.
    Peer(PeerSocket),
}
