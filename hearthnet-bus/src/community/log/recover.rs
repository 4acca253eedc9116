//! Opening of a log after a crash or damage.
//!
//! | event | reaction | loss |
//! |---|---|---|
//! | process or machine died during a write | SQLite drops the unfinished transaction | no acknowledged event |
//! | bytes of the write-ahead log changed or missing | SQLite drops the transactions from there on; the *mark* shows it | maybe acknowledged events: peers have most; see *doubt* |
//! | pages of the file changed | the file is moved aside, whole events are copied into a new one | the same |
//! | the file is a copy, such as a restored backup | none | events since the copy |
//!
//! The second and third are reported ([`Recovery`], code `log_recovered`). *Doubt* is set when
//! acknowledged events may be lost: some of them may be this node's own, and a peer may have them.
//! Signing other events with their numbers would be a fork. So the log refuses to write durable
//! events until it has its own ones again, or enough members were asked for all that they have
//! ([`super::EventLog::asked`]). If the log knows of no other member, it may write, unless commits are
//! missing and with them maybe the events that admitted the others.
//!
//! # The mark
//!
//! `log.lock` holds the identity of the log's file and its count of changes. The mark is written
//! after each commit, and is on the disk when an own durable event is acknowledged. Beside it stand
//! the author and the number of the last own durable event. They are on the disk before peers are
//! sent the event, so they say which events a log in doubt must get back. Then:
//!
//! | the log at opening | meaning |
//! |---|---|
//! | has fewer changes than the mark | commits are lost: doubt, reported |
//! | is another file than the mark names | a copy, such as a restored backup: doubt; the number is dropped |
//! | has changes, and the mark is missing or unreadable | unknown: doubt; the number is dropped |
//! | has more changes than the mark | a crash or a power cut between commit and mark: no loss |
//!
//! The mark follows the commit, so a crash never makes it claim a change that was not stored.
//!
//! A file is compared with the mark, and repaired, only by a process that has it alone. Every
//! handle holds a shared lock on `log.lock` for this.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use hearthnet_platform::whole_file::{self, Access};
use hearthnet_platform::{files, regular_file};
use hearthnet_transport::Code;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};
use sha2::{Digest as _, Sha256};

use super::db;
use super::error::LogError;
use super::event::{Checked, Event, EventHash};
use super::merge::{Merge, Quotas};
use super::view::View;
use crate::{CommunityId, NodeId};

/// Name of the file that handles lock. It holds the [`Mark`].
const LOCK: &str = "log.lock";
/// Name of the file that names the community, in case the log becomes unreadable.
const NAME: &str = "log.community";
/// Maximum bytes read of that file.
const NAME_BYTES: u64 = 128;

/// Findings and repairs when a log was opened. Acknowledged events may be missing, so a peer has to
/// be asked before this node writes durable events.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// Description for people: the problem and the result.
    pub what: String,
}

impl Recovery {
    pub fn code(&self) -> Code {
        Code::new("log_recovered")
    }
}

/// State of the log after its last commit, stored outside of its file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mark {
    /// Inode of the log's file.
    inode: u64,
    /// Time of birth of the file, in ns since 1970; 0 if the file system does not support it.
    born: u64,
    /// Changes that were committed.
    changes: u64,
}

impl Mark {
    /// Mark of a log with its file at `path`.
    fn of(path: &Path, changes: u64) -> Self {
        let meta = std::fs::metadata(path).ok();
        let born = meta.as_ref().and_then(|meta| meta.created().ok());
        let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        Self {
            inode: meta.as_ref().map_or(0, files::inode),
            born: born.unwrap_or(0),
            changes,
        }
    }

    /// Returns whether both marks name the same file. A copy has another inode or time of birth,
    /// even under the same name.
    fn has_file_of(self, other: Self) -> bool {
        (self.inode, self.born) == (other.inode, other.born)
    }

    /// Reads the mark; `None` if it is missing or damaged.
    fn read(file: &File) -> Option<Self> {
        let mut stored = [[0_u8; 8]; 4];
        files::read_exact_at(file, stored.as_flattened_mut(), 0).ok()?;
        let [inode, born, changes, _] = stored.map(u64::from_be_bytes);
        let mark = Self {
            inode,
            born,
            changes,
        };
        (mark.encode() == stored).then_some(mark)
    }

    /// Numbers and a checksum. They fit into a sector, which a disk writes whole.
    fn encode(self) -> [[u8; 8]; 4] {
        let numbers = [self.inode, self.born, self.changes].map(u64::to_be_bytes);
        let hash = Sha256::digest(numbers.as_flattened());
        let sum: [u8; 8] = hash.first_chunk().copied().unwrap_or_default();
        let [inode, born, changes] = numbers;
        [inode, born, changes, sum]
    }
}

/// Place of the last own event, behind the [`Mark`] in the same sector.
const OWN_AT: u64 = 32;

/// The last durable event that this node has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Own {
    pub(super) author: NodeId,
    pub(super) seq: u64,
}

impl Own {
    const BYTES: usize = 48;

    /// Key, number and a checksum.
    fn encode(self) -> Vec<u8> {
        let mut bytes = [self.author.as_bytes().as_slice(), &self.seq.to_be_bytes()].concat();
        let sum = Sha256::digest(&bytes);
        bytes.extend(sum.iter().take(8));
        bytes
    }

    /// Reads it; `None` if it is missing or damaged.
    fn read(file: &File) -> Option<Self> {
        let mut stored = [0; Self::BYTES];
        files::read_exact_at(file, &mut stored, OWN_AT).ok()?;
        let (key, rest) = stored.split_first_chunk::<32>()?;
        let own = Self {
            author: NodeId::from_checked(*key),
            seq: u64::from_be_bytes(*rest.first_chunk()?),
        };
        (own.encode() == stored).then_some(own)
    }
}

/// Shared lock of a handle, released when dropped; and the mark in the locked file.
#[derive(Debug)]
pub(super) struct RecoveryLock {
    lock: File,
    /// The mark when this handle opened the log. Later marks name the same file, and no fewer
    /// changes.
    log: Mark,
}

impl RecoveryLock {
    /// Takes the shared lock. Waits while another process repairs the file.
    pub(super) fn shared(dir: &Path) -> Result<Self, LogError> {
        let path = dir.join(LOCK);
        let mut options = OpenOptions::new();
        let options = options.create(true).truncate(false).read(true).write(true);
        let lock = regular_file::open_with(files::private(options), &path)
            .map_err(LogError::io("open", &path))?;
        lock.lock_shared().map_err(LogError::io("lock", &path))?;
        let log = Mark::default();
        Ok(Self { lock, log })
    }

    /// Tries to make the lock exclusive. If it succeeds, no other process has the log open, and
    /// none can open it until [`RecoveryLock::share`].
    fn alone(&self) -> bool {
        self.lock.try_lock().is_ok()
    }

    /// Makes the lock shared again, so that others can open the log.
    fn share(&self, dir: &Path) -> Result<(), LogError> {
        // A conversion is not atomic and the lock may be lost, so it is taken again in any case.
        let locked = self.lock.lock_shared();
        locked.map_err(LogError::io("lock", &dir.join(LOCK)))
    }

    /// Lets the marks of this handle name the file at `path`, which has so many changes.
    pub(super) fn name_log(&mut self, path: &Path, changes: u64) {
        self.log = Mark::of(path, changes);
        if Mark::read(&self.lock) != Some(self.log) {
            self.mark(changes);
            self.sync();
        }
    }

    /// Stores that the log has so many changes. To be called after their commit.
    pub(super) fn mark(&self, changes: u64) {
        let mark = Mark {
            changes: changes.max(self.log.changes),
            ..self.log
        };
        let mark = mark.encode();
        if let Err(error) = files::write_all_at(&self.lock, mark.as_flattened(), 0) {
            tracing::warn!("the event log could not store its mark in {LOCK}: {error}");
        }
    }

    /// Stores an own durable event, of which peers may be sent the number from now on, and brings it
    /// and the mark to the disk.
    pub(super) fn mark_own(&self, own: Own) {
        self.write_own(&own.encode());
        self.sync();
    }

    /// The last own durable event; `None` if it is not known.
    pub(super) fn own(&self) -> Option<Own> {
        Own::read(&self.lock)
    }

    /// Drops the last own event: this log is none that has its number.
    pub(super) fn forget_own(&self) {
        if self.own().is_some() {
            self.write_own(&[0; Own::BYTES]);
            self.sync();
        }
    }

    fn write_own(&self, bytes: &[u8]) {
        if let Err(error) = files::write_all_at(&self.lock, bytes, OWN_AT) {
            tracing::warn!("the event log could not store its last own event in {LOCK}: {error}");
        }
    }

    /// Brings the mark to the disk.
    pub(super) fn sync(&self) {
        if let Err(error) = self.lock.sync_data() {
            tracing::warn!("the event log could not store its mark in {LOCK}: {error}");
        }
    }

    /// Compares the mark with the log. Returns why acknowledged events may be missing, and a report
    /// if commits are lost.
    fn examine(&self, path: &Path, changes: u64) -> (Option<db::Doubt>, Option<Recovery>) {
        let Some(mark) = Mark::read(&self.lock) else {
            return ((changes > 0).then_some(db::Doubt::Copy), None);
        };
        let lost = mark.changes.saturating_sub(changes);
        let recovery = (lost > 0).then(|| Recovery {
            what: format!(
                "the end of the event log was damaged ({lost} committed changes are missing); \
                 other members send the missing events"
            ),
        });
        let is_copy = changes > 0 && !mark.has_file_of(Mark::of(path, changes));
        let lost = (lost > 0).then_some(db::Doubt::Lost);
        (lost.or(is_copy.then_some(db::Doubt::Copy)), recovery)
    }
}

/// Stores the community of the folder.
pub(super) fn name(dir: &Path, community: CommunityId) -> Result<(), LogError> {
    let path = dir.join(NAME);
    let text = format!("{community}\n");
    whole_file::replace(&path, text.as_bytes(), Access::Owner).map_err(LogError::io("write", &path))
}

fn named(dir: &Path) -> Option<CommunityId> {
    let text = regular_file::read_text(&dir.join(NAME), NAME_BYTES).ok()?;
    text.trim().parse().ok()
}

/// Opens the log's file at `path` in `dir`, and repairs it if necessary.
pub(super) fn open(
    dir: &Path,
    path: &Path,
    quotas: &Quotas,
) -> Result<(Connection, View, RecoveryLock, Option<Recovery>), LogError> {
    let mut guard = RecoveryLock::shared(dir)?;
    if !guard.alone() {
        guard.share(dir)?;
        // The mark keeps what it says of the file. Two processes that open a copy at the same
        // moment both come here, and the next opening still finds the copy.
        guard.log = Mark::read(&guard.lock).unwrap_or_default();
        let (conn, view) = load(path, None)?;
        return Ok((conn, view, guard, None));
    }
    let file = Mark::of(path, 0);
    if !Mark::read(&guard.lock).is_some_and(|mark| mark.has_file_of(file)) {
        // The number may be that of a copy, which is behind.
        guard.forget_own();
    }
    let (conn, view, recovery) = match load(path, Some(dir)) {
        Ok((conn, view)) => {
            let (doubt, recovery) = guard.examine(path, view.changes);
            if let Some(doubt) = doubt {
                db::set_doubt(&conn, doubt)?;
            }
            (conn, view, recovery)
        }
        Err(LogError::Corrupt { what }) => {
            let recovery = rebuild(dir, path, quotas, &what)?;
            let (conn, view) = load(path, None)?;
            (conn, view, Some(recovery))
        }
        Err(other) => return Err(other),
    };
    guard.name_log(path, view.changes);
    guard.share(dir)?;
    if let Some(recovery) = &recovery {
        tracing::warn!(code = %recovery.code(), "{}", recovery.what);
    }
    Ok((conn, view, guard, recovery))
}

/// Opens the file. With `check`, it also looks for damage.
fn connect(path: &Path, check: bool) -> Result<Connection, LogError> {
    let conn = db::open(path, false)?;
    if !db::check_format(&conn, path)? {
        // Empty database: the process that created it died before its first commit.
        return Err(LogError::corrupt("it has no tables"));
    }
    if check {
        db::check_pages(&conn)?;
        db::cross_check(&conn)?;
    }
    Ok(conn)
}

/// Opens and reads the file. With `check`, the file's folder, it also looks for damage.
fn load(path: &Path, check: Option<&Path>) -> Result<(Connection, View), LogError> {
    let conn = connect(path, check.is_some())?;
    if let Some(dir) = check {
        let (community, ..) = db::head(&conn)?;
        if named(dir).is_some_and(|name| name != community) {
            return Err(LogError::corrupt("it names another community"));
        }
        // On a full disk the old layout stays, which is slower.
        if let Err(error) = db::upgrade(&conn) {
            tracing::debug!(%error, "the log keeps the table layout of an older program");
        }
    }
    let view = View::load(&conn, crate::now_ms())?;
    Ok((conn, view))
}

/// Checks every event of a log that no other process has open. Repairs nothing.
pub(super) fn check(path: &Path, community: CommunityId) -> Result<(), LogError> {
    let conn = connect(path, true)?;
    let view = View::load(&conn, crate::now_ms())?;
    // The events in a snapshot have not been read yet.
    view.fold_anew(&conn)?;
    let mut checked = Checked::default();
    let mut whole = true;
    db::raw_events(&conn, |raw| {
        let event = Event::verify_with(raw, &mut checked);
        whole &= event.is_ok_and(|event| event.community == community);
    })?;
    db::close(conn)?;
    match whole {
        true => Ok(()),
        false => Err(LogError::corrupt("an event in it was changed")),
    }
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Copies every undamaged event into a new file, and moves the damaged file aside.
fn rebuild(dir: &Path, path: &Path, quotas: &Quotas, what: &str) -> Result<Recovery, LogError> {
    let fresh = suffixed(path, ".rebuilding");
    for leftover in ["", "-wal", "-shm"] {
        remove(&suffixed(&fresh, leftover))?;
    }
    let (community, events) = salvage(dir, path).ok_or_else(|| LogError::Corrupt {
        what: format!(
            "{what}, and no event in it can be read; move {} away and join the community again",
            path.display()
        ),
    })?;
    let kept = events.len();
    let mut conn = db::open(&fresh, true)?;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    db::create(&tx, community)?;
    db::set_doubt(&tx, db::Doubt::Lost)?;
    let mut view = View::load(&tx, crate::now_ms())?;
    let mut merge = Merge::new(&tx, &mut view, quotas, 0);
    for (event, hash, raw) in &events {
        // At its own time the event has not expired. The next compaction drops expired ones.
        merge.at(event.time_ms);
        // An event that a quota refuses would not have been stored before either.
        let _refused = merge.take(event, *hash, raw)?;
    }
    merge.finish()?;
    tx.commit()?;
    db::close(conn)?;

    // Move the write-ahead log first: beside the new file, SQLite would apply it to that file.
    let aside = (0..)
        .map(|n: u32| suffixed(path, &format!(".damaged-{n}")))
        .find(|aside| !aside.exists())
        .unwrap_or_else(|| suffixed(path, ".damaged"));
    let wal = suffixed(path, "-wal");
    if wal.exists() {
        std::fs::rename(&wal, suffixed(&aside, "-wal")).map_err(LogError::io("move", &wal))?;
    }
    remove(&suffixed(path, "-shm"))?;
    std::fs::hard_link(path, &aside).map_err(LogError::io("keep a copy of", path))?;
    std::fs::rename(&fresh, path).map_err(LogError::io("replace", path))?;
    // Best effort: some file systems do not support it.
    let _unsupported = whole_file::sync_folder(dir);
    Ok(Recovery {
        what: format!(
            "the event log was damaged ({what}): {kept} undamaged events are kept, other \
             members send the rest; the damaged file is {}",
            aside.display()
        ),
    })
}

fn remove(path: &Path) -> Result<(), LogError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(LogError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

type Salvaged = Vec<(Event, EventHash, Vec<u8>)>;

/// Undamaged, correctly signed events of a damaged file, and their community.
fn salvage(dir: &Path, path: &Path) -> Option<(CommunityId, Salvaged)> {
    let mut events = Vec::new();
    let mut community = named(dir);
    if let Ok(conn) = db::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE) {
        community = community.or_else(|| Some(db::head(&conn).ok()?.0));
        let mut checked = Checked::default();
        db::salvage(&conn, |raw| {
            if let Ok(event) = Event::verify_with(&raw, &mut checked)
                && let Some(hash) = EventHash::of(&raw)
            {
                events.push((event, hash, raw));
            }
        });
    }
    let community = community.or_else(|| events.first().map(|(event, ..)| event.community))?;
    events.retain(|(event, ..)| event.community == community);
    // Reading the table backwards from its end finds some events a second time.
    events.sort_by_key(|(event, hash, _)| (event.position(), *hash));
    events.dedup_by_key(|(_, hash, _)| *hash);
    Some((community, events))
}
