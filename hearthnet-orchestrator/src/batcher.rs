//! Batches that form by themselves: chats that want the same kind of work done at the same time
//! have it done at once.
//!
//! Weights are read from memory once per batch, whatever its size, and reading them is most of
//! what a row costs. The first chat that comes while nothing is computed *leads*: it waits for a
//! [boundary](crate::steps), by which everybody who was ready has come as well, and has computed
//! for all. Jobs that come meanwhile wait; then the first of them leads.
//!
//! ```text
//! A: boundary, runs a, b ──────────┐ result to B, "lead" to C
//! B:    waits .....................└►
//! C:              waits ...........└► boundary, runs c, d ──────┐ result to D
//! D:                 waits .....................................└►
//! ```
//!
//! A batch has the jobs of half the chats at most: these are then with one host while the others
//! are with another. Chats that no host computes for have nobody to alternate with, and are taken
//! all at once. The results of a batch come at once, so that those who were in it stay together.
//!
//! A lone chat computes on its own thread; among others a batch is computed on another one, for
//! meanwhile the loop passes their rows on from host to host.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::steps;

/// Where jobs `J` become results `R`, in batches.
pub(crate) struct Batcher<J, R> {
    queue: Mutex<Queue<J, R>>,
    /// Twice the most jobs that a batch has, as far as it follows from who is there.
    halves: Arc<AtomicUsize>,
    /// Most jobs of a batch.
    most: usize,
}

/// A chat's presence, for as long as it answers.
#[derive(Debug)]
pub struct Present {
    halves: Arc<AtomicUsize>,
    own: usize,
}

impl Drop for Present {
    fn drop(&mut self) {
        self.halves.fetch_sub(self.own, Ordering::Relaxed);
    }
}

struct Queue<J, R> {
    /// Whether somebody leads, or has been told to.
    taken: bool,
    /// Jobs of the batch that is computed.
    computed: usize,
    /// In order of arrival. Whoever leads is the first.
    waiting: VecDeque<Waiting<J, R>>,
}

struct Waiting<J, R> {
    job: J,
    /// `None` for whoever leads.
    answer: Option<oneshot::Sender<Turn<R>>>,
}

/// What becomes of a job that waits.
enum Turn<R> {
    /// Its chat leads.
    Lead,
    /// Somebody has computed it.
    Done(R),
}

impl<J: Send + 'static, R: Send + 'static> Batcher<J, R> {
    /// For batches of `most` jobs (at least 1).
    pub(crate) fn new(most: usize) -> Self {
        Self {
            queue: Mutex::new(Queue {
                taken: false,
                computed: 0,
                waiting: VecDeque::new(),
            }),
            halves: Arc::default(),
            most: most.max(1),
        }
    }

    /// Says that a chat will have jobs: how many a batch has follows from who is there. `hosted`:
    /// whether it is with hosts in between.
    pub(crate) fn attend(&self, hosted: bool) -> Present {
        let own = if hosted { 1 } else { 2 };
        self.halves.fetch_add(own, Ordering::Relaxed);
        Present {
            halves: Arc::clone(&self.halves),
            own,
        }
    }

    /// Has a job done, together with those of other chats. `work` makes as many results of a
    /// batch, in the same order; it may be that of another chat that runs.
    ///
    /// Returns the result; `None` if whoever computed has panicked. Takes as many batches as there
    /// are chats before this one.
    pub(crate) async fn run(
        &self,
        job: J,
        work: impl FnOnce(Vec<J>) -> Vec<R> + Send + 'static,
    ) -> Option<R> {
        let turn = self.wait_for_turn(job);
        if let Some(turn) = turn
            && let Turn::Done(result) = turn.await.ok()?
        {
            return Some(result);
        }
        let next = WhenDone(self);
        steps::boundary().await;
        let (jobs, answers) = self.take();
        let results = if steps::is_alone() {
            work(jobs)
        } else {
            let work = tokio::task::spawn_blocking(move || work(jobs));
            work.await.ok()?
        };
        drop(next);
        let mut results = results.into_iter();
        let own = results.next()?;
        for (answer, result) in answers.into_iter().zip(results) {
            // A chat waits until it is answered.
            let _ = answer.send(Turn::Done(result));
        }
        Some(own)
    }

    /// What a job's chat waits for, or nothing if it leads.
    fn wait_for_turn(&self, job: J) -> Option<oneshot::Receiver<Turn<R>>> {
        let mut queue = self.queue.lock();
        let (answer, turn) = match std::mem::replace(&mut queue.taken, true) {
            true => Some(oneshot::channel()).unzip(),
            false => (None, None),
        };
        queue.waiting.push_back(Waiting { job, answer });
        turn
    }

    /// The jobs of the next batch, the leader's first, and who waits for the others.
    fn take(&self) -> (Vec<J>, Vec<oneshot::Sender<Turn<R>>>) {
        let enough = self.halves.load(Ordering::Relaxed).div_ceil(2);
        let mut queue = self.queue.lock();
        let count = enough.clamp(1, self.most).min(queue.waiting.len());
        queue.computed = count;
        let (mut jobs, mut answers) = (Vec::with_capacity(count), Vec::new());
        for waiting in queue.waiting.drain(..count) {
            jobs.push(waiting.job);
            answers.extend(waiting.answer);
        }
        (jobs, answers)
    }

    /// Jobs that wait or are computed.
    pub(crate) fn asking(&self) -> usize {
        let queue = self.queue.lock();
        queue.computed + queue.waiting.len()
    }
}

impl<J, R> fmt::Debug for Batcher<J, R> {
    /// Without jobs and results: they are activations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher")
            .field("halves", &self.halves)
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

/// Lets the next one lead when it goes, whatever became of the work.
struct WhenDone<'a, J, R>(&'a Batcher<J, R>);

impl<J, R> Drop for WhenDone<'_, J, R> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        queue.computed = 0;
        while let Some(first) = queue.waiting.front_mut() {
            let told = first.answer.take().map(|answer| answer.send(Turn::Lead));
            if matches!(told, Some(Ok(()))) {
                return;
            }
            // Its chat is gone.
            queue.waiting.pop_front();
        }
        queue.taken = false;
    }
}

#[cfg(test)]
impl<J, R> Batcher<J, R> {
    /// Makes all jobs wait until what is returned is dropped.
    pub(crate) fn keep_busy(&self) -> impl Drop + use<'_, J, R> {
        self.queue.lock().taken = true;
        WhenDone(self)
    }

    /// Whether nobody computes and nobody waits.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.queue.lock();
        !queue.taken && queue.waiting.is_empty()
    }
}
