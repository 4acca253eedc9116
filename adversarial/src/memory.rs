//! Memory budget of the victim and its measured growth, as the kernel reports it for the process.

use serde::Serialize;

const MIB: u64 = 1 << 20;

/// Memory of one session without a tensor under way: one message of at most 1 MiB and 56 bytes
/// twice (as received, and as handed on), and 0.5 MiB for its tasks and the buffers of TLS and
/// WebSocket (32 KiB read, 64 KiB written, 64 KiB TLS).
const SESSION_BYTES: u64 = 5 * MIB / 2;

/// Growth of a process that the attack does not cause: an allocator arena per thread that was idle
/// until now, and code pages touched for the first time.
const NOISE_BYTES: u64 = 8 * MIB;

/// Maximum growth of the victim, from before the attack to its peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    pub bytes: u64,
    /// Origin of the number.
    pub why: &'static str,
}

impl Budget {
    /// Budget for attacks by one session at a time that never send a tensor: the session itself,
    /// and the previous one while it is closing.
    pub const SESSION: Budget = Budget {
        bytes: NOISE_BYTES + 2 * SESSION_BYTES,
        why: "two sessions without tensors, and 8 MiB of noise",
    };

    /// Budget for attacks by `sessions` sessions at once.
    pub const fn sessions(sessions: u64, why: &'static str) -> Budget {
        let bytes = NOISE_BYTES + sessions * SESSION_BYTES;
        Budget { bytes, why }
    }

    /// Adds the pages of KV that streams of a model take.
    #[must_use]
    pub(crate) const fn plus(self, bytes: u64) -> Budget {
        Budget {
            bytes: self.bytes + bytes,
            why: self.why,
        }
    }

    /// Adds the bytes that the limits allow to attacks which send tensors.
    #[must_use]
    pub const fn and(self, bytes: u64, why: &'static str) -> Budget {
        Budget {
            bytes: self.bytes + bytes,
            why,
        }
    }
}

/// Memory of a process in bytes, from Linux's `/proc/PID/status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Resident now.
    pub(crate) resident: u64,
    /// Highest resident size since the last reset.
    pub(crate) peak: u64,
    /// Private memory that is allocated, touched or not.
    pub(crate) reserved: u64,
}

/// Current memory of a process. `None` without `/proc`.
pub(crate) fn usage(pid: u32) -> Option<Usage> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn parse(status: &str) -> Option<Usage> {
    let field = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some(Usage {
        resident: field("VmRSS:")?,
        peak: field("VmHWM:")?,
        reserved: field("VmData:")?,
    })
}

/// Resets the peak to the currently resident size. If that is not allowed, the peak counts from the
/// start of the process, which only makes the verdict stricter.
pub(crate) fn forget_peak(pid: u32) {
    let _ = std::fs::write(format!("/proc/{pid}/clear_refs"), "5");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_a_process_is_read() {
        let status = "Name:\tx\nVmHWM:\t    4096 kB\nVmRSS:\t    2048 kB\nVmData:\t  512 kB\n";
        let usage = Usage {
            resident: 2 * MIB,
            peak: 4 * MIB,
            reserved: MIB / 2,
        };
        assert_eq!(parse(status), Some(usage));
        assert_eq!(parse("Name:\tx\n"), None);
    }

    #[test]
    fn a_peak_is_seen_after_it_has_passed_and_forgotten_on_demand() {
        let pid = std::process::id();
        let before = usage(pid).unwrap();
        drop(std::hint::black_box(vec![1u8; 64 << 20]));
        let after = usage(pid).unwrap();
        assert!(after.peak >= before.resident + (48 << 20));
        forget_peak(pid);
        assert!(usage(pid).unwrap().peak < after.peak);
    }
}
