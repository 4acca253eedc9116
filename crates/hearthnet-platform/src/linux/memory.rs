//! Memory that this process shares with other programs: the machine's, and that of the control
//! groups around this process.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::bytes;

/// Mount point of control groups.
const GROUPS: &str = "/sys/fs/cgroup";

/// Memory of the machine, or of a control group with a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Tests elsewhere build it.
pub struct SharedMemory {
    pub total_bytes: u64,
    /// Bytes that programs can still get without swapping.
    pub available_bytes: u64,
    /// Total time in which at least one task waited for memory (`some` of pressure stall
    /// information). `None` if the kernel does not measure it.
    pub stalled: Option<Duration>,
}

/// The machine's memory, then that of each control group around this process that has a smaller
/// limit. Empty if the system reports nothing.
pub fn shared_memory() -> Vec<SharedMemory> {
    let read = |path: &Path| fs::read_to_string(path).ok();
    let pressure = read(Path::new("/proc/pressure/memory"));
    let info = read(Path::new("/proc/meminfo"));
    let Some(machine) = info.and_then(|info| machine(&info, pressure.as_deref())) else {
        return Vec::new();
    };
    let lines = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let groups = folders(&lines).into_iter().filter_map(|(folder, files)| {
        let text = |name: &str| read(&folder.join(name));
        group(
            files,
            [
                &text(files.limit)?,
                &text(files.used)?,
                &text("memory.stat")?,
            ],
            text("memory.pressure").as_deref(),
        )
    });
    let smaller = groups.filter(|group| group.total_bytes < machine.total_bytes);
    [machine].into_iter().chain(smaller).collect()
}

/// Names of a control group's files, which differ between the versions of the interface.
#[derive(Debug, Clone, Copy)]
struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Entry of `memory.stat`: content of files that the kernel drops first.
    reclaimable: &'static str,
}

const V2: GroupFiles = GroupFiles {
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file",
};

const V1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

/// Folders of the control groups that limit this process's memory, from the innermost outwards.
/// `lines` is `/proc/self/cgroup`.
fn folders(lines: &str) -> Vec<(PathBuf, GroupFiles)> {
    let mut found = Vec::new();
    for line in lines.lines() {
        // ID:CONTROLLERS:PATH; version 2 has the id 0 and names no controllers.
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let (root, files) = match controllers {
            "" if id == "0" => (PathBuf::from(GROUPS), V2),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (Path::new(GROUPS).join("memory"), V1)
            }
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        // A group outside of the namespace of this process has a path that begins with `..`.
        if !path.components().any(|part| part.as_os_str() == "..") {
            found.extend(path.ancestors().map(|group| (root.join(group), files)));
        }
    }
    found
}

/// `info` is `/proc/meminfo`, `pressure` is `/proc/pressure/memory`.
fn machine(info: &str, pressure: Option<&str>) -> Option<SharedMemory> {
    Some(SharedMemory {
        total_bytes: bytes(info, "MemTotal")?,
        available_bytes: bytes(info, "MemAvailable")?,
        stalled: pressure.and_then(stalled),
    })
}

/// Memory of a control group; `None` without a limit.
fn group(
    files: GroupFiles,
    [limit, used, stat]: [&str; 3],
    pressure: Option<&str>,
) -> Option<SharedMemory> {
    // Without a limit version 2 says `max`.
    let total_bytes: u64 = limit.trim().parse().ok()?;
    let used: u64 = used.trim().parse().ok()?;
    let entry = |line: &str| line.strip_prefix(files.reclaimable)?.trim().parse().ok();
    let reclaimable: u64 = stat.lines().find_map(entry).unwrap_or(0);
    Some(SharedMemory {
        total_bytes,
        available_bytes: total_bytes.saturating_sub(used.saturating_sub(reclaimable)),
        stalled: pressure.and_then(stalled),
    })
}

/// Time of the line `some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS`.
fn stalled(pressure: &str) -> Option<Duration> {
    let some = pressure.lines().find(|line| line.starts_with("some "))?;
    let mut fields = some.split_whitespace();
    let total = fields.find_map(|field| field.strip_prefix("total="))?;
    Some(Duration::from_micros(total.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRESSURE: &str = "some avg10=1.53 avg60=0.40 avg300=0.10 total=2500000\n\
                            full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";

    #[test]
    fn the_machine_is_read_from_meminfo_and_pressure() {
        let info = "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n";
        let read = machine(info, Some(PRESSURE)).unwrap();
        assert_eq!(
            (read.total_bytes, read.available_bytes),
            (16 << 20, 2 << 20)
        );
        assert_eq!(read.stalled, Some(Duration::from_millis(2500)));
        assert_eq!(machine(info, None).unwrap().stalled, None);
        assert_eq!(machine("MemTotal: 5 kB\n", Some(PRESSURE)), None);
    }

    #[test]
    fn odd_pressure_is_no_measurement() {
        for odd in [
            "",
            "some",
            "some total=",
            "some total=-1",
            "full avg10=0 total=5",
        ] {
            assert_eq!(stalled(odd), None, "{odd}");
        }
    }

    #[test]
    fn groups_of_both_versions_are_found_from_the_innermost_outwards() {
        let paths = |lines: &str| -> Vec<String> {
            let found = folders(lines).into_iter();
            found
                .map(|(folder, _)| folder.display().to_string())
                .collect()
        };
        assert_eq!(
            paths("0::/user.slice/hearthnet.service\n"),
            [
                "/sys/fs/cgroup/user.slice/hearthnet.service",
                "/sys/fs/cgroup/user.slice",
                "/sys/fs/cgroup/",
            ]
        );
        assert_eq!(
            paths("5:devices:/\n4:cpu,memory:/a\n"),
            ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory/"]
        );
        assert!(paths("0::/../../elsewhere\nnonsense\n1:memory\n").is_empty());
    }

    #[test]
    fn files_that_the_kernel_drops_first_count_as_available() {
        let of = |limit, stat| group(V2, [limit, "300\n", stat], Some(PRESSURE));
        let read = of("1000\n", "anon 150\ninactive_file 100\n").unwrap();
        assert_eq!((read.total_bytes, read.available_bytes), (1000, 800));
        assert!(read.stalled.is_some());
        assert_eq!(of("1000", "").unwrap().available_bytes, 700);
        // More may be used than a limit that was lowered allows.
        assert_eq!(of("100", "").unwrap().available_bytes, 0);
        assert_eq!(of("max\n", ""), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_memory() {
        let all = shared_memory();
        let machine = all.first().unwrap();
        assert!(machine.available_bytes > 0 && machine.available_bytes <= machine.total_bytes);
        assert!(
            all.iter()
                .skip(1)
                .all(|group| group.total_bytes < machine.total_bytes)
        );
    }
}
