//! Compromised daemon in a process of its own. It isolates itself with the code of the real daemon
//! and then tries actions that the isolation must block.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::{HarnessError, Result};

/// Parameters of an intruder process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Intrusion {
    /// Home directory of the daemon's user, filled by `furnish`.
    pub home: PathBuf,
    /// Folder outside of the home directory.
    pub elsewhere: PathBuf,
    /// Name of an abstract socket on which the parent listens.
    pub abstract_name: String,
    /// False if the daemon runs without its sandbox.
    pub isolated: bool,
}

/// Result of one attempt.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tried {
    pub(crate) what: String,
    /// Part of the isolation that must refuse the attempt. `None` if the attempt must succeed.
    pub(crate) by: Option<Part>,
    /// Error, if the attempt failed.
    pub(crate) refused: Option<String>,
}

/// Part of the isolation (`specs/isolation.md`, section 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Part {
    Files,
    SystemCalls,
    Rights,
}

/// Output of an intruder process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Intruded {
    /// Isolation that is in force, as the program reports it.
    pub(crate) stands: String,
    pub(crate) tried: Vec<Tried>,
}

/// Data folder of the daemon, below the home directory.
pub(crate) const DATA: &str = "data";

/// Fills a home directory with files of its user and of the daemon.
pub(crate) fn furnish(home: &Path) -> io::Result<()> {
    for (file, text) in [
        (".ssh/id_ed25519", "a secret key"),
        (".profile", "true"),
        ("letters/to-ana", "dear Ana"),
        ("another-community/root.key", "a secret key"),
        ("data/notes", "the daemon's own"),
    ] {
        let file = home.join(file);
        fs::create_dir_all(file.parent().unwrap_or(home))?;
        fs::write(file, text)?;
    }
    Ok(())
}

/// Runs the intruder process: prints the results of all attempts as one line of JSON.
///
/// # Errors
/// If isolation was asked for and is not available.
pub fn intrude(plan: &Intrusion) -> Result<()> {
    let data = plan.home.join(DATA);
    let stands = match plan.isolated {
        false => "nothing",
        true => {
            let serve = ["hearthnet", "serve", "--model", "none", "--data-dir"];
            let args = serve.map(Into::into).into_iter();
            hearthnet::isolate(args.chain([data.into_os_string()])).map_err(HarnessError::victim)?
        }
    };
    // A thread started after the isolation, as later threads of the daemon are.
    let plan = plan.clone();
    let tried = std::thread::spawn(move || attempts(&plan)).join();
    let tried = tried.map_err(|_| HarnessError::attacker("the intruder panicked"))?;
    let said = Intruded {
        stands: stands.to_owned(),
        tried,
    };
    writeln!(io::stdout(), "{}", serde_json::to_string(&said)?)?;
    Ok(())
}

fn attempts(plan: &Intrusion) -> Vec<Tried> {
    let (home, elsewhere, data) = (&plan.home, &plan.elsewhere, plan.home.join(DATA));
    let mut tried = Vec::new();
    let mut attempt = |by: Option<Part>, what: &str, done: io::Result<()>| {
        tried.push(Tried {
            what: what.to_owned(),
            by,
            refused: done.err().map(|error| error.to_string()),
        });
    };
    // Actions that a daemon needs in normal operation.
    let notes = data.join("notes");
    attempt(None, "read its own data", read(&notes));
    attempt(None, "write its own data", fs::write(&notes, "more"));
    attempt(None, "read a system file", read(&elsewhere.join("file")));

    let files = Some(Part::Files);
    let other_key = "another-community/root.key";
    for (what, file) in [
        ("read its user's SSH key", ".ssh/id_ed25519"),
        ("read the root key of another community", other_key),
        ("read its user's letters", "letters/to-ana"),
    ] {
        attempt(files, what, read(&home.join(file)));
    }
    let letter = home.join("letters/to-ana");
    let list = fs::read_dir(home.join("letters")).map(drop);
    attempt(files, "list its user's letters", list);
    let linked = data.join("linked");
    let linking = fs::hard_link(&letter, &linked).and_then(|()| read(&linked));
    let what = "read a letter through a hard link in its data folder";
    attempt(files, what, linking);
    let append = OpenOptions::new().append(true).open(home.join(".profile"));
    let append = append.and_then(|mut file| file.write_all(b"\ntrue\n"));
    attempt(files, "write its user's shell profile", append);
    let unit = home.join(".config/systemd/user");
    let unit = fs::create_dir_all(&unit).and_then(|()| fs::write(unit.join("x.service"), "x"));
    attempt(files, "install a systemd unit of its user", unit);
    let cut = OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(elsewhere.join("file"))
        .map(drop);
    attempt(files, "empty a file outside of the home directory", cut);
    let new = fs::write(elsewhere.join("new"), "x");
    attempt(files, "write a new file outside of the home directory", new);
    let moved = fs::rename(elsewhere.join("other"), data.join("other"));
    attempt(files, "move a file away", moved);

    let calls = Some(Part::SystemCalls);
    for program in ["/bin/sh", "/bin/su"] {
        let mut command = Command::new(program);
        let started = command.args(["-c", "exit"]).output().map(drop);
        attempt(calls, &format!("start {program}"), started);
    }
    system(plan, &mut attempt);
    tried
}

fn read(path: &Path) -> io::Result<()> {
    fs::read(path).map(drop)
}

fn system(plan: &Intrusion, attempt: &mut impl FnMut(Option<Part>, &str, io::Result<()>)) {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixStream};

    use rustix::process::{
        DumpableBehavior, PidfdFlags, PidfdGetfdFlags, Signal, dumpable_behavior, getppid,
        kill_process, pidfd_getfd, pidfd_open,
    };

    let (files, rights) = (Some(Part::Files), Some(Part::Rights));
    let parent = || getppid().ok_or_else(|| io::Error::other("no parent"));
    let memory = parent().and_then(|parent| {
        let path = format!("/proc/{}/mem", parent.as_raw_nonzero());
        OpenOptions::new().read(true).write(true).open(path)
    });
    attempt(files, "open the memory of its parent", memory.map(drop));
    let taken = parent().and_then(|parent| {
        let parent = pidfd_open(parent, PidfdFlags::empty())?;
        Ok(pidfd_getfd(parent, 0, PidfdGetfdFlags::empty())?)
    });
    let what = "take an open file of its parent";
    attempt(Some(Part::SystemCalls), what, taken.map(drop));
    // SIGCONT has no effect on a running process.
    let signalled = parent().and_then(|parent| Ok(kill_process(parent, Signal::CONT)?));
    attempt(files, "signal its parent", signalled);
    let reach = SocketAddr::from_abstract_name(&plan.abstract_name);
    let reach = reach.and_then(|at| UnixStream::connect_addr(&at)).map(drop);
    attempt(files, "connect to a service of its user's session", reach);
    let dump = match dumpable_behavior() {
        Ok(DumpableBehavior::NotDumpable) => Err(io::Error::other("not dumpable")),
        _ => Ok(()),
    };
    attempt(rights, "have its memory written to a core dump", dump);
    let gain = match fs::read_to_string("/proc/self/status") {
        Ok(status) if status.contains("NoNewPrivs:\t1") => {
            Err(io::Error::other("no new privileges"))
        }
        status => status.map(drop),
    };
    attempt(rights, "gain privileges through a setuid file", gain);
}
