//! What a daemon is to do.

use crate::cli::args::RunArgs;

#[derive(Debug)]
pub(crate) struct Plan {
    /// Arguments; they override the configuration.
    pub(crate) args: RunArgs,
    /// Started by `shard serve`: prints the layers when ready, and ends if they cannot be served.
    pub(crate) for_layers: bool,
    pub(crate) threads: Option<usize>,
    /// Address for Prometheus; overrides the configuration.
    pub(crate) metrics: Option<String>,
}
