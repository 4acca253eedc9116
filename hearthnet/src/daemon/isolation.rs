//! Sandbox of a daemon: it can read only the files it needs, write its own, and cannot start or
//! inspect processes. A command that reads an untrusted model file can access only that file, and
//! no network. A process that computes for a daemon can open nothing at all.
//!
//! An attacker who takes over the daemon gets no further access. Best effort: if the kernel lacks a
//! feature, the rest still applies, and the log, `status` and `diagnose` report the gap. The
//! sandbox binds the calling thread and the threads that it starts, so [`enter`] runs before any
//! other thread exists. `specs/isolation.md` lists the remaining access of each process.

use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use hearthnet_files::gguf::files_of;
use hearthnet_files::hugging_face::repository_of;
use hearthnet_files::manifest::record_key;
use hearthnet_hub::ModelRef;
use hearthnet_platform::hardware::graphics_cards;
use hearthnet_platform::sandbox::{
    Calls, Files, SOCKETS, deny_system_calls, hide_memory, restrict_files,
};
use hearthnet_platform::whole_file::{self, Access};

use crate::answering::http::{key_file, socket, tls_files};
use crate::cli::args::HostEngineArgs;
use crate::config::{Context, default_path};
use crate::hosting::host_engine::may_use_cards;
use crate::models::models_dir;

/// Sandbox of this process, as text.
static STANDS: OnceLock<String> = OnceLock::new();

/// Sandbox of this process, as text.
pub(crate) fn stands() -> &'static str {
    STANDS.get().map_or("nothing", String::as_str)
}

/// Sandboxes a daemon irrevocably, according to the arguments that name its model, its engine, and
/// a path with weights.
pub(crate) fn enter(
    cx: &Context,
    model: Option<&ModelRef>,
    engine: &HostEngineArgs,
    from: Option<&Path>,
) {
    let mut needed = Needs::of(cx, model.or(cx.config.model.default.as_ref()));
    needed
        .0
        .read
        .extend(from.map(files_of).into_iter().flatten());
    needed.0.read.extend(from.and_then(blobs_of));
    if may_use_cards(engine, &cx.config) {
        needed.cards();
    }
    let calls = Calls {
        sockets: &SOCKETS,
        // Libtorch does, on any device, and a request may ask for its engine later.
        machine_code: cfg!(feature = "torch"),
    };
    // The daemon's memory holds keys and prompts.
    let hidden = hide_memory();
    let parts = [
        ("files", restrict_files(&needed.0)),
        ("system calls", deny_system_calls(calls)),
        ("memory", hidden),
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
    let mut needed = Needs::of_system(cx);
    needed.models(Some(model));
    if let Some(path) = into {
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = folder.unwrap_or(Path::new("."));
        needed.0.write.push(folder.to_owned());
    }
    log_unrestricted([
        ("files", restrict_files(&needed.0)),
        ("system calls", deny_system_calls(Calls::default())),
    ]);
}

/// Sandboxes irrevocably a process that computes for a daemon. Denies all files and sockets: the
/// daemon sends it the open model file. `has_card`: the driver of its graphics card may make machine code.
pub(crate) fn enter_engine(has_card: bool) {
    let calls = Calls {
        sockets: &[],
        machine_code: has_card,
    };
    log_unrestricted([
        ("files", restrict_files(&Files::default())),
        ("system calls", deny_system_calls(calls)),
        // Rows of conversations pass through it.
        ("memory", hide_memory()),
    ]);
}

/// Logs the parts of a sandbox that this system does not have.
fn log_unrestricted(parts: impl IntoIterator<Item = (&'static str, Result<(), String>)>) {
    for (what, done) in parts {
        if let Err(why) = done {
            tracing::info!("{what} are not restricted: {why}");
        }
    }
}

/// Files that a process of the program needs.
struct Needs(Files);

impl Needs {
    /// Needs of a daemon.
    fn of(cx: &Context, model: Option<&ModelRef>) -> Self {
        let mut needed = Self::of_system(cx);
        needed.0.read.extend(key_file(&cx.config));
        for file in tls_files(&cx.config).into_iter().flatten() {
            // A renewed certificate is a new file, often behind a link.
            let target = file.canonicalize().ok();
            needed.0.read.extend(own_folder(&file));
            needed.0.read.extend(target.as_deref().and_then(own_folder));
            needed.0.read.push(file);
        }
        if let Some(folder) = socket(&cx.config).as_deref().and_then(own_folder) {
            needed.folder(folder);
        }
        needed.0.read.extend(cx.global.passphrase_file.clone());
        if let Ok(folder) = cx.global.dir() {
            needed.folder(folder);
        }
        needed.models(model);
        needed
    }

    /// Needs of every command: system files, and configuration.
    fn of_system(cx: &Context) -> Self {
        let mut needed = Self(Files::default());
        // Outside of the home directory, file permissions decide as usual: that is the system, and
        // disks with models.
        let home = std::env::var_os("HOME").map(PathBuf::from);
        needed.0.read = outside(&home.unwrap_or_else(|| PathBuf::from("/")));
        let named = [&cx.global.config, &cx.global.catalogue];
        needed.0.read.extend(named.into_iter().flatten().cloned());
        needed.0.read.extend(default_path());
        needed
    }

    /// Adds a folder of this program.
    fn folder(&mut self, folder: PathBuf) {
        // Landlock rules need an existing path.
        let _ = whole_file::make_folder(&folder, Access::Owner);
        links(&folder, LINKS_DEPTH, &mut self.0.read);
        self.0.write.push(folder);
    }

    /// Adds the fetched models, a named model, and the key that authenticates this user's hash
    /// records.
    fn models(&mut self, model: Option<&ModelRef>) {
        if let Ok(folder) = models_dir() {
            self.folder(folder);
        }
        self.0.read.extend(record_key());
        if let Some(ModelRef::Path(path)) = model {
            // The folder of a model file also holds the record of its hash.
            let file = path.is_file().then(|| path.canonicalize().ok()).flatten();
            let folder = file.and_then(|file| Some(file.parent()?.to_owned()));
            self.0.write.extend(folder);
            links(path, LINKS_DEPTH, &mut self.0.read);
            self.0.read.extend(files_of(path));
        }
    }

    /// Adds graphics cards, and the libraries that libtorch loads only when it finds one.
    fn cards(&mut self) {
        let paths = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        self.0.read.extend(std::env::split_paths(&paths));
        self.0.devices.extend(graphics_cards());
    }
}

/// Folder of a file, unless it contains the user's home directory: then it is not made for the file
/// alone, and the sandbox would be open.
fn own_folder(file: &Path) -> Option<PathBuf> {
    let folder = file.parent()?;
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let holds_home = home.is_some_and(|home| resolved(&home).starts_with(resolved(folder)));
    (!holds_home).then(|| folder.to_owned())
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

/// Folder of the files of a directory in the cache of the hub's own programs, which has only links to
/// them. It is no link itself: a drive must not open other folders to the daemon.
fn blobs_of(directory: &Path) -> Option<PathBuf> {
    let directory = directory.canonicalize().ok()?;
    repository_of(&directory)?;
    let blobs = directory.parent()?.with_file_name("blobs");
    (blobs.is_dir() && !blobs.is_symlink()).then_some(blobs)
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

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use memmap2::MmapMut;

    use super::*;

    /// Environment variable of the process that sandboxes itself.
    const INSIDE: &str = "HEARTHNET_TEST_ISOLATED_IN";

    /// Makes memory that was written executable.
    fn machine_code() -> std::io::Result<()> {
        MmapMut::map_anon(1)?.make_exec().map(drop)
    }

    /// Runs one test of this module in a child process that has a variable, because the sandbox is
    /// irrevocable.
    fn in_child(test: &str, variable: &str, value: impl AsRef<OsStr>) {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg(format!("daemon::isolation::tests::{test}"))
            .env(variable, value)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let inside = String::from_utf8_lossy(&output.stdout);
        assert!(inside.contains("1 passed"), "{inside}");
    }

    #[test]
    fn a_sandboxed_process_accesses_only_what_it_needs() {
        let Some(dir) = std::env::var_os(INSIDE).map(PathBuf::from) else {
            let dir = tempfile::tempdir().unwrap();
            for folder in ["home/data", "home/letters", "system"] {
                fs::create_dir_all(dir.path().join(folder)).unwrap();
                fs::write(dir.path().join(folder).join("file"), "words").unwrap();
            }
            let test = "a_sandboxed_process_accesses_only_what_it_needs";
            return in_child(test, INSIDE, dir.path());
        };
        let (data, letters, system) = (
            dir.join("home/data/file"),
            dir.join("home/letters/file"),
            dir.join("system/file"),
        );
        let needed = Files {
            read: outside(&dir.join("home")),
            write: vec![dir.join("home/data")],
            devices: Vec::new(),
        };
        let files = restrict_files(&needed);
        let calls = Calls {
            sockets: &SOCKETS,
            machine_code: true,
        };
        deny_system_calls(calls).unwrap();
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
        machine_code().unwrap();
        deny_system_calls(Calls::default()).unwrap();
        assert_eq!(refused(listen()), denied);
        assert_eq!(refused(machine_code()), denied);
    }

    #[test]
    fn an_engine_opens_neither_files_nor_sockets() {
        let inside = "HEARTHNET_TEST_ISOLATED_ENGINE";
        if std::env::var_os(inside).is_none() {
            return in_child("an_engine_opens_neither_files_nor_sockets", inside, "1");
        }
        let (near, far) = hearthnet_platform::pipe::Pipe::pair().unwrap();
        near.send_file(&fs::File::open("/proc/self/exe").unwrap())
            .unwrap();
        machine_code().unwrap();
        enter_engine(false);
        let refused = |done: std::io::Result<()>| done.unwrap_err().kind();
        let denied = ErrorKind::PermissionDenied;
        let listen = std::net::TcpListener::bind("127.0.0.1:0").map(drop);
        assert_eq!(refused(listen), denied);
        assert_eq!(refused(machine_code()), denied);
        let unix = std::os::unix::net::UnixStream::connect("/run/x");
        assert_eq!(refused(unix.map(drop)), denied);
        // A file that another process opened can be read.
        let mut file = far.receive_file().unwrap().unwrap();
        std::io::Read::read_exact(&mut file, &mut [0; 4]).unwrap();
        if restrict_files(&Files::default()).is_err() {
            // Without Landlock in the kernel there is nothing more to test.
            return;
        }
        for path in ["/etc/passwd", "/proc/self/maps", "/tmp"] {
            assert_eq!(refused(fs::File::open(path).map(drop)), denied, "{path}");
        }
        let new = format!("/tmp/hearthnet-{}", std::process::id());
        assert_eq!(refused(fs::write(new, "x")), denied);
        assert_eq!(refused(Command::new("/bin/true").spawn().map(drop)), denied);
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
