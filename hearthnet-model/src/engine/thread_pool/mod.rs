//! The engine's threads: one team per engine, parked when idle.
//!
//! A *job* is one closure that every member of the team runs. Inside, it calls
//! [`Member::phase`] again and again: a phase is a number of *units* of work, any member may take
//! any unit, and nobody goes on to the next phase before every unit of this one is finished.
//!
//! Phases are counted in units, not in threads: a member that the operating system has not woken
//! yet, or has put aside, is never waited for unless it holds a unit. That is what keeps a step
//! quick when more threads want to run than there are cores (three HearthNet processes on two
//! cores, say). Who takes which unit is chance, so units must write to separate places and
//! compute each value in one way only; then the result does not depend on it.
//!
//! ```text
//! phase 0      1        2
//! |0 1 2 3 c|0 1 2 c|0 1 ..     next: first number that nobody has taken
//!             ^   ^             done: how many are finished
//!          done   next          c: what concludes a phase; it is over when done is beyond c
//! ```
//!
//! Both counters only grow, from job to job as well, so that nothing has to be reset and a late
//! member finds out by comparing two numbers that a phase is over.
//!
//! Waiting means watching a counter for some microseconds ([`SPIN`]) and then sleeping.

mod affinity;
mod cpu_share;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use affinity::Places;
use cpu_share::{Share, Watch};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long a member watches a counter before it sleeps. Phases of a decode step take 2 to 50 µs,
/// waking a sleeper costs about 5 µs of its waker's time and more of its own.
const SPIN: Duration = Duration::from_micros(25);
/// Looks at the counter between two looks at the clock.
const LOOKS: u32 = 32;

/// A fixed number of threads that work on one job at a time.
pub(crate) struct ThreadPool {
    common: Arc<Common>,
    workers: Vec<JoinHandle<()>>,
    /// One job at a time.
    turn: Mutex<Share>,
}

/// One thread's part in a job.
pub(crate) struct Member<'job> {
    common: Option<&'job Common>,
    index: usize,
    /// Number of the first unit of the phase to come.
    base: u64,
}

/// The closure of a job, its lifetime erased.
type Job = &'static (dyn Fn(&mut Member<'_>) + Sync);

#[derive(Default)]
struct Common {
    next: Padded<AtomicU64>,
    done: Padded<AtomicU64>,
    /// Counts jobs, so that idle workers need not lock to look for one.
    jobs: Padded<AtomicU64>,
    /// Workers inside a job.
    active: Padded<AtomicUsize>,
    /// Somebody panicked: everyone leaves the job.
    broken: AtomicBool,
    slot: Mutex<JobSlot>,
    places: Places,
    /// Signals a new job.
    start: Signal,
    /// Signals the end of a phase, or that nobody is active any more.
    progress: Signal,
}

#[derive(Default)]
struct JobSlot {
    job: Option<Job>,
    base: u64,
    stop: bool,
    panic: Option<Box<dyn Any + Send>>,
}

/// Keeps counters that different threads write out of each other's cache line (two lines, since
/// processors fetch them in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

impl ThreadPool {
    /// A team of `threads` members (at least one). The calling thread is one of them, so one less
    /// is started.
    ///
    /// # Errors
    /// When the system refuses a thread.
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

    /// Number of members.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job` on the calling thread and on every worker that is awake in time; on the calling
    /// thread alone while it hardly gets a core ([`Share`]). Jobs of several callers follow one
    /// another.
    ///
    /// # Panics
    /// With the job's own panic, once every member has left the job.
    pub(crate) fn run(&self, job: &(dyn Fn(&mut Member<'_>) + Sync)) {
        if self.workers.is_empty() {
            return alone(job);
        }
        let mut share = self.turn.lock();
        let watch = Watch::start();
        if share.starved() {
            alone(job);
        } else {
            self.together(job);
        }
        watch.stop(&mut share);
    }

    /// Runs `job` on the calling thread and on every worker that is awake in time.
    fn together(&self, job: &(dyn Fn(&mut Member<'_>) + Sync)) {
        let common = &*self.common;
        common.places.clear();
        // SAFETY: the lifetime is erased for as long as the job lies on the slot and somebody is
        // active in it. `Recall` takes it from the slot and waits until nobody is active before
        // this function returns or unwinds, and a worker becomes active only under the slot's
        // lock and while the job lies there. So nobody can run or hold the closure after `job`
        // ends.
        #[allow(unsafe_code)]
        let erased = unsafe { std::mem::transmute::<&(dyn Fn(&mut Member<'_>) + Sync), Job>(job) };
        let base = common.next.0.load(Ordering::Relaxed);
        common.done.0.store(base, Ordering::Relaxed);
        common.broken.store(false, Ordering::Relaxed);
        {
            let mut slot = common.slot();
            slot.job = Some(erased);
            slot.base = base;
            slot.panic = None;
            common.jobs.0.fetch_add(1, Ordering::SeqCst);
        }
        common.start.notify();

        let recall = Recall(common);
        job(&mut Member {
            common: Some(common),
            index: 0,
            base,
        });
        drop(recall);
        let panic = common.slot().panic.take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

/// Runs `job` on the calling thread.
fn alone(job: &(dyn Fn(&mut Member<'_>) + Sync)) {
    job(&mut Member {
        common: None,
        index: 0,
        base: 0,
    });
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.common.slot().stop = true;
        self.common.jobs.0.fetch_add(1, Ordering::SeqCst);
        self.common.start.notify();
        for worker in self.workers.drain(..) {
            // A worker catches what its job throws, so there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl Member<'_> {
    /// Number of this member: 0 is the thread that called [`ThreadPool::run`].
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Does `units` units of work together with the other members, and returns when all are done:
    /// what any member wrote in this phase is then visible to this one.
    ///
    /// Every member must come by the same phases, with the same number of units, in the same order.
    pub(crate) fn phase(&mut self, units: usize, work: impl FnMut(usize)) {
        self.phase_then(units, work, || ());
    }

    /// As [`Self::phase`]; the member that finishes the last unit then runs `conclude`, before
    /// anybody goes on: cheaper than a phase of one unit. At least one unit.
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
        // The last number of a phase is the conclusion's; nobody takes it as a unit.
        let last = base + units as u64;
        let end = last + 1;
        self.base = end;
        let mut conclude = Some(conclude);
        let mut next = common.next.0.load(Ordering::Relaxed);
        while next < last && !common.broken.load(Ordering::Relaxed) {
            // `next` is at least `base`: a member gets here only when the phase before is over.
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
    fn slot(&self) -> MutexGuard<'_, JobSlot> {
        self.slot.lock()
    }

    /// A worker's life.
    fn work(&self, index: usize) {
        self.places.enter();
        let mut seen = 0;
        loop {
            self.start
                .wait(|| self.jobs.0.load(Ordering::SeqCst) != seen);
            let (job, base) = {
                let slot = self.slot();
                if slot.stop {
                    return;
                }
                // Under the lock, so that this is the number of the job on the slot.
                seen = self.jobs.0.load(Ordering::SeqCst);
                let Some(job) = slot.job else { continue };
                self.active.0.fetch_add(1, Ordering::Relaxed);
                (job, slot.base)
            };
            let mut member = Member {
                common: Some(self),
                index,
                base,
            };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(&mut member))) {
                self.slot().panic.get_or_insert(payload);
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

/// Ends a job on every way out of [`ThreadPool::run`].
struct Recall<'a>(&'a Common);

impl Drop for Recall<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.give_up();
        }
        self.0.slot().job = None;
        self.0
            .progress
            .wait(|| self.0.active.0.load(Ordering::Acquire) == 0);
        if self.0.broken.load(Ordering::Relaxed) {
            // Units that were taken and never finished must not be counted in the next job.
            let next = self.0.next.0.load(Ordering::Relaxed);
            self.0.done.0.store(next, Ordering::Relaxed);
        }
    }
}

/// Where members wait for a condition that another member brings about.
#[derive(Default)]
struct Signal {
    sleepers: Padded<AtomicUsize>,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Signal {
    /// Returns once `ready()` holds.
    fn wait(&self, ready: impl Fn() -> bool) {
        if ready() {
            return;
        }
        let begin = Instant::now();
        loop {
            for _ in 0..LOOKS {
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
            self.bell.wait(&mut guard);
        }
        self.sleepers.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes those that wait; to be called after the change that they wait for. Either this sees
    /// the sleeper, or the sleeper, which looks once more after it has made itself known, sees
    /// the change: the two fences order it so.
    fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.0.load(Ordering::SeqCst) > 0 {
            // Not before a sleeper that has looked in vain is really waiting.
            drop(self.lock.lock());
            self.bell.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn teams() -> impl Iterator<Item = ThreadPool> {
        [1, 2, 3, 7]
            .into_iter()
            .map(|threads| ThreadPool::new(threads).unwrap())
    }

    #[test]
    fn every_unit_of_every_phase_is_done_once() {
        for thread_pool in teams() {
            for phases in [0, 1, 5, 200] {
                let counts: Vec<Vec<AtomicUsize>> = (0..phases)
                    .map(|phase| (0..1 + phase % 9).map(|_| AtomicUsize::new(0)).collect())
                    .collect();
                let conclusions = AtomicUsize::new(0);
                thread_pool.run(&|member| {
                    for phase in &counts {
                        let concluded = AtomicUsize::new(0);
                        member.phase_then(
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
        for thread_pool in teams() {
            let cells: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(1)).collect();
            let sums: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(0)).collect();
            thread_pool.run(&|member| {
                for _ in 0..40 {
                    // Relaxed on purpose: it is the phases that must order these.
                    member.phase(sums.len(), |unit| {
                        let sum = cells.iter().fold(unit as u64, |sum, cell| {
                            sum.wrapping_mul(31)
                                .wrapping_add(cell.load(Ordering::Relaxed))
                        });
                        sums[unit].store(sum, Ordering::Relaxed);
                    });
                    member.phase(cells.len(), |unit| {
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
        for thread_pool in teams() {
            let mut total = 0;
            for round in 0..300usize {
                let sum = AtomicUsize::new(0);
                thread_pool.run(&|member| {
                    member.phase(3, |unit| {
                        sum.fetch_add(unit + round, Ordering::Relaxed);
                    });
                });
                total += sum.into_inner();
            }
            assert_eq!(total, 300 * 3 + 3 * (299 * 300 / 2));
        }
    }

    #[test]
    fn a_panic_in_a_unit_reaches_the_caller_and_leaves_the_team_usable() {
        for thread_pool in teams() {
            for bad in 0..5 {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    thread_pool.run(&|member| {
                        member.phase(5, |unit| assert!(unit != bad, "unit {bad}"));
                        member.phase(5, |_| ());
                    });
                }));
                let payload = caught.expect_err("the panic must come through");
                assert_eq!(
                    payload.downcast_ref::<String>().unwrap(),
                    &format!("unit {bad}")
                );
                let sum = AtomicUsize::new(0);
                thread_pool.run(&|member| {
                    member.phase(4, |unit| {
                        sum.fetch_add(unit, Ordering::Relaxed);
                    });
                });
                assert_eq!(sum.into_inner(), 6);
            }
        }
    }

    #[test]
    fn members_are_numbered_from_the_caller_on() {
        for thread_pool in teams() {
            let threads = thread_pool.threads();
            let here = std::thread::current().id();
            thread_pool.run(&|member| {
                assert!(member.index() < threads);
                assert_eq!(member.index() == 0, std::thread::current().id() == here);
            });
        }
    }
}
