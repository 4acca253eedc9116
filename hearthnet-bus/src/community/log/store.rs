//! The event log on disk, and the handle that the program has of it.
//!
//! The lock, the connection, the view in memory and the state that readers see change together, in
//! `EventLog::write` and nowhere else. What is written through it is in `append.rs` and `receive.rs`.

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
use super::clocks::Clocks;
use super::community::Community;
use super::db;
use super::early::Signed;
use super::error::{LogError, LogHealth};
use super::event::Checked;
use super::heads::Heads;
use super::merge::{Compacted, Merge, Quotas};
use super::recover::{self, Opened, Recovery, RecoveryLock};
use super::view::View;
use crate::{CommunityId, now_ms};

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
    pub(super) checked: Mutex<Checked>,
    state: RwLock<Arc<Community>>,
    health: Mutex<LogHealth>,
    changes: watch::Sender<u64>,
    pub(super) clocks: Mutex<Clocks>,
    /// The last events that were dated too far ahead: what vouches for them may be in the next batch.
    pub(super) early: Mutex<Vec<Signed>>,
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
    pub(super) view: View,
    /// The view may be ahead of the file, for a transaction failed: read it again.
    stale: bool,
    /// The disk failed under the connection: open it anew.
    broken: bool,
}

impl EventLog {
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
            .map_err(LogError::Thread)?;
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
    pub(super) fn write<T>(
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
            Ok((changed, _)) => {
                if *changed {
                    inner.publish(writer);
                }
                inner.note_health(None, now_ms);
            }
            Err(error) => {
                writer.note(error);
                // Peers are told what is in the file, not what it was tried to write.
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
    pub(super) fn update(&self, writer: &mut Writer) -> Result<(), LogError> {
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
