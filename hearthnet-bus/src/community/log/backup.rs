//! A node in one file: the log, and whatever else is to be kept with it.
//!
//! The file is an SQLite database: the log's own tables as one transaction saw them, so that a
//! running node can be backed up, and beside them a table of named parts. It holds keys: its mode is
//! 0600, and it never replaces another file. What comes out of it is checked like any other log when
//! it is opened, and is a copy that may be old: it writes nothing new before a peer was asked.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};
use sha2::{Digest as _, Sha256};

use super::db;
use super::error::LogError;
use super::store::{EventLog, FILE_NAME};
use crate::identity::whole_file::{draft, publish};

/// "HNbk" in SQLite's header.
const APPLICATION_ID: i64 = 0x484e_626b;
/// Most parts, and bytes of one, that are read: a key has 60 bytes, a configuration some KiB.
const MAX_PARTS: usize = 16;
/// Most bytes of a part.
pub const MAX_PART_BYTES: usize = 1 << 20;

/// What is kept beside the log, by name.
pub type Parts = BTreeMap<String, Vec<u8>>;

/// Writes a backup to `path`, which must not exist yet: the log, if there is one, and `parts`.
///
/// # Errors
/// [`LogError::Io`], of the kind [`io::ErrorKind::AlreadyExists`] if there is something at `path`;
/// what the disk or the database says. Then nothing is left behind.
pub fn write(path: &Path, log: Option<&EventLog>, parts: &Parts) -> Result<(), LogError> {
    if path.exists() {
        return Err(LogError::io("write", path)(
            io::ErrorKind::AlreadyExists.into(),
        ));
    }
    // Its mode before anything is in it.
    let draft = draft(path, 0o600).map_err(LogError::io("write", path))?;
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

/// The parts of a backup, and whether a log is in it.
///
/// # Errors
/// [`LogError::Corrupt`] if it is no backup, or one of which something is missing or changed;
/// [`LogError::Io`].
pub fn read(path: &Path) -> Result<(Parts, bool), LogError> {
    // SQLite would wait for the other end of a pipe. Nothing has locks on this file.
    crate::regular_file::open(path).map_err(LogError::io("read", path))?;
    let conn = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    let application: i64 = conn.pragma_query_value(None, "application_id", |row| row.get(0))?;
    if application != APPLICATION_ID {
        return Err(LogError::corrupt("this file is no backup of a node"));
    }
    if let Some(what) = db::integrity(&conn)?.first() {
        return Err(LogError::corrupt(what));
    }
    let mut parts = Parts::new();
    let mut statement = conn.prepare("SELECT name, length(bytes), bytes, sum FROM part")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let length: i64 = row.get(1)?;
        if parts.len() >= MAX_PARTS || usize::try_from(length).is_ok_and(|n| n > MAX_PART_BYTES) {
            return Err(LogError::corrupt(
                "there is more in this backup than in any",
            ));
        }
        let (name, bytes, sum): (String, Vec<u8>, Vec<u8>) =
            (row.get(0)?, row.get(2)?, row.get(3)?);
        if Sha256::digest(&bytes).as_slice() != sum {
            return Err(LogError::corrupt(
                "a part of this backup is not what was written",
            ));
        }
        parts.insert(name, bytes);
    }
    Ok((parts, db::has(&conn, "log")?))
}

/// Makes the log of a backup that [`read`] has looked at the log in `dir`, which must not have one. A
/// damaged one is refused, not repaired: what [`EventLog::open`] drops of a living log comes back from
/// other members, and a backup is needed where there may be none.
///
/// # Errors
/// [`LogError::Exists`]; [`LogError::Corrupt`] or [`LogError::Format`] if it is no log, or a damaged
/// one; what the disk says. Then `dir` is as it was.
pub fn restore_log(backup: &Path, dir: &Path) -> Result<(), LogError> {
    let path = dir.join(FILE_NAME);
    if path.exists() {
        return Err(LogError::Exists { path });
    }
    let conn = Connection::open_with_flags(
        backup,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    let draft = draft(&path, 0o600).map_err(LogError::io("write", &path))?;
    conn.execute("VACUUM INTO ?1", [text(draft.path())?])?;
    drop(conn);
    let conn = open_draft(draft.path())?;
    conn.execute_batch("DROP TABLE part")?;
    db::set_doubt(&conn, true)?;
    db::claim(&conn)?;
    let (community, ..) = db::head(&conn)?;
    db::close(conn)?;
    super::recover::check(draft.path(), community)?;
    super::recover::name(dir, community)?;
    publish(draft, &path).map_err(LogError::io("write", &path))
}

/// Opens a database that nobody else knows of. If writing it fails, all of it is thrown away: so it
/// needs no journal beside it.
fn open_draft(draft: &Path) -> Result<Connection, LogError> {
    let conn = Connection::open_with_flags(
        draft,
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    conn.pragma_update(None, "journal_mode", "off")?;
    conn.pragma_update(None, "synchronous", "full")?;
    Ok(conn)
}

/// SQLite takes file names as text.
fn text(path: &Path) -> Result<&str, LogError> {
    path.to_str()
        .ok_or_else(|| LogError::io("name", path)(io::ErrorKind::InvalidInput.into()))
}
