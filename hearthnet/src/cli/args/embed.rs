//! Arguments of `hearthnet embed`.

use hearthnet_hub::ModelRef;

use super::values::{MODEL_OR_DEFAULT, model_ref};

#[derive(Debug, clap::Args)]
pub(crate) struct EmbedArgs {
    #[arg(long, help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// Texts. Without one, each line of standard input is a text.
    pub(crate) texts: Vec<String>,
    /// Threads to compute with; 0: as the configuration says.
    #[arg(long, default_value_t = 0)]
    pub(crate) threads: usize,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
