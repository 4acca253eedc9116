//! The record beside a model: what its bytes were when they were last looked at, so that a large
//! file is hashed once, and a file that has changed since is not used as if nothing had happened.
//!
//! The record is believed as long as the file's size, times and inode stay the same, it describes the
//! file's tensors, and it carries the proof ([`seal`]) that this user's programs wrote it on this
//! machine. Without that it would be the word of whoever can write beside the model: one that came with
//! the file, or that another user put there, says that any weights are the genuine ones.
//! Every write through the file system changes the time of the last
//! change of the inode, which no program can set back; what happens below the file system (a disk
//! that forgets) only [`ModelFile::verify`] sees, which reads all bytes.
//!
//! Where the record no longer fits, everything is hashed again. A file that turns out to be what
//! it was gets a new record; one that is not is refused until somebody accepts it
//! ([`ModelFile::accept`]), or it is fetched again. What the catalogue pins overrules any record.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::seal::{MAC_BYTES, seal};
use super::{Digest, MAX_MANIFEST_BYTES, Manifest, WeightsId};
use crate::atomic_file;
use crate::catalogue::{ModelEntry, Pinned};
use crate::model_file::ModelFile;
use crate::regular_file;

/// What tells one state of a file from another without reading it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Stamp {
    bytes: u64,
    /// Since the beginning of 1970, UTC.
    modified_ns: u64,
    /// The last change of the inode, in nanoseconds, where there is one: unlike the time of
    /// modification it cannot be set.
    changed_ns: Option<i128>,
    inode: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    stamp: Stamp,
    /// The canonical encoding.
    manifest: ciborium::Value,
    /// SHA-256 of everything before the tensors: tokenizer, template, hyperparameters.
    head: Digest,
}

/// A record, decoded.
struct Record {
    stamp: Stamp,
    looked: Looked,
}

/// Everything that was read of a file.
#[derive(PartialEq)]
struct Looked {
    manifest: Manifest,
    head: Digest,
}

/// What is known of a model file without reading it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FileState {
    /// It is as it was when all of it was read, and its weights are these.
    Verified(WeightsId),
    /// It was read once, and has been written to since, or moved.
    Changed,
    /// Nobody has read all of it, or nobody wrote down that they did.
    Unverified,
}

/// A file that is not what it was, or not what the catalogue pins.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{} is not {than}: {what}", path.display())]
#[non_exhaustive]
pub struct ChangedError {
    /// The file.
    pub path: PathBuf,
    /// What it was compared with, continuing "is not".
    than: &'static str,
    /// What differs.
    what: String,
    /// Whether the catalogue says what it must be; else an earlier look at it does, and
    /// [`ModelFile::accept`] can overrule that.
    pub pinned: bool,
}

/// The state of a file now, if there is one.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let info = fs::metadata(path).ok()?;
    let modified = info.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    #[cfg(unix)]
    let (changed_ns, inode) = {
        use std::os::unix::fs::MetadataExt as _;
        let changed = i128::from(info.ctime()) * 1_000_000_000 + i128::from(info.ctime_nsec());
        (Some(changed), Some(info.ino()))
    };
    #[cfg(not(unix))]
    let (changed_ns, inode) = (None, None);
    Some(Stamp {
        bytes: info.len(),
        modified_ns: u64::try_from(modified.as_nanos()).ok()?,
        changed_ns,
        inode,
    })
}

/// Where the record of a model lies.
pub fn record_path(model: &Path) -> PathBuf {
    let mut name = OsString::from(model);
    name.push(".hearthnet");
    PathBuf::from(name)
}

fn read(path: &Path) -> Option<Record> {
    // A little more than the manifest itself.
    let most = MAX_MANIFEST_BYTES as u64 + 512;
    let bytes = regular_file::read(&record_path(path), most).ok()?;
    let (mac, bytes) = bytes.split_first_chunk::<MAC_BYTES>()?;
    if seal(bytes)? != *mac {
        return None;
    }
    let kept: Kept = ciborium::de::from_reader_with_recursion_limit(bytes, 4).ok()?;
    Some(Record {
        stamp: kept.stamp,
        looked: Looked {
            manifest: Manifest::decode(kept.manifest.as_bytes()?).ok()?,
            head: kept.head,
        },
    })
}

/// What is known of the file at `path` without reading it.
pub fn file_state(path: &Path) -> FileState {
    match read(path) {
        None => FileState::Unverified,
        Some(record) if Some(record.stamp) == stamp(path) => {
            FileState::Verified(record.looked.manifest.weights_id())
        }
        Some(_) => FileState::Changed,
    }
}

/// Keeps what was just read. The file must not have changed since it was opened.
fn store(model: &ModelFile, looked: &Looked) -> io::Result<()> {
    let path = model.path().ok_or(io::ErrorKind::Unsupported)?;
    let now = stamp(path).ok_or(io::ErrorKind::Unsupported)?;
    if model.gguf().modified() != fs::metadata(path)?.modified().ok()
        || now.bytes != model.gguf().file_bytes()
    {
        return Err(io::Error::other(
            "the model file changed while it was hashed",
        ));
    }
    let kept = Kept {
        stamp: now,
        manifest: ciborium::Value::Bytes(looked.manifest.encode()),
        head: looked.head,
    };
    let mut bytes = Vec::new();
    ciborium::into_writer(&kept, &mut bytes).map_err(io::Error::other)?;
    let mac = seal(&bytes).ok_or(io::ErrorKind::Unsupported)?;
    atomic_file::write(&record_path(path), &[&mac[..], &bytes].concat())
}

/// Keeps what was read where that is possible: a folder that cannot be written costs another
/// reading, and no more.
fn remember(model: &ModelFile, looked: &Looked) {
    if let Err(error) = store(model, looked)
        && error.kind() != io::ErrorKind::Unsupported
    {
        tracing::debug!(%error, "what was read is not kept beside the model");
    }
}

fn look(model: &ModelFile, progress: &mut dyn FnMut(u64, u64)) -> Looked {
    let manifest = Manifest {
        spec: model.stored_spec(),
        ..Manifest::of(model, progress)
    };
    Looked {
        manifest,
        head: Digest::of(model.gguf().head()),
    }
}

impl ModelFile {
    /// The file's manifest. Hashing reads the whole file, so the result is kept in a small file
    /// beside it (`NAME.gguf.hearthnet`) where that is possible, and used again as long as the
    /// model stays untouched. A record that says otherwise is left as it is ([`Self::check`]
    /// refuses the file then). `progress` gets the bytes done and the bytes in all; it is not
    /// called when nothing has to be hashed.
    pub fn manifest(&self, progress: &mut dyn FnMut(u64, u64)) -> Manifest {
        let record = self.path().and_then(read);
        if let Some(record) = record.as_ref().filter(|r| self.is_as(r)) {
            return self.in_use(record.looked.manifest.clone());
        }
        let looked = look(self, progress);
        if record.is_none_or(|record| record.looked == looked) {
            remember(self, &looked);
        }
        self.in_use(looked.manifest)
    }

    /// The same, for a file that is to be used: it must be what it was when it was first used,
    /// and, if `pin` is given, what the catalogue says. Nothing is read as long as it is untouched.
    ///
    /// # Errors
    /// When it is not.
    pub fn check(
        &self,
        pin: Option<&ModelEntry>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Manifest, ChangedError> {
        let record = self.path().and_then(read);
        // A record knows the weights, not the whole file: where only its digest is pinned, all of
        // it is read.
        let as_pinned = |record: &Record| {
            pinned(pin).is_none_or(|pin| pin.weights == Some(record.looked.manifest.weights_id()))
        };
        let fits = |record: &&Record| self.is_as(record) && as_pinned(record);
        match record.as_ref().filter(fits) {
            Some(record) => Ok(self.in_use(record.looked.manifest.clone())),
            None => self.compare(record, pin, progress),
        }
    }

    /// The same, but all bytes are read in any case.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn verify(
        &self,
        pin: Option<&ModelEntry>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Manifest, ChangedError> {
        self.compare(self.path().and_then(read), pin, progress)
    }

    /// Takes the file as it is now, whatever it was; its manifest.
    pub fn accept(&self, progress: &mut dyn FnMut(u64, u64)) -> Manifest {
        let looked = look(self, progress);
        remember(self, &looked);
        self.in_use(looked.manifest)
    }

    fn compare(
        &self,
        record: Option<Record>,
        pin: Option<&ModelEntry>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Manifest, ChangedError> {
        let looked = look(self, progress);
        let pin = pinned(pin);
        let refuse = |than, what: String| ChangedError {
            path: self.path().unwrap_or(Path::new("")).to_owned(),
            than,
            what,
            pinned: pin.is_some(),
        };
        if let Some(pin) = pin {
            let than = match pin.pinned {
                Pinned::FirstPull => "the file that was pulled first",
                _ => "the file that the catalogue pins",
            };
            let weights = looked.manifest.weights_id();
            if pin.weights.is_some_and(|pinned| pinned != weights) {
                return Err(refuse(than, "its weights are others".to_owned()));
            }
            // The weights' identity leaves tokenizer and template out.
            if let Some(pinned) = pin.sha256 {
                let found = Digest::of(self.gguf().bytes());
                if found != pinned {
                    let what = match pin.weights {
                        Some(_) => "its tokenizer or description is another".to_owned(),
                        None => format!("its SHA-256 is {found} instead of {pinned}"),
                    };
                    return Err(refuse(than, what));
                }
            }
        } else if let Some(Record { looked: was, .. }) = record {
            let than = "what it was when it was last used";
            let (count, all) = differing(&was.manifest, &looked.manifest);
            if count > 0 {
                let what = format!("{count} of {all} tensors differ");
                return Err(refuse(than, what));
            }
            if was.manifest != looked.manifest {
                return Err(refuse(than, "its hyperparameters are others".to_owned()));
            }
            if was.head != looked.head {
                return Err(refuse(
                    than,
                    "its tokenizer or description is another".to_owned(),
                ));
            }
        }
        remember(self, &looked);
        Ok(self.in_use(looked.manifest))
    }

    /// A manifest of the file as it is stored, as one of the file as it is used.
    fn in_use(&self, manifest: Manifest) -> Manifest {
        Manifest {
            spec: self.spec().clone(),
            ..manifest
        }
    }

    /// Whether the file is untouched since the record was made.
    fn is_as(&self, record: &Record) -> bool {
        self.path().and_then(stamp) == Some(record.stamp)
            && record.stamp.bytes == self.gguf().file_bytes()
            && record.looked.manifest.spec == self.stored_spec()
            && record.looked.manifest.lists(self)
    }
}

/// An entry that says what the file must be.
fn pinned(pin: Option<&ModelEntry>) -> Option<&ModelEntry> {
    pin.filter(|pin| pin.sha256.is_some() || pin.weights.is_some())
}

/// How many tensors are not as they were (changed, new or gone), and of how many.
fn differing(was: &Manifest, now: &Manifest) -> (usize, usize) {
    let changed = now.tensors().iter();
    let changed = changed.filter(|entry| was.tensor(&entry.name) != Some(entry));
    let gone = was.tensors().iter();
    let gone = gone.filter(|entry| now.tensor(&entry.name).is_none());
    let gone = gone.count();
    (changed.count() + gone, now.tensors().len() + gone)
}
