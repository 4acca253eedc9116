//! The real program, in a process and with a home directory of its own. The process runs the
//! suite's program in the role `program`, which calls the real `main` at once.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::{HarnessError, Result};

/// Time limit for a command, and for the start and the end of a daemon.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Arguments of every command that keep its traffic on this machine.
const ALONE: [&str; 6] = [
    "--set",
    "policy.research.enable=true",
    "--set",
    "discovery.mdns=false",
    "--set",
    "http.listen=127.0.0.1:0",
];

/// Home directory of a user, and the program.
pub(crate) struct Program {
    program: PathBuf,
    home: PathBuf,
    data: PathBuf,
    level: &'static str,
}

/// Output of a command.
pub(crate) struct Said {
    pub(crate) output: String,
    pub(crate) errors: String,
}

impl Program {
    /// Program with its data in this folder.
    pub(crate) fn new(program: &Path, home: &Path, data: &Path) -> Program {
        Program {
            program: program.to_owned(),
            home: home.to_owned(),
            data: data.to_owned(),
            level: "debug",
        }
    }

    /// Sets the log level.
    pub(crate) fn logging(self, level: &'static str) -> Program {
        Program { level, ..self }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("program")
            .args(args)
            // Global settings go behind the command: a command with settings of its own ignores
            // those in front of it.
            .args(ALONE)
            .env_clear()
            .env("HOME", &self.home)
            .env("HEARTHNET_DATA_DIR", &self.data)
            .env("TMPDIR", self.home.join("tmp"))
            .env("HEARTHNET_LOG", self.level)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// Runs a command to its end, with the most detailed log.
    pub(crate) async fn says(&self, args: &[&str]) -> Result<Said> {
        self.says_of(args, "").await
    }

    /// Runs a command with a text on its standard input.
    pub(crate) async fn says_of(&self, args: &[&str], input: &str) -> Result<Said> {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A command that does not read its input may have ended.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        let output = timeout(TIMEOUT, child.wait_with_output()).await??;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Said {
            output: text(&output.stdout),
            errors: text(&output.stderr),
        })
    }

    /// Starts a daemon and waits until it is ready.
    pub(crate) async fn serve(&self, args: &[&str]) -> Result<Daemon> {
        self.start(&[&["serve"], args].concat()).await
    }

    /// Starts any command that serves and waits until it is ready.
    pub(crate) async fn start(&self, args: &[&str]) -> Result<Daemon> {
        let args = [args, &["--json", "--lifeline"]].concat();
        let mut child = self.command(&args).stdin(Stdio::piped()).spawn()?;
        let gone = || HarnessError::victim("the daemon ended at once");
        let output = child.stdout.take().ok_or_else(gone)?;
        let mut errors = child.stderr.take().ok_or_else(gone)?;
        // Read continuously: a full pipe would block the daemon.
        let errors = tokio::spawn(async move {
            let mut said = Vec::new();
            let read = errors.read_to_end(&mut said).await;
            read.map(|_| String::from_utf8_lossy(&said).into_owned())
        });
        let mut lines = BufReader::new(output).lines();
        let Some(line) = timeout(TIMEOUT, lines.next_line()).await?? else {
            let said = timeout(TIMEOUT, errors).await???;
            return Err(HarnessError::victim(format!("no daemon: {said}")));
        };
        Ok(Daemon {
            ready: serde_json::from_str(&line)?,
            child,
            errors,
        })
    }
}

/// Running daemon.
pub(crate) struct Daemon {
    /// Message of the daemon when it became ready.
    pub(crate) ready: Value,
    child: Child,
    errors: JoinHandle<std::io::Result<String>>,
}

impl Daemon {
    /// Address of its HTTP interface.
    pub(crate) fn http(&self) -> String {
        let url = self.ready["url"].as_str().unwrap_or_default();
        let address = url.trim_start_matches("http://");
        address.trim_end_matches("/v1").to_owned()
    }

    /// Stops it normally and returns its standard error.
    pub(crate) async fn stop(mut self) -> Result<String> {
        drop(self.child.stdin.take());
        timeout(TIMEOUT, self.child.wait()).await??;
        Ok(timeout(TIMEOUT, self.errors).await???)
    }

    pub(crate) fn pid(&self) -> Result<u32> {
        let gone = || HarnessError::victim("the daemon has ended");
        self.child.id().ok_or_else(gone)
    }

    /// Crashes it with core dumps of any size allowed. Returns whether a core dump exists, and its
    /// standard error.
    pub(crate) async fn crash(mut self) -> Result<(bool, String)> {
        use std::os::unix::process::ExitStatusExt as _;

        use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};

        let raw = i32::try_from(self.pid()?)?;
        let pid = Pid::from_raw(raw).ok_or_else(|| HarnessError::victim("no process"))?;
        let Rlimit { maximum, .. } = getrlimit(Resource::Core);
        let current = maximum;
        prlimit(Some(pid), Resource::Core, Rlimit { current, maximum })?;
        kill_process(pid, Signal::ABORT)?;
        let status = timeout(TIMEOUT, self.child.wait()).await??;
        Ok((status.core_dumped(), timeout(TIMEOUT, self.errors).await???))
    }
}
