//! The file: schema, settings, and the statements over it. All SQL of the log is here, table by
//! table, so that what is stored can be read in one place.
//!
//! # Settings, and why
//! - WAL: readers never wait for the writer, and several processes may have the file open.
//! - `synchronous=FULL`: a commit is on the disk before it is acknowledged. NORMAL would lose
//!   the last commits with the power, and an author whose events are lost after others have
//!   seen them signs other events in their place: a fork, which freezes it for ever.
//! - A busy timeout of 5 s: writers of other processes take milliseconds.
//! - No foreign keys: rows of different tables do not refer to each other.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, Params, Row, TransactionBehavior, params};
use sha2::{Digest as _, Sha256};

use super::error::LogError;
use super::event::{Event, EventHash, Position};
use super::fold::Fold;
use crate::{CommunityId, NodeId};

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

/// A durable event without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DurableRow {
    pub(super) arrival: i64,
    pub(super) seq: u64,
    pub(super) hash: EventHash,
    pub(super) lamport: u64,
}

/// An ephemeral event as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EphemeralRow {
    pub(super) author: NodeId,
    pub(super) slot: String,
    pub(super) seq: u64,
    pub(super) hash: EventHash,
    pub(super) expires_ms: u64,
    pub(super) keep_ms: u64,
    pub(super) raw: Vec<u8>,
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

fn position_of(row: &Row<'_>) -> rusqlite::Result<Position> {
    Ok(Position {
        lamport: row.get(0)?,
        author: node_of(row, 1)?,
        seq: row.get(2)?,
    })
}

/// A node id in a row: it was checked before it was stored.
fn node_of(row: &Row<'_>, column: usize) -> rusqlite::Result<NodeId> {
    row.get(column).map(NodeId::from_checked)
}

/// Opens the file; makes it if `create`.
pub(super) fn open(path: &Path, create: bool) -> Result<Connection, LogError> {
    let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    flags.set(OpenFlags::SQLITE_OPEN_CREATE, create);
    let conn = Connection::open_with_flags(path, flags)?;
    conn.busy_timeout(BUSY)?;
    conn.pragma_update(None, "journal_mode", "wal")?;
    conn.pragma_update(None, "synchronous", "full")?;
    // A daemon may write in no folder for temporary files.
    conn.pragma_update(None, "temp_store", "memory")?;
    // After a checkpoint the WAL keeps its size for the next writes, but not that of a flood.
    conn.pragma_update(None, "journal_size_limit", 4 << 20)?;
    conn.set_prepared_statement_cache_capacity(32);
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

/// The durable events of an author at one place, by hash: one, or two after a fork.
pub(super) fn durable_at(
    conn: &Connection,
    author: &NodeId,
    seq: u64,
) -> Result<Vec<DurableRow>, LogError> {
    rows(
        conn,
        "SELECT arrival, seq, hash, lamport FROM durable
         WHERE author = ?1 AND seq = ?2 ORDER BY hash",
        params![author.as_bytes(), int(seq)],
        durable_of,
    )
}

/// The durable events of an author from one place on, by number and hash.
pub(super) fn durable_from(
    conn: &Connection,
    author: &NodeId,
    seq: u64,
) -> Result<Vec<DurableRow>, LogError> {
    rows(
        conn,
        "SELECT arrival, seq, hash, lamport FROM durable
         WHERE author = ?1 AND seq >= ?2 ORDER BY seq, hash",
        params![author.as_bytes(), int(seq)],
        durable_of,
    )
}

fn durable_of(row: &Row<'_>) -> rusqlite::Result<DurableRow> {
    Ok(DurableRow {
        arrival: row.get(0)?,
        seq: row.get(1)?,
        hash: EventHash(row.get(2)?),
        lamport: row.get(3)?,
    })
}

/// The hash of the last durable event, in the order and up to a Lamport time, that is `wanted`.
pub(super) fn last(
    conn: &Connection,
    up_to: u64,
    wanted: impl Fn(&Position) -> bool,
) -> Result<Option<EventHash>, LogError> {
    let sql = "SELECT lamport, author, seq, hash FROM durable
         WHERE lamport <= ?1 ORDER BY lamport DESC, author DESC, seq DESC, hash DESC";
    let mut last = None;
    each(conn, sql, [int(up_to)], |row| {
        if wanted(&position_of(row)?) {
            last = Some(EventHash(row.get(3)?));
        }
        Ok(last.is_none())
    })?;
    Ok(last)
}

/// The bytes of a durable event, checked against the hash that it was stored under.
pub(super) fn raw(conn: &Connection, arrival: i64) -> Result<Vec<u8>, LogError> {
    let sql = "SELECT raw, hash, sum FROM durable WHERE arrival = ?1";
    let (bytes, hash, sum): (Vec<u8>, _, i64) = one(conn, sql, [arrival], |row| {
        Ok((row.get(0)?, EventHash(row.get(1)?), row.get(2)?))
    })?;
    check_hash(&bytes, hash, sum)?;
    Ok(bytes)
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

pub(super) fn event(conn: &Connection, arrival: i64) -> Result<Event, LogError> {
    stored_event(&raw(conn, arrival)?)
}

pub(super) fn insert_durable(
    conn: &Connection,
    event: &Event,
    hash: EventHash,
    raw: &[u8],
) -> Result<(), LogError> {
    let sql = "INSERT INTO durable (author, seq, hash, lamport, sum, raw)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let row = params![
        event.author.as_bytes(),
        int(event.seq),
        hash.0,
        int(event.lamport),
        sum(raw),
        raw,
    ];
    execute(conn, sql, row)
}

pub(super) fn delete_durable(conn: &Connection, arrival: i64) -> Result<(), LogError> {
    execute(conn, "DELETE FROM durable WHERE arrival = ?1", [arrival])
}

/// Deletes what lies beyond a fork.
pub(super) fn delete_after(conn: &Connection, author: &NodeId, seq: u64) -> Result<(), LogError> {
    let sql = "DELETE FROM durable WHERE author = ?1 AND seq > ?2";
    execute(conn, sql, params![author.as_bytes(), int(seq)])
}

/// How many durable events of an author are stored, and their size.
pub(super) fn measure(conn: &Connection, author: &NodeId) -> Result<(u64, u64), LogError> {
    one(
        conn,
        "SELECT count(*), coalesce(sum(length(raw)), 0) FROM durable WHERE author = ?1",
        [author.as_bytes()],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )
}

/// Greatest durable sequence number stored of an author, holes or not.
pub(super) fn last_seq(conn: &Connection, author: &NodeId) -> Result<u64, LogError> {
    let sql = "SELECT coalesce(max(seq), 0) FROM durable WHERE author = ?1";
    one(conn, sql, [author.as_bytes()], |row| row.get(0))
}

/// Whether there is a durable event with a Lamport time above the one and up to the other.
pub(super) fn has_between(conn: &Connection, above: u64, up_to: u64) -> Result<bool, LogError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM durable WHERE lamport > ?1 AND lamport <= ?2)";
    one(conn, sql, [int(above), int(up_to)], |row| row.get(0))
}

/// Walks over the durable events after a position, in their order, without their content,
/// until `visit` says no.
pub(super) fn walk(
    conn: &Connection,
    from_lamport: u64,
    mut visit: impl FnMut(Position, i64) -> Result<bool, LogError>,
) -> Result<(), LogError> {
    let sql = "SELECT lamport, author, seq, arrival FROM durable
         WHERE lamport >= ?1 ORDER BY lamport, author, seq, hash";
    each(conn, sql, [int(from_lamport)], |row| {
        visit(position_of(row)?, row.get(3)?)
    })
}

/// Reads the durable events after a position, in their order. `wanted` says which; the others
/// are not decoded.
pub(super) fn scan(
    conn: &Connection,
    after: Option<Position>,
    wanted: impl Fn(&Position) -> bool,
    mut visit: impl FnMut(&Event) -> Result<(), LogError>,
) -> Result<(), LogError> {
    let sql = "SELECT lamport, author, seq, raw, hash, sum FROM durable
         WHERE lamport >= ?1 ORDER BY lamport, author, seq, hash";
    let from_lamport = after.map_or(0, |at| int(at.lamport));
    each(conn, sql, [from_lamport], |row| {
        let position = position_of(row)?;
        if after.is_none_or(|at| position > at) && wanted(&position) {
            let raw = row.get_ref(3)?.as_blob().map_err(rusqlite::Error::from)?;
            check_hash(raw, EventHash(row.get(4)?), row.get(5)?)?;
            visit(&stored_event(raw)?)?;
        }
        Ok(true)
    })
}

fn ephemeral_of(row: &Row<'_>) -> Result<EphemeralRow, LogError> {
    let found = EphemeralRow {
        author: node_of(row, 0)?,
        slot: row.get(1)?,
        seq: row.get(2)?,
        hash: EventHash(row.get(3)?),
        expires_ms: row.get(4)?,
        keep_ms: row.get(5)?,
        raw: row.get(6)?,
    };
    check_hash(&found.raw, found.hash, row.get(7)?)?;
    Ok(found)
}

const EPHEMERAL: &str = "author, slot, seq, hash, expires, keep, raw, sum";

/// Visits every ephemeral event.
pub(super) fn ephemerals(
    conn: &Connection,
    mut visit: impl FnMut(EphemeralRow) -> Result<(), LogError>,
) -> Result<(), LogError> {
    let sql = format!("SELECT {EPHEMERAL} FROM ephemeral");
    each(conn, &sql, [], |row| {
        visit(ephemeral_of(row)?)?;
        Ok(true)
    })
}

pub(super) fn ephemeral(
    conn: &Connection,
    author: &NodeId,
    slot: &str,
) -> Result<Option<EphemeralRow>, LogError> {
    let sql = format!("SELECT {EPHEMERAL} FROM ephemeral WHERE author = ?1 AND slot = ?2");
    let mut found = None;
    each(conn, &sql, params![author.as_bytes(), slot], |row| {
        found = Some(ephemeral_of(row)?);
        Ok(false)
    })?;
    Ok(found)
}

pub(super) fn set_ephemeral(conn: &Connection, row: &EphemeralRow) -> Result<(), LogError> {
    let sql = "INSERT INTO ephemeral (author, slot, seq, hash, expires, keep, raw, sum)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
         ON CONFLICT (author, slot) DO UPDATE SET seq = excluded.seq, hash = excluded.hash,
             expires = excluded.expires, keep = excluded.keep, raw = excluded.raw,
             sum = excluded.sum";
    let row = params![
        row.author.as_bytes(),
        row.slot,
        int(row.seq),
        row.hash.0,
        int(row.expires_ms),
        int(row.keep_ms),
        row.raw,
        sum(&row.raw),
    ];
    execute(conn, sql, row)
}

pub(super) fn delete_ephemeral(
    conn: &Connection,
    author: &NodeId,
    slot: &str,
) -> Result<(), LogError> {
    let sql = "DELETE FROM ephemeral WHERE author = ?1 AND slot = ?2";
    execute(conn, sql, params![author.as_bytes(), slot])
}

/// The slots of which nothing is to be remembered at `now_ms`.
pub(super) fn expired(conn: &Connection, now_ms: u64) -> Result<Vec<(NodeId, String)>, LogError> {
    let sql = "SELECT author, slot FROM ephemeral WHERE keep <= ?1";
    rows(conn, sql, [int(now_ms)], |row| {
        Ok((node_of(row, 0)?, row.get(1)?))
    })
}

/// The newest snapshot before a position.
pub(super) fn snapshot(conn: &Connection, before: Position) -> Result<Option<Fold>, LogError> {
    let sql = "SELECT fold, sum FROM snapshots WHERE (lamport, author, seq) < (?1, ?2, ?3)
         ORDER BY folded DESC LIMIT 1";
    let found: Vec<(Vec<u8>, Vec<u8>)> = rows(conn, sql, place(&before), |row| row.try_into())?;
    let Some((bytes, sum)) = found.first() else {
        return Ok(None);
    };
    if Sha256::digest(bytes).as_slice() != sum {
        return Err(LogError::corrupt("a snapshot is not what was stored"));
    }
    // One that cannot be read is of another version: the fold can be made again.
    Ok(ciborium::from_reader(bytes.as_slice()).ok())
}

/// The number of events in the newest snapshot.
pub(super) fn last_snapshot(conn: &Connection) -> Result<u64, LogError> {
    let sql = "SELECT coalesce(max(folded), 0) FROM snapshots";
    one(conn, sql, [], |row| row.get(0))
}

/// Stores a snapshot, and thins out old ones: of more than `keep`, every second of the older
/// half goes, so that they lie the further apart the older they are.
pub(super) fn add_snapshot(conn: &Connection, fold: &Fold, keep: usize) -> Result<(), LogError> {
    let Some(at) = fold.at() else { return Ok(()) };
    let mut bytes = Vec::new();
    ciborium::into_writer(fold, &mut bytes)
        .map_err(|_| LogError::corrupt("its state cannot be encoded"))?;
    let sum = Sha256::digest(&bytes);
    let sql = "INSERT OR REPLACE INTO snapshots VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let row = params![
        int(fold.count),
        int(at.lamport),
        at.author.as_bytes(),
        int(at.seq),
        bytes,
        sum.as_slice(),
    ];
    execute(conn, sql, row)?;
    let sql = "SELECT folded FROM snapshots ORDER BY folded";
    let all: Vec<i64> = rows(conn, sql, [], |row| row.get(0))?;
    if all.len() > keep {
        for folded in all.iter().take(all.len() / 2).step_by(2) {
            execute(conn, "DELETE FROM snapshots WHERE folded = ?1", [folded])?;
        }
    }
    Ok(())
}

/// Drops the snapshots that hold events at or after a position; all of them for `None`.
pub(super) fn drop_snapshots(conn: &Connection, from: Option<Position>) -> Result<(), LogError> {
    let Some(from) = from else {
        return execute(conn, "DELETE FROM snapshots", []);
    };
    let sql = "DELETE FROM snapshots WHERE (lamport, author, seq) >= (?1, ?2, ?3)";
    execute(conn, sql, place(&from))
}

fn place(at: &Position) -> impl Params {
    (int(at.lamport), *at.author.as_bytes(), int(at.seq))
}
