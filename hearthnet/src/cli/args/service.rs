//! Arguments of `serve` for the chats of other programs.

use hearthnet_orchestrator::link::HostAddr;

use super::private::PrivateArgs;
use super::values::parse_listen;

#[derive(Debug, Default, clap::Args)]
pub(crate) struct AnswerArgs {
    /// Address of the OpenAI-compatible HTTP interface; port 0 takes a free one [default:
    /// http.listen, 127.0.0.1:7602].
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_listen)]
    pub(crate) http: Option<String>,
    /// Unix socket of the HTTP interface, beside its address [default: http.socket, none].
    #[arg(long, value_name = "PATH")]
    pub(crate) http_socket: Option<String>,
    /// Answer chats over this host, as its `shard serve` prints it, outside of any community
    /// (repeat for more).
    #[arg(long, value_name = "ENDPOINT#NODEID", conflicts_with_all = ["local", "listen"])]
    pub(crate) shard: Vec<HostAddr>,
    /// Answer chats on this machine alone, outside of any community.
    #[arg(long, conflicts_with_all = ["listen", "private_first", "private_last"])]
    pub(crate) local: bool,
    /// End an answer with an error when the hosts cannot finish it, instead of continuing on this
    /// machine.
    #[arg(long, conflicts_with = "local")]
    pub(crate) no_fallback: bool,
    #[command(flatten)]
    pub(crate) private: PrivateArgs,
}

impl AnswerArgs {
    /// Whether the arguments name the hosts, or this machine, instead of a community.
    pub(crate) fn is_standalone(&self) -> bool {
        self.local || !self.shard.is_empty()
    }
}
