//! Where workers run: anywhere but on the core of the thread that they help.
//!
//! Who is woken is often put on its waker's core, where the caches know what it needs; kernels for
//! virtual machines may do so rather than fetch back a core that the machine below has given away.
//! But whoever wakes a worker goes on computing: the worker would get there when the work is done.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// No core has this number.
const NONE: usize = usize::MAX;

/// The workers of a team, and the core that is kept clear of them.
#[derive(Debug)]
pub(super) struct Places {
    /// What the thread that made the team may use; `None`: the system does not say.
    allowed: Option<CpuSet>,
    workers: Mutex<Vec<Pid>>,
    clear: AtomicUsize,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            allowed: sched_getaffinity(None).ok(),
            workers: Mutex::default(),
            clear: AtomicUsize::new(NONE),
        }
    }
}

impl Places {
    /// The calling thread is a worker.
    pub(super) fn enter(&self) {
        let mut workers = self.workers.lock();
        workers.push(gettid());
        self.clear.store(NONE, Ordering::Relaxed);
    }

    /// Keeps workers off the calling thread's core, if there are others. Two system calls per
    /// worker at most, and none as long as the caller stays where it is.
    pub(super) fn clear(&self) {
        let here = sched_getcpu();
        if self.clear.load(Ordering::Relaxed) == here {
            return;
        }
        let workers = self.workers.lock();
        self.clear.store(here, Ordering::Relaxed);
        if let Some(others) = self.others(here) {
            for worker in &*workers {
                // A team whose workers run where they like is slower at worst.
                let _ = sched_setaffinity(Some(*worker), &others);
            }
        }
    }

    /// The cores besides one.
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
    fn workers_may_use_every_core_but_the_one_that_is_kept_clear() {
        let places = std::sync::Arc::new(Places::default());
        let (known, leave) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                places.enter();
                known.wait();
                leave.wait();
                sched_getaffinity(None).unwrap()
            });
            known.wait();
            places.clear();
            let here = places.clear.load(Ordering::Relaxed);
            leave.wait();
            let allowed = sched_getaffinity(None).unwrap();
            let expected = match allowed.count() {
                // Where there is one core, it is shared.
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
