//! Batches that form by themselves: chats that want the same kind of work done at the same time
//! have it done at once, by one of them.
//!
//! Weights are read from memory once per batch, whatever its size, and reading them is most of
//! what a row costs. There is no thread for it: a chat that finds nobody at work computes for all
//! whose jobs are there. Jobs that come meanwhile wait; when the work is done the first of them
//! does the same.
//!
//! ```text
//! A: gathers, runs a, b ──────────┐ result to B, "go on" to C
//! B:    waits ....................└►
//! C:              waits ..........└► gathers, runs c, d ──────┐ result to D
//! D:                 waits ...................................└►
//! ```
//!
//! A lone chat runs at once. Beside others it gathers first: rows that a host computed together
//! come one after the other, each brought by its own chat, and to begin without them costs them a
//! whole batch. A batch has the jobs of half the chats at most: these are then with one host while
//! the others are with another. Whoever is in a batch leaves it in a [`WriteBatch`], and so they stay
//! together until they are back here.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::write_batch::WriteBatch;

/// How long a batch waits for the next job of a burst, and how long in all.
const GAP: Duration = Duration::from_micros(100);
const GATHER: Duration = Duration::from_micros(400);

/// Where jobs `J` become results `R`, in batches.
pub(crate) struct Batcher<J, R> {
    queue: Mutex<Queue<J, R>>,
    /// A job has come.
    came: Condvar,
    /// Chats that have jobs now and then.
    present: Arc<AtomicUsize>,
    /// Most jobs of a batch.
    most: usize,
}

/// A chat's presence, for as long as it answers.
#[derive(Debug)]
pub struct Present(Arc<AtomicUsize>);

impl Drop for Present {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Queue<J, R> {
    /// Whether somebody computes, or has been told to.
    taken: bool,
    /// In order of arrival; the first is told to go on when nobody computes.
    waiting: Vec<Waiting<J, R>>,
    /// Whether whoever computes wants to know of jobs that come.
    gathering: bool,
}

struct Waiting<J, R> {
    job: J,
    answer: SyncSender<Turn<R>>,
}

/// What becomes of a job that waits.
enum Turn<R> {
    /// Its chat computes, for itself and whoever else waits.
    GoOn,
    /// Somebody has computed it, and the write batch that it leaves in.
    Done(R, Option<WriteBatch>),
}

impl<J, R> Batcher<J, R> {
    /// For batches of `most` jobs (at least 1).
    pub(crate) fn new(most: usize) -> Self {
        Self {
            queue: Mutex::new(Queue {
                taken: false,
                waiting: Vec::new(),
                gathering: false,
            }),
            came: Condvar::new(),
            present: Arc::default(),
            most: most.max(1),
        }
    }

    /// Says that a chat will have jobs: whoever computes then waits a moment for them.
    pub(crate) fn attend(&self) -> Present {
        self.present.fetch_add(1, Ordering::Relaxed);
        Present(Arc::clone(&self.present))
    }

    /// Has a job done, together with those of other chats. `write_batch`: those whose jobs come at the
    /// same time; `patient`: whether the batch is worth waiting a moment for others. `work` makes
    /// as many results of a batch, in the same order; it may be that of another chat that runs.
    ///
    /// Returns the result, and those that were in the batch; `None` if whoever computed has
    /// panicked. Blocks for as many batches as there are chats before this one.
    pub(crate) fn run(
        &self,
        job: J,
        write_batch: Option<WriteBatch>,
        patient: bool,
        work: impl FnOnce(Vec<J>) -> Vec<R>,
    ) -> Option<(R, Option<WriteBatch>)> {
        let mut queue = self.queue();
        if !queue.taken {
            queue.taken = true;
            drop(queue);
            return self.lead(Some(job), write_batch, patient, work);
        }
        let (answer, turn) = sync_channel(1);
        queue.waiting.push(Waiting { job, answer });
        let gathering = queue.gathering;
        drop(queue);
        drop(write_batch);
        if gathering {
            self.came.notify_one();
        }
        match turn.recv().ok()? {
            Turn::GoOn => self.lead(None, None, patient, work),
            Turn::Done(result, write_batch) => Some((result, write_batch)),
        }
    }

    /// Computes for everybody who waits; `own` comes first, and is the first that waits if it is
    /// not given.
    fn lead(
        &self,
        own: Option<J>,
        write_batch: Option<WriteBatch>,
        patient: bool,
        work: impl FnOnce(Vec<J>) -> Vec<R>,
    ) -> Option<(R, Option<WriteBatch>)> {
        let free = WhenDone(self);
        let queued = usize::from(own.is_none());
        let mut jobs: Vec<J> = own.into_iter().collect();
        let mut answers = Vec::new();
        for waiting in self.gather(1 - queued, write_batch.as_ref(), patient) {
            jobs.push(waiting.job);
            answers.push(waiting.answer);
        }
        drop(write_batch);
        let mut results = work(jobs).into_iter();
        // The next batch does not wait for this one to be handed out.
        drop(free);
        let own = results.next()?;
        // The first answer would be this chat's own, if it was in the queue.
        let others = answers.into_iter().skip(queued);
        let write_batch = (others.len() > 0).then(WriteBatch::default);
        for (answer, result) in others.zip(results) {
            // A chat waits until it is answered.
            let _ = answer.send(Turn::Done(result, write_batch.clone()));
        }
        Some((own, write_batch))
    }

    /// Waits for the jobs of the chats in the same write batch, and a moment for those of others, until there
    /// are those of half the chats, `own` (0 or 1) outside of the queue among them. Takes so many
    /// at most.
    fn gather(
        &self,
        own: usize,
        write_batch: Option<&WriteBatch>,
        patient: bool,
    ) -> Vec<Waiting<J, R>> {
        let half = self.present.load(Ordering::Relaxed).div_ceil(2);
        let enough = half.clamp(1, self.most);
        let began = Instant::now();
        let (mut last, mut jobs) = (began, 0);
        let mut queue = self.queue();
        queue.gathering = true;
        loop {
            let now = queue.waiting.len() + own;
            if now > jobs {
                (last, jobs) = (Instant::now(), now);
            }
            let all_came = write_batch.is_none_or(WriteBatch::is_complete) && last.elapsed() >= GAP;
            if !patient || jobs >= enough || all_came || began.elapsed() >= GATHER {
                queue.gathering = false;
                let taken = now.min(enough) - own;
                return queue.waiting.drain(..taken).collect();
            }
            self.came.wait_for(&mut queue, GAP);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue<J, R>> {
        self.queue.lock()
    }
}

impl<J, R> fmt::Debug for Batcher<J, R> {
    /// Without jobs and results: they are activations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher")
            .field("present", &self.present)
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

/// Lets the next one compute when it goes, whatever became of the work.
struct WhenDone<'a, J, R>(&'a Batcher<J, R>);

impl<J, R> Drop for WhenDone<'_, J, R> {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        match queue.waiting.first() {
            // There is room for one message, and this is the first.
            Some(first) => drop(first.answer.try_send(Turn::GoOn)),
            None => queue.taken = false,
        }
    }
}

#[cfg(test)]
impl<J, R> Batcher<J, R> {
    /// Makes all jobs wait until what is returned is dropped.
    pub(crate) fn keep_busy(&self) -> impl Drop + use<'_, J, R> {
        self.queue().taken = true;
        WhenDone(self)
    }

    /// Jobs that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.queue().waiting.len()
    }

    /// Whether nobody computes and nobody waits.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.queue();
        !queue.taken && queue.waiting.is_empty()
    }
}
