//! Table of ephemeral events.

use rusqlite::{Connection, Row, params};

use super::{check_hash, each, execute, int, node_of, rows, sum};
use crate::NodeId;
use crate::community::log::error::LogError;
use crate::community::log::event::EventHash;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EphemeralRow {
    pub(crate) author: NodeId,
    pub(crate) slot: String,
    pub(crate) seq: u64,
    pub(crate) hash: EventHash,
    pub(crate) expires_ms: u64,
    pub(crate) keep_ms: u64,
    pub(crate) raw: Vec<u8>,
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

/// Visits the ephemeral events until `visit` returns false.
pub(crate) fn ephemerals(
    conn: &Connection,
    mut visit: impl FnMut(EphemeralRow) -> Result<bool, LogError>,
) -> Result<(), LogError> {
    let sql = format!("SELECT {EPHEMERAL} FROM ephemeral");
    each(conn, &sql, [], |row| visit(ephemeral_of(row)?))
}

pub(crate) fn ephemeral(
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

pub(crate) fn set_ephemeral(conn: &Connection, row: &EphemeralRow) -> Result<(), LogError> {
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

pub(crate) fn delete_ephemeral(
    conn: &Connection,
    author: &NodeId,
    slot: &str,
) -> Result<(), LogError> {
    let sql = "DELETE FROM ephemeral WHERE author = ?1 AND slot = ?2";
    execute(conn, sql, params![author.as_bytes(), slot])
}

/// Slots that need not be remembered any more at `now_ms`.
pub(crate) fn expired(conn: &Connection, now_ms: u64) -> Result<Vec<(NodeId, String)>, LogError> {
    let sql = "SELECT author, slot FROM ephemeral WHERE keep <= ?1";
    rows(conn, sql, [int(now_ms)], |row| {
        Ok((node_of(row, 0)?, row.get(1)?))
    })
}
