//! A source in a fetch: its threads, and what is known of its answers.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use hearthnet_files::part::Piece;

use super::error::{Dropped, Why};
use super::source::{PieceSource, Rank, SourceError};

/// Most threads that read from one source.
const MAX_LANES: usize = 16;
/// Pieces of the first read.
const FIRST_RUN: usize = 4;
/// A read that takes less time is followed by a longer one, and one that takes `SLOW` by a shorter.
const FAST: Duration = Duration::from_millis(500);
const SLOW: Duration = Duration::from_secs(2);

pub(super) enum Message {
    /// Pieces that a source has.
    Offer(usize, Result<Vec<Range<u32>>, SourceError>),
    /// Source, lane, and result of a read.
    Read(usize, usize, Result<Option<Vec<u8>>, SourceError>),
    Synced(io::Result<()>),
}

/// Read in flight.
pub(super) struct Reading {
    /// Positions in the queue.
    pub(super) run: Vec<usize>,
    pub(super) since: Instant,
}

pub(super) struct Lane {
    jobs: Sender<Vec<Piece>>,
    reading: Option<Reading>,
}

pub(super) struct Peer {
    pub(super) name: String,
    rank: Rank,
    pub(super) lanes: Vec<Lane>,
    questions: Sender<()>,
    /// Begin of the last question for its pieces.
    asked_at: Option<Instant>,
    is_asked: bool,
    /// It has said what it has, and has not contradicted that.
    pub(super) has_answered: bool,
    /// Failures in a row, and the time of the last one.
    pub(super) failures: u32,
    pub(super) failed_at: Option<Instant>,
    pub(super) last_error: Option<String>,
    pub(super) wait_until: Instant,
    /// Pieces of the next read, and most of one.
    pub(super) pace: usize,
    most: usize,
    /// Received bytes.
    pub(super) bytes: u64,
    pub(super) dropped: Option<Dropped>,
}

impl Peer {
    /// Starts the threads of the source with number `at`. They end after their current call when
    /// the peer is dropped.
    pub(super) fn start(
        at: usize,
        source: &Arc<dyn PieceSource>,
        messages: &Sender<Message>,
    ) -> io::Result<Self> {
        let (questions, asked) = channel::<()>();
        let (to, asking) = (messages.clone(), Arc::clone(source));
        let ask = move |()| to.send(Message::Offer(at, asking.pieces())).is_ok();
        start_thread(asked, ask)?;
        let lane = |lane| {
            let (jobs, runs) = channel::<Vec<Piece>>();
            let (to, reading) = (messages.clone(), Arc::clone(source));
            let read = move |run: Vec<Piece>| {
                let bytes = reading.read(&run);
                to.send(Message::Read(at, lane, bytes)).is_ok()
            };
            start_thread(runs, read)?;
            Ok(Lane {
                jobs,
                reading: None,
            })
        };
        let most = usize::try_from(source.run()).unwrap_or(usize::MAX).max(1);
        Ok(Self {
            name: source.name(),
            rank: source.rank(),
            lanes: (0..source.lanes().clamp(1, MAX_LANES))
                .map(lane)
                .collect::<io::Result<_>>()?,
            questions,
            asked_at: None,
            is_asked: false,
            has_answered: false,
            failures: 0,
            failed_at: None,
            last_error: None,
            wait_until: Instant::now(),
            pace: most.min(FIRST_RUN),
            most,
            bytes: 0,
            dropped: None,
        })
    }

    pub(super) fn is_live(&self) -> bool {
        self.dropped.is_none()
    }

    /// Asks the source for its pieces if the last question is older than `poll`.
    pub(super) fn ask(&mut self, now: Instant, poll: Duration) {
        let due = |at: Instant| now.saturating_duration_since(at) >= poll;
        if !self.is_asked && self.asked_at.is_none_or(due) && self.questions.send(()).is_ok() {
            self.is_asked = true;
            self.asked_at = Some(now);
        }
    }

    /// Ends the question for its pieces. Returns its begin.
    pub(super) fn answered(&mut self, now: Instant, well: bool) -> Instant {
        self.is_asked = false;
        self.has_answered |= well;
        self.asked_at.unwrap_or(now)
    }

    pub(super) fn is_free(&self, lane: usize) -> bool {
        let lane = self.lanes.get(lane);
        self.is_live() && lane.is_some_and(|lane| lane.reading.is_none())
    }

    pub(super) fn read(&mut self, lane: usize, reading: Reading, pieces: Vec<Piece>) {
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.reading = Some(reading);
            // If the thread has ended, the read runs into the longest time of an answer.
            let _ = lane.jobs.send(pieces);
        }
    }

    pub(super) fn end_read(&mut self, lane: usize) -> Option<Reading> {
        self.lanes.get_mut(lane)?.reading.take()
    }

    /// Adapts the length of the next read, after one that delivered.
    pub(super) fn keep_pace(&mut self, pieces: usize, time: Duration) {
        self.failures = 0;
        // A lane that notices the failure only now counts it again.
        self.failed_at = None;
        self.last_error = None;
        if time > SLOW {
            self.pace = (pieces / 2).max(1);
        } else if time < FAST && pieces == self.pace {
            self.pace = (self.pace * 2).min(self.most);
        }
    }

    /// Records that the source lacked a piece that it offered. It is asked again what it has, and
    /// for single pieces, because it may have the others of the run.
    pub(super) fn lacked(&mut self) {
        self.pace = 1;
        self.has_answered = false;
        self.asked_at = None;
    }

    fn readings(&self) -> impl Iterator<Item = &Reading> {
        self.lanes.iter().filter_map(|lane| lane.reading.as_ref())
    }

    pub(super) fn is_reading(&self) -> bool {
        self.readings().next().is_some()
    }

    /// Age of the oldest read in flight.
    pub(super) fn oldest(&self, now: Instant) -> Duration {
        let ages = self
            .readings()
            .map(|reading| now.saturating_duration_since(reading.since));
        ages.max().unwrap_or_default()
    }

    /// Runs of reads that have been in flight for longer than `stall`.
    pub(super) fn stalled(
        &self,
        now: Instant,
        stall: Duration,
    ) -> impl Iterator<Item = &Vec<usize>> {
        self.readings()
            .filter(move |reading| now.saturating_duration_since(reading.since) > stall)
            .map(|reading| &reading.run)
    }

    /// Whether the source has said what it has, or why it cannot.
    pub(super) fn is_known(&self) -> bool {
        self.has_answered || self.failures > 0 || !self.is_live()
    }

    /// Whether the source may have more pieces later.
    pub(super) fn may_deliver(&self) -> bool {
        let complete = self.rank != Rank::Neighbour && self.has_answered && self.failures == 0;
        self.is_live() && !complete
    }

    /// Ends the use of the source. Returns the runs in flight.
    pub(super) fn drop_with(&mut self, why: Why) -> Vec<Vec<usize>> {
        self.dropped = Some(Dropped {
            source: self.name.clone(),
            rank: self.rank,
            why,
        });
        let lanes = self.lanes.iter_mut();
        lanes
            .filter_map(|lane| Some(lane.reading.take()?.run))
            .collect()
    }
}

/// Starts a thread that works on each job until `work` returns false.
fn start_thread<T: Send + 'static>(
    jobs: Receiver<T>,
    work: impl Fn(T) -> bool + Send + 'static,
) -> io::Result<()> {
    let thread = Builder::new().name("part-fetch".to_owned());
    let started = thread.spawn(move || {
        for job in jobs {
            if !work(job) {
                return;
            }
        }
    });
    started.map(drop)
}
