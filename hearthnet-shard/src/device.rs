//! Devices of the exact engine.

use std::fmt;
use std::str::FromStr;

/// Device that computes the layers of a host, in the exact engine's arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_enums)] // There are no others.
pub enum Device {
    /// A graphics card if it computes the same bytes and is faster, otherwise the processor.
    #[default]
    Auto,
    Processor,
    /// The graphics card with this index, or the first.
    Card(Option<u16>),
}

/// Text that names no device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("devices are auto, cpu, gpu and gpu:N")]
pub struct NoDevice;

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Processor => f.write_str("cpu"),
            Self::Card(None) => f.write_str("gpu"),
            Self::Card(Some(index)) => write!(f, "gpu:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = NoDevice;

    fn from_str(text: &str) -> Result<Self, NoDevice> {
        Ok(match text {
            "auto" => Self::Auto,
            "cpu" => Self::Processor,
            "gpu" => Self::Card(None),
            _ => {
                let index = text.strip_prefix("gpu:").ok_or(NoDevice)?;
                // `parse` would accept a sign.
                let digits = index.bytes().all(|byte| byte.is_ascii_digit());
                let index = index.parse().ok().filter(|_| digits);
                Self::Card(Some(index.ok_or(NoDevice)?))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_round_trip_as_text_and_other_text_is_none() {
        for text in ["auto", "cpu", "gpu", "gpu:0", "gpu:17"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        for text in ["", "GPU", "gpu:", "gpu:-1", "gpu:+1", "gpu:70000", "cuda"] {
            assert_eq!(text.parse::<Device>(), Err(NoDevice), "{text}");
        }
    }
}
