//! Division of this machine's cores: one for the attackers, which in reality run on another
//! machine, the others for the victim and the honest caller. The measured latency of the honest
//! caller then shows the victim's reaction to the attack, and not the CPU time of the attacker.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    attackers: usize,
}

impl Cores {
    /// Keeps this thread, and all threads and processes that it starts later, off one core, which
    /// is reserved for the attackers. Returns `None` without changes if there is one core only or
    /// the system does not report its cores.
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

    /// Moves this thread, and all that it starts later, to the attackers' core.
    pub(crate) fn attack(self) {
        let mut own = CpuSet::new();
        own.set(self.attackers);
        // If this fails, the measured latencies are higher than the true ones.
        let _ = sched_setaffinity(None, &own);
    }
}
