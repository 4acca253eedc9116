//! Negotiated values of a session.

/// Values negotiated in HELLO that are needed to encode messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terms {
    /// True if this side called.
    pub caller: bool,
    /// Data bytes per tensor chunk.
    pub chunk_bytes: u32,
    /// Limit of row blocks that travel inside their step, in bytes.
    pub inline_max: u32,
    /// Size above which this side tries to compress tensors; `None` if compression is off.
    pub compress_above: Option<u32>,
    /// Positions between two receipts; 0: the host sends none.
    pub receipts: u32,
    /// True if it sends none although this side asked for them.
    pub refuses_receipts: bool,
    /// Receive buffer of the peer, in bytes.
    pub peer_buffer: u32,
}
