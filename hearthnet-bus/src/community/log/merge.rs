//! Accepts events into the log: chains, forks, slots, quotas, and the fold that follows. One
//! module, because the order of these steps within a transaction is essential.
//!
//! All of this happens in one write transaction, over events whose form and signature were checked
//! before it began. The stored set is a function of the set of events that were offered, whatever
//! their order, batches and repetitions:
//!
//! - **Durable lane.** An author's history forks at the lowest number where it signed two events,
//!   or one that does not follow the event before it (another predecessor, or a Lamport time that
//!   does not grow). All events before the fork are kept, the two with the lowest hashes at it, and
//!   none after it. Merging the kept sets of two nodes gives the set of a node with all events: the
//!   lowest fork of the union is the lower of the two, or lies between events that both kept.
//! - **The root's** history may fork without penalty, because its key may be used in two places
//!   that do not hear of each other, and its events must hold. From the lowest fork on, all of its
//!   events are kept and count, whatever they follow.
//! - **Holes.** An event whose predecessor is missing is kept, but has no effect until the hole is
//!   filled. The same holds for a fork beyond a hole.
//! - **Ephemeral lane.** Of each author and slot, the event with the greatest (number, hash) is
//!   kept; of each author, the [`MAX_SLOTS`] slots with the greatest. Both are maxima, so the order
//!   does not matter.
//! - **Quotas** cut an author's history at a number that does not depend on the order. Only the
//!   room for strangers does: the next peer offers refused events again.

use std::sync::Arc;

use hearthnet_transport::{Time, give_way};
use rusqlite::Connection;

use super::db::{self, EphemeralRow};
use super::error::{LogError, Refusal};
use super::event::{Event, EventHash, Lane};
use super::heads::MAX_SLOTS;
use super::view::{Author, Redo, View, fork, live_of};
use crate::NodeId;

/// Storage quotas of one author, and of all strangers together.
///
/// All nodes of a community should use the same values. Otherwise they offer each other events that
/// are always refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Durable events of one author. A node writes one for each person that it admits, invites,
    /// promotes or revokes, and by merely running at most one a day (`node.gave`).
    pub events_per_author: u64,
    pub bytes_per_author: u64,
    /// Durable and ephemeral events of all authors together that the log does not know as members.
    /// An admission may still arrive.
    pub stranger_events: u64,
    /// Bytes of the durable events among them.
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

/// Numbers of events that [`crate::community::log::EventLog::compact`] dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Expired ephemeral events.
    pub ephemeral: u64,
    /// Durable events of strangers that were not admitted within a day.
    pub strangers: u64,
}

/// Time in ms for which strangers' events are kept until an admission arrives.
const STRANGER_MS: u64 = 24 * 3600 * 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    New,
    Known,
}

/// Work of one write transaction.
pub(super) struct Merge<'a> {
    conn: &'a Connection,
    view: &'a mut View,
    quotas: &'a Quotas,
    now_ms: u64,
    durable_changed: bool,
    /// A demotion or revocation voids earlier events: do the rework in [`Merge::finish`] regardless
    /// of its budget.
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

    /// Sets the arrival time of the following events.
    pub(super) fn at(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// Stores one event, or returns the reason why it is refused.
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

    /// Drops events that are no longer needed. Returns their numbers.
    pub(super) fn compact(&mut self) -> Result<Compacted, LogError> {
        let (conn, now_ms) = (self.conn, self.now_ms);
        let mut done = Compacted::default();
        for place in db::expired(conn, now_ms)? {
            db::delete_ephemeral(conn, &place.0, &place.1)?;
            Arc::make_mut(&mut self.view.shown.live).remove(&place);
            done.ephemeral = done.ephemeral.saturating_add(1);
        }
        // Strangers that were not admitted within a day. If the admission arrives later, other
        // nodes still have their events.
        let mut strangers = Vec::new();
        for (author, it) in &self.view.authors {
            let live = self.view.shown.live.keys().any(|(a, _)| a == author);
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

    /// Updates the state and the counters. Must be called last.
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

    /// Returns whether there is room for an event, which for known authors is always the case.
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
        let live = self.view.shown.live.keys();
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
        // A second event with a number is proof of a fork, and proof always finds room: it is at
        // most one event and ends the history. The root's history goes on, so the quota applies to
        // it.
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

        // Check for a fork at this number, or between it and a neighbour.
        let follows = |(prev, lamport): (EventHash, u64), before: (EventHash, u64)| {
            prev == before.0 && lamport > before.1
        };
        let mut fork_at = None;
        let before = db::durable_at(conn, &author, seq.saturating_sub(1))?;
        let mut before = before.iter().map(|row| (row.hash, row.lamport));
        if !here.is_empty() || before.any(|before| !follows((prev, event.lamport), before)) {
            fork_at = Some(seq);
        } else {
            for row in db::durable_at(conn, &author, seq.saturating_add(1))? {
                let after = db::event(conn, row.arrival)?;
                if let Lane::Durable { prev } = after.lane
                    && !follows((prev, after.lamport), (hash, event.lamport))
                {
                    fork_at = Some(seq.saturating_add(1));
                }
            }
        }
        if let Some(at) = fork_at
            && it.row.fork.is_none_or(|fork| at <= fork)
        {
            self.record_fork(&author, &mut it, at)?;
        }
        if it.is_root && it.row.fork.is_some_and(|fork| seq >= fork) {
            it.fork = fork(conn, &author, &it)?;
            let counts = it.has(seq);
            self.save(&author, it)?;
            if counts {
                self.apply(event)?;
            }
        } else if fork_at == Some(seq) {
            self.save(&author, it)?;
        } else {
            self.advance(&author, it, event, hash)?;
        }
        Ok(Ok(Taken::New))
    }

    /// Records a fork at `at`: keeps the proof and drops later events. Of the root's events, none
    /// is dropped, and all count.
    fn record_fork(&mut self, author: &NodeId, it: &mut Author, at: u64) -> Result<(), LogError> {
        let conn = self.conn;
        if !it.is_root {
            for row in db::durable_at(conn, author, at)?.iter().skip(2) {
                db::delete_durable(conn, row.arrival)?;
            }
            db::delete_after(conn, author, at)?;
            (it.row.events, it.row.bytes) = db::measure(conn, author)?;
        }
        it.row.fork = Some(at);
        let lost = it.row.head >= at;
        if lost {
            it.row.head = at.saturating_sub(1);
            it.tip = db::durable_at(conn, author, it.row.head)?
                .first()
                .map(|row| (row.hash, row.lamport));
        }
        it.fork = fork(conn, author, it)?;
        self.durable_changed = true;
        // A fold that is not plain also depends on events that have no effect in its last pass. A
        // fork beyond the head takes no event from it.
        let fold = &self.view.fold;
        match it.is_root || fold.had_effect(author, at) || (lost && !fold.is_plain()) {
            true => self.view.fold_again(conn, Redo::All),
            false => Ok(()),
        }
    }

    /// Extends the chain by an event and by stored events that follow it.
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
            // The root's events beyond the fork count from now on.
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
        // If the author's clock is ahead, the life of the event starts at its arrival.
        let expires_ms = until_ms - event.time_ms.saturating_sub(self.now_ms).min(until_ms);
        let place = (author, slot.to_owned());
        let old = self.view.shown.live.get(&place);
        let old = old.map(|live| (live.seq, live.hash));
        if old == Some((event.seq, hash)) {
            return Ok(Ok(Taken::Known));
        }
        if expires_ms <= self.now_ms || old.is_some_and(|old| old > (event.seq, hash)) {
            return Ok(Err(Refusal::Stale));
        }
        let now = Time::from_millis(self.now_ms);
        if !self.view.ephemeral_buckets.take(&author, now) {
            return Ok(Err(Refusal::Quota { author }));
        }
        if old.is_none() {
            let first = (author, String::new());
            let slots = self.view.shown.live.range(first..);
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
                Arc::make_mut(&mut self.view.shown.live).remove(&(author, slot));
            }
            if !self.has_room(&author, 0)? {
                return Ok(Err(Refusal::Quota { author }));
            }
        }
        // The slot is remembered for as long as other nodes may offer an event that was replaced.
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
        Arc::make_mut(&mut self.view.shown.live).insert(place, live);
        Ok(Ok(Taken::New))
    }
}
