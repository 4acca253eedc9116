//! CPU affinity of the workers of a thread pool: any core except that of the thread that hands them
//! work.
//!
//! The scheduler often puts a woken thread on its waker's core, whose caches are warm. Guest
//! kernels may also do so instead of reclaiming a core that the hypervisor has descheduled. But the
//! caller goes on computing after it wakes a worker, so the worker would only run when the work is
//! done.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Value of `avoided` that matches no core.
const NONE: usize = usize::MAX;

/// Workers of a pool, and the core that is kept clear of them.
#[derive(Debug)]
pub struct WorkerAffinity {
    /// Cores allowed to the thread that created the pool; `None` if the system does not tell.
    allowed: Option<CpuSet>,
    workers: Mutex<Vec<Pid>>,
    /// Core that the workers avoid, or [`NONE`].
    avoided: AtomicUsize,
}

impl Default for WorkerAffinity {
    fn default() -> Self {
        Self {
            allowed: sched_getaffinity(None).ok(),
            workers: Mutex::default(),
            avoided: AtomicUsize::new(NONE),
        }
    }
}

impl WorkerAffinity {
    /// Adds the calling thread.
    pub fn register(&self) {
        let mut workers = self.workers.lock();
        workers.push(gettid());
        self.avoided.store(NONE, Ordering::Relaxed);
    }

    /// Excludes the calling thread's core from the affinity of all workers, if other cores are
    /// allowed. One system call per worker, and only if the caller has moved to another core.
    pub fn avoid_current_core(&self) {
        let here = sched_getcpu();
        if self.avoided.load(Ordering::Relaxed) == here {
            return;
        }
        let workers = self.workers.lock();
        self.avoided.store(here, Ordering::Relaxed);
        if let Some(others) = self.others(here) {
            for worker in &*workers {
                // A failure only costs speed.
                let _ = sched_setaffinity(Some(*worker), &others);
            }
        }
    }

    /// The allowed cores without `here`, or `None` if no core is left.
    fn others(&self, here: usize) -> Option<CpuSet> {
        let mut others = self.allowed?;
        others.unset(here);
        (others.count() > 0).then_some(others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_avoid_the_core_of_the_caller() {
        let affinity = std::sync::Arc::new(WorkerAffinity::default());
        let (known, leave) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                affinity.register();
                known.wait();
                leave.wait();
                sched_getaffinity(None).unwrap()
            });
            known.wait();
            affinity.avoid_current_core();
            let here = affinity.avoided.load(Ordering::Relaxed);
            leave.wait();
            let allowed = sched_getaffinity(None).unwrap();
            let expected = match allowed.count() {
                // A single core is shared.
                1 => allowed,
                _ => {
                    let mut others = allowed;
                    others.unset(here);
                    others
                }
            };
            assert!(here != NONE && worker.join().unwrap() == expected);
        });
    }
}
