//! Arguments of `hearthnet diagnose`.

use std::time::Duration;

use hearthnet_orchestrator::link::HostAddr;

use super::values::parse_time;

#[derive(Debug, clap::Args)]
pub(crate) struct DiagnoseArgs {
    /// How far to look back, for example 10m, 2h or 1d.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_time)]
    pub(crate) since: Duration,
    /// Only events of one pipeline: its id, or the last characters of the id.
    #[arg(long, value_name = "ID")]
    pub(crate) pipeline: Option<String>,
    /// A standalone host, as its `shard serve` prints it (repeat for more). It reports to an
    /// admitted caller the events of that caller, and to its own key all events.
    #[arg(long, value_name = "ENDPOINT#NODEID")]
    pub(crate) shard: Vec<HostAddr>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}
