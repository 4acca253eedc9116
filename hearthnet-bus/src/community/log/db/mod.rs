//! Database of the log: schema, settings and statements. All SQL of the log is in this module, with
//! a file for each of the tables of events and snapshots.
//!
//! # Settings, and their reasons
//! - WAL: readers never wait for the writer, and several processes may have the file open.
//! - `synchronous=FULL`: a commit is on the disk before it is acknowledged. With NORMAL, a power
//!   cut could lose the last commits. An author that lost events which others have would sign other
//!   events with their numbers: a fork, which freezes it for ever.
//! - A busy timeout of 5 s: writers of other processes take milliseconds.
//! - No foreign keys: rows of different tables do not refer to each other.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, Params, Row, TransactionBehavior, params};
use sha2::{Digest as _, Sha256};

use super::error::LogError;
use super::event::{Event, EventHash};
use crate::{CommunityId, NodeId};

mod durable;
mod ephemeral;
mod snapshots;

pub(super) use durable::*;
pub(super) use ephemeral::*;
pub(super) use snapshots::*;

/// Version of the table layout.
const FORMAT: i64 = 1;

/// "HNet" in the `application_id` of SQLite's header, for `file` and for [`check_format`].
const APPLICATION_ID: i64 = 0x484e_6574;

/// Time for which a writer waits for another process's transaction.
const BUSY: Duration = Duration::from_secs(5);

const SCHEMA: &str = "
CREATE TABLE log (
    id        INTEGER PRIMARY KEY CHECK (id = 1),
    community BLOB    NOT NULL,
    clock     INTEGER NOT NULL,  -- maximum Lamport time of the durable events
    changes   INTEGER NOT NULL,  -- incremented by every transaction with a change
    doubt     INTEGER NOT NULL   -- see `Doubt`
) STRICT;
CREATE TABLE spare (
    id    INTEGER PRIMARY KEY,
    bytes BLOB NOT NULL          -- written and deleted to probe for disk space
) STRICT;
CREATE TABLE authors (
    author    BLOB PRIMARY KEY,
    head      INTEGER NOT NULL,  -- length of the chain
    fork      INTEGER,           -- number at which the history forks
    events    INTEGER NOT NULL,  -- durable events stored
    bytes     INTEGER NOT NULL,  -- total size of durable events stored
    ephemeral INTEGER NOT NULL   -- greatest ephemeral sequence number accepted
) STRICT, WITHOUT ROWID;
CREATE TABLE durable (
    arrival INTEGER PRIMARY KEY,
    author  BLOB    NOT NULL,
    seq     INTEGER NOT NULL,
    hash    BLOB    NOT NULL,
    lamport INTEGER NOT NULL,
    sum     INTEGER NOT NULL,  -- of all of raw; the hash omits the signature
    raw     BLOB    NOT NULL
) STRICT;
CREATE UNIQUE INDEX durable_by_author ON durable (author, seq, hash);
CREATE INDEX durable_ordered ON durable (lamport, author, seq, hash);
CREATE TABLE ephemeral (
    arrival INTEGER PRIMARY KEY,
    author  BLOB    NOT NULL,
    slot    TEXT    NOT NULL,
    seq     INTEGER NOT NULL,
    hash    BLOB    NOT NULL,
    expires INTEGER NOT NULL,
    keep    INTEGER NOT NULL,  -- the row is kept until this time, against older events
    sum     INTEGER NOT NULL,
    raw     BLOB    NOT NULL
) STRICT;
CREATE UNIQUE INDEX ephemeral_by_slot ON ephemeral (author, slot);
CREATE TABLE snapshots (
    folded  INTEGER PRIMARY KEY,  -- number of events in the snapshot
    lamport INTEGER NOT NULL,
    author  BLOB    NOT NULL,
    seq     INTEGER NOT NULL,
    fold    BLOB    NOT NULL,
    sum     BLOB    NOT NULL  -- SHA-256 of fold
) STRICT;
";

/// Replaces the index of older programs, which lacks the hash and so does not distinguish events of
/// the root's branches. Drops their snapshots, which ignored the branches. Older programs work with
/// the new index.
const UPGRADE: &str = "
DROP INDEX durable_in_order;
CREATE INDEX durable_ordered ON durable (lamport, author, seq, hash);
DELETE FROM snapshots;
";

/// Row of the table `authors`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct AuthorRow {
    pub(super) head: u64,
    pub(super) fork: Option<u64>,
    pub(super) events: u64,
    pub(super) bytes: u64,
    pub(super) ephemeral: u64,
}

/// Converts to SQLite's signed integers. All stored numbers are below 2^53.
pub(super) fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn rows<T>(
    conn: &Connection,
    sql: &str,
    params: impl Params,
    of: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, LogError> {
    let mut statement = conn.prepare_cached(sql)?;
    let rows = statement.query_map(params, of)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the only row of a query.
fn one<T>(
    conn: &Connection,
    sql: &str,
    params: impl Params,
    of: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<T, LogError> {
    Ok(conn.prepare_cached(sql)?.query_row(params, of)?)
}

/// Visits the rows of a query until `visit` returns false.
fn each(
    conn: &Connection,
    sql: &str,
    params: impl Params,
    mut visit: impl FnMut(&Row<'_>) -> Result<bool, LogError>,
) -> Result<(), LogError> {
    let mut statement = conn.prepare_cached(sql)?;
    let mut rows = statement.query(params)?;
    while let Some(row) = rows.next()? {
        if !visit(row)? {
            break;
        }
    }
    Ok(())
}

fn execute(conn: &Connection, sql: &str, params: impl Params) -> Result<(), LogError> {
    conn.prepare_cached(sql)?.execute(params)?;
    Ok(())
}

/// Returns whether a table or an index of this name exists.
pub(super) fn has(conn: &Connection, name: &str) -> Result<bool, LogError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?1)";
    one(conn, sql, [name], |row| row.get(0))
}

/// Node id in a row. It was checked before it was stored.
fn node_of(row: &Row<'_>, column: usize) -> rusqlite::Result<NodeId> {
    row.get(column).map(NodeId::from_checked)
}

/// Opens a database for use by one thread at a time.
pub(super) fn connect(path: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)
}

/// Pages of the file.
#[cfg(feature = "testing")]
pub(super) fn pages(conn: &Connection) -> Result<u32, LogError> {
    Ok(conn.pragma_query_value(None, "page_count", |row| row.get(0))?)
}

/// Limits the pages of the file, as a full disk does.
#[cfg(feature = "testing")]
pub(super) fn limit_pages(conn: &Connection, pages: u32) -> Result<(), LogError> {
    conn.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))?;
    Ok(())
}

/// Opens the file; creates it if `create`.
pub(super) fn open(path: &Path, create: bool) -> Result<Connection, LogError> {
    let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    flags.set(OpenFlags::SQLITE_OPEN_CREATE, create);
    // Not by opening the file: closing it would release the locks that this process has on it.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let other = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
        return Err(LogError::io("open", path)(other));
    }
    let conn = connect(path, flags)?;
    conn.busy_timeout(BUSY)?;
    conn.pragma_update(None, "journal_mode", "wal")?;
    conn.pragma_update(None, "synchronous", "full")?;
    // The sandbox of a daemon may allow no folder for temporary files.
    conn.pragma_update(None, "temp_store", "memory")?;
    // After a checkpoint, the WAL keeps its size for the next writes, up to this limit.
    conn.pragma_update(None, "journal_size_limit", 4 << 20)?;
    conn.set_prepared_statement_cache_capacity(32);
    // Without QPSG, SQLite plans a statement anew whenever a bound value could change its plan.
    // That is a fifth of the cost of accepting events.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    Ok(conn)
}

/// Creates the tables. Fails if they exist.
pub(super) fn create(conn: &Connection, community: CommunityId) -> Result<(), LogError> {
    conn.execute_batch(SCHEMA)?;
    conn.pragma_update(None, "application_id", APPLICATION_ID)?;
    conn.pragma_update(None, "user_version", FORMAT)?;
    let sql = "INSERT INTO log VALUES (1, ?1, 0, 0, 0)";
    execute(conn, sql, [community.as_bytes()])
}

/// Marks a database from a backup as a log.
pub(super) fn claim(conn: &Connection) -> Result<(), LogError> {
    conn.pragma_update(None, "application_id", APPLICATION_ID)?;
    Ok(())
}

/// Returns whether the tables exist; an error if another program or version made them.
pub(super) fn check_format(conn: &Connection, path: &Path) -> Result<bool, LogError> {
    let found: i64 = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let application: i64 = conn.pragma_query_value(None, "application_id", |row| row.get(0))?;
    match (application, found) {
        (0, 0) => Ok(false),
        (APPLICATION_ID, FORMAT) => Ok(true),
        (APPLICATION_ID, _) => Err(LogError::Format {
            path: path.into(),
            found,
        }),
        _ => Err(LogError::corrupt("it is another program's database")),
    }
}

/// Community, highest Lamport time, and count of changes.
pub(super) fn head(conn: &Connection) -> Result<(CommunityId, u64, u64), LogError> {
    let sql = "SELECT community, clock, changes FROM log";
    one(conn, sql, [], |row| {
        let community = CommunityId::from(node_of(row, 0)?);
        Ok((community, row.get(1)?, row.get(2)?))
    })
}

/// Why acknowledged events may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Doubt {
    /// The log is a copy, or new in place of a lost one.
    Copy = 1,
    /// Commits are missing, maybe those that admitted all other members.
    Lost = 2,
}

pub(super) fn doubt(conn: &Connection) -> Result<Option<Doubt>, LogError> {
    let stored: i64 = one(conn, "SELECT doubt FROM log", [], |row| row.get(0))?;
    Ok(match stored {
        0 => None,
        1 => Some(Doubt::Copy),
        _ => Some(Doubt::Lost),
    })
}

/// Adds a reason for doubt.
pub(super) fn set_doubt(conn: &Connection, why: Doubt) -> Result<(), LogError> {
    execute(conn, "UPDATE log SET doubt = max(doubt, ?1)", [why as i64])
}

pub(super) fn end_doubt(conn: &Connection) -> Result<(), LogError> {
    execute(conn, "UPDATE log SET doubt = 0", [])
}

/// Upgrades the tables of an older program.
pub(super) fn upgrade(conn: &Connection) -> Result<(), LogError> {
    if has(conn, "durable_in_order")? {
        let tx = conn.unchecked_transaction()?;
        tx.execute_batch(UPGRADE)?;
        tx.commit()?;
    }
    Ok(())
}

/// Checks that the pages of the file are intact and the indexes match the tables. Takes some ten
/// milliseconds for ten thousand events.
pub(super) fn check_pages(conn: &Connection) -> Result<(), LogError> {
    match integrity(conn)?.first() {
        None => Ok(()),
        Some(what) => Err(LogError::corrupt(what)),
    }
}

/// Checks that the small tables match the events. [`check_pages`] does not detect a changed number
/// in them.
pub(super) fn cross_check(conn: &Connection) -> Result<(), LogError> {
    let wrong = || LogError::corrupt("its tables contradict each other");
    let (_, clock, _) = head(conn)?;
    let last: Option<u64> = one(conn, "SELECT max(lamport) FROM durable", [], |row| {
        row.get(0)
    })?;
    if last.is_some_and(|last| last > clock) {
        return Err(wrong());
    }
    let counted = rows(
        conn,
        "SELECT author, count(*), sum(length(raw)), max(seq) FROM durable GROUP BY author",
        [],
        |row| Ok((node_of(row, 0)?, (row.get(1)?, row.get(2)?, row.get(3)?))),
    )?;
    let mut found: BTreeMap<NodeId, (u64, u64, u64)> = counted.into_iter().collect();
    for (author, row) in authors(conn)? {
        let (events, bytes, last) = found.remove(&author).unwrap_or_default();
        let whole = row.fork.is_none() && events == last;
        if (row.events, row.bytes) != (events, bytes) || (whole && row.head != last) {
            return Err(wrong());
        }
    }
    match found.is_empty() {
        true => Ok(()),
        false => Err(wrong()),
    }
}

/// Problems that SQLite finds in the file, one per entry.
pub(super) fn integrity(conn: &Connection) -> Result<Vec<String>, LogError> {
    let mut found: Vec<String> = rows(conn, "PRAGMA integrity_check(20)", [], |row| row.get(0))?;
    found.retain(|line| line != "ok");
    Ok(found)
}

/// Checks for disk space by writing and deleting more bytes than an event takes.
pub(super) fn probe(conn: &mut Connection) -> Result<(), LogError> {
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("INSERT INTO spare (bytes) VALUES (zeroblob(65536))", [])?;
    tx.commit()?;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("DELETE FROM spare", [])?;
    tx.commit()?;
    Ok(())
}

/// Writes all changes into the main file and closes it.
pub(super) fn close(conn: Connection) -> Result<(), LogError> {
    conn.pragma_update(None, "journal_mode", "delete")?;
    conn.close().map_err(|(_, error)| error.into())
}

/// Visits every event that can be read from a damaged file: each table from its beginning up to the
/// damage, then from its end.
pub(super) fn salvage(conn: &Connection, mut visit: impl FnMut(Vec<u8>)) {
    for table in ["durable", "ephemeral"] {
        for order in ["ASC", "DESC"] {
            let sql = format!("SELECT raw FROM {table} ORDER BY arrival {order}");
            let whole = each(conn, &sql, [], |row| {
                if let Ok(raw) = row.get(0) {
                    visit(raw);
                }
                Ok(true)
            });
            if whole.is_ok() {
                break;
            }
        }
    }
}

/// Visits every event of an undamaged file.
pub(super) fn raw_events(conn: &Connection, mut visit: impl FnMut(&[u8])) -> Result<(), LogError> {
    for table in ["durable", "ephemeral"] {
        let sql = format!("SELECT raw FROM {table} ORDER BY arrival");
        each(conn, &sql, [], |row| {
            visit(&row.get::<_, Vec<u8>>(0)?);
            Ok(true)
        })?;
    }
    Ok(())
}

pub(super) fn set_head(conn: &Connection, clock: u64, changes: u64) -> Result<(), LogError> {
    let sql = "UPDATE log SET clock = ?1, changes = ?2";
    execute(conn, sql, [int(clock), int(changes)])
}

pub(super) fn authors(conn: &Connection) -> Result<Vec<(NodeId, AuthorRow)>, LogError> {
    let sql = "SELECT author, head, fork, events, bytes, ephemeral FROM authors";
    rows(conn, sql, [], |row| {
        let author = AuthorRow {
            head: row.get(1)?,
            fork: row.get(2)?,
            events: row.get(3)?,
            bytes: row.get(4)?,
            ephemeral: row.get(5)?,
        };
        Ok((node_of(row, 0)?, author))
    })
}

pub(super) fn set_author(
    conn: &Connection,
    author: &NodeId,
    row: &AuthorRow,
) -> Result<(), LogError> {
    let sql = "INSERT OR REPLACE INTO authors VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let row = params![
        author.as_bytes(),
        int(row.head),
        row.fork.map(int),
        int(row.events),
        int(row.bytes),
        int(row.ephemeral),
    ];
    execute(conn, sql, row)
}

/// Deletes an author and all its durable events.
pub(super) fn delete_author(conn: &Connection, author: &NodeId) -> Result<(), LogError> {
    delete_after(conn, author, 0)?;
    let sql = "DELETE FROM authors WHERE author = ?1";
    execute(conn, sql, [author.as_bytes()])
}

/// Checksum against changes on the disk.
fn sum(raw: &[u8]) -> i64 {
    let sum = Sha256::digest(raw);
    sum.first_chunk()
        .map_or(0, |head| i64::from_be_bytes(*head))
}

/// Checks the bytes of an event, so that damaged bytes are never passed on.
fn check_hash(raw: &[u8], stored: EventHash, stored_sum: i64) -> Result<(), LogError> {
    match EventHash::of(raw) {
        Some(hash) if hash == stored && sum(raw) == stored_sum => Ok(()),
        _ => Err(LogError::corrupt(
            "the bytes of a stored event have changed",
        )),
    }
}

pub(super) fn stored_event(raw: &[u8]) -> Result<Event, LogError> {
    Event::decode_stored(raw).map_err(|_| LogError::corrupt("a stored event cannot be read"))
}
