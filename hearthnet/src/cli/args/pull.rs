//! Arguments of `hearthnet model pull`.

use std::path::PathBuf;

use hearthnet_files::Digest;

use super::{Layers, home_path, parse_layers};

#[derive(Debug, Default, clap::Args)]
pub(crate) struct PullArgs {
    /// Take the file from this path instead; it is checked like any other source. With --layers:
    /// take pieces from this file, part or folder (such as a drive) first.
    #[arg(long, value_name = "PATH", value_parser = home_path(), conflicts_with_all = ["sha256", "force"])]
    pub(crate) from: Option<PathBuf>,
    /// SHA-256 of the whole file, for a model that no catalogue pins.
    #[arg(long, value_name = "HEX")]
    pub(crate) sha256: Option<Digest>,
    /// Fetch it again even if it is here.
    #[arg(long)]
    pub(crate) force: bool,
    /// Fetch these layers of an adopted model, from members and its sources; `auto`: those that the
    /// community lacks most.
    #[arg(long, value_name = "LO-HI|auto", value_parser = parse_layers, conflicts_with_all = ["sha256", "force"])]
    pub(crate) layers: Option<Layers>,
}
