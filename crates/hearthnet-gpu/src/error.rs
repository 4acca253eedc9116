//! Errors of a card.

use hearthnet_engine::{EngineError, LoadError};

/// Reason why a card cannot be used, or not any more. Each message is one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No Vulkan, Metal or DirectX 12 driver, or none that names a card.
    #[error("no driver of a graphics card was found")]
    NoDriver,
    /// The configured index is not that of a card.
    #[error("there is no graphics card {0} on this machine")]
    NotFound(usize),
    /// A limit of the driver is below what the kernels need.
    #[error("the driver of {card} allows {found} {limit}, but {needed} are needed")]
    TooSmall {
        card: String,
        limit: &'static str,
        found: u64,
        needed: u64,
    },
    /// The driver did not open the card.
    #[error("{card} could not be opened: {reason}")]
    Open { card: String, reason: String },
    /// A kernel gave other bytes than the specification, in every arithmetic.
    #[error("{card} computes other bytes than the processor in the kernel {kernel}")]
    SelfTest { card: String, kernel: String },
    /// The driver did not answer in time.
    #[error("the driver of the graphics card did not answer within {seconds} s")]
    Hangs { seconds: u64 },
    /// Memory of the card, or of the driver, is used up.
    #[error("the graphics card has no room for {bytes} bytes more")]
    OutOfMemory { bytes: u64 },
    /// A buffer larger than the driver can bind.
    #[error("the graphics card cannot bind {bytes} bytes at once, only {most}")]
    TooLarge { bytes: u64, most: u64 },
    /// The card was removed or reset, or its driver has failed.
    #[error("the graphics card was lost: {0}")]
    Lost(String),
}

impl From<GpuError> for EngineError {
    /// Error of a batch or of a sequence.
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::OutOfMemory { .. } | GpuError::TooLarge { .. } => Self::DeviceMemory,
            other => Self::Device(other.to_string()),
        }
    }
}

/// Error of loading layers onto a card.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuLoadError {
    /// The model, its file, or a feature that this engine does not compute.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The card.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

impl GpuLoadError {
    pub(crate) fn unsupported(what: &str) -> Self {
        let what = format!("{what} by a graphics card; the processor computes this model");
        LoadError::Unsupported(what).into()
    }
}
