//! The event log on disk, and the program's handle of it.
//!
//! The lock, the connection, the in-memory view and the state for readers change together, only in
//! `EventLog::write`. The operations that use it are in `append.rs` and `receive.rs`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hearthnet_platform::files::{Access, create_folders};
use parking_lot::{Mutex, RwLock};
use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::watch;

use super::batch::{Batch, Pack, heads_of};
use super::clocks::Clocks;
use super::community::Community;
use super::db;
use super::early::Signed;
use super::error::{LogError, LogHealth};
use super::event::Checked;
use super::heads::Heads;
use super::merge::{Compacted, Merge, Quotas};
use super::recover::{self, Recovery, RecoveryLock};
use super::view::View;
use crate::{CommunityId, NodeId, now_ms};

/// Name of the log's file in the data directory.
pub const FILE_NAME: &str = "log.sqlite";

/// Life of shard advertisements and node announcements in ms: four times the health timeout of 30
/// s.
pub const ADVERT_LIFE_MS: u64 = 120_000;

/// Interval of write attempts while the log is read-only.
const PROBE: Duration = Duration::from_secs(1);

/// Event log of a community. Clones share one open file. Calls are short and blocking; an append
/// waits for the disk. Another handle of the same file sees these changes when it writes, receives,
/// or calls [`EventLog::update`].
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
    pub(super) checked: Mutex<Checked>,
    state: RwLock<Arc<Community>>,
    health: Mutex<LogHealth>,
    changes: watch::Sender<u64>,
    pub(super) clocks: Mutex<Clocks>,
    /// Recent events that were post-dated too far. The next batch may hold events that vouch for
    /// them.
    pub(super) early: Mutex<Vec<Signed>>,
    /// Time passed by the last caller; at first, the time of opening.
    now_ms: AtomicU64,
    recovery: Option<Recovery>,
    /// Events may be missing, according to the file when it was opened.
    doubt: AtomicBool,
    /// Members that were asked for all that they have since then.
    asked: Mutex<BTreeSet<NodeId>>,
    /// Keeps other processes from repairing the file while it is in use.
    pub(super) guard: RecoveryLock,
    /// Dropped with the last handle, which ends the thread that retries writing.
    _alive: mpsc::Sender<()>,
}

pub(super) struct Writer {
    pub(super) conn: Connection,
    pub(super) view: View,
    /// A transaction failed and the view may be ahead of the file: read it again.
    stale: bool,
    /// The disk failed under the connection: open it again.
    broken: bool,
    /// Pages of the file beyond which the disk counts as full.
    #[cfg(feature = "testing")]
    most_pages: u32,
}

impl EventLog {
    /// Creates the empty log of a community that this node is about to join. It accepts only events
    /// of this community.
    ///
    /// # Errors
    /// As [`EventLog::create`].
    pub fn prepare(dir: &Path, community: CommunityId) -> Result<Self, LogError> {
        let path = dir.join(FILE_NAME);
        if path.exists() {
            return Err(LogError::Exists { path });
        }
        create_folders(dir, Access::Owner).map_err(LogError::io("create", dir))?;
        let mut guard = RecoveryLock::shared(dir)?;
        recover::name(dir, community)?;
        let mut conn = db::open(&path, true)?;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Another process may have been faster.
        if db::check_format(&tx, &path)? {
            return Err(LogError::Exists { path });
        }
        // Before the log exists: the mark of a former log must not be compared with this one.
        guard.forget_own();
        guard.name_log(&path, 0);
        db::create(&tx, community)?;
        tx.commit()?;
        let view = View::load(&conn, now_ms())?;
        Self::start(path, Quotas::default(), conn, view, guard, None)
    }

    /// Opens the log in `dir`, and repairs it if necessary: see [`EventLog::recovery`].
    ///
    /// # Errors
    /// [`LogError::NoCommunity`] if there is no log; [`LogError::Corrupt`] if the damage leaves not
    /// even the community readable; [`LogError::Format`] if a newer program wrote it.
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
        let (conn, view, guard, recovery) = recover::open(dir, &path, &quotas)?;
        Self::start(path, quotas, conn, view, guard, recovery)
    }

    fn start(
        path: PathBuf,
        quotas: Quotas,
        conn: Connection,
        view: View,
        guard: RecoveryLock,
        recovery: Option<Recovery>,
    ) -> Result<Self, LogError> {
        let doubt = AtomicBool::new(db::doubt(&conn)?.is_some());
        let (alive, ended) = mpsc::channel();
        let inner = Arc::new(Inner {
            path,
            community: view.community,
            quotas,
            state: RwLock::new(Arc::new(view.shown.clone())),
            health: Mutex::new(LogHealth::Ok),
            changes: watch::Sender::new(view.changes),
            now_ms: AtomicU64::new(view.activation_ms),
            checked: Mutex::default(),
            clocks: Mutex::default(),
            early: Mutex::default(),
            writer: Mutex::new(Writer {
                conn,
                view,
                stale: false,
                broken: false,
                #[cfg(feature = "testing")]
                most_pages: u32::MAX,
            }),
            recovery,
            doubt,
            asked: Mutex::default(),
            guard,
            _alive: alive,
        });
        let weak = Arc::downgrade(&inner);
        std::thread::Builder::new()
            .name("event-log".into())
            .spawn(move || keep_probing(&weak, &ended))
            .map_err(LogError::Thread)?;
        Ok(Self { inner })
    }

    pub fn community(&self) -> CommunityId {
        self.inner.community
    }

    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Current state of the community.
    pub fn state(&self) -> Arc<Community> {
        let state = self.inner.state.read();
        Arc::clone(&state)
    }

    /// Receiver of the change count, which grows with every change that this handle knows of.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes.subscribe()
    }

    pub fn health(&self) -> LogHealth {
        self.inner.health.lock().clone()
    }

    /// Reads the changes that another handle of the same file has written. For processes that the
    /// writer notifies of changes.
    ///
    /// # Errors
    /// [`LogError::Corrupt`], or errors of the disk.
    pub fn update(&self) -> Result<(), LogError> {
        self.inner.update(&mut self.inner.writer.lock())
    }

    /// Findings and repairs when this handle was opened; `None` if there were none.
    pub fn recovery(&self) -> Option<&Recovery> {
        self.inner.recovery.as_ref()
    }

    /// Creates the empty log of a community of which this node was a member before, after its log
    /// was lost. Like [`EventLog::prepare`], but the log accepts no event of this node until a peer
    /// has sent the earlier ones.
    ///
    /// # Errors
    /// As [`EventLog::create`].
    pub fn prepare_again(dir: &Path, community: CommunityId) -> Result<Self, LogError> {
        let log = Self::prepare(dir, community)?;
        db::set_doubt(&log.inner.writer.lock().conn, db::Doubt::Copy)?;
        log.inner.doubt.store(true, Ordering::Relaxed);
        Ok(log)
    }

    /// Returns whether events of this node may be missing that other nodes have: after damage or in
    /// a restored copy. Durable events of this node are refused until others were asked
    /// ([`LogError::Behind`]).
    pub fn is_in_doubt(&self) -> bool {
        // Another process may have asked a peer meanwhile.
        self.inner.doubt.load(Ordering::Relaxed)
            && db::doubt(&self.inner.writer.lock().conn).map_or(true, |doubt| doubt.is_some())
    }

    /// Stores the community of the folder, in case the log becomes unreadable.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn name_folder(dir: &Path, community: CommunityId) -> Result<(), LogError> {
        recover::name(dir, community)
    }

    /// Wakes all receivers of [`EventLog::changes`] without a new event.
    pub fn touch(&self) {
        self.inner.changes.send_modify(|_| {});
    }

    /// Records that `peer` was asked by `own`, the key of this node, for all that it has, and that
    /// everything was received. Ends the doubt of a log that may lack own events if that was enough.
    ///
    /// # Errors
    /// [`LogError::ReadOnly`] and other errors of the disk.
    pub fn asked(&self, own: NodeId, peer: NodeId, now_ms: u64) -> Result<(), LogError> {
        if self.inner.doubt.load(Ordering::Relaxed) {
            self.inner.asked.lock().insert(peer);
            self.end_doubt(own, now_ms)?;
        }
        Ok(())
    }

    /// Ends the doubt of a log that was asked for (`specs/event-log.md` 8):
    ///
    /// - if it is known which own event was the last one, and that is here;
    /// - if all other members were asked;
    /// - if it is not known, as in a copy, and all other members that run were asked.
    pub(super) fn end_doubt(&self, own: NodeId, now_ms: u64) -> Result<(), LogError> {
        if !self.inner.doubt.load(Ordering::Relaxed) {
            return Ok(());
        }
        {
            let (state, asked) = (self.state(), self.inner.asked.lock());
            let is_asked = |node: &NodeId| *node == own || asked.contains(node);
            let is_enough = match self.last_own(own) {
                Some(seq) => db::last_seq(&self.inner.writer.lock().conn, &own)? >= seq,
                None => state.nodes(now_ms).all(|seen| is_asked(&seen.node)),
            };
            let is_enough = is_enough || state.members().all(|(node, _)| is_asked(node));
            if asked.is_empty() || !is_enough {
                return Ok(());
            }
        }
        self.caught_up(now_ms)
    }

    /// Number of the last durable event that `own` has written, as the mark says; `None` if that is not
    /// known.
    pub(super) fn last_own(&self, own: NodeId) -> Option<u64> {
        let last = self.inner.guard.own().filter(|last| last.author == own);
        last.map(|last| last.seq)
    }

    /// Allows durable events of this node again after damage or in a restored copy, whatever events
    /// it may lack; otherwise it has no effect.
    ///
    /// # Errors
    /// [`LogError::ReadOnly`] and other errors of the disk.
    pub fn caught_up(&self, now_ms: u64) -> Result<(), LogError> {
        if !self.inner.doubt.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.write(now_ms, |conn, _, _| {
            let doubt = db::doubt(conn)?.is_some();
            if doubt {
                db::end_doubt(conn)?;
            }
            Ok((doubt, ()))
        })?;
        self.inner.doubt.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Lets the disk be full, or have room again: the file of this handle no longer grows.
    #[cfg(feature = "testing")]
    pub fn fill_disk(&self, is_full: bool) {
        let mut writer = self.inner.writer.lock();
        writer.most_pages = match is_full {
            true => db::pages(&writer.conn).unwrap_or(1),
            false => u32::MAX,
        };
    }

    /// Number of events folded again since the log was opened, because others arrived late.
    pub fn reworked(&self) -> u64 {
        self.inner.writer.lock().view.reworked
    }

    /// Time passed by the last caller.
    pub(super) fn moment(&self) -> u64 {
        self.inner.now_ms.load(Ordering::Relaxed)
    }

    /// Heads of this log, with every author that it has a place for.
    pub fn heads(&self) -> Heads {
        let writer = self.inner.writer.lock();
        heads_of(&writer.view)
    }

    /// Returns events that a peer with these heads lacks: durable events in the order of the log,
    /// then proofs of forks, then ephemeral events. At most `max_events` with `max_bytes` in total,
    /// but at least one event if any is missing.
    ///
    /// # Errors
    /// [`LogError::Corrupt`], or errors of the disk.
    pub fn missing(
        &self,
        theirs: &Heads,
        max_events: usize,
        max_bytes: usize,
    ) -> Result<Batch, LogError> {
        let writer = self.inner.writer.lock();
        let pack = Pack {
            conn: &writer.conn,
            view: &writer.view,
            theirs,
            now_ms: self.moment(),
            batch: Batch {
                events: Vec::new(),
                more: false,
                then: theirs.clone(),
            },
            events_left: max_events,
            bytes_left: max_bytes,
        };
        pack.fill()
    }

    /// Drops expired ephemeral events, and strangers' events that have waited for a day. Must be
    /// called every few minutes to keep the log from growing.
    ///
    /// # Errors
    /// [`LogError::ReadOnly`] and other errors of the disk.
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

    /// Returns whether the state in memory equals a fold over all events.
    #[cfg(test)]
    pub(super) fn is_consistent(&self) -> bool {
        let writer = self.inner.writer.lock();
        let anew = writer.view.fold_anew(&writer.conn).unwrap();
        let loaded = View::load(&writer.conn, writer.view.activation_ms).unwrap();
        anew.state == writer.view.fold.state && loaded.fold.state == anew.state
    }

    /// Runs one write transaction. `work` returns whether it changed anything.
    pub(super) fn write<T>(
        &self,
        now_ms: u64,
        work: impl FnOnce(&Connection, &mut View, &Quotas) -> Result<(bool, T), LogError>,
    ) -> Result<T, LogError> {
        self.write_own(now_ms, work, |_| {})
    }

    /// As [`Self::write`]. `stored` is called when a change is on the disk, and before peers or other
    /// tasks hear of it.
    pub(super) fn write_own<T>(
        &self,
        now_ms: u64,
        work: impl FnOnce(&Connection, &mut View, &Quotas) -> Result<(bool, T), LogError>,
        stored: impl FnOnce(&T),
    ) -> Result<T, LogError> {
        let inner = &*self.inner;
        inner.now_ms.store(now_ms, Ordering::Relaxed);
        let mut guard = inner.writer.lock();
        let writer = &mut *guard;
        let result = writer.transaction(&inner.path, now_ms, |conn, view| {
            work(conn, view, &inner.quotas)
        });
        match &result {
            Ok((changed, done)) => {
                if *changed {
                    inner.guard.mark(writer.view.changes);
                    stored(done);
                    inner.publish(writer);
                }
                inner.note_health(None, now_ms);
            }
            Err(error) => {
                writer.note(error);
                // Peers are sent the content of the file, not of the failed transaction.
                if let Err(unread) = inner.update(writer) {
                    tracing::warn!("the event log could not be read: {unread}");
                }
                inner.note_health(Some(error), now_ms);
            }
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
    /// Marks the view for reading it again and, after a failure of the disk, the file for opening
    /// it again: SQLite's caches are then unreliable.
    fn note(&mut self, error: &LogError) {
        self.stale = true;
        self.broken |= matches!(error, LogError::ReadOnly { .. });
    }

    fn reopen_if_broken(&mut self, path: &Path) -> Result<(), LogError> {
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
        self.reopen_if_broken(path)?;
        #[cfg(feature = "testing")]
        db::limit_pages(&self.conn, self.most_pages)?;
        let Self {
            conn, view, stale, ..
        } = self;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if *stale || db::head(&tx)?.2 != view.changes {
            view.reload(&tx, now_ms)?;
            *stale = false;
        }
        let moved = view.advance(&tx, now_ms)?;
        let mut done = work(&tx, view)?;
        done.0 |= moved;
        // A transaction that is dropped without a commit is rolled back.
        if done.0 {
            tx.commit()?;
        }
        Ok(done)
    }
}

impl Inner {
    fn publish(&self, writer: &Writer) {
        let state = Arc::new(writer.view.shown.clone());
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

    /// Reads the changes of another handle.
    pub(super) fn update(&self, writer: &mut Writer) -> Result<(), LogError> {
        if !writer.stale && db::head(&writer.conn)?.2 == writer.view.changes {
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

    /// Retries writing after the disk was full or failed.
    fn probe(&self) {
        if !matches!(*self.health.lock(), LogHealth::ReadOnly { .. }) {
            return;
        }
        let mut writer = self.writer.lock();
        let path = &self.path;
        match writer
            .reopen_if_broken(path)
            .and_then(|()| db::probe(&mut writer.conn))
        {
            Ok(()) => self.note_health(None, 0),
            Err(error) => writer.note(&error),
        }
    }
}

/// Body of the thread that detects when the disk is writable again.
fn keep_probing(inner: &Weak<Inner>, ended: &mpsc::Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(PROBE) {
        let Some(inner) = inner.upgrade() else { return };
        inner.probe();
    }
}
