//! Command-line arguments.

mod audit;
mod bench;
mod community;
mod diagnose;
mod embed;
mod engine;
mod http_key;
mod plan;
mod private;
mod pull;
pub(crate) mod sampling;
mod service;
mod up;
mod values;

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{ArgAction, ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use hearthnet_bus::NodeId;
use hearthnet_files::spec::CacheDtype;
use hearthnet_hub::ModelRef;
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::link::HostAddr;

pub(crate) use audit::{AuditCommand, CheckArgs};
pub(crate) use bench::{BenchCommand, EngineArgs, HostLayers, MeshArgs};
pub(crate) use community::{
    BackupArgs, CommunityCommand, CreateArgs, InviteArgs, JoinArgs, LeaveArgs, LevelArgs,
    LogCommand, PolicyArgs, RenewArgs, RestoreArgs, RevokeArgs, RunArgs,
};
pub(crate) use diagnose::DiagnoseArgs;
pub(crate) use embed::EmbedArgs;
pub(crate) use engine::{
    EngineCommand, EngineKind, HostEngineArgs, TorchArgs, parse_device, parse_dtype,
};
pub(crate) use http_key::{AddKeyArgs, HttpKeyCommand};
pub(crate) use plan::{PlanArgs, PlanFor};
pub(crate) use private::PrivateArgs;
pub(crate) use pull::PullArgs;
pub(crate) use sampling::SamplingArgs;
pub(crate) use service::AnswerArgs;
pub(crate) use up::UpArgs;
pub(crate) use values::{
    Layers, TimeOfDay, parse_layers, parse_listen, parse_node_listen, parse_time_of_day,
};
use values::{MODEL, MODEL_OR_DEFAULT, home_path, model_ref, parse_time};

const EXIT_CODES: &str = "\
Exit status: 0 success, 1 internal, 2 command line or configuration, 3 bad_request, \
4 shard_unavailable, 5 pipeline_stalled, 6 weights_mismatch, 7 experimental_disabled, \
8 model file, 9 port, disk, memory or threads of this machine, 10 community (not a member, no right, no answer), 11 busy, 12 arithmetic_mismatch, 13 key, file or directory of this machine that needs to be fixed, 130 Ctrl-C, 141 output closed by its reader.";

/// Run one language model together across several homes, each of which holds some of its layers.
#[derive(Debug, Parser)]
#[command(name = "hearthnet", version = env!("HEARTHNET_VERSION"), after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Global {
    /// Configuration file [default: the user's own, if there is one].
    #[arg(long, global = true, value_name = "FILE", env = "HEARTHNET_CONFIG", value_parser = home_path())]
    pub(crate) config: Option<PathBuf>,
    /// Override one setting for this run, for example policy.research.enable=true.
    #[arg(long, global = true, value_name = "KEY=VALUE", action = ArgAction::Append)]
    pub(crate) set: Vec<String>,
    /// Model catalogue [default: the one built into the program].
    #[arg(long, global = true, value_name = "FILE", env = "HEARTHNET_CATALOGUE", value_parser = home_path())]
    pub(crate) catalogue: Option<PathBuf>,
    /// Directory of this node's key [default: ~/.local/share/hearthnet].
    #[arg(long, global = true, value_name = "DIR", env = "HEARTHNET_DATA_DIR", value_parser = home_path())]
    pub(crate) data_dir: Option<PathBuf>,
    /// File whose first line is the passphrase of the community's root key, for example /dev/fd/3
    /// [default: asked for, or a line of standard input].
    #[arg(long, global = true, value_name = "FILE", value_parser = home_path())]
    pub(crate) passphrase_file: Option<PathBuf>,
    /// Weight type for a model that is a Hugging Face directory, for example q8_0 [default:
    /// unchanged].
    #[arg(long, global = true, value_name = "TYPE")]
    pub(crate) quantize: Option<String>,
}

impl Global {
    /// The same options as arguments of another process. `--set` of this process is in force there,
    /// too.
    pub(crate) fn to_args(&self) -> Vec<OsString> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.clone().into_os_string());
        let text = |text: &str| Some(OsString::from(text));
        let single = [
            ("--config", path(&self.config)),
            ("--catalogue", path(&self.catalogue)),
            ("--data-dir", path(&self.data_dir)),
            ("--passphrase-file", path(&self.passphrase_file)),
            ("--quantize", self.quantize.as_deref().and_then(text)),
        ];
        let sets = self.set.iter().map(|set| ("--set", text(set)));
        let given = single.into_iter().chain(sets);
        given
            .filter_map(|(name, value)| Some([OsString::from(name), value?]))
            .flatten()
            .collect()
    }
}

impl Args {
    /// Reads a command line: the program's name and its arguments.
    pub(crate) fn read(
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<(Self, ArgMatches), clap::Error> {
        let args: Vec<OsString> = args.into_iter().collect();
        let matches = Self::command().try_get_matches_from(&args)?;
        let mut read = Self::from_arg_matches(&matches)?;
        read.global.set = every_set(&args);
        Ok((read, matches))
    }
}

/// The value of each `--set` of a command line that clap has accepted. Of a global option that is
/// given both before and after a subcommand, clap keeps only what stands after it.
fn every_set(args: &[OsString]) -> Vec<String> {
    let mut args = args.iter().map(|arg| arg.to_string_lossy());
    let mut all = Vec::new();
    while let Some(arg) = args.next() {
        match arg.strip_prefix("--set") {
            _ if arg == "--" => break,
            Some("") => all.extend(args.next().map(Cow::into_owned)),
            Some(value) => all.extend(value.strip_prefix('=').map(str::to_owned)),
            None => {}
        }
    }
    all
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Take part: make this machine a node, found or join a community, and run until stopped.
    ///
    /// Asks at most three questions the first time. Later it continues where it was.
    Up(UpArgs),
    /// Make this machine a node: its key, its directory, its configuration.
    Init(InitArgs),
    /// Found or join a community, invite and manage its members.
    #[command(subcommand)]
    Community(CommunityCommand),
    /// Run this node until stopped: in the community, for the layers it holds, and for programs here.
    Serve(RunArgs),
    /// Print the address of this node's page, and its link and QR code for phones.
    ///
    /// Phones reach the page if the node has a key (http.api_key_file) and listens beyond this
    /// machine (http.listen). `hearthnet up --phone` sets both.
    Page {
        /// Open it in a browser.
        #[arg(long)]
        open: bool,
        /// Wait until the node runs, for at most a minute.
        #[arg(long)]
        wait: bool,
    },
    /// Make, list or remove named keys for the HTTP interface, each with limits of its own.
    ///
    /// `hearthnet status` shows their use. They are in force if http.api_key_file names the owner's
    /// key.
    #[command(subcommand)]
    HttpKey(HttpKeyCommand),
    /// Serve no layers to others for a while. Chats of this machine go on.
    Pause(PauseArgs),
    /// Serve layers to others again, after `pause`.
    Resume {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show members, peers, served layers, and the state of the log.
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show which node should hold which layers, and how fast answers would be.
    ///
    /// From what the nodes measured while `hearthnet up` or `serve` runs on them. Changes nothing.
    Plan(PlanArgs),
    /// Show recent events of all reachable nodes in one timeline.
    Diagnose(DiagnoseArgs),
    /// Show, check or export the community's event log.
    #[command(subcommand)]
    Log(LogCommand),
    /// List disputes about wrong rows of hosts, and judge them.
    #[command(subcommand)]
    Audit(AuditCommand),
    /// Write this node's key, its community's log and its configuration into one file.
    Backup(BackupArgs),
    /// Make this machine the node of a backup again.
    Restore(RestoreArgs),
    /// Fetch, inspect or convert model files.
    #[command(subcommand)]
    Model(ModelCommand),
    /// Host layers of a model for other machines.
    #[command(subcommand)]
    Shard(ShardCommand),
    /// Ask a model, on hosts or on this machine.
    Chat(ChatArgs),
    /// Print the vectors of texts, which this machine computes alone.
    ///
    /// Best with a model made for it, such as Qwen3-Embedding. Any other model gives the mean of its
    /// hidden states.
    Embed(EmbedArgs),
    /// Show everything on this machine: host processes, an orchestrator, an answer.
    Demo(DemoArgs),
    /// Measure the engine or the transport.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Check that a host of layers keeps the protocol, whoever wrote its program.
    ///
    /// Connects with this node's key, which the host must admit. Breaks each rule of the protocol on
    /// a connection of its own, and expects the close code of specs/. Needs no weights.
    Conformance(ConformanceArgs),
    /// Attack hosts and nodes of this program, and show which claims of the threat model hold.
    ///
    /// `run` carries out attacks on processes that it starts on this machine, and writes a report;
    /// `list` and `explain` say what they do; `new` writes an attack of your own into a checkout;
    /// `sensitivity` tries lies about rows in all strengths; `detection` counts requests until a lie
    /// is found; `calibrate` measures a model's bands.
    /// These are commands of a second program, hearthnet-adversarial, with a --help of their own.
    #[command(disable_help_flag = true)]
    Adversarial {
        /// run, list, explain, new, sensitivity, detection or calibrate, and its arguments.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "COMMAND"
        )]
        arguments: Vec<OsString>,
    },
    /// Print this node's id (made on first use).
    Id {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the configuration, or check a configuration file.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Compute for a daemon, which starts this itself.
    #[command(subcommand, hide = true)]
    Engine(EngineCommand),
    /// Print a completion script for a shell.
    ///
    /// For example: hearthnet completions bash > ~/.local/share/bash-completion/completions/hearthnet
    Completions {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
    /// Write the manual, a page for each command.
    Man {
        /// Directory to write to; it is created if it does not exist.
        #[arg(value_name = "DIR", value_parser = home_path())]
        directory: PathBuf,
    },
}

impl Command {
    /// Model and engine of the daemon, and a path with weights, if the command starts a daemon.
    pub(crate) fn serves(&self) -> Option<(Option<&ModelRef>, &HostEngineArgs, Option<&Path>)> {
        match self {
            Self::Serve(args) => {
                let from = args.from.as_deref();
                Some((args.model.as_ref(), &args.engine, from))
            }
            Self::Shard(ShardCommand::Serve(args)) => {
                Some((args.model.as_ref(), &args.engine, None))
            }
            _ => None,
        }
    }

    /// Model that the command reads and file that it writes, if the command does nothing else.
    pub(crate) fn reads(&self) -> Option<(ModelRef, Option<&Path>)> {
        let Self::Model(command) = self else {
            return None;
        };
        match command {
            ModelCommand::Verify { model, .. } | ModelCommand::Inspect { model, .. } => {
                Some((model.clone(), None))
            }
            ModelCommand::Convert { model, output, .. } => Some((model.clone(), Some(output))),
            ModelCommand::Import { directory, output } => {
                Some((ModelRef::Path(directory.clone()), output.as_deref()))
            }
            ModelCommand::Pull { .. }
            | ModelCommand::List { .. }
            | ModelCommand::Adopt { .. }
            | ModelCommand::Drop { .. }
            | ModelCommand::Rm { .. } => None,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Fetch a model of the catalogue, or layers of an adopted one, into the user's cache.
    Pull {
        /// Catalogue id, hf:OWNER/REPOSITORY/FILE.gguf, or an https address; with --layers, the name
        /// of an adopted model.
        #[arg(value_parser = model_ref())]
        model: ModelRef,
        #[command(flatten)]
        options: PullArgs,
    },
    /// List the catalogue: models on this machine, and models that could run here and in the
    /// community.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Let the community adopt a model: its nodes fetch and serve parts of it.
    Adopt {
        #[arg(help = MODEL, value_parser = model_ref())]
        model: ModelRef,
        /// Format of keys and values on all nodes: f16, or q8_0 for half of the memory. Part of the
        /// weights id. Default: the setting cache_dtype.
        #[arg(long, value_name = "FORMAT")]
        cache: Option<CacheDtype>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Drop an adopted model: nodes stop serving it and remove their parts.
    Drop {
        /// Name of the model, or the first digits of its weights id, as `model list` shows them.
        #[arg(value_name = "MODEL")]
        model: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a fetched model from this machine.
    Rm {
        #[arg(help = MODEL, value_parser = model_ref())]
        model: ModelRef,
        /// Do not ask for confirmation.
        #[arg(long, short)]
        yes: bool,
    },
    /// Check every byte of a model file against the catalogue's pin, or against its recorded hash.
    Verify {
        #[arg(help = MODEL, value_parser = model_ref())]
        model: ModelRef,
        /// Accept the file as it is now. (A pin of the catalogue cannot be overruled.)
        #[arg(long)]
        accept: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print the contents of a model file.
    Inspect {
        #[arg(help = MODEL, value_parser = model_ref())]
        model: ModelRef,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write a Hugging Face directory (config.json, safetensors, tokenizer) as a model file.
    ///
    /// Every command that takes a model also takes such a directory, and converts it once, into the
    /// user's cache.
    Import {
        /// Directory to read.
        #[arg(value_name = "DIR", value_parser = home_path())]
        directory: PathBuf,
        /// File to write, which must not exist yet [default: one in the user's cache].
        #[arg(long, short, value_name = "FILE", value_parser = home_path())]
        output: Option<PathBuf>,
    },
    /// Write a model file with another weight type.
    Convert {
        #[arg(help = MODEL, value_parser = model_ref())]
        model: ModelRef,
        /// Weight type: f32, f16, q8_0, q6_k, q4_1, q4_k or q4_0.
        #[arg(long, value_name = "TYPE")]
        to: String,
        /// File to write; it must not exist yet.
        #[arg(long, short, value_name = "FILE")]
        output: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ShardCommand {
    /// Serve a range of layers until stopped, as `hearthnet serve --layers`. If a node already runs
    /// here, it is asked to serve them.
    Serve(ServeArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    #[arg(long, help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// First and last layer, for example 0-14, or `auto`: what the community lacks most.
    #[arg(long, value_name = "LO-HI|auto", default_value = "auto", value_parser = parse_layers, long_help = LAYERS)]
    pub(crate) layers: Layers,
    /// Address to listen on; port 0 takes a free one [default: node.listen; without a community
    /// 127.0.0.1:0].
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_node_listen)]
    pub(crate) listen: Option<String>,
    /// Address of the OpenAI-compatible HTTP interface of the community's node; port 0 takes a free
    /// one [default: http.listen, 127.0.0.1:7602].
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "peer_key", value_parser = parse_listen)]
    pub(crate) http: Option<String>,
    /// Admit this node to a standalone host, outside of any community (repeat for more); this node
    /// itself is always admitted.
    #[arg(long, value_name = "NODEID")]
    pub(crate) peer_key: Vec<NodeId>,
    /// Compute threads [default: engine.threads, else one per core].
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    #[command(flatten)]
    pub(crate) engine: HostEngineArgs,
    /// Address for Prometheus metrics; port 0 takes a free one [default: metrics.listen].
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_listen)]
    pub(crate) metrics: Option<String>,
    /// Print the descriptor as one line of JSON when ready.
    #[arg(long)]
    pub(crate) json: bool,
    /// Stop when standard input ends, so that the host ends with its parent process.
    #[arg(long, hide = true)]
    pub(crate) lifeline: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConformanceArgs {
    /// The host, outside of any community, as its `shard serve` prints it.
    #[arg(value_name = "ENDPOINT#NODEID")]
    pub(crate) host: HostAddr,
    /// Values of a row, if the host's descriptor does not state them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) width: Option<u32>,
    /// Leave out the deadlines of idle connections, which take a minute.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ChatArgs {
    /// Question: words, and files whose text belongs to the question. Standard input, unless it is
    /// a terminal, belongs to it too. Without any of them: a conversation.
    #[arg(value_name = "QUESTION|FILE", verbatim_doc_comment)]
    pub(crate) question: Vec<OsString>,
    /// Each line of standard input is a message of one conversation, for programs.
    #[arg(long, conflicts_with_all = ["question", "raw"])]
    pub(crate) lines: bool,
    #[arg(long, help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// A host, as its `shard serve` prints it (repeat for more) [default: those of the community].
    #[arg(long, value_name = "ENDPOINT#NODEID", conflicts_with = "local")]
    pub(crate) shard: Vec<HostAddr>,
    /// Answer on this machine alone.
    #[arg(long, conflicts_with_all = ["private_first", "private_last"])]
    pub(crate) local: bool,
    /// End with an error when the hosts cannot finish the answer, instead of continuing on this
    /// machine.
    #[arg(long, conflicts_with = "local")]
    pub(crate) no_fallback: bool,
    /// Answer in this process even if `hearthnet serve` of the same data directory runs with this
    /// model. (Implied by --shard, --local, --no-fallback and --set.)
    #[arg(long)]
    pub(crate) no_service: bool,
    /// Hosts that may answer: `require`, exact hosts only; `prefer`, exact hosts if they have all
    /// layers; `any`, the best hosts of either kind, also when a host is replaced during the answer
    /// [default: as the configuration says, which is prefer].
    #[arg(long, value_name = "WHICH", value_parser = PossibleValuesParser::new(Exact::NAMES).try_map(|name| name.parse::<Exact>()))]
    pub(crate) exact: Option<Exact>,
    #[command(flatten)]
    pub(crate) private: PrivateArgs,
    /// System message that precedes the conversation.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Continue the prompt as plain text, without the chat template.
    #[arg(long)]
    pub(crate) raw: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// File with a JSON schema: the answer is JSON that it describes. Say in the question that the
    /// answer is JSON, and what is in it.
    #[arg(long, value_name = "FILE", value_parser = home_path())]
    pub(crate) json_schema: Option<PathBuf>,
    /// Print one JSON object at the end instead of the text.
    #[arg(long)]
    pub(crate) json: bool,
    /// Print every frame as a line of JSON while the answer is made.
    #[arg(long, conflicts_with = "json")]
    pub(crate) frames: bool,
    /// Show where the time went.
    #[arg(long)]
    pub(crate) explain: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Question to ask.
    #[arg(default_value = "Why is it good to share?")]
    pub(crate) prompt: String,
    #[arg(long, help = MODEL_OR_DEFAULT, value_parser = model_ref())]
    pub(crate) model: Option<ModelRef>,
    /// Host processes that share the layers evenly [default: 2].
    #[arg(long, value_name = "N")]
    pub(crate) shards: Option<u32>,
    /// Cut points instead of equal shares: first layers of the second and further hosts, as 7,20
    /// for three hosts.
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    pub(crate) cuts: Vec<u32>,
    #[command(flatten)]
    pub(crate) private: PrivateArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// Print one JSON object at the end instead of the text and the table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct InitArgs {
    /// Switch distributed inference on in the configuration that is written.
    #[arg(long)]
    pub(crate) research: bool,
    /// Name of this node that other members see [default: the machine's name].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PauseArgs {
    /// Time after which layers are served again, for example 30m or 2h [default: until `hearthnet
    /// resume`].
    #[arg(long = "for", value_name = "TIME", value_parser = parse_time, conflicts_with = "until")]
    pub(crate) duration: Option<Duration>,
    /// Time of day at which layers are served again, for example 22:00.
    #[arg(long, value_name = "HH:MM", value_parser = parse_time_of_day)]
    pub(crate) until: Option<TimeOfDay>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print every setting, its value, and where the value comes from.
    Show,
    /// Check a configuration file without using it.
    Check {
        /// The file [default: --config, else the user's own].
        #[arg(value_name = "FILE", value_parser = home_path())]
        file: Option<PathBuf>,
    },
}

const LAYERS: &str = "\
First and last layer, for example 0-14, or `auto`.

auto takes a fair share: the model divided by the hosts that serve it, this one included, and \
never more than half as the first one; or, where others serve already and layers are missing, \
the longest missing run if that is more. Of all ranges of that length it takes the one with the \
most missing layers, then the one that is served least. It never takes more than fits into \
research.distributed_inference.host.memory_budget_mb. While layers are missing, a host all of \
whose layers others serve as well moves to them: of hosts with the same layers, the one with the \
smallest node id stays. Hosts that have all measured the model follow `hearthnet plan` instead. A \
host that has lost all other nodes for 20 s, or is the only home for 50 s, takes all layers, if its \
memory and disk hold them.";

#[cfg(test)]
mod tests;
