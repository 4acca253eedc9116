//! Arguments of `hearthnet up`.

use std::path::PathBuf;

use hearthnet_hub::ModelRef;

use super::values::{home_path, model_ref, parse_listen, parse_node_listen};

#[derive(Debug, clap::Args)]
pub(crate) struct UpArgs {
    /// Found a community with this name, if this node is in none.
    #[arg(long, value_name = "NAME", conflicts_with = "join")]
    pub(crate) found: Option<String>,
    /// Join with this invite code, if this node is in no community; `-` takes a line of standard
    /// input. (Other users of this machine can read command lines.)
    #[arg(long, value_name = "CODE")]
    pub(crate) join: Option<String>,
    /// Name of this node that other members see [default: node.name, else the machine's name].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Share of this machine's free memory for layers, in per cent [default: manners.memory_percent,
    /// which is 50].
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) memory: Option<u8>,
    /// Model that a new community adopts [default: model.default, else smollm2-135m-instruct].
    #[arg(long, value_name = "MODEL", value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// In this run, take pieces of adopted models first from this model file, part, or folder with
    /// one of them, such as a drive, or Hugging Face directory.
    #[arg(long, value_name = "PATH", value_parser = home_path())]
    pub(crate) from: Option<PathBuf>,
    /// Address to listen on; port 0 takes a free one [default: node.listen].
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_node_listen)]
    pub(crate) listen: Option<String>,
    /// Address of the page and of the OpenAI-compatible interface; port 0 takes a free one [default:
    /// http.listen, 127.0.0.1:7602].
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_listen)]
    pub(crate) http: Option<String>,
    /// Open the page to phones in this network, with a key in its link and a QR code. Makes a key if
    /// http.api_key_file names none.
    #[arg(long, conflicts_with = "http")]
    pub(crate) phone: bool,
    /// Start this node at every boot as well, with these addresses: writes and enables a unit of the
    /// user's systemd.
    #[arg(long)]
    pub(crate) at_boot: bool,
    /// Do not open the page in a browser.
    #[arg(long)]
    pub(crate) no_open: bool,
}
