//! `hearthnet up`: everything that a home needs, with at most three questions. Makes the node, founds
//! or joins a community, lets a new community adopt a model, and becomes the daemon
//! (`hearthnet serve`). On a home that is in a community, it only becomes the daemon.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::Stdio;

use hearthnet_bus::log::Level;
use hearthnet_hub::ModelRef;
use hearthnet_platform::process::this_program;
use hearthnet_platform::replace;
use hearthnet_text::sanitize_name;
use zeroize::Zeroizing;

use super::community::{self, join};
use super::model::adopt;
use super::{init, page};
use crate::cli::args::{Global, InviteArgs, JoinArgs, UpArgs};
use crate::cli::{Failure, Kind, failure, note, secret};
use crate::config::{Context, Loaded};
use crate::home::{Home, OnDisk, display_name};
use crate::models::find::FALLBACK;
use crate::node::open_home;

/// First characters of every invite code.
const CODE: &str = "hearth1";
/// How long to look for a node of the community.
const JOIN_WAIT: std::time::Duration = std::time::Duration::from_secs(60);
/// Validity of the code that the founder of a community is shown.
const INVITE_EXPIRES: std::time::Duration = std::time::Duration::from_secs(7 * 24 * 3600);
/// Homes that may join with it.
const INVITE_USES: u32 = 8;

pub(crate) fn run(args: &UpArgs, global: Global) -> Result<(), Failure> {
    let dir = global.dir()?;
    let is_new = matches!(Home::on_disk(&global, &dir)?, OnDisk::Nothing);
    let answers = match is_new {
        true => Some(Answers::get(args, &global)?),
        false => None,
    };
    let named = answers.as_ref().map(|answers| answers.name.as_str());
    let memory = answers.as_ref().and_then(|answers| answers.memory);
    init::make(&global, || Ok(true), named, memory)?;
    let loaded = Loaded::load(global.config.as_deref(), &global.set)?;
    let cx = Context {
        global,
        config: loaded.config,
    };
    if !cx.config.policy.research.enable {
        return Err(Failure::new(
            Kind::ExperimentalDisabled,
            "distributed inference is switched off in the configuration",
        )
        .hint(
            "set enable = true under [policy.research]; `hearthnet config show` names the file",
        ));
    }
    let founded = match answers {
        Some(answers) => answers.enter(&cx)?,
        None => false,
    };
    let home = open_home(&cx)?;
    if founded {
        adopt_first(args, &home, &cx);
        invite_neighbours(&home, &cx)?;
    }
    drop(home);
    become_daemon(args, &cx)
}

/// Where a new node belongs.
enum Belongs {
    Founds(String),
    Joins(Zeroizing<String>),
}

/// Answers to the three questions, from the command line or a terminal.
struct Answers {
    belongs: Belongs,
    /// Share of the memory, in per cent, if it is not the default.
    memory: Option<u64>,
    name: String,
}

impl Answers {
    fn get(args: &UpArgs, global: &Global) -> Result<Self, Failure> {
        // A configuration may exist before the node.
        let config = Loaded::load(global.config.as_deref(), &global.set)?.config;
        let asks = io::stdin().is_terminal() && io::stderr().is_terminal();
        let belongs = match (&args.found, &args.join) {
            (Some(name), _) => Belongs::Founds(name.trim().to_owned()),
            (_, Some(code)) if code == "-" => Belongs::Joins(secret::ask("invite code", true)?),
            (_, Some(code)) => Belongs::Joins(Zeroizing::new(code.clone())),
            _ if asks => Self::ask_where()?,
            _ => {
                return Err(failure!(
                    Config,
                    "this node is in no community, and there is no terminal to ask which"
                )
                .code("no_community")
                .hint(
                    "`hearthnet up --found NAME` founds one, `hearthnet up --join CODE` joins one",
                ));
            }
        };
        let default = config.manners.memory_percent.0;
        let memory = match args.memory {
            Some(percent) => Some(percent.into()),
            None if asks => Self::ask_memory(default)?,
            None => None,
        };
        let usual = display_name(args.name.as_deref(), &config);
        let name = match &args.name {
            None if asks => line(
                "What shall the others call this machine?",
                &sanitize_name(&usual),
            )?,
            _ => usual,
        };
        Ok(Self {
            belongs,
            memory,
            name,
        })
    }

    fn ask_where() -> Result<Belongs, Failure> {
        note(
            "HearthNet lets homes answer chats together. A machine that computes for you receives numbers from which your words can be guessed, so take part with people whom you trust.",
        );
        let answer = line(
            "Paste the invite code of a community, or type a name to found a new one.",
            "Home",
        )?;
        Ok(match answer.starts_with(CODE) {
            true => Belongs::Joins(Zeroizing::new(answer)),
            false => Belongs::Founds(answer),
        })
    }

    fn ask_memory(default: u64) -> Result<Option<u64>, Failure> {
        loop {
            let shown = format!("{default} %");
            let answer = line("How much of its free memory may it use?", &shown)?;
            let number = answer.trim_end_matches(['%', ' ']);
            match number.parse() {
                Ok(percent @ 1..=100_u64) => return Ok((percent != default).then_some(percent)),
                _ => note("a number from 1 to 100, in per cent"),
            }
        }
    }

    /// Founds or joins the community. Returns whether it was founded.
    fn enter(self, cx: &Context) -> Result<bool, Failure> {
        match self.belongs {
            Belongs::Founds(name) => {
                community::found(cx, &name, &self.name, true, || Ok(None))?;
                note(format!(
                    "founded {:?} with this machine, {:?}",
                    sanitize_name(&name),
                    sanitize_name(&self.name)
                ));
                Ok(true)
            }
            Belongs::Joins(code) => {
                let args = JoinArgs {
                    code: vec![code.to_string()],
                    name: Some(self.name),
                    research: Some(true),
                    wait: JOIN_WAIT,
                    json: false,
                };
                join::enter(&args, cx)?;
                Ok(false)
            }
        }
    }
}

/// Asks for a line on the terminal; an empty one is `default`.
fn line(question: &str, default: &str) -> Result<String, Failure> {
    let _ = write!(io::stderr(), "{question} [{default}] ");
    let mut answer = String::new();
    if io::stdin().read_line(&mut answer)? == 0 {
        return Err(Failure::new(Kind::Interrupted, "nothing was changed"));
    }
    Ok(match answer.trim() {
        "" => default.to_owned(),
        answer => answer.to_owned(),
    })
}

/// Lets a new community adopt a model. Without one the node runs all the same, so a failure is
/// only reported.
fn adopt_first(args: &UpArgs, home: &Home, cx: &Context) {
    let configured = args
        .model
        .clone()
        .or_else(|| cx.config.model.default.clone());
    let model = configured.unwrap_or_else(|| ModelRef::Id(FALLBACK.to_owned()));
    if let Err(why) = adopt::adopt(&model, home, cx, true) {
        let hint = why.hint_text().map_or(String::new(), |h| format!(" ({h})"));
        note(format!("the community has no model yet: {why}{hint}"));
        note("`hearthnet model adopt MODEL` chooses one");
    }
}

/// Prints a code for other homes.
fn invite_neighbours(home: &Home, cx: &Context) -> Result<(), Failure> {
    let args = InviteArgs {
        level: Level::Trusted,
        uses: INVITE_USES,
        expires: INVITE_EXPIRES,
        json: false,
    };
    note("the code for your neighbours; they run `hearthnet up` and paste it:");
    community::invite(&args, home, &cx.config)
}

/// Replaces this process by the daemon. A new program starts with one thread, which the sandbox
/// needs (`../daemon/isolation.rs`).
fn become_daemon(args: &UpArgs, cx: &Context) -> Result<(), Failure> {
    if !args.no_open && page::can_open() {
        let mut opener = this_program();
        opener
            .args(cx.global.to_args())
            .args(["page", "--open", "--wait"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Without a browser, the address that the daemon prints is enough.
        let _ = opener.spawn();
    }
    let mut serve = this_program();
    serve.args(cx.global.to_args()).args(["serve", "--up"]);
    if let Some(percent) = args.memory {
        serve
            .arg("--set")
            .arg(format!("manners.memory_percent={percent}"));
    }
    for (name, value) in [("--listen", &args.listen), ("--http", &args.http)] {
        if let Some(value) = value {
            serve.args([name, value]);
        }
    }
    Err(Failure::internal(replace(serve)))
}
