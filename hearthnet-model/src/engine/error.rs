//! What can go wrong in the engine.

use std::ops::Range;

use super::sequence::SeqId;
use crate::error::ModelError;
use crate::kernels::PackError;

/// Why an engine or a head could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The layer range is empty or reaches beyond the model.
    #[error("layers {}..{} are not a part of a model of {layers} layers", range.start, range.end)]
    Layers {
        /// What was asked for, half-open.
        range: Range<u32>,
        /// Layers of the model.
        layers: u32,
    },
    /// The model needs something that this engine does not compute.
    #[error("the engine cannot run this model: {0}")]
    Unsupported(String),
    /// A tensor is missing or unsuitable.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor could not be repacked.
    #[error("tensor {tensor:?} cannot be repacked: {source}")]
    Pack {
        /// The tensor.
        tensor: String,
        /// What is wrong with its type or shape.
        source: PackError,
    },
    /// A tensor has a weight that is a NaN or an infinity: every answer would be noise.
    #[error("tensor {0:?} holds a NaN or an infinity: the file is damaged, or was converted badly")]
    NotFinite(String),
    /// The system has no memory for so many bytes of weights.
    #[error("no memory for {0} bytes of weights")]
    OutOfMemory(usize),
    /// The instruction set that the options name is not there.
    #[error("this processor does not have the instruction set {0:?}")]
    Isa(crate::kernels::Isa),
    /// The options contradict themselves or the model.
    #[error("engine option {option}: {reason}")]
    Option {
        /// The field of `EngineOptions`.
        option: &'static str,
        /// What it must be.
        reason: String,
    },
    /// The system refused a thread.
    #[error("the engine's threads cannot be started: {0}")]
    Threads(#[source] std::io::Error),
}

/// Why an engine refused an operation. Unless the variant says otherwise nothing has changed, and
/// the engine and its sequences can be used as before.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The sequence was never opened here, or has been closed.
    #[error("sequence {0} is not open")]
    UnknownSequence(SeqId),
    /// As many sequences are open as `EngineOptions::max_sequences` allows.
    #[error("{0} sequences are open, which is the limit")]
    TooManySequences(usize),
    /// A span does not begin where its sequence ends, or a position lies beyond the end.
    #[error("position {position} does not fit sequence {seq}, which has {len} positions")]
    PositionGap {
        /// The sequence.
        seq: SeqId,
        /// What was asked for.
        position: u32,
        /// Positions that the sequence has.
        len: u32,
    },
    /// The sequence has run through other layers than the batch is for.
    #[error(
        "sequence {seq} has run through layers {}..{}, not {}..{}",
        ran.start, ran.end, asked.start, asked.end
    )]
    OtherLayers {
        /// The sequence.
        seq: SeqId,
        /// Layers that it has keys and values of, half-open.
        ran: Range<u32>,
        /// Layers that were asked for, half-open.
        asked: Range<u32>,
    },
    /// Layers that the engine does not have.
    #[error(
        "layers {}..{} are not among this engine's {}..{}",
        asked.start, asked.end, engine.start, engine.end
    )]
    Layers {
        /// What was asked for, half-open; not empty.
        asked: Range<u32>,
        /// What there is, half-open.
        engine: Range<u32>,
    },
    /// Two spans of one batch name the same sequence.
    #[error("sequence {0} appears twice in one batch")]
    DuplicateSequence(SeqId),
    /// A span without rows.
    #[error("the span of sequence {0} has no rows")]
    EmptySpan(SeqId),
    /// The buffer of rows has another size than the spans say.
    #[error("{found} values were given where {expected} were expected")]
    RowsMismatch {
        /// Rows of all spans times the width.
        expected: usize,
        /// Length of the buffer.
        found: usize,
    },
    /// A row that was given, counted from 0 over all spans, holds an infinity or a NaN.
    #[error("row {0} of the input is not finite")]
    InputNotFinite(usize),
    /// The sequence would be longer than the model's context, or than
    /// `EngineOptions::max_context`.
    #[error("{wanted} positions were asked for; the context has {limit}")]
    ContextFull {
        /// Positions that the sequence would have.
        wanted: u64,
        /// The limit.
        limit: u32,
    },
    /// The KV budget does not suffice.
    #[error("{needed} bytes more are needed for keys and values; {free} of {limit} are free")]
    KvFull {
        /// What the operation needs.
        needed: u64,
        /// What is left.
        free: u64,
        /// The budget.
        limit: u64,
    },
    /// The system refused so many bytes of memory, which are within the budget.
    #[error("no memory for {0} bytes of keys and values")]
    OutOfMemory(u64),
    /// A block's output leaves the range of the boundary dtype, or is not a number: the model's
    /// weights, or the rows that came in, are beyond what it can compute. The batch's sequences
    /// are as long as before; the rows are lost.
    #[error("the output of layer {layer} for row {row} is out of range")]
    BoundaryOverflow {
        /// Layer of the model.
        layer: u32,
        /// Row of the batch, counted from 0 over all spans.
        row: usize,
    },
    /// A token id beyond the vocabulary.
    #[error("token id {id} is beyond the vocabulary of {vocab}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Tokens of the model.
        vocab: u32,
    },
}

/// Why a KV snapshot was refused. The engine is as before.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The bytes are no snapshot.
    #[error("this is not a KV snapshot: {0}")]
    Malformed(&'static str),
    /// The snapshot has another version of the format.
    #[error("KV snapshot version {found} is not supported; this engine reads version {expected}")]
    Version {
        /// In the snapshot.
        found: u16,
        /// What this engine reads.
        expected: u16,
    },
    /// The snapshot was made by other weights.
    #[error("the KV snapshot belongs to other weights")]
    Weights,
    /// The snapshot has layers that the engine does not have.
    #[error(
        "the KV snapshot has layers {}..{}, this engine {}..{}",
        found.start, found.end, engine.start, engine.end
    )]
    Layers {
        /// In the snapshot, half-open.
        found: Range<u32>,
        /// In the engine, half-open.
        engine: Range<u32>,
    },
    /// The snapshot has another shape of keys and values.
    #[error("the KV snapshot has {field} {found}, this engine {expected}")]
    Geometry {
        /// What differs.
        field: &'static str,
        /// In the snapshot.
        found: u32,
        /// In the engine.
        expected: u32,
    },
    /// The snapshot's length is not what its header says.
    #[error("the KV snapshot has {found} bytes where its header says {expected}")]
    Length {
        /// From the header.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// The key or value at this byte of the snapshot is an infinity or a NaN.
    #[error("the KV snapshot holds a value that is not finite, at byte {0}")]
    NotFinite(usize),
    /// There is no room for it.
    #[error(transparent)]
    Engine(#[from] EngineError),
}
