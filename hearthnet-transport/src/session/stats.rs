//! Statistics of a session.

use serde::Serialize;

/// Counters and gauges of one session. Byte counts cover whole frames with headers, before
/// WebSocket and TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SessionStats {
    /// Frames sent.
    pub frames_sent: u64,
    /// Frames received.
    pub frames_received: u64,
    /// Bytes of frames sent.
    pub bytes_sent: u64,
    /// Bytes of frames received.
    pub bytes_received: u64,
    /// Results dropped because no step waited for them any more.
    pub stale_results: u64,
    /// Unanswered steps: sent by a caller, received by a host.
    pub steps_in_flight: u32,
    /// The host's limit of unanswered steps.
    pub steps_granted: u32,
    /// Chunks that may be sent before more credit returns.
    pub credit_available: u32,
    /// Window: the peer's limit of chunks in flight.
    pub credit_granted: u32,
    /// Bytes of queued messages.
    pub queued_bytes: u64,
    /// Bytes reserved for the peer's tensors: incomplete, or not yet taken by the application.
    pub buffered_bytes: u64,
}
