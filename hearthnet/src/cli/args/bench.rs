//! Arguments of `hearthnet bench`.

use std::str::FromStr;

use clap::Subcommand;
use hearthnet_bus::NodeId;
use hearthnet_engine::kernels::Isa;
use hearthnet_files::spec::CacheDtype;
use hearthnet_hub::ModelRef;
use hearthnet_orchestrator::router::PolicyName;

use super::engine::{EngineKind, TorchArgs};
use super::private::PrivateArgs;
use super::values::{Layers, MODEL_OR_DEFAULT, model_ref, parse_layers};

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Tokens per second of prefill and decode.
    Engine(EngineArgs),
    /// Speed of one answer and of many over host processes, compared with this machine alone.
    Mesh(MeshArgs),
    /// Round trips and throughput between two processes on loopback, by size.
    Transport {
        /// Round trips per size.
        #[arg(long, default_value_t = 2000)]
        rounds: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// Run the echoing side (started by the command itself).
        #[arg(long, hide = true, value_name = "NODEID")]
        echo_for: Option<NodeId>,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct EngineArgs {
    #[arg(long, help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// Thread counts to measure.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub(crate) threads: Vec<usize>,
    /// Tokens of prompt.
    #[arg(long, value_delimiter = ',', default_value = "512")]
    pub(crate) prefill: Vec<u32>,
    /// Tokens to decode.
    #[arg(long, default_value_t = 64)]
    pub(crate) decode: u32,
    /// Tokens that precede the measured ones.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub(crate) depth: Vec<u32>,
    /// Times to measure; the median is printed.
    #[arg(long, default_value_t = 5)]
    pub(crate) repetitions: u32,
    /// Chats that decode at once, each number measured by itself.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) batch: Vec<u32>,
    /// Instruction set of the exact engine's kernels: avx512, avxvnni, avx2 or portable. Default:
    /// the best that this machine has. Results are identical with each.
    #[arg(long)]
    pub(crate) isa: Option<Isa>,
    /// Format of keys and values: f16 or q8_0. Default: the setting cache_dtype.
    #[arg(long, value_name = "FORMAT")]
    pub(crate) cache: Option<CacheDtype>,
    /// Engine that computes the layers. Embedding and logits always use the exact engine, as a
    /// caller does.
    #[arg(long, value_name = "ENGINE", value_enum, default_value_t = EngineKind::Exact)]
    pub(crate) engine: EngineKind,
    #[command(flatten)]
    pub(crate) torch: TorchArgs,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Layers and compute threads of a host process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostLayers {
    /// First and last layer.
    pub(crate) layers: (u32, u32),
    pub(crate) threads: usize,
}

impl FromStr for HostLayers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (range, threads) = text.split_once(':').unwrap_or((text, "1"));
        let wrong = || "write layers and threads, for example 0-14 or 0-14:2".to_owned();
        let Layers::Range(lo, hi) = parse_layers(range)? else {
            return Err(wrong());
        };
        let threads = threads.parse::<usize>().ok();
        let threads = threads.filter(|n| (1..=1024).contains(n));
        Ok(Self {
            layers: (lo, hi),
            threads: threads.ok_or_else(wrong)?,
        })
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct MeshArgs {
    #[arg(long, help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// Host processes, each with one thread, and with a core of its own if there are enough cores.
    #[arg(long, default_value_t = 2)]
    pub(crate) shards: u32,
    /// A host process with these layers and compute threads [default: 1 thread]. Give it again for
    /// each host; their layers may overlap.
    #[arg(long, value_name = "LO-HI[:THREADS]", conflicts_with = "shards")]
    pub(crate) host: Vec<HostLayers>,
    /// Compare routing policies over the hosts instead, the first one with each other: greedy,
    /// planned, petals_like, auto.
    #[arg(long, value_name = "POLICY,POLICY", value_delimiter = ',')]
    pub(crate) policy: Vec<PolicyName>,
    /// Measure the cost of receipts instead: one chat with and without them in turns, and the hashes
    /// and signatures by themselves.
    #[arg(long, conflicts_with = "policy")]
    pub(crate) receipts: bool,
    /// Tokens of the long prompt.
    #[arg(long, default_value_t = 512)]
    pub(crate) prefill: u32,
    /// Tokens of each answer, at most.
    #[arg(long, default_value_t = 96)]
    pub(crate) decode: u32,
    /// Chats at the same time.
    #[arg(long, default_value_t = 8)]
    pub(crate) chats: usize,
    #[command(flatten)]
    pub(crate) private: PrivateArgs,
    /// Times to measure; the median is printed.
    #[arg(long, default_value_t = 5)]
    pub(crate) repetitions: u32,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_layers_and_threads() {
        let host = |layers, threads| HostLayers { layers, threads };
        let parsed = |text: &str| text.parse::<HostLayers>().unwrap();
        assert_eq!(parsed("0-14"), host((0, 14), 1));
        assert_eq!(parsed("15-29:4"), host((15, 29), 4));
        for wrong in [
            "auto",
            "3",
            "0-14:0",
            "0-14:",
            "0-14:x",
            "9-3:1",
            "0-14:1025",
        ] {
            assert!(wrong.parse::<HostLayers>().is_err(), "{wrong}");
        }
    }
}
