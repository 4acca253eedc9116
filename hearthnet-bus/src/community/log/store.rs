//! The event log on disk, and the handle that the program has of it.
//!
//! One file for one thing: the lock, the connection, the view in memory and the state that readers
//! see change together, in `EventLog::write` and nowhere else; all else here leads to it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::watch;

use super::batch::{Batch, Pack, heads_of};
use super::body::{Body, CLOCK_SET, Level, Policy};
use super::clocks::Clocks;
use super::community::Community;
use super::db;
use super::error::{LogError, LogHealth, Refusal};
use super::event::{
    Checked, Event, EventHash, EventId, Lane, MAX_AHEAD_MS, MAX_LIFE_MS, MAX_OFF_MS,
};
use super::heads::Heads;
use super::merge::{Compacted, Merge, Quotas, Taken, View};
use super::recover::{self, Opened, Recovery, RecoveryLock};
use crate::{CommunityId, NodeId, NodeKey, RandomnessError, now_ms};

/// The log's file in the data directory.
pub const FILE_NAME: &str = "log.sqlite";

/// How long an advertisement and what a node says of itself hold, in milliseconds: four times
/// the health timeout of 30 s.
pub const ADVERT_LIFE_MS: u64 = 120_000;

/// How often it is tried to write again when the log is read-only.
const PROBE: Duration = Duration::from_secs(1);

/// A community's event log. Clones share one open file; the calls are short and blocking (an
/// append waits for the disk). Another handle of the same file sees what was written here when it
/// writes itself, when it receives, and when it is told to look ([`EventLog::update`]).
///
/// ```no_run
/// # use std::path::Path;
/// # use hearthnet_bus::NodeKey;
/// # use hearthnet_bus::log::{Body, EventLog, Level, LogError, Policy};
/// # fn main() -> Result<(), LogError> {
/// let (root, node) = (NodeKey::generate()?, NodeKey::generate()?);
/// let now_ms = 1_800_000_000_000;
/// let log = EventLog::create(Path::new("data"), &root, node.id(), "Elm Street", Policy::default(), now_ms)?;
/// let policy = Policy { research: true, ..log.state().policy };
/// log.append(&node, Body::PolicyChanged(policy), now_ms)?;
/// assert_eq!(log.state().level(&node.id()), Some(Level::Anchor));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct EventLog {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    path: PathBuf,
    community: CommunityId,
    quotas: Quotas,
    pub(super) writer: Mutex<Writer>,
    checked: Mutex<Checked>,
    state: RwLock<Arc<Community>>,
    health: Mutex<LogHealth>,
    changes: watch::Sender<u64>,
    clocks: Mutex<Clocks>,
    /// The last events that were dated too far ahead: what vouches for them may be in the next batch.
    early: Mutex<VecDeque<Verified>>,
    /// The time that a caller named last; that of opening before.
    now_ms: AtomicU64,
    recovery: Option<Recovery>,
    /// Whether the file said, when it was opened, that events may be missing.
    doubt: AtomicBool,
    /// Keeps others from repairing the file while it is in use.
    _guard: RecoveryLock,
    /// Dropped with the last handle, which ends the thread that tries to write again.
    _alive: mpsc::Sender<()>,
}

pub(super) struct Writer {
    pub(super) conn: Connection,
    view: View,
    /// The view may be ahead of the file, for a transaction failed: read it again.
    stale: bool,
    /// The disk failed under the connection: open it anew.
    broken: bool,
}

/// An event that was verified: its place in its batch, if it is of this one, and all that is needed of
/// it.
#[derive(Debug, Clone)]
struct Verified {
    place: Option<usize>,
    hash: EventHash,
    raw: Vec<u8>,
    event: Event,
}

/// Events dated too far ahead that are remembered: more than somebody writes before it sees that
/// its clock is wrong.
const MAX_EARLY: usize = 64;

/// What became of the events of a batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Received {
    /// The places in the batch of those that were new: to be passed on.
    pub accepted: Vec<usize>,
    /// How many were here already.
    pub known: usize,
    /// The places of those that were not taken, and why.
    pub refused: Vec<(usize, Refusal)>,
}

impl EventLog {
    /// Makes a community: its log in `dir` (which is made if missing, mode 0700) with the
    /// event that names it, its founder as first anchor and its policy. `root` signs that
    /// event and is needed again only for what anchors may not do.
    ///
    /// # Errors
    /// [`LogError::Exists`] if there is a log in `dir`; [`LogError::Event`] if the name is not
    /// a line of 1 to 64 bytes; what the file system says.
    pub fn create(
        dir: &Path,
        root: &NodeKey,
        founder: NodeId,
        name: &str,
        policy: Policy,
        now_ms: u64,
    ) -> Result<Self, LogError> {
        let community = CommunityId::from(root.id());
        let body = Body::CommunityCreated {
            name: name.to_owned(),
            policy,
            founder,
        };
        // Before the file exists: a bad name must not leave an empty log behind.
        body.check(community)?;
        let log = Self::prepare(dir, community)?;
        log.append(root, body, now_ms)?;
        Ok(log)
    }

    /// Makes the empty log of a community that this node is about to join. Only events of
    /// this community will be taken.
    ///
    /// # Errors
    /// As [`EventLog::create`].
    pub fn prepare(dir: &Path, community: CommunityId) -> Result<Self, LogError> {
        let path = dir.join(FILE_NAME);
        if path.exists() {
            return Err(LogError::Exists { path });
        }
        make_dir(dir)?;
        let guard = RecoveryLock::shared(dir)?;
        recover::name(dir, community)?;
        let mut conn = db::open(&path, true)?;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Another process may have been faster.
        if db::check_format(&tx, &path)? {
            return Err(LogError::Exists { path });
        }
        db::create(&tx, community)?;
        tx.commit()?;
        recover::note_file(&conn, &path);
        let view = View::load(&conn, now_ms())?;
        Self::start(
            path,
            Quotas::default(),
            Opened {
                conn,
                view,
                guard,
                recovery: None,
            },
        )
    }

    /// Opens the log in `dir`, and repairs it if it must be: see [`EventLog::recovery`].
    ///
    /// # Errors
    /// [`LogError::NoCommunity`] if there is none; [`LogError::Corrupt`] if so little of it is
    /// left that not even its community is known; [`LogError::Format`] if it is a newer
    /// program's.
    pub fn open(dir: &Path) -> Result<Self, LogError> {
        Self::open_with(dir, Quotas::default())
    }

    /// [`EventLog::open`] with other quotas. All nodes of a community should use the same.
    ///
    /// # Errors
    /// As [`EventLog::open`].
    pub fn open_with(dir: &Path, quotas: Quotas) -> Result<Self, LogError> {
        let path = dir.join(FILE_NAME);
        if !path.exists() {
            return Err(LogError::NoCommunity { path });
        }
        let opened = recover::open(dir, &path, &quotas)?;
        Self::start(path, quotas, opened)
    }

    fn start(path: PathBuf, quotas: Quotas, opened: Opened) -> Result<Self, LogError> {
        let Opened {
            conn,
            view,
            guard,
            recovery,
        } = opened;
        let doubt = AtomicBool::new(db::doubt(&conn)?);
        let (alive, ended) = mpsc::channel();
        let inner = Arc::new(Inner {
            path,
            community: view.community,
            quotas,
            state: RwLock::new(Arc::new(view.community())),
            health: Mutex::new(LogHealth::Ok),
            changes: watch::Sender::new(view.changes),
            now_ms: AtomicU64::new(view.line),
            checked: Mutex::default(),
            clocks: Mutex::default(),
            early: Mutex::default(),
            writer: Mutex::new(Writer {
                conn,
                view,
                stale: false,
                broken: false,
            }),
            recovery,
            doubt,
            _guard: guard,
            _alive: alive,
        });
        let weak = Arc::downgrade(&inner);
        std::thread::Builder::new()
            .name("event-log".into())
            .spawn(move || keep_probing(&weak, &ended))
            .map_err(LogError::io("watch", &inner.path))?;
        Ok(Self { inner })
    }

    /// Which community's log this is.
    pub fn community(&self) -> CommunityId {
        self.inner.community
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// What the log says now.
    pub fn state(&self) -> Arc<Community> {
        let state = self.inner.state.read();
        Arc::clone(&state)
    }

    /// A number that grows with every change that this handle knows of.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes.subscribe()
    }

    /// Whether the log can be written.
    pub fn health(&self) -> LogHealth {
        self.inner.health.lock().clone()
    }

    /// Reads what another handle of the same file has written: for programs beside the one that
    /// writes it, which tells them when there is something new.
    ///
    /// # Errors
    /// [`LogError::Corrupt`], or what the disk says.
    pub fn update(&self) -> Result<(), LogError> {
        self.inner.update(&mut self.inner.writer.lock())
    }

    /// What was found and repaired when this handle was opened, if anything.
    pub fn recovery(&self) -> Option<&Recovery> {
        self.inner.recovery.as_ref()
    }

    /// Makes the empty log of a community that this node was in before, and whose log is lost
    /// here: as [`EventLog::prepare`], but nothing of this node is written into it before a peer
    /// has brought back what there was.
    ///
    /// # Errors
    /// As [`EventLog::create`].
    pub fn prepare_again(dir: &Path, community: CommunityId) -> Result<Self, LogError> {
        let log = Self::prepare(dir, community)?;
        db::set_doubt(&log.inner.writer.lock().conn, true)?;
        log.inner.doubt.store(true, Ordering::Relaxed);
        Ok(log)
    }

    /// Whether events of this node may be missing that others have: after damage, and in a copy
    /// that was put back. Durable events of this node are refused until a peer was asked
    /// ([`LogError::Behind`]).
    pub fn is_in_doubt(&self) -> bool {
        // Another process may have asked meanwhile.
        self.inner.doubt.load(Ordering::Relaxed)
            && db::doubt(&self.inner.writer.lock().conn).unwrap_or(true)
    }

    /// Notes which community the folder belongs to, for when the log cannot be read any more.
    ///
    /// # Errors
    /// What the file system says.
    pub fn name_folder(dir: &Path, community: CommunityId) -> Result<(), LogError> {
        recover::name(dir, community)
    }

    /// Tells everybody who waits for [`EventLog::changes`] to look again, though no event came.
    pub fn touch(&self) {
        self.inner.changes.send_modify(|_| {});
    }

    /// Tells the log that a peer was asked for all that it has and everything was received.
    /// After damage, and in a copy that was put back, this ends the doubt about events of this
    /// node that only others still have; at other times it does nothing.
    ///
    /// # Errors
    /// What the disk says ([`LogError::ReadOnly`]).
    pub fn caught_up(&self, now_ms: u64) -> Result<(), LogError> {
        if !self.inner.doubt.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.write(now_ms, |conn, _, _| {
            let doubt = db::doubt(conn)?;
            if doubt {
                db::set_doubt(conn, false)?;
            }
            Ok((doubt, ()))
        })?;
        self.inner.doubt.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Signs an event and appends it: one transaction, which is on the disk when this
    /// returns. Ephemeral kinds live for [`ADVERT_LIFE_MS`], a `grant.revoked` for
    /// [`MAX_LIFE_MS`]; and at least as long as what they replace.
    ///
    /// # Errors
    /// [`LogError::NoEffect`] if the author may not make this event, or it would change
    /// nothing; [`LogError::Clock`] if others would not take it; [`LogError::Frozen`],
    /// [`LogError::Behind`], [`LogError::Quota`]; what the disk says ([`LogError::ReadOnly`]).
    pub fn append(&self, key: &NodeKey, body: Body, now_ms: u64) -> Result<EventId, LogError> {
        let life_ms = match body {
            Body::GrantRevoked { .. } => MAX_LIFE_MS,
            _ => ADVERT_LIFE_MS,
        };
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(RandomnessError::from)?;
        let random = u128::from_be_bytes(random) >> 48;
        self.write(now_ms, |conn, view, quotas| {
            let durable = body.slot().is_none();
            if durable {
                self.check_clock(view, key.id(), &body, now_ms)?;
                view.settle(conn, now_ms, true)?;
            }
            let event = next(conn, view, quotas, key, &body, life_ms, now_ms, random)?;
            let raw = event.sign(key)?;
            let hash = EventHash::of(&raw).ok_or(LogError::Frozen { author: key.id() })?;
            if durable && body.kind() != CLOCK_SET {
                view.fold.check(&event)?;
            }
            // It may be dated some milliseconds ahead; here it counts at once.
            view.line = view.line.max(event.lamport);
            let mut merge = Merge::new(conn, view, quotas, now_ms);
            match merge.take(&event, hash, &raw)? {
                Ok(_) => {}
                Err(Refusal::Quota { author }) => return Err(LogError::Quota { author }),
                Err(_) => return Err(LogError::Frozen { author: key.id() }),
            }
            merge.finish()?;
            Ok((true, event.id))
        })
    }

    /// Refuses to write with a clock that others do not believe. Asked are those of the members heard
    /// of late who are trusted, or all of them if there are none, but not whom the event is about: who
    /// is to lose a right has no say in when.
    fn check_clock(
        &self,
        view: &View,
        author: NodeId,
        body: &Body,
        now_ms: u64,
    ) -> Result<(), LogError> {
        let (about, clocks) = (body.nodes(), self.inner.clocks.lock());
        let heard = |least: Level| {
            clocks.offset(now_ms, |node| {
                *node != author && !about.contains(node) && view.level(node) >= Some(least)
            })
        };
        match heard(Level::Trusted).or_else(|| heard(Level::Member)) {
            Some((offset_ms, _)) if offset_ms.unsigned_abs() > MAX_OFF_MS => {
                Err(LogError::Clock { offset_ms })
            }
            _ => Ok(()),
        }
    }

    /// What is to be done as time passes, every second or so: events whose moment has come take
    /// effect; and if the last event of `key`'s chain was made by a clock that ran ahead, and members
    /// say now that it is right, another one follows, with which others take it and what lies
    /// behind it.
    ///
    /// # Errors
    /// As [`EventLog::append`].
    pub fn tend(&self, key: &NodeKey, now_ms: u64) -> Result<(), LogError> {
        let (waiting, ahead) = {
            let writer = self.inner.writer.lock();
            let (view, author) = (&writer.view, key.id());
            let seq = view.authors.get(&author).map_or(0, |it| it.row.head);
            let time_ms = match db::durable_at(&writer.conn, &author, seq)?.first() {
                Some(last) => db::event(&writer.conn, last.arrival)?.time_ms,
                None => 0,
            };
            (view.is_waiting(), time_ms.saturating_sub(now_ms))
        };
        if waiting {
            self.write(now_ms, |_, _, _| Ok((false, ())))?;
        }
        if ahead > MAX_OFF_MS && self.clock_offset(now_ms).is_some() {
            let body = Body::Unknown {
                kind: CLOCK_SET.to_owned(),
                slot: None,
                bytes: vec![0xa0],
            };
            self.append(key, body, now_ms)?;
            tracing::warn!(
                "what this node wrote while its clock was {} min ahead is passed on now",
                ahead / 60_000
            );
        }
        Ok(())
    }

    /// Takes what a peer sent: verifies, stores, folds. Events that are here already change
    /// nothing. All that is accepted is on the disk when this returns.
    ///
    /// Who passes an event on says nothing about it: `from` is for the log file of the program,
    /// and for [`EventLog::clock_offset`].
    ///
    /// # Errors
    /// What the disk says ([`LogError::ReadOnly`]); then nothing of the batch was stored.
    pub fn receive(
        &self,
        raw: &[Vec<u8>],
        from: NodeId,
        now_ms: u64,
    ) -> Result<Received, LogError> {
        let mut received = Received::default();
        let unknown = self.unknown(raw)?;
        received.known = raw.len().saturating_sub(unknown.len());
        // Signatures before the transaction: they take a hundred times longer than the rest.
        let mut verified = Vec::with_capacity(unknown.len());
        for (place, hash, raw) in unknown {
            match self.verify_one(raw, from, now_ms) {
                Ok(event) => verified.push(Verified {
                    place: Some(place),
                    hash,
                    raw: raw.to_vec(),
                    event,
                }),
                Err(why) => received.refused.push((place, why)),
            }
        }
        if !verified.is_empty() {
            verified.extend(std::mem::take(&mut *self.inner.early.lock()));
            let early = self.write(now_ms, |conn, view, quotas| {
                let (early, rest) = without_early(conn, verified, now_ms)?;
                let mut merge = Merge::new(conn, view, quotas, now_ms);
                let mut changed = false;
                for one in &rest {
                    let taken = merge.take(&one.event, one.hash, &one.raw)?;
                    changed |= taken == Ok(Taken::New);
                    match (taken, one.place) {
                        (Ok(Taken::New), Some(place)) => received.accepted.push(place),
                        (Ok(Taken::Known), Some(_)) => received.known += 1,
                        (Err(why), Some(place)) => received.refused.push((place, why)),
                        (_, None) => {}
                    }
                }
                if changed {
                    merge.finish()?;
                }
                Ok((changed, early))
            })?;
            for one in &early {
                let ahead_ms = one.event.time_ms.saturating_sub(now_ms);
                let refused = one.place.map(|place| (place, Refusal::Time { ahead_ms }));
                received.refused.extend(refused);
            }
            let newest = early.into_iter().rev().take(MAX_EARLY);
            let kept = newest.map(|one| Verified { place: None, ..one });
            self.inner.early.lock().extend(kept);
        }
        received.refused.sort_by_key(|(place, _)| *place);
        for (_, why) in &received.refused {
            metrics::counter!("hearthnet_log_refused_total", "code" => why.code()).increment(1);
            tracing::debug!(from = %from.short(), code = %why.code(), "refused an event: {why}");
        }
        Ok(received)
    }

    /// Those that are not here yet, with their places and hashes.
    #[allow(clippy::type_complexity)]
    fn unknown<'a>(
        &self,
        raw: &'a [Vec<u8>],
    ) -> Result<Vec<(usize, EventHash, &'a [u8])>, LogError> {
        let mut unknown = Vec::with_capacity(raw.len());
        let mut writer = self.inner.writer.lock();
        // What is in the file must also be in the view, or it would never get there.
        self.inner.update(&mut writer)?;
        for (place, bytes) in raw.iter().enumerate() {
            let hash = EventHash::of(bytes).unwrap_or(EventHash::ZERO);
            // The keys need no check to look for a hash, which is over all of the event.
            let known = match Event::decode_stored(bytes) {
                Err(_) => false,
                Ok(event) => match event.lane {
                    Lane::Durable { .. } => db::durable_at(&writer.conn, &event.author, event.seq)?
                        .iter()
                        .any(|row| row.hash == hash),
                    Lane::Ephemeral { slot, .. } => {
                        let live = writer.view.live.get(&(event.author, slot));
                        live.is_some_and(|live| live.hash == hash)
                    }
                },
            };
            if !known {
                unknown.push((place, hash, bytes.as_slice()));
            }
        }
        Ok(unknown)
    }

    /// Everything about an event that can be checked without the log.
    fn verify_one(&self, raw: &[u8], from: NodeId, now_ms: u64) -> Result<Event, Refusal> {
        let event = Event::verify_with(raw, &mut self.inner.checked.lock())?;
        if event.author == from && matches!(event.body, Body::NodeSeen { .. }) {
            self.inner.clocks.lock().note(from, event.time_ms, now_ms);
        }
        if event.community != self.inner.community {
            return Err(Refusal::Foreign(event.community));
        }
        if let Lane::Ephemeral { expires_ms, .. } = event.lane
            && expires_ms <= now_ms
        {
            return Err(Refusal::Stale);
        }
        Ok(event)
    }

    /// How far the clocks of the neighbours are ahead of this one's, in milliseconds (negative:
    /// behind), and how many neighbours say so: the middle one of what they said of themselves
    /// when it came from themselves, since this handle was opened. Such words may have been on
    /// their way for 40 s, so less than a minute means nothing. `None`: nobody spoke yet.
    pub fn clock_offset(&self, now_ms: u64) -> Option<(i64, usize)> {
        self.inner.clocks.lock().offset(now_ms, |_| true)
    }

    /// How many events were folded again since the log was opened, because others came late.
    pub fn reworked(&self) -> u64 {
        self.inner.writer.lock().view.reworked
    }

    /// The time that a caller named last.
    pub(super) fn moment(&self) -> u64 {
        self.inner.now_ms.load(Ordering::Relaxed)
    }

    /// How far this log has come, of every author that it has a place for.
    pub fn heads(&self) -> Heads {
        let writer = self.inner.writer.lock();
        heads_of(&writer.view)
    }

    /// What a peer with these heads lacks: durable events first, in the order of the log, then
    /// proofs of forks, then ephemeral events. At most `max_events` events of together at
    /// most `max_bytes` (but at least one, if anything is missing).
    ///
    /// # Errors
    /// [`LogError::Corrupt`], or what the disk says.
    pub fn missing(
        &self,
        theirs: &Heads,
        max_events: usize,
        max_bytes: usize,
    ) -> Result<Batch, LogError> {
        let writer = self.inner.writer.lock();
        let mut batch = Batch::new(theirs);
        if theirs.community == self.inner.community {
            let pack = Pack {
                conn: &writer.conn,
                view: &writer.view,
                theirs,
                now_ms: self.moment(),
                batch: &mut batch,
                events_left: max_events,
                bytes_left: max_bytes,
            };
            pack.fill()?;
        }
        Ok(batch)
    }

    /// Drops expired ephemeral events. Call it every few minutes: it is what keeps a log that
    /// only runs from growing.
    ///
    /// # Errors
    /// What the disk says ([`LogError::ReadOnly`]).
    pub fn compact(&self, now_ms: u64) -> Result<Compacted, LogError> {
        self.write(now_ms, |conn, view, quotas| {
            let mut merge = Merge::new(conn, view, quotas, now_ms);
            let done = merge.compact()?;
            let changed = done != Compacted::default();
            if changed {
                merge.finish()?;
            }
            Ok((changed, done))
        })
    }

    /// Whether the state in memory is what all events together say.
    #[cfg(test)]
    pub(super) fn is_consistent(&self) -> bool {
        let writer = self.inner.writer.lock();
        let anew = writer.view.fold_anew(&writer.conn).unwrap();
        let loaded = View::load(&writer.conn, writer.view.line).unwrap();
        anew.state == writer.view.fold.state && loaded.fold.state == anew.state
    }

    /// Runs one write transaction. `work` says whether it changed anything.
    fn write<T>(
        &self,
        now_ms: u64,
        work: impl FnOnce(&Connection, &mut View, &Quotas) -> Result<(bool, T), LogError>,
    ) -> Result<T, LogError> {
        let inner = &*self.inner;
        inner.now_ms.store(now_ms, Ordering::Relaxed);
        let mut guard = inner.writer.lock();
        let writer = &mut *guard;
        let result = writer.transaction(&inner.path, now_ms, |conn, view| {
            work(conn, view, &inner.quotas)
        });
        match &result {
            Ok((true, _)) => inner.publish(writer),
            Ok((false, _)) => {}
            Err(error) => {
                writer.note(error);
                // Peers are told what is in the file, not what it was tried to write.
                if let Err(unread) = inner.update(writer) {
                    tracing::warn!("the event log could not be read: {unread}");
                }
            }
        }
        match &result {
            Ok(_) => inner.note_health(None, now_ms),
            Err(error) => inner.note_health(Some(error), now_ms),
        }
        Ok(result?.1)
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventLog")
            .field("path", &self.inner.path)
            .field("community", &self.inner.community)
            .finish_non_exhaustive()
    }
}

impl Writer {
    /// After a failure the view is read again, and after one of the disk the file opened
    /// again: what SQLite then holds of it in memory is not to be relied on.
    fn note(&mut self, error: &LogError) {
        self.stale = true;
        self.broken |= matches!(error, LogError::ReadOnly { .. });
    }

    fn mend(&mut self, path: &Path) -> Result<(), LogError> {
        if self.broken {
            self.conn = db::open(path, false)?;
            self.broken = false;
        }
        Ok(())
    }

    fn transaction<T>(
        &mut self,
        path: &Path,
        now_ms: u64,
        work: impl FnOnce(&Connection, &mut View) -> Result<(bool, T), LogError>,
    ) -> Result<(bool, T), LogError> {
        self.mend(path)?;
        let Self {
            conn, view, stale, ..
        } = self;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if *stale || db::changes(&tx)? != view.changes {
            view.reload(&tx, now_ms)?;
            *stale = false;
        }
        let moved = view.advance(&tx, now_ms)?;
        let mut done = work(&tx, view)?;
        done.0 |= moved;
        // Dropped without a commit, a transaction is rolled back.
        if done.0 {
            tx.commit()?;
        }
        Ok(done)
    }
}

impl Inner {
    fn publish(&self, writer: &Writer) {
        let state = Arc::new(writer.view.community());
        *self.state.write() = state;
        self.changes.send_replace(writer.view.changes);
    }

    fn note_health(&self, error: Option<&LogError>, now_ms: u64) {
        let mut health = self.health.lock();
        match (error, &*health) {
            (Some(LogError::ReadOnly { reason }), LogHealth::Ok) => {
                tracing::error!("the event log cannot be written: {reason}");
                *health = LogHealth::ReadOnly {
                    reason: reason.clone(),
                    since_ms: now_ms,
                };
            }
            (Some(LogError::Corrupt { what }), LogHealth::Ok | LogHealth::ReadOnly { .. }) => {
                tracing::error!("the event log is damaged: {what}");
                *health = LogHealth::Damaged {
                    what: what.clone(),
                    since_ms: now_ms,
                };
            }
            (None, LogHealth::ReadOnly { .. }) => {
                tracing::info!("the event log can be written again");
                *health = LogHealth::Ok;
            }
            _ => {}
        }
    }

    /// Reads what another handle wrote.
    fn update(&self, writer: &mut Writer) -> Result<(), LogError> {
        if !writer.stale && db::changes(&writer.conn)? == writer.view.changes {
            return Ok(());
        }
        let tx = writer.conn.unchecked_transaction()?;
        writer
            .view
            .reload(&tx, self.now_ms.load(Ordering::Relaxed))?;
        drop(tx);
        writer.stale = false;
        self.publish(writer);
        Ok(())
    }

    /// Tries to write again after the disk was full or failed.
    fn probe(&self) {
        if !matches!(*self.health.lock(), LogHealth::ReadOnly { .. }) {
            return;
        }
        let mut writer = self.writer.lock();
        let path = &self.path;
        match writer.mend(path).and_then(|()| db::probe(&mut writer.conn)) {
            Ok(()) => self.note_health(None, 0),
            Err(error) => writer.note(&error),
        }
    }
}

/// The thread that notices when the disk can be written again.
fn keep_probing(inner: &Weak<Inner>, ended: &mpsc::Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(PROBE) {
        let Some(inner) = inner.upgrade() else { return };
        inner.probe();
    }
}

fn make_dir(dir: &Path) -> Result<(), LogError> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(LogError::io("create", dir))
}

/// Parts events: those that are dated too far ahead to be taken, and the others. One that is followed
/// by the next event of its author, at a time that is no such, was made before that: its author's
/// clock was wrong, and has been set since.
fn without_early(
    conn: &Connection,
    mut events: Vec<Verified>,
    now_ms: u64,
) -> Result<(Vec<Verified>, Vec<Verified>), LogError> {
    let is_early = |event: &Event| event.time_ms.saturating_sub(now_ms) > MAX_AHEAD_MS;
    if !events.iter().any(|one| is_early(&one.event)) {
        return Ok((vec![], events));
    }
    // From the last events of each chain on: by what each is followed.
    let mut order: Vec<&Verified> = events.iter().collect();
    order.sort_by_key(|one| Reverse(one.event.seq));
    let (mut followed, mut early) = (BTreeMap::new(), BTreeSet::new());
    for Verified { hash, event, .. } in order {
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

/// The next event of an author, unsigned.
fn next(
    conn: &Connection,
    view: &View,
    quotas: &Quotas,
    key: &NodeKey,
    body: &Body,
    life_ms: u64,
    now_ms: u64,
    random: u128,
) -> Result<Event, LogError> {
    let author = key.id();
    let it = view.authors.get(&author).cloned().unwrap_or_default();
    if it.fork.is_some() {
        return Err(LogError::Frozen { author });
    }
    // After everything that has taken effect, and so at most this moment: who leaps ahead leaves
    // others where they are.
    let tip = it.tip.map_or(0, |(_, lamport)| lamport);
    let last = view.fold.at().map_or(0, |at| at.lamport).max(tip);
    let lamport = last.saturating_add(1);
    // An event's Lamport time is at most its time: of several in one millisecond the later ones are
    // dated a few milliseconds ahead.
    let time_ms = now_ms.max(lamport);
    let (seq, lane) = match body.slot() {
        None => {
            let holes = db::last_seq(conn, &author)? != it.row.head;
            let state = &view.fold.state;
            // A log that does not even have its first event back has all of it to ask for.
            let others = !state.created || state.members.keys().any(|node| *node != author);
            if holes || (db::doubt(conn)? && others) {
                return Err(LogError::Behind { author });
            }
            if it.row.head >= quotas.events_per_author {
                return Err(LogError::Quota { author });
            }
            let prev = it.tip.map_or(EventHash::ZERO, |(hash, _)| hash);
            (it.row.head.saturating_add(1), Lane::Durable { prev })
        }
        Some(slot) => {
            let replaced = view.live.get(&(author, slot.clone()));
            let until = replaced.map_or(0, |live| live.expires_ms);
            let expires_ms = time_ms
                .saturating_add(life_ms)
                .max(until)
                .min(time_ms.saturating_add(MAX_LIFE_MS));
            // Any number that grows will do. The time does so even if this file is lost.
            let seq = it.row.ephemeral.saturating_add(1).max(now_ms);
            (seq, Lane::Ephemeral { slot, expires_ms })
        }
    };
    Ok(Event {
        community: view.community,
        author,
        seq,
        lamport,
        time_ms,
        id: EventId::new(time_ms, random),
        lane,
        body: body.clone(),
    })
}
