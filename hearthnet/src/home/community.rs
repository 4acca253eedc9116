//! This node's community, as stored in the data directory. `../node/restore_log.rs` opens it and
//! restores a lost log; `key_status.rs` checks this node's membership.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use hearthnet_bus::log::{Body, Community, EventLog, LogError};
pub(crate) use hearthnet_bus::now_ms;
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_platform::machine::host_name;
use hearthnet_text::is_plain;
use zeroize::Zeroizing;

use crate::cli::args::Global;
use crate::cli::{Failure, Kind, blocking, secret};
use crate::config::Config;
use crate::home::membership::Membership;
use crate::home::paths::remove_file;
use crate::home::root_key::RootKey;

/// File of the community's root key, on the founder's machine.
pub(crate) const ROOT_KEY: &str = "root.key";
pub(crate) const LOG_FILE: &str = "log.sqlite";

/// Node that is in a community.
#[derive(Clone)]
pub(crate) struct Home {
    pub(crate) dir: PathBuf,
    pub(crate) key: Arc<NodeKey>,
    pub(crate) log: EventLog,
    /// Name of the anchor that refused this node's key as revoked; set once.
    pub(crate) refused: Arc<OnceLock<String>>,
    /// Source of the root key's passphrase, if it is not asked for.
    pub(crate) passphrase_file: Option<PathBuf>,
    /// Passphrase entered earlier: one command may sign several events.
    passphrase: Arc<OnceLock<Zeroizing<String>>>,
}

impl Home {
    /// Reads the data directory, without contacting other nodes.
    pub(crate) fn on_disk(global: &Global, dir: &Path) -> Result<OnDisk, Failure> {
        let noted = Membership::read(dir);
        let lost = |noted: Option<Membership>| noted.map_or(OnDisk::Nothing, OnDisk::Lost);
        if !dir.join(LOG_FILE).exists() {
            return Ok(lost(noted));
        }
        let key = Arc::new(global.node_key()?);
        let opened = match (EventLog::open(dir), &noted) {
            // The log is damaged so badly that not even the community's name can be read.
            (Err(LogError::Corrupt { .. }), Some(noted)) => {
                EventLog::name_folder(dir, noted.community).and_then(|()| EventLog::open(dir))
            }
            (opened, _) => opened,
        };
        match opened {
            // A log without a first event belongs to a node that has not joined yet, or whose log
            // could not be saved.
            Ok(log) if !log.state().is_created() => Ok(lost(
                noted.filter(|noted| noted.community == log.community()),
            )),
            Ok(log) => Ok(OnDisk::Here(Self::new(dir.to_owned(), key, log))),
            Err(LogError::NoCommunity { .. }) => Ok(lost(noted)),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn new(dir: PathBuf, key: Arc<NodeKey>, log: EventLog) -> Self {
        Self {
            dir,
            key,
            log,
            refused: Arc::default(),
            passphrase_file: None,
            passphrase: Arc::default(),
        }
    }

    /// Current state of the community.
    pub(crate) fn state(&self) -> Arc<Community> {
        self.log.state()
    }

    /// Number of the last event of `node` that is stored here.
    pub(crate) fn last_seq(&self, node: &NodeId) -> u64 {
        let heads = self.log.heads();
        heads.authors.get(node).map_or(0, |head| head.seq)
    }

    /// Appends an event signed by `key`, this node's or the root's, to the log of this process.
    pub(crate) fn append(&self, key: &NodeKey, body: Body) -> Result<(), Failure> {
        self.log.append(key, body, now_ms())?;
        Ok(())
    }

    /// As [`Self::append`], with this node's key, from a task: SQLite may wait for the disk.
    pub(crate) async fn append_own(&self, body: Body) -> Result<(), Failure> {
        let home = self.clone();
        blocking(move || home.append(&home.key, body)).await
    }

    /// Root key, if this is the founder's node.
    pub(crate) fn root_key(&self) -> Result<Option<RootKey>, Failure> {
        let key = RootKey::read(&self.dir.join(ROOT_KEY))?;
        Ok(key.filter(|key| key.id() == self.log.community().root()))
    }

    /// Passphrase of the root key, if it is sealed: from `--passphrase-file`, or asked for once.
    pub(crate) fn passphrase(&self) -> Result<Option<Zeroizing<String>>, Failure> {
        if !self.root_key()?.is_some_and(|key| key.is_sealed()) {
            return Ok(None);
        }
        const WHAT: &str = "passphrase of the root key";
        if let Some(said) = self.passphrase.get() {
            return Ok(Some(said.clone()));
        }
        let said = match &self.passphrase_file {
            Some(file) => secret::in_file(file, WHAT),
            None => secret::ask(WHAT, false),
        }?;
        Ok(Some(self.passphrase.get_or_init(|| said).clone()))
    }

    /// Opens the root key.
    pub(crate) fn open_root_key(&self) -> Result<NodeKey, Failure> {
        let Some(root) = self.root_key()? else {
            return Err(
                Failure::new(Kind::Community, "the root key is not on this machine")
                    .code("no_root_key")
                    .hint(
                        "it is on the machine that founded the community, or where a copy was put",
                    ),
            );
        };
        let passphrase = self.passphrase()?;
        root.open(passphrase.as_ref().map(|it| it.as_str()))
    }
}

/// State of a data directory.
pub(crate) enum OnDisk {
    /// The node is in a community.
    Here(Home),
    /// The log is missing or unreadable; holds the membership noted beside it.
    Lost(Membership),
    Nothing,
}

/// Removes the log of a join that failed or was killed. Never touches a log in which the community
/// exists.
pub(crate) fn discard_unborn(dir: &Path) -> Result<(), Failure> {
    let file = dir.join(LOG_FILE);
    if !file.exists() {
        return Ok(());
    }
    match EventLog::open(dir) {
        Ok(log) if log.state().is_created() => return Ok(()),
        Ok(_) | Err(LogError::NoCommunity { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    for tail in ["", "-wal", "-shm"] {
        remove_file(&dir.join(format!("{LOG_FILE}{tail}")))?;
    }
    Ok(())
}

/// Name of this node: the flag, the setting, or the machine's name.
pub(crate) fn display_name(flag: Option<&str>, config: &Config) -> String {
    let chosen = flag.unwrap_or(&config.node.name).trim();
    if !chosen.is_empty() {
        return chosen.to_owned();
    }
    let host = host_name();
    let host: String = host.chars().filter(|c| is_plain(*c)).take(32).collect();
    if host.is_empty() { "node".into() } else { host }
}

#[cfg(test)]
impl Home {
    /// Home in the folder of a home that the tests of `hearthnet-bus` make.
    pub(crate) fn for_test(home: &hearthnet_bus::testing::Home) -> Self {
        let (key, log) = (Arc::clone(&home.key), home.log.clone());
        Self::new(home.path().to_owned(), key, log)
    }
}
