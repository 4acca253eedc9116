//! Devices and number formats that a user can choose, and their names.

use std::str::FromStr;

use tch::Kind;

/// Text that names no device or number format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    #[error("devices are auto, cpu, cuda, cuda:N and mps")]
    Device,
    #[error("formats are fp16, bf16 and fp32")]
    Dtype,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum DeviceChoice {
    /// The first that works of: first CUDA device, Apple's GPU, processor.
    #[default]
    Auto,
    Cpu,
    /// NVIDIA GPU with this index. Builds of libtorch for AMD GPUs use the same name.
    #[strum(to_string = "cuda:{0}")]
    Cuda(usize),
    /// Apple's GPU.
    Mps,
}

/// Format of weights, keys, values and the activations multiplied with them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 binary16.
    Fp16,
    /// bfloat16: the range of `Fp32`, 8 significant bits.
    Bf16,
    /// IEEE 754 binary32.
    Fp32,
}

impl Dtype {
    pub const ALL: [Self; 3] = [Self::Fp16, Self::Bf16, Self::Fp32];

    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::Fp16 => Kind::Half,
            Self::Bf16 => Kind::BFloat16,
            Self::Fp32 => Kind::Float,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Fp16 | Self::Bf16 => 2,
            Self::Fp32 => 4,
        }
    }
}

impl FromStr for Dtype {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let mut all = Self::ALL.into_iter();
        all.find(|dtype| dtype.to_string() == text)
            .ok_or(OptionError::Dtype)
    }
}

impl FromStr for DeviceChoice {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "mps" => Ok(Self::Mps),
            // libtorch stores the index in a signed byte.
            _ => text
                .strip_prefix("cuda:")
                .and_then(|number| number.parse::<i8>().ok())
                .and_then(|number| usize::try_from(number).ok())
                .map(Self::Cuda)
                .ok_or(OptionError::Device),
        }
    }
}
