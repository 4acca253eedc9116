//! Arguments for private layers, shared by several commands.

#[derive(Debug, Default, Clone, Copy, PartialEq, clap::Args)]
pub(crate) struct PrivateArgs {
    /// First layers that this machine computes itself, so that no host receives rows of the
    /// embedding table, which reveal the prompt [default:
    /// research.distributed_inference.private_first_layers, 2].
    #[arg(long, value_name = "N")]
    pub(crate) private_first: Option<u32>,
    /// Last layers that this machine computes itself [default:
    /// research.distributed_inference.private_last_layers, 0].
    #[arg(long, value_name = "N")]
    pub(crate) private_last: Option<u32>,
}
