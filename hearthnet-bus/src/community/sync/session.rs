//! One gossip session as a state machine: messages, times and results of work go in; messages,
//! work and deadlines come out. No I/O, no clock, no log.
//!
//! ```text
//!            HELLO sent                      peer's HELLO
//!  new() ──────────────▶ Greeting ─────────────────────────▶ Open
//!                            │  deadline, anything else        │  broken rule, deadline
//!                            └───────────────▶ Closed ◀────────┘
//! ```
//!
//! In `Open` both directions are alike and independent:
//!
//! ```text
//!   sender                                               receiver
//!                    ◀──────────── HEADS round ────────── what it has
//!   Work::Learn, Work::Collect
//!   EVENTS n, n+1, .. (at most 4 unacknowledged) ───────▶ Work::Store, one batch at a time
//!                    ◀──────────── ACK n ──────────────── stored
//!   EVEN round ─────────────────────────────────────────▶ nothing was missing any more
//!   a change of the log: Work::Collect, EVENTS ─────────▶ ..
//! ```
//!
//! Call order: after any `handle_`, drain `poll_transmit`, do what `poll_work` says (it yields one
//! piece at a time, until its result was handed in), look at `closed`, and sleep until
//! `poll_timeout`.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use hearthnet_transport::{CloseCode, KeyedBuckets, Time, TokenBucket, Violation};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use super::message::{MAX_BATCH_BYTES, MAX_BATCH_EVENTS, SyncMessage, VERSION};
use crate::{CommunityId, NodeId};

/// Batches that may be unacknowledged: enough to keep both sides busy, 2 MiB at most.
pub const WINDOW: usize = 4;

/// From a batch of so many events on, it pays to tell the peer that most of them were known.
const MANY: usize = 64;
/// After how long a batch that could not be stored is tried again, in ms.
const RETRY_MS: u64 = 5_000;

/// Limits of one session. `Default` is what the specification names.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SyncConfig {
    /// How long the peer's HELLO may take, in ms.
    pub hello_ms: u64,
    /// How long the acknowledgement of a batch may take, in ms.
    pub ack_ms: u64,
    /// After how long heads are sent again though nothing seems to be missing, in ms.
    pub refresh_ms: u64,
    /// Least time between two heads that this side sends, in ms.
    pub heads_gap_ms: u64,
    /// Cost units that are done for a peer per second, over time: see [`cost`]. At 10 to 20 us each
    /// some 4% of a core.
    pub budget_per_second: u64,
    /// How many units a peer may have saved up: enough for a new node to take a whole log.
    pub budget: u64,
    /// Heads that the peer may send per minute, over time.
    pub heads_per_minute: u64,
}

impl Default for SyncConfig {
    fn default() -> Self {
        SyncConfig {
            hello_ms: 10_000,
            ack_ms: 120_000,
            refresh_ms: 300_000,
            heads_gap_ms: 5_000,
            budget_per_second: 2_000,
            budget: 400_000,
            heads_per_minute: 30,
        }
    }
}

/// What a batch costs of the peer's budget, in either direction: one unit per event and KiB; four more
/// for each event that was known, and fifty for each that was refused, for its signature was checked
/// in vain: so replaying the same does not pay.
pub fn cost(events: usize, bytes: usize, stored: &Stored) -> u64 {
    (events as u64)
        .saturating_add(bytes as u64 / 1024)
        .saturating_add(stored.known.saturating_mul(4))
        .saturating_add(stored.refused.saturating_mul(50))
}

/// What heads cost: to read them, and to look what is missing by them.
fn cost_of_heads(bytes: usize) -> u64 {
    (bytes as u64 / 1024).saturating_mul(8).max(1)
}

/// Peers and parties whose budgets are remembered.
const MAX_PEERS: usize = 1024;

/// What each peer has left of what this node does for it.
#[derive(Debug)]
pub(crate) struct Budgets {
    /// Work, by who answers for the peer.
    work: KeyedBuckets<NodeId>,
    /// HEADS, by peer: 60 units each, eight of them saved up.
    heads: KeyedBuckets<NodeId>,
}

impl Budgets {
    pub(crate) fn new(config: &SyncConfig) -> Budgets {
        Budgets {
            work: KeyedBuckets::new(config.budget_per_second, config.budget, MAX_PEERS),
            heads: KeyedBuckets::new(config.heads_per_minute, 8 * 60, MAX_PEERS),
        }
    }
}

/// What one peer has left. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(super) budgets: Arc<Mutex<Budgets>>,
    pub(super) peer: NodeId,
    /// Who answers for the peer.
    pub(super) counted: NodeId,
}

impl Account {
    /// The work budget, as of now.
    fn work(&self, now_ms: u64) -> MappedMutexGuard<'_, TokenBucket> {
        MutexGuard::map(self.budgets.lock(), |budgets| {
            budgets.work.of(&self.counted, Time::from_millis(now_ms))
        })
    }

    /// Takes one HEADS, if one more is within the rate.
    fn take_heads(&self, now_ms: u64) -> bool {
        let mut budgets = self.budgets.lock();
        let heads = budgets.heads.of(&self.peer, Time::from_millis(now_ms));
        let may = heads.has(60);
        if may {
            heads.spend(60);
        }
        may
    }
}

/// What the session needs to be done for it, against the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Encode the log's heads: `SyncSession::handle_heads`.
    Heads,
    /// Take these as what the peer has: `SyncSession::handle_learned`.
    Learn(Bytes),
    /// Find what the peer lacks: `SyncSession::handle_collected`.
    Collect {
        /// At most so many events,
        max_events: usize,
        /// of so many bytes in all.
        max_bytes: usize,
    },
    /// Store what the peer sent, in one transaction: `SyncSession::handle_stored`.
    Store(Vec<Bytes>),
}

/// What came of storing a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Events that were new.
    pub accepted: u64,
    /// Events that the log had, or had replaced by newer ones.
    pub known: u64,
    /// Events that were not taken.
    pub refused: u64,
    /// Set if something came that no honest node passes on.
    pub hostile: Option<CloseCode>,
}

/// Counters of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Events sent.
    pub sent: u64,
    /// Events received.
    pub received: u64,
    /// Of these: new.
    pub accepted: u64,
    /// Of these: refused.
    pub refused: u64,
    /// Of those sent: refused by the peer.
    pub declined: u64,
    /// Whether, as far as this side knows, neither lacks anything that the other has.
    pub in_sync: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    Open,
    Closed,
}

impl Progress {
    /// Events that the peer was sent and has not refused.
    pub fn taken(&self) -> u64 {
        self.sent.saturating_sub(self.declined)
    }
}

/// One side of one gossip session.
#[derive(Debug)]
pub struct SyncSession {
    config: SyncConfig,
    community: CommunityId,
    state: State,
    closed: Option<Violation>,
    opened_ms: u64,
    outgoing: VecDeque<SyncMessage>,
    /// What is being done outside, if anything.
    working: Option<Doing>,
    progress: Progress,

    // What we push.
    /// Peer's heads that are still to be looked at, and their round.
    learn: Option<(u64, Bytes)>,
    /// The round of heads that is not answered with EVEN yet.
    answering: Option<u64>,
    /// The last round that came.
    their_round: u64,
    /// Whether the peer's heads are known at all.
    informed: bool,
    /// Whether the log may hold what the peer lacks.
    dirty: bool,
    next_number: u64,
    /// When each unacknowledged batch was sent, with its number.
    unacked: VecDeque<(u64, u64)>,

    // What we get.
    /// Batches that wait to be stored.
    waiting: VecDeque<(u64, Vec<Bytes>)>,
    last_number: u64,
    account: Account,
    /// Nothing is stored before this moment.
    retry_at: u64,
    /// The last round that we sent, and the last that was answered.
    round: u64,
    answered: u64,
    want_heads: bool,
    heads_sent_ms: u64,
    /// Storing and collecting take turns.
    stored_last: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Doing {
    Heads,
    Learn,
    Collect,
    Store {
        number: u64,
        events: usize,
        bytes: usize,
    },
}

impl SyncSession {
    /// A session that has just been connected; its HELLO and heads are the first things to send.
    pub fn new(community: CommunityId, config: SyncConfig, now_ms: u64) -> SyncSession {
        let hello = SyncMessage::Hello {
            version: VERSION,
            community: *community.as_bytes(),
        };
        let nobody = NodeId::from_checked([0; 32]);
        let account = Account {
            budgets: Arc::new(Mutex::new(Budgets::new(&config))),
            peer: nobody,
            counted: nobody,
        };
        SyncSession {
            community,
            state: State::Greeting,
            closed: None,
            opened_ms: now_ms,
            outgoing: VecDeque::from([hello]),
            working: None,
            progress: Progress::default(),
            learn: None,
            answering: None,
            their_round: 0,
            informed: false,
            dirty: false,
            next_number: 1,
            unacked: VecDeque::new(),
            waiting: VecDeque::new(),
            last_number: 0,
            account,
            retry_at: 0,
            round: 0,
            answered: 0,
            want_heads: true,
            heads_sent_ms: 0,
            stored_last: false,
            config,
        }
    }

    /// The same on account of what the peer has spent in other sessions, of the same time.
    pub(crate) fn on(mut self, account: Account) -> SyncSession {
        self.account = account;
        self
    }

    /// Why the session is over, if it is.
    pub fn closed(&self) -> Option<&Violation> {
        self.closed.as_ref()
    }

    /// Counters as of now.
    pub fn progress(&self) -> Progress {
        let in_sync = self.state == State::Open
            && self.round > 0
            && self.answered == self.round
            && self.informed
            && self.answering.is_none()
            && self.learn.is_none()
            && !self.dirty
            && self.unacked.is_empty()
            && self.waiting.is_empty()
            && !matches!(self.working, Some(Doing::Collect | Doing::Store { .. }));
        Progress {
            in_sync,
            ..self.progress
        }
    }

    /// The next message to send.
    pub fn poll_transmit(&mut self) -> Option<Bytes> {
        if self.state == State::Closed {
            return None;
        }
        Some(self.outgoing.pop_front()?.encode())
    }

    /// Takes a message.
    pub fn handle_message(&mut self, now_ms: u64, message: &Bytes) {
        if self.state == State::Closed {
            return;
        }
        let result = SyncMessage::decode(message).and_then(|message| self.take(now_ms, message));
        if let Err(violation) = result {
            self.end(violation);
        }
    }

    fn take(&mut self, now_ms: u64, message: SyncMessage) -> Result<(), Violation> {
        let refuse = |code: CloseCode, detail: &'static str| Err(code.violation(detail));
        match (self.state, message) {
            (State::Greeting, SyncMessage::Hello { version, community }) => {
                if version != VERSION {
                    return refuse(CloseCode::VersionUnsupported, "another version of gossip");
                }
                if community != *self.community.as_bytes() {
                    return refuse(CloseCode::Unauthorized, "another community");
                }
                self.state = State::Open;
                Ok(())
            }
            (State::Open, SyncMessage::Heads { round, heads }) => {
                if round != self.their_round + 1 {
                    return refuse(CloseCode::ProtocolState, "heads out of order");
                }
                // Who comes again has to say what it has; that is looked at when it is due.
                if !self.account.take_heads(now_ms) && round > 1 {
                    return refuse(CloseCode::FrameRate, "heads too often");
                }
                self.their_round = round;
                self.learn = Some((round, heads));
                Ok(())
            }
            (State::Open, SyncMessage::Events { number, events }) => {
                if number != self.last_number + 1 {
                    return refuse(CloseCode::FrameSequence, "batches out of order");
                }
                let storing = matches!(self.working, Some(Doing::Store { .. }));
                if self.waiting.len() + usize::from(storing) >= WINDOW {
                    return refuse(CloseCode::CreditOverrun, "a batch beyond the window");
                }
                self.last_number = number;
                self.progress.received += events.len() as u64;
                self.waiting.push_back((number, events));
                Ok(())
            }
            (
                State::Open,
                SyncMessage::Ack {
                    number, refused, ..
                },
            ) => {
                match self.unacked.front() {
                    Some((oldest, _)) if *oldest == number => {}
                    _ => return refuse(CloseCode::CreditAck, "an acknowledgement of nothing"),
                }
                self.unacked.pop_front();
                self.progress.declined = self.progress.declined.saturating_add(refused);
                Ok(())
            }
            (State::Open, SyncMessage::Even { round }) => {
                if round <= self.answered || round > self.round {
                    return refuse(CloseCode::ProtocolState, "an answer to no heads");
                }
                self.answered = round;
                Ok(())
            }
            _ => refuse(CloseCode::ProtocolState, "a message at the wrong time"),
        }
    }

    /// The log has changed.
    pub(crate) fn handle_change(&mut self) {
        self.dirty = true;
    }

    /// Time passes.
    pub fn handle_timeout(&mut self, now_ms: u64) {
        let stalled = |detail: &'static str| CloseCode::PipelineStalled.violation(detail);
        match self.state {
            State::Greeting if now_ms >= self.opened_ms.saturating_add(self.config.hello_ms) => {
                self.end(stalled("no HELLO came"));
            }
            State::Open => {
                let oldest = self.unacked.front();
                if oldest.is_some_and(|(_, at)| now_ms >= at.saturating_add(self.config.ack_ms)) {
                    self.end(stalled("a batch was not acknowledged in time"));
                } else if now_ms >= self.refresh_at() {
                    self.want_heads = true;
                }
            }
            _ => {}
        }
    }

    fn refresh_at(&self) -> u64 {
        self.heads_sent_ms.saturating_add(self.config.refresh_ms)
    }

    fn heads_at(&self) -> u64 {
        match self.round {
            0 => 0,
            _ => self.heads_sent_ms.saturating_add(self.config.heads_gap_ms),
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) and `poll_work` want to be
    /// called next, in the time of `now_ms`.
    pub fn poll_timeout(&self) -> Option<u64> {
        match self.state {
            State::Closed => None,
            State::Greeting => Some(self.opened_ms.saturating_add(self.config.hello_ms)),
            State::Open => {
                let due = self.account.work(0).ready_at(0).0.div_ceil(1000);
                let mut next = match (self.want_heads, &self.working) {
                    (true, None) => self.heads_at().max(due),
                    (true, Some(_)) => u64::MAX,
                    (false, _) => self.refresh_at(),
                };
                if let Some((_, at)) = self.unacked.front() {
                    next = next.min(at.saturating_add(self.config.ack_ms));
                }
                if self.working.is_none() {
                    if !self.waiting.is_empty() {
                        next = next.min(due.max(self.retry_at));
                    }
                    if self.learn.is_some() || self.may_collect() {
                        next = next.min(due);
                    }
                }
                Some(next)
            }
        }
    }

    /// What is to be done next; nothing while something is being done.
    pub(crate) fn poll_work(&mut self, now_ms: u64) -> Option<Work> {
        if self.state != State::Open || self.working.is_some() {
            return None;
        }
        let may_work = self.account.work(now_ms).has(0);
        if may_work && let Some((round, heads)) = self.learn.take() {
            self.account.work(now_ms).spend(cost_of_heads(heads.len()));
            self.answering = Some(round);
            self.working = Some(Doing::Learn);
            return Some(Work::Learn(heads));
        }
        if may_work && self.want_heads && now_ms >= self.heads_at() {
            self.want_heads = false;
            self.working = Some(Doing::Heads);
            return Some(Work::Heads);
        }
        let may_store = !self.waiting.is_empty() && may_work && now_ms >= self.retry_at;
        if may_work && self.may_collect() && (self.stored_last || !may_store) {
            self.stored_last = false;
            self.dirty = false;
            self.working = Some(Doing::Collect);
            return Some(Work::Collect {
                max_events: MAX_BATCH_EVENTS,
                max_bytes: MAX_BATCH_BYTES,
            });
        }
        if !may_store {
            return None;
        }
        let (number, events) = self.waiting.pop_front()?;
        self.stored_last = true;
        self.working = Some(Doing::Store {
            number,
            events: events.len(),
            bytes: events.iter().map(Bytes::len).sum(),
        });
        Some(Work::Store(events))
    }

    /// Whether the log may hold what can be sent now.
    fn may_collect(&self) -> bool {
        self.dirty && self.informed && self.unacked.len() < WINDOW
    }

    /// Whether this was being done, and is not any more.
    fn is_done(&mut self, what: &Doing) -> bool {
        self.working.take_if(|doing| doing == what).is_some()
    }

    /// [`Work::Heads`] is done.
    pub(crate) fn handle_heads(&mut self, now_ms: u64, heads: Vec<u8>) {
        if !self.is_done(&Doing::Heads) {
            return;
        }
        // Each session begins with them, also one of a peer that comes again and again.
        self.account.work(now_ms).spend(cost_of_heads(heads.len()));
        self.round += 1;
        self.heads_sent_ms = now_ms;
        self.outgoing.push_back(SyncMessage::Heads {
            round: self.round,
            heads: heads.into(),
        });
    }

    /// [`Work::Learn`] is done: whether the bytes were heads of this community.
    pub(crate) fn handle_learned(&mut self, usable: bool) {
        if !self.is_done(&Doing::Learn) {
            return;
        }
        if usable {
            self.informed = true;
            self.dirty = true;
        } else {
            self.end(CloseCode::BodyMalformed.violation("heads that cannot be read"));
        }
    }

    /// [`Work::Collect`] is done: the events, at most as many as were asked for, and whether there
    /// are more.
    pub(crate) fn handle_collected(&mut self, now_ms: u64, events: Vec<Bytes>, more: bool) {
        if !self.is_done(&Doing::Collect) {
            return;
        }
        // Nothing now, though there is more: it comes with the next change.
        let more = more && !events.is_empty();
        if !events.is_empty() {
            let number = self.next_number;
            self.next_number += 1;
            self.progress.sent += events.len() as u64;
            let bytes = events.iter().map(Bytes::len).sum();
            let spent = cost(events.len(), bytes, &Stored::default());
            self.account.work(now_ms).spend(spent);
            self.unacked.push_back((number, now_ms));
            self.outgoing
                .push_back(SyncMessage::Events { number, events });
        }
        self.dirty |= more;
        if !more && let Some(round) = self.answering.take() {
            self.outgoing.push_back(SyncMessage::Even { round });
        }
    }

    /// [`Work::Store`] is done.
    pub(crate) fn handle_stored(&mut self, now_ms: u64, stored: Stored) {
        let Some(Doing::Store {
            number,
            events,
            bytes,
        }) = self
            .working
            .take_if(|doing| matches!(doing, Doing::Store { .. }))
        else {
            return;
        };
        self.progress.accepted += stored.accepted;
        self.progress.refused += stored.refused;
        let spent = cost(events, bytes, &stored);
        self.account.work(now_ms).spend(spent);
        if let Some(code) = stored.hostile {
            return self.end(code.violation("an event that no honest node passes on"));
        }
        // Somebody else sends the same: let the peer skip it.
        if events >= MANY && stored.known * 2 > events as u64 {
            self.want_heads = true;
        }
        self.outgoing.push_back(SyncMessage::Ack {
            number,
            accepted: stored.accepted,
            refused: stored.refused,
        });
    }

    /// What `poll_work` asked for could not be done. Storing is tried again
    /// after five seconds, and not acknowledged until it is done; `events` are those of the
    /// batch. Without the rest there is no gossip: the session ends, and the peer may come again.
    pub(crate) fn handle_failure(&mut self, now_ms: u64, events: Option<Vec<Bytes>>) {
        match (self.working.take(), events) {
            (Some(Doing::Store { number, .. }), Some(events)) => {
                self.retry_at = now_ms.saturating_add(RETRY_MS);
                self.waiting.push_front((number, events));
            }
            _ => self.end(CloseCode::Internal.violation("the log cannot be used at the moment")),
        }
    }

    /// Ends the session from this side.
    pub fn close(&mut self, code: CloseCode) {
        self.end(code.violation(""));
    }

    fn end(&mut self, violation: Violation) {
        if self.state != State::Closed {
            self.state = State::Closed;
            self.closed = Some(violation);
            self.waiting.clear();
            self.outgoing.clear();
            self.learn = None;
        }
    }
}
