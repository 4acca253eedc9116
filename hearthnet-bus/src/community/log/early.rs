//! Events that are post-dated too far to be accepted, and the events that vouch for them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rusqlite::Connection;

use super::db;
use super::error::LogError;
use super::event::{Event, EventHash, Lane, MAX_AHEAD_MS};

/// Verified event, with its index in the current batch; `None` if it was held from an earlier
/// batch.
#[derive(Debug, Clone)]
pub(super) struct Signed {
    pub(super) place: Option<usize>,
    pub(super) hash: EventHash,
    pub(super) raw: Vec<u8>,
    pub(super) event: Event,
}

/// Maximum number of post-dated events that are held: more than a user writes before noticing the
/// wrong clock.
pub(super) const MAX_EARLY: usize = 64;

/// Splits events into those post-dated too far and the others. An event is not too far post-dated
/// if its author's next event follows it and has an acceptable time: the event was then made
/// earlier, by a wrong clock that has been set since.
pub(super) fn without_early(
    conn: &Connection,
    mut events: Vec<Signed>,
    now_ms: u64,
) -> Result<(Vec<Signed>, Vec<Signed>), LogError> {
    let is_early = |event: &Event| event.time_ms.saturating_sub(now_ms) > MAX_AHEAD_MS;
    if !events.iter().any(|one| is_early(&one.event)) {
        return Ok((vec![], events));
    }
    // Process each chain from its last event, so that the followers of an event are known.
    let mut order: Vec<&Signed> = events.iter().collect();
    order.sort_by_key(|one| Reverse(one.event.seq));
    let (mut followed, mut early) = (BTreeMap::new(), BTreeSet::new());
    for Signed { hash, event, .. } in order {
        let mut ok = !is_early(event);
        let Lane::Durable { prev } = event.lane else {
            early.extend((!ok).then_some(*hash));
            continue;
        };
        if !ok {
            let by: Option<&u64> = followed.get(hash);
            ok = by.is_some_and(|lamport| *lamport > event.lamport);
            for row in db::durable_at(conn, &event.author, event.seq.saturating_add(1))? {
                let next = db::event(conn, row.arrival)?;
                ok |= next.lane == (Lane::Durable { prev: *hash }) && row.lamport > event.lamport;
            }
        }
        match ok {
            true => drop(followed.insert(prev, event.lamport)),
            false => drop(early.insert(*hash)),
        }
    }
    let rest = events
        .extract_if(.., |one| !early.contains(&one.hash))
        .collect();
    Ok((events, rest))
}
