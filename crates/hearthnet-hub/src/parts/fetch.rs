//! A fetch: one thread decides and stores, and each source has threads that wait for its answers.
//!
//! The threads of a source are not joined, because a source may be silent until its timeout. At most
//! one run of pieces per lane is in memory, and the run that is being stored.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::thread::{Builder, scope};
use std::time::{Duration, Instant};

use hearthnet_files::part::{Part, PartError, Piece};
use hearthnet_platform::files::free_bytes;

use super::error::{Dropped, FetchError, Why};
use super::peer::{Message, Peer, Reading};
use super::queue::Queue;
use super::source::{PieceSource, Rank, SourceError};

/// Polling interval for cancellation and timeouts.
const TICK: Duration = Duration::from_millis(100);
/// Bytes after which pieces are made durable.
const SYNC_BYTES: u64 = 64 << 20;
/// Longest time for which sources of a higher rank wait for one that has not said what it has.
const HEAD_START: Duration = Duration::from_secs(2);
/// Shortest time between two reports of progress.
const NEWS: Duration = Duration::from_millis(200);

/// Times of a fetch.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Differs from node to node, so that nodes that begin together fetch different pieces first.
    pub seed: u64,
    /// Time between two questions for a source's pieces.
    pub poll: Duration,
    /// The fetch ends after this time without a new piece, here or at a source.
    pub patience: Duration,
    /// After this time without an answer, a piece may be asked from another source as well.
    pub stall: Duration,
    /// After this time without an answer, a source is dropped.
    pub longest_read: Duration,
    /// Pause after the first failure of a source; doubled for each further one in a row.
    pub backoff: Duration,
    /// Failures in a row after which a source is dropped.
    pub attempts: u32,
    /// Longest time until a stored piece is made durable.
    pub sync: Duration,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            poll: Duration::from_secs(3),
            patience: Duration::from_secs(30),
            stall: Duration::from_secs(5),
            longest_read: Duration::from_secs(120),
            backoff: Duration::from_millis(500),
            attempts: 6,
            sync: Duration::from_secs(2),
        }
    }
}

/// News of a fetch.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// Stored bytes of those that were missing.
    Bytes { done: u64, total: u64 },
    /// A source is no longer used.
    Dropped(&'a Dropped),
    /// Every source has answered, and none has any of the missing pieces at present.
    Waiting { missing: u64 },
}

/// Result of a fetch.
#[derive(Debug)]
pub struct Report {
    /// Received bytes of each source, with those of failed reads.
    pub bytes: Vec<(String, u64)>,
    pub dropped: Vec<Dropped>,
    pub time: Duration,
}

/// Destination of pieces: a [`Part`].
pub(super) trait Sink: Sync {
    fn write(&self, index: u32, bytes: &[u8]) -> Result<(), PartError>;
    fn sync(&self) -> io::Result<()>;
    fn free(&self) -> Option<u64>;
}

impl Sink for Part {
    fn write(&self, index: u32, bytes: &[u8]) -> Result<(), PartError> {
        Part::write(self, index, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        Part::sync(self)
    }

    fn free(&self) -> Option<u64> {
        free_bytes(self.folder()).ok()
    }
}

/// Fetches the wanted pieces that a part lacks.
///
/// # Errors
/// See [`FetchError`]. Pieces that were stored are kept.
pub fn fetch(
    part: &Part,
    wanted: &[Range<u32>],
    sources: Vec<Arc<dyn PieceSource>>,
    options: &FetchOptions,
    news: &(dyn Fn(Progress<'_>) + Sync),
    stop: &AtomicBool,
) -> Result<Report, FetchError> {
    let missing = part.missing(wanted).into_iter().flatten();
    let pieces = missing.filter_map(|index| part.table().piece(index));
    fetch_into(part, pieces.collect(), sources, options, news, stop)
}

pub(super) fn fetch_into(
    sink: &dyn Sink,
    pieces: Vec<Piece>,
    sources: Vec<Arc<dyn PieceSource>>,
    options: &FetchOptions,
    news: &(dyn Fn(Progress<'_>) + Sync),
    stop: &AtomicBool,
) -> Result<Report, FetchError> {
    let begin = Instant::now();
    let (send, receive) = channel();
    let ranks: Vec<Rank> = sources.iter().map(|source| source.rank()).collect();
    let queue = Queue::new(pieces, &ranks, options.seed);
    let free = sink.free();
    if free.is_some_and(|free| free < queue.left()) {
        let needed = queue.left();
        return Err(FetchError::DiskFull { free, needed });
    }
    let mut peers = Vec::new();
    if queue.left() > 0 {
        let each = sources.iter().enumerate();
        let started = each.map(|(at, source)| Peer::start(at, source, &send));
        peers = started
            .collect::<Result<_, _>>()
            .map_err(FetchError::Thread)?;
    }
    let (result, peers) = scope(|scope| {
        let (sync, syncs) = sync_channel::<()>(1);
        let thread = Builder::new().name("part-sync".to_owned());
        let started = thread.spawn_scoped(scope, move || {
            for () in syncs {
                // The receiver is gone if the fetch has ended.
                let _ = send.send(Message::Synced(sink.sync()));
            }
        });
        let mut fetch = Fetch {
            sink,
            queue,
            peers,
            options,
            news,
            stop,
            sync,
            unsynced: 0,
            syncing: false,
            begin,
            synced_at: begin,
            progress_at: begin,
            told_at: begin,
            is_waiting: false,
        };
        let result = match started {
            Ok(_) => fetch.run(&receive),
            Err(error) => Err(FetchError::Thread(error)),
        };
        (result, fetch.peers)
    });
    let synced = sink.sync().map_err(FetchError::Sync);
    result.and(synced)?;
    Ok(Report {
        bytes: peers
            .iter()
            .map(|peer| (peer.name.clone(), peer.bytes))
            .collect(),
        dropped: peers.into_iter().filter_map(|peer| peer.dropped).collect(),
        time: begin.elapsed(),
    })
}

struct Fetch<'a> {
    sink: &'a dyn Sink,
    queue: Queue,
    peers: Vec<Peer>,
    options: &'a FetchOptions,
    news: &'a (dyn Fn(Progress<'_>) + Sync),
    stop: &'a AtomicBool,
    sync: SyncSender<()>,
    /// Bytes stored since the last sync began.
    unsynced: u64,
    syncing: bool,
    begin: Instant,
    synced_at: Instant,
    /// Last time a piece was stored, or a source had a new one.
    progress_at: Instant,
    told_at: Instant,
    is_waiting: bool,
}

impl Fetch<'_> {
    fn run(&mut self, messages: &Receiver<Message>) -> Result<(), FetchError> {
        while self.queue.left() > 0 {
            if self.stop.load(Ordering::Relaxed) {
                return Err(FetchError::Stopped);
            }
            let now = Instant::now();
            for source in 0..self.peers.len() {
                self.attend(source, now);
            }
            self.check_end(now)?;
            match messages.recv_timeout(TICK) {
                Ok(Message::Offer(source, runs)) => self.offered(source, runs),
                Ok(Message::Read(source, lane, bytes)) => self.received(source, lane, bytes)?,
                Ok(Message::Synced(result)) => {
                    self.syncing = false;
                    result.map_err(|error| match is_full(&error) {
                        true => self.full(),
                        false => FetchError::Sync(error),
                    })?;
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            self.begin_sync();
        }
        self.tell_bytes();
        Ok(())
    }

    /// Asks a source for its pieces if it is time, and gives its free lanes something to read.
    fn attend(&mut self, source: usize, now: Instant) {
        let Some(peer) = self.peers.get_mut(source).filter(|peer| peer.is_live()) else {
            return;
        };
        if peer.oldest(now) > self.options.longest_read {
            let error = SourceError::Silent(self.options.longest_read);
            return self.drop_source(source, Why::Failed(error));
        }
        let in_time = peer.has_answered || now.saturating_duration_since(self.begin) < HEAD_START;
        let works = in_time && peer.failures < 2 && peer.oldest(now) <= self.options.stall;
        self.queue.prefer(source, works);
        if now < peer.wait_until {
            return;
        }
        let poll = match self.queue.is_dry(source) {
            true => self.options.poll / 6,
            false => self.options.poll,
        };
        peer.ask(now, poll);
        for lane in 0..peer.lanes.len() {
            self.give(source, lane, now);
        }
    }

    /// Gives a lane the next run, if it is free and there is one.
    fn give(&mut self, source: usize, lane: usize, now: Instant) {
        let Some(peer) = self.peers.get(source).filter(|peer| peer.is_free(lane)) else {
            return;
        };
        let most = peer.pace;
        let mut run = self.queue.take(source, most);
        if run.is_empty() {
            let others = self
                .peers
                .iter()
                .enumerate()
                .filter(|(at, _)| *at != source);
            run = others
                .flat_map(|(_, peer)| peer.stalled(now, self.options.stall))
                .map(|slow| self.queue.take_again(source, slow, most))
                .find(|run| !run.is_empty())
                .unwrap_or_default();
        }
        let pieces: Vec<Piece> = run.iter().filter_map(|&at| self.queue.piece(at)).collect();
        if let Some(peer) = self.peers.get_mut(source).filter(|_| !run.is_empty()) {
            peer.read(lane, Reading { run, since: now }, pieces);
        }
    }

    fn offered(&mut self, source: usize, runs: Result<Vec<Range<u32>>, SourceError>) {
        let now = Instant::now();
        let Some(peer) = self.peers.get_mut(source) else {
            return;
        };
        let since = peer.answered(now, runs.is_ok());
        match runs {
            Ok(runs) => {
                if self.queue.offer(source, runs) {
                    self.progress_at = now;
                }
            }
            Err(error) => self.failed(source, since, error),
        }
    }

    fn received(
        &mut self,
        source: usize,
        lane: usize,
        bytes: Result<Option<Vec<u8>>, SourceError>,
    ) -> Result<(), FetchError> {
        let now = Instant::now();
        let Some(peer) = self.peers.get_mut(source) else {
            return Ok(());
        };
        let received = match &bytes {
            Ok(bytes) => bytes.as_ref().map_or(0, |bytes| bytes.len() as u64),
            Err(error) => error.received(),
        };
        peer.bytes = peer.bytes.saturating_add(received);
        // The reads of a dropped source have been taken back.
        let Some(Reading { run, since }) = peer.end_read(lane) else {
            return Ok(());
        };
        let stored = match bytes {
            Ok(Some(bytes)) => {
                peer.keep_pace(run.len(), now.saturating_duration_since(since));
                // The lane reads on while this thread verifies and stores.
                self.give(source, lane, now);
                self.store(source, &run, &bytes)
            }
            Ok(None) => {
                peer.lacked();
                self.queue.refuse(source, &run);
                let error = "it lacks pieces that it offered".to_owned();
                self.failed(source, since, SourceError::Unavailable(error));
                Ok(())
            }
            Err(error) => {
                self.failed(source, since, error);
                Ok(())
            }
        };
        self.queue.put_back(&run);
        stored
    }

    /// Verifies and stores the pieces of one read.
    fn store(&mut self, source: usize, run: &[usize], bytes: &[u8]) -> Result<(), FetchError> {
        let mut rest = bytes;
        for &at in run {
            let Some(piece) = self.queue.piece(at) else {
                continue;
            };
            let Some((piece_bytes, after)) = rest.split_at_checked(piece.len as usize) else {
                let error = format!("it sent {} bytes for {} pieces", bytes.len(), run.len());
                self.drop_source(source, Why::Failed(SourceError::Unusable(error)));
                return Ok(());
            };
            rest = after;
            if self.queue.is_done(at) {
                continue;
            }
            match self.sink.write(piece.index, piece_bytes) {
                Ok(()) => {}
                Err(PartError::Mismatch(what)) => {
                    self.drop_source(source, Why::Mismatch(what));
                    return Ok(());
                }
                Err(PartError::File(error)) if is_full(&error.source) => return Err(self.full()),
                Err(error) => return Err(error.into()),
            }
            self.queue.done(at);
            self.unsynced += u64::from(piece.len);
            self.progress_at = Instant::now();
            self.is_waiting = false;
        }
        if self.told_at.elapsed() >= NEWS {
            self.told_at = Instant::now();
            self.tell_bytes();
        }
        Ok(())
    }

    /// Counts a failure of a source, and drops the source if it was the last one.
    fn failed(&mut self, source: usize, since: Instant, error: SourceError) {
        let now = Instant::now();
        let options = self.options;
        let Some(peer) = self.peers.get_mut(source).filter(|peer| peer.is_live()) else {
            return;
        };
        // Several lanes notice the same failure.
        if peer.failed_at.is_none_or(|at| since >= at) {
            peer.failures += 1;
            peer.failed_at = Some(now);
        }
        match error.retry_after() {
            Some(least) if peer.failures < options.attempts => {
                let doubled = 1 << (peer.failures - 1).min(10);
                let wait = options.backoff.saturating_mul(doubled).max(least);
                peer.wait_until = peer.wait_until.max(now + wait);
                peer.last_error = Some(error.to_string());
            }
            _ => self.drop_source(source, Why::Failed(error)),
        }
    }

    fn drop_source(&mut self, source: usize, why: Why) {
        if let Some(peer) = self.peers.get_mut(source).filter(|peer| peer.is_live()) {
            let reads = peer.drop_with(why);
            reads.iter().for_each(|run| self.queue.put_back(run));
            self.queue.drop_source(source);
            if let Some(dropped) = &peer.dropped {
                (self.news)(Progress::Dropped(dropped));
            }
        }
    }

    /// Ends the fetch if no source will deliver anything.
    fn check_end(&mut self, now: Instant) -> Result<(), FetchError> {
        if self.peers.iter().any(Peer::is_reading) {
            return Ok(());
        }
        let patience = now.saturating_duration_since(self.progress_at) <= self.options.patience;
        if patience && self.peers.iter().any(Peer::may_deliver) {
            let all_known = self.peers.iter().all(Peer::is_known);
            if all_known && !std::mem::replace(&mut self.is_waiting, true) {
                let missing = self.queue.left();
                (self.news)(Progress::Waiting { missing });
            }
            return Ok(());
        }
        let asked = self.peers.iter().enumerate().map(|(source, peer)| {
            match (&peer.dropped, &peer.last_error) {
                (Some(dropped), _) => dropped.to_string(),
                (None, Some(error)) => format!("{}: {error}", peer.name),
                (None, None) => format!("{} lacks {} bytes", peer.name, self.queue.lacks(source)),
            }
        });
        Err(FetchError::NoSource {
            missing_bytes: self.queue.left(),
            asked: asked.collect(),
        })
    }

    fn begin_sync(&mut self) {
        let due = self.unsynced >= SYNC_BYTES
            || (self.unsynced > 0 && self.synced_at.elapsed() >= self.options.sync);
        if due && !self.syncing && self.sync.try_send(()).is_ok() {
            self.syncing = true;
            self.unsynced = 0;
            self.synced_at = Instant::now();
        }
    }

    fn tell_bytes(&self) {
        let total = self.queue.total();
        let done = total - self.queue.left();
        (self.news)(Progress::Bytes { done, total });
    }

    fn full(&self) -> FetchError {
        FetchError::DiskFull {
            free: self.sink.free(),
            needed: self.queue.left(),
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}
