//! Errors of loading and running.

use hearthnet_engine::{EngineError, LoadError};
use hearthnet_files::ModelError;
use hearthnet_files::quantize::QuantizeError;
use tch::TchError;

use crate::choice::{DeviceChoice, Dtype};

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

impl From<TchError> for TorchLoadError {
    /// libtorch has no error codes: on a processor the text is "can't allocate memory", on GPUs
    /// "out of memory".
    fn from(error: TchError) -> Self {
        let text = error.to_string();
        match text.contains("out of memory") || text.contains("allocate memory") {
            true => Self::OutOfMemory,
            false => Self::Torch(first_line(&error)),
        }
    }
}

impl From<TorchLoadError> for EngineError {
    /// Error of a batch or of a sequence.
    fn from(error: TorchLoadError) -> Self {
        match error {
            TorchLoadError::OutOfMemory => Self::DeviceMemory,
            other => Self::Device(other.to_string()),
        }
    }
}

/// Message of libtorch without its stack trace.
pub(crate) fn first_line(error: &TchError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}
