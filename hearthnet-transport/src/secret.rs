//! Buffers that are wiped when dropped, because activations are sensitive.
//!
//! Best effort: buffers of the kernel, TLS and the WebSocket layer are out of reach. `zeroize`
//! would write byte by byte, which costs as much as encrypting a chunk; a plain fill that the
//! optimiser must treat as observed runs at memory speed.

use bytes::Bytes;

/// A byte vector that is overwritten with zeros when dropped. It must not grow beyond its capacity:
/// a reallocation would leave an unwiped copy.
pub(crate) struct Wiped(pub(crate) Vec<u8>);

impl Wiped {
    /// Shared bytes; the last owner wipes them.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Wiped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Wiped {
    fn drop(&mut self) {
        self.0.fill(0);
        std::hint::black_box(&mut self.0);
    }
}
