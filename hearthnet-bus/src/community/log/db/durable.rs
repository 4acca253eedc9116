//! Table of durable events.

use hearthnet_transport::give_way;
use rusqlite::{Connection, Row, params};

use super::{check_hash, each, execute, int, node_of, one, rows, stored_event, sum};
use crate::NodeId;
use crate::community::log::error::LogError;
use crate::community::log::event::{Event, EventHash, Position};

/// Stored durable event without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DurableRow {
    pub(crate) arrival: i64,
    pub(crate) seq: u64,
    pub(crate) hash: EventHash,
    pub(crate) lamport: u64,
}

/// Durable events of an author with one number, by hash: one, or more at a fork.
pub(crate) fn durable_at(
    conn: &Connection,
    author: &NodeId,
    seq: u64,
) -> Result<Vec<DurableRow>, LogError> {
    durable_between(conn, author, seq, seq)
}

/// Durable events of an author between two numbers, both inclusive, by number and hash.
pub(crate) fn durable_between(
    conn: &Connection,
    author: &NodeId,
    first: u64,
    last: u64,
) -> Result<Vec<DurableRow>, LogError> {
    rows(
        conn,
        "SELECT arrival, seq, hash, lamport FROM durable
         WHERE author = ?1 AND seq BETWEEN ?2 AND ?3 ORDER BY seq, hash",
        params![author.as_bytes(), int(first), int(last)],
        |row| {
            Ok(DurableRow {
                arrival: row.get(0)?,
                seq: row.get(1)?,
                hash: EventHash(row.get(2)?),
                lamport: row.get(3)?,
            })
        },
    )
}

/// Hash of the last durable event, in the order and up to a Lamport time, that is `wanted`.
pub(crate) fn last(
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

/// Bytes of a durable event, checked against its stored hash.
pub(crate) fn raw(conn: &Connection, arrival: i64) -> Result<Vec<u8>, LogError> {
    let sql = "SELECT raw, hash, sum FROM durable WHERE arrival = ?1";
    let (bytes, hash, sum): (Vec<u8>, _, i64) = one(conn, sql, [arrival], |row| {
        Ok((row.get(0)?, EventHash(row.get(1)?), row.get(2)?))
    })?;
    check_hash(&bytes, hash, sum)?;
    Ok(bytes)
}

pub(crate) fn event(conn: &Connection, arrival: i64) -> Result<Event, LogError> {
    stored_event(&raw(conn, arrival)?)
}

pub(crate) fn insert_durable(
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

pub(crate) fn delete_durable(conn: &Connection, arrival: i64) -> Result<(), LogError> {
    execute(conn, "DELETE FROM durable WHERE arrival = ?1", [arrival])
}

/// Deletes an author's durable events after a number.
pub(crate) fn delete_after(conn: &Connection, author: &NodeId, seq: u64) -> Result<(), LogError> {
    let sql = "DELETE FROM durable WHERE author = ?1 AND seq > ?2";
    execute(conn, sql, params![author.as_bytes(), int(seq)])
}

/// Number and total size of an author's stored durable events.
pub(crate) fn measure(conn: &Connection, author: &NodeId) -> Result<(u64, u64), LogError> {
    one(
        conn,
        "SELECT count(*), coalesce(sum(length(raw)), 0) FROM durable WHERE author = ?1",
        [author.as_bytes()],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )
}

/// Greatest stored durable sequence number of an author, whether or not there are holes.
pub(crate) fn last_seq(conn: &Connection, author: &NodeId) -> Result<u64, LogError> {
    let sql = "SELECT coalesce(max(seq), 0) FROM durable WHERE author = ?1";
    one(conn, sql, [author.as_bytes()], |row| row.get(0))
}

/// Returns whether there is a durable event with a Lamport time in `above + 1 ..= up_to`.
pub(crate) fn has_between(conn: &Connection, above: u64, up_to: u64) -> Result<bool, LogError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM durable WHERE lamport > ?1 AND lamport <= ?2)";
    one(conn, sql, [int(above), int(up_to)], |row| row.get(0))
}

/// Visits the positions and arrival numbers of the durable events from a Lamport time on, in their
/// order, until `visit` returns false.
pub(crate) fn walk(
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

/// Decodes and visits the `wanted` durable events after a position, in their order. Returns the
/// cost: the sum of their sizes, each rounded up to whole KiB.
pub(crate) fn scan(
    conn: &Connection,
    after: Option<Position>,
    wanted: impl Fn(&Position) -> bool,
    mut visit: impl FnMut(&Event),
) -> Result<u64, LogError> {
    let sql = "SELECT lamport, author, seq, raw, hash, sum FROM durable
         WHERE lamport >= ?1 ORDER BY lamport, author, seq, hash";
    let from_lamport = after.map_or(0, |at| int(at.lamport));
    let mut cost = 0_u64;
    each(conn, sql, [from_lamport], |row| {
        give_way();
        let position = position_of(row)?;
        if after.is_none_or(|at| position > at) && wanted(&position) {
            let raw = row.get_ref(3)?.as_blob().map_err(rusqlite::Error::from)?;
            check_hash(raw, EventHash(row.get(4)?), row.get(5)?)?;
            visit(&stored_event(raw)?);
            cost = cost.saturating_add(raw.len().div_ceil(1024) as u64);
        }
        Ok(true)
    })?;
    Ok(cost)
}

fn position_of(row: &Row<'_>) -> rusqlite::Result<Position> {
    Ok(Position {
        lamport: row.get(0)?,
        author: node_of(row, 1)?,
        seq: row.get(2)?,
    })
}
