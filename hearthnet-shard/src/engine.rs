//! What the host needs of an engine, so that scheduling and protocol can be tested
//! without a model.

use hearthnet_model::BoundaryDtype;

/// Consecutive rows of one sequence in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span<S> {
    /// The sequence.
    pub seq: S,
    /// Position of the first row; equals the sequence's length.
    pub position: u32,
    /// Number of rows, at least 1.
    pub rows: u32,
}

/// Why an engine did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineFault {
    /// The span does not begin at the sequence's end.
    #[error("position {position} is not the end of a sequence of {length}")]
    PositionGap {
        /// The position asked for.
        position: u32,
        /// The sequence's length.
        length: u32,
    },
    /// The model has no positions beyond `max`.
    #[error("the model holds {max} positions")]
    ContextFull {
        /// The model's limit.
        max: u32,
    },
    /// No KV page is free.
    #[error("the KV budget is used up")]
    KvFull,
    /// The rows that came in are not finite.
    #[error("the input is not finite")]
    NonFiniteInput,
    /// A block's output does not fit the boundary dtype.
    #[error("the output of layer {layer} left the boundary dtype's range")]
    BoundaryOverflow {
        /// The block, counted from 0 in the whole model.
        layer: u32,
    },
    /// Anything else: a defect.
    #[error("{0}")]
    Internal(String),
}

/// Runs a contiguous range of layers over batches of rows, and owns the KV of the
/// sequences. Lives on one thread.
pub trait LayerEngine: 'static {
    /// Names a sequence.
    type Seq: Copy + Eq + std::fmt::Debug;

    /// Begins an empty sequence.
    ///
    /// # Errors
    /// If the engine cannot hold another one.
    fn open(&mut self) -> Result<Self::Seq, EngineFault>;

    /// Ends a sequence and frees its KV at once. An unknown sequence is ignored.
    fn close(&mut self, seq: Self::Seq);

    /// Positions that the sequence holds; 0 if it is unknown.
    fn len(&self, seq: Self::Seq) -> u32;

    /// Forgets all positions from `length` on.
    ///
    /// # Errors
    /// [`EngineFault::PositionGap`] if the sequence is shorter.
    fn truncate(&mut self, seq: Self::Seq, length: u32) -> Result<(), EngineFault>;

    /// Runs rows through layers `lo` to `hi` (counted over the model, both inclusive, all of
    /// them here), in place. `x` is `[sum of rows, width]`, values representable in the
    /// boundary dtype before and after; no sequence appears twice, and each stays with the
    /// layers of its first rows.
    ///
    /// # Errors
    /// Any [`EngineFault`]. Sequences may then hold any number of the new positions.
    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<Self::Seq>],
        x: &mut [f32],
    ) -> Result<(), EngineFault>;

    /// Positions of a page of KV, at least 1. A sequence takes whole pages, which are its own.
    fn kv_page_positions(&self) -> u32;

    /// Bytes of KV that each position takes.
    fn kv_bytes_per_position(&self) -> u64;

    /// Bytes of KV in use by all sequences.
    fn kv_bytes_in_use(&self) -> u64;

    /// Bytes of weights in memory.
    fn weight_bytes(&self) -> u64;
}

/// Loads the engine: once at the start, and again when a stream is opened after the
/// weights were put away.
pub trait EngineSource: Send + 'static {
    /// What is loaded.
    type Engine: LayerEngine;

    /// Checks the weights and loads them. `progress` gets bytes done and in all.
    ///
    /// # Errors
    /// What went wrong, as a sentence.
    fn load(
        &mut self,
        progress: &mut dyn FnMut(LoadPhase, u64, u64),
    ) -> Result<Self::Engine, String>;
}

/// What a load is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadPhase {
    /// Comparing the tensors of the range with the manifest.
    Verifying,
    /// Reading and packing the weights.
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
