//! Paths of a listener: the tensor path, and those with plain sockets on them.

/// Path of the WebSocket of a tensor session.
pub const PATH: &str = "/tensor/v1";

/// A path of the listener whose WebSocket carries messages of the application's own protocol.
///
/// The connection is secured like that of the tensor path: mutual TLS with pinned Ed25519 keys, a
/// deadline for each phase, a frame limiter below the WebSocket.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathRule {
    /// Path of the upgrade request, such as `/bus/v1`.
    pub path: &'static str,
    /// Limit of a message in bytes, in both directions.
    pub max_message_bytes: usize,
    /// Whether text messages are allowed; binary ones always are.
    pub text: bool,
    /// Limit of open sockets on this path.
    pub max_sockets: usize,
    /// Limit of open sockets per peer.
    pub max_sockets_per_peer: usize,
    /// Limit of open sockets of [strangers](super::Admission::belongs). For a further one, the
    /// oldest of the address with most is closed.
    pub max_strangers: usize,
    /// Queue length in each direction. When the queue of incoming messages is full, reading stops.
    pub queue_messages: usize,
    /// Queue size in bytes; a single message is always accepted.
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

    /// Allows text messages.
    #[must_use]
    pub fn with_text(mut self) -> PathRule {
        self.text = true;
        self
    }

    /// Limit of open sockets per quota group, however many keys it has: a quarter of all, and at
    /// least one peer's limit.
    pub(super) fn max_sockets_per_party(&self) -> usize {
        (self.max_sockets / 4).max(self.max_sockets_per_peer)
    }

    /// Sets the limit of open sockets, in all and per peer.
    #[must_use]
    pub fn with_sockets(mut self, in_all: usize, per_peer: usize) -> PathRule {
        self.max_sockets = in_all;
        self.max_sockets_per_peer = per_peer;
        self.max_strangers = in_all;
        self
    }

    /// Sets the limit of open sockets of strangers.
    #[must_use]
    pub fn with_strangers(mut self, most: usize) -> PathRule {
        self.max_strangers = most;
        self
    }
}
