//! What can go wrong.

use std::ops::Range;

use hearthnet_model::engine::LoadError;
use hearthnet_model::quantize::QuantizeError;
use hearthnet_model::{BoundaryDtype, ModelError};
use tch::TchError;

use crate::kv::Seq;
use crate::options::{DeviceChoice, Dtype};

/// A word that names no device or format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// Of a device.
    #[error("devices are auto, cpu, cuda, cuda:N and mps")]
    Device,
    /// Of a format.
    #[error("formats are fp16, bf16 and fp32")]
    Dtype,
}

/// Why an engine could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchLoadError {
    /// The layers, the family or the factors of its rotation, as the exact engine says it.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A tensor is missing.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor cannot be read.
    #[error("tensor {tensor:?} cannot be read: {source}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        source: QuantizeError,
    },
    /// A tensor holds numbers that the format does not have.
    #[error("tensor {tensor:?} leaves the range of {dtype}; choose bf16 or fp32")]
    Range {
        /// The tensor.
        tensor: String,
        /// The format.
        dtype: Dtype,
    },
    /// The device is not there, or libtorch was built without it.
    #[error("the device {device} cannot be used: {reason}")]
    Device {
        /// What was asked for.
        device: DeviceChoice,
        /// What libtorch says.
        reason: String,
    },
    /// The device has no memory for the weights.
    #[error("the device has no memory for the weights; serve fewer layers, or choose fp16 or bf16")]
    OutOfMemory,
    /// libtorch failed otherwise.
    #[error("libtorch failed: {0}")]
    Torch(String),
}

/// Why an engine refused an operation. Unless the variant says otherwise nothing has changed, and
/// the engine and its sequences can be used as before.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// The sequence was never opened here, or has been closed.
    #[error("sequence {0} is not open")]
    UnknownSequence(Seq),
    /// As many sequences are open as [`TorchOptions::max_sequences`](crate::TorchOptions) allows.
    #[error("{0} sequences are open, which is the limit")]
    TooManySequences(usize),
    /// A span does not begin where its sequence ends, or a position lies beyond the end.
    #[error("position {position} does not fit sequence {seq}, which has {len} positions")]
    PositionGap {
        /// The sequence.
        seq: Seq,
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
        seq: Seq,
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
    DuplicateSequence(Seq),
    /// A span without rows.
    #[error("the span of sequence {0} has no rows")]
    EmptySpan(Seq),
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
    /// [`TorchOptions::max_context`](crate::TorchOptions).
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
    /// The device has no memory for the batch. The sequences are as long as before; the rows are
    /// lost.
    #[error("the device has no memory for the batch")]
    OutOfMemory,
    /// A block's output leaves the range of the boundary dtype or, within the block, that of the
    /// engine's format, or is not a number. The batch's sequences are as long as before; the rows
    /// are lost.
    #[error(
        "the output of layer {layer} for row {row} is out of the range of {dtype} or of the boundary's {boundary}"
    )]
    OutOfRange {
        /// Layer of the model.
        layer: u32,
        /// Row of the batch, counted from 0 over all spans.
        row: usize,
        /// Format that the engine computes with.
        dtype: Dtype,
        /// Format of the rows between blocks.
        boundary: BoundaryDtype,
    },
    /// libtorch or the device failed otherwise: a driver was reset, or this is a defect. The batch's
    /// sequences are as long as before, and what they hold may be lost. The engine may have to be
    /// loaded again.
    #[error("libtorch failed: {0}")]
    Device(String),
}

impl From<TchError> for TorchError {
    fn from(error: TchError) -> Self {
        match out_of_memory(&error) {
            true => Self::OutOfMemory,
            false => Self::Device(first_line(&error)),
        }
    }
}

impl From<TchError> for TorchLoadError {
    fn from(error: TchError) -> Self {
        match out_of_memory(&error) {
            true => Self::OutOfMemory,
            false => Self::Torch(first_line(&error)),
        }
    }
}

/// libtorch has no codes: processors say "can't allocate memory", GPUs "out of memory".
fn out_of_memory(error: &TchError) -> bool {
    let text = error.to_string();
    text.contains("out of memory") || text.contains("allocate memory")
}

/// What libtorch says, without the stack of calls that follows.
pub(crate) fn first_line(error: &TchError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_memory_is_told_from_other_failures() {
        let cases = [
            ("CUDA out of memory. Tried to allocate 2.00 GiB", true),
            (
                "DefaultCPUAllocator: can't allocate memory: you tried",
                true,
            ),
            ("CUDA error: unspecified launch failure\nat c10", false),
        ];
        for (text, memory) in cases {
            let error = TorchError::from(TchError::Torch(text.to_owned()));
            assert_eq!(error == TorchError::OutOfMemory, memory, "{text}");
            assert!(!error.to_string().contains("c10"), "{error}");
        }
    }

    #[test]
    fn a_processor_that_cannot_give_so_much_says_so() {
        let options = (tch::Kind::Float, tch::Device::Cpu);
        let error = tch::Tensor::f_empty([1 << 50], options).unwrap_err();
        assert_eq!(TorchError::from(error), TorchError::OutOfMemory);
    }
}
