//! Destination of downloaded bytes: checked against the catalogue as they arrive, renamed when
//! complete.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use hearthnet_files::FileError;
use hearthnet_files::manifest::Digest;
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{folder_of, sync_folder};
use sha2::{Digest as _, Sha256};

use super::error::SourceError;

/// Size of the file to fetch, and its digest if it is known.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) bytes: u64,
    pub(super) sha256: Option<Digest>,
}

impl Wanted {
    pub(super) fn other_length(&self, found: u64) -> SourceError {
        SourceError::Length {
            expected: self.bytes,
            found,
        }
    }
}

/// Counts and hashes bytes, and compares them with the pinned size and digest.
pub(super) struct Check {
    wanted: Wanted,
    done: u64,
    hash: Sha256,
}

impl Check {
    pub(super) fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            done: 0,
            hash: Sha256::new(),
        }
    }

    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// Adds bytes; refuses bytes beyond the pinned size.
    pub(super) fn update(&mut self, bytes: &[u8]) -> Result<(), SourceError> {
        let done = self.done.saturating_add(bytes.len() as u64);
        if done > self.wanted.bytes {
            return Err(self.wanted.other_length(done));
        }
        self.hash.update(bytes);
        self.done = done;
        Ok(())
    }

    /// Compares the bytes so far, as the whole file.
    pub(super) fn finish(&self) -> Result<(), SourceError> {
        if self.done != self.wanted.bytes {
            return Err(self.wanted.other_length(self.done));
        }
        let found = Digest(self.hash.clone().finalize().into());
        match self.wanted.sha256 {
            Some(expected) if expected != found => Err(SourceError::Contents { expected, found }),
            _ => Ok(()),
        }
    }
}

/// Reads to the end, a MiB at a time, until `take` returns an error.
pub(super) fn blocks<E>(
    reader: &mut (impl Read + ?Sized),
    mut take: impl FnMut(&[u8]) -> Result<(), E>,
) -> io::Result<Result<(), E>> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(Ok(())),
            Ok(len) => {
                if let Err(error) = take(buffer.get(..len).unwrap_or_default()) {
                    return Ok(Err(error));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Unfinished file. Dropping it removes it, unless it is kept for resumption.
pub(super) struct Sink {
    file: File,
    path: PathBuf,
    check: Check,
    keep: bool,
}

impl Sink {
    /// Begins a file at `path`.
    pub(super) fn create(wanted: Wanted, path: &Path) -> Result<Self, SourceError> {
        // The file is in this program's own folder, from which the pull has removed leftovers.
        let file = File::create(path).map_err(|error| FileError::new("create", path, error))?;
        Ok(Self {
            file,
            path: path.to_owned(),
            check: Check::new(wanted),
            keep: false,
        })
    }

    /// Continues the file at `path`, or begins it. Dropping it keeps a file that is not empty.
    pub(super) fn resume(wanted: Wanted, path: &Path) -> Result<Self, SourceError> {
        let open = || {
            let mut options = File::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            let mut file = regular_file::open_with(options, path)?;
            let mut check = Check::new(wanted);
            // A file longer than the model is useless.
            let sound = blocks(&mut file, |bytes| check.update(bytes))?.is_ok();
            Ok((file, check, sound))
        };
        let opened: io::Result<_> = open();
        let (file, check, sound) = opened.map_err(|error| FileError::new("open", path, error))?;
        let mut sink = Self {
            file,
            path: path.to_owned(),
            check,
            keep: true,
        };
        if !sound {
            sink.restart()?;
        }
        Ok(sink)
    }

    /// Bytes in the file so far.
    pub(super) fn done(&self) -> u64 {
        self.check.done()
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), SourceError> {
        if let Err(error) = self.check.update(bytes) {
            self.keep = false;
            return Err(error);
        }
        let written = self.file.write_all(bytes);
        self.written(written)
    }

    /// Empties the file.
    pub(super) fn restart(&mut self) -> Result<(), SourceError> {
        self.check = Check::new(self.check.wanted);
        let emptied = self
            .file
            .set_len(0)
            .and_then(|()| io::Seek::rewind(&mut self.file));
        self.written(emptied)
    }

    /// Renames the file to `target`, if it is what the catalogue pins.
    pub(super) fn finish(mut self, target: &Path) -> Result<(), SourceError> {
        self.keep = false;
        self.check.finish()?;
        let synced = self.file.sync_all();
        self.written(synced)?;
        fs::rename(&self.path, target)
            .map_err(|error| FileError::new("rename the download to", target, error))?;
        // The temporary name no longer exists, so there is nothing to remove.
        let _ = sync_folder(folder_of(target));
        Ok(())
    }

    /// Removes the unfinished file if a write failed, so that a full disk gets some space back.
    fn written(&mut self, result: io::Result<()>) -> Result<(), SourceError> {
        result.map_err(|error| {
            self.keep = false;
            FileError::new("write", &self.path, error).into()
        })
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if !self.keep || self.done() == 0 {
            let _ = fs::remove_file(&self.path);
        }
    }
}
