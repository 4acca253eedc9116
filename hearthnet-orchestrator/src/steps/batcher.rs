//! Batches of jobs that several chats submit at the same time.
//!
//! Weights are read from memory once per batch, whatever its size, and reading them is most of the
//! cost of a row. While no batch runs, the first chat to submit a job becomes the *leader*. It
//! waits for a [boundary](super::chat_loop), by which all ready chats have submitted theirs, then
//! [a little longer](GATHER) if the batch is not full, and runs the batch for all. Jobs submitted
//! meanwhile wait; the first of them leads the next batch.
//!
//! ```text
//! A: boundary, runs a, b ──────────┐ result to B, "lead" to C
//! B:    waits .....................└►
//! C:              waits ...........└► boundary, runs c, d ──────┐ result to D
//! D:                 waits .....................................└►
//! ```
//!
//! A batch takes the jobs of at most half of the hosted chats, so that hosts compute for one half
//! while this machine computes for the other. Chats without hosts do not alternate, and are all
//! taken. The results of a batch are delivered together, so that its chats stay in step.
//!
//! A lone chat computes on its own thread. A batch of several chats runs on a blocking thread, so
//! that the loop can forward rows between hosts meanwhile.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::steps::chat_loop;

/// How long a leader waits for a full batch; tokio's timer may add a millisecond. The rows of hosts arrive a few hundred microseconds
/// apart. Without a wait, groups of chats that once fell apart stay apart: their batches are small,
/// here and at the hosts.
const GATHER: Duration = Duration::from_millis(1);

/// Runs jobs `J` in batches, with results `R`.
pub(crate) struct Batcher<J, R> {
    queue: Mutex<Queue<J, R>>,
    /// Sum of attendance weights (1 per hosted chat, 2 per local one); a batch takes half of it,
    /// rounded up.
    attendance: Arc<AtomicUsize>,
    /// Maximum number of jobs per batch.
    most: usize,
    /// Notified of each job.
    submitted: Notify,
}

/// Attendance of a chat during a call.
#[derive(Debug)]
pub struct AttendanceGuard {
    attendance: Arc<AtomicUsize>,
    own: usize,
}

impl Drop for AttendanceGuard {
    fn drop(&mut self) {
        self.attendance.fetch_sub(self.own, Ordering::Relaxed);
    }
}

struct Queue<J, R> {
    /// True while there is a leader.
    has_leader: bool,
    /// Jobs of the running batch.
    computed: usize,
    /// Waiting jobs in order of arrival; the leader's is the first.
    waiting: VecDeque<Waiting<J, R>>,
}

struct Waiting<J, R> {
    job: J,
    /// `None` for the leader.
    answer: Option<oneshot::Sender<Turn<R>>>,
}

/// Outcome for a waiting job.
enum Turn<R> {
    /// The chat of the job becomes the leader.
    Lead,
    /// Another leader has computed it.
    Done(R),
}

impl<J: Send + 'static, R: Send + 'static> Batcher<J, R> {
    /// Creates a batcher for batches of at most `most` jobs (at least 1).
    pub(crate) fn new(most: usize) -> Self {
        Self {
            queue: Mutex::new(Queue {
                has_leader: false,
                computed: 0,
                waiting: VecDeque::new(),
            }),
            attendance: Arc::default(),
            most: most.max(1),
            submitted: Notify::new(),
        }
    }

    /// Registers a chat that will submit jobs, which determines the batch size. `hosted`: hosts
    /// compute between its jobs.
    pub(crate) fn attend(&self, hosted: bool) -> AttendanceGuard {
        let own = if hosted { 1 } else { 2 };
        self.attendance.fetch_add(own, Ordering::Relaxed);
        AttendanceGuard {
            attendance: Arc::clone(&self.attendance),
            own,
        }
    }

    /// Runs a job together with those of other chats. `work` returns one result per job of a batch,
    /// in the same order; the `work` of another chat may run instead.
    ///
    /// Returns `None` if the leader has panicked. A job waits for at most as many batches as there
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
        chat_loop::boundary().await;
        if !chat_loop::is_alone() && !self.is_full() {
            let _ = timeout(GATHER, self.full()).await;
        }
        let (jobs, answers) = self.take();
        let results = if chat_loop::is_alone() {
            work(jobs)
        } else {
            let work = tokio::task::spawn_blocking(move || work(jobs));
            work.await.ok()?
        };
        drop(next);
        let mut results = results.into_iter();
        let own = results.next()?;
        for (answer, result) in answers.into_iter().zip(results) {
            // The chat may have been cancelled.
            let _ = answer.send(Turn::Done(result));
        }
        Some(own)
    }

    /// Queues a job. Returns its receiver, or `None` if its chat leads.
    fn wait_for_turn(&self, job: J) -> Option<oneshot::Receiver<Turn<R>>> {
        let mut queue = self.queue.lock();
        let (answer, turn) = match std::mem::replace(&mut queue.has_leader, true) {
            true => Some(oneshot::channel()).unzip(),
            false => (None, None),
        };
        queue.waiting.push_back(Waiting { job, answer });
        self.submitted.notify_one();
        turn
    }

    /// Jobs of a full batch.
    fn enough(&self) -> usize {
        let enough = self.attendance.load(Ordering::Relaxed).div_ceil(2);
        enough.clamp(1, self.most)
    }

    fn is_full(&self) -> bool {
        self.queue.lock().waiting.len() >= self.enough()
    }

    /// Waits until enough jobs wait.
    async fn full(&self) {
        while !self.is_full() {
            self.submitted.notified().await;
        }
    }

    /// Takes the next batch: its jobs, the leader's first, and the senders of the others.
    fn take(&self) -> (Vec<J>, Vec<oneshot::Sender<Turn<R>>>) {
        let enough = self.enough();
        let mut queue = self.queue.lock();
        let count = enough.min(queue.waiting.len());
        queue.computed = count;
        let (mut jobs, mut answers) = (Vec::with_capacity(count), Vec::new());
        for waiting in queue.waiting.drain(..count) {
            jobs.push(waiting.job);
            answers.extend(waiting.answer);
        }
        (jobs, answers)
    }

    /// Jobs that wait or run.
    pub(crate) fn asking(&self) -> usize {
        let queue = self.queue.lock();
        queue.computed + queue.waiting.len()
    }
}

impl<J, R> fmt::Debug for Batcher<J, R> {
    /// Omits jobs and results, which are activations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher")
            .field("attendance", &self.attendance)
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

/// Makes the next waiting job the leader when dropped, even after a panic.
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
        queue.has_leader = false;
    }
}

#[cfg(test)]
impl<J, R> Batcher<J, R> {
    /// Blocks all jobs until the returned guard is dropped.
    pub(crate) fn keep_busy(&self) -> impl Drop + use<'_, J, R> {
        self.queue.lock().has_leader = true;
        WhenDone(self)
    }

    /// Returns true if no job runs or waits.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.queue.lock();
        !queue.has_leader && queue.waiting.is_empty()
    }
}
