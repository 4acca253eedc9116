//! Opening a log after a crash, and after damage.
//!
//! | what happened | what is done | what is lost |
//! |---|---|---|
//! | the process or the machine died during a write | SQLite drops the unfinished transaction | nothing that was acknowledged |
//! | bytes of the write-ahead log changed | the transactions from there on are dropped | maybe acknowledged events: peers have most; see *doubt* |
//! | pages of the file changed | the file is moved aside, whole events are copied into a new one | the same |
//! | the file is a copy, as of a backup that was put back | nothing | what was written since the copy |
//!
//! The first three are reported ([`Recovery`], code `log_recovered`). *Doubt*: when acknowledged
//! events may be gone, some of them may be this node's own, and a peer may have them. To sign
//! other events in their place would be a fork. So the log takes no durable event of its own
//! until a peer was asked for all that it has ([`super::EventLog::caught_up`]); only where the
//! log knows of no other member there is nobody to ask.
//!
//! A file is repaired only by a process that has it alone, which `log.lock` tells: every
//! handle holds a shared lock on it.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_transport::Code;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::db;
use super::error::LogError;
use super::event::{Checked, Event, EventHash};
use super::merge::{Merge, Quotas};
use super::view::View;
use crate::{CommunityId, regular_file};

/// The file that handles lock.
const LOCK: &str = "log.lock";
/// The file that names the community, for when the log cannot be read any more.
const NAME: &str = "log.community";
/// Longest content of that file that is looked at.
const NAME_BYTES: u64 = 128;

/// What was found and done when the log was opened. Its code is `log_recovered`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// For people: what was wrong, and what became of it.
    pub what: String,
    /// Where the damaged file was moved.
    pub aside: Option<PathBuf>,
    /// Whether acknowledged events may be missing, so that a peer has to be asked before this
    /// node writes durable events of its own.
    pub doubt: bool,
}

impl Recovery {
    /// The stable code.
    pub fn code(&self) -> Code {
        Code::new("log_recovered")
    }
}

/// The shared lock of a handle; released when dropped.
#[derive(Debug)]
pub(super) struct RecoveryLock(File);

impl RecoveryLock {
    /// Takes the shared lock. Waits while another process repairs the file.
    pub(super) fn shared(dir: &Path) -> Result<Self, LogError> {
        let path = dir.join(LOCK);
        let file = regular_file::open_with(
            OpenOptions::new().create(true).truncate(false).write(true),
            &path,
        )
        .map_err(LogError::io("open", &path))?;
        file.lock_shared().map_err(LogError::io("lock", &path))?;
        Ok(Self(file))
    }

    /// Whether nobody else has the log open; then nobody can open it until
    /// [`RecoveryLock::share`].
    fn alone(&self) -> bool {
        self.0.try_lock().is_ok()
    }

    /// Lets others open the log again.
    fn share(&self, dir: &Path) -> Result<(), LogError> {
        // A conversion is not atomic: the lock may be gone. It is taken again either way.
        let locked = self.0.lock_shared();
        locked.map_err(LogError::io("lock", &dir.join(LOCK)))
    }
}

/// Notes which community the folder belongs to.
pub(super) fn name(dir: &Path, community: CommunityId) -> Result<(), LogError> {
    let path = dir.join(NAME);
    let text = format!("{community}\n");
    crate::identity::whole_file::replace(&path, text.as_bytes(), 0o600)
        .map_err(LogError::io("write", &path))
}

fn named(dir: &Path) -> Option<CommunityId> {
    let text = regular_file::read_text(&dir.join(NAME), NAME_BYTES).ok()?;
    text.trim().parse().ok()
}

/// An open log, and what had to be done for it.
pub(super) struct Opened {
    pub(super) conn: Connection,
    pub(super) view: View,
    pub(super) guard: RecoveryLock,
    pub(super) recovery: Option<Recovery>,
}

/// Opens the log's file at `path` in `dir`; repairs it if it must be.
pub(super) fn open(dir: &Path, path: &Path, quotas: &Quotas) -> Result<Opened, LogError> {
    let guard = RecoveryLock::shared(dir)?;
    if !guard.alone() {
        guard.share(dir)?;
        let (conn, view) = load(path, None)?;
        return Ok(Opened {
            conn,
            view,
            guard,
            recovery: None,
        });
    }
    let tail = wal::look(&wal_of(path));
    let (conn, view, recovery) = match load(path, Some(dir)) {
        Ok((conn, view)) => {
            let recovery = tail.map(|tail| tail.recovery());
            if recovery.as_ref().is_some_and(|r| r.doubt) || is_copy(&conn, path)? {
                db::set_doubt(&conn, true)?;
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
    note_file(&conn, path);
    guard.share(dir)?;
    if let Some(recovery) = &recovery {
        tracing::warn!(code = %recovery.code(), "{}", recovery.what);
    }
    Ok(Opened {
        conn,
        view,
        guard,
        recovery,
    })
}

/// Whether the file is another one than the log was last written as: copied from another machine,
/// or put back from a backup. What it says of this node may be old then.
fn is_copy(conn: &Connection, path: &Path) -> Result<bool, LogError> {
    let (noted, now) = (db::file(conn)?, db::FileIdentity::of(path));
    Ok(noted.is_some() && now.is_some() && noted != now)
}

/// Notes which file the log is from now on.
pub(super) fn note_file(conn: &Connection, path: &Path) {
    let Some(now) = db::FileIdentity::of(path) else {
        return;
    };
    let noted = db::file(conn).is_ok_and(|noted| noted == Some(now));
    // On a full disk the log is read only; the next opening notes it.
    if !noted && let Err(error) = db::set_file(conn, now) {
        tracing::debug!(%error, "the log could not note which file it is");
    }
}

/// Opens the file and reads it; with `check`, the folder that it lies in, also looks for
/// damage.
fn load(path: &Path, check: Option<&Path>) -> Result<(Connection, View), LogError> {
    let conn = db::open(path, false)?;
    if !db::check_format(&conn, path)? {
        // An empty database: the process that made it died before its first commit.
        return Err(LogError::corrupt("it has no tables"));
    }
    if let Some(dir) = check {
        db::check_pages(&conn)?;
        db::cross_check(&conn)?;
        let (community, ..) = db::head(&conn)?;
        if named(dir).is_some_and(|name| name != community) {
            return Err(LogError::corrupt("it names another community"));
        }
        // On a full disk it stays as it is, which is slower.
        if let Err(error) = db::upgrade(&conn) {
            tracing::debug!(%error, "the log keeps the order of an older program");
        }
    }
    let view = View::load(&conn, crate::now_ms())?;
    Ok((conn, view))
}

/// Whether a log that nobody else has open is whole, event by event. Nothing is repaired.
pub(super) fn check(path: &Path, community: CommunityId) -> Result<(), LogError> {
    let conn = db::open(path, false)?;
    if !db::check_format(&conn, path)? {
        return Err(LogError::corrupt("it has no tables"));
    }
    db::check_pages(&conn)?;
    db::cross_check(&conn)?;
    let view = View::load(&conn, crate::now_ms())?;
    // What a snapshot holds was not read.
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
        false => Err(LogError::corrupt("an event in it is not what was signed")),
    }
}

fn wal_of(path: &Path) -> PathBuf {
    suffixed(path, "-wal")
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Copies every event that is still whole into a new file, and moves the damaged one aside.
fn rebuild(dir: &Path, path: &Path, quotas: &Quotas, what: &str) -> Result<Recovery, LogError> {
    let fresh = suffixed(path, ".rebuilding");
    for leftover in ["", "-wal", "-shm"] {
        remove(&suffixed(&fresh, leftover))?;
    }
    let (community, events) = salvage(dir, path).ok_or_else(|| LogError::Corrupt {
        what: format!(
            "{what}, and nothing of it can be read; move {} away and join the community again",
            path.display()
        ),
    })?;
    let kept = events.len();
    let mut conn = db::open(&fresh, true)?;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    db::create(&tx, community)?;
    db::set_doubt(&tx, true)?;
    let mut view = View::load(&tx, crate::now_ms())?;
    let mut merge = Merge::new(&tx, &mut view, quotas, 0);
    for (event, hash, raw) in &events {
        // At its own time it has not expired; what has will be dropped with the next compaction.
        merge.at(event.time_ms);
        // What a quota refuses is no loss: it would not have been there.
        let _refused = merge.take(event, *hash, raw)?;
    }
    merge.finish()?;
    tx.commit()?;
    db::close(conn)?;

    // The write-ahead log first: beside the new file it would be taken for that one's.
    let aside = (0..)
        .map(|n: u32| suffixed(path, &format!(".damaged-{n}")))
        .find(|aside| !aside.exists())
        .unwrap_or_else(|| suffixed(path, ".damaged"));
    let wal = wal_of(path);
    if wal.exists() {
        std::fs::rename(&wal, suffixed(&aside, "-wal")).map_err(LogError::io("move", &wal))?;
    }
    remove(&suffixed(path, "-shm"))?;
    std::fs::hard_link(path, &aside).map_err(LogError::io("keep a copy of", path))?;
    std::fs::rename(&fresh, path).map_err(LogError::io("replace", path))?;
    if let Ok(dir) = File::open(dir) {
        // Best effort: not every file system can do it.
        let _unsupported = dir.sync_all();
    }
    Ok(Recovery {
        what: format!(
            "the event log was damaged ({what}): {kept} events were whole and are kept, the \
             rest comes back from the other members; the damaged file is {}",
            aside.display()
        ),
        aside: Some(aside),
        doubt: true,
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

/// Every event of a damaged file that is whole and signed, and their community.
fn salvage(dir: &Path, path: &Path) -> Option<(CommunityId, Salvaged)> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut events = Vec::new();
    let mut community = named(dir);
    if let Ok(conn) = Connection::open_with_flags(path, flags) {
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
    // From the end of the table backwards some were found a second time.
    events.sort_by_key(|(event, hash, _)| (event.position(), *hash));
    events.dedup_by_key(|(_, hash, _)| *hash);
    Some((community, events))
}

/// Looks through bytes as if they were a write-ahead log, for the fuzz target.
#[cfg(feature = "fuzzing")]
pub(crate) fn look_at(bytes: &[u8]) {
    let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let _tail = wal::look_at(bytes, size);
}

/// SQLite's write-ahead log (sqlite.org/fileformat2.html, section 4), read only to say what
/// SQLite is about to drop: it does so without a word.
mod wal {
    use std::io::{BufReader, Read};
    use std::path::Path;

    use super::Recovery;

    const HEADER: usize = 32;
    const FRAME: usize = 24;
    const MAGIC: u32 = 0x377f_0682;

    /// What follows the last whole transaction.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in crate::community::log) struct Tail {
        bytes: u64,
        /// A transaction was complete when it was written, and is not any more.
        committed: bool,
    }

    impl Tail {
        pub(super) fn recovery(self) -> Recovery {
            let bytes = self.bytes;
            let what = if self.committed {
                format!(
                    "the end of the event log was damaged: {bytes} bytes of it were dropped; what \
                     is missing comes back from the other members"
                )
            } else {
                format!(
                    "the last write to the event log was cut off: {bytes} bytes were dropped, \
                     nothing acknowledged is lost"
                )
            };
            Recovery {
                what,
                aside: None,
                doubt: self.committed,
            }
        }
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        bytes
            .get(at..)
            .and_then(|rest| rest.first_chunk())
            .map_or(0, |word| u32::from_be_bytes(*word))
    }

    /// The running checksum of the format.
    fn sum(state: (u32, u32), bytes: &[u8], big_endian: bool) -> (u32, u32) {
        let read = |four: &[u8]| {
            let four = four.first_chunk().copied().unwrap_or_default();
            match big_endian {
                true => u32::from_be_bytes(four),
                false => u32::from_le_bytes(four),
            }
        };
        bytes.chunks_exact(8).fold(state, |(a, b), eight| {
            let (first, second) = eight.split_at(4);
            let a = a.wrapping_add(read(first)).wrapping_add(b);
            let b = b.wrapping_add(read(second)).wrapping_add(a);
            (a, b)
        })
    }

    /// What of the file SQLite will drop; `None` if nothing, or there is none.
    pub(super) fn look(path: &Path) -> Option<Tail> {
        let file = crate::regular_file::open(path).ok()?;
        let size = file.metadata().ok()?.len();
        look_at(BufReader::with_capacity(1 << 16, file), size)
    }

    pub(in crate::community::log) fn look_at(mut file: impl Read, size: u64) -> Option<Tail> {
        let mut header = [0; HEADER];
        if size == 0 {
            return None;
        }
        if file.read_exact(&mut header).is_err() {
            // Not even the header was written, so no transaction was.
            return Some(Tail {
                bytes: size,
                committed: false,
            });
        }
        let big_endian = word(&header, 0) & 1 == 1;
        let page = usize::try_from(word(&header, 8)).ok()?;
        let mut state = sum((0, 0), header.get(..24)?, big_endian);
        let sane = word(&header, 0) & !1 == MAGIC && (512..=65536).contains(&page);
        if !sane || state != (word(&header, 24), word(&header, 28)) {
            return Some(Tail {
                bytes: size,
                committed: size > header.len() as u64,
            });
        }
        let salts = (word(&header, 16), word(&header, 20));
        let mut frame = Vec::with_capacity(FRAME + page);
        let (mut whole, mut at, mut good, mut committed) =
            (HEADER as u64, HEADER as u64, true, false);
        let mut ours = at;
        loop {
            frame.clear();
            let whole_frame = (FRAME + page) as u64;
            // What an error cuts off, the end of the file would cut off as well.
            let _ = file.by_ref().take(whole_frame).read_to_end(&mut frame);
            let read = frame.len();
            // Frames with other salts are left from before the last checkpoint.
            let Some(head) = frame.get(..FRAME) else {
                break;
            };
            if (word(head, 8), word(head, 12)) != salts {
                break;
            }
            at += read as u64;
            ours = at;
            let last = word(head, 4) != 0;
            if good && read == FRAME + page {
                let next = sum(state, frame.get(..8)?, big_endian);
                let next = sum(next, frame.get(FRAME..)?, big_endian);
                good = next == (word(head, 16), word(head, 20));
                state = next;
            } else {
                good = false;
            }
            match (good, last) {
                (true, true) => whole = at,
                (false, true) if read == FRAME + page => committed = true,
                _ => {}
            }
            if read < FRAME + page {
                break;
            }
        }
        (ours > whole).then_some(Tail {
            bytes: ours - whole,
            committed,
        })
    }
}
