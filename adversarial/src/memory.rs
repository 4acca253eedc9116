//! What the victim's memory may grow by, and what it grew by: seen from outside, by what the
//! system says of the process.

use serde::Serialize;

const MIB: u64 = 1 << 20;

/// What one session may hold with no tensor under way: one message of at most 1 MiB and 56 bytes
/// twice (as it arrives, and as it is handed on), and 0.5 MiB for buffers of TLS and WebSocket
/// (32 KiB read, 64 KiB written, 64 KiB TLS) and its tasks.
const SESSION_BYTES: u64 = 5 * MIB / 2;

/// What a process grows by for no reason of the attack: an arena of the allocator per thread
/// that was quiet until now, pages of code that are touched for the first time.
const NOISE_BYTES: u64 = 8 * MIB;

/// Most that the victim may grow by, from before the attack to its peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// In bytes.
    pub bytes: u64,
    /// Where the number comes from.
    pub why: &'static str,
}

impl Budget {
    /// For attacks by one session at a time that never get to send a tensor: the session itself,
    /// and one before it that is still closing.
    pub const SESSION: Budget = Budget {
        bytes: NOISE_BYTES + 2 * SESSION_BYTES,
        why: "two sessions without tensors, and 8 MiB of noise",
    };

    /// For attacks by so many sessions at once.
    pub const fn sessions(sessions: u64, why: &'static str) -> Budget {
        let bytes = NOISE_BYTES + sessions * SESSION_BYTES;
        Budget { bytes, why }
    }

    /// For attacks that get as far as a tensor: with so many bytes of what the limits allow.
    #[must_use]
    pub const fn and(self, bytes: u64, why: &'static str) -> Budget {
        Budget {
            bytes: self.bytes + bytes,
            why,
        }
    }
}

/// Memory of a process, as Linux says it in `/proc/PID/status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Resident now.
    pub(crate) resident: u64,
    /// Most that was ever resident, since it was last reset.
    pub(crate) peak: u64,
    /// Private memory that was asked for, touched or not.
    pub(crate) reserved: u64,
}

/// What a process takes now. `None` where there is no `/proc`.
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

/// Starts the peak anew, at what is resident now. Where that is not allowed the peak goes on from
/// the start of the process, which can only make the verdict stricter.
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
    #[cfg(target_os = "linux")]
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
