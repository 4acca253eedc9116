//! Taking an event into the log: chains, forks, slots, quotas, and keeping the fold in step. These
//! stand together because their order within a transaction is what makes them right.
//!
//! Everything here happens inside one write transaction, over events whose form and signature
//! were checked before it began. What is stored in the end is a function of the set of events
//! that were offered, whatever their order, batches and repetitions:
//!
//! - **Durable lane.** An author's history parts at the lowest number where it signed two
//!   events, or one that does not follow the event before it (another predecessor, or a
//!   Lamport time that does not grow). Kept are all events before that place and the two with
//!   the lowest hashes at it; nothing beyond. Merging what two nodes kept gives what a node
//!   with all events would have kept, because the lowest place of the union is the lowest of
//!   the two, or a pair of events that both lie in what was kept.
//! - **The root's** history may part: its key may be used in two places that do not hear of each
//!   other, and its word must hold. From the lowest such number on all of its events are kept and count,
//!   whatever they follow.
//! - **Holes.** An event whose predecessor is missing is kept, and has no effect until the
//!   hole is filled; nor has a fork beyond one.
//! - **Ephemeral lane.** Of one author and slot the event with the greatest (number, hash); of
//!   one author the [`MAX_SLOTS`] slots with the greatest. Both are maxima, so order does not
//!   matter.
//! - **Quotas** cut an author's history at a number that does not depend on the order. Only
//!   the room for strangers does: what does not fit is offered again by the next peer.

use std::sync::Arc;

use hearthnet_transport::give_way;
use rusqlite::Connection;

use super::db::{self, EphemeralRow};
use super::error::{LogError, Refusal};
use super::event::{Event, EventHash, Lane};
use super::heads::MAX_SLOTS;
use super::view::{Author, Redo, View, fork, live_of};
use crate::NodeId;

/// How much one author, and strangers together, may have in the log.
///
/// All nodes of a community should use the same figures: what one refuses, the others go on
/// offering it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Durable events of one author. A node writes one for each person that it admits,
    /// invites, promotes or revokes, and none by merely running.
    pub events_per_author: u64,
    /// Bytes of the durable events of one author.
    pub bytes_per_author: u64,
    /// Events, durable and ephemeral, of all authors together that the log does not know as
    /// members: their admission may be on its way.
    pub stranger_events: u64,
    /// Bytes of those that are durable.
    pub stranger_bytes: u64,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            events_per_author: 20_000,
            bytes_per_author: 8 << 20,
            stranger_events: 1024,
            stranger_bytes: 1 << 20,
        }
    }
}

/// What [`crate::community::log::EventLog::compact`] dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Ephemeral events that had expired.
    pub ephemeral: u64,
    /// Durable events of strangers whose admission did not come within a day.
    pub strangers: u64,
}

/// How long strangers' events are kept for an admission that may come, in milliseconds.
const STRANGER_MS: u64 = 24 * 3600 * 1000;

/// What became of an event that was not refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    New,
    Known,
}

/// One write transaction's work.
pub(super) struct Merge<'a> {
    conn: &'a Connection,
    view: &'a mut View,
    quotas: &'a Quotas,
    now_ms: u64,
    durable_changed: bool,
    /// Somebody has lost a level, and with it what it did: that waits for no budget.
    urgent: bool,
}

impl<'a> Merge<'a> {
    pub(super) fn new(
        conn: &'a Connection,
        view: &'a mut View,
        quotas: &'a Quotas,
        now_ms: u64,
    ) -> Self {
        Self {
            conn,
            view,
            quotas,
            now_ms,
            durable_changed: false,
            urgent: false,
        }
    }

    /// What is taken from now on came at this time.
    pub(super) fn at(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// Takes one event in.
    pub(super) fn take(
        &mut self,
        event: &Event,
        hash: EventHash,
        raw: &[u8],
    ) -> Result<Result<Taken, Refusal>, LogError> {
        give_way();
        match &event.lane {
            Lane::Durable { prev } => self.durable(event, *prev, hash, raw),
            Lane::Ephemeral { slot, expires_ms } => {
                self.ephemeral(event, slot, *expires_ms, hash, raw)
            }
        }
    }

    /// Drops what nothing depends on any more at this time. Says how much.
    pub(super) fn compact(&mut self) -> Result<Compacted, LogError> {
        let (conn, now_ms) = (self.conn, self.now_ms);
        let mut done = Compacted::default();
        for place in db::expired(conn, now_ms)? {
            db::delete_ephemeral(conn, &place.0, &place.1)?;
            Arc::make_mut(&mut self.view.live).remove(&place);
            done.ephemeral = done.ephemeral.saturating_add(1);
        }
        // Strangers whose admission has not come for a day: if it comes yet, others still
        // have their events.
        let mut strangers = Vec::new();
        for (author, it) in &self.view.authors {
            let live = self.view.live.keys().any(|(a, _)| a == author);
            if self.view.fold.knows(author) || live {
                continue;
            }
            let last = db::last_seq(conn, author)?;
            let age = match db::durable_at(conn, author, last)?.first() {
                Some(row) => now_ms.saturating_sub(db::event(conn, row.arrival)?.time_ms),
                None => u64::MAX,
            };
            if age >= STRANGER_MS {
                strangers.push((*author, it.row.events));
            }
        }
        for (author, events) in strangers {
            db::delete_author(conn, &author)?;
            self.view.authors.remove(&author);
            done.strangers = done.strangers.saturating_add(events);
        }
        Ok(done)
    }

    /// Brings the state and the counters in line with what was taken. Must come last.
    pub(super) fn finish(self) -> Result<(), LogError> {
        self.view.settle(self.conn, self.now_ms, self.urgent)?;
        if self.durable_changed {
            self.view.publish();
        }
        self.view.changes = self.view.changes.saturating_add(1);
        db::set_head(self.conn, self.view.clock, self.view.changes)
    }

    fn save(&mut self, author: &NodeId, it: Author) -> Result<(), LogError> {
        db::set_author(self.conn, author, &it.row)?;
        self.view.authors.insert(*author, it);
        Ok(())
    }

    /// Whether a stranger's event still finds room.
    fn has_room(&mut self, author: &NodeId, bytes: u64) -> Result<bool, LogError> {
        if self.view.fold.knows(author) {
            return Ok(true);
        }
        let settled = self.view.settle(self.conn, self.now_ms, false)?;
        if settled && self.view.fold.knows(author) {
            return Ok(true);
        }
        let is_stranger = |author: &NodeId| !self.view.fold.knows(author);
        let (mut authors, mut events, mut stored) = (0, 0, bytes);
        for (author, it) in &self.view.authors {
            if is_stranger(author) {
                authors += 1;
                events += it.row.events;
                stored += it.row.bytes;
            }
        }
        let live = self.view.live.keys();
        events += live
            .map(|(author, _)| u64::from(is_stranger(author)))
            .sum::<u64>();
        Ok(events.max(authors) < self.quotas.stranger_events
            && stored <= self.quotas.stranger_bytes)
    }

    fn durable(
        &mut self,
        event: &Event,
        prev: EventHash,
        hash: EventHash,
        raw: &[u8],
    ) -> Result<Result<Taken, Refusal>, LogError> {
        let (conn, author, seq) = (self.conn, event.author, event.seq);
        let bytes = u64::try_from(raw.len()).unwrap_or(u64::MAX);
        let here = db::durable_at(conn, &author, seq)?;
        if here.iter().any(|row| row.hash == hash) {
            return Ok(Ok(Taken::Known));
        }
        let mut it = self.view.author(&author);
        if let Some(fork) = it.row.fork.filter(|_| !it.is_root) {
            let full = here.len() >= 2 && here.iter().all(|row| row.hash < hash);
            if seq > fork || (seq == fork && full) {
                return Ok(Err(Refusal::Fork { author }));
            }
        }
        // A second event at a place is proof, and proof always finds room: it is at most one
        // event, and ends the history; but for the root's, which go on.
        if (here.is_empty() || it.is_root)
            && (seq > self.quotas.events_per_author
                || it.row.bytes.saturating_add(bytes) > self.quotas.bytes_per_author
                || !self.has_room(&author, bytes)?)
        {
            return Ok(Err(Refusal::Quota { author }));
        }
        db::insert_durable(conn, event, hash, raw)?;
        self.view.clock = self.view.clock.max(event.lamport);
        it.row.events = it.row.events.saturating_add(1);
        it.row.bytes = it.row.bytes.saturating_add(bytes);

        // Does the history part here? At this place, or between it and a neighbour.
        let follows = |(prev, lamport): (EventHash, u64), before: (EventHash, u64)| {
            prev == before.0 && lamport > before.1
        };
        let mut parts_at = None;
        let before = db::durable_at(conn, &author, seq.saturating_sub(1))?;
        let mut before = before.iter().map(|row| (row.hash, row.lamport));
        if !here.is_empty() || before.any(|before| !follows((prev, event.lamport), before)) {
            parts_at = Some(seq);
        } else {
            for row in db::durable_at(conn, &author, seq.saturating_add(1))? {
                let after = db::event(conn, row.arrival)?;
                if let Lane::Durable { prev } = after.lane
                    && !follows((prev, after.lamport), (hash, event.lamport))
                {
                    parts_at = Some(seq.saturating_add(1));
                }
            }
        }
        if let Some(at) = parts_at
            && it.row.fork.is_none_or(|fork| at <= fork)
        {
            self.part(&author, &mut it, at)?;
        }
        if it.is_root && it.row.fork.is_some_and(|fork| seq >= fork) {
            it.fork = fork(conn, &author, &it)?;
            let counts = it.has(seq);
            self.save(&author, it)?;
            if counts {
                self.apply(event)?;
            }
            return Ok(Ok(Taken::New));
        }
        if parts_at == Some(seq) {
            self.save(&author, it)?;
            return Ok(Ok(Taken::New));
        }
        self.advance(&author, it, event, hash)?;
        Ok(Ok(Taken::New))
    }

    /// An author's history parts at `at`: keeps the proof, drops what lies beyond. Of the root's nothing
    /// is dropped, and all of it counts.
    fn part(&mut self, author: &NodeId, it: &mut Author, at: u64) -> Result<(), LogError> {
        let conn = self.conn;
        if !it.is_root {
            for row in db::durable_at(conn, author, at)?.iter().skip(2) {
                db::delete_durable(conn, row.arrival)?;
            }
            db::delete_after(conn, author, at)?;
            (it.row.events, it.row.bytes) = db::measure(conn, author)?;
        }
        it.row.fork = Some(at);
        if it.row.head >= at {
            it.row.head = at.saturating_sub(1);
            it.tip = db::durable_at(conn, author, it.row.head)?
                .first()
                .map(|row| (row.hash, row.lamport));
        }
        it.fork = fork(conn, author, it)?;
        self.durable_changed = true;
        match it.is_root || self.view.fold.had_effect(author, at) {
            true => self.view.fold_again(conn, Redo::All),
            false => Ok(()),
        }
    }

    /// Lengthens the chain by an event, and by those that waited for it.
    fn advance(
        &mut self,
        author: &NodeId,
        mut it: Author,
        event: &Event,
        hash: EventHash,
    ) -> Result<(), LogError> {
        if event.seq != it.row.head.saturating_add(1) {
            return self.save(author, it);
        }
        let mut fresh = vec![];
        it.row.head = event.seq;
        it.tip = Some((hash, event.lamport));
        loop {
            let next = it.row.head.saturating_add(1);
            if it.row.fork == Some(next) {
                break;
            }
            let rows = db::durable_at(self.conn, author, next)?;
            let Some(row) = rows.first() else { break };
            it.row.head = next;
            it.tip = Some((row.hash, row.lamport));
            fresh.push(row.arrival);
        }
        it.fork = fork(self.conn, author, &it)?;
        if it.is_root && it.fork.is_some() {
            // What lies beyond where it parts counts from now on.
            self.view.fold_again(self.conn, Redo::All)?;
        }
        self.save(author, it)?;
        self.apply(event)?;
        for arrival in fresh {
            let event = db::event(self.conn, arrival)?;
            self.apply(&event)?;
        }
        Ok(())
    }

    /// Applies an event that has just become part of its author's history.
    fn apply(&mut self, event: &Event) -> Result<(), LogError> {
        self.durable_changed = true;
        self.urgent |= self.view.apply(self.conn, event)?;
        Ok(())
    }

    fn ephemeral(
        &mut self,
        event: &Event,
        slot: &str,
        until_ms: u64,
        hash: EventHash,
        raw: &[u8],
    ) -> Result<Result<Taken, Refusal>, LogError> {
        let author = event.author;
        // It lives from now on, if its author's clock is ahead.
        let expires_ms = until_ms - event.time_ms.saturating_sub(self.now_ms).min(until_ms);
        let place = (author, slot.to_owned());
        let old = self.view.live.get(&place).map(|live| (live.seq, live.hash));
        if old == Some((event.seq, hash)) {
            return Ok(Ok(Taken::Known));
        }
        if expires_ms <= self.now_ms || old.is_some_and(|old| old > (event.seq, hash)) {
            return Ok(Err(Refusal::Stale));
        }
        if !self.view.is_within_pace(author, self.now_ms) {
            return Ok(Err(Refusal::Quota { author }));
        }
        if old.is_none() {
            let first = (author, String::new());
            let slots = self.view.live.range(first..);
            let slots = slots.take_while(|((a, _), _)| *a == author);
            let oldest = slots.clone().min_by_key(|(_, live)| (live.seq, live.hash));
            if slots.count() >= MAX_SLOTS
                && let Some(((_, slot), live)) = oldest
            {
                if (live.seq, live.hash) > (event.seq, hash) {
                    return Ok(Err(Refusal::Quota { author }));
                }
                let slot = slot.clone();
                db::delete_ephemeral(self.conn, &author, &slot)?;
                Arc::make_mut(&mut self.view.live).remove(&(author, slot));
            }
            if !self.has_room(&author, 0)? {
                return Ok(Err(Refusal::Quota { author }));
            }
        }
        // What was replaced is remembered for as long as somebody else may still offer it.
        let keep = match old {
            Some(_) => db::ephemeral(self.conn, &author, slot)?.map_or(0, |row| row.keep_ms),
            None => 0,
        };
        let row = EphemeralRow {
            author,
            slot: slot.to_owned(),
            seq: event.seq,
            hash,
            expires_ms,
            keep_ms: until_ms.max(keep),
            raw: raw.to_vec(),
        };
        db::set_ephemeral(self.conn, &row)?;
        let mut it = self.view.author(&author);
        if event.seq > it.row.ephemeral {
            it.row.ephemeral = event.seq;
            self.save(&author, it)?;
        }
        let live = live_of(&row, event.body.clone());
        Arc::make_mut(&mut self.view.live).insert(place, live);
        Ok(Ok(Taken::New))
    }
}
