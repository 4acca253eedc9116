//! This node's community, as the data directory holds it. Opened, with a log that was lost, by
//! `refill.rs`; what this node may do there is in `standing.rs`.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use hearthnet_bus::NodeKey;
use hearthnet_bus::log::{Body, Community, EventLog, LogError};
pub(crate) use hearthnet_bus::now_ms;
use hearthnet_text::is_plain;
use zeroize::Zeroizing;

use crate::args::Global;
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::membership::Membership;
use crate::root_key::RootKey;
use crate::secret;

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
    /// Where the passphrase of the root key is, if not with whoever sits here.
    pub(crate) passphrase_file: Option<PathBuf>,
    /// What was said when it was asked for: a command may sign and then show what it has signed.
    passphrase: Arc<OnceLock<Zeroizing<String>>>,
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

    /// What the log says now.
    pub(crate) fn state(&self) -> Arc<Community> {
        self.log.state()
    }

    /// Appends an event of `key`, this node's or the root's, to the log of this process.
    pub(crate) fn append(&self, key: &NodeKey, body: Body) -> Result<(), Failure> {
        self.log.append(key, body, now_ms())?;
        Ok(())
    }

    /// The root key, if this is the founder's node.
    pub(crate) fn root_key(&self) -> Result<Option<RootKey>, Failure> {
        let key = RootKey::read(&self.dir.join(ROOT_KEY))?;
        Ok(key.filter(|key| key.id() == self.log.community().root()))
    }

    /// The passphrase of the root key, if it is sealed: from `--passphrase-file`, or asked for once.
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

    /// The root key, opened, if this is a home that has it.
    pub(crate) fn open_root_key(&self) -> Result<NodeKey, Failure> {
        let Some(root) = self.root_key()? else {
            return Err(
                Failure::new(Kind::Community, "the root key is not on this machine")
                    .code("no_root_key")
                    .hint("it is where the community was founded, or where its copy was put"),
            );
        };
        let passphrase = self.passphrase()?;
        root.open(passphrase.as_ref().map(|it| it.as_str()))
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
        Err(error) => return Err(error.into()),
    }
    for tail in ["", "-wal", "-shm"] {
        let path = dir.join(format!("{LOG_FILE}{tail}"));
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Failure::file("remove", &path, e));
            }
            _ => {}
        }
    }
    Ok(())
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
        .filter(|c| is_plain(*c))
        .take(32)
        .collect();
    if host.is_empty() { "node".into() } else { host }
}
