//! The cores of this machine, divided: one for the attackers, who in truth are another machine, the
//! others for the victim and the honest caller. How long that caller waits then tells what the
//! victim makes of an attack, and not what the attacker's own work takes.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How the cores are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    attackers: usize,
}

impl Cores {
    /// Keeps this thread, and all threads and processes that it starts from now on, off one core,
    /// which is the attackers'. `None`, and nothing done, where there is one core only or where the
    /// system does not tell.
    pub fn divide() -> Option<Cores> {
        let mut cores = sched_getaffinity(None).ok()?;
        let attackers = (0..CpuSet::MAX_CPU)
            .rev()
            .find(|&core| cores.is_set(core))?;
        cores.unset(attackers);
        if cores.count() == 0 {
            return None;
        }
        sched_setaffinity(None, &cores).ok()?;
        Some(Cores { attackers })
    }

    /// From now on this thread, and what it starts, has the attackers' core.
    pub(crate) fn attack(self) {
        let mut own = CpuSet::new();
        own.set(self.attackers);
        // Where it fails the latencies look worse than they are.
        let _ = sched_setaffinity(None, &own);
    }
}
