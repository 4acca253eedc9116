//! What the host needs of an engine, so that scheduling and protocol can be tested
//! without a model.

use hearthnet_model::engine::LoadError;
pub use hearthnet_model::engine::Span;
use hearthnet_model::{BoundaryDtype, ModelError};

use crate::fault::StreamFault;

/// Runs a contiguous range of layers over batches of rows, and owns the KV of the
/// sequences. Lives on one thread.
pub trait LayerEngine: 'static {
    /// Names a sequence.
    type Seq: Copy + Eq + std::fmt::Debug;

    /// Begins an empty sequence.
    ///
    /// # Errors
    /// If the engine cannot hold another one.
    fn open(&mut self) -> Result<Self::Seq, StreamFault>;

    /// Ends a sequence and frees its KV at once. An unknown sequence is ignored.
    fn close(&mut self, seq: Self::Seq);

    /// Positions that the sequence holds; 0 if it is unknown.
    fn len(&self, seq: Self::Seq) -> u32;

    /// Forgets all positions from `length` on.
    ///
    /// # Errors
    /// [`StreamFault::PositionGap`] if the sequence is shorter.
    fn truncate(&mut self, seq: Self::Seq, length: u32) -> Result<(), StreamFault>;

    /// Runs rows through layers `lo` to `hi` (counted over the model, both inclusive, all of
    /// them here), in place. `x` is `[sum of rows, width]`, values representable in the
    /// boundary dtype before and after; no sequence appears twice, and each stays with the
    /// layers of its first rows.
    ///
    /// # Errors
    /// What the stream at fault is ended with. Sequences may then hold any number of the new positions.
    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<Self::Seq>],
        x: &mut [f32],
    ) -> Result<(), StreamFault>;

    /// What it takes of memory, and how.
    fn footprint(&self) -> Footprint;

    /// Bytes of KV in use by all sequences.
    fn kv_bytes_in_use(&self) -> u64;

    /// Whether what it computes on is gone for good, as a device whose driver was reset: nothing that it
    /// is asked for can succeed any more, and the host ends. Asked after every batch.
    fn is_lost(&mut self) -> bool {
        false
    }
}

/// What a loaded engine takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of weights in memory.
    pub weight_bytes: u64,
    /// Bytes of KV that each position of a sequence takes.
    pub kv_bytes_per_position: u64,
    /// Positions of a page of KV, at least 1. A sequence takes whole pages, which are its own.
    pub kv_page_positions: u32,
}

/// Loads the engine: once at the start, and again when a stream is opened after the
/// weights were put away.
pub trait EngineSource: Send + 'static {
    /// What is loaded.
    type Engine: LayerEngine;

    /// Checks the weights and loads them. `progress` gets bytes done and in all.
    ///
    /// # Errors
    /// What went wrong.
    fn load(&mut self, progress: &mut dyn FnMut(StartProgress)) -> Result<Self::Engine, LoadFault>;
}

/// Why weights were not loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
#[allow(clippy::exhaustive_structs)] // What an engine source says.
pub struct LoadFault {
    /// What went wrong, as a sentence.
    pub reason: String,
    /// What the system gave too little of: the file may be sound, and the next attempt may succeed.
    pub too_little: Option<Resource>,
}

/// What a system can have too little of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // A variant more is something else to do about it.
pub enum Resource {
    /// Memory for the weights.
    Memory,
    /// Threads.
    Threads,
}

impl From<String> for LoadFault {
    /// A fault of the file.
    fn from(reason: String) -> Self {
        Self {
            reason,
            too_little: None,
        }
    }
}

impl From<LoadError> for LoadFault {
    fn from(error: LoadError) -> Self {
        Self {
            reason: error.to_string(),
            too_little: match error {
                LoadError::OutOfMemory(_) => Some(Resource::Memory),
                LoadError::Threads(_) => Some(Resource::Threads),
                _ => None,
            },
        }
    }
}

impl From<ModelError> for LoadFault {
    fn from(error: ModelError) -> Self {
        Self {
            reason: error.to_string(),
            too_little: error.is_out_of_memory().then_some(Resource::Memory),
        }
    }
}

/// How far a start has come, or a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartProgress {
    /// What it is busy with.
    pub phase: LoadPhase,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// What a start is busy with. All of it can take seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadPhase {
    /// Hashing the whole model, to know its identity. Once for each file.
    Hashing,
    /// Comparing the layers' tensors with the manifest.
    Verifying,
    /// Reading and packing the layers.
    Loading,
}

/// What is served: facts about the model and the range that need no loaded weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// Catalogue id or file stem of the model.
    pub model_id: String,
    /// Identity of the weights.
    pub weights: [u8; 32],
    /// First layer.
    pub lo: u32,
    /// Last layer, inclusive.
    pub hi: u32,
    /// Layers of the whole model.
    pub total_layers: u32,
    /// Values per row of the residual stream.
    pub width: u32,
    /// Format of these values between blocks and on the wire.
    pub boundary: BoundaryDtype,
    /// Positions that the model was made for.
    pub context: u32,
    /// The arithmetic that the engine computes with, as descriptors name it.
    pub arithmetic: String,
}
