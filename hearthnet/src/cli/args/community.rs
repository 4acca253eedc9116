//! Arguments of `hearthnet community`, `serve`, `log`, `backup` and `restore`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use hearthnet_bus::log::Level;

use super::engine::HostEngineArgs;
use super::service::AnswerArgs;
use super::values::{
    Layers, MODEL_OR_DEFAULT, home_path, model_ref, parse_layers, parse_node_listen, parse_time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum CommunityCommand {
    /// Found a community; this node becomes its first anchor.
    Create(CreateArgs),
    /// Print a code with which another person can join.
    Invite(InviteArgs),
    /// Join a community with a code.
    Join(JoinArgs),
    /// List the members of the community.
    Members {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Raise a member's level.
    Promote(LevelArgs),
    /// Lower a member's level.
    Demote(LevelArgs),
    /// Revoke a node for good; its open sessions end at once.
    Revoke(RevokeArgs),
    /// List the invites: who made them, who used them, and how many uses are left.
    Invites {
        /// Also show invites that expired, were used up or withdrawn.
        #[arg(long)]
        all: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Withdraw an invite: its code no longer admits anyone.
    Withdraw {
        /// The invite's id, as `community invites` shows it, or its code; `-` takes a line of standard
        /// input.
        #[arg(value_name = "INVITE")]
        invite: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Replace this home's revoked or frozen key with a new one, signed by the root key on this
    /// machine.
    ///
    /// For a home that was revoked, or whose key is frozen because an old copy of its data was
    /// used. If the key is valid, the command sends events signed by the root key to members that
    /// lack them.
    Renew(RenewArgs),
    /// Leave the community; its data on this machine is put aside, so that the node can join again.
    Leave(LeaveArgs),
    /// Show the community's policy, or change it.
    Policy(PolicyArgs),
    /// Protect the root key on this machine with a passphrase, or change the passphrase.
    ///
    /// A copy of root.key is then useless without the passphrase, and every command that signs with
    /// the key asks for it. A lost passphrase cannot be recovered. In scripts, write the old
    /// passphrase (if there is one) and the new one as lines of standard input.
    Passphrase {
        /// Remove the passphrase.
        #[arg(long)]
        remove: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    /// Name of the community, at most 64 bytes.
    pub(crate) name: String,
    /// Whether the community uses distributed inference [default: as policy.research.enable is
    /// here].
    #[arg(long, value_name = "on|off", value_parser = on_off())]
    pub(crate) research: Option<bool>,
    /// Protect the root key with a passphrase, which is asked for, or is a line of standard input.
    #[arg(long)]
    pub(crate) passphrase: bool,
    /// Name of this node that other members see [default: node.name, else the machine's name].
    #[arg(long = "as", value_name = "NAME")]
    pub(crate) as_name: Option<String>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct InviteArgs {
    /// Level of the new member: member chats, trusted also serves layers, anchor also invites.
    #[arg(long, value_parser = level(), default_value = "member")]
    pub(crate) level: Level,
    /// How many nodes may join with the code.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(hearthnet_bus::log::MAX_USES)))]
    pub(crate) uses: u32,
    /// Validity of the code, for example 30m, 24h or 7d.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_time)]
    pub(crate) expires: Duration,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Only of `up`: a node starts here right after.
    #[arg(skip)]
    pub(crate) node_starts: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct JoinArgs {
    /// The code that a member printed with `community invite`. Without it, it is asked for; `-` takes a
    /// line of standard input. (Other users of this machine can read command lines.)
    #[arg(value_name = "CODE")]
    pub(crate) code: Vec<String>,
    /// Name of this node that other members see [default: node.name, else the machine's name].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Whether this machine takes part in distributed inference, if the configuration does not say
    /// so yet [default: as the community does].
    #[arg(long, value_name = "on|off", value_parser = on_off())]
    pub(crate) research: Option<bool>,
    /// How long to look for a node of the community, for example 30s.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_time)]
    pub(crate) wait: Duration,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LevelArgs {
    /// Node id, its short form, or the member's name.
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    /// The level to set [default: the next one].
    #[arg(value_parser = level())]
    pub(crate) level: Option<Level>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RevokeArgs {
    /// Node id, its short form, or the member's name.
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    /// Do not ask for confirmation.
    #[arg(long, short)]
    pub(crate) yes: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LeaveArgs {
    /// Do not ask for confirmation.
    #[arg(long, short)]
    pub(crate) yes: bool,
    /// Leave even if no member can be told; the others go on counting this node as a member.
    #[arg(long)]
    pub(crate) anyway: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RenewArgs {
    /// Do not ask for confirmation.
    #[arg(long, short)]
    pub(crate) yes: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BackupArgs {
    /// File to write; it must not exist yet, and only you will be able to read it.
    pub(crate) file: std::path::PathBuf,
    /// Include the community's root key, if it is here. Anyone with the file can then make anchors.
    #[arg(long)]
    pub(crate) with_root_key: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// A file that `hearthnet backup` wrote.
    pub(crate) file: std::path::PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PolicyArgs {
    /// Whether the community uses distributed inference.
    #[arg(long, value_name = "on|off", value_parser = on_off())]
    pub(crate) research: Option<bool>,
    /// The lowest level that may invite members (trusted ones are invited by anchors).
    #[arg(long, value_parser = level(), value_name = "LEVEL")]
    pub(crate) who_may_invite: Option<Level>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

fn level() -> impl TypedValueParser<Value = Level> {
    let help = |level: Level| match level {
        Level::Member => "May ask for answers, and read and write the log",
        Level::Trusted => "May serve layers, too",
        Level::Anchor => "May invite, promote, demote and revoke members, too",
    };
    let known = [Level::Member, Level::Trusted, Level::Anchor];
    PossibleValuesParser::new(
        known.map(|level| PossibleValue::new(level.into_str()).help(help(level))),
    )
    .try_map(move |text| {
        let level = known.into_iter().find(|level| level.into_str() == text);
        level.ok_or("no level")
    })
}

fn on_off() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|text| text == "on")
}

#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    #[arg(long, help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<hearthnet_hub::ModelRef>,
    /// Serve layers of the model as well: the first and the last, for example 0-14, or `auto`, what
    /// the community lacks most [default: research.distributed_inference.host.serve_layers, if
    /// serve_shards is set there].
    #[arg(long, value_name = "LO-HI|auto", value_parser = parse_layers, conflicts_with_all = ["shard", "local"])]
    pub(crate) layers: Option<Layers>,
    #[command(flatten)]
    pub(crate) engine: HostEngineArgs,
    /// Address to listen on; port 0 takes a free one [default: node.listen].
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_node_listen)]
    pub(crate) listen: Option<String>,
    /// Print one line of JSON when ready.
    #[arg(long)]
    pub(crate) json: bool,
    /// Stop when standard input ends, so that the node ends with its parent process.
    #[arg(long, hide = true)]
    pub(crate) lifeline: bool,
    /// Follow the community's adopted models, as `hearthnet up` does: fetch and serve layers.
    #[arg(long, hide = true, conflicts_with_all = ["shard", "local", "model", "layers"])]
    pub(crate) up: bool,
    /// Take pieces of adopted models first from this file or folder.
    #[arg(long, hide = true, value_name = "PATH", value_parser = home_path(), requires = "up")]
    pub(crate) from: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) answers: AnswerArgs,
    /// Only of `shard serve`: prints the layers when ready, and ends if they cannot be served.
    #[arg(skip)]
    pub(crate) for_layers: bool,
    /// Compute threads. Only of `shard serve`.
    #[arg(skip)]
    pub(crate) threads: Option<usize>,
    /// Address for Prometheus; overrides the configuration. Only of `shard serve`.
    #[arg(skip)]
    pub(crate) metrics: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LogCommand {
    /// Print the events, oldest first.
    Show {
        /// Only the last N events.
        #[arg(long, value_name = "N")]
        last: Option<usize>,
        /// Print one JSON object per line.
        #[arg(long)]
        json: bool,
    },
    /// Check the file, every signature and every hash chain, and derive the members from the
    /// events.
    Verify {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write again without asking other members for events that this copy of the log lacks.
    ///
    /// After a restore or a repair this node writes no new events until it has synced with the other
    /// members. Skip that only if the missing ones will not come back, or have no later events of
    /// this node: two histories of one node freeze its key for good.
    Resume {
        /// Confirm that no other member has later events of this node.
        #[arg(long)]
        yes: bool,
    },
    /// Write every event with its signed bytes, one JSON object per line.
    Export {
        /// File to write; it must not exist yet [default: standard output].
        #[arg(long, short, value_name = "FILE")]
        output: Option<std::path::PathBuf>,
    },
}
