//! Opening of a log after a crash or damage.
//!
//! | event | reaction | loss |
//! |---|---|---|
//! | process or machine died during a write | SQLite drops the unfinished transaction | no acknowledged event |
//! | bytes of the write-ahead log changed | the transactions from there on are dropped | maybe acknowledged events: peers have most; see *doubt* |
//! | pages of the file changed | the file is moved aside, whole events are copied into a new one | the same |
//! | the file is a copy, such as a restored backup | none | events since the copy |
//!
//! The first three are reported ([`Recovery`], code `log_recovered`). *Doubt* is set when
//! acknowledged events may be lost: some of them may be this node's own, and a peer may have them.
//! Signing other events with their numbers would be a fork. So the log refuses to write durable
//! events until a peer was asked for all that it has ([`super::EventLog::caught_up`]), unless the
//! log knows of no other member.
//!
//! A file is repaired only by a process that has it alone. Every handle holds a shared lock on
//! `log.lock` for this.

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

/// Name of the file that handles lock.
const LOCK: &str = "log.lock";
/// Name of the file that names the community, in case the log becomes unreadable.
const NAME: &str = "log.community";
/// Maximum bytes read of that file.
const NAME_BYTES: u64 = 128;

/// Findings and repairs when a log was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// Description for people: the problem and the result.
    pub what: String,
    /// New path of the damaged file.
    pub aside: Option<PathBuf>,
    /// Acknowledged events may be missing. A peer has to be asked before this node writes durable
    /// events.
    pub doubt: bool,
}

impl Recovery {
    pub fn code(&self) -> Code {
        Code::new("log_recovered")
    }
}

/// Shared lock of a handle; released when dropped.
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

    /// Tries to make the lock exclusive. If it succeeds, no other process has the log open, and
    /// none can open it until [`RecoveryLock::share`].
    fn alone(&self) -> bool {
        self.0.try_lock().is_ok()
    }

    /// Makes the lock shared again, so that others can open the log.
    fn share(&self, dir: &Path) -> Result<(), LogError> {
        // A conversion is not atomic and the lock may be lost, so it is taken again in any case.
        let locked = self.0.lock_shared();
        locked.map_err(LogError::io("lock", &dir.join(LOCK)))
    }
}

/// Stores the community of the folder.
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

/// Open log, with the repairs that were needed.
pub(super) struct Opened {
    pub(super) conn: Connection,
    pub(super) view: View,
    pub(super) guard: RecoveryLock,
    pub(super) recovery: Option<Recovery>,
}

/// Opens the log's file at `path` in `dir`, and repairs it if necessary.
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

/// Returns whether the file is not the one that the log was last written to: copied from another
/// machine, or restored from a backup. This node's own events in it may then be outdated.
fn is_copy(conn: &Connection, path: &Path) -> Result<bool, LogError> {
    let (noted, now) = (db::file(conn)?, db::FileIdentity::of(path));
    Ok(noted.is_some() && now.is_some() && noted != now)
}

/// Stores the identity of the log's file.
pub(super) fn note_file(conn: &Connection, path: &Path) {
    let Some(now) = db::FileIdentity::of(path) else {
        return;
    };
    let noted = db::file(conn).is_ok_and(|noted| noted == Some(now));
    // On a full disk the log is read-only; the next opening stores it.
    if !noted && let Err(error) = db::set_file(conn, now) {
        tracing::debug!(%error, "the log could not store the identity of its file");
    }
}

/// Opens and reads the file. With `check`, the file's folder, it also looks for damage.
fn load(path: &Path, check: Option<&Path>) -> Result<(Connection, View), LogError> {
    let conn = db::open(path, false)?;
    if !db::check_format(&conn, path)? {
        // Empty database: the process that created it died before its first commit.
        return Err(LogError::corrupt("it has no tables"));
    }
    if let Some(dir) = check {
        db::check_pages(&conn)?;
        db::cross_check(&conn)?;
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
    let conn = db::open(path, false)?;
    if !db::check_format(&conn, path)? {
        return Err(LogError::corrupt("it has no tables"));
    }
    db::check_pages(&conn)?;
    db::cross_check(&conn)?;
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

fn wal_of(path: &Path) -> PathBuf {
    suffixed(path, "-wal")
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
    db::set_doubt(&tx, true)?;
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
    let wal = wal_of(path);
    if wal.exists() {
        std::fs::rename(&wal, suffixed(&aside, "-wal")).map_err(LogError::io("move", &wal))?;
    }
    remove(&suffixed(path, "-shm"))?;
    std::fs::hard_link(path, &aside).map_err(LogError::io("keep a copy of", path))?;
    std::fs::rename(&fresh, path).map_err(LogError::io("replace", path))?;
    if let Ok(dir) = File::open(dir) {
        // Best effort: some file systems do not support it.
        let _unsupported = dir.sync_all();
    }
    Ok(Recovery {
        what: format!(
            "the event log was damaged ({what}): {kept} undamaged events are kept, other \
             members send the rest; the damaged file is {}",
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

/// Undamaged, correctly signed events of a damaged file, and their community.
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
    // Reading the table backwards from its end finds some events a second time.
    events.sort_by_key(|(event, hash, _)| (event.position(), *hash));
    events.dedup_by_key(|(_, hash, _)| *hash);
    Some((community, events))
}

/// Parses bytes as a write-ahead log, for the fuzz target.
#[cfg(feature = "fuzzing")]
pub(crate) fn look_at(bytes: &[u8]) {
    let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let _tail = wal::look_at(bytes, size);
}

/// SQLite's write-ahead log (sqlite.org/fileformat2.html, section 4). Read only to report what
/// SQLite is about to drop, because SQLite drops it silently.
mod wal {
    use std::io::{BufReader, Read};
    use std::path::Path;

    use super::Recovery;

    const HEADER: usize = 32;
    const FRAME: usize = 24;
    const MAGIC: u32 = 0x377f_0682;

    /// Bytes after the last valid transaction.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in crate::community::log) struct Tail {
        bytes: u64,
        /// True if the tail contains a transaction that was complete when it was written.
        committed: bool,
    }

    impl Tail {
        pub(super) fn recovery(self) -> Recovery {
            let bytes = self.bytes;
            let what = if self.committed {
                format!(
                    "the end of the event log was damaged: {bytes} bytes of it were dropped; other \
                     members send the missing events"
                )
            } else {
                format!(
                    "the last write to the event log was cut off: {bytes} bytes were dropped, \
                     no acknowledged event is lost"
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

    /// Running checksum of the format.
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

    /// Tail of the file that SQLite will drop; `None` if there is none, or no file.
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
            // Not even the header is complete, so no transaction is.
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
            // Bytes after a read error are treated as the end of the file.
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
