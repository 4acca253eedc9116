//! Arguments of `hearthnet plan`.

use clap::ValueEnum;
use hearthnet_hub::ModelRef;
use serde::Serialize;

use super::values::{MODEL_OR_DEFAULT, model_ref};

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    #[arg(help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// Purpose of the plan.
    #[arg(long = "for", value_name = "PURPOSE", value_enum, default_value_t = PlanFor::Chat)]
    pub(crate) purpose: PlanFor,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PlanFor {
    /// Shortest time per token of one chat
    Chat,
    /// Most tokens per second of many chats together
    Batch,
}
