//! Thread pool of an engine; its threads are parked when idle.
//!
//! A *job* is a closure that every thread of the pool runs. It calls [`PoolThread::phase`]
//! repeatedly. A phase has a number of *units* of work. Any thread may take any unit, and no thread
//! starts the next phase before all units of this phase are finished.
//!
//! A phase waits for units, not for threads: a thread that the operating system has not woken yet,
//! or has preempted, delays a phase only if it holds a unit. This keeps a step fast when there are
//! more runnable threads than cores (for example three HearthNet processes on two cores). Units are
//! assigned in arbitrary order, so they must write to separate places and compute each value in one
//! way only; then the result does not depend on the assignment.
//!
//! ```text
//! phase 0      1        2
//! |0 1 2 3 c|0 1 2 c|0 1 ..     next: first number not yet taken
//!             ^   ^             done: count of finished numbers
//!          done   next          c: conclusion of a phase, which ends when done is beyond c
//! ```
//!
//! Both counters only grow, across jobs too: they need no reset, and a late thread compares two
//! numbers to see that a phase is over.
//!
//! A waiting thread polls a counter for some microseconds ([`SPIN`]) and then sleeps.

mod cpu_share;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cpu_share::Share;
use hearthnet_platform::affinity::WorkerAffinity;
use parking_lot::{Condvar, Mutex};

/// Polling time before a waiting thread sleeps. Phases of a decode step take 2 to 50 µs; waking a
/// sleeping thread costs its waker about 5 µs, and itself more.
const SPIN: Duration = Duration::from_micros(25);
/// Polls of the counter between two reads of the clock.
const POLLS: u32 = 32;

/// Fixed number of threads that run one job at a time.
pub(crate) struct ThreadPool {
    common: Arc<Common>,
    workers: Vec<JoinHandle<()>>,
    /// Locked during a job, so that jobs of several callers run one after another.
    turn: Mutex<Share>,
}

/// Handle of a thread that takes part in a job.
pub(crate) struct PoolThread<'job> {
    common: Option<&'job Common>,
    index: usize,
    /// Number of the first unit of the next phase.
    base: u64,
}

/// Closure of a job, with its lifetime erased.
type Job = &'static (dyn Fn(&mut PoolThread<'_>) + Sync);

#[derive(Default)]
struct Common {
    next: Padded<AtomicU64>,
    done: Padded<AtomicU64>,
    /// Number of jobs, so that idle workers detect a new job without locking.
    jobs: Padded<AtomicU64>,
    /// Number of workers inside the job.
    active: Padded<AtomicUsize>,
    /// Set when a thread panicked: all threads leave the job.
    broken: AtomicBool,
    slot: Mutex<JobSlot>,
    affinity: WorkerAffinity,
    start: Signal,
    /// Signals the end of a phase, or that no worker is active any more.
    progress: Signal,
}

#[derive(Default)]
struct JobSlot {
    job: Option<Job>,
    base: u64,
    stop: bool,
    panic: Option<Box<dyn Any + Send>>,
}

/// Padding that puts counters of different writers into different cache lines. It takes two lines,
/// because processors fetch them in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

impl ThreadPool {
    /// A pool of `threads` threads (at least 1), including the calling thread: it starts
    /// `threads - 1` workers.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let common = Arc::new(Common::default());
        let mut thread_pool = Self {
            common,
            workers: Vec::new(),
            turn: Mutex::default(),
        };
        for index in 1..threads {
            let common = Arc::clone(&thread_pool.common);
            let thread = std::thread::Builder::new().name(format!("engine-{index}"));
            thread_pool
                .workers
                .push(thread.spawn(move || common.work(index))?);
        }
        Ok(thread_pool)
    }

    /// Number of threads, including the calling thread.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job` on the calling thread and on every worker that wakes in time. If the calling
    /// thread is starved ([`Share`]), runs it on that thread alone. Jobs of several callers run one
    /// after another.
    ///
    /// # Panics
    /// With the job's own panic, after every thread has left the job.
    pub(crate) fn run(&self, job: &(dyn Fn(&mut PoolThread<'_>) + Sync)) {
        if self.workers.is_empty() {
            return alone(job);
        }
        let mut share = self.turn.lock();
        let starved = share.starved();
        share.measure(|| match starved {
            true => alone(job),
            false => self.together(job),
        });
    }

    /// Runs `job` on the calling thread and on every worker that wakes in time.
    fn together(&self, job: &(dyn Fn(&mut PoolThread<'_>) + Sync)) {
        let common = &*self.common;
        common.affinity.avoid_current_core();
        // SAFETY: workers use the closure only while they are active. A worker becomes active only
        // under the slot's lock and while the slot holds the job. Before this function returns or
        // unwinds, `Recall` takes the job from the slot and waits until no worker is active. So no
        // worker holds the closure after the lifetime of `job` ends.
        #[allow(unsafe_code)]
        let erased =
            unsafe { std::mem::transmute::<&(dyn Fn(&mut PoolThread<'_>) + Sync), Job>(job) };
        let base = common.next.0.load(Ordering::Relaxed);
        common.done.0.store(base, Ordering::Relaxed);
        common.broken.store(false, Ordering::Relaxed);
        {
            let mut slot = common.slot.lock();
            slot.job = Some(erased);
            slot.base = base;
            slot.panic = None;
            common.jobs.0.fetch_add(1, Ordering::SeqCst);
        }
        common.start.notify();

        let recall = Recall(common);
        job(&mut PoolThread {
            common: Some(common),
            index: 0,
            base,
        });
        drop(recall);
        let panic = common.slot.lock().panic.take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

fn alone(job: &(dyn Fn(&mut PoolThread<'_>) + Sync)) {
    job(&mut PoolThread {
        common: None,
        index: 0,
        base: 0,
    });
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.common.slot.lock().stop = true;
        self.common.jobs.0.fetch_add(1, Ordering::SeqCst);
        self.common.start.notify();
        for worker in self.workers.drain(..) {
            // Workers catch panics of jobs, so `join` returns no panic to propagate.
            let _ = worker.join();
        }
    }
}

impl PoolThread<'_> {
    /// Index of this thread in the pool; 0 is the thread that called [`ThreadPool::run`].
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Executes `units` units of work together with the other threads, and returns when all are
    /// finished. Everything written in this phase is then visible to this thread.
    ///
    /// Every thread must call the same phases, with the same number of units, in the same order.
    pub(crate) fn phase(&mut self, units: usize, work: impl FnMut(usize)) {
        self.phase_then(units, work, || ());
    }

    /// As [`Self::phase`], but the thread that finishes the last unit runs `conclude` before the
    /// phase ends. This is cheaper than a phase of one unit. `units` must be at least 1.
    pub(crate) fn phase_then(
        &mut self,
        units: usize,
        mut work: impl FnMut(usize),
        conclude: impl FnOnce(),
    ) {
        let Some(common) = self.common else {
            (0..units).for_each(work);
            return conclude();
        };
        if units == 0 {
            return;
        }
        let base = self.base;
        // The last number of a phase stands for its conclusion and is never taken as a unit.
        let last = base + units as u64;
        let end = last + 1;
        self.base = end;
        let mut conclude = Some(conclude);
        let mut next = common.next.0.load(Ordering::Relaxed);
        while next < last && !common.broken.load(Ordering::Relaxed) {
            // `next` is at least `base`, because the previous phase is over.
            match common.next.0.compare_exchange_weak(
                next,
                next + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Err(seen) => next = seen,
                Ok(_) => {
                    work((next - base) as usize);
                    if common.done.0.fetch_add(1, Ordering::AcqRel) + 1 == last {
                        if let Some(conclude) = conclude.take() {
                            conclude();
                        }
                        common.next.0.store(end, Ordering::Relaxed);
                        common.done.0.store(end, Ordering::Release);
                        common.progress.notify();
                    }
                    next = common.next.0.load(Ordering::Relaxed);
                }
            }
        }
        common.progress.wait(|| {
            common.done.0.load(Ordering::Acquire) >= end || common.broken.load(Ordering::Relaxed)
        });
    }
}

impl Common {
    fn work(&self, index: usize) {
        self.affinity.register();
        let mut seen = 0;
        loop {
            self.start
                .wait(|| self.jobs.0.load(Ordering::SeqCst) != seen);
            let (job, base) = {
                let slot = self.slot.lock();
                if slot.stop {
                    return;
                }
                // Read under the lock, so that it belongs to the job on the slot.
                seen = self.jobs.0.load(Ordering::SeqCst);
                let Some(job) = slot.job else { continue };
                self.active.0.fetch_add(1, Ordering::Relaxed);
                (job, slot.base)
            };
            let mut thread = PoolThread {
                common: Some(self),
                index,
                base,
            };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(&mut thread))) {
                self.slot.lock().panic.get_or_insert(payload);
                self.give_up();
            }
            if self.active.0.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.progress.notify();
            }
        }
    }

    fn give_up(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.progress.notify();
    }
}

/// Ends a job on every exit path of [`ThreadPool::together`], including panics.
struct Recall<'a>(&'a Common);

impl Drop for Recall<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.give_up();
        }
        self.0.slot.lock().job = None;
        self.0
            .progress
            .wait(|| self.0.active.0.load(Ordering::Acquire) == 0);
        if self.0.broken.load(Ordering::Relaxed) {
            // Units that were taken but not finished must not count in the next job.
            let next = self.0.next.0.load(Ordering::Relaxed);
            self.0.done.0.store(next, Ordering::Relaxed);
        }
    }
}

/// Condition variable whose waiters spin before they sleep.
#[derive(Default)]
struct Signal {
    sleepers: Padded<AtomicUsize>,
    lock: Mutex<()>,
    condvar: Condvar,
}

impl Signal {
    fn wait(&self, ready: impl Fn() -> bool) {
        if ready() {
            return;
        }
        let begin = Instant::now();
        loop {
            for _ in 0..POLLS {
                std::hint::spin_loop();
                if ready() {
                    return;
                }
            }
            if begin.elapsed() >= SPIN {
                break;
            }
        }
        let mut guard = self.lock.lock();
        self.sleepers.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        while !ready() {
            self.condvar.wait(&mut guard);
        }
        self.sleepers.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes waiting threads; call it after the change that they wait for. The two fences ensure
    /// that either this call sees the sleeper, or the sleeper, which checks the condition again
    /// after it has registered, sees the change.
    fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.0.load(Ordering::SeqCst) > 0 {
            // Waits until a sleeper that has just checked the condition is on the condvar.
            drop(self.lock.lock());
            self.condvar.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pools() -> impl Iterator<Item = ThreadPool> {
        [1, 2, 3, 7]
            .into_iter()
            .map(|threads| ThreadPool::new(threads).unwrap())
    }

    #[test]
    fn every_unit_of_every_phase_is_done_once() {
        for thread_pool in pools() {
            for phases in [0, 1, 5, 200] {
                let counts: Vec<Vec<AtomicUsize>> = (0..phases)
                    .map(|phase| (0..1 + phase % 9).map(|_| AtomicUsize::new(0)).collect())
                    .collect();
                let conclusions = AtomicUsize::new(0);
                thread_pool.run(&|thread| {
                    for phase in &counts {
                        let concluded = AtomicUsize::new(0);
                        thread.phase_then(
                            phase.len(),
                            |unit| {
                                phase[unit].fetch_add(1, Ordering::Relaxed);
                            },
                            || {
                                let all = phase.iter().all(|n| n.load(Ordering::Relaxed) == 1);
                                assert!(all, "the conclusion comes after all units");
                                concluded.fetch_add(1, Ordering::Relaxed);
                            },
                        );
                        conclusions.fetch_add(concluded.into_inner(), Ordering::Relaxed);
                    }
                });
                assert!(
                    counts
                        .iter()
                        .flatten()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
                assert_eq!(conclusions.into_inner(), phases);
            }
        }
    }

    #[test]
    fn a_phase_sees_all_of_the_phase_before() {
        for thread_pool in pools() {
            let cells: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(1)).collect();
            let sums: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(0)).collect();
            thread_pool.run(&|thread| {
                for _ in 0..40 {
                    // Relaxed on purpose: the phases must order these accesses.
                    thread.phase(sums.len(), |unit| {
                        let sum = cells.iter().fold(unit as u64, |sum, cell| {
                            sum.wrapping_mul(31)
                                .wrapping_add(cell.load(Ordering::Relaxed))
                        });
                        sums[unit].store(sum, Ordering::Relaxed);
                    });
                    thread.phase(cells.len(), |unit| {
                        let sum = sums[unit].load(Ordering::Relaxed);
                        cells[unit].store(sum, Ordering::Relaxed);
                    });
                }
            });
            let mut expected = vec![1u64; 16];
            for _ in 0..40 {
                expected = (0..16u64)
                    .map(|unit| {
                        expected
                            .iter()
                            .fold(unit, |sum, cell| sum.wrapping_mul(31).wrapping_add(*cell))
                    })
                    .collect();
            }
            let found: Vec<u64> = cells
                .iter()
                .map(|cell| cell.load(Ordering::Relaxed))
                .collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_job_may_borrow_from_its_caller_and_jobs_follow_each_other() {
        for thread_pool in pools() {
            let mut total = 0;
            for round in 0..300usize {
                let sum = AtomicUsize::new(0);
                thread_pool.run(&|thread| {
                    thread.phase(3, |unit| {
                        sum.fetch_add(unit + round, Ordering::Relaxed);
                    });
                });
                total += sum.into_inner();
            }
            assert_eq!(total, 300 * 3 + 3 * (299 * 300 / 2));
        }
    }

    #[test]
    fn a_panic_in_a_unit_reaches_the_caller_and_leaves_the_pool_usable() {
        for thread_pool in pools() {
            for bad in 0..5 {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    thread_pool.run(&|thread| {
                        thread.phase(5, |unit| assert!(unit != bad, "unit {bad}"));
                        thread.phase(5, |_| ());
                    });
                }));
                let payload = caught.expect_err("the panic must come through");
                assert_eq!(
                    payload.downcast_ref::<String>().unwrap(),
                    &format!("unit {bad}")
                );
                let sum = AtomicUsize::new(0);
                thread_pool.run(&|thread| {
                    thread.phase(4, |unit| {
                        sum.fetch_add(unit, Ordering::Relaxed);
                    });
                });
                assert_eq!(sum.into_inner(), 6);
            }
        }
    }

    #[test]
    fn pool_threads_are_numbered_from_the_caller_on() {
        for thread_pool in pools() {
            let threads = thread_pool.threads();
            let here = std::thread::current().id();
            thread_pool.run(&|thread| {
                assert!(thread.index() < threads);
                assert_eq!(thread.index() == 0, std::thread::current().id() == here);
            });
        }
    }
}
