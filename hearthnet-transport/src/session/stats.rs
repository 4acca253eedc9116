//! What a session has carried.

use serde::Serialize;

/// Counters and gauges of one session. Byte counts are those of frames, headers included, before
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
    /// Tensor chunks sent.
    pub chunks_sent: u64,
    /// Tensor chunks received.
    pub chunks_received: u64,
    /// Data bytes of the chunks sent, before compression.
    pub chunk_bytes_sent: u64,
    /// The same, as they went over the wire.
    pub chunk_wire_bytes_sent: u64,
    /// Data bytes of the chunks received, after decompression.
    pub chunk_bytes_received: u64,
    /// The same, as they came over the wire.
    pub chunk_wire_bytes_received: u64,
    /// Answers that came for steps nobody waits for any more, and were dropped.
    pub stale_results: u64,
    /// Tensors that the peer refused.
    pub tensors_refused: u64,
    /// Smoothed round-trip time of PING and PONG, in microseconds.
    pub rtt_us: Option<u64>,
    /// Smallest round-trip time seen, in microseconds.
    pub rtt_min_us: Option<u64>,
    /// Steps without an answer: sent by a caller, received by a host.
    pub steps_in_flight: u32,
    /// Most steps that may be without an answer: the host's limit.
    pub steps_granted: u32,
    /// Chunks that may be sent before the peer returns credit.
    pub credit_available: u32,
    /// Chunks that the peer lets be in flight.
    pub credit_granted: u32,
    /// Bytes of messages that wait to be sent.
    pub queued_bytes: u64,
    /// Bytes of tensors held for the peer: incomplete, or not yet taken by the application.
    pub buffered_bytes: u64,
}
