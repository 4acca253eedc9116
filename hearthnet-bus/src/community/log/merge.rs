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
//! - **Holes.** An event whose predecessor is missing is kept, and has no effect until the
//!   hole is filled; nor has a fork beyond one.
//! - **Ephemeral lane.** Of one author and slot the event with the greatest (number, hash); of
//!   one author the [`MAX_SLOTS`] slots with the greatest. Both are maxima, so order does not
//!   matter.
//! - **Quotas** cut an author's history at a number that does not depend on the order. Only
//!   the room for strangers does: what does not fit is offered again by the next peer.
//! - **The moment.** An event of a chain takes effect when its Lamport time has come by this
//!   machine's clock. Before that it is kept and passed on, and nothing that is written here
//!   sorts after it: so nobody's leap makes others' events leap.
//! - **Rework.** What sorts before events that were applied is folded again from a snapshot on. That
//!   has a budget of its own; beyond it the state waits for a while, with what sorts last in it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearthnet_transport::{Time, TokenBucket};
use rusqlite::Connection;

use super::body::{Body, Level};
use super::community::{Community, Entry, Fork, Live};
use super::db::{self, AuthorRow, EphemeralRow};
use super::error::{LogError, Refusal};
use super::event::{Event, EventHash, Lane, Position};
use super::fold::{Applied, Fold};
use super::heads::MAX_SLOTS;
use crate::{CommunityId, NodeId};

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

/// How many snapshots are kept: at 512 events apart and thinning out with age, these reach
/// back through the longest log that the quotas allow.
const SNAPSHOTS: usize = 16;
/// Events between two snapshots: folding them takes some ten milliseconds.
const SNAPSHOT_EVERY: u64 = 512;

/// Events that are folded again per second, over time, because others came late: at 6 us each
/// some 5% of a core.
const REWORK_PER_SECOND: u64 = 8_000;
/// And at once: half a second of a core, more than a partition that heals costs.
const REWORK: u64 = 100_000;

/// Ephemeral events of one author that are taken per second, over time, and at once. A node with all
/// its [`MAX_SLOTS`] slots in use says 2 a second.
const SAID_PER_SECOND: u64 = 4;
const SAID: u64 = 4 * MAX_SLOTS as u64;
/// Authors whose pace is remembered: more than a community has, and strangers.
const MAX_PACES: usize = 8192;

/// 2025-01-01: before that nothing was written, whatever the clock of a machine that has just been
/// switched on says; and numbers that count events are below it by far.
const BEGINNING_MS: u64 = 1_735_689_600_000;

/// What is in memory of an author.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Author {
    pub(super) row: AuthorRow,
    /// The last durable event of the chain.
    pub(super) tip: Option<(EventHash, u64)>,
    pub(super) fork: Option<Fork>,
}

/// What is in memory of the log. Everything but budgets follows from the file and the time.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) community: CommunityId,
    /// No durable event has a greater Lamport time.
    pub(super) clock: u64,
    /// Up to this Lamport time events take effect: the latest moment that was here.
    pub(super) line: u64,
    /// How far back the fold has yet to go.
    redo: Redo,
    rework: TokenBucket,
    /// How many events were folded again since the log was opened.
    pub(super) reworked: u64,
    paces: BTreeMap<NodeId, TokenBucket>,
    pub(super) changes: u64,
    pub(super) authors: BTreeMap<NodeId, Author>,
    pub(super) fold: Fold,
    pub(super) durable: Arc<super::community::Durable>,
    twins: Arc<BTreeSet<NodeId>>,
    pub(super) live: Arc<BTreeMap<(NodeId, String), Live>>,
}

impl View {
    /// Reads the file, at the time `now_ms`.
    pub(super) fn load(conn: &Connection, now_ms: u64) -> Result<Self, LogError> {
        let (community, clock, changes) = db::head(conn)?;
        let mut view = Self {
            community,
            clock,
            changes,
            line: now_ms.max(BEGINNING_MS),
            redo: Redo::No,
            rework: TokenBucket::with_burst(REWORK_PER_SECOND, REWORK, Time::ZERO),
            reworked: 0,
            paces: BTreeMap::new(),
            authors: BTreeMap::new(),
            fold: Fold::new(community),
            durable: Arc::default(),
            twins: Arc::default(),
            live: Arc::default(),
        };
        for (author, row) in db::authors(conn)? {
            let mut it = Author {
                row,
                ..Author::default()
            };
            if row.head > 0 {
                let tip = db::durable_at(conn, &author, row.head)?;
                let tip = tip
                    .first()
                    .ok_or_else(|| LogError::corrupt("an author's last event is missing"))?;
                it.tip = Some((tip.hash, tip.lamport));
            }
            it.fork = fork(conn, &author, &row)?;
            view.authors.insert(author, it);
        }
        let mut live = BTreeMap::new();
        db::ephemerals(conn, |row| {
            let event = Event::decode_stored(&row.raw)
                .map_err(|_| LogError::corrupt("a stored event cannot be read"))?;
            live.insert((row.author, row.slot.clone()), live_of(&row, event.body));
            Ok(())
        })?;
        view.live = Arc::new(live);
        // One that was made by a clock that ran ahead may hold more.
        let end = Position {
            lamport: view.line.saturating_add(1),
            author: NodeId::from_checked([0; 32]),
            seq: 0,
        };
        view.go_back(conn, end)?;
        if !view.catch_up(conn)? {
            view.fold_all(conn)?;
        }
        view.publish();
        Ok(view)
    }

    /// Reads the file again: another handle has written it, or a transaction failed.
    pub(super) fn reload(&mut self, conn: &Connection, now_ms: u64) -> Result<(), LogError> {
        let fresh = Self::load(conn, now_ms.max(self.line))?;
        let old = std::mem::replace(self, fresh);
        (self.rework, self.reworked, self.paces) = (old.rework, old.reworked, old.paces);
        Ok(())
    }

    /// What a node may do; `None` for strangers, and for frozen ones.
    pub(super) fn level(&self, node: &NodeId) -> Option<Level> {
        let state = &self.fold.state;
        let member = state.members.get(node)?;
        (!state.frozen.contains_key(node)).then_some(member.level)
    }

    /// Whether there is something for [`View::advance`] to do.
    pub(super) fn is_waiting(&self) -> bool {
        self.redo != Redo::No || self.clock > self.line
    }

    /// Time passes: events whose moment has come take effect, and what is to be folded again is,
    /// within its budget. Whether that changed anything.
    pub(super) fn advance(&mut self, conn: &Connection, now_ms: u64) -> Result<bool, LogError> {
        let before = self.line;
        self.line = before.max(now_ms);
        let mut changed = self.clock > before && db::has_between(conn, before, self.line)?;
        if changed && !self.catch_up(conn)? {
            self.fold_again(conn, Redo::All)?;
        }
        changed |= self.settle(conn, now_ms, false)?;
        if changed {
            self.publish();
            self.changes = self.changes.saturating_add(1);
            db::set_head(conn, self.clock, self.changes)?;
        }
        Ok(changed)
    }

    /// Notes that the fold has to go back. From here on no snapshot holds what would change.
    fn fold_again(&mut self, conn: &Connection, from: Redo) -> Result<(), LogError> {
        if from > self.redo {
            db::drop_snapshots(conn, from.place())?;
            self.redo = from;
        }
        Ok(())
    }

    /// Goes back as far as needed, and folds again from there: now, if it `must` be, else when the
    /// budget allows. Whether it did.
    pub(super) fn settle(
        &mut self,
        conn: &Connection,
        now_ms: u64,
        must: bool,
    ) -> Result<bool, LogError> {
        self.rework.refill(Time(now_ms.saturating_mul(1000)));
        if self.redo == Redo::No || !(must || self.rework.has(0)) {
            return Ok(false);
        }
        let mut cost = 0;
        let from = match std::mem::replace(&mut self.redo, Redo::No).place() {
            Some(at) if self.fold.is_plain() => {
                self.go_back(conn, at)?;
                let kept = self.fold.count;
                let plain = self.catch_up(conn)?;
                cost = self.fold.count - kept;
                // So that the next event from the past does not begin as far back.
                if plain && self.fold.count >= db::last_snapshot(conn)? + SNAPSHOT_EVERY {
                    db::add_snapshot(conn, &self.fold, SNAPSHOTS)?;
                }
                plain.then_some(at)
            }
            _ => None,
        };
        if from.is_none() {
            db::drop_snapshots(conn, None)?;
            self.fold_all(conn)?;
            // Three passes, at the most.
            cost += 3 * self.fold.count;
        }
        self.rework.spend(cost);
        self.reworked = self.reworked.saturating_add(cost);
        Ok(true)
    }

    /// Takes the newest snapshot before a place.
    fn go_back(&mut self, conn: &Connection, at: Position) -> Result<(), LogError> {
        self.fold = match db::snapshot(conn, at)? {
            Some(fold) if fold.is_of(self.community) => fold,
            _ => Fold::new(self.community),
        };
        Ok(())
    }

    /// The unchanging picture for readers.
    pub(super) fn community(&self) -> Community {
        Community::new(
            self.community,
            Arc::clone(&self.durable),
            Arc::clone(&self.twins),
            Arc::clone(&self.live),
        )
    }

    /// Whether one more ephemeral event of an author is taken now.
    fn is_within_pace(&mut self, author: NodeId, now_ms: u64) -> bool {
        if self.paces.len() >= MAX_PACES {
            self.paces.retain(|_, pace| !pace.is_full());
        }
        let full = || TokenBucket::with_burst(SAID_PER_SECOND, SAID, Time::ZERO);
        let pace = self.paces.entry(author).or_insert_with(full);
        pace.take(Time(now_ms.saturating_mul(1000)))
    }

    /// Notes that the durable state changed.
    fn publish(&mut self) {
        let frozen = self
            .authors
            .iter()
            .filter(|(author, _)| self.fold.knows(author))
            .filter_map(|(author, it)| Some((*author, it.fork.clone()?)))
            .collect();
        self.fold.set_frozen(frozen);
        if *self.durable != self.fold.state {
            self.durable = Arc::new(self.fold.state.clone());
            self.twins = Arc::new(self.durable.twins());
        }
    }

    /// Applies what the file has after the fold's last event. `false`: it cannot be done
    /// without going back.
    fn catch_up(&mut self, conn: &Connection) -> Result<bool, LogError> {
        let Self {
            authors,
            fold,
            line,
            ..
        } = self;
        let mut plain = true;
        db::scan(
            conn,
            fold.at(),
            |at| counts(authors, *line, at),
            |event| {
                plain &= fold.apply(event) != Applied::Reaches;
                Ok(())
            },
        )?;
        Ok(plain)
    }

    /// Makes the state from all events.
    fn fold_all(&mut self, conn: &Connection) -> Result<(), LogError> {
        let (authors, line) = (&self.authors, self.line);
        self.fold = Fold::of_all(self.community, |visit| {
            db::scan(
                conn,
                None,
                |at| counts(authors, line, at),
                |event| {
                    visit(event);
                    Ok(())
                },
            )
        })?;
        Ok(())
    }

    /// The whole fold from the first event on, to compare with.
    pub(super) fn fold_anew(&self, conn: &Connection) -> Result<Fold, LogError> {
        let mut anew = self.clone();
        anew.fold_all(conn)?;
        anew.publish();
        Ok(anew.fold)
    }
}

/// Whether an event is part of its author's chain, and its moment has come.
fn counts(authors: &BTreeMap<NodeId, Author>, line: u64, at: &Position) -> bool {
    let author = authors.get(&at.author);
    at.lamport <= line && author.is_some_and(|author| at.seq <= author.row.head)
}

fn live_of(row: &EphemeralRow, body: Body) -> Live {
    Live {
        seq: row.seq,
        hash: row.hash,
        expires_ms: row.expires_ms,
        entry: Entry::of(row.author, row.expires_ms, body),
    }
}

/// The proof of a fork, from what is stored. A fork beyond a hole is not known to be one that
/// others see as well, so it has no effect before the hole is filled.
fn fork(conn: &Connection, author: &NodeId, row: &AuthorRow) -> Result<Option<Fork>, LogError> {
    let seq = row.head.saturating_add(1);
    if row.fork != Some(seq) {
        return Ok(None);
    }
    Ok(Some(Fork {
        seq,
        proof: proof(conn, author, seq)?
            .iter()
            .map(|row| row.hash)
            .collect(),
    }))
}

/// The events that prove a fork at `seq`, the one before it first if it is needed.
pub(super) fn proof(
    conn: &Connection,
    author: &NodeId,
    seq: u64,
) -> Result<Vec<db::DurableRow>, LogError> {
    let mut rows = db::durable_at(conn, author, seq)?;
    if rows.len() < 2 {
        let mut before = db::durable_at(conn, author, seq.saturating_sub(1))?;
        before.append(&mut rows);
        rows = before;
    }
    Ok(rows)
}

/// How far back the fold has to go: the further, the greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Redo {
    No,
    From(Reverse<Position>),
    All,
}

impl Redo {
    /// From where on; `None`: from the beginning.
    fn place(self) -> Option<Position> {
        match self {
            Self::From(Reverse(at)) => Some(at),
            _ => None,
        }
    }
}

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
        let taken = match &event.lane {
            Lane::Durable { prev } => self.durable(event, *prev, hash, raw)?,
            Lane::Ephemeral { slot, expires_ms } => {
                self.ephemeral(event, slot, *expires_ms, hash, raw)?
            }
        };
        Ok(taken)
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
        let strangers = || {
            let known = &self.view;
            known
                .authors
                .iter()
                .filter(|(author, _)| !known.fold.knows(author))
        };
        let live = self.view.live.keys();
        let live = live
            .filter(|(author, _)| !self.view.fold.knows(author))
            .count();
        let events: u64 = strangers().map(|(_, it)| it.row.events).sum();
        let stored: u64 = strangers().map(|(_, it)| it.row.bytes).sum();
        let authors = u64::try_from(strangers().count()).unwrap_or(u64::MAX);
        let live = u64::try_from(live).unwrap_or(u64::MAX);
        Ok(
            events.saturating_add(live).max(authors) < self.quotas.stranger_events
                && stored.saturating_add(bytes) <= self.quotas.stranger_bytes,
        )
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
        let mut it = self.view.authors.get(&author).cloned().unwrap_or_default();
        if let Some(fork) = it.row.fork {
            let full = here.len() >= 2 && here.iter().all(|row| row.hash < hash);
            if seq > fork || (seq == fork && full) {
                return Ok(Err(Refusal::Fork { author }));
            }
        }
        // A second event at a place is proof, and proof always finds room: it is at most one
        // event, and ends the history.
        if here.is_empty()
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
        let follows = |prev: EventHash, lamport: u64, before: &db::DurableRow| {
            prev == before.hash && lamport > before.lamport
        };
        let mut parts_at = None;
        if !here.is_empty() {
            parts_at = Some(seq);
        } else {
            let before = db::durable_at(conn, &author, seq.saturating_sub(1))?;
            if before.iter().any(|row| !follows(prev, event.lamport, row)) {
                parts_at = Some(seq);
            } else {
                let this = db::DurableRow {
                    arrival: 0,
                    hash,
                    lamport: event.lamport,
                    bytes,
                };
                for row in db::durable_at(conn, &author, seq.saturating_add(1))? {
                    let after = db::event(conn, row.arrival)?;
                    if let Lane::Durable { prev } = after.lane
                        && !follows(prev, after.lamport, &this)
                    {
                        parts_at = Some(seq.saturating_add(1));
                    }
                }
            }
        }
        if let Some(at) = parts_at
            && it.row.fork.is_none_or(|fork| at <= fork)
        {
            self.part(&author, &mut it, at)?;
        }
        if parts_at == Some(seq) {
            self.save(&author, it)?;
            return Ok(Ok(Taken::New));
        }
        self.advance(&author, it, event, hash)?;
        Ok(Ok(Taken::New))
    }

    /// An author's history parts at `at`: keeps the proof, drops what lies beyond.
    fn part(&mut self, author: &NodeId, it: &mut Author, at: u64) -> Result<(), LogError> {
        let conn = self.conn;
        for row in db::durable_at(conn, author, at)?.iter().skip(2) {
            db::delete_durable(conn, row.arrival)?;
        }
        db::delete_after(conn, author, at)?;
        let (events, bytes) = db::measure(conn, author)?;
        it.row.events = events;
        it.row.bytes = bytes;
        it.row.fork = Some(at);
        if it.row.head >= at {
            it.row.head = at.saturating_sub(1);
            it.tip = db::durable_at(conn, author, it.row.head)?
                .first()
                .map(|row| (row.hash, row.lamport));
        }
        it.fork = fork(conn, author, &it.row)?;
        self.durable_changed = true;
        match self.view.fold.had_effect(author, at) {
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
        it.fork = fork(self.conn, author, &it.row)?;
        self.save(author, it)?;
        self.apply(event)?;
        for arrival in fresh {
            let event = db::event(self.conn, arrival)?;
            self.apply(&event)?;
        }
        Ok(())
    }

    /// Applies an event that has just become part of its author's chain.
    fn apply(&mut self, event: &Event) -> Result<(), LogError> {
        self.durable_changed = true;
        let (conn, view, at) = (self.conn, &mut *self.view, event.position());
        if at.lamport > view.line {
            return Ok(());
        }
        // What sorts last takes effect at once, also while something before it has to wait.
        let plain = view.fold.is_plain();
        let redo = match view.fold.is_before(at) {
            true if view.fold.apply(event) == Applied::Reaches => Redo::All,
            true => Redo::No,
            false => Redo::From(Reverse(at)),
        };
        self.urgent |= plain && redo == Redo::All;
        view.fold_again(conn, redo)?;
        let fold = &view.fold;
        if view.redo == Redo::No && fold.count.is_multiple_of(SNAPSHOT_EVERY) && fold.is_plain() {
            db::add_snapshot(conn, fold, SNAPSHOTS)?;
        }
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
        let mut it = self.view.authors.get(&author).cloned().unwrap_or_default();
        if event.seq > it.row.ephemeral {
            it.row.ephemeral = event.seq;
            self.save(&author, it)?;
        }
        let live = live_of(&row, event.body.clone());
        Arc::make_mut(&mut self.view.live).insert(place, live);
        Ok(Ok(Taken::New))
    }
}
