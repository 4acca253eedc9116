//! In-memory view of the log, with the fold that follows it.
//!
//! All state except the budgets follows from the file and the time:
//!
//! - **Activation.** An event of a chain takes effect when this machine's clock reaches its Lamport
//!   time. Until then it is stored and passed on, and events written here do not sort after it. So
//!   a post-dated event does not force later dates on others.
//! - **Rework.** An event that sorts before applied ones makes the fold start again from a
//!   snapshot. A budget limits that. Beyond it, the state lags for a while, except for events that
//!   sort last.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use hearthnet_transport::{KeyedBuckets, Time, TokenBucket};
use rusqlite::Connection;

use super::body::Body;
use super::community::{Community, Entry, Fork, Live};
use super::db::{self, AuthorRow, EphemeralRow};
use super::error::LogError;
use super::event::{Event, EventHash, Position};
use super::fold::{Effect, Fold};
use super::heads::MAX_SLOTS;
use crate::{CommunityId, NodeId};

/// Number of stored snapshots. At 512 events apart, thinning out with age, they reach back through
/// the longest log that the quotas allow.
const SNAPSHOTS: usize = 16;
/// Events between two snapshots. Folding them takes some ten milliseconds.
const SNAPSHOT_EVERY: u64 = 512;

/// Long-term rate of events that are folded again because others arrived late. At 6 us each, this
/// is some 5% of a core. A large event counts once per KiB ([`db::scan`]): its hashes take longest.
const REWORK_PER_SECOND: u64 = 8_000;
/// Burst of the same: half a second of a core, more than the healing of a partition costs.
const REWORK_BURST: u64 = 100_000;

/// Rate (per second) and burst of ephemeral events accepted per author. A node with all its
/// [`MAX_SLOTS`] slots in use sends 2 a second.
const EPHEMERAL_PER_SECOND: u64 = 4;
const EPHEMERAL_BURST: u64 = 4 * MAX_SLOTS as u64;
/// Maximum number of authors with a rate: more than a community's members and strangers.
const MAX_BUCKETS: usize = 8192;

/// 2025-01-01. No event was written before it, so an activation time never lies before it, even if
/// the clock of a machine was reset. Lamport times that count events are far below it.
const BEGINNING_MS: u64 = 1_735_689_600_000;

/// In-memory state of an author.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Author {
    pub(super) row: AuthorRow,
    /// Hash and Lamport time of the last durable event of the chain.
    pub(super) tip: Option<(EventHash, u64)>,
    /// Fork of the history, if no event before it is missing.
    pub(super) fork: Option<Fork>,
    /// True for the community's root, all of whose branches count.
    pub(super) is_root: bool,
}

impl Author {
    /// Returns whether the stored event with this number is part of the author's history.
    pub(super) fn has(&self, seq: u64) -> bool {
        seq <= self.row.head || (self.is_root && self.fork.is_some())
    }
}

#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) community: CommunityId,
    /// Maximum Lamport time of all durable events.
    pub(super) clock: u64,
    /// Events up to this Lamport time take effect: the latest time of this machine's clock.
    pub(super) activation_ms: u64,
    /// Pending rework of the fold.
    redo: Redo,
    rework: TokenBucket,
    /// Number of events folded again since the log was opened.
    pub(super) reworked: u64,
    /// Rates of ephemeral events by author.
    pub(super) ephemeral_buckets: KeyedBuckets<NodeId>,
    pub(super) changes: u64,
    pub(super) authors: BTreeMap<NodeId, Author>,
    pub(super) fold: Fold,
    /// State for readers. [`View::publish`] brings its durable part up to date.
    pub(super) shown: Community,
}

impl View {
    /// Reads the file as of `now_ms`.
    pub(super) fn load(conn: &Connection, now_ms: u64) -> Result<Self, LogError> {
        let (community, clock, changes) = db::head(conn)?;
        let mut view = Self {
            community,
            clock,
            changes,
            activation_ms: now_ms.max(BEGINNING_MS),
            redo: Redo::No,
            rework: TokenBucket::with_burst(REWORK_PER_SECOND, REWORK_BURST, Time::ZERO),
            reworked: 0,
            ephemeral_buckets: KeyedBuckets::new(
                EPHEMERAL_PER_SECOND,
                EPHEMERAL_BURST,
                MAX_BUCKETS,
            ),
            authors: BTreeMap::new(),
            fold: Fold::new(community),
            shown: Community::empty(community),
        };
        for (author, row) in db::authors(conn)? {
            let mut it = Author {
                row,
                ..view.author(&author)
            };
            if row.head > 0 {
                let tip = db::durable_at(conn, &author, row.head)?;
                let tip = tip
                    .first()
                    .ok_or_else(|| LogError::corrupt("an author's last event is missing"))?;
                it.tip = Some((tip.hash, tip.lamport));
            }
            it.fork = fork(conn, &author, &it)?;
            view.authors.insert(author, it);
        }
        let mut live = BTreeMap::new();
        db::ephemerals(conn, |row| {
            let body = db::stored_event(&row.raw)?.body;
            live.insert((row.author, row.slot.clone()), live_of(&row, body));
            Ok(true)
        })?;
        view.shown.live = Arc::new(live);
        // A snapshot made while the clock ran ahead may include later events.
        let end = Position {
            lamport: view.activation_ms.saturating_add(1),
            author: NodeId::from_checked([0; 32]),
            seq: 0,
        };
        view.go_back(conn, end)?;
        let (plain, _) = view.catch_up(conn)?;
        if !plain {
            view.fold_all(conn)?;
        }
        view.publish();
        Ok(view)
    }

    /// Reads the file again, after another handle wrote it or a transaction failed.
    pub(super) fn reload(&mut self, conn: &Connection, now_ms: u64) -> Result<(), LogError> {
        let fresh = Self::load(conn, now_ms.max(self.activation_ms))?;
        let old = std::mem::replace(self, fresh);
        (self.rework, self.reworked, self.ephemeral_buckets) =
            (old.rework, old.reworked, old.ephemeral_buckets);
        Ok(())
    }

    /// State of an author; the default for an unknown one.
    pub(super) fn author(&self, author: &NodeId) -> Author {
        let new = || Author {
            is_root: *author == self.community.root(),
            ..Author::default()
        };
        self.authors.get(author).cloned().unwrap_or_else(new)
    }

    /// `time` of the last event of an author's chain; 0 if there is none.
    pub(super) fn last_time(&self, conn: &Connection, author: &NodeId) -> Result<u64, LogError> {
        let seq = self.authors.get(author).map_or(0, |it| it.row.head);
        match db::durable_at(conn, author, seq)?.first() {
            Some(last) => Ok(db::event(conn, last.arrival)?.time_ms),
            None => Ok(0),
        }
    }

    /// Returns whether [`View::advance`] has work to do.
    pub(super) fn is_waiting(&self) -> bool {
        self.redo != Redo::No || self.clock > self.activation_ms
    }

    /// Applies events whose activation time has come, and pending rework within its budget. Returns
    /// whether the state changed.
    pub(super) fn advance(&mut self, conn: &Connection, now_ms: u64) -> Result<bool, LogError> {
        let before = self.activation_ms;
        self.activation_ms = before.max(now_ms);
        let mut changed = self.clock > before && db::has_between(conn, before, self.activation_ms)?;
        if changed && !self.catch_up(conn)?.0 {
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

    /// Applies an event that has just become part of its author's history. Returns true if it takes
    /// a level, and voids events that had an effect: such rework is done regardless of its budget.
    pub(super) fn apply(&mut self, conn: &Connection, event: &Event) -> Result<bool, LogError> {
        let at = event.position();
        if at.lamport > self.activation_ms {
            return Ok(false);
        }
        // An event that sorts last takes effect at once, even while rework is pending.
        let plain = self.fold.is_plain();
        let redo = match self.fold.is_before(at) {
            true if self.fold.apply(event) == Ok(Effect::Retroactive) => Redo::All,
            true => Redo::No,
            false => Redo::From(Reverse(at)),
        };
        self.fold_again(conn, redo)?;
        let (fold, settled) = (&self.fold, self.redo == Redo::No);
        if settled && fold.count.is_multiple_of(SNAPSHOT_EVERY) && fold.is_plain() {
            db::add_snapshot(conn, fold, SNAPSHOTS)?;
        }
        Ok(plain && redo == Redo::All)
    }

    /// Marks the fold for rework from a position, and drops the snapshots after it.
    pub(super) fn fold_again(&mut self, conn: &Connection, from: Redo) -> Result<(), LogError> {
        if from > self.redo {
            db::drop_snapshots(conn, from.place())?;
            self.redo = from;
        }
        Ok(())
    }

    /// Does pending rework: always if `must`, otherwise if the budget allows it. Returns whether it
    /// did.
    pub(super) fn settle(
        &mut self,
        conn: &Connection,
        now_ms: u64,
        must: bool,
    ) -> Result<bool, LogError> {
        self.rework.refill(Time::from_millis(now_ms));
        if self.redo == Redo::No || !(must || self.rework.has(0)) {
            return Ok(false);
        }
        let mut cost = 0;
        let from = match std::mem::replace(&mut self.redo, Redo::No).place() {
            Some(at) if self.fold.is_plain() => {
                self.go_back(conn, at)?;
                if self.fold.at.is_none() {
                    // The snapshots are not usable.
                    db::drop_snapshots(conn, None)?;
                }
                let plain;
                (plain, cost) = self.catch_up(conn)?;
                // Then the next late event does not have to start as far back.
                if plain && self.fold.count >= db::last_snapshot(conn)? + SNAPSHOT_EVERY {
                    db::add_snapshot(conn, &self.fold, SNAPSHOTS)?;
                }
                plain.then_some(at)
            }
            _ => None,
        };
        if from.is_none() {
            db::drop_snapshots(conn, None)?;
            cost = cost.saturating_add(self.fold_all(conn)?);
        }
        self.rework.spend(cost);
        self.reworked = self.reworked.saturating_add(cost);
        Ok(true)
    }

    /// Loads the newest snapshot before a position.
    fn go_back(&mut self, conn: &Connection, at: Position) -> Result<(), LogError> {
        self.fold = match db::snapshot(conn, at)? {
            Some(fold) if fold.is_usable(self.community) => fold,
            _ => Fold::new(self.community),
        };
        Ok(())
    }

    /// Makes the current state of the fold visible to readers.
    pub(super) fn publish(&mut self) {
        let frozen = self
            .authors
            .iter()
            .filter(|(author, it)| !it.is_root && self.fold.knows(author))
            .filter_map(|(author, it)| Some((*author, it.fork.clone()?)))
            .collect();
        // The frozen authors do not follow from the order of events.
        self.fold.state.frozen = frozen;
        self.shown.update(&self.fold.state);
    }

    /// Applies the stored events after the fold's last event. Returns whether that is possible
    /// without rework, and its cost.
    fn catch_up(&mut self, conn: &Connection) -> Result<(bool, u64), LogError> {
        let Self {
            authors,
            fold,
            activation_ms,
            ..
        } = self;
        let mut plain = true;
        let cost = db::scan(
            conn,
            fold.at,
            |at| counts(authors, *activation_ms, at),
            |event| plain &= fold.apply(event) != Ok(Effect::Retroactive),
        )?;
        Ok((plain, cost))
    }

    /// Computes the state from all events. Returns the cost.
    fn fold_all(&mut self, conn: &Connection) -> Result<u64, LogError> {
        let (authors, activation_ms) = (&self.authors, self.activation_ms);
        let mut cost = 0_u64;
        self.fold = Fold::of_all(self.community, |visit| {
            let wanted = |at: &Position| counts(authors, activation_ms, at);
            cost = cost.saturating_add(db::scan(conn, None, wanted, visit)?);
            Ok::<_, LogError>(())
        })?;
        Ok(cost)
    }

    /// Hash of the last event in the order that has taken effect here and whose author is known.
    pub(super) fn last(&self, conn: &Connection) -> Result<EventHash, LogError> {
        let is_known = |at: &Position| {
            counts(&self.authors, self.activation_ms, at) && self.fold.knows(&at.author)
        };
        Ok(db::last(conn, self.activation_ms, is_known)?.unwrap_or(EventHash::ZERO))
    }

    /// Folds all events from the first one, for comparison.
    pub(super) fn fold_anew(&self, conn: &Connection) -> Result<Fold, LogError> {
        let mut anew = self.clone();
        anew.fold_all(conn)?;
        anew.publish();
        Ok(anew.fold)
    }
}

/// Returns whether an event is part of its author's history and its activation time has come.
fn counts(authors: &BTreeMap<NodeId, Author>, activation_ms: u64, at: &Position) -> bool {
    let author = authors.get(&at.author);
    at.lamport <= activation_ms && author.is_some_and(|author| author.has(at.seq))
}

pub(super) fn live_of(row: &EphemeralRow, body: Body) -> Live {
    Live {
        seq: row.seq,
        hash: row.hash,
        expires_ms: row.expires_ms,
        entry: Entry::of(row.author, row.expires_ms, body),
    }
}

/// Proof of a fork, from the stored events. A fork beyond a hole may not be visible to other nodes,
/// so it has no effect until the hole is filled.
pub(super) fn fork(
    conn: &Connection,
    author: &NodeId,
    it: &Author,
) -> Result<Option<Fork>, LogError> {
    let seq = it.row.head.saturating_add(1);
    if it.row.fork != Some(seq) {
        return Ok(None);
    }
    let proof = match it.is_root {
        true => db::durable_between(conn, author, seq, u64::MAX)?,
        false => proof(conn, author, seq)?,
    };
    Ok(Some(Fork {
        seq,
        proof: proof.iter().map(|row| row.hash).collect(),
    }))
}

/// Events that prove a fork at `seq`; if there is one only, preceded by the event before it.
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

/// Rework that the fold needs, in rising order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Redo {
    No,
    From(Reverse<Position>),
    All,
}

impl Redo {
    /// Start position; `None`: from the beginning.
    fn place(self) -> Option<Position> {
        match self {
            Self::From(Reverse(at)) => Some(at),
            _ => None,
        }
    }
}
