//! A pull in progress: its lock, its progress and cancellation, and the files beside the model.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearthnet_files::{FileError, folder_lock};
use hearthnet_platform::regular_file;

use super::error::{PullError, SourceError};
use super::options::PullOptions;
use super::sink::{self, Sink, Wanted};
use crate::source::Source;

/// Polling interval of waits for cancellation.
pub(super) const TICK: Duration = Duration::from_millis(100);

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

/// State of one pull.
pub(super) struct Job<'a> {
    /// Final path of the file.
    pub(super) target: PathBuf,
    pub(super) wanted: Wanted,
    pub(super) options: &'a PullOptions,
    pub(super) cancel: &'a AtomicBool,
    pub(super) progress: &'a mut dyn FnMut(PullEvent<'_>),
    /// The model's directory in the cache.
    pub(super) directory: PathBuf,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        target: PathBuf,
        wanted: Wanted,
        options: &'a PullOptions,
        cancel: &'a AtomicBool,
        progress: &'a mut dyn FnMut(PullEvent<'_>),
    ) -> Result<Self, FileError> {
        let directory = target.parent().unwrap_or(&options.models).to_owned();
        fs::create_dir_all(&directory)
            .map_err(|source| FileError::new("create the directory", &directory, source))?;
        Ok(Self {
            target,
            wanted,
            options,
            cancel,
            progress,
            directory,
        })
    }

    pub(super) fn check_cancelled(&self) -> Result<(), SourceError> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(SourceError::Cancelled),
            false => Ok(()),
        }
    }

    pub(super) fn report(&mut self, done: u64) {
        (self.progress)(PullEvent::Progress {
            done,
            total: self.wanted.bytes,
        });
    }

    /// Waits until no other process pulls this model. The lock ends with the file.
    pub(super) fn lock(&mut self) -> Result<File, PullError> {
        let mut told = false;
        let lock = folder_lock::lock(&self.directory, || {
            if !std::mem::replace(&mut told, true) {
                (self.progress)(PullEvent::Waiting);
            }
            !self.cancel.load(Ordering::Relaxed)
        })?;
        lock.ok_or(PullError::Cancelled)
    }

    /// Whether the file exists with the pinned contents.
    pub(super) fn check_present(&mut self) -> Result<bool, PullError> {
        let Ok(mut file) = regular_file::open(&self.target) else {
            return Ok(false);
        };
        if file.metadata().map_or(0, |info| info.len()) != self.wanted.bytes {
            return Ok(false);
        }
        (self.progress)(PullEvent::Checking);
        let mut check = sink::Check::new(self.wanted);
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
    pub(super) fn clean(&self) {
        let _ = fs::remove_file(self.beside("copy"));
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

    /// Path of an unfinished file with this ending.
    pub(super) fn beside(&self, ending: &str) -> PathBuf {
        let file = self.target.file_name().unwrap_or_default();
        let file = file.to_string_lossy();
        self.directory.join(format!(".{file}.{ending}"))
    }

    /// Copies a local file.
    pub(super) fn copy(&mut self, path: &Path) -> Result<(), SourceError> {
        let mut file = regular_file::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => SourceError::NotThere,
            _ => SourceError::Unreadable(error),
        })?;
        let found = file.metadata().map_err(SourceError::Unreadable)?.len();
        if found != self.wanted.bytes {
            return Err(self.wanted.other_length(found));
        }
        self.keep(&mut file)
    }

    /// Writes the bytes of `reader` into the cache, if they are the model.
    pub(super) fn keep(&mut self, reader: &mut dyn Read) -> Result<(), SourceError> {
        let mut sink = Sink::create(self.wanted, &self.beside("copy"))?;
        let read = sink::blocks(reader, |bytes| {
            self.check_cancelled()?;
            sink.write(bytes)?;
            self.report(sink.done());
            Ok::<_, SourceError>(())
        });
        read.map_err(SourceError::Unreadable)??;
        sink.finish(&self.target)
    }
}
