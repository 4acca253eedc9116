//! The event log on disk, and the handle that the program has of it.
//!
//! One file for one thing: the lock, the connection, the view in memory and the state that readers
//! see change together, in `EventLog::write` and nowhere else; all else here leads to it.

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
use super::body::{Body, Policy};
use super::clocks::Clocks;
use super::community::Community;
use super::db;
use super::error::{LogError, LogHealth, Refusal};
use super::event::{Checked, Event, EventHash, EventId, Lane, MAX_AHEAD_MS, MAX_LIFE_MS};
use super::heads::Heads;
use super::merge::{Compacted, Merge, Quotas, Taken, View};
use super::recover::{self, Opened, Recovery, RecoveryLock};
use crate::{CommunityId, NodeId, NodeKey, RandomnessError};

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
    /// The latest time that a caller named: no clock is read here.
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
        let view = View::load(&conn)?;
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
            now_ms: AtomicU64::new(0),
            checked: Mutex::default(),
            clocks: Mutex::default(),
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
    /// nothing; [`LogError::Frozen`], [`LogError::Behind`], [`LogError::Quota`]; what the
    /// disk says ([`LogError::ReadOnly`]).
    pub fn append(&self, key: &NodeKey, body: Body, now_ms: u64) -> Result<EventId, LogError> {
        let life_ms = match body {
            Body::GrantRevoked { .. } => MAX_LIFE_MS,
            _ => ADVERT_LIFE_MS,
        };
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(RandomnessError::from)?;
        let random = u128::from_be_bytes(random) >> 48;
        self.write(now_ms, |conn, view, quotas| {
            let event = next(conn, view, quotas, key, &body, life_ms, now_ms, random)?;
            let raw = event.sign(key)?;
            let hash = EventHash::of(&raw).ok_or(LogError::Frozen { author: key.id() })?;
            if matches!(event.lane, Lane::Durable { .. }) {
                view.fold.check(&event)?;
            }
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
        for (place, hash, bytes) in unknown {
            match self.verify_one(bytes, from, now_ms) {
                Ok(event) => verified.push((place, hash, bytes, event)),
                Err(why) => received.refused.push((place, why)),
            }
        }
        if !verified.is_empty() {
            let (accepted, known, refused) = self.write(now_ms, |conn, view, quotas| {
                let (mut accepted, mut known, mut refused) = (vec![], 0, vec![]);
                let mut merge = Merge::new(conn, view, quotas, now_ms);
                for (place, hash, bytes, event) in &verified {
                    match merge.take(event, *hash, bytes)? {
                        Ok(Taken::New) => accepted.push(*place),
                        Ok(Taken::Known) => known += 1,
                        Err(why) => refused.push((*place, why)),
                    }
                }
                if !accepted.is_empty() {
                    merge.finish()?;
                }
                Ok((!accepted.is_empty(), (accepted, known, refused)))
            })?;
            received.accepted = accepted;
            received.known += known;
            received.refused.extend(refused);
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
        let ahead_ms = event.time_ms.saturating_sub(now_ms);
        if ahead_ms > MAX_AHEAD_MS {
            return Err(Refusal::Time { ahead_ms });
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
    pub fn clock_offset(&self) -> Option<(i64, usize)> {
        self.inner.clocks.lock().offset()
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
                now_ms: self.inner.now_ms.load(Ordering::Relaxed),
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
        let loaded = View::load(&writer.conn).unwrap();
        anew.state == writer.view.fold.state && loaded.fold.state == anew.state
    }

    /// Runs one write transaction. `work` says whether it changed anything.
    fn write<T>(
        &self,
        now_ms: u64,
        work: impl FnOnce(&Connection, &mut View, &Quotas) -> Result<(bool, T), LogError>,
    ) -> Result<T, LogError> {
        let inner = &*self.inner;
        inner.now_ms.fetch_max(now_ms, Ordering::Relaxed);
        let mut guard = inner.writer.lock();
        let writer = &mut *guard;
        let result = writer.transaction(&inner.path, |conn, view| work(conn, view, &inner.quotas));
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
        work: impl FnOnce(&Connection, &mut View) -> Result<(bool, T), LogError>,
    ) -> Result<(bool, T), LogError> {
        self.mend(path)?;
        let Self {
            conn, view, stale, ..
        } = self;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if *stale || db::changes(&tx)? != view.changes {
            *view = View::load(&tx)?;
            *stale = false;
        }
        let done = work(&tx, view)?;
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
        let view = View::load(&tx)?;
        drop(tx);
        writer.view = view;
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
    let lamport = view.clock.saturating_add(1);
    // An event's Lamport time is at most its time. Where a faulty clock ran ahead, this one
    // follows, by no more than what others accept.
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
