//! What a daemon is to do.

use crate::cli::args::{Layers, RunArgs, parse_layers};
use crate::cli::failure::{Failure, Kind};
use crate::config::Config;

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

impl Plan {
    /// Layers to serve, if any: of the command line, else of the configuration.
    pub(super) fn wanted_layers(&self, config: &Config) -> Result<Option<Layers>, Failure> {
        match self.args.layers {
            Some(layers) => Ok(Some(layers)),
            None => configured_layers(config),
        }
    }
}

/// Layers to serve according to the configuration, if any.
pub(crate) fn configured_layers(config: &Config) -> Result<Option<Layers>, Failure> {
    let host = &config.research.distributed_inference.host;
    if !host.serve_shards {
        return Ok(None);
    }
    parse_layers(&host.serve_layers).map(Some).map_err(|why| {
        Failure::new(
            Kind::Config,
            format!("the setting research.distributed_inference.host.serve_layers: {why}"),
        )
        .hint("for example \"auto\" or \"0-14\"")
    })
}
