//! Gossip session as a state machine. Its inputs are messages, times and results of work; its
//! outputs are messages, work and deadlines. No I/O, no clock, no log.
//!
//! ```text
//!            HELLO sent                      peer's HELLO
//!  new() ──────────────▶ Greeting ─────────────────────────▶ Open
//!                            │  deadline, anything else        │  broken rule, deadline
//!                            └───────────────▶ Closed ◀────────┘
//! ```
//!
//! In `Open`, both directions are alike and independent:
//!
//! ```text
//!   sender                                               receiver
//!                    ◀──────────── HEADS round ────────── heads of its log
//!   Work::Learn, Work::Collect
//!   EVENTS n, n+1, .. (at most 4 unacknowledged) ───────▶ Work::Store, one batch at a time
//!                    ◀──────────── ACK n ──────────────── stored
//!   EVEN round ─────────────────────────────────────────▶ all missing events were sent
//!   a change of the log: Work::Collect, EVENTS ─────────▶ ..
//! ```
//!
//! Call order: after any `handle_` call, drain `poll_transmit`, do the work that `poll_work`
//! returns (one piece at a time, until its result is handed in), check `closed`, and sleep until
//! `poll_timeout`.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use hearthnet_transport::{CloseCode, Violation};
use parking_lot::Mutex;

use super::budget::{Account, Budgets, Stored, SyncConfig, cost, cost_of_heads};
use super::message::{SyncMessage, VERSION};
use crate::{CommunityId, NodeId};

/// Maximum number of unacknowledged batches: enough to keep both sides busy, 2 MiB at most.
pub const WINDOW: usize = 4;

/// Minimum size of a batch for which duplicates make this side send new heads.
const MANY: usize = 64;
/// Delay in ms after which a batch that could not be stored is stored again.
const RETRY_MS: u64 = 5_000;

/// Work on the log that the session needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Encode the log's heads.
    Heads,
    /// Store these as the peer's heads.
    Learn(Bytes),
    /// Find events that the peer lacks, at most [`MAX_BATCH_EVENTS`](super::MAX_BATCH_EVENTS)
    /// with [`MAX_BATCH_BYTES`](super::MAX_BATCH_BYTES).
    Collect,
    /// Store the peer's events in one transaction.
    Store(Vec<Bytes>),
}

/// Result of a piece of [`Work`].
#[derive(Debug)]
pub(crate) enum Done {
    /// The log's heads, encoded.
    Heads(Vec<u8>),
    /// Whether the bytes were heads of this community.
    Learned(bool),
    /// At most a batch of events, and whether there are more.
    Collected {
        events: Vec<Bytes>,
        more: bool,
    },
    /// The peer is no member, so it is sent nothing, nor told that it lacks nothing.
    Withheld,
    Stored(Stored),
    /// The log failed. Holds the events that still have to be stored.
    Failed(Option<Vec<Bytes>>),
}

/// Counters of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    pub sent: u64,
    pub received: u64,
    /// Received events that were new.
    pub accepted: u64,
    /// Received events that were refused.
    pub refused: u64,
    /// Sent events that the peer refused.
    pub declined: u64,
    /// True if, as far as this side knows, neither side lacks events of the other.
    pub in_sync: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    Open,
    Closed,
}

impl Progress {
    /// Number of sent events that the peer has not refused.
    pub fn taken(&self) -> u64 {
        self.sent.saturating_sub(self.declined)
    }
}

#[derive(Debug)]
pub struct SyncSession {
    config: SyncConfig,
    community: CommunityId,
    state: State,
    closed: Option<Violation>,
    opened_ms: u64,
    outgoing: VecDeque<SyncMessage>,
    /// Work in progress outside.
    working: Option<Doing>,
    progress: Progress,

    // Sending.
    /// Round and heads of the peer that are still to be processed.
    learn: Option<(u64, Bytes)>,
    /// Round of heads that is not answered with EVEN yet.
    answering: Option<u64>,
    /// Last round received.
    their_round: u64,
    /// The peer's heads are known.
    informed: bool,
    /// The log may hold events that the peer lacks.
    dirty: bool,
    next_number: u64,
    /// Number and time of sending of each unacknowledged batch.
    unacked: VecDeque<(u64, u64)>,

    // Receiving.
    /// Received batches that are not stored yet.
    waiting: VecDeque<(u64, Vec<Bytes>)>,
    last_number: u64,
    account: Account,
    /// Storing is paused until this time.
    retry_at: u64,
    /// Last round sent, and last round answered.
    round: u64,
    answered: u64,
    want_heads: bool,
    heads_sent_ms: u64,
    /// Alternates storing and collecting.
    stored_last: bool,
}

#[derive(Debug)]
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
    /// Creates a session for a new connection. Its HELLO and heads are sent first.
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

    /// Uses an account that is shared with other sessions. Their times must have the same origin.
    pub(crate) fn on(mut self, account: Account) -> SyncSession {
        self.account = account;
        self
    }

    /// Reason why the session has ended; `None` while it is open.
    pub fn closed(&self) -> Option<&Violation> {
        self.closed.as_ref()
    }

    /// Current counters.
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
            }
            (State::Open, SyncMessage::Heads { round, heads }) => {
                if round != self.their_round + 1 {
                    return refuse(CloseCode::ProtocolState, "heads out of order");
                }
                // A peer's first heads of a session are always accepted, and processed when its
                // budget allows.
                if !self.account.take_heads(now_ms) && round > 1 {
                    return refuse(CloseCode::FrameRate, "heads too often");
                }
                self.their_round = round;
                self.learn = Some((round, heads));
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
            }
            (State::Open, SyncMessage::Even { round }) => {
                if round <= self.answered || round > self.round {
                    return refuse(CloseCode::ProtocolState, "an answer to no heads");
                }
                self.answered = round;
            }
            _ => return refuse(CloseCode::ProtocolState, "a message at the wrong time"),
        }
        Ok(())
    }

    pub(crate) fn handle_change(&mut self) {
        self.dirty = true;
    }

    /// Checks the deadlines.
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

    /// Time at which [`handle_timeout`](Self::handle_timeout) and `poll_work` have to be called
    /// next, on the scale of `now_ms`.
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

    /// Next piece of work; `None` while one is in progress.
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
            return Some(Work::Collect);
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

    /// Returns whether the log may hold events that can be sent now.
    fn may_collect(&self) -> bool {
        self.dirty && self.informed && self.unacked.len() < WINDOW
    }

    /// Ends the work in progress with its result. A batch that could not be stored is stored again
    /// after five seconds, and acknowledged only then. After other failures the session ends, and
    /// the peer may reconnect.
    pub(crate) fn handle_done(&mut self, now_ms: u64, done: Done) {
        match (self.working.take(), done) {
            (Some(Doing::Heads), Done::Heads(heads)) => {
                // Each session starts with heads, so a peer that reconnects often is charged for
                // them too.
                self.account.work(now_ms).spend(cost_of_heads(heads.len()));
                self.round += 1;
                self.heads_sent_ms = now_ms;
                self.outgoing.push_back(SyncMessage::Heads {
                    round: self.round,
                    heads: heads.into(),
                });
            }
            (Some(Doing::Learn), Done::Learned(true)) => {
                self.informed = true;
                self.dirty = true;
            }
            (Some(Doing::Learn), Done::Learned(false)) => {
                self.end(CloseCode::BodyMalformed.violation("heads that cannot be read"));
            }
            (Some(Doing::Collect), Done::Collected { events, more }) => {
                self.send(now_ms, events, more);
            }
            // Its heads stay unanswered: an EVEN would end the doubt of a log that has lost events.
            (Some(Doing::Collect), Done::Withheld) => {}
            (
                Some(Doing::Store {
                    number,
                    events,
                    bytes,
                }),
                Done::Stored(stored),
            ) => {
                let spent = cost(events, bytes, &stored);
                self.account.work(now_ms).spend(spent);
                self.acknowledge(number, events, stored);
            }
            (Some(Doing::Store { number, .. }), Done::Failed(Some(events))) => {
                self.retry_at = now_ms.saturating_add(RETRY_MS);
                self.waiting.push_front((number, events));
            }
            (_, Done::Failed(_)) => {
                self.end(CloseCode::Internal.violation("the log cannot be used at the moment"));
            }
            // Not a result of the work in progress.
            (working, _) => self.working = working,
        }
    }

    /// Sends collected events; `more`: the peer lacks further events.
    fn send(&mut self, now_ms: u64, events: Vec<Bytes>, more: bool) {
        // No events although there are more: they are collected with the next change.
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

    /// Acknowledges a batch of so many events.
    fn acknowledge(&mut self, number: u64, events: usize, stored: Stored) {
        self.progress.accepted += stored.accepted;
        self.progress.refused += stored.refused;
        if let Some(code) = stored.hostile {
            return self.end(code.violation("an event that no honest node passes on"));
        }
        // Another peer sends the same events: new heads let this peer skip them.
        if events >= MANY && stored.known * 2 > events as u64 {
            self.want_heads = true;
        }
        self.outgoing.push_back(SyncMessage::Ack {
            number,
            accepted: stored.accepted,
            refused: stored.refused,
        });
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
