//! Sandbox of a daemon: it can read only the files it needs, write its own, and cannot start or
//! inspect processes. A command that reads an untrusted model file can access only that file, and
//! no network.
//!
//! An attacker who takes over the daemon gets no further access. Best effort: if the kernel lacks a
//! feature, the rest still applies, and the log, `status` and `diagnose` report the gap. The
//! sandbox binds the calling thread and the threads that it starts, so [`enter`] runs before any
//! other thread exists. `specs/isolation.md` lists the remaining access of each process.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use hearthnet_bus::whole_file;
use hearthnet_files::manifest::record_key;
use hearthnet_hub::ModelRef;
use hearthnet_hub::reference::expand_home;
use landlock::{
    ABI, Access as _, AccessFs, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetError,
    RulesetStatus, Scope, path_beneath_rules,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

use crate::cli::args::Serves;
use crate::config::{Context, default_path};
use crate::hosting::host_engine::may_use_cards;
use crate::models::catalogue::models_dir;

/// Sandbox of this process, as text.
static STANDS: OnceLock<String> = OnceLock::new();

/// Sandbox of this process, as text.
pub(crate) fn stands() -> &'static str {
    STANDS.get().map_or("nothing", String::as_str)
}

/// Sandboxes a daemon irrevocably, according to `serves`.
pub(crate) fn enter(cx: &Context, serves: Serves<'_>) {
    let model = serves.model.cloned().or_else(|| cx.config.model.default());
    let mut needed = Needed::of(cx, model.as_ref());
    if may_use_cards(serves.engine, &cx.config) {
        needed.cards();
    }
    // Keeps other processes of this user from reading the daemon's memory, which holds keys and
    // prompts.
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let parts = [
        ("files", needed.restrict()),
        ("system calls", deny_system_calls(&SOCKETS)),
        ("memory", hidden.map_err(|e| e.to_string())),
    ];
    let parts = parts.map(|(what, done)| match done {
        Ok(()) => what.to_owned(),
        Err(why) => format!("{what} NOT ({why})"),
    });
    let stands = parts.join(", ");
    tracing::info!("isolated: {stands}");
    let _ = STANDS.set(stands);
}

/// Sandboxes irrevocably a command that reads an untrusted model and may write one into a folder.
/// Denies sockets, keys, the user's other files, and other programs.
pub(crate) fn enter_to_read(cx: &Context, model: &ModelRef, into: Option<&Path>) {
    let mut needed = Needed::of_system(cx);
    needed.models(Some(model));
    if let Some(path) = into {
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        needed
            .write
            .push(folder.unwrap_or(Path::new(".")).to_owned());
    }
    for (what, done) in [
        ("files", needed.restrict()),
        ("system calls", deny_system_calls(&[])),
    ] {
        if let Err(why) = done {
            tracing::info!("{what} are not restricted: {why}");
        }
    }
}

/// Files and folders that a process needs.
#[derive(Default)]
struct Needed {
    read: Vec<PathBuf>,
    /// Read and write access.
    write: Vec<PathBuf>,
    /// Read, write and ioctl access.
    devices: Vec<PathBuf>,
}

impl Needed {
    /// Needs of a daemon.
    fn of(cx: &Context, model: Option<&ModelRef>) -> Self {
        let mut needed = Self::of_system(cx);
        let http_key = expand_home(Path::new(&cx.config.http.api_key_file));
        needed.read.push(http_key);
        needed.read.extend(cx.global.passphrase_file.clone());
        if let Ok(folder) = cx.global.dir() {
            needed.folder(folder);
        }
        needed.models(model);
        needed
    }

    /// Needs of every command: system files, and configuration.
    fn of_system(cx: &Context) -> Self {
        let mut needed = Self::default();
        // Outside of the home directory, file permissions decide as usual: that is the system, and
        // disks with models.
        let home = std::env::var_os("HOME").map(PathBuf::from);
        needed.read = outside(&home.unwrap_or_else(|| PathBuf::from("/")));
        let named = [&cx.global.config, &cx.global.catalogue];
        needed.read.extend(named.into_iter().flatten().cloned());
        needed.read.extend(default_path());
        needed
    }

    /// Adds a folder of this program.
    fn folder(&mut self, folder: PathBuf) {
        // Landlock rules need an existing path.
        let _ = whole_file::make_folder(&folder, 0o700);
        links(&folder, LINKS_DEPTH, &mut self.read);
        self.write.push(folder);
    }

    /// Adds the fetched models, a named model, and the key that authenticates this user's hash
    /// records.
    fn models(&mut self, model: Option<&ModelRef>) {
        if let Ok(folder) = models_dir() {
            self.folder(folder);
        }
        self.read.extend(record_key());
        if let Some(ModelRef::Path(path)) = model {
            // The folder of a model file also holds the record of its hash.
            let file = path.is_file().then(|| path.canonicalize().ok()).flatten();
            self.write
                .extend(file.and_then(|file| Some(file.parent()?.to_owned())));
            links(path, LINKS_DEPTH, &mut self.read);
            self.read.push(path.clone());
        }
    }

    /// Adds graphics cards, and the libraries that libtorch loads only when it finds one.
    fn cards(&mut self) {
        let paths = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        self.read.extend(std::env::split_paths(&paths));
        let devices = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        let of_cards = devices.filter(|device| is_card(&device.file_name().to_string_lossy()));
        self.devices.extend(of_cards.map(|device| device.path()));
    }

    /// Denies all other files with Landlock, and with them starting programs, signals to other
    /// processes, and abstract sockets.
    fn restrict(&self) -> Result<(), String> {
        // Newest ABI whose features are used here (Linux 6.12).
        let abi = ABI::V6;
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let write = read
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::MakeReg
            | AccessFs::MakeSock
            | AccessFs::MakeDir
            | AccessFs::RemoveFile
            | AccessFs::RemoveDir
            | AccessFs::Refer;
        let restricted = || -> Result<RulesetStatus, RulesetError> {
            let control = read | AccessFs::WriteFile | AccessFs::IoctlDev;
            let ruleset = Ruleset::default()
                .handle_access(AccessFs::from_all(abi))?
                .scope(Scope::from_all(abi))?
                .create()?
                .add_rules(path_beneath_rules(&self.read, read))?
                .add_rules(path_beneath_rules(&self.write, write))?
                .add_rules(path_beneath_rules(&self.devices, control))?;
            Ok(ruleset.restrict_self()?.ruleset)
        };
        match restricted() {
            Ok(RulesetStatus::FullyEnforced) => Ok(()),
            Ok(RulesetStatus::PartiallyEnforced) => {
                Err("in part: the kernel is older than 6.12".into())
            }
            Ok(RulesetStatus::NotEnforced) => Err("the kernel has no Landlock".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Whether a device is a graphics card: NVIDIA's, AMD's, or the kernel's generic interface.
fn is_card(name: &str) -> bool {
    name.starts_with("nvidia") || ["kfd", "dri"].contains(&name)
}

/// Depth below the models folder to which links are followed: the depth of fetched files.
const LINKS_DEPTH: usize = 8;

/// Targets of links below a folder: a model may lie on another disk.
fn links(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_symlink() => found.extend(entry.path().canonicalize()),
            Ok(kind) if kind.is_dir() && depth > 0 => links(&entry.path(), depth - 1, found),
            _ => {}
        }
    }
}

/// Every path except a folder: the siblings of it and of each folder above it.
fn outside(folder: &Path) -> Vec<PathBuf> {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let mut all = Vec::new();
    let mut at = PathBuf::from("/");
    for part in folder.components() {
        let Component::Normal(part) = part else {
            continue;
        };
        let beside = std::fs::read_dir(&at).into_iter().flatten().flatten();
        let beside = beside.filter(|entry| entry.file_name() != part);
        all.extend(beside.map(|entry| entry.path()));
        at.push(part);
    }
    match at == Path::new("/") {
        // In some containers the folder is the root.
        true => vec![at],
        false => all,
    }
}

/// System calls that a daemon never makes, but an attacker might: inspect processes, start
/// programs, change mounts, load kernel code, or use rarely tested parts of the kernel. They fail
/// with EPERM instead of killing the process, because a library may try one and continue without
/// it.
const DENIED: [i64; 48] = [
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_reboot,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_syslog,
    libc::SYS_vhangup,
];

/// Socket families that a daemon may open; a name resolver may need the local ones.
const SOCKETS: [i32; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];

/// Denies [`DENIED`], and sockets outside of `sockets`.
fn deny_system_calls(sockets: &[i32]) -> Result<(), String> {
    let filter = || -> Result<BpfProgram, seccompiler::BackendError> {
        let other = sockets.iter().map(|family| {
            let family = u64::from(family.unsigned_abs());
            SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family)
        });
        let other = other.collect::<Result<Vec<_>, _>>()?;
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
            DENIED.map(|call| (call, Vec::new())).into();
        // A rule without a condition always matches.
        let other = match other.is_empty() {
            true => Vec::new(),
            false => vec![SeccompRule::new(other)?],
        };
        rules.insert(libc::SYS_socket, other);
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let arch = std::env::consts::ARCH.try_into()?;
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?.try_into()
    };
    let filter = filter().map_err(|e| e.to_string())?;
    seccompiler::apply_filter(&filter).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    /// Environment variable of the process that sandboxes itself.
    const INSIDE: &str = "HEARTHNET_TEST_ISOLATED_IN";

    #[test]
    fn a_sandboxed_process_accesses_only_what_it_needs() {
        // In a child process, because the sandbox is irrevocable.
        let Some(dir) = std::env::var_os(INSIDE).map(PathBuf::from) else {
            let dir = tempfile::tempdir().unwrap();
            for folder in ["home/data", "home/letters", "system"] {
                fs::create_dir_all(dir.path().join(folder)).unwrap();
                fs::write(dir.path().join(folder).join("file"), "words").unwrap();
            }
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture", "--test-threads=1"])
                .arg("daemon::isolation::tests::a_sandboxed_process_accesses_only_what_it_needs")
                .env(INSIDE, dir.path())
                .output()
                .unwrap();
            assert!(output.status.success(), "{output:?}");
            let inside = String::from_utf8_lossy(&output.stdout);
            assert!(inside.contains("1 passed"), "{inside}");
            return;
        };
        let (data, letters, system) = (
            dir.join("home/data/file"),
            dir.join("home/letters/file"),
            dir.join("system/file"),
        );
        let needed = Needed {
            read: outside(&dir.join("home")),
            write: vec![dir.join("home/data")],
            devices: Vec::new(),
        };
        let files = needed.restrict();
        deny_system_calls(&SOCKETS).unwrap();
        if let Err(why) = files {
            println!("no Landlock here: {why}");
            return;
        }
        let refused = |done: std::io::Result<()>| done.unwrap_err().kind();
        fs::write(&data, "more").unwrap();
        fs::rename(&data, data.with_extension("old")).unwrap();
        // Socket of the local API.
        UnixListener::bind(data.with_extension("socket")).unwrap();
        assert_eq!(fs::read(&system).unwrap(), b"words");
        let denied = ErrorKind::PermissionDenied;
        assert_eq!(refused(fs::write(&system, "x")), denied);
        assert_eq!(refused(fs::write(dir.join("system/new"), "x")), denied);
        let socket = UnixListener::bind(dir.join("system/socket"));
        assert_eq!(refused(socket.map(drop)), denied);
        assert_eq!(refused(fs::remove_file(&system)), denied);
        assert_eq!(refused(fs::write(&letters, "x")), denied);
        assert_eq!(refused(fs::read(&letters).map(drop)), denied);
        assert_eq!(refused(fs::read_dir(dir.join("home")).map(drop)), denied);
        assert_eq!(refused(fs::rename(&system, data)), denied);
        let started = Command::new("/bin/true").spawn().map(drop);
        assert_eq!(refused(started), denied);
        // Child threads are sandboxed as well.
        let thread = std::thread::spawn(move || refused(fs::read(&letters).map(drop)));
        assert_eq!(thread.join().unwrap(), denied);
        // A command that needs no sockets cannot open one.
        let listen = || std::net::TcpListener::bind("127.0.0.1:0").map(drop);
        listen().unwrap();
        deny_system_calls(&[]).unwrap();
        assert_eq!(refused(listen()), denied);
    }

    #[test]
    fn outside_is_the_siblings_of_a_folder_and_of_its_parents() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        for folder in ["a/b/c", "a/d", "e"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let all = outside(&root.join("a/b"));
        let within = |path: &PathBuf| path.strip_prefix(&root).ok().map(Path::to_owned);
        let mut within: Vec<PathBuf> = all.iter().filter_map(within).collect();
        within.sort();
        assert_eq!(within, [Path::new("a/d"), Path::new("e")]);
        assert!(all.iter().any(|path| path == Path::new("/etc")));
        assert_eq!(outside(Path::new("/")), [Path::new("/")]);
    }
}
