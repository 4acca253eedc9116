//! Memory control groups, and a program that takes much memory in one.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{pid, skipped};

/// Memory control group, removed when dropped.
pub(crate) struct Group {
    folder: PathBuf,
    files: GroupFiles,
}

/// Names of its limit, of its use, and of the use that the kernel drops first.
type GroupFiles = (&'static str, &'static str, &'static str);

/// Root of both versions of the interface.
const ROOT: &str = "/sys/fs/cgroup";
const VERSION_1: GroupFiles = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file ",
);
const VERSION_2: GroupFiles = ("memory.max", "memory.current", "inactive_file ");

/// Folders in which a group may be made: those that contain the group of this process, up to the root of
/// version 2, and then the root of version 1. A user may make groups in a delegated one, whose group must
/// have no processes of its own, such as that of the user's systemd.
fn folders() -> impl Iterator<Item = (PathBuf, GroupFiles)> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = Path::new(ROOT).join(own.unwrap_or_default());
    let up: Vec<PathBuf> = own.ancestors().map(Path::to_owned).collect();
    let up = up.into_iter().filter(|folder| folder.starts_with(ROOT));
    up.map(|folder| (folder, VERSION_2))
        .chain([(Path::new(ROOT).join("memory"), VERSION_1)])
}

impl Group {
    /// New group with a limit. Prints the reason if this machine forbids it.
    pub(crate) fn or_skip(name: &str, limit: u64) -> Option<Self> {
        let name = format!("hearthnet-{}-{name}", std::process::id());
        let mut reasons = Vec::new();
        for (parent, files) in folders() {
            let group = Self {
                folder: parent.join(&name),
                files,
            };
            // Without its interface the folder is not one of control groups, or its parent does
            // not control memory.
            let made = fs::create_dir(&group.folder)
                .and_then(|()| File::options().write(true).open(group.folder.join(files.0)))
                .and_then(|mut file| file.write_all(limit.to_string().as_bytes()))
                // Processes of this group's parent may only enter if the user may write to the parent.
                .and_then(|()| {
                    File::options()
                        .write(true)
                        .open(parent.join("cgroup.procs"))
                });
            match made {
                Ok(_) => return Some(group),
                Err(why) => reasons.push(format!("{}: {why}", group.folder.display())),
            }
        }
        skipped(&format!(
            "no memory control group can be made here ({reasons:?}): be root, or `systemd-run --user \
             --scope cargo test`"
        ));
        None
    }

    fn number(&self, file: &str) -> u64 {
        let text = fs::read_to_string(self.folder.join(file)).expect("a file of the group");
        text.trim().parse().expect("a number")
    }

    /// Bytes that processes of the group can still get.
    pub(crate) fn available(&self) -> u64 {
        let (limit, used, dropped) = self.files;
        let stat =
            fs::read_to_string(self.folder.join("memory.stat")).expect("a file of the group");
        let dropped = stat.lines().find_map(|line| line.strip_prefix(dropped));
        let dropped: u64 = dropped.map_or(0, |bytes| bytes.parse().expect("a number"));
        let used = self.number(used).saturating_sub(dropped);
        self.number(limit).saturating_sub(used)
    }

    pub(crate) fn take(&self, process: u32) {
        let procs = self.folder.join("cgroup.procs");
        fs::write(procs, process.to_string()).expect("the process enters the group");
    }

    /// Program in this group that takes so many bytes of memory and keeps them.
    pub(crate) fn hog(&self, bytes: u64) -> Hog {
        // `tail` keeps the last line, which does not end.
        let line = format!("head -c {bytes} /dev/zero; sleep 1000");
        let enter = "echo $$ > \"$0/cgroup.procs\" && (eval \"$1\") | exec tail";
        let mut command = Command::new("setsid");
        command
            .args(["sh", "-c", enter])
            .arg(&self.folder)
            .arg(line);
        command.stdout(Stdio::null()).stdin(Stdio::null());
        Hog {
            process: command.spawn().expect("a shell"),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes must leave first; those that end do so.
        let procs = fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
        let parent = self.folder.parent().expect("a parent").join("cgroup.procs");
        for process in procs.lines() {
            let _ = fs::write(&parent, process);
        }
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Processes of a hog, a group of their own; killed when dropped.
pub(crate) struct Hog {
    pub(crate) process: Child,
}

impl Drop for Hog {
    fn drop(&mut self) {
        let group = pid(self.process.id());
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.process.wait();
    }
}
