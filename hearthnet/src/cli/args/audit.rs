//! Arguments of `audit`.

use hearthnet_hub::ModelRef;

use super::values::model_ref;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum AuditCommand {
    /// List the disputes, the verdicts on them, and the nodes that they count against.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Compute the rows of disputes, and publish a verdict. Takes an anchor that is no party.
    ///
    /// Needs the layers that the dispute is about. Without a name, all open disputes are checked of
    /// which the evidence is here or can be fetched.
    Check(CheckArgs),
    /// Withdraw this node's verdict on a dispute, for instance after a faulty machine was mended.
    Withdraw {
        /// First digits of the dispute's id, as `audit list` shows them.
        dispute: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// First digits of the dispute's id, as `audit list` shows them [default: all open ones].
    pub(crate) dispute: Option<String>,
    /// Model file with the weights of the dispute [default: the one on this machine].
    #[arg(long, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
