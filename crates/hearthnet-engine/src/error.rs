//! Errors of the engine.

use std::ops::Range;

use hearthnet_files::ModelError;
use hearthnet_files::spec::CutError;

use crate::kernels::PackError;
use crate::sequence::SeqId;

/// Error of loading an [`Engine`](crate::Engine) or a [`Head`](crate::Head).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The layer range is empty or reaches beyond the model.
    #[error("layers {}..{} are not a part of a model of {layers} layers", range.start, range.end)]
    Layers { range: Range<u32>, layers: u32 },
    /// The range separates a layer from the one whose keys and values it uses.
    #[error("layers cannot be loaded: {0}")]
    Cut(#[from] CutError),
    /// The model needs a feature that this engine does not implement.
    #[error("the engine cannot run this model: {0}")]
    Unsupported(String),
    /// A tensor is missing or unsuitable.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor could not be repacked.
    #[error("tensor {tensor:?} cannot be repacked: {source}")]
    Pack { tensor: String, source: PackError },
    /// A tensor holds a NaN or an infinity, which would spread to every answer.
    #[error("tensor {0:?} holds a NaN or an infinity: the file is damaged, or was converted badly")]
    NotFinite(String),
    /// The operating system refused this many bytes for weights.
    #[error("no memory for {0} bytes of weights")]
    OutOfMemory(usize),
    #[error("this processor does not have the instruction set {0:?}")]
    Isa(crate::kernels::Isa),
    /// An option is out of range.
    #[error("engine option {option}: {reason}")]
    Option {
        /// Field name in `EngineOptions`.
        option: &'static str,
        reason: String,
    },
    /// The operating system refused to start a thread.
    #[error("the engine's threads cannot be started: {0}")]
    Threads(#[source] std::io::Error),
}

/// Error of an engine operation. Unless the variant says otherwise, the engine and its sequences
/// are unchanged and stay usable.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The sequence was never opened by this engine, or has been closed.
    #[error("sequence {0} is not open")]
    UnknownSequence(SeqId),
    /// As many sequences are open as `EngineOptions::max_sequences` allows.
    #[error("{0} sequences are open, which is the limit")]
    TooManySequences(usize),
    /// A span does not start at the end of its sequence, or a position lies beyond the end.
    #[error("position {position} does not fit sequence {seq}, which has {len} positions")]
    PositionGap {
        seq: SeqId,
        position: u32,
        /// Length of the sequence.
        len: u32,
    },
    /// The earlier rows of the sequence ran through other layers.
    #[error(
        "sequence {seq} has run through layers {}..{}, not {}..{}",
        ran.start, ran.end, asked.start, asked.end
    )]
    OtherLayers {
        seq: SeqId,
        /// Layers whose keys and values the sequence has, half-open.
        ran: Range<u32>,
        asked: Range<u32>,
    },
    /// The requested range is empty or not part of the engine's layers.
    #[error(
        "layers {}..{} are not among this engine's {}..{}",
        asked.start, asked.end, engine.start, engine.end
    )]
    Layers {
        asked: Range<u32>,
        engine: Range<u32>,
    },
    /// The range separates a layer from the one whose keys and values it uses.
    #[error("layers cannot run: {0}")]
    Cut(#[from] CutError),
    /// Rows of the text of an encoder attend to later rows, so that all must come together.
    #[error("the model reads a text as a whole: sequence {0} cannot be continued")]
    WholeText(SeqId),
    #[error("sequence {0} appears twice in one batch")]
    DuplicateSequence(SeqId),
    #[error("the span of sequence {0} has no rows")]
    EmptySpan(SeqId),
    /// The vector of a text exceeds the range of its numbers.
    #[error("the vector of this text overflows the range of f32")]
    VectorOverflow,
    /// The buffer of rows does not have the size that the spans require.
    #[error("{found} values were given where {expected} were expected")]
    RowsMismatch {
        /// Values: rows of all spans times the width.
        expected: usize,
        found: usize,
    },
    /// This input row, counted from 0 over all spans, holds an infinity or a NaN.
    #[error("row {0} of the input is not finite")]
    InputNotFinite(usize),
    /// The sequence would be longer than the model's context, or than
    /// `EngineOptions::max_context`.
    #[error("{wanted} positions were asked for; the context has {limit}")]
    ContextFull {
        /// Positions that the sequence would have.
        wanted: u64,
        limit: u32,
    },
    /// The KV budget (`EngineOptions::max_kv_bytes`) is exhausted.
    #[error("{needed} bytes more are needed for keys and values; {free} of {limit} are free")]
    KvFull {
        /// Bytes that the operation needs.
        needed: u64,
        /// Bytes left in the budget.
        free: u64,
        limit: u64,
    },
    /// The operating system refused this many bytes, although they are within the budget.
    #[error("no memory for {0} bytes of keys and values")]
    OutOfMemory(u64),
    /// A block's output exceeds the range of the boundary dtype or is a NaN, because of the model's
    /// weights or of the input rows. The sequences of the batch keep their length; the rows are
    /// lost.
    #[error("the output of layer {layer} for row {row} is out of range")]
    BoundaryOverflow {
        /// Layer number in the model.
        layer: u32,
        /// Row of the batch, counted from 0 over all spans.
        row: usize,
    },
    /// As `BoundaryOverflow`, on a device with a number format of its own: a block's output leaves
    /// the range of the boundary dtype or, within the block, of that format.
    #[error("the output of layer {layer} for row {row} is out of the range of {formats}")]
    OutOfRange {
        layer: u32,
        row: usize,
        /// The two formats.
        formats: String,
    },
    /// The device has no memory for the batch. The sequences keep their length; the rows are lost.
    #[error("the device has no memory for the batch")]
    DeviceMemory,
    /// Any other failure of the device, such as a driver reset. The batch's sequences keep their
    /// length, but their contents may be lost. The engine may have to be loaded again.
    #[error("{0}")]
    Device(String),
    #[error("token id {id} is beyond the vocabulary of {vocab}")]
    UnknownToken { id: u32, vocab: u32 },
}
