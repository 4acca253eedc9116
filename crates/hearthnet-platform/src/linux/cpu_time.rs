//! Processor time of the machine and of this process.

use std::fs;

/// Processor time since boot, in ticks of the kernel (usually 10 ms).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Tests elsewhere build it.
pub struct CpuTime {
    /// Ticks of all processors together, idle ones included.
    pub all: u64,
    /// Ticks in which a program or the kernel computed.
    pub busy: u64,
    /// Ticks of this process.
    pub own: u64,
}

/// Current counters; `None` if the system does not report them.
pub fn cpu_time() -> Option<CpuTime> {
    parse(
        &fs::read_to_string("/proc/stat").ok()?,
        &fs::read_to_string("/proc/self/stat").ok()?,
    )
}

/// The formats are those of proc_stat(5) and proc_pid_stat(5).
fn parse(machine: &str, own: &str) -> Option<CpuTime> {
    let line = machine.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Option<Vec<u64>> = line.split_whitespace().map(|n| n.parse().ok()).collect();
    // Later fields are the time of guests, which `user` and `nice` contain.
    let [user, nice, system, idle, wait, irq, softirq, steal, ..] = *ticks? else {
        return None;
    };
    let sum = |ticks: &[u64]| {
        ticks
            .iter()
            .fold(0, |all: u64, one| all.saturating_add(*one))
    };
    // The name in parentheses may contain spaces. User and system time are fields 14 and 15.
    let (_, fields) = own.rsplit_once(") ")?;
    let mut fields = fields.split_whitespace().skip(11);
    let (in_user, in_system): (u64, u64) =
        (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let busy = sum(&[user, nice, system, irq, softirq]);
    Some(CpuTime {
        all: sum(&[busy, idle, wait, steal]),
        busy,
        own: sum(&[in_user, in_system]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "42 (a name) S) S 1 42 42 0 -1 4194560 9 0 0 0 70 30 0 0 20 0 1 0 5 6 7";

    #[test]
    fn own_time_and_that_of_all_are_read() {
        let machine = "cpu  100 20 30 800 40 5 6 9 50 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n";
        let read = parse(machine, OWN).unwrap();
        assert_eq!((read.busy, read.all, read.own), (161, 1010, 100));
        for odd in ["", "cpu", "cpu  1 2 3\n", "cpu  1 2 3 4 5 6 7 x\n"] {
            assert_eq!(parse(odd, OWN), None, "{odd}");
        }
        assert_eq!(parse(machine, "42 (a) S 1"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_takes_part_of_the_time() {
        let read = cpu_time().unwrap();
        assert!(read.own <= read.all && read.busy <= read.all);
    }
}
