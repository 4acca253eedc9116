//! Cores that threads run on.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Runs `act` while this thread is pinned to `core`; a process that it starts inherits the pinning.
///
/// # Errors
/// That of `act`, or the system's when it does not pin the thread.
pub fn on_core<T>(core: Option<usize>, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(core) = core else { return act() };
    let before = sched_getaffinity(None)?;
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(None, &only)?;
    let result = act();
    sched_setaffinity(None, &before)?;
    result
}

/// Cores that this process may run on. Empty if the system does not report them; then nothing is
/// pinned.
pub fn cores() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .collect()
}

/// Core that the calling thread stays on. Two threads that only take turns wake each other several times
/// as fast on one core as on two, of which one sleeps.
#[derive(Debug)]
pub struct SharedCore {
    /// Cores that the thread was allowed; `None` if the system does not report them.
    allowed: Option<CpuSet>,
    core: Option<u32>,
}

impl SharedCore {
    /// For the calling thread, which may run on any of its cores.
    pub fn new() -> Self {
        let allowed = sched_getaffinity(None).ok();
        Self {
            allowed,
            core: None,
        }
    }

    /// Core that the calling thread runs on.
    pub fn current() -> u32 {
        sched_getcpu() as u32
    }

    /// Keeps the calling thread on `core`, if it is allowed there. A failure only costs speed.
    pub fn stay_on(&mut self, core: u32) {
        let allowed = |set: CpuSet| (core as usize) < CpuSet::MAX_CPU && set.is_set(core as usize);
        if self.core != Some(core) && self.allowed.is_some_and(allowed) {
            let mut only = CpuSet::new();
            only.set(core as usize);
            self.core = sched_setaffinity(None, &only).is_ok().then_some(core);
        }
    }

    /// Allows the calling thread all of its cores.
    pub fn leave(&mut self) {
        if let (Some(allowed), Some(_)) = (self.allowed, self.core.take()) {
            let _ = sched_setaffinity(None, &allowed);
        }
    }
}
