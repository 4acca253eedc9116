//! Comparison of heads, and batches of the events that a peer lacks.

use std::collections::BTreeMap;

use rusqlite::Connection;

use super::db;
use super::error::LogError;
use super::event::{Event, EventHash};
use super::heads::{ForkHead, Head, Heads, SlotHead, slot_key};
use super::view::{Author, View, proof};
use crate::NodeId;

/// Batch of events that a peer lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Stored bytes of the events, in an order in which they can be accepted.
    pub events: Vec<Vec<u8>>,
    /// Whether the peer lacks further events.
    pub more: bool,
    /// Heads of the peer after it has accepted this batch. With them, the next batch can be made
    /// without waiting for an answer.
    pub then: Heads,
}

/// Heads of a log, with all known authors.
pub(super) fn heads_of(view: &View) -> Heads {
    let mut heads = Heads::empty(view.community);
    let known = |author: &NodeId| view.fold.knows(author);
    for (author, it) in &view.authors {
        if known(author) {
            let head = Head {
                seq: it.row.head,
                tip: it.tip.map_or(0, |(hash, _)| hash.tag()),
                fork: it.fork.as_ref().map(ForkHead::from),
                slots: Default::default(),
            };
            heads.authors.insert(*author, head);
        }
    }
    for ((author, slot), live) in view.shown.live.iter() {
        if let Some(head) = heads.authors.get_mut(author) {
            let new = SlotHead::new(live.seq, live.hash);
            head.slots.insert(slot_key(slot), new);
        }
    }
    heads
}

/// Batch that is being filled.
pub(super) struct Pack<'a> {
    pub(super) conn: &'a Connection,
    pub(super) view: &'a View,
    pub(super) theirs: &'a Heads,
    pub(super) now_ms: u64,
    pub(super) batch: Batch,
    pub(super) events_left: usize,
    pub(super) bytes_left: usize,
}

impl Pack<'_> {
    /// Adds an event. Returns false if there is no room for it.
    fn add(&mut self, raw: Vec<u8>) -> Result<bool, LogError> {
        let fits = self.events_left > 0 && raw.len() <= self.bytes_left;
        if !fits && !self.batch.events.is_empty() {
            self.batch.more = true;
            return Ok(false);
        }
        let event = Event::decode_stored(&raw)?;
        if let Some(hash) = EventHash::of(&raw) {
            self.batch.then.note(&event, hash);
        }
        self.events_left = self.events_left.saturating_sub(1);
        self.bytes_left = self.bytes_left.saturating_sub(raw.len());
        self.batch.events.push(raw);
        Ok(true)
    }

    /// Adds what fits. A peer of another community lacks nothing.
    pub(super) fn fill(mut self) -> Result<Batch, LogError> {
        let is_ours = self.theirs.community == self.view.community;
        if is_ours && self.branches()? && self.durable()? && self.proofs()? {
            self.ephemeral()?;
        }
        Ok(self.batch)
    }

    /// Adds the root's events from the lower of the two forks on, if the proofs differ. Sends them
    /// in the order of their numbers, so that the peer's progress tells which are left.
    fn branches(&mut self) -> Result<bool, LogError> {
        let Self { conn, view, .. } = *self;
        let root = view.community.root();
        let Some(it) = view.authors.get(&root) else {
            return Ok(true);
        };
        let ours = it.fork.as_ref().map(ForkHead::from);
        let theirs = self.theirs.authors.get(&root).cloned().unwrap_or_default();
        if ours == theirs.fork {
            return Ok(true);
        }
        let at = ours.map_or(u64::MAX, |fork| fork.seq);
        let both = self.agreed(&root, it, &theirs)?;
        let (from, parts) = match theirs.fork {
            Some(fork) if fork.seq <= at => (both, fork),
            _ => (both.min(at - 1), ForkHead { seq: at, proof: 0 }),
        };
        let rows = db::durable_between(conn, &root, from + 1, u64::MAX)?;
        for rows in rows.chunk_by(|a, b| a.seq == b.seq) {
            for row in rows.iter().filter(|row| it.has(row.seq)) {
                if !self.add(db::raw(conn, row.arrival)?)? {
                    return Ok(false);
                }
            }
            if let Some(first) = rows.first().filter(|row| it.has(row.seq)) {
                let then = self.batch.then.authors.entry(root).or_default();
                (then.seq, then.tip, then.fork) = (first.seq, first.hash.tag(), Some(parts));
            }
        }
        if ours.is_some() {
            let then = self.batch.then.authors.entry(root).or_default();
            (then.seq, then.tip) = (it.row.head, it.tip.map_or(0, |(hash, _)| hash.tag()));
            then.fork = ours;
        }
        Ok(true)
    }

    /// Number up to which the peer has the events of this log, as far as its heads tell. If its
    /// last event differs from ours, it needs ours to see the fork.
    fn agreed(&self, author: &NodeId, it: &Author, theirs: &Head) -> Result<u64, LogError> {
        if theirs.seq > 0 && it.has(theirs.seq) {
            let ours = db::durable_at(self.conn, author, theirs.seq)?;
            if ours.first().is_some_and(|row| row.hash.tag() != theirs.tip) {
                return Ok(theirs.seq - 1);
            }
        }
        Ok(theirs.seq)
    }

    fn durable(&mut self) -> Result<bool, LogError> {
        let Self {
            conn, view, theirs, ..
        } = *self;
        let none = Head::default();
        // For each author of missing events: the last number that the peer has, and the last one here.
        let mut lacks = BTreeMap::new();
        let mut from_lamport = u64::MAX;
        for (author, it) in &view.authors {
            if !view.fold.knows(author) {
                continue;
            }
            let head = theirs.authors.get(author).unwrap_or(&none);
            if it.is_root && head.fork != it.fork.as_ref().map(ForkHead::from) {
                continue;
            }
            // A peer refuses events beyond a fork that it knows.
            let last = match head.fork {
                Some(fork) => it.row.head.min(fork.seq.saturating_sub(1)),
                None => it.row.head,
            };
            let from = self.agreed(author, it, head)?;
            if from < last {
                let first = db::durable_at(conn, author, from + 1)?;
                if let Some(row) = first.first() {
                    from_lamport = from_lamport.min(row.lamport);
                    lacks.insert(*author, (from, last));
                }
            }
        }
        if lacks.is_empty() {
            return Ok(true);
        }
        let mut room = true;
        db::walk(conn, from_lamport, |at, arrival| {
            let wanted = lacks
                .get(&at.author)
                .is_some_and(|(from, last)| at.seq > *from && at.seq <= *last);
            if wanted {
                room = self.add(db::raw(conn, arrival)?)?;
            }
            Ok(room)
        })?;
        Ok(room)
    }

    fn proofs(&mut self) -> Result<bool, LogError> {
        let Self {
            conn, view, theirs, ..
        } = *self;
        for (author, it) in &view.authors {
            let Some(fork) = &it.fork else { continue };
            if it.is_root || !view.fold.knows(author) {
                continue;
            }
            let ours = ForkHead::from(fork);
            let known = theirs.authors.get(author).and_then(|head| head.fork);
            if known == Some(ours) || known.is_some_and(|known| known.seq < ours.seq) {
                continue;
            }
            for row in proof(conn, author, fork.seq)? {
                if !self.add(db::raw(conn, row.arrival)?)? {
                    return Ok(false);
                }
            }
            let head = self.batch.then.authors.entry(*author).or_default();
            head.fork = Some(ours);
        }
        Ok(true)
    }

    fn ephemeral(&mut self) -> Result<(), LogError> {
        let Self {
            conn,
            view,
            theirs,
            now_ms,
            ..
        } = *self;
        for ((author, slot), live) in view.shown.live.iter() {
            if live.expires_ms <= now_ms || !view.fold.knows(author) {
                continue;
            }
            let ours = SlotHead::new(live.seq, live.hash);
            let head = theirs.authors.get(author);
            let theirs = head.and_then(|head| head.slots.get(&slot_key(slot)));
            if theirs.is_some_and(|theirs| *theirs >= ours) {
                continue;
            }
            if let Some(row) = db::ephemeral(conn, author, slot)?
                && !self.add(row.raw)?
            {
                return Ok(());
            }
        }
        Ok(())
    }
}
