//! What `hearthnet diagnose` takes.

use std::time::Duration;

use hearthnet_orchestrator::link::HostAddr;

use super::community::parse_time;

#[derive(Debug, clap::Args)]
pub(crate) struct DiagnoseArgs {
    /// How far to look back, for example 10m, 2h or 1d.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_time)]
    pub(crate) since: Duration,
    /// Only what one pipeline went through: its id, or how the id ends.
    #[arg(long, value_name = "ID")]
    pub(crate) pipeline: Option<String>,
    /// A standalone host, as its `shard serve` prints it (repeat for more). It tells
    /// whom it admits what concerns him, and who holds its own key everything.
    #[arg(long, value_name = "ENDPOINT#NODEID")]
    pub(crate) shard: Vec<HostAddr>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}
