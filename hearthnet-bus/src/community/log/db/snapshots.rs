//! Table of fold snapshots.

use rusqlite::{Connection, Params, params};
use sha2::{Digest as _, Sha256};

use super::{execute, int, one, rows};
use crate::community::log::error::LogError;
use crate::community::log::event::Position;
use crate::community::log::fold::Fold;

/// Newest snapshot before a position.
pub(crate) fn snapshot(conn: &Connection, before: Position) -> Result<Option<Fold>, LogError> {
    let sql = "SELECT fold, sum FROM snapshots WHERE (lamport, author, seq) < (?1, ?2, ?3)
         ORDER BY folded DESC LIMIT 1";
    let found: Vec<(Vec<u8>, Vec<u8>)> = rows(conn, sql, place(&before), |row| row.try_into())?;
    let Some((bytes, sum)) = found.first() else {
        return Ok(None);
    };
    if Sha256::digest(bytes).as_slice() != sum {
        return Err(LogError::corrupt("a stored snapshot has changed"));
    }
    // An unreadable snapshot is of another version: the fold is computed again.
    Ok(ciborium::from_reader(bytes.as_slice()).ok())
}

/// Number of events in the newest snapshot.
pub(crate) fn last_snapshot(conn: &Connection) -> Result<u64, LogError> {
    let sql = "SELECT coalesce(max(folded), 0) FROM snapshots";
    one(conn, sql, [], |row| row.get(0))
}

/// Stores a snapshot. If there are more than `keep`, deletes every second of the older half, so
/// that older snapshots are further apart.
pub(crate) fn add_snapshot(conn: &Connection, fold: &Fold, keep: usize) -> Result<(), LogError> {
    let Some(at) = fold.at else { return Ok(()) };
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

/// Drops the snapshots that include events at or after a position; all of them for `None`.
pub(crate) fn drop_snapshots(conn: &Connection, from: Option<Position>) -> Result<(), LogError> {
    let Some(from) = from else {
        return execute(conn, "DELETE FROM snapshots", []);
    };
    let sql = "DELETE FROM snapshots WHERE (lamport, author, seq) >= (?1, ?2, ?3)";
    execute(conn, sql, place(&from))
}

fn place(at: &Position) -> impl Params {
    (int(at.lamport), *at.author.as_bytes(), int(at.seq))
}
