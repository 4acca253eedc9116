//! What is in memory of the log, and the fold kept in step with it.
//!
//! Everything here but budgets follows from the file and the time:
//!
//! - **The moment.** An event of a chain takes effect when its Lamport time has come by this
//!   machine's clock. Before that it is kept and passed on, and nothing that is written here
//!   sorts after it: so nobody's leap makes others' events leap.
//! - **Rework.** What sorts before events that were applied is folded again from a snapshot on. That
//!   has a budget of its own; beyond it the state waits for a while, with what sorts last in it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearthnet_transport::{KeyedBuckets, Time, TokenBucket};
use rusqlite::Connection;

use super::body::{Body, Level};
use super::community::{Community, Durable, Entry, Fork, Live};
use super::db::{self, AuthorRow, EphemeralRow};
use super::error::LogError;
use super::event::{Event, EventHash, Position};
use super::fold::{Applied, Fold};
use super::heads::MAX_SLOTS;
use crate::{CommunityId, NodeId};

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
    /// Where its history parts, if nothing before that is missing.
    pub(super) fork: Option<Fork>,
    /// Whether it is the community's root, all of whose branches count.
    pub(super) is_root: bool,
}

impl Author {
    /// Whether its event with this number, which is here, is part of its history.
    pub(super) fn has(&self, seq: u64) -> bool {
        seq <= self.row.head || (self.is_root && self.fork.is_some())
    }
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
    paces: KeyedBuckets<NodeId>,
    pub(super) changes: u64,
    pub(super) authors: BTreeMap<NodeId, Author>,
    pub(super) fold: Fold,
    durable: Arc<Durable>,
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
            paces: KeyedBuckets::new(SAID_PER_SECOND, SAID, MAX_PACES),
            authors: BTreeMap::new(),
            fold: Fold::new(community),
            durable: Arc::default(),
            twins: Arc::default(),
            live: Arc::default(),
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

    /// What is known of an author.
    pub(super) fn author(&self, author: &NodeId) -> Author {
        let new = || Author {
            is_root: *author == self.community.root(),
            ..Author::default()
        };
        self.authors.get(author).cloned().unwrap_or_else(new)
    }

    /// When the last event of an author's chain says that it was made; 0 if there is none.
    pub(super) fn last_time(&self, conn: &Connection, author: &NodeId) -> Result<u64, LogError> {
        let seq = self.authors.get(author).map_or(0, |it| it.row.head);
        match db::durable_at(conn, author, seq)?.first() {
            Some(last) => Ok(db::event(conn, last.arrival)?.time_ms),
            None => Ok(0),
        }
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

    /// Applies an event that has just become part of its author's history. Whether it takes a level
    /// from somebody, and with it what that one did: that waits for no budget.
    pub(super) fn apply(&mut self, conn: &Connection, event: &Event) -> Result<bool, LogError> {
        let at = event.position();
        if at.lamport > self.line {
            return Ok(false);
        }
        // What sorts last takes effect at once, also while something before it has to wait.
        let plain = self.fold.is_plain();
        let redo = match self.fold.is_before(at) {
            true if self.fold.apply(event) == Applied::Reaches => Redo::All,
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

    /// Notes that the fold has to go back. From here on no snapshot holds what would change.
    pub(super) fn fold_again(&mut self, conn: &Connection, from: Redo) -> Result<(), LogError> {
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
        self.rework.refill(Time::from_millis(now_ms));
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
    pub(super) fn is_within_pace(&mut self, author: NodeId, now_ms: u64) -> bool {
        self.paces.take(&author, Time::from_millis(now_ms))
    }

    /// Notes that the durable state changed.
    pub(super) fn publish(&mut self) {
        let frozen = self
            .authors
            .iter()
            .filter(|(author, it)| !it.is_root && self.fold.knows(author))
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

    /// The last event, in the order, that has taken effect here of an author that others know.
    pub(super) fn last(&self, conn: &Connection) -> Result<EventHash, LogError> {
        let is_known =
            |at: &Position| counts(&self.authors, self.line, at) && self.fold.knows(&at.author);
        Ok(db::last(conn, self.line, is_known)?.unwrap_or(EventHash::ZERO))
    }

    /// The whole fold from the first event on, to compare with.
    pub(super) fn fold_anew(&self, conn: &Connection) -> Result<Fold, LogError> {
        let mut anew = self.clone();
        anew.fold_all(conn)?;
        anew.publish();
        Ok(anew.fold)
    }
}

/// Whether an event is part of its author's history, and its moment has come.
fn counts(authors: &BTreeMap<NodeId, Author>, line: u64, at: &Position) -> bool {
    let author = authors.get(&at.author);
    at.lamport <= line && author.is_some_and(|author| author.has(at.seq))
}

pub(super) fn live_of(row: &EphemeralRow, body: Body) -> Live {
    Live {
        seq: row.seq,
        hash: row.hash,
        expires_ms: row.expires_ms,
        entry: Entry::of(row.author, row.expires_ms, body),
    }
}

/// The proof of a fork, from what is stored. A fork beyond a hole is not known to be one that
/// others see as well, so it has no effect before the hole is filled.
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
        true => db::durable_from(conn, author, seq)?,
        false => proof(conn, author, seq)?,
    };
    Ok(Some(Fork {
        seq,
        proof: proof.iter().map(|row| row.hash).collect(),
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
pub(super) enum Redo {
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
