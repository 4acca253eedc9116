//! This node's community, as the data directory holds it. Opened, with a log that was lost, by
//! `refill.rs`; what this node may do there is in `standing.rs`.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use hearthnet_bus::NodeKey;
use hearthnet_bus::log::{Body, Community, EventLog, LogError};
pub(crate) use hearthnet_bus::now_ms;

use crate::args::Global;
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::membership::Membership;

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
    pub(crate) refused: Arc<OnceLock<String>>,
}

impl Home {
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

    /// What the log says now.
    pub(crate) fn state(&self) -> Arc<Community> {
        self.log.state()
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
    if let LogError::Clock { .. } = error {
        return Failure::new(Kind::Community, error.to_string())
            .code(error.code())
            .hint("set the clock (`timedatectl set-ntp true`) and repeat the command; if it is the others' that are wrong, take this machine off the network first");
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
