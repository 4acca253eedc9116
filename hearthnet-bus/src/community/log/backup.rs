//! Backup of a node in one file: the log, and other named files.
//!
//! The file is an SQLite database. It holds the log's tables as of one transaction, so that a
//! running node can be backed up, and a table of named parts. It holds keys, so its mode is 0600,
//! and it never replaces another file. A restored log is checked when it is opened. As it may be
//! outdated, it writes no own events until a peer was asked.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{Access, draft, publish};
use rusqlite::{Connection, OpenFlags};
use sha2::{Digest as _, Sha256};

use super::db;
use super::error::LogError;
use super::store::{EventLog, FILE_NAME};

/// "HNbk" in the `application_id` of SQLite's header.
const APPLICATION_ID: i64 = 0x484e_626b;
/// Maximum number of parts that are read.
const MAX_PARTS: usize = 16;
/// Maximum bytes of a part that are read: a key has 60, a configuration some KiB.
pub const MAX_PART_BYTES: usize = 1 << 20;

/// Files stored beside the log, by name.
pub type Parts = BTreeMap<String, Vec<u8>>;

/// Writes a backup to `path`, which must not exist: the log, if there is one, and `parts`.
///
/// # Errors
/// [`LogError::Io`], with [`io::ErrorKind::AlreadyExists`] if `path` exists; errors of the disk or
/// the database. A failed backup leaves no file behind.
pub fn write(path: &Path, log: Option<&EventLog>, parts: &Parts) -> Result<(), LogError> {
    if path.exists() {
        return Err(LogError::io("write", path)(
            io::ErrorKind::AlreadyExists.into(),
        ));
    }
    // Set the mode before the file has content.
    let draft = draft(path, Access::Owner).map_err(LogError::io("write", path))?;
    if let Some(log) = log {
        db::open(log.path(), false)?.execute("VACUUM INTO ?1", [text(draft.path())?])?;
    }
    let conn = open_draft(draft.path())?;
    conn.pragma_update(None, "application_id", APPLICATION_ID)?;
    conn.execute_batch(
        "CREATE TABLE part (name TEXT PRIMARY KEY, bytes BLOB NOT NULL, sum BLOB NOT NULL) STRICT",
    )?;
    for (name, bytes) in parts {
        let sum = Sha256::digest(bytes);
        conn.execute(
            "INSERT INTO part VALUES (?1, ?2, ?3)",
            (name, bytes, sum.as_slice()),
        )?;
    }
    db::close(conn)?;
    publish(draft, path).map_err(LogError::io("write", path))
}

/// Reads the parts of a backup. Also returns whether it has a log.
///
/// # Errors
/// [`LogError::Corrupt`] if the file is not a backup, or is incomplete or damaged;
/// [`LogError::Io`].
pub fn read(path: &Path) -> Result<(Parts, bool), LogError> {
    // SQLite would wait for the other end of a pipe. No process has locks on this file.
    regular_file::open(path).map_err(LogError::io("read", path))?;
    let conn = db::connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let application: i64 = conn.pragma_query_value(None, "application_id", |row| row.get(0))?;
    if application != APPLICATION_ID {
        return Err(LogError::corrupt("this file is not a backup of a node"));
    }
    db::check_pages(&conn)?;
    let mut parts = Parts::new();
    let mut statement = conn.prepare("SELECT name, length(bytes), bytes, sum FROM part")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let length: i64 = row.get(1)?;
        if parts.len() >= MAX_PARTS || usize::try_from(length).is_ok_and(|n| n > MAX_PART_BYTES) {
            return Err(LogError::corrupt(
                "this backup has more parts, or larger ones, than a node stores",
            ));
        }
        let (name, bytes, sum): (String, Vec<u8>, Vec<u8>) =
            (row.get(0)?, row.get(2)?, row.get(3)?);
        if Sha256::digest(&bytes).as_slice() != sum {
            return Err(LogError::corrupt("a part of this backup was changed"));
        }
        parts.insert(name, bytes);
    }
    Ok((parts, db::has(&conn, "log")?))
}

/// Restores the log of a backup, checked by [`read`], into `dir`, which must not have a log. A
/// damaged log is refused, not repaired: what a repair drops, other members may not have either
/// when a backup is needed.
///
/// # Errors
/// [`LogError::Exists`]; [`LogError::Corrupt`] or [`LogError::Format`] if the log is missing or
/// damaged; errors of the disk. `dir` then stays unchanged.
pub fn restore_log(backup: &Path, dir: &Path) -> Result<(), LogError> {
    let path = dir.join(FILE_NAME);
    if path.exists() {
        return Err(LogError::Exists { path });
    }
    let conn = db::connect(backup, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let draft = draft(&path, Access::Owner).map_err(LogError::io("write", &path))?;
    conn.execute("VACUUM INTO ?1", [text(draft.path())?])?;
    drop(conn);
    let conn = open_draft(draft.path())?;
    conn.execute_batch("DROP TABLE part")?;
    db::set_doubt(&conn, db::Doubt::Copy)?;
    db::claim(&conn)?;
    let (community, ..) = db::head(&conn)?;
    db::close(conn)?;
    super::recover::check(draft.path(), community)?;
    super::recover::name(dir, community)?;
    publish(draft, &path).map_err(LogError::io("write", &path))
}

/// Opens a database that only this function's caller uses. It needs no journal, because a failed
/// write discards the whole file.
fn open_draft(draft: &Path) -> Result<Connection, LogError> {
    let conn = db::connect(draft, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    conn.pragma_update(None, "journal_mode", "off")?;
    conn.pragma_update(None, "synchronous", "full")?;
    Ok(conn)
}

/// SQLite requires file names that are UTF-8.
fn text(path: &Path) -> Result<&str, LogError> {
    path.to_str()
        .ok_or_else(|| LogError::io("name", path)(io::ErrorKind::InvalidInput.into()))
}
