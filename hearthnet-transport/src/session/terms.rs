//! Negotiated values of a session.

/// Values negotiated in HELLO that are needed to encode messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub(crate) caller: bool,
    pub(crate) chunk_bytes: u32,
    pub(crate) inline_max: u32,
    pub(crate) compress_above: Option<u32>,
    pub(crate) peer_buffer: u32,
}

impl Terms {
    /// Data bytes per tensor chunk.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Limit of row blocks that travel inside their step, in bytes.
    pub fn inline_max(&self) -> u32 {
        self.inline_max
    }

    /// Size above which this side tries to compress tensors; `None` if compression is off.
    pub fn compress_above(&self) -> Option<u32> {
        self.compress_above
    }
}
