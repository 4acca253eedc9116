//! `hearthnet up`: everything that a home needs, with at most three questions. Makes the node, founds
//! or joins a community, lets a new community adopt a model, and becomes the daemon
//! (`hearthnet serve`). On a home that is in a community, it only becomes the daemon.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use hearthnet_bus::log::Level;
use hearthnet_hub::ModelRef;
use hearthnet_platform::process::this_program;
use hearthnet_platform::replace;
use hearthnet_platform::whole_file::{self, Access};
use hearthnet_text::sanitize_name;
use zeroize::Zeroizing;

use super::community::{self, join};
use super::model::adopt;
use super::{at_boot, init, page};
use crate::answering::http::{key_file, read_key, tls_files};
use crate::cli::args::{Global, InviteArgs, JoinArgs, UpArgs};
use crate::cli::{Failure, Kind, failure, note, secret};
use crate::config::{Context, Loaded};
use crate::home::rights::is_anchor;
use crate::home::{Home, Lock, OnDisk, display_name};
use crate::models::find::FALLBACK;
use crate::node::open_home;

/// First characters of every invite code.
const CODE: &str = "hearth1";
/// Key of the page, in the data directory, if the configuration names no file.
const KEY_FILE: &str = "http.key";
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
    let asked = answers.as_ref().and_then(|answers| answers.memory);
    init::make(&global, || Ok(true), named, asked)?;
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
    if !is_new {
        tell_unused(args, &home);
    }
    drop(home);
    let memory = args.memory.map(u64::from).or(asked);
    let memory = memory.filter(|percent| *percent != cx.config.manners.memory_percent.0);
    if let Some(percent) = memory {
        note(format!(
            "this run gives {percent} % of the free memory; to keep that, set manners.memory_percent (`hearthnet config show` names the file)"
        ));
    }
    let phone = match args.phone {
        true if Lock::is_held(&dir) => {
            note("this node runs already; stop it before `hearthnet up --phone`");
            None
        }
        true => Some(open_to_phones(&cx)?),
        false => None,
    };
    if args.at_boot {
        at_boot::enable(args, &cx);
    } else if is_new && at_boot::is_possible() {
        note("`hearthnet up --at-boot` lets systemd start this node at every boot");
    }
    if args.from.is_some() && Lock::is_held(&dir) {
        note("this node runs already; stop it before `hearthnet up --from`");
    }
    become_daemon(args, memory, phone, &cx)
}

/// Reports options that only a new node takes, and a first model that could not be adopted.
fn tell_unused(args: &UpArgs, home: &Home) {
    let state = home.state();
    let given = [
        ("--found", args.found.is_some()),
        ("--join", args.join.is_some()),
        ("--name", args.name.is_some()),
        ("--model", args.model.is_some()),
    ];
    let unused: Vec<&str> = given.iter().filter(|it| it.1).map(|it| it.0).collect();
    if !unused.is_empty() {
        note(format!(
            "{} without effect: this node is in {:?} already; `hearthnet community leave` leaves it",
            unused.join(", "),
            state.name
        ));
    }
    if state.models().is_empty() && is_anchor(home) {
        note(format!(
            "{:?} has adopted no model; `hearthnet model adopt MODEL` chooses one",
            state.name
        ));
    }
}

/// Listener of the page that phones reach, and the file with its key.
struct Phone {
    listen: String,
    key_file: PathBuf,
}

/// Chooses the address of the page for `--phone`, makes a key unless the configuration names one,
/// and shows the link.
fn open_to_phones(cx: &Context) -> Result<Phone, Failure> {
    let key_file = match key_file(&cx.config) {
        Some(path) => path,
        None => {
            let path = cx.global.dir()?.join(KEY_FILE);
            make_key(&path)?;
            path
        }
    };
    let (_, key) = read_key(&key_file)?;
    let configured = cx.config.http.listen.as_str();
    let listen = to_the_network(configured);
    match &listen {
        // A service must not write the key into the system's log.
        Some(at) if at.port() != 0 && io::stdout().is_terminal() => {
            let has_tls = tls_files(&cx.config).is_some();
            page::show_to_phones(page::Listener { has_tls, at: *at }, &key)?;
        }
        _ => note("`hearthnet page` prints the link for phones"),
    }
    let listen = listen.map_or_else(|| configured.to_owned(), |at| at.to_string());
    Ok(Phone { listen, key_file })
}

/// The configured address, or all IPv4 addresses instead of loopback. `None` if it has a name that
/// is not known here.
fn to_the_network(listen: &str) -> Option<SocketAddr> {
    let at = listen.replacen("localhost", "127.0.0.1", 1);
    let at: SocketAddr = at.parse().ok()?;
    Some(match at.ip().is_loopback() {
        true => SocketAddr::from((Ipv4Addr::UNSPECIFIED, at.port())),
        false => at,
    })
}

/// Makes the key of the page, unless the file exists.
fn make_key(path: &Path) -> Result<(), Failure> {
    let mut key = Zeroizing::new([0_u8; 24]);
    getrandom::fill(key.as_mut_slice()).map_err(Failure::internal)?;
    let text = Zeroizing::new(hex::encode(*key));
    match whole_file::create(path, text.as_bytes(), Access::Owner) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.map_err(|error| Failure::file("write", path, error)),
    }
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
    if let Err(why) = adopt::adopt(&model, None, home, cx, true) {
        note(format!(
            "the community has no model yet: {}",
            why.with_hint()
        ));
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
        node_starts: true,
    };
    note("the code for your neighbours; they run `hearthnet up` and paste it:");
    community::invite(&args, home, &cx.config)
}

/// Replaces this process by the daemon. A new program starts with one thread, which the sandbox
/// needs (`../daemon/isolation.rs`).
fn become_daemon(
    args: &UpArgs,
    memory: Option<u64>,
    phone: Option<Phone>,
    cx: &Context,
) -> Result<(), Failure> {
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
    if let Some(percent) = memory {
        serve
            .arg("--set")
            .arg(format!("manners.memory_percent={percent}"));
    }
    if let Some(Phone { key_file, .. }) = &phone {
        let mut setting = OsString::from("http.api_key_file=");
        setting.push(key_file);
        serve.arg("--set").arg(setting);
    }
    if let Some(from) = &args.from {
        serve.arg("--from").arg(from);
    }
    let http = phone.map(|phone| phone.listen);
    for (name, value) in [
        ("--listen", args.listen.clone()),
        ("--http", http.or_else(|| args.http.clone())),
    ] {
        if let Some(value) = value {
            serve.args([name, &value]);
        }
    }
    Err(Failure::internal(replace(serve)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phones_reach_all_addresses_instead_of_loopback_and_else_the_configured_one() {
        for (configured, open) in [
            ("127.0.0.1:7602", Some("0.0.0.0:7602")),
            ("localhost:80", Some("0.0.0.0:80")),
            ("[::1]:7602", Some("0.0.0.0:7602")),
            ("192.168.1.5:7602", Some("192.168.1.5:7602")),
            ("attic.lan:7602", None),
        ] {
            let at = to_the_network(configured).map(|at| at.to_string());
            assert_eq!(at.as_deref(), open);
        }
    }

    #[test]
    fn a_key_is_made_once_for_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(KEY_FILE);
        make_key(&path).unwrap();
        let (_, first) = read_key(&path).unwrap();
        assert_eq!(first.len(), 48);
        make_key(&path).unwrap();
        assert_eq!(read_key(&path).unwrap().1, first);
    }
}
