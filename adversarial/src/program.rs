//! The real program, as its user starts it: in a process of its own, with a home of its own. The suite's
//! program is what is started, and is the real one from its first line on.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::timeout;

use crate::HarnessError;

/// How long a command, or the beginning or the end of a daemon, may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// What every command is told: nothing of it leaves this machine.
const ALONE: [&str; 6] = [
    "--set",
    "policy.research.enable=true",
    "--set",
    "discovery.mdns=false",
    "--set",
    "http.listen=127.0.0.1:0",
];

/// A user's home, and the program.
pub(crate) struct Program {
    program: PathBuf,
    home: PathBuf,
    data: PathBuf,
}

/// What a command has said, byte by byte.
pub(crate) struct Said {
    pub(crate) output: String,
    pub(crate) errors: String,
}

impl Program {
    /// With its data in this folder.
    pub(crate) fn new(program: &Path, home: &Path, data: &Path) -> Program {
        Program {
            program: program.to_owned(),
            home: home.to_owned(),
            data: data.to_owned(),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("program")
            .args(ALONE)
            .args(args)
            .env_clear()
            .env("HOME", &self.home)
            .env("HEARTHNET_DATA_DIR", &self.data)
            .env("HEARTHNET_LOG", "debug")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// What a command says until it ends, with a log of everything.
    pub(crate) async fn says(&self, args: &[&str]) -> Result<Said, HarnessError> {
        let output = self.command(args).stdin(Stdio::null()).output();
        let output = timeout(PATIENCE, output).await??;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Said {
            output: text(&output.stdout),
            errors: text(&output.stderr),
        })
    }

    /// Starts a daemon, and waits until it is ready.
    pub(crate) async fn serve(&self, args: &[&str]) -> Result<Daemon, HarnessError> {
        let tail = ["--json", "--lifeline"];
        let args = [&["serve"], args, &tail].concat();
        let mut child = self.command(&args).stdin(Stdio::piped()).spawn()?;
        let gone = || HarnessError::victim("the daemon ended at once");
        let output = child.stdout.take().ok_or_else(gone)?;
        let mut errors = child.stderr.take().ok_or_else(gone)?;
        let mut lines = BufReader::new(output).lines();
        let Some(line) = timeout(PATIENCE, lines.next_line()).await?? else {
            let mut said = String::new();
            errors.read_to_string(&mut said).await?;
            return Err(HarnessError::victim(format!("no daemon: {said}")));
        };
        Ok(Daemon {
            ready: serde_json::from_str(&line)?,
            child,
            errors,
        })
    }
}

/// A daemon that runs.
pub(crate) struct Daemon {
    /// What it said when it was ready.
    pub(crate) ready: Value,
    child: Child,
    errors: ChildStderr,
}

impl Daemon {
    /// Where its HTTP interface listens.
    pub(crate) fn http(&self) -> String {
        let url = self.ready["url"].as_str().unwrap_or_default();
        let address = url.trim_start_matches("http://");
        address.trim_end_matches("/v1").to_owned()
    }

    /// Ends it in the ordinary way; all that it has said on standard error.
    pub(crate) async fn stop(mut self) -> Result<String, HarnessError> {
        drop(self.child.stdin.take());
        let mut said = Vec::new();
        timeout(PATIENCE, self.errors.read_to_end(&mut said)).await??;
        timeout(PATIENCE, self.child.wait()).await??;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }
}
