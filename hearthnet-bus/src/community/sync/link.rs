//! Driver of a gossip session over a socket and a log. The only part of gossip that does I/O.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use hearthnet_transport::{
    CloseCode, Code, Frame, PathRule, PeerSocket, SendError, SessionClosed, background,
    run_blocking,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::SYNC_PATH;
use super::budget::{Account, Budgets, Stored, SyncConfig};
use super::message::{MAX_BATCH_BYTES, MAX_BATCH_EVENTS, MAX_MESSAGE_BYTES};
use super::session::{Done, Progress, SyncSession, Work};
use crate::NodeId;
use crate::community::log::{Batch, Event, EventLog, Heads, LogError, Received, Refusal};
use crate::now_ms;

/// Path rule of gossip, for listeners and diallers.
pub fn path_rule() -> PathRule {
    // A socket opened by each side, and one that is being replaced.
    PathRule::new(SYNC_PATH, MAX_MESSAGE_BYTES).with_sockets(128, 3)
}

/// Budgets of all peers. Clones share them, so a peer that reconnects or opens a second connection
/// gains nothing.
#[derive(Clone)]
pub struct Accounts {
    begin: Instant,
    budgets: Arc<Mutex<Budgets>>,
    clock: Clock,
}

/// Clock of a node, in Unix milliseconds.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

impl fmt::Debug for Accounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accounts")
            .field("budgets", &self.budgets)
            .finish_non_exhaustive()
    }
}

impl Accounts {
    /// Creates full budgets of the sizes in `config`, for sessions that use the system clock.
    pub fn new(config: &SyncConfig) -> Accounts {
        Accounts::with_clock(config, Arc::new(now_ms))
    }

    /// Creates full budgets, for sessions that use the given clock.
    pub fn with_clock(config: &SyncConfig, clock: Clock) -> Accounts {
        Accounts {
            begin: Instant::now(),
            budgets: Arc::new(Mutex::new(Budgets::new(config))),
            clock,
        }
    }

    /// Time of all sessions, in ms. Monotonic: setting the system clock does not change it.
    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The log, and the heads that the peer is believed to have.
struct Replica {
    log: EventLog,
    peer: NodeId,
    theirs: Heads,
    /// Set to the community's root key if that is either end: the session is limited to the root's
    /// own events.
    only: Option<NodeId>,
    clock: Clock,
}

impl Replica {
    /// Does one piece of work. Blocks on the disk and on verifying signatures.
    fn work(&mut self, work: Work) -> Done {
        match work {
            Work::Heads => {
                let mut heads = self.log.heads();
                let only = self.only;
                heads
                    .authors
                    .retain(|author, _| only.is_none_or(|root| *author == root));
                Done::Heads(heads.to_cbor())
            }
            Work::Learn(heads) => {
                let heads = Heads::from_cbor(&heads);
                let heads = heads.filter(|heads| heads.community == self.log.community());
                let usable = heads.is_some();
                if let Some(heads) = heads {
                    self.theirs = heads;
                }
                Done::Learned(usable)
            }
            // A dialled node may turn out not to be a member. If it becomes one, the log changes
            // and this work is requested again.
            Work::Collect
                if self.only.is_none() && self.log.state().level(&self.peer).is_none() =>
            {
                Done::Withheld
            }
            Work::Collect => match self.missing() {
                Ok(batch) => {
                    self.theirs = batch.then;
                    Done::Collected {
                        events: batch.events.into_iter().map(Bytes::from).collect(),
                        more: batch.more,
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the log could not be read for a peer");
                    Done::Failed(None)
                }
            },
            Work::Store(events) => {
                let mut raw: Vec<Vec<u8>> = events.iter().map(|event| event.to_vec()).collect();
                raw.retain(|event| self.only.is_none_or(|root| Event::is_by(event, &root)));
                let others = events.len().saturating_sub(raw.len()) as u64;
                match self.log.receive(&raw, self.peer, (self.clock)()) {
                    Ok(received) => {
                        let taken = received.accepted.iter().filter_map(|at| raw.get(*at));
                        taken.for_each(|event| self.theirs.note_received(event));
                        let mut stored = judge(&received);
                        stored.refused += others;
                        Done::Stored(stored)
                    }
                    Err(error) => {
                        tracing::warn!(%error, "events of a peer could not be stored");
                        Done::Failed(Some(events))
                    }
                }
            }
        }
    }

    /// Events that the peer lacks.
    fn missing(&mut self) -> Result<Batch, LogError> {
        if let Some(root) = self.only {
            // Pretend that the peer has all other authors' events, so that only the root's are
            // sent.
            let theirs = self.theirs.authors.remove(&root);
            self.theirs = self.log.heads();
            match theirs {
                Some(head) => self.theirs.authors.insert(root, head),
                None => self.theirs.authors.remove(&root),
            };
        }
        self.log
            .missing(&self.theirs, MAX_BATCH_EVENTS, MAX_BATCH_BYTES)
    }
}

/// Counts the results of a batch, and detects events that no honest peer relays.
fn judge(received: &Received) -> Stored {
    let mut stored = Stored {
        accepted: received.accepted.len() as u64,
        known: received.known as u64,
        refused: 0,
        hostile: None,
    };
    for (_, why) in &received.refused {
        match why {
            // A newer event was here first; counts as known.
            Refusal::Stale => stored.known += 1,
            // Every honest node checks these before it stores an event, so it never relays them.
            Refusal::Invalid(why) if why.code() == Code::INVALID_SIGNATURE => {
                stored.hostile = Some(CloseCode::InvalidSignature);
            }
            Refusal::Foreign(_) => stored.hostile = Some(CloseCode::BodyMalformed),
            _ => stored.refused += 1,
        }
    }
    stored
}

/// Synchronises the log with that of the peer until the socket closes. Returns the reason of the
/// close. `own` is the key of this end.
///
/// Nothing is sent to a peer that is not a member. If either end is the community's root, the
/// session is limited to the root's own events. The caller decides whether the peer may be
/// connected, and watches that during the session (see [`Closer`](hearthnet_transport::Closer)).
///
/// Must be called within a tokio runtime. The log is used on its blocking threads.
pub async fn gossip(
    mut socket: PeerSocket,
    own: NodeId,
    log: EventLog,
    config: SyncConfig,
    accounts: Accounts,
    progress: watch::Sender<Progress>,
) -> SessionClosed {
    let peer = socket.peer();
    let (begin, now) = (accounts.begin, || accounts.now());
    let account = Account {
        budgets: Arc::clone(&accounts.budgets),
        peer,
        counted: log.state().answers_for(&peer),
    };

    let community = log.community();
    let only = Some(community.root()).filter(|root| [own, peer].contains(root));
    let mut changes = log.changes();
    let mut session = SyncSession::new(community, config, now()).on(account);
    let repaired = log.clone();
    let mut told = false;
    let mut replica = Some(Replica {
        log,
        peer,
        theirs: Heads::empty(community),
        only,
        clock: Arc::clone(&accounts.clock),
    });
    let mut job: Option<JoinHandle<(Replica, Done)>> = None;
    let mut outgoing: Option<Frame> = None;
    let sender = socket.sender();
    loop {
        session.handle_timeout(now());
        if let Some(mut idle) = replica.take() {
            match session.poll_work(now()) {
                Some(work) => {
                    job = Some(run_blocking(&background(), move || {
                        let done = idle.work(work);
                        (idle, done)
                    }));
                }
                None => replica = Some(idle),
            }
        }
        if outgoing.is_none() {
            outgoing = session.poll_transmit().map(Frame::Binary);
        }
        let latest = session.progress();
        if latest.in_sync && !told {
            told = true;
            // A log that may lack own events now has those that this peer had. If that is enough, it
            // may write again before tasks that wait for `in_sync` are woken. A session of the root
            // has not brought them.
            if only.is_none() && repaired.is_in_doubt() {
                let log = repaired.clone();
                let now_ms = (accounts.clock)();
                let noted = run_blocking(&background(), move || log.asked(own, peer, now_ms));
                if let Ok(Err(error)) = noted.await {
                    tracing::warn!(%error, "the log could not record that it is complete again");
                }
            }
        }
        progress.send_if_modified(|shown| {
            let changed = *shown != latest;
            *shown = latest;
            changed
        });
        if let Some(violation) = session.closed() {
            socket.close(violation.code);
            return SessionClosed::by_us(violation.code, violation.detail.clone());
        }
        let timeout = session.poll_timeout().unwrap_or(u64::MAX);
        // At most a day; then the loop computes the deadline again.
        let sleep = begin + Duration::from_millis(timeout.min(now() + 86_400_000));

        // In a fixed order, for simulations. A peer that sends without end comes last.
        tokio::select! {
            biased;
            Some(done) = OptionFuture::from(job.as_mut()) => {
                job = None;
                let Ok((idle, done)) = done else {
                    // The work panicked, and the log's handle is lost.
                    session.close(CloseCode::Internal);
                    continue;
                };
                session.handle_done(now(), done);
                replica = Some(idle);
            },
            // If this is dropped while it waits, nothing was sent.
            Some(sent) = OptionFuture::from(outgoing.clone().map(|it| sender.send(it))) => match sent {
                Ok(()) => outgoing = None,
                Err(SendError::Closed(closed)) => return closed,
                // A message of this side exceeded its own limit.
                Err(_) => session.close(CloseCode::Internal),
            },
            changed = changes.changed() => match changed {
                Ok(()) => session.handle_change(),
                Err(_) => session.close(CloseCode::Shutdown),
            },
            frame = socket.recv() => match frame {
                Ok(Frame::Binary(message)) => session.handle_message(now(), &message),
                // The path's rule admits no text frames.
                Ok(Frame::Text(_)) => session.close(CloseCode::WebSocket),
                Err(closed) => return closed,
            },
            () = tokio::time::sleep_until(sleep) => {}
        }
    }
}
