//! The file: schema, settings, and the statements over it. All SQL of the log is here, table by
//! table, so that what is stored can be read in one place; the tables of events and of snapshots have
//! files of their own.
//!
//! # Settings, and why
//! - WAL: readers never wait for the writer, and several processes may have the file open.
//! - `synchronous=FULL`: a commit is on the disk before it is acknowledged. NORMAL would lose
//!   the last commits with the power, and an author whose events are lost after others have
//!   seen them signs other events in their place: a fork, which freezes it for ever.
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

/// The layout of the tables.
const FORMAT: i64 = 1;

/// "HNet" in SQLite's header, so that `file` and we can tell whose database this is.
const APPLICATION_ID: i64 = 0x484e_6574;

/// How long a writer waits for another process's transaction.
const BUSY: Duration = Duration::from_secs(5);

const SCHEMA: &str = "
CREATE TABLE log (
    id        INTEGER PRIMARY KEY CHECK (id = 1),
    community BLOB    NOT NULL,
    clock     INTEGER NOT NULL,  -- no durable event has a greater Lamport time
    changes   INTEGER NOT NULL,  -- grows with every transaction that changed anything
    doubt     INTEGER NOT NULL   -- 1: acknowledged events may be missing
) STRICT;
CREATE TABLE spare (
    id    INTEGER PRIMARY KEY,
    bytes BLOB NOT NULL          -- written and deleted to find out whether there is room
) STRICT;
CREATE TABLE authors (
    author    BLOB PRIMARY KEY,
    head      INTEGER NOT NULL,  -- durable events without a hole
    fork      INTEGER,           -- where two histories part
    events    INTEGER NOT NULL,  -- durable events stored
    bytes     INTEGER NOT NULL,  -- and their size
    ephemeral INTEGER NOT NULL   -- greatest ephemeral sequence number ever taken
) STRICT, WITHOUT ROWID;
CREATE TABLE durable (
    arrival INTEGER PRIMARY KEY,
    author  BLOB    NOT NULL,
    seq     INTEGER NOT NULL,
    hash    BLOB    NOT NULL,
    lamport INTEGER NOT NULL,
    sum     INTEGER NOT NULL,  -- of all of raw; the hash leaves out the signature
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
    keep    INTEGER NOT NULL,  -- until when the slot remembers what it replaced
    sum     INTEGER NOT NULL,
    raw     BLOB    NOT NULL
) STRICT;
CREATE UNIQUE INDEX ephemeral_by_slot ON ephemeral (author, slot);
CREATE TABLE snapshots (
    folded  INTEGER PRIMARY KEY,  -- how many events are in it
    lamport INTEGER NOT NULL,
    author  BLOB    NOT NULL,
    seq     INTEGER NOT NULL,
    fold    BLOB    NOT NULL,
    sum     BLOB    NOT NULL  -- SHA-256 of it
) STRICT;
";

/// Older programs had an index without the hash, which tells events of the root's branches apart, and
/// folded as if the root had none. They do not mind the new index.
const UPGRADE: &str = "
DROP INDEX durable_in_order;
CREATE INDEX durable_ordered ON durable (lamport, author, seq, hash);
DELETE FROM snapshots;
";

/// Which file on this machine the database was last written as. Not part of [`SCHEMA`], for
/// files of older programs get it when they are opened, and these programs do not mind it.
const FILE_SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS file (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    inode INTEGER NOT NULL,
    born  INTEGER NOT NULL     -- ns since 1970; 0 where the file system does not tell
) STRICT;
";

/// The row of an author.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct AuthorRow {
    pub(super) head: u64,
    pub(super) fork: Option<u64>,
    pub(super) events: u64,
    pub(super) bytes: u64,
    pub(super) ephemeral: u64,
}

/// SQLite's integers are signed; everything that is stored is below 2^53.
pub(super) fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// All rows of a query.
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

/// The one row of a query.
fn one<T>(
    conn: &Connection,
    sql: &str,
    params: impl Params,
    of: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<T, LogError> {
    Ok(conn.prepare_cached(sql)?.query_row(params, of)?)
}

/// Visits the rows of a query until `visit` says no.
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

/// Runs a statement that has no rows.
fn execute(conn: &Connection, sql: &str, params: impl Params) -> Result<(), LogError> {
    conn.prepare_cached(sql)?.execute(params)?;
    Ok(())
}

/// Whether there is a table or an index of this name.
pub(super) fn has(conn: &Connection, name: &str) -> Result<bool, LogError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?1)";
    one(conn, sql, [name], |row| row.get(0))
}

/// A node id in a row: it was checked before it was stored.
fn node_of(row: &Row<'_>, column: usize) -> rusqlite::Result<NodeId> {
    row.get(column).map(NodeId::from_checked)
}

/// Opens the file; makes it if `create`.
pub(super) fn open(path: &Path, create: bool) -> Result<Connection, LogError> {
    let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    flags.set(OpenFlags::SQLITE_OPEN_CREATE, create);
    // Not by opening it: to close it would end the locks that this process has on it.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let other = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
        return Err(LogError::io("open", path)(other));
    }
    let conn = Connection::open_with_flags(path, flags)?;
    conn.busy_timeout(BUSY)?;
    conn.pragma_update(None, "journal_mode", "wal")?;
    conn.pragma_update(None, "synchronous", "full")?;
    // A daemon may write in no folder for temporary files.
    conn.pragma_update(None, "temp_store", "memory")?;
    // After a checkpoint the WAL keeps its size for the next writes, but not that of a flood.
    conn.pragma_update(None, "journal_size_limit", 4 << 20)?;
    conn.set_prepared_statement_cache_capacity(32);
    // Otherwise a statement is planned anew whenever a value bound to it could change its plan, which
    // is a fifth of what taking events in costs.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    Ok(conn)
}

/// Makes the tables. Fails if they exist.
pub(super) fn create(conn: &Connection, community: CommunityId) -> Result<(), LogError> {
    conn.execute_batch(SCHEMA)?;
    conn.pragma_update(None, "application_id", APPLICATION_ID)?;
    conn.pragma_update(None, "user_version", FORMAT)?;
    let sql = "INSERT INTO log VALUES (1, ?1, 0, 0, 0)";
    execute(conn, sql, [community.as_bytes()])
}

/// Makes a database that came out of a backup this program's log.
pub(super) fn claim(conn: &Connection) -> Result<(), LogError> {
    conn.pragma_update(None, "application_id", APPLICATION_ID)?;
    Ok(())
}

/// Whether the tables are there; an error if they are another program's or version's.
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

/// The community, the clock and the count of changes.
pub(super) fn head(conn: &Connection) -> Result<(CommunityId, u64, u64), LogError> {
    one(
        conn,
        "SELECT community, clock, changes FROM log",
        [],
        |row| {
            Ok((
                CommunityId::from(node_of(row, 0)?),
                row.get(1)?,
                row.get(2)?,
            ))
        },
    )
}

/// Whether acknowledged events may be missing.
pub(super) fn doubt(conn: &Connection) -> Result<bool, LogError> {
    one(conn, "SELECT doubt FROM log", [], |row| row.get(0))
}

pub(super) fn set_doubt(conn: &Connection, doubt: bool) -> Result<(), LogError> {
    execute(conn, "UPDATE log SET doubt = ?1", [doubt])
}

/// What the file system knows a file by: a copy, also one that was put back in its place, is
/// another file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileIdentity {
    inode: i64,
    born: i64,
}

impl FileIdentity {
    pub(super) fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let meta = std::fs::metadata(path).ok()?;
        let born = meta.created().ok();
        let born = born.and_then(|born| born.duration_since(std::time::UNIX_EPOCH).ok());
        Some(Self {
            inode: meta.ino().cast_signed(),
            born: born.map_or(0, |born| i64::try_from(born.as_nanos()).unwrap_or(0)),
        })
    }
}

/// As which file the database was last written; `None` if no program has noted it.
pub(super) fn file(conn: &Connection) -> Result<Option<FileIdentity>, LogError> {
    if !has(conn, "file")? {
        return Ok(None);
    }
    let file = rows(conn, "SELECT inode, born FROM file", [], |row| {
        Ok(FileIdentity {
            inode: row.get(0)?,
            born: row.get(1)?,
        })
    })?;
    Ok(file.first().copied())
}

pub(super) fn set_file(conn: &Connection, file: FileIdentity) -> Result<(), LogError> {
    conn.execute_batch(FILE_SCHEMA)?;
    let sql = "INSERT OR REPLACE INTO file VALUES (1, ?1, ?2)";
    execute(conn, sql, [file.inode, file.born])
}

/// Brings the tables of an older program up to date.
pub(super) fn upgrade(conn: &Connection) -> Result<(), LogError> {
    if has(conn, "durable_in_order")? {
        let tx = conn.unchecked_transaction()?;
        tx.execute_batch(UPGRADE)?;
        tx.commit()?;
    }
    Ok(())
}

/// Whether the pages of the file belong together, and the indexes with the tables. Takes some
/// ten milliseconds for ten thousand events.
pub(super) fn check_pages(conn: &Connection) -> Result<(), LogError> {
    match integrity(conn)?.first() {
        None => Ok(()),
        Some(what) => Err(LogError::corrupt(what)),
    }
}

/// Whether the small tables say what the events say: a changed number in them would go
/// unnoticed otherwise.
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

/// What SQLite finds wrong with the file, a line each.
pub(super) fn integrity(conn: &Connection) -> Result<Vec<String>, LogError> {
    let mut found: Vec<String> = rows(conn, "PRAGMA integrity_check(20)", [], |row| row.get(0))?;
    found.retain(|line| line != "ok");
    Ok(found)
}

/// Finds out whether there is room for more than the last event took: takes it, gives it back.
pub(super) fn probe(conn: &mut Connection) -> Result<(), LogError> {
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("INSERT INTO spare (bytes) VALUES (zeroblob(65536))", [])?;
    tx.commit()?;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("DELETE FROM spare", [])?;
    tx.commit()?;
    Ok(())
}

/// Writes everything into the file itself and closes it.
pub(super) fn close(conn: Connection) -> Result<(), LogError> {
    conn.pragma_update(None, "journal_mode", "delete")?;
    conn.close().map_err(|(_, error)| error.into())
}

/// Hands over the bytes of every event that a damaged file still gives, from the beginning of
/// each table as far as it goes, then from its end.
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

/// Hands over the bytes of every event of a whole file.
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

pub(super) fn changes(conn: &Connection) -> Result<u64, LogError> {
    one(conn, "SELECT changes FROM log", [], |row| row.get(0))
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

/// Deletes all durable events of an author.
pub(super) fn delete_author(conn: &Connection, author: &NodeId) -> Result<(), LogError> {
    delete_after(conn, author, 0)?;
    let sql = "DELETE FROM authors WHERE author = ?1";
    execute(conn, sql, [author.as_bytes()])
}

/// Tells bytes that changed on the disk.
fn sum(raw: &[u8]) -> i64 {
    let sum = Sha256::digest(raw);
    sum.first_chunk()
        .map_or(0, |head| i64::from_be_bytes(*head))
}

/// Whatever the disk did to the bytes, they are not passed on as what they were not.
fn check_hash(raw: &[u8], stored: EventHash, stored_sum: i64) -> Result<(), LogError> {
    match EventHash::of(raw) {
        Some(hash) if hash == stored && sum(raw) == stored_sum => Ok(()),
        _ => Err(LogError::corrupt(
            "the bytes of an event are not those that were stored",
        )),
    }
}

pub(super) fn stored_event(raw: &[u8]) -> Result<Event, LogError> {
    Event::decode_stored(raw).map_err(|_| LogError::corrupt("a stored event cannot be read"))
}
