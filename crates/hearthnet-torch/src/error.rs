//! Errors of loading and running.

use std::ops::Range;

use hearthnet_engine::LoadError;
use hearthnet_files::quantize::QuantizeError;
use hearthnet_files::{BoundaryDtype, ModelError};
use tch::TchError;

use crate::kv::Seq;
use crate::options::{DeviceChoice, Dtype};

/// Text that names no device or number format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    #[error("devices are auto, cpu, cuda, cuda:N and mps")]
    Device,
    #[error("formats are fp16, bf16 and fp32")]
    Dtype,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchLoadError {
    /// Wrong layers, family or RoPE factors; the same check as in the exact engine.
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("tensor {tensor:?} cannot be read: {source}")]
    Tensor {
        tensor: String,
        source: QuantizeError,
    },
    /// A tensor holds values beyond the range of the format.
    #[error("tensor {tensor:?} leaves the range of {dtype}; choose bf16 or fp32")]
    Range { tensor: String, dtype: Dtype },
    /// The device is missing, or libtorch was built without support for it.
    #[error("the device {device} cannot be used: {reason}")]
    Device {
        device: DeviceChoice,
        /// Message of libtorch.
        reason: String,
    },
    #[error("the device has no memory for the weights; serve fewer layers, or choose fp16 or bf16")]
    OutOfMemory,
    /// Any other error of libtorch.
    #[error("libtorch failed: {0}")]
    Torch(String),
}

/// Why an engine refused an operation. Unless the variant says otherwise, the engine and its
/// sequences are unchanged and remain usable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// The sequence was never opened here, or is closed.
    #[error("sequence {0} is not open")]
    UnknownSequence(Seq),
    /// [`TorchOptions::max_sequences`](crate::TorchOptions) sequences are open.
    #[error("{0} sequences are open, which is the limit")]
    TooManySequences(usize),
    /// A span does not begin at the end of its sequence, or a position lies beyond the end.
    #[error("position {position} does not fit sequence {seq}, which has {len} positions")]
    PositionGap {
        seq: Seq,
        /// Position in the request.
        position: u32,
        /// Length of the sequence.
        len: u32,
    },
    /// The sequence has run through other layers than the batch asks for.
    #[error(
        "sequence {seq} has run through layers {}..{}, not {}..{}",
        ran.start, ran.end, asked.start, asked.end
    )]
    OtherLayers {
        seq: Seq,
        /// Layers with stored keys and values, half-open.
        ran: Range<u32>,
        /// Layers of the batch, half-open.
        asked: Range<u32>,
    },
    /// The engine does not have these layers.
    #[error(
        "layers {}..{} are not among this engine's {}..{}",
        asked.start, asked.end, engine.start, engine.end
    )]
    Layers {
        /// Layers of the batch, half-open; not empty.
        asked: Range<u32>,
        /// Layers of the engine, half-open.
        engine: Range<u32>,
    },
    #[error("sequence {0} appears twice in one batch")]
    DuplicateSequence(Seq),
    #[error("the span of sequence {0} has no rows")]
    EmptySpan(Seq),
    /// The buffer's length does not match the spans.
    #[error("{found} values were given where {expected} were expected")]
    RowsMismatch {
        /// Rows of all spans times the width.
        expected: usize,
        found: usize,
    },
    /// An input row, counted from 0 over all spans, holds an infinity or a NaN.
    #[error("row {0} of the input is not finite")]
    InputNotFinite(usize),
    /// The sequence would exceed the model's context or
    /// [`TorchOptions::max_context`](crate::TorchOptions).
    #[error("{wanted} positions were asked for; the context has {limit}")]
    ContextFull {
        /// Length that the sequence would have.
        wanted: u64,
        limit: u32,
    },
    /// The KV budget is exhausted.
    #[error("{needed} bytes more are needed for keys and values; {free} of {limit} are free")]
    KvFull {
        /// Additional bytes that the operation needs.
        needed: u64,
        /// Bytes free in the budget.
        free: u64,
        /// Budget in bytes.
        limit: u64,
    },
    /// The device has no memory for the batch. The sequences keep their length; the rows are lost.
    #[error("the device has no memory for the batch")]
    OutOfMemory,
    /// A block's output leaves the range of the boundary dtype or, within the block, of the
    /// engine's format, or it is NaN. The batch's sequences keep their length; the rows are lost.
    #[error(
        "the output of layer {layer} for row {row} is out of the range of {dtype} or of the boundary dtype {boundary}"
    )]
    OutOfRange {
        /// Layer of the model.
        layer: u32,
        /// Row of the batch, counted from 0 over all spans.
        row: usize,
        /// Format of the engine.
        dtype: Dtype,
        boundary: BoundaryDtype,
    },
    /// Any other failure of libtorch or the device, such as a driver reset. The batch's sequences
    /// keep their length, but their contents may be lost. The engine may have to be loaded again.
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

/// libtorch has no error codes: on a processor the text is "can't allocate memory", on GPUs "out of
/// memory".
fn out_of_memory(error: &TchError) -> bool {
    let text = error.to_string();
    text.contains("out of memory") || text.contains("allocate memory")
}

/// Message of libtorch without its stack trace.
pub(crate) fn first_line(error: &TchError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_memory_is_distinguished_from_other_failures() {
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
    fn an_excessive_allocation_is_out_of_memory() {
        let options = (tch::Kind::Float, tch::Device::Cpu);
        let error = tch::Tensor::f_empty([1 << 50], options).unwrap_err();
        assert_eq!(TorchError::from(error), TorchError::OutOfMemory);
    }
}
