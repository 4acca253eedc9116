//! How much of a core the thread gets that runs a team's jobs.
//!
//! Members wait for each other at every phase. Where other work takes nearly all of the cores, each
//! of these waits lasts until the system lets another thread of the process run again, and what
//! little the process gets is lost in waiting: then one thread alone is faster than a team.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// How long jobs are looked at before anything follows from them: many slices of the system's
/// scheduler, and a few steps of a chat.
const WINDOW: Duration = Duration::from_millis(100);
/// A thread that is on a core for less than one part in so many of its jobs is starved. Three
/// processes of two threads each that never rest leave each thread a third on two cores; a group
/// with 6% of the machine has one part in sixteen.
const PARTS: u32 = 6;

/// What a team's jobs of late took, and what the thread that ran them got of a core.
#[derive(Debug, Default)]
pub(super) struct Share {
    wall: Duration,
    on_core: Duration,
    starved: bool,
}

impl Share {
    /// Whether a team would cost more than it brings.
    pub(super) fn starved(&self) -> bool {
        self.starved
    }

    /// Counts a job that took `wall` of time, for `on_core` of which its thread ran.
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

/// The job that the calling thread is about to do.
pub(super) struct Watch {
    wall: Instant,
    on_core: Duration,
}

impl Watch {
    pub(super) fn start() -> Self {
        Self {
            on_core: on_core(),
            wall: Instant::now(),
        }
    }

    /// To be called by the thread that started it.
    pub(super) fn stop(self, share: &mut Share) {
        let wall = self.wall.elapsed();
        share.note(wall, on_core().saturating_sub(self.on_core));
    }
}

/// How long the calling thread has been on a core.
fn on_core() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // A thread's time is never negative.
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hardly_gets_a_core_is_starved_until_it_gets_one_again() {
        let ms = Duration::from_millis;
        let mut share = Share::default();
        for (wall, on_core, starved) in [
            // Not long enough to tell.
            (ms(90), ms(1), false),
            (ms(20), ms(1), true),
            (ms(50), ms(3), true),
            (ms(60), ms(4), true),
            // A busy machine is shared, and no reason to leave anybody out.
            (ms(120), ms(40), false),
            (ms(99), ms(99), false),
            // Stopped for an hour, once.
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
        let watch = Watch::start();
        std::thread::sleep(WINDOW);
        watch.stop(&mut share);
        assert!(share.starved());
    }
}
