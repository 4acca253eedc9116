//! Engine trait of a host, so that scheduling and protocol can be tested without a model.

use hearthnet_engine::LoadError;
pub use hearthnet_engine::{Footprint, Span};
use hearthnet_files::spec::RowShape;
use hearthnet_files::{BoundaryDtype, ModelError};

use crate::fault::{Resource, StreamFault};

/// Runs a contiguous range of layers over batches of rows, and owns the KV of the sequences. Stays
/// on one thread.
pub trait LayerEngine: 'static {
    /// Id of a sequence.
    type Seq: Copy + Eq + std::fmt::Debug;

    /// Begins an empty sequence.
    ///
    /// # Errors
    /// If the engine cannot hold another one.
    fn open(&mut self) -> Result<Self::Seq, StreamFault>;

    /// Begins a sequence with the first `length` positions of another one.
    ///
    /// # Errors
    /// [`StreamFault::PositionGap`] if the other is shorter, or cannot be cut there; otherwise if the
    /// engine cannot hold another one.
    fn fork(&mut self, seq: Self::Seq, length: u32) -> Result<Self::Seq, StreamFault>;

    /// Ends a sequence and frees its KV at once. An unknown sequence is ignored.
    fn close(&mut self, seq: Self::Seq);

    /// Positions that the sequence holds; 0 if it is unknown.
    fn len(&self, seq: Self::Seq) -> u32;

    /// Drops all positions from `length` on, and returns the length that is left: less than
    /// `length` if the engine can only return to an earlier position.
    ///
    /// # Errors
    /// [`StreamFault::PositionGap`] if the sequence is shorter.
    fn truncate(&mut self, seq: Self::Seq, length: u32) -> Result<u32, StreamFault>;

    /// Drops all positions from `position` on, and no others.
    ///
    /// # Errors
    /// [`StreamFault::PositionGap`] if the sequence is shorter, or cannot keep `position`
    /// positions: its caller then replays it.
    fn truncate_to(&mut self, seq: Self::Seq, position: u32) -> Result<(), StreamFault> {
        match self.truncate(seq, position)? {
            length if length < position => Err(StreamFault::PositionGap { position, length }),
            _ => Ok(()),
        }
    }

    /// Runs rows through layers `lo` to `hi` (counted over the model, both inclusive, all of
    /// them here), in place. `x` has the rows of all spans, each with the values of
    /// [`RowShape::before`] these layers; outputs replace the residual stream of each row. Values
    /// are representable in the boundary dtype before and after. No sequence appears twice, and
    /// each stays with the layers of its first rows.
    ///
    /// # Errors
    /// The fault to end the stream with. Sequences may then hold any number of the new positions.
    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<Self::Seq>],
        x: &mut [f32],
    ) -> Result<(), StreamFault>;

    /// Bytes of weights in memory.
    fn weight_bytes(&self) -> u64;

    /// Memory of a sequence that shares no page with another one.
    fn footprint(&self) -> Footprint;

    /// Bytes of KV in use by all sequences.
    fn kv_bytes_in_use(&self) -> u64;

    /// Name of the graphics card that computes; `None` for the processor.
    fn card(&self) -> Option<String> {
        None
    }

    /// Returns whether the engine's device or process is gone, for instance after a driver reset: no
    /// call can succeed any more. Called before and after every batch.
    fn is_lost(&mut self) -> bool {
        false
    }
}

/// Loads the engine: once at the start, and again when a stream is opened after the weights were
/// unloaded.
pub trait EngineSource: Send + 'static {
    type Engine: LayerEngine;

    /// Verifies and loads the weights, and reports the progress.
    ///
    /// # Errors
    /// If the weights cannot be verified or loaded.
    fn load(&mut self, progress: &mut dyn FnMut(StartProgress)) -> Result<Self::Engine, LoadFault>;

    /// Returns whether an engine that was lost may be loaded again. Called once for each loss. If
    /// not, the host ends.
    fn may_reload(&mut self) -> bool {
        false
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
#[allow(clippy::exhaustive_structs)] // Built by engine sources of other crates.
pub struct LoadFault {
    /// The reason, as a sentence.
    pub reason: String,
    /// Resource that the system ran out of: the file may be sound, and the next attempt may
    /// succeed.
    pub too_little: Option<Resource>,
}

impl From<String> for LoadFault {
    /// Wraps a fault of the file.
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

/// Progress of a start or of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartProgress {
    pub phase: LoadPhase,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Phase of a start. Each can take seconds. The process of an engine sends its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
#[non_exhaustive]
pub enum LoadPhase {
    /// Hashing the whole model to compute its identity. Once per file.
    Hashing = 0,
    /// Comparing the layers' tensors with the manifest.
    Verifying = 1,
    /// Reading and packing the layers.
    Loading = 2,
}

/// Served model and layer range: facts that need no loaded weights.
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
    /// Values of the rows.
    pub rows: RowShape,
    /// Number format of the rows between blocks and on the wire.
    pub boundary: BoundaryDtype,
    /// Context length that the model was trained for.
    pub context: u32,
    /// Name of the engine's arithmetic, as in descriptors.
    pub arithmetic: String,
}

/// Adds the phase to reports of bytes done and total.
pub(crate) fn in_phase(
    phase: LoadPhase,
    mut report: impl FnMut(StartProgress),
) -> impl FnMut(u64, u64) {
    move |done, total| report(StartProgress { phase, done, total })
}
