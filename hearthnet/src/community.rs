//! This node's community: its log, and what this node may do there.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use hearthnet_bus::log::{Body, Community, EventLog, Level, LogError};
pub(crate) use hearthnet_bus::now_ms;
use hearthnet_bus::{NodeId, NodeKey};

use crate::args::Global;
use crate::config::Config;
use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::membership::Membership;
use crate::standing::Standing;

/// The file of the community's root key, at its founder.
pub(crate) const ROOT_KEY: &str = "root.key";
/// The file of the log.
pub(crate) const LOG_FILE: &str = "log.sqlite";

/// A node that is in a community.
#[derive(Clone)]
pub(crate) struct Home {
    /// The data directory.
    pub(crate) dir: PathBuf,
    /// The node's key.
    pub(crate) key: Arc<NodeKey>,
    /// The community's log.
    pub(crate) log: EventLog,
    /// Set once an anchor has said to this process that the node's key counts no more; by whom.
    refused: Arc<OnceLock<String>>,
}

impl Home {
    /// This node's community.
    ///
    /// # Errors
    /// [`Kind::Community`] if it is in none.
    pub(crate) fn open(cx: &Context) -> Result<Self, Failure> {
        Self::find(cx)?.ok_or_else(|| {
            Failure::new(Kind::Community, "this node is not in a community")
                .code("no_community")
                .hint("found one with `hearthnet community create NAME`, or join one with `hearthnet community join CODE`")
        })
    }

    /// This node's community, if it is in one. A log that was lost or damaged beyond repair is
    /// filled again from other members first.
    pub(crate) fn find(cx: &Context) -> Result<Option<Self>, Failure> {
        let dir = cx.global.dir()?;
        let home = match Self::on_disk(&cx.global, &dir)? {
            OnDisk::Here(home) => home,
            OnDisk::Lost(noted) => crate::refill::refill(cx, &dir, &noted)?,
            OnDisk::Nothing => return Ok(None),
        };
        Membership::note(&dir, &home.state(), &home.key.id());
        crate::standing::look(&home);
        Ok(Some(home))
    }

    /// What the data directory holds, without asking anybody.
    pub(crate) fn on_disk(global: &Global, dir: &Path) -> Result<OnDisk, Failure> {
        let noted = Membership::read(dir);
        let lost = |noted: Option<Membership>| match noted {
            Some(noted) => OnDisk::Lost(noted),
            None => OnDisk::Nothing,
        };
        if !dir.join(LOG_FILE).exists() {
            return Ok(lost(noted));
        }
        let key = Arc::new(global.node_key()?);
        let opened = match (EventLog::open(dir), &noted) {
            // Damaged so badly that not even the community's name was found.
            (Err(LogError::Corrupt { .. }), Some(noted)) => {
                EventLog::name_folder(dir, noted.community).and_then(|()| EventLog::open(dir))
            }
            (opened, _) => opened,
        };
        match opened {
            // A log without a first event is that of somebody who has not joined yet, or whose
            // log could not be saved.
            Ok(log) if !log.state().is_created() => Ok(lost(
                noted.filter(|noted| noted.community == log.community()),
            )),
            Ok(log) => Ok(OnDisk::Here(Self::new(dir.to_owned(), key, log))),
            Err(LogError::NoCommunity { .. }) => Ok(lost(noted)),
            Err(error) => Err(log_failure(dir, &error)),
        }
    }

    pub(crate) fn new(dir: PathBuf, key: Arc<NodeKey>, log: EventLog) -> Self {
        Self {
            dir,
            key,
            log,
            refused: Arc::default(),
        }
    }

    /// Notes that an anchor said that this node's key counts no more: whatever runs for it ends.
    /// `true` the first time.
    pub(crate) fn refused_by(&self, anchor: &NodeId) -> bool {
        let by = crate::standing::by(self, anchor);
        Membership::note_put_out(&self.dir, Some(by.clone()));
        let first = self.refused.set(by).is_ok();
        if first {
            self.log.touch();
        }
        first
    }

    /// What the log says now.
    pub(crate) fn state(&self) -> Arc<Community> {
        self.log.state()
    }

    /// This node's level; a refusal if it has none (any more).
    pub(crate) fn level(&self) -> Result<Level, Failure> {
        let state = self.state();
        let standing = match (self.refused.get(), state.level(&self.key.id())) {
            (Some(by), _) => Standing::Refused(by.clone()),
            // What was noted of other days does not bind: asked again, an anchor may know better.
            (None, Some(level)) => return Ok(level),
            (None, None) => Standing::of(self),
        };
        self.accept(&standing)?;
        Err(Failure::new(
            Kind::Community,
            format!("this node is not a member of {:?}", state.name),
        )
        .code("unauthorized")
        .hint("`hearthnet community leave` puts its log away; then join with a code: `hearthnet community join CODE`"))
    }

    /// Refuses if the node's key counts no more, by the log or by what was noted of what others
    /// said.
    pub(crate) fn good_standing(&self) -> Result<(), Failure> {
        self.accept(&Standing::of(self))
    }

    fn accept(&self, standing: &Standing) -> Result<(), Failure> {
        if *standing == Standing::Good {
            return Ok(());
        }
        let has_root = matches!(self.root_key(), Ok(Some(_)));
        let sentence = standing.sentence(&self.state().name);
        Err(Failure::new(Kind::Community, sentence)
            .code(standing.code())
            .hint(standing.remedy(has_root)))
    }

    /// Refuses if this node's level is below `least`. `what` ends "only ... may ...".
    pub(crate) fn require(&self, least: Level, what: &str) -> Result<(), Failure> {
        let level = self.level()?;
        if level >= least {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Community,
            format!(
                "this node is {level} in {:?}, and only {least} nodes may {what}",
                self.state().name
            ),
        )
        .code("unauthorized")
        .hint(format!(
            "ask an anchor for `hearthnet community promote {} {least}`",
            self.key.id().short()
        )))
    }

    /// Refuses unless this node and its community both allow distributed inference.
    pub(crate) fn require_research(&self, config: &Config) -> Result<(), Failure> {
        if !config.policy.research.enable {
            return Err(hearthnet_orchestrator::ChatError::ExperimentalDisabled.into());
        }
        if self.state().policy.research {
            return Ok(());
        }
        Err(Failure::new(
            Kind::ExperimentalDisabled,
            format!(
                "distributed inference is switched off in {:?}: the community's policy research is off",
                self.state().name
            ),
        )
        .hint("an anchor can allow it with `hearthnet community policy --research on`"))
    }

    /// Appends an event of `key`, this node's or the root's, to the log of this process.
    pub(crate) fn append(&self, key: &NodeKey, body: Body) -> Result<(), Failure> {
        let appended = self.log.append(key, body, now_ms());
        appended.map(|_| ()).map_err(|e| log_failure(&self.dir, &e))
    }

    /// The root key, if this is the founder's node.
    pub(crate) fn root_key(&self) -> Result<Option<NodeKey>, Failure> {
        let path = self.dir.join(ROOT_KEY);
        if !path.exists() {
            return Ok(None);
        }
        let key = NodeKey::load(&path).map_err(|e| {
            Failure::new(Kind::Host, e.to_string())
                .hint("the root key is what the community rests on: restore it from a copy")
        })?;
        Ok(Some(key).filter(|key| key.id() == self.log.community().root()))
    }
}

/// What a data directory holds of a community.
pub(crate) enum OnDisk {
    /// A home that is in one.
    Here(Home),
    /// The log is gone, or nothing of it can be read; what was noted beside it.
    Lost(Membership),
    /// No community.
    Nothing,
}

/// Removes the log of somebody who never became a member: that of a join that failed, or was
/// killed. A log in which the community exists is never touched.
pub(crate) fn discard_unborn(dir: &Path) -> Result<(), Failure> {
    let file = dir.join(LOG_FILE);
    if !file.exists() {
        return Ok(());
    }
    match EventLog::open(dir) {
        Ok(log) if log.state().is_created() => return Ok(()),
        Ok(_) | Err(LogError::NoCommunity { .. }) => {}
        Err(error) => return Err(log_failure(dir, &error)),
    }
    for tail in ["", "-wal", "-shm"] {
        let path = dir.join(format!("{LOG_FILE}{tail}"));
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Failure::new(
                    Kind::Host,
                    format!("cannot remove {}: {e}", path.display()),
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// What went wrong with the log, as a person should read it.
pub(crate) fn log_failure(dir: &Path, error: &LogError) -> Failure {
    if let LogError::Behind { .. } = error {
        return Failure::new(
            Kind::Community,
            "this copy of the community's log was put back or mended, and no other member has said yet what it lacks",
        )
        .code(error.code())
        .hint("start `hearthnet serve` in another home and try again; if nobody else is left, `hearthnet log resume --yes` goes on without asking");
    }
    if let LogError::NoEffect(_) = error {
        return Failure::new(Kind::Community, error.to_string())
            .code(error.code())
            .hint("`hearthnet community members` shows who is what");
    }
    let hint = match error {
        LogError::ReadOnly { .. } | LogError::Io { .. } => format!(
            "free some space where {} is, or let its disk be written",
            dir.display()
        ),
        _ => format!(
            "`hearthnet status` shows the state of the log in {}",
            dir.display()
        ),
    };
    Failure::new(Kind::Host, error.to_string())
        .code(error.code())
        .hint(hint)
}

/// What this node calls itself: the flag, the setting, or the machine's name.
pub(crate) fn display_name(flag: Option<&str>, config: &Config) -> String {
    let chosen = flag.unwrap_or(&config.node.name).trim();
    if !chosen.is_empty() {
        return chosen.to_owned();
    }
    let host = rustix::system::uname();
    let host: String = host
        .nodename()
        .to_string_lossy()
        .chars()
        .filter(|c| !c.is_control())
        .take(32)
        .collect();
    if host.is_empty() { "node".into() } else { host }
}

/// What people call a node: as it joined, or, for the founder, as it is heard; may be empty.
pub(crate) fn name_of<'a>(state: &'a Community, node: &NodeId, now: u64) -> &'a str {
    state.name_of(node, now)
}

/// Where a node listens, if it was heard of lately.
pub(crate) fn endpoints_of(state: &Community, node: &NodeId, now: u64) -> Vec<String> {
    state.endpoints_of(node, now).to_vec()
}

/// How a node is shown: its name and its short id.
pub(crate) fn label(state: &Community, node: &NodeId) -> String {
    state.label(node, now_ms())
}
