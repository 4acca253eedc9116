//! Arguments that choose the engine, shared by several commands; roles of the processes around it.

use clap::{Subcommand, ValueEnum};
use hearthnet_shard::Device;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EngineKind {
    /// HearthNet's own engine, on processors: the same bytes on every machine
    Exact,
    /// libtorch, for graphics cards: close to the exact engine, but not identical
    Torch,
}

/// Role of a process that a daemon starts for its engines. The process is given a connection as
/// standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Subcommand, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum EngineCommand {
    /// Start engines until the daemon ends.
    Starter,
    /// Compute until the connection ends.
    Run,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
pub(crate) struct TorchArgs {
    /// Device: auto (a graphics card if it computes the same bytes and is faster), cpu, gpu or gpu:N;
    /// for libtorch auto, cpu, cuda or cuda:N (AMD cards, too), or mps [default:
    /// research.distributed_inference.host.device, auto].
    #[arg(long, value_name = "DEVICE", value_parser = parse_device)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<String>,
    /// Number format for libtorch: fp16, bf16, fp32, or auto (fp32 on a processor, elsewhere the
    /// format that the model sends from layer to layer) [default:
    /// research.distributed_inference.host.dtype, auto].
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dtype: Option<String>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
pub(crate) struct HostEngineArgs {
    /// Engine that computes the layers [default: research.distributed_inference.backend, exact].
    #[arg(long, value_name = "ENGINE", value_enum)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) backend: Option<EngineKind>,
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) torch: TorchArgs,
}

/// Parses the name of a device of one of the engines.
pub(crate) fn parse_device(text: &str) -> Result<String, String> {
    // libtorch stores the device index in a signed byte.
    let number = |n: &str| n.parse::<i8>().is_ok_and(|n| n >= 0);
    let known = text.parse::<Device>().is_ok()
        || ["cuda", "mps"].contains(&text)
        || text.strip_prefix("cuda:").is_some_and(number);
    match known {
        true => Ok(text.to_owned()),
        false => Err("devices are auto, cpu, gpu, gpu:N, cuda, cuda:N and mps".to_owned()),
    }
}

pub(crate) fn parse_dtype(text: &str) -> Result<String, String> {
    match ["auto", "fp16", "bf16", "fp32"].contains(&text) {
        true => Ok(text.to_owned()),
        false => Err("formats are auto, fp16, bf16 and fp32".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_formats_are_those_of_the_engines() {
        // `crates/hearthnet-torch/tests/parts.rs` parses those of libtorch.
        let torch = ["auto", "cpu", "cuda", "cuda:0", "cuda:127", "mps"];
        for device in torch.into_iter().chain(["gpu", "gpu:3"]) {
            assert_eq!(parse_device(device).as_deref(), Ok(device));
        }
        for wrong in ["", "CPU", "cuda:", "cuda:-1", "cuda:128", "gpu:"] {
            assert!(parse_device(wrong).is_err(), "{wrong}");
        }
        for dtype in ["auto", "fp16", "bf16", "fp32"] {
            assert_eq!(parse_dtype(dtype).as_deref(), Ok(dtype));
        }
        assert!(parse_dtype("f16").is_err());
    }
}
