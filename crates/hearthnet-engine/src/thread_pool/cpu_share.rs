//! Share of a core that the thread which runs a pool's jobs gets.
//!
//! Threads wait for each other at every phase. If other processes take nearly all of the cores,
//! each wait lasts until the system schedules the next thread of this process, and its little CPU
//! time is lost in waiting. Then a single thread is faster than the pool.

use std::time::{Duration, Instant};

use hearthnet_platform::machine::thread_cpu_time;

/// Job time per decision: many time slices of the scheduler, and a few decode steps.
const WINDOW: Duration = Duration::from_millis(100);
/// A thread is starved if it runs on a core for less than `1 / PARTS` of its job time. For
/// comparison: three busy processes with two threads each leave a thread 1/3 on two cores; a cgroup
/// with 6% of the machine leaves 1/16.
const PARTS: u32 = 6;

/// Wall time and CPU time of a pool's recent jobs.
#[derive(Debug, Default)]
pub(super) struct Share {
    wall: Duration,
    on_core: Duration,
    starved: bool,
}

impl Share {
    /// Whether one thread is faster than the pool, by the last complete window.
    pub(super) fn starved(&self) -> bool {
        self.starved
    }

    /// Runs a job on the calling thread, and records its times.
    pub(super) fn measure(&mut self, job: impl FnOnce()) {
        let on_core = thread_cpu_time();
        let wall = Instant::now();
        job();
        let wall = wall.elapsed();
        self.note(wall, thread_cpu_time().saturating_sub(on_core));
    }

    /// Records a job that took `wall` time, of which its thread ran for `on_core`.
    fn note(&mut self, wall: Duration, on_core: Duration) {
        self.wall += wall;
        self.on_core += on_core;
        if self.wall >= WINDOW {
            let starved = self.wall > self.on_core * PARTS;
            *self = Self {
                starved,
                ..Self::default()
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hardly_gets_a_core_is_starved_until_it_gets_one_again() {
        let ms = Duration::from_millis;
        let mut share = Share::default();
        for (wall, on_core, starved) in [
            // Below the window.
            (ms(90), ms(1), false),
            (ms(20), ms(1), true),
            (ms(50), ms(3), true),
            (ms(60), ms(4), true),
            // A third of a core is not starved.
            (ms(120), ms(40), false),
            (ms(99), ms(99), false),
            // Stopped for an hour once.
            (ms(3_600_000), ms(5), true),
            (ms(100), ms(95), false),
        ] {
            share.note(wall, on_core);
            assert_eq!(share.starved(), starved, "{wall:?} {on_core:?}");
        }
    }

    #[test]
    fn a_thread_that_sleeps_is_on_no_core() {
        let mut share = Share::default();
        share.measure(|| std::thread::sleep(WINDOW));
        assert!(share.starved());
    }
}
