//! Interface to the files of a node's models that it serves to others.

use std::ops::Range;
use std::sync::Arc;

/// Whether this node computes or answers now. Called for every part that is sent: it must be cheap.
pub type Busy = Arc<dyn Fn() -> bool + Send + Sync>;

/// Part of a model that is addressed by bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The protocol has these.
pub enum Object {
    /// The model file up to the first tensor's data.
    Head,
    /// The manifest, in its canonical encoding.
    Manifest,
    /// The SHA-256 of all pieces, in order.
    PieceList,
}

/// Pieces of a model that a node can serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // The protocol has these fields.
pub struct Held {
    /// Length of the head; 0 if it is not held. Likewise below.
    pub head_bytes: u64,
    pub manifest_bytes: u64,
    pub piece_list_bytes: u64,
    /// Piece numbers: ascending, with gaps between the runs.
    pub pieces: Vec<Range<u32>>,
}

/// Source of the bytes that a node serves. All functions are called on blocking low-priority
/// threads, at most two at a time.
///
/// A store MUST only give verified bytes.
pub trait WeightsStore: Send + Sync + 'static {
    /// Held pieces of the weights with this identity; `None` if there are none.
    fn held(&self, weights: &[u8; 32]) -> Option<Held>;

    /// Bytes of a piece, 1 to 262,144. `None` if it is not held.
    fn piece(&self, weights: &[u8; 32], index: u32) -> Option<Vec<u8>>;

    /// `len` bytes (1 to 262,144) of an object. `None` if the object is not held, or ends
    /// before `offset + len`.
    fn read(&self, weights: &[u8; 32], object: Object, offset: u64, len: u32) -> Option<Vec<u8>>;
}
