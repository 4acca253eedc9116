//! Decides whether this machine serves layers to others now, from readings of the machine and the
//! owner's wishes. Does no I/O and reads no clock; `watch.rs` takes the readings.
//!
//! ```text
//!          paused, quiet hours, battery, in use, memory is short: at once
//!   Serve --------------------------------------------------------------> Pause(why)
//!         <--------------------------------------------------------------
//!          none of them; battery, use and memory: none for 60 s
//! ```

use std::time::Duration;

use hearthnet_platform::cpu_time::CpuTime;
use hearthnet_platform::memory::SharedMemory;

use crate::config::{Manners, QuietHours};
use crate::home::{OwnHours, Paused};

/// Time for which a cause of the machine must be gone before layers are served again.
const CALM: Duration = Duration::from_secs(60);

/// Interval over which the use by other programs is measured. A shorter one would take a moment of
/// work in the background for use.
const USE_INTERVAL: Duration = Duration::from_secs(10);

/// Share of the processor time, in per cent, from which on other programs use the machine.
const IN_USE_PERCENT: u64 = 10;

/// Memory is short if less than one part in so many is available, within the next two bounds.
const SHORT_PART: u64 = 32;
const SHORT_AT_LEAST: u64 = 64 << 20;
const SHORT_AT_MOST: u64 = 512 << 20;

/// Memory is also short if tasks wait for it in more than one part in so many of the time, and less
/// than a quarter of it is available. Tasks also wait at the limit of another control group, where
/// memory of this process does not help them.
const STALLED_PART: u32 = 5;
const STALLED_BELOW_PART: u64 = 4;

/// State of the machine at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Reading {
    /// Time since boot.
    pub(super) up: Duration,
    /// Wall-clock time in ms since 1970.
    pub(super) now_ms: u64,
    /// Local minute of the day, if known.
    pub(super) minute: Option<u16>,
    pub(super) paused: Option<Paused>,
    /// The owner's quiet hours, if they replace the configured ones.
    pub(super) own_hours: Option<OwnHours>,
    pub(super) on_battery: bool,
    pub(super) cpu: Option<CpuTime>,
    pub(super) memory: Vec<SharedMemory>,
    /// Bytes that served layers hold, or held when they were withdrawn.
    pub(super) held_bytes: u64,
}

/// Reason why no layers are served.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Why {
    /// Memory is released at once; callers get no time to finish.
    Memory,
    Paused(Paused),
    QuietHours(QuietHours),
    Battery,
    InUse,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Give {
    Serve,
    Pause(Why),
}

/// Decision over time.
#[derive(Debug)]
pub(super) struct Decision {
    manners: Manners,
    battery: Cause,
    in_use: Cause,
    memory: Cause,
    /// Latest reading whose processor time was compared.
    measured: Option<(Duration, CpuTime)>,
    /// Previous reading of waiting for memory, with its time.
    stalled: (Duration, Vec<Option<Duration>>),
}

impl Decision {
    pub(super) fn new(manners: Manners) -> Self {
        Self {
            battery: Cause::absent(),
            // The use of the machine is not known before it has been measured.
            in_use: Cause::present(),
            memory: Cause::absent(),
            measured: None,
            stalled: (Duration::ZERO, Vec::new()),
            manners,
        }
    }

    /// Decides with a new reading, which is later than those before.
    pub(super) fn step(&mut self, now: &Reading) -> Give {
        let memory = self.memory_is_short(now);
        self.memory.see(now.up, memory);
        self.battery.see(now.up, Some(now.on_battery));
        let used = self.is_used(now);
        self.in_use.see(now.up, used);
        let paused = now.paused.filter(|paused| paused.holds_at(now.now_ms));
        let quiet = match now.own_hours {
            Some(OwnHours(hours)) => hours,
            None => self.manners.quiet_hours,
        };
        let quiet = quiet.filter(|hours| now.minute.is_some_and(|minute| hours.contain(minute)));
        let causes = [
            // First, because it allows the least time.
            self.memory.holds.then_some(Why::Memory),
            paused.map(Why::Paused),
            quiet.map(Why::QuietHours),
            (self.battery.holds && !self.manners.on_battery).then_some(Why::Battery),
            (self.in_use.holds && self.manners.only_when_idle).then_some(Why::InUse),
        ];
        let first = causes.into_iter().flatten().next();
        first.map_or(Give::Serve, Give::Pause)
    }

    /// Whether memory is short anywhere; `None` if it is neither short nor plentiful.
    fn memory_is_short(&mut self, now: &Reading) -> Option<bool> {
        let (since, before) = &self.stalled;
        let elapsed = now.up.saturating_sub(*since);
        let mut plentiful = true;
        let mut short = false;
        for (index, memory) in now.memory.iter().enumerate() {
            let (total, available) = (memory.total_bytes, memory.available_bytes);
            let floor = (total / SHORT_PART).clamp(SHORT_AT_LEAST, SHORT_AT_MOST);
            // A machine smaller than the floor allows serves as well.
            let floor = floor.min(total / STALLED_BELOW_PART);
            let before = before.get(index).copied().flatten();
            let waited = memory.stalled.zip(before);
            let waited = waited.map_or(Duration::ZERO, |(now, then)| now.saturating_sub(then));
            let stalls = waited > elapsed / STALLED_PART;
            short |= available < floor || (stalls && available < total / STALLED_BELOW_PART);
            // If layers are served again, their memory must fit as well.
            let returns = match self.memory.holds {
                true => now.held_bytes,
                false => 0,
            };
            let enough = floor.saturating_mul(2).saturating_add(returns);
            plentiful &= available >= enough && !stalls;
        }
        let stalled = now.memory.iter().map(|memory| memory.stalled).collect();
        self.stalled = (now.up, stalled);
        match (short, plentiful) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    }

    /// Whether other programs have used the machine since the last measurement; `None` until the
    /// next one.
    fn is_used(&mut self, now: &Reading) -> Option<bool> {
        // On a system that does not report it, the machine counts as used.
        let Some(cpu) = now.cpu else {
            return Some(true);
        };
        let Some((since, before)) = self.measured else {
            self.measured = Some((now.up, cpu));
            return None;
        };
        if now.up.saturating_sub(since) < USE_INTERVAL {
            return None;
        }
        self.measured = Some((now.up, cpu));
        let all = cpu.all.saturating_sub(before.all);
        let busy = cpu.busy.saturating_sub(before.busy);
        let others = busy.saturating_sub(cpu.own.saturating_sub(before.own));
        Some(others.saturating_mul(100) >= all.saturating_mul(IN_USE_PERCENT))
    }
}

/// Cause that holds at once, and ends when it has been absent for [`CALM`].
#[derive(Debug)]
struct Cause {
    holds: bool,
    /// Time since which it has been absent, while it still holds.
    absent_since: Option<Duration>,
}

impl Cause {
    fn absent() -> Self {
        Self {
            holds: false,
            absent_since: None,
        }
    }

    fn present() -> Self {
        Self {
            holds: true,
            ..Self::absent()
        }
    }

    /// Takes an observation; `None` neither confirms nor ends it.
    fn see(&mut self, now: Duration, seen: Option<bool>) {
        match seen {
            Some(true) => *self = Self::present(),
            Some(false) if self.holds => {
                let since = *self.absent_since.get_or_insert(now);
                if now.saturating_sub(since) >= CALM {
                    *self = Self::absent();
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Loaded;

    fn decision(sets: &[&str]) -> Decision {
        let sets: Vec<String> = sets.iter().map(|set| format!("manners.{set}")).collect();
        let loaded = Loaded::load(Some("/dev/null".as_ref()), &sets).unwrap();
        Decision::new(loaded.config.manners)
    }

    /// Reading so many seconds after the first, of a machine of 16 GiB with half of it available.
    fn at(seconds: u64) -> Reading {
        Reading {
            up: Duration::from_secs(1000 + seconds),
            now_ms: seconds * 1000,
            minute: Some(12 * 60),
            memory: vec![memory(16 << 30, 8 << 30, 0)],
            ..Reading::default()
        }
    }

    fn memory(total_bytes: u64, available_bytes: u64, stalled_ms: u64) -> SharedMemory {
        SharedMemory {
            total_bytes,
            available_bytes,
            stalled: Some(Duration::from_millis(stalled_ms)),
        }
    }

    #[test]
    fn each_wish_of_the_owner_pauses_by_itself() {
        let until = |until_ms| Paused { until_ms };
        let night = |reading: Reading| Reading {
            minute: Some(3 * 60),
            ..reading
        };
        let paused = |until_ms| Reading {
            paused: Some(until(until_ms)),
            ..at(0)
        };
        let battery = || Reading {
            on_battery: true,
            ..at(0)
        };
        let hours = "quiet_hours=22:00-07:00";
        let quiet = decision(&[hours]).manners.quiet_hours.unwrap();
        let own = |hours| Reading {
            own_hours: Some(OwnHours(hours)),
            ..night(at(0))
        };
        for (sets, reading, expected) in [
            (&[][..], at(0), Give::Serve),
            (&[], night(at(0)), Give::Serve),
            (&[], paused(None), Give::Pause(Why::Paused(until(None)))),
            (
                &[],
                paused(Some(1)),
                Give::Pause(Why::Paused(until(Some(1)))),
            ),
            // The pause is over.
            (&[], paused(Some(0)), Give::Serve),
            (&[hours], at(0), Give::Serve),
            (&[hours], night(at(0)), Give::Pause(Why::QuietHours(quiet))),
            (&[], own(Some(quiet)), Give::Pause(Why::QuietHours(quiet))),
            // The owner's hours replace the configured ones.
            (&[hours], own(None), Give::Serve),
            (&[], battery(), Give::Pause(Why::Battery)),
            (&["on_battery=true"], battery(), Give::Serve),
            (&["only_when_idle=true"], at(0), Give::Pause(Why::InUse)),
        ] {
            let mut decision = decision(sets);
            assert_eq!(decision.step(&reading), expected, "{sets:?} {reading:?}");
        }
    }

    #[test]
    fn a_plug_that_comes_and_goes_does_not_flap() {
        let mut decision = decision(&[]);
        let mut see = |seconds, on_battery| {
            decision.step(&Reading {
                on_battery,
                ..at(seconds)
            })
        };
        let pause = Give::Pause(Why::Battery);
        assert_eq!(see(0, false), Give::Serve);
        assert_eq!(see(1, true), pause);
        assert_eq!(see(2, false), pause);
        assert_eq!(see(61, false), pause);
        assert_eq!(see(61, true), pause);
        assert_eq!(see(63, false), pause);
        assert_eq!(see(122, false), pause);
        assert_eq!(see(123, false), Give::Serve);
    }

    /// Decides each second while other programs and this one take a share of the processor time.
    fn with_load(
        decision: &mut Decision,
        seconds: std::ops::Range<u64>,
        (busy, own): (u64, u64),
        cpu: &mut CpuTime,
    ) -> Give {
        let mut last = Give::Serve;
        for second in seconds {
            cpu.all += 100;
            cpu.busy += busy;
            cpu.own += own;
            last = decision.step(&Reading {
                cpu: Some(*cpu),
                ..at(second)
            });
        }
        last
    }

    #[test]
    fn only_the_use_by_other_programs_counts_and_idleness_must_last() {
        let mut decision = decision(&["only_when_idle=true"]);
        let mut cpu = CpuTime {
            all: 5000,
            busy: 4000,
            own: 7,
        };
        let pause = Give::Pause(Why::InUse);
        let mut load = |seconds, load| with_load(&mut decision, seconds, load, &mut cpu);
        // This process takes 85 % of the time, others 5 %: below the limit.
        assert_eq!(load(0..69, (90, 85)), pause);
        assert_eq!(load(69..82, (90, 85)), Give::Serve);
        // A second of work in the background, within 10 s.
        assert_eq!(load(82..83, (50, 0)), Give::Serve);
        assert_eq!(load(83..102, (90, 85)), Give::Serve);
        assert_eq!(load(102..122, (50, 0)), pause);
        assert_eq!(load(122..182, (5, 5)), pause);
        assert_eq!(load(182..202, (5, 5)), Give::Serve);
    }

    #[test]
    fn a_machine_that_does_not_tell_its_use_counts_as_used() {
        let mut decision = decision(&["only_when_idle=true"]);
        for second in 0..200 {
            assert_eq!(decision.step(&at(second)), Give::Pause(Why::InUse));
        }
    }

    #[test]
    fn short_memory_pauses_at_once_and_the_layers_return_when_they_fit_for_a_minute() {
        let mut decision = decision(&[]);
        let mut see = |seconds, available: u64| {
            decision.step(&Reading {
                memory: vec![memory(16 << 30, available, 0)],
                held_bytes: 4 << 30,
                ..at(seconds)
            })
        };
        let pause = Give::Pause(Why::Memory);
        assert_eq!(see(0, 600 << 20), Give::Serve);
        assert_eq!(see(1, 500 << 20), pause);
        // Released: the layers' memory is free now, but nothing more.
        for second in 2..200 {
            assert_eq!(see(second, (4 << 30) + (500 << 20)), pause);
        }
        assert_eq!(see(200, 6 << 30), pause);
        assert_eq!(see(259, 6 << 30), pause);
        assert_eq!(see(260, 6 << 30), Give::Serve);
    }

    #[test]
    fn tasks_that_wait_for_memory_count_only_where_memory_is_scarce() {
        // Milliseconds of waiting in one second, available GiB of 16, and the decision.
        for (waited, available, expected) in [
            (0, 2, Give::Serve),
            (150, 2, Give::Serve),
            (300, 2, Give::Pause(Why::Memory)),
            (300, 8, Give::Serve),
        ] {
            let mut decision = decision(&[]);
            let read = |seconds, stalled| Reading {
                memory: vec![memory(16 << 30, available << 30, stalled)],
                ..at(seconds)
            };
            // Stalls from before this process started do not count.
            assert_eq!(decision.step(&read(0, 90_000)), Give::Serve);
            let given = decision.step(&read(1, 90_000 + waited));
            assert_eq!(given, expected, "{waited} {available}");
        }
    }

    #[test]
    fn a_full_control_group_counts_as_well_and_a_tiny_machine_may_serve() {
        let mut decision = decision(&[]);
        let group = |available| Reading {
            memory: vec![memory(16 << 30, 8 << 30, 0), memory(2 << 30, available, 0)],
            ..at(0)
        };
        assert_eq!(decision.step(&group(65 << 20)), Give::Serve);
        let given = decision.step(&group(63 << 20));
        assert_eq!(given, Give::Pause(Why::Memory));
        let mut decision = self::decision(&[]);
        let tiny = Reading {
            memory: vec![memory(128 << 20, 50 << 20, 0)],
            ..at(0)
        };
        assert_eq!(decision.step(&tiny), Give::Serve);
        // The system reports no memory.
        let unknown = Reading {
            memory: Vec::new(),
            ..at(1)
        };
        assert_eq!(decision.step(&unknown), Give::Serve);
    }

    #[test]
    fn short_memory_precedes_all_other_reasons() {
        let mut decision = decision(&[]);
        let both = Reading {
            paused: Some(Paused { until_ms: None }),
            memory: vec![memory(16 << 30, 1 << 20, 0)],
            ..at(0)
        };
        assert_eq!(decision.step(&both), Give::Pause(Why::Memory));
    }
}
